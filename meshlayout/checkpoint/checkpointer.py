"""`Checkpointer`: saves a state as training goes, and restores it on any mesh."""

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar, Unpack, overload

import jax

from meshlayout import _checks, _jax, _render
from meshlayout._annotations import Metadata, PyTree
from meshlayout.checkpoint import attempt, files
from meshlayout.checkpoint.data_state import (
    Continues,
    move_to_position,
    positions_of,
    read_positions,
)
from meshlayout.checkpoint.lease import Lease
from meshlayout.checkpoint.manifest import Inspection, Manifest, encode
from meshlayout.checkpoint.pairs import Dtypes, Request
from meshlayout.checkpoint.restore import Restored, RestoreOptions, load, to_numpy
from meshlayout.checkpoint.saved_step import SavedStep
from meshlayout.checkpoint.snapshot import host_bytes, snapshot
from meshlayout.checkpoint.step_writer import StepWriter
from meshlayout.checkpoint.steps import Steps, steps_to_delete
from meshlayout.checkpoint.store import StoreError
from meshlayout.checkpoint.target import LeafRestore
from meshlayout.checkpoint.waits import on_first, open_channel, progress
from meshlayout.cluster.process_sync import Channel
from meshlayout.errors import CheckpointError, did_you_mean
from meshlayout.layout_map import LayoutMap
from meshlayout.state.create import StateDescription


logger = logging.getLogger("meshlayout.checkpoint")

_T = TypeVar("_T")


