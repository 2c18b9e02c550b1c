"""`Checkpointer`: saves a state during training, and restores it on any mesh.

A save runs in a thread of its own, where Ctrl-C cannot cut Orbax in two; the caller
waits until the state may be donated. An Event tells of the end: `Thread.join` cannot be
trusted, as in Python 3.11 and 3.12 an exception inside it, such as Ctrl-C, marks a
running thread as stopped.

All processes must agree on each outcome, or some would wait forever for the others. So
each exchange is reached on every path: a process that fails sends its error instead of
its result, and all of them raise the first one.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
import logging
import os
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import jax
from jax.typing import DTypeLike

from meshlayout import _checks, _render
from meshlayout._annotations import Metadata, PyTree
from meshlayout.checkpoint import directory as steps, orbax
from meshlayout.checkpoint.inspection import Inspection
from meshlayout.checkpoint.load import load, to_numpy
from meshlayout.checkpoint.match import Request
from meshlayout.checkpoint.policy import (
    best_of,
    check_best,
    check_count,
    is_due,
    metric_values,
    steps_to_delete,
)
from meshlayout.checkpoint.positions import (
    Continues,
    as_json,
    from_json,
    joined,
    move_to_position,
    position_of,
)
from meshlayout.checkpoint.preemption import Preempted, Preemption
from meshlayout.checkpoint.tree import replica_sums, saved_leaves
from meshlayout.cluster import activity
from meshlayout.cluster.channel import Channel
from meshlayout.errors import (
    CheckpointError,
    CheckpointWarning,
    DamagedCheckpointError,
    stack_level,
)
from meshlayout.layout_map import LayoutMap
from meshlayout.state.create import StateDescription


logger = logging.getLogger("meshlayout.checkpoint")

T = TypeVar("T")

# Checkpointers are opened in the same order on all processes, so the numbers agree.
_numbers = itertools.count()

# Longer than a slow store takes for a large file, and short enough for a job that hangs
# to end by itself.
_TIMEOUT_S = 1200.0

# A process that does not take part is usually a mistake in the program: say so soon.
_WARN_AFTER_S = 10.0

# How long the directory of another process may take to appear here.
_SHARED_S = 5.0

# How often a process that waits for Orbax looks whether another one has failed.
_PEEK_S = 1.0

# What the processes have to agree on at each save, by the names in their messages.
_AGREED = {
    "tree": "paths, shapes or dtypes",
    "replicas": "the values of replicated arrays or numbers",
}

# Other runs may delete the step that is read, with `keep=1` several in a row.
_ATTEMPTS = 20


class _GoneError(CheckpointError):
    """A step was deleted or replaced by another run while it was read."""


class Checkpointer:
    """Saves a state during training, and restores it on any mesh.

    Use this in a training loop of your own, as below, or give it to the callback
    `Checkpoint` of a `Trainer`.

    A step is saved completely or not at all. A killed process, a full disk or an
    unwritable directory leaves the earlier steps intact, and a step that is saved again
    is there at every moment, as it was or as it is now. A restore compares all files
    with what was saved. A step is a plain directory of Orbax, and anyone can load its
    arrays without this package.

    `save` returns as soon as the state may be donated to the next step. Until the files
    are written, a copy of this process's shards stays in host memory. Only one save
    runs at a time; the next one waits for it. An error in the background is raised
    once, by the next call of any method. Use a checkpointer in a `with` block, or close
    it. If the process ends in any other way, even by an exception or Ctrl-C, a running
    save is finished first.

    Only one run at a time may save to a directory. The first save locks it until the
    checkpointer is closed or the process ends. Any number of runs may read. In a job of
    several processes, all of them open the checkpointer, on a directory that they
    share, and save and restore the same steps in the same order. Opening and reading
    change nothing on the disk.

    Args:
        directory: Where to save: a local path, or `gs://bucket/run` in Google Cloud
            Storage, which needs gcsfs (the extra `gcs`) and has no locks.
        keep: How many of the latest steps to keep; None for all.
        keep_every: Also keep steps that are multiples of this number.
        every: Save only when this many steps have passed since the last save.
        best: The name of a metric, and `"max"` or `"min"`: also keep the step with the
            best value.

    Attributes:
        directory: The directory.

    Raises:
        CheckpointError: If an argument is wrong.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> with Checkpointer(tempfile.mkdtemp(), keep=2) as ck:
        ...     state = ck.resume({"w": np.zeros(3, np.float32)})
        ...     for step in range(1, 4):
        ...         state = {"w": state["w"] + 1}
        ...         _ = ck.save(step, state)
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
        best: tuple[str, Literal["max", "min"]] | None = None,
    ) -> None:
        self._saving: _Save | None = None
        self._unlock: Callable[[], Any] | None = None
        self._preemption = contextlib.ExitStack()
        self._is_preempted: Callable[[], bool] = lambda: False
        self._is_closed = False
        self.directory = steps.as_directory(directory)
        self._keep = check_count("keep", keep)
        self._keep_every = check_count("keep_every", keep_every)
        self._every = check_count("every", every)
        self._best = check_best(best)
        self._last: int | None = None  # the step that was saved or restored last
        # A channel pairs messages by their order, and a save in the background may end
        # before or after any call of the main thread: each thread has its own channel.
        number = next(_numbers)
        self._main = _open_channel(f"{number}", "the same save or restore")
        self._background = _open_channel(f"{number}/save", "the end of a save")

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

        Call it after each step of a loop that began with `resume`: after SIGTERM it
        saves, due or not, and ends the process with status 75, "start me again".

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
            CheckpointError: If the state cannot be saved, an earlier save failed in the
                background, or the processes save different states.
            Preempted: After SIGTERM, once the step is saved.
        """
        step = _checks.count("step", step, at_least=0, error=CheckpointError)
        force = _checks.flag("force", force, error=CheckpointError)
        is_preempted = self._is_preempted()
        is_saved = self.save_trees(
            step,
            {"state": state},
            data=data,
            metadata=metadata,
            metrics=metrics,
            force=force or is_preempted,
        )
        if is_preempted:
            self.wait()
            self._preemption.close()
            raise Preempted(step)
        return is_saved

    def save_trees(
        self,
        step: int,
        trees: Mapping[str, PyTree],
        *,
        data: Continues | None,
        metadata: Metadata | Callable[[], Metadata] | None,
        metrics: Mapping[str, Any] | None,
        force: bool,
    ) -> bool:
        """Saves a state and other trees beside it; for `Trainer`, as `save`."""
        self._raise_pending()
        if self._is_closed:
            msg = (
                f"the checkpointer of {self.directory} is closed. Save inside its "
                "'with' block, or open another one."
            )
            raise CheckpointError(msg)
        if not force and not self._is_due(step):
            return False
        # Two saves at a time would hold two copies of the state in host memory.
        self.wait()
        self._take_lock(step)
        facts: dict[str, Any] = {"format": 4, "step": step, "time": time.time()}
        with self._main.failure_told(), orbax.undisturbed():
            with _failures(step, self.directory):
                if jax.process_index() == 0:
                    steps.recover(self.directory)  # what a save that failed left
                    steps.clear(self.directory, step)
            saved = {name: saved_leaves(tree) for name, tree in trees.items()}
            arrays = {name: arrays for name, (_, arrays) in saved.items()}
            facts["items"] = {name: leaves for name, (leaves, _) in saved.items()}
            facts["metrics"] = metric_values(metrics, self._best)
            if callable(metadata):
                _checks.function("metadata", metadata, error=CheckpointError)
                with _checks.noted("in the function that save(metadata=...) was given"):
                    metadata = metadata()
            facts["metadata"] = as_json(metadata, "metadata")
            message = {
                "place": f"step {step} in {self.directory}",
                "tree": hashlib.sha256(repr(facts["items"]).encode()).hexdigest(),
                "replicas": replica_sums(arrays),
                "data": None if data is None else position_of(data),
            }
        messages = list(self._main.exchange(message).values())
        _check_agreement(messages)
        facts["data"] = None if data is None else joined([x["data"] for x in messages])
        self._saving = _Save(self, step, arrays, facts)
        self._last = step
        self._saving.start()
        return True

    def wait(self) -> None:
        """Waits until the last save has finished.

        Raises:
            CheckpointError: If it failed.
        """
        if self._saving is not None:
            error = self._saving.wait()
            # Only now: after Ctrl-C during the wait, it can be waited for again.
            self._saving = None
            if error is not None:
                raise error

    def close(self) -> None:
        """Waits for the running save, and lets other runs save in the directory.

        Raises:
            CheckpointError: If the running save failed.
        """
        self._is_closed = True
        self._preemption.close()
        try:
            self.wait()
        finally:
            # If the wait was interrupted, the save still runs and needs the lock.
            if self._saving is None and self._unlock is not None:
                self._unlock()
                self._unlock = None

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

    def _is_due(self, step: int) -> bool:
        if self._every is not None and self._last is None:
            # A run that continues without a restore. Later steps are of a run that
            # this one replaces: they would suppress saves until it reaches them. Asked
            # of process 0: elsewhere a listing may lag behind.
            self._last = self._main.on_first(
                lambda: max((x for x in self._paths() if x < step), default=0)
            )
        return is_due(step, self._every, self._last or 0)

    def _take_lock(self, step: int) -> None:
        """Locks the directory at the first save, and finds out whether it is shared."""
        if self._unlock is not None:
            return
        is_first, unlock = jax.process_index() == 0, lambda: None
        token = ""
        with self._main.failure_told(), _failures(step, self.directory):
            if is_first:
                self.directory.mkdir(parents=True, exist_ok=True)
                unlock = steps.lock(self.directory, self)
                steps.recover(self.directory)
                if jax.process_count() > 1 and not steps.is_remote(self.directory):
                    token = f".shared-{secrets.token_hex(8)}"
                    (self.directory / token).touch()
        try:
            token = self._main.from_first(token)
            with self._main.failure_told():
                if token:
                    _await_token(self.directory / token)
            self._main.exchange(None)
        except BaseException:
            unlock()
            raise
        finally:
            if is_first and token:
                (self.directory / token).unlink()
        self._unlock = unlock

    # Queries.

    @property
    def best(self) -> tuple[str, str] | None:
        """The metric that selects the best step, and `"max"` or `"min"`; or None."""
        return self._best

    def all_steps(self) -> list[int]:
        """Returns the saved steps in ascending order; a running save is not one yet."""
        self._raise_pending()
        return list(self._paths())

    def latest_step(self) -> int | None:
        """Returns the highest saved step, or None."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """Returns the step with the best value of a metric, or None if none has it.

        Raises:
            CheckpointError: If the checkpointer was opened without `best=`.
        """
        self._raise_pending()
        return self._best_of(self._paths())

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
        path = self._paths()[self._candidates(step, fallback=False)[0]]
        return Inspection.of(steps.read_facts(path), steps.num_bytes(path))

    def _paths(self) -> dict[int, Path]:
        return steps.step_paths(self.directory)

    def _best_of(self, paths: Mapping[int, Path]) -> int | None:
        if self._best is None:
            msg = (
                "there is no best step without a metric. Write "
                "Checkpointer(directory, best=('val_accuracy', 'max'))."
            )
            raise CheckpointError(msg)
        metrics: dict[int, Mapping[str, float]] = {}
        for step, path in paths.items():
            with contextlib.suppress(CheckpointError):  # a damaged one is never best
                metrics[step] = steps.read_facts(path)["metrics"]
        return best_of(self._best, metrics)

    def _candidates(self, step: int | str, *, fallback: bool) -> list[int]:
        """Returns the steps to try, the best choice first; asked of process 0."""
        numbers = list(self._paths())
        if not numbers:
            why = "nothing was saved there yet"
            if not self.directory.exists():
                why = "the directory does not exist, at least not on this machine"
            raise CheckpointError(f"{self.directory} has no checkpoints: {why}.")
        first: int | None
        if step == "latest":
            first = numbers[-1]
        elif step == "best":
            first = self._best_of(self._paths())
            if first is None:
                name = self._best[0] if self._best else ""
                msg = (
                    f"no step in {self.directory} has the metric {name!r}, so none is "
                    "the best. Give it to save(..., metrics={...})."
                )
                raise CheckpointError(msg)
        elif isinstance(step, str):
            msg = f"step must be a number, 'latest' or 'best', got {step!r}."
            raise CheckpointError(msg)
        else:
            listed = ", ".join(map(str, numbers[-10:]))
            if len(numbers) > 10:
                listed += f" (and {len(numbers) - 10} earlier)"
            hint = f"{self.directory} has the steps {listed}."
            first = _checks.count(
                "step", step, at_least=0, error=CheckpointError, hint=hint
            )
            if first not in numbers:
                msg = f"{self.directory} has no step {first}; it has {listed}."
                raise CheckpointError(msg)
        older = [x for x in numbers if x < first or (step == "best" and x != first)]
        return [first, *reversed(older)] if fallback else [first]

    # Restoring.

    @overload
    def restore(self, like: LayoutMap | None = None, **options: Any) -> Any: ...

    @overload
    def restore(self, like: StateDescription[T], **options: Any) -> T: ...

    @overload
    def restore(self, like: T, **options: Any) -> T: ...

    def restore(
        self,
        like: PyTree = None,
        *,
        step: int | Literal["latest", "best"] = "latest",
        layouts: LayoutMap | None = None,
        data: Continues | None = None,
        partial: bool | str | Sequence[str] = False,
        rename: Mapping[str, str] | None = None,
        dtype: DTypeLike | None = None,
        verify: bool = True,
        fallback: bool = False,
    ) -> Any:
        r"""Returns a new state, or a new model, with the values that were saved.

        `like` stays as it is: write `model = checkpointer.restore(model)`. Every device
        reads only its own slices, whatever mesh, layouts and number of processes the
        state was saved on. All files of the step are compared with what was saved.

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
                extra saved arrays are ignored; or patterns of the paths for which this
                holds, and which are not restored.
            rename: `{pattern: replacement}`, applied to the saved paths as by
                `re.sub`, for example `{r"^encoder/": "model/encoder/"}`.
            dtype: A dtype for every array of its kind. Without it, all must have been
                saved in the dtype of `like`.
            verify: Whether to compare the hashes of all files, and not only the sizes.
            fallback: Whether to restore the newest intact step if this one is damaged,
                with a warning.

        Returns:
            A tree of the same type as `like`.

        Raises:
            RestoreDiffError: If the saved arrays do not match `like`.
            DamagedCheckpointError: If files are damaged; it names one.
            CheckpointError: If the step does not exist.

        Warns:
            CheckpointWarning: If `fallback` restored another step.
        """
        request = Request(
            like=like, layouts=layouts, rename=rename, partial=partial, dtype=dtype
        )

        def read(saved: SavedStep) -> tuple[Any, list[Any]]:
            positions = [] if data is None else saved.positions()
            return saved.load("state", request), positions

        state, positions = self._read(step, read, verify=verify, fallback=fallback)
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
            DamagedCheckpointError: If files are damaged.
            CheckpointError: If the step does not exist.
        """

        def read(saved: SavedStep) -> Any:
            return to_numpy(saved.tree("state"))

        return self._read(step, read, verify=verify, fallback=fallback)

    def resume(self, state: T, *, data: Continues | None = None) -> T:
        """Returns the newest intact state, or `state` itself if nothing was saved.

        Use this at the beginning of a training loop that calls `save` after each step.
        From then on, until the checkpointer is closed, SIGTERM has the next `save`
        save, and end the process with status 75: started again, it resumes there.

        Args:
            state: The state that training would begin with; see `restore`.
            data: The input iterator, which is moved to its saved position.

        Raises:
            CheckpointError: If the newest step does not fit, or all are damaged.

        Warns:
            CheckpointWarning: If a newer step is damaged.
        """

        def read(saved: SavedStep) -> tuple[Any, list[Any]]:
            positions = [] if data is None else saved.positions()
            return saved.load("state", Request(like=state)), positions

        restored = self.read_newest(read)
        if restored is not None:
            state, positions = restored
            if data is not None:
                move_to_position(data, positions)
        self._preemption.close()
        self._is_preempted = self._preemption.enter_context(Preemption()).is_due
        return state

    def read_newest(self, read: "Callable[[SavedStep], T]") -> T | None:
        """Reads the newest intact step; None if nothing was saved. For `Trainer`.

        Args:
            read: Reads it; called again for an older step if it is damaged.
        """
        self.wait()
        if not self._main.on_first(lambda: bool(self._paths())):
            return None
        return self._read("latest", read, verify=True, fallback=True)

    def _read(
        self,
        step: int | str,
        read: "Callable[[SavedStep], T]",
        *,
        verify: bool,
        fallback: bool,
    ) -> T:
        self.wait()
        _checks.flag("verify", verify, where="restore", error=CheckpointError)
        _checks.flag("fallback", fallback, where="restore", error=CheckpointError)
        for attempt in itertools.count(1):
            try:
                with activity.during(f"restoring step {step} of {self.directory}"):
                    return self._read_intact(step, read, verify, fallback)
            except _GoneError:
                if attempt == _ATTEMPTS:
                    raise
        raise AssertionError

    def _read_intact(
        self,
        step: int | str,
        read: "Callable[[SavedStep], T]",
        verify: bool,  # noqa: FBT001
        fallback: bool,  # noqa: FBT001
    ) -> T:
        """Reads the first of the candidates that is intact, the same everywhere."""
        damaged: dict[int, DamagedCheckpointError] = {}
        candidates = functools.partial(self._candidates, step, fallback=fallback)
        for number in self._main.on_first(candidates):
            begin_s = time.perf_counter()
            agreement = _Agreement(self._main)
            try:
                with agreement:
                    saved = SavedStep.open(self, number, agreement, verify=verify)
                with agreement, orbax.undisturbed():
                    result = read(saved)
                    saved.check_unchanged()
            except DamagedCheckpointError as error:
                if not fallback:
                    raise
                logger.warning("step %d is damaged: %s", number, error)
                damaged[number] = error
                continue
            if damaged:
                facts = "; ".join(f"step {n}: {error}" for n, error in damaged.items())
                msg = (
                    f"restored step {number}, the newest that is intact. Damaged: "
                    f"{facts}"
                )
                warnings.warn(msg, CheckpointWarning, stacklevel=stack_level())
            self._last = number  # the next save is due `every` steps after it
            activity.now.checkpoint = f"step {number} in {self.directory}"
            if jax.process_index() == 0:
                seconds = time.perf_counter() - begin_s
                logger.info("restored step %d in %.2f s", number, seconds)
            return result
        number, error = next(iter(damaged.items()))
        msg = (
            f"no intact step is left in {self.directory}: all {len(damaged)} are "
            f"damaged. Step {number}: {error}"
        )
        raise DamagedCheckpointError(msg) from error

    def _raise_pending(self) -> None:
        """Raises the error of a save that has finished, without waiting for others."""
        if self._saving is not None and self._saving.is_done:
            self.wait()

    def _delete_old(self, step: int) -> None:
        """Deletes the steps that are not kept; on process 0, after a save."""
        paths = {n: p for n, p in self._paths().items() if steps.has_seal(p)}
        for old in steps_to_delete(
            list(paths),
            keep=self._keep,
            keep_every=self._keep_every,
            best=None if self._best is None else self._best_of(paths),
            newest=step,
        ):
            try:
                steps.delete(paths[old])
            except OSError as error:
                msg = (
                    f"step {step} is saved, but step {old}, which is not kept, could "
                    f"not be deleted: {orbax.reason(error)}."
                )
                raise CheckpointError(msg) from error
            logger.info("deleted step %d", old)


