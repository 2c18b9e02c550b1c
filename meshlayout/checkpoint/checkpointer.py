"""`Checkpointer`: saves a state during training, and restores it on any mesh.

This file is the public face; the work is elsewhere. `policy` decides when to save and
what to keep, `snapshot` flattens the state, `step_writer` writes a step in a background
thread, `lease` keeps other writers out, `steps` lists steps and restores the same one
on all processes, and `restore` builds the state.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from meshlayout.checkpoint.policy import (
    Schedule,
    check_best,
    check_count,
    metric_values,
    steps_to_delete,
)
from meshlayout.checkpoint.restore import Restored, RestoreOptions, load, to_numpy
from meshlayout.checkpoint.saved_step import SavedStep
from meshlayout.checkpoint.snapshot import host_bytes, snapshot
from meshlayout.checkpoint.step_writer import StepWriter
from meshlayout.checkpoint.steps import Steps
from meshlayout.checkpoint.store import StoreError
from meshlayout.checkpoint.target import LeafRestore
from meshlayout.checkpoint.waits import open_channel, progress
from meshlayout.cluster import activity
from meshlayout.errors import CheckpointError
from meshlayout.layout_map import LayoutMap
from meshlayout.state.create import StateDescription


logger = logging.getLogger("meshlayout.checkpoint")

_T = TypeVar("_T")


class Checkpointer:
    """Saves a state during training, and restores it on any mesh.

    Use this in a training loop whose saves and restores you place yourself; `Loop` and
    `Trainer` also resume the data and the metrics with it.

    A step is saved completely or not at all: it exists once its manifest is in place,
    which happens last and atomically. A killed process, a full disk or an unwritable
    directory leaves the earlier steps intact. A restore verifies every bit that it
    reads.

    An asynchronous save returns as soon as the state may be donated to the next step.
    Until it finishes it holds a copy of this process's shards in host memory
    (`memory(state)` bytes) and encoded bytes that are not written yet: about two and a
    half times `memory(state)` in total, as measured. Only one save runs at a time; the
    next one waits for it. An error in the background is raised once, by the next call
    of any method. Use a checkpointer in a `with` block, or close it. If the process
    ends in any other way, even by an exception or Ctrl-C, a running save is finished
    first.

    Only one run at a time may save to a directory. The first save claims it until the
    checkpointer is closed or the process ends; another run that tries to save there
    gets an error. Any number of runs may read. In a job of several processes, all of
    them open the checkpointer, and save and restore the same steps in the same order.

    In Google Cloud Storage, too, a step appears when its manifest is written, and
    disappears when the manifest is deleted, before any other file. Steps that other
    machines save are visible immediately. A store that refuses or does not answer is an
    error, never an empty directory or a damaged step.

    Opening a checkpointer removes the leftovers of dead processes, and nothing that a
    checkpointer did not write.

    Args:
        directory: Where to save: a local path, or `gs://bucket/run` in Google Cloud
            Storage, which needs gcsfs (the extra `gcs`).
        keep: How many of the latest steps to keep; None for all.
        keep_every: Also keep steps that are multiples of this number.
        every: Save only when this many steps have passed since the last save.
        every_s: Save only when this many seconds have passed, by the clock of process
            0, which the other processes ask at every call of `save`.
        async_save: Whether `save` returns while the files are still being written.
        best: The name of a metric, and `"max"` or `"min"`: also keep the step with the
            best value.

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
        self._keep = check_count("keep", keep)
        self._keep_every = check_count("keep_every", keep_every)
        self._best = check_best(best)
        self._async = _checks.flag("async_save", async_save, error=CheckpointError)
        # A channel pairs messages by their order, and a save in the background may end
        # before or after any call of the main thread: each thread has its own channel.
        self._main = open_channel("the same save or restore")
        self._background = open_channel("the end of a save", is_patient=True)
        self._steps = Steps(self.directory, self._best, self._main)
        self._schedule = Schedule(every, every_s, self._steps.all, self._main)
        self._main.on_first(self._open)

    def _open(self) -> None:
        """Creates the directory, and removes what dead processes left in it."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._clean()
        except StoreError as error:
            raise CheckpointError(str(error)) from error  # a class that users know
        except OSError as error:
            msg = (
                f"the checkpoint directory {self.directory} cannot be used: {error}. "
                "Give a directory that this process may write to."
            )
            raise CheckpointError(msg) from error

    def _clean(self) -> None:
        try:
            attempt.clean(self.directory)
        except OSError as error:
            # A warning only: the directory may be read-only, and restored from.
            what = "leftovers of unfinished saves in"
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
            data: The input iterator, whose position is saved with the state: an object
                with `get_state()` and `set_state(state)`.
            metadata: Other values: numbers, strings, lists and dicts of them; or a
                function that returns them, which is called only if a save is due.
            metrics: Metrics by name, for `best`.
            force: Whether to save even if no save is due.

        Returns:
            Whether the state is being saved, or was.

        Raises:
            CheckpointError: If the state cannot be saved, or an earlier save failed in
                the background.
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
        # Two saves at a time would hold two copies of the state in host memory.
        self.wait()
        positions = None if data is None else positions_of(data, self._main)
        with _undisturbed():
            leaves, arrays = snapshot(state)
        if callable(metadata):
            _checks.function("metadata", metadata, error=CheckpointError)
            with _checks.noted("in the function that save(metadata=...) was given"):
                metadata = metadata()
        # Assigned before it starts: an interrupt in between must not lose the save.
        self._saving = StepWriter(
            directory=self.directory,
            step=step,
            leaves=leaves,
            arrays=arrays,
            data=positions,
            metadata=encode({} if metadata is None else metadata, "metadata"),
            metrics=metric_values(metrics, self._best),
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
        """Waits until the last save has finished.

        Raises:
            CheckpointError: If it failed.
        """
        saving = self._saving
        if saving is None:
            return
        if not saving.is_done:
            size = _render.bytes_text(saving.nbytes)
            with progress(f"saving step {saving.step}, {size}"):
                saving.wait()
        # Only now: after Ctrl-C during the wait, it can be waited for again.
        self._saving = None
        saving.settle()

    def close(self) -> None:
        """Waits for the running save, and refuses further ones.

        Raises:
            CheckpointError: If the running save failed.
        """
        self._closed = True
        try:
            self.wait()
        finally:
            # If the wait was interrupted, the save still runs and needs the lease.
            if self._saving is None:
                Lease.release(self.directory, self)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        try:
            self.close()
        except CheckpointError as problem:
            if error is None:
                raise
            # The error of the block came first, and is the one to look at.
            error.add_note(f"Moreover, {problem}")

    def memory(self, state: PyTree) -> int:
        """Returns the bytes of the copy that a save holds on this host.

        Use this before a run, to see whether asynchronous saves fit into host memory.
        Encoding and writing the copy takes up to one and a half times as many bytes
        again, measured with `benchmarks/checkpoint.py`.

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
        """Returns the saved steps in ascending order; a running save is not one yet."""
        self._raise_pending()
        return self._steps.all()

    def latest_step(self) -> int | None:
        """Returns the highest saved step, or None."""
        self._raise_pending()
        return max(self._steps.all(), default=None)

    def best_step(self) -> int | None:
        """Returns the step with the best value of a metric, or None if none has it.

        Raises:
            CheckpointError: If the checkpointer was opened without `best=`.
        """
        self._raise_pending()
        return self._steps.best()

    def inspect(self, step: int | Literal["latest", "best"] = "latest") -> Inspection:
        """Returns a table of a checkpoint's contents, without loading any array.

        Use this to see what a checkpoint holds, and on which mesh it was saved. It
        waits for a running save.

        Args:
            step: The step.

        Raises:
            CheckpointError: If the step does not exist.
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
            layouts: The layouts of the arrays, if not those of `like`.
            data: The input iterator, which is moved to its saved position. One that
                cannot go there directly is read up to it.
            partial: Whether arrays of `like` may be missing, and keep their values, and
                extra saved arrays are ignored.
            rename: `{pattern: replacement}`, applied to the saved paths as by
                `re.sub`, for example `{r"^encoder/": "model/encoder/"}`.
            only: A pattern of the paths to restore, for example `r"^params/"`; all
                other arrays of `like` keep their values.
            allow: Patterns of paths that may differ in any way, and keep their values.
            dtype: A dtype for every array of its kind, or `{pattern: dtype}`. All
                others must have been saved in the dtype of `like`.
            verify: Whether to verify what is read against the saved fingerprints.
            fallback: Whether to restore the newest intact step if this one is damaged,
                with a warning.

        Returns:
            A tree of the same type as `like`.

        Raises:
            RestoreDiffError: If the saved arrays do not match `like`.
            DamagedCheckpointError: If files or arrays are damaged; it names them.
            CheckpointError: If the step does not exist.

        Warns:
            CheckpointWarning: If `fallback` restored another step.
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

        Use this to look into a checkpoint, or to convert it. No device is used; PRNG
        keys are returned as the uint32 words they consist of.

        Args:
            step: As for `restore`.
            verify: As for `restore`.
            fallback: As for `restore`.

        Raises:
            DamagedCheckpointError: If files or arrays are damaged.
            CheckpointError: If the step does not exist.
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
        activity.now.name = f"restoring step {step} of {self.directory}"
        activity.now.moves += 1
        result, number = self._steps.restored(
            step, read, verify=verify, fallback=fallback
        )
        activity.now.moves += 1
        newest = f"step {number} in {self.directory}"
        activity.now.checkpoint = activity.now.checkpoint or newest
        # The next save is due `every` steps after the one that the run goes on from.
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
                "saved without data=. Restore without data=, and move the iterator "
                "yourself."
            )
            raise CheckpointError(msg)
        return read_positions(self._steps.folder(manifest.step) / manifest.data)

    def _has_steps(self) -> bool:
        """Returns whether there is a step, as process 0 sees it."""
        self.wait()
        return self._main.on_first(lambda: bool(self._steps.with_manifest()))

    # Inside.

    def _raise_pending(self) -> None:
        """Raises the error of a save that has finished, without waiting for others."""
        if self._saving is not None and self._saving.is_done:
            self.wait()

    def _clear_up(self, step: int) -> None:
        """Deletes the steps that retention does not keep; on process 0, after a save.

        Args:
            step: The step that was just saved, which stays in any case.
        """
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


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Suspends the caller's active mesh and transfer guards.

    Saving moves arrays to the host on purpose, and under `jax.set_mesh` of another mesh
    JAX would refuse programs on the arrays of the state.
    """
    with _jax.no_mesh(), jax.transfer_guard("allow"):
        yield