class Checkpointer:
    """Saves a state as training goes, and restores it on any mesh.

    A step is saved completely or not at all: it exists once its manifest is in place,
    which happens last and atomically. A killed process, a full disk or a directory that
    is not writable leave the earlier steps intact. A restore verifies every bit that it
    reads.

    An asynchronous save returns as soon as the state may be donated to the next step.
    Until it is done it holds a copy of this process's shards in host memory, as many
    bytes as `memory(state)` returns, plus encoded bytes that are not written yet: in
    measurements, two and a half times as much in total. Only one save runs at a
    time; the next one waits for it. An error in the background is raised once, by the
    next call of any method. Use it in a `with` block, or close it. A process that ends
    in another way, even by an exception or Ctrl-C, first finishes a running save.

    Only one run at a time may save to a directory. The first save claims it until the
    checkpointer is closed or the process ends; another run that saves there gets an
    error. Any number may read. In a job of several processes, all of them open the
    checkpointer, and save and restore the same steps in the same order.

    In Google Cloud Storage a step also appears when its manifest is written, and
    disappears when the manifest is deleted, before any other file. Steps that other
    machines save are visible immediately. A store that refuses or does not answer is an
    error, and is never taken for an empty directory or a damaged step.

    Opening it removes the leftovers of dead processes, and nothing that a checkpointer
    did not write.

    Args:
        directory: Where to save: a local path, or `gs://bucket/run` in Google Cloud
            Storage, which needs gcsfs (the extra `gcs`).
        keep: How many of the latest steps to keep; None for all.
        keep_every: Also keep steps that are multiples of this number.
        every: Save only when this many steps have passed since the last save.
        every_s: Save only when this many seconds have passed, by the clock of process
            0, with which the others synchronize at every call.
        async_save: Whether `save` returns while the files are still being written.
        best: A metric's name and `"max"` or `"min"`: also keep the step with the best
            value.

    Raises:
        CheckpointError: If an argument is wrong, or the directory cannot be used.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> directory = tempfile.mkdtemp()
        >>> with Checkpointer(directory, keep=2) as ck:
        ...     for step in range(1, 4):
        ...         _ = ck.save(step, {"w": np.full(3, step, np.float32)})
        ...     ck.wait()
        ...     print(ck.all_steps(), ck.restore_numpy()["w"])
        [2, 3] [3. 3. 3.]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        keep_every: int | None = None,
        every: int | None = None,
        every_s: float | None = None,
        async_save: bool = True,
        best: tuple[str, Literal["max", "min"]] | None = None,
    ) -> None:
        self._saving: StepWriter | None = None
        self._closed = False
        self.directory = files.as_directory(directory)
        self._keep = _check_count("keep", keep)
        self._keep_every = _check_count("keep_every", keep_every)
        self._best = _check_best(best)
        self._async = _checks.flag("async_save", async_save, error=CheckpointError)
        self._main = open_channel("the same save or restore")
        self._steps = Steps(self.directory, self._best, self._main)
        self._background = open_channel("the end of a save", is_patient=True)
        every = _check_count("every", every)
        self._schedule = _Schedule(every, every_s, self._steps, self._main)
        on_first(self._main, self._open)

    def _open(self) -> None:
        """Creates the directory, and removes what dead processes left in it."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            msg = (
                f"the checkpoint directory {self.directory} cannot be used: {error}. "
                "Give a directory that this process may write to."
            )
            raise CheckpointError(msg) from error
        except StoreError as error:
            raise CheckpointError(str(error)) from error
        try:
            attempt.clean(self.directory)
        except StoreError as error:
            raise CheckpointError(str(error)) from error
        except OSError as error:
            # Its checkpoints can be read nevertheless.
            what = "what is left of unfinished saves in"
            logger.warning("%s %s cannot be removed: %s", what, self.directory, error)

    # Saving.

    def save(
        self,
        step: int,
        state: PyTree,
        *,
        data: Continues | None = None,
        metadata: Metadata | Callable[[], Metadata] | None = None,
        metrics: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Saves a state, if a save is due.

        The state may be donated as soon as this returns. A step that already exists is
        replaced once the new files are complete.

        Args:
            step: The number of the step.
            state: Any tree of arrays and numbers: a `TrainState`, an NNX module,
                Linen variables, an Optax state.
            data: The iterator of the input, to be continued from here: an object with
                `get_state()` and `set_state(state)`.
            metadata: Other values: numbers, texts, lists and dicts of them; or a
                function that returns them, which is called if the save is due.
            metrics: Metrics by name, for `best`.
            force: Whether to save although it is not due.

        Returns:
            Whether it was due.

        Raises:
            CheckpointError: If the state cannot be saved, or an earlier save in the
                background could not.
        """
        self._raise_pending()
        if self._closed:
            msg = (
                f"the checkpointer of {self.directory} is closed. Save inside its "
                "'with' block, or open another one."
            )
            raise CheckpointError(msg)
        step = _checks.count("step", step, at_least=0, error=CheckpointError)
        force = _checks.flag("force", force, error=CheckpointError)
        if not force and not self._schedule.is_due(step):
            return False
        self.wait()
        positions = None if data is None else positions_of(data, self._main)
        with _undisturbed():
            leaves, arrays = snapshot(state)
        if callable(metadata):
            _checks.function("metadata", metadata, error=CheckpointError)
            with _checks.noted("in the function that save(metadata=...) was given"):
                metadata = metadata()
        # Assigned before it starts, so that an interrupt does not lose track of it.
        self._saving = StepWriter(
            directory=self.directory,
            step=step,
            leaves=leaves,
            arrays=arrays,
            data=positions,
            metadata=encode({} if metadata is None else metadata, "metadata"),
            metrics=_check_metrics(metrics, self._best),
            hold=functools.partial(Lease.hold, self.directory, self),
            channel=self._background,
            after=functools.partial(self._clear_up, step),
        )
        with _undisturbed():
            self._saving.start(self._main)
        self._schedule.saved(step)
        if not self._async:
            self.wait()
        return True

    def wait(self) -> None:
        """Waits for the last save.

        Raises:
            CheckpointError: If it could not be saved.
        """
        saving = self._saving
        if saving is None:
            return
        if not saving.is_done:
            size = _render.bytes_text(saving.nbytes)
            with progress(f"saving step {saving.step}, {size}"):
                saving.wait()
        # Only now: after Ctrl-C in the wait, the save can be waited for again.
        self._saving = None
        saving.settle()

    def close(self) -> None:
        """Waits for the running save, and refuses further saves.

        Raises:
            CheckpointError: If it could not be saved.
        """
        self._closed = True
        try:
            self.wait()
        finally:
            if self._saving is None:  # else interrupted: it continues
                Lease.release(self.directory, self)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except CheckpointError as problem:
            if error is None:
                raise
            error.add_note(f"Moreover, {problem}")

    def memory(self, state: PyTree) -> int:
        """Returns the bytes of the copy that a save holds on this host.

        Encoding and writing it takes up to one and a half times as many again, measured
        with `benchmarks/checkpoint.py`.

        Args:
            state: The state, or its shapes with shardings (from `ml.describe`).

        Example:
            >>> import tempfile, jax.numpy as jnp
            >>> Checkpointer(tempfile.mkdtemp()).memory({"w": jnp.zeros((8, 4))})
            128
        """
        return host_bytes(state)

    # Queries.

    @property
    def best(self) -> tuple[str, str] | None:
        """The metric that selects the best step, and `"max"` or `"min"`; or None."""
        return self._best

    def all_steps(self) -> list[int]:
        """Returns the saved steps in ascending order, without a running save."""
        self._raise_pending()
        return self._steps.all()

    def latest_step(self) -> int | None:
        """Returns the highest saved step, or None."""
        self._raise_pending()
        return max(self._steps.all(), default=None)

    def best_step(self) -> int | None:
        """Returns the step with the best metric, or None if no step has it.

        Raises:
            CheckpointError: If the checkpointer was made without `best=`.
        """
        self._raise_pending()
        return self._steps.best()

    def inspect(self, step: int | Literal["latest", "best"] = "latest") -> Inspection:
        """Returns a table of a checkpoint's contents, without loading it.

        It waits for a running save.

        Args:
            step: The step.

        Raises:
            CheckpointError: If there is no such step.
        """
        self.wait()
        return Inspection.of(self._steps.manifest(self._steps.chosen(step)))

    # Restoring.

    @overload
    def restore(
        self,
        like: LayoutMap | None = None,
        **options: Unpack[RestoreOptions],
    ) -> Any: ...

    @overload
    def restore(
        self, like: StateDescription[_T], **options: Unpack[RestoreOptions]
    ) -> _T: ...

    @overload
    def restore(self, like: _T, **options: Unpack[RestoreOptions]) -> _T: ...

    def restore(
        self,
        like: PyTree = None,
        *,
        step: int | Literal["latest", "best"] = "latest",
        layouts: LayoutMap | None = None,
        data: Any = None,
        partial: bool = False,
        rename: Mapping[str, str] | None = None,
        only: str | None = None,
        allow: str | Sequence[str] = (),
        dtype: Dtypes = None,
        verify: bool = True,
        fallback: bool = False,
    ) -> Any:
        r"""Returns a state with the values that were saved.

        Every device reads only its own slices, whatever mesh, layouts and number of
        processes the state was saved on. Every bit that is read is verified.

        Args:
            like: The state to restore into: a concrete one, whose values are ignored
                and whose arrays set shape, dtype and layout; or an abstract one
                (`ml.describe`, `jax.eval_shape`), on one device where it has no
                sharding; or a layout map, for nested dicts of all saved arrays.
                None for nested dicts on one device, without any mesh.
            step: The step; `"latest"`, or `"best"` by the metric of `best`.
            layouts: Where arrays go, if not where those of `like` are.
            data: The iterator of the input, to be continued as it was: one that
                cannot go to a place is read up to it.
            partial: Whether arrays may be missing, which then stay as they are in
                `like`, and extra, which are then not read.
            rename: `{pattern: replacement}`, applied to the saved paths as by
                `re.sub`, as `{r"^encoder/": "model/encoder/"}`.
            only: A pattern of paths: all others stay as they are in `like`, as
                `r"^params/"`.
            allow: Patterns of paths that may differ in any way, and then stay.
            dtype: Another dtype for every array of its kind, or `{pattern: dtype}`.
            verify: Whether to check what is read against the saved fingerprints.
            fallback: Whether to take the newest intact step where one is damaged,
                with a warning.

        Returns:
            A tree of the type of `like`.

        Raises:
            RestoreDiffError: If the saved arrays do not match `like`.
            DamagedCheckpointError: If files or arrays are damaged; it names them.
            CheckpointError: If there is no such step.

        Warns:
            CheckpointWarning: If `fallback` took another step.
        """
        self._raise_pending()
        request = Request(
            like=like,
            layouts=layouts,
            rename=rename,
            partial=partial,
            only=only,
            allow=allow,
            dtype=dtype,
        )

        def read(
            source: SavedStep, manifest: Manifest
        ) -> tuple[tuple[Any, list[Any]], Sequence[LeafRestore]]:
            positions = [] if data is None else self._positions(manifest)
            restored = self._loaded(source, request)
            return (restored.state, positions), restored.restores

        state, positions = self._restored(step, read, verify=verify, fallback=fallback)
        if data is not None:
            move_to_position(data, positions)
        return state

    def restore_numpy(
        self,
        *,
        step: int | Literal["latest", "best"] = "latest",
        verify: bool = True,
        fallback: bool = False,
    ) -> Any:
        """Returns all saved values as nested dicts of NumPy arrays.

        No device is used; PRNG keys come as their words.

        Args:
            step: As for `restore`.
            verify: As for `restore`.
            fallback: As for `restore`.

        Raises:
            DamagedCheckpointError: If files or arrays are damaged.
            CheckpointError: If there is no such step.
        """
        self._raise_pending()

        def read(source: SavedStep, manifest: Manifest) -> tuple[Any, list[Any]]:
            with _undisturbed():
                return to_numpy(source), []

        return self._restored(step, read, verify=verify, fallback=fallback)

    def _restored(
        self,
        step: int | str,
        read: Callable[[SavedStep, Manifest], tuple[_T, Sequence[LeafRestore]]],
        *,
        verify: bool,
        fallback: bool,
    ) -> _T:
        self.wait()
        result, number = self._steps.restored(
            step, read, verify=verify, fallback=fallback
        )
        self._schedule.last_step = number
        return result

    def _loaded(self, source: SavedStep, request: Request) -> Restored:
        with _undisturbed():
            restored = load(source, request)
        if restored.diff:
            logger.info("%s differs: %s", source.name, restored.diff)
        return restored

    def _positions(self, manifest: Manifest) -> list[Any]:
        if manifest.data is None:
            msg = (
                f"step {manifest.step} holds no state of an input iterator: it was "
                "saved without data=. Restore without data=, and place the iterator "
                "yourself."
            )
            raise CheckpointError(msg)
        return read_positions(self._steps.folder(manifest.step) / manifest.data)

    def _has_steps(self) -> bool:
        """Returns whether there is a step, as process 0 sees it."""
        self.wait()
        return on_first(self._main, lambda: bool(self._steps.with_manifest()))

    # Inside.

    def _raise_pending(self) -> None:
        if self._saving is not None and self._saving.is_done:
            self.wait()

    def _clear_up(self, step: int) -> None:
        """Deletes what retention does not keep; on process 0, after a save."""
        steps = self._steps.all()
        for old in steps_to_delete(
            steps,
            keep=self._keep,
            keep_every=self._keep_every,
            best=self._best,
            metrics=self._steps.metrics(steps),
            newest=step,
        ):
            try:
                lease = Lease.hold(self.directory, self)
                attempt.delete(self._steps.folder(old), lease)
            except (OSError, StoreError) as error:
                why = error.fact if isinstance(error, StoreError) else error
                msg = (
                    f"step {old}, which retention does not keep, could not be deleted: "
                    f"{why}."
                )
                raise CheckpointError(msg) from error
            logger.info("deleted step %d", old)


class _Schedule:
    """Decides when a save is due, by steps or by the clock of process 0.

    Attributes:
        last_step: The step that was saved or restored last; None if not known yet.
    """

    def __init__(
        self, every: int | None, every_s: float | None, steps: Steps, channel: Channel
    ) -> None:
        if every is not None and every_s is not None:
            msg = (
                f"every={every} and every_s={every_s} are both given. Leave one out: "
                "saves are due by steps or by the clock."
            )
            raise CheckpointError(msg)
        if every_s is not None:
            every_s = _checks.number(
                "every_s", every_s, at_least=0, error=CheckpointError
            )
        self._every, self._every_s = every, every_s
        self._steps, self._channel = steps, channel
        self.last_step: int | None = None
        self._last_s = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Returns whether a step is to be saved."""
        if self._every_s is not None:
            passed_s = time.monotonic() - self._last_s
            return self._channel.from_first(passed_s >= self._every_s)
        if self._every is None:
            return True
        if self.last_step is None:
            earlier = [number for number in self._steps.all() if number < step]
            self.last_step = max(earlier, default=0)
        # A call may be several steps after the one before.
        return step // self._every > min(self.last_step, step) // self._every

    def saved(self, step: int) -> None:
        """Records that a step is being saved."""
        self.last_step, self._last_s = step, time.monotonic()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Suspends the caller's active mesh and transfer guards."""
    with _jax.no_mesh(), jax.transfer_guard("allow"):
        yield


# Arguments.


def _check_count(name: str, count: object) -> int | None:
    if count is None:
        return None
    hint = "None leaves it out."
    return _checks.count(name, count, error=CheckpointError, hint=hint)


def _check_best(
    best: tuple[str, Literal["max", "min"]] | None,
) -> tuple[str, str] | None:
    if best is None:
        return None
    if (
        not isinstance(best, tuple)
        or len(best) != 2
        or not isinstance(best[0], str)
        or not isinstance(best[1], str)
        or best[1] not in ("max", "min")
    ):
        msg = (
            f"best={_checks.shown(best)} is not a metric's name and 'max' or 'min'. "
            "Write best=('val_accuracy', 'max')."
        )
        raise CheckpointError(msg)
    return best


def _check_metrics(
    metrics: Mapping[str, Any] | None, best: tuple[str, str] | None
) -> dict[str, float]:
    """Returns metrics as floats; NaN is allowed, and is never the best."""
    if metrics is not None and not isinstance(metrics, Mapping):
        msg = (
            f"metrics must be numbers by name, got {_checks.shown(metrics)}. Write "
            "metrics={'val_accuracy': 0.9}."
        )
        raise CheckpointError(msg)
    for name in metrics or {}:
        if not isinstance(name, str):
            msg = f"metrics= holds the name {_checks.shown(name)}: names are strings."
            raise CheckpointError(msg)
    numbers = {
        name: _checks.number(
            f"metrics[{name!r}]", value, finite=False, error=CheckpointError
        )
        for name, value in (metrics or {}).items()
    }
    if numbers and best is not None and best[0] not in numbers:
        name = best[0]
        msg = (
            f"best={best!r} needs the metric {name!r}, and metrics= holds "
            f"{', '.join(map(repr, numbers))}.{did_you_mean(name, numbers)}"
        )
        raise CheckpointError(msg)
    return numbers