@dataclass(frozen=True)
class SavedStep:
    """A step that is intact on all processes.

    Attributes:
        number: The step.
        path: Its directory.
        facts: What it is, as its save wrote it.
    """

    number: int
    path: Path
    facts: Mapping[str, Any]
    _seal: bytes
    _agree: Callable[[], None]

    @classmethod
    def open(
        cls, owner: Checkpointer, number: int, agreement: "_Agreement", *, verify: bool
    ) -> "SavedStep":
        """Opens a step, whose files are compared with what was saved."""
        path = owner._paths().get(number)
        if path is None:
            msg = f"{owner.directory} has no step {number} on every process."
            raise _GoneError(msg)
        try:
            seal = steps.check(path, verify=verify)
            facts = steps.read_facts(path)
            if facts["step"] != number:
                msg = f"{path} is step {facts['step']}: the directory was renamed."
                raise DamagedCheckpointError(msg)
        except CheckpointError as error:
            if owner._paths().get(number) == path and path.exists():
                raise
            raise _GoneError(str(error)) from error
        return cls(number, path, facts, seal, agreement.confirm)

    @property
    def metadata(self) -> Any:
        """The metadata that were given to `save`."""
        return from_json(self.facts["metadata"])

    def positions(self) -> list[Any]:
        """Returns the positions of the input iterators.

        Raises:
            CheckpointError: If it was saved without.
        """
        if self.facts["data"] is None:
            msg = (
                f"step {self.number} holds no state of an input iterator: it was "
                "saved without data=. Restore without data=, and move the iterator "
                "yourself."
            )
            raise CheckpointError(msg)
        return self.facts["data"]

    def tree(self, name: str) -> orbax.OrbaxTree:
        """Returns one of its trees as a source."""
        return orbax.OrbaxTree(
            self.path,
            name,
            self.facts["items"][name],
            name=f"step {self.number}",
            before_read=self._agree,
        )

    def load(self, name: str, request: Request) -> Any:
        """Returns one of its trees, restored into `request.like`."""
        restored = load(self.tree(name), request)
        if restored.diff:
            logger.info("step %d differs: %s", self.number, restored.diff)
        return restored.state

    def check_unchanged(self) -> None:
        """Raises if another run has deleted or replaced it meanwhile."""
        name = steps.COMMIT if steps.is_remote(self.path) else steps.SEAL
        with contextlib.suppress(OSError):
            if (self.path / name).read_bytes() == self._seal:
                return
        msg = f"{self.path} was deleted or replaced by another run while it was read."
        raise _GoneError(msg)


class _Agreement:
    """A block that all processes leave in the same way: with the first error of any.

    Args:
        channel: Exchanges messages between the processes.
    """

    _kinds = (DamagedCheckpointError, _GoneError)

    def __init__(self, channel: Channel) -> None:
        self._channel, self._error = channel, None

    def confirm(self) -> None:
        """Has all processes come here before any goes on, or raises on all of them.

        Orbax would wait for one that has failed, without a word.
        """
        self._exchange(None)

    def __enter__(self) -> "_Agreement":
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        # An error that all have raised is not told again.
        if error is None or (isinstance(error, Exception) and error is not self._error):
            self._exchange(error)

    def _exchange(self, error: Exception | None) -> None:
        answer = None
        if error is not None:
            is_ours = isinstance(error, CheckpointError)
            text = str(error) if is_ours else f"{type(error).__name__}: {error}"
            answer = next((k.__name__ for k in self._kinds if type(error) is k), ""), text
        answers = self._channel.exchange(answer).values()
        first = next((other for other in answers if other is not None), None)
        if first is None or first == answer:
            return  # and the block's own error goes on
        names = {kind.__name__: kind for kind in self._kinds}
        self._error = names.get(first[0], CheckpointError)(first[1])
        raise self._error from error


@dataclass(eq=False)
class _Save:
    """One save; everything but its start happens in a thread.

    Attributes:
        owner: The checkpointer, whose lock is held meanwhile.
        step: The step.
        arrays: The arrays to write, until they are on the host.
        facts: What the step is, as JSON.
    """

    owner: Checkpointer
    step: int
    arrays: dict[str, Any]
    facts: dict[str, Any]

    def __post_init__(self) -> None:
        self._begin_s, self._pid = time.perf_counter(), os.getpid()
        self._nbytes = sum(x.nbytes for xs in self.arrays.values() for x in xs.values())
        self._copied = threading.Event()
        # Tells whether the thread or an interrupted caller was first.
        self._result: concurrent.futures.Future[CheckpointError | None]
        self._result = concurrent.futures.Future()

    @property
    def is_done(self) -> bool:
        """Whether it has finished, successfully or not."""
        return self._result.done()

    def start(self) -> None:
        """Returns when the state may be donated."""
        orbax.finish_at_exit()
        orbax.running[self] = self._finish
        try:
            name = f"checkpoint-{self.step}"
            threading.Thread(target=self._run, name=name, daemon=False).start()
            self._copied.wait()
        except BaseException:  # Ctrl-C, and the caller may go on
            if self._result.cancel():
                orbax.running.pop(self)
            else:
                self._copied.wait()
            raise

    def wait(self) -> CheckpointError | None:
        """Waits for its end, and returns its error; may be interrupted and repeated."""
        # A forked child has no such thread, and one that never began will not end.
        if self._pid != os.getpid() or self._result.cancel():
            return None
        error = self._result.result()
        orbax.running.pop(self, None)
        return error

    def _finish(self) -> None:
        """Waits at the end of the process, where no later call raises an error."""
        if not self.is_done:
            logger.info("the process ends once step %d is saved", self.step)
        error = self._result.result()
        if error is not None:
            logger.error("%s", error)

    # In the thread.

    def _run(self) -> None:
        if not self._result.set_running_or_notify_cancel():
            return
        error, directory = None, self.owner.directory
        try:
            with activity.during(f"saving step {self.step} in {directory}"):
                self._write(self.owner._background)
        except CheckpointError as problem:
            error = problem
        except BaseException as problem:
            error = _failed(self.step, directory, problem)
            error.__cause__ = problem
        if error is None:
            orbax.running.pop(self, None)
        self.arrays = {}
        self._result.set_result(error)
        self._copied.set()

    def _write(self, channel: Channel) -> None:
        directory = self.owner.directory
        is_remote = steps.is_remote(directory)
        path = directory / (str(self.step) if is_remote else f"{self.step}.new")
        with channel.failure_told(), _failures(self.step, directory):
            with orbax.undisturbed():
                response = orbax.start_writing(path, self.arrays, self.facts)
            self.arrays = {}
            self._stall_s = time.perf_counter() - self._begin_s
            self._copied.set()
            _await_response(response, channel)
            digests = {} if is_remote else steps.digests(path)
        found = channel.exchange(digests).values()
        # The others wait for the deletions, too, so that all list the same steps.
        channel.on_first(lambda: self._commit(path, found))

    def _commit(self, path: Path, digests: Iterable[dict[str, list[Any]]]) -> None:
        directory = self.owner.directory
        with _failures(self.step, directory):
            if not steps.is_remote(path):
                steps.seal(path, {k: v for part in digests for k, v in part.items()})
                steps.take_name(directory, self.step)
        activity.now.checkpoint = f"step {self.step} in {directory}"
        logger.info(
            "saved step %d: %s in %.2f s (the caller waited %.2f s)",
            self.step,
            _render.bytes_text(self._nbytes),
            time.perf_counter() - self._begin_s,
            self._stall_s,
        )
        self.owner._delete_old(self.step)


def _open_channel(name: str, purpose: str) -> Channel:
    """Opens a channel between all processes, to complete "did not come to ..."."""
    return Channel(
        f"checkpoint/{name}",
        what=purpose,
        hint=(
            "All processes have to open, save and restore the same checkpoints in the "
            "same order; process 0 alone cannot."
        ),
        timeout_s=_TIMEOUT_S,
        # Long waits for the end of another process's files are normal.
        warn_after_s=_TIMEOUT_S if name.endswith("save") else _WARN_AFTER_S,
        error=CheckpointError,
    )


def _failed(step: int, directory: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"step {step} could not be saved in {directory}: {orbax.reason(error)}. "
        "Earlier steps are unchanged; the next save starts anew."
    )


@contextlib.contextmanager
def _failures(step: int, directory: Path) -> Iterator[None]:
    """Raises what fails inside as that of this save."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise _failed(step, directory, error) from error


def _await_token(token: Path) -> None:
    """Waits for a file that process 0 has written to the directory of the run."""
    end_s = time.monotonic() + _SHARED_S
    while not token.exists():
        if time.monotonic() > end_s:
            msg = (
                f"process {jax.process_index()} does not see what process 0 wrote to "
                f"{token.parent}: the processes do not share this directory. Give one "
                "that all machines share."
            )
            raise CheckpointError(msg)
        time.sleep(0.02)


def _await_response(response: Any, channel: Channel) -> None:
    """Waits for Orbax, but no longer once another process has failed.

    Orbax would wait for that one for minutes.
    """
    while jax.process_count() > 1:
        begin_s = time.monotonic()
        try:
            return response.result(timeout=_PEEK_S)
        except TimeoutError:
            if time.monotonic() - begin_s < _PEEK_S:
                raise  # Orbax's own
        failure = channel.failure()
        if failure:
            raise CheckpointError(failure)
    return response.result()


def _check_agreement(messages: list[dict[str, Any]]) -> None:
    """Raises, on all processes, if they do not save the same state as the same step."""
    first = messages[0]
    for index, other in enumerate(messages):
        if other["place"] != first["place"]:
            msg = (
                f"process 0 saves {first['place']}, and process {index} saves "
                f"{other['place']}. All processes have to save the same step in the "
                "same directory."
            )
            raise CheckpointError(msg)
        for name, what in _AGREED.items():
            if first[name] != other[name]:
                msg = (
                    f"process 0 and process {index} save {first['place']} with states "
                    f"that differ in {what}. All processes have to save the same state."
                )
                raise CheckpointError(msg)
