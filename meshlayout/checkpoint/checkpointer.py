"""`Checkpointer`: saves a state during training, and restores it on any mesh."""

import contextlib
import functools
import hashlib
import itertools
import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import jax
from jax.typing import DTypeLike

from meshlayout import _checks
from meshlayout._annotations import Metadata, PyTree
from meshlayout.checkpoint import directory as steps, orbax, policy, positions
from meshlayout.checkpoint.inspection import Inspection
from meshlayout.checkpoint.load import to_numpy
from meshlayout.checkpoint.match import Request
from meshlayout.checkpoint.save import Save, failures
from meshlayout.checkpoint.saved_step import GoneError, SavedStep
from meshlayout.cluster import activity
from meshlayout.cluster.agreement import difference
from meshlayout.cluster.channel import Channel
from meshlayout.cluster.preemption import Preempted, Preemption
from meshlayout.cluster.replicas import replica_sums
from meshlayout.errors import (
    CheckpointError,
    CheckpointWarning,
    DamagedCheckpointError,
    stack_level,
)
from meshlayout.layout_map import LayoutMap


logger = logging.getLogger("meshlayout.checkpoint")

T = TypeVar("T")

# Checkpointers are opened in the same order on all processes, so the numbers agree.
_numbers = itertools.count()
# Longer than a slow store takes for a large file, and short enough for a job that hangs
# to end by itself. A process that does not take part at all is reported soon.
_TIMEOUT_S, _WARN_AFTER_S = 1200.0, 10.0
# Other runs may delete the step that is read, with `keep=1` several in a row.
_ATTEMPTS = 20


class Checkpointer:
    """Saves a state during training, and restores it on any mesh.

    Use this in a loop of your own, as below, or in the callback `Checkpoint`.

    A step is saved completely or not at all: a killed process or a full disk leaves the
    earlier steps intact, and a step that is saved again is there at every moment. A
    restore compares all files with what was saved. A step is a plain directory of
    Orbax, and anyone can load its arrays without this package.

    `save` returns as soon as the state may be donated; a copy of this process's shards
    stays in host memory until the files are written. The next save waits for that. An
    error in the background is raised once, by the next call of any method. Close a
    checkpointer, or use it in a `with` block; a process that ends in any other way
    finishes a running save first.

    The first save locks the directory for this run until the checkpointer is closed;
    any number of runs may read, which changes nothing on the disk. All processes of a
    job open the checkpointer, on a directory that they share, and save and restore the
    same steps in the same order.

    Args:
        directory: A local path, or `gs://bucket/run` in Google Cloud Storage, which
            needs gcsfs (the extra `gcs`) and has no locks.
        keep: How many of the latest steps to keep; None for all.
        keep_every: Also keep steps that are multiples of this number.
        every: Save only when this many steps have passed since the last save.
        best: The name of a metric, and `"max"` or `"min"`: also keep the step with the
            best value.

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
        self._saving: Save | None = None
        self._unlock: Callable[[], Any] | None = None
        self._is_shared = self._is_closed = False
        self._preemption, self._is_preempted = contextlib.ExitStack(), lambda: False
        self._last: int | None = None  # the step that was saved or restored last
        self.directory = steps.as_directory(directory)
        self.best = policy.check_best(best)
        self._keep = policy.check_count("keep", keep)
        self._keep_every = policy.check_count("keep_every", keep_every)
        self._every = policy.check_count("every", every)
        # A channel pairs messages by their order, and a save in the background may end
        # before or after any call of the main thread: each thread has its own channel,
        # and long waits are normal only there.
        channel = functools.partial(
            Channel,
            hint=(
                "All processes have to open, save and restore the same checkpoints in "
                "the same order; process 0 alone cannot."
            ),
            timeout_s=_TIMEOUT_S,
            error=CheckpointError,
        )
        name, what = f"checkpoint/{next(_numbers)}", "the same save or restore"
        self._main = channel(name, what=what, warn_after_s=_WARN_AFTER_S)
        name, what = f"{name}/save", "the end of a save"
        self._background = channel(name, what=what, warn_after_s=_TIMEOUT_S)

    # Saving.

    def save(
        self,
        step: int,
        state: PyTree,
        *,
        data: positions.Continues | None = None,
        metadata: Metadata | Callable[[], Metadata] | None = None,
        metrics: Mapping[str, Any] | None = None,
        force: bool = False,
        _beside: Mapping[str, PyTree] | None = None,
    ) -> bool:
        """Saves a state if a save is due; returns whether it is.

        The state may be donated as soon as this returns. A step that already exists is
        replaced once the new files are complete. In a loop that began with `resume`,
        call this after each step: after SIGTERM it saves, due or not, and ends the
        process with status 75, "start me again".

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

        Raises:
            CheckpointError: If the state cannot be saved, an earlier save failed in the
                background, or the processes save different states.
            Preempted: After SIGTERM, once the step is saved.
        """
        self._raise_pending()
        if self._is_closed:
            msg = f"the checkpointer of {self.directory} is closed. Open another one."
            raise CheckpointError(msg)
        step = _checks.count("step", step, at_least=0, error=CheckpointError)
        force = _checks.flag("force", force, error=CheckpointError)
        is_preempted = self._is_preempted()
        if not (force or is_preempted or self._is_due(step)):
            return False
        # Two saves at a time would hold two copies of the state in host memory.
        self.wait()
        self._take_lock(step)
        facts: dict[str, Any] = {"format": 4, "step": step, "time": time.time()}
        with self._main.failure_told(), orbax.undisturbed():
            if jax.process_index() == 0:
                with failures(step, self.directory):
                    steps.recover(self.directory)  # what a save that failed left
                    steps.clear(self.directory, step)
            trees = {"state": state, **(_beside or {})}
            saved = {name: orbax.saved_leaves(tree) for name, tree in trees.items()}
            arrays = {name: arrays for name, (_, arrays) in saved.items()}
            facts["items"] = {name: leaves for name, (leaves, _) in saved.items()}
            facts["metrics"] = policy.metric_values(metrics, self.best)
            if callable(metadata):
                _checks.function("metadata", metadata, error=CheckpointError)
                with _checks.noted("in the function that save(metadata=...) was given"):
                    metadata = metadata()
            facts["metadata"] = positions.as_json(metadata, "metadata")
            facts["processes"] = jax.process_count()
            paths = hashlib.sha256(repr(facts["items"]).encode()).hexdigest()
            own = {
                "the step": str(step),
                "the directory": str(self.directory),
                "the digest of paths, shapes and dtypes": paths[:8],
                "the sum of the replicated arrays and numbers": replica_sums(
                    x for tree in arrays.values() for x in tree.values()
                ),
            }
            position = None if data is None else positions.position_of(data)
        messages = self._main.exchange((own, position))
        unlike = difference({p: other for p, (other, _) in messages.items()})
        if unlike:
            msg = (
                f"nothing is saved, as the processes differ: {unlike}. All of them "
                "have to save the same state as the same step."
            )
            raise CheckpointError(msg)
        all_positions = [other for _, other in messages.values()]
        facts["data"] = None if data is None else positions.joined(all_positions)
        after = functools.partial(self._delete_old, step)
        channel, self._last = self._background, step
        self._saving = Save(self.directory, step, arrays, facts, channel, after)
        self._saving.start()
        if is_preempted:
            self.wait()
            self._preemption.close()
            self._is_preempted = lambda: False
            raise Preempted(step)
        return True

    def wait(self) -> None:
        """Waits until the last save has finished; raises its error."""
        if self._saving is not None:
            error = self._saving.wait()
            # Only now: after Ctrl-C during the wait, it can be waited for again.
            self._saving = None
            if error is not None:
                raise error

    def close(self) -> None:
        """Waits as `wait`, and lets other runs save in the directory."""
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
            # of process 0, as elsewhere a listing may lag behind.
            earlier = (saved for saved in self._paths() if saved < step)
            self._last = self._main.on_first(lambda: max(earlier, default=0))
        return policy.is_due(step, self._every, self._last or 0)

    def _take_lock(self, step: int) -> None:
        """Locks the directory at the first save, and finds out whether it is shared."""
        if self._is_shared:
            return
        with self._main.failure_told(), failures(step, self.directory):
            if jax.process_index() == 0:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._unlock = self._unlock or steps.lock(self.directory, self)
        self._main.exchange(None)
        steps.check_shared(self.directory, self._main)
        self._is_shared = True

    def _delete_old(self, step: int) -> None:
        """Deletes the steps that are not kept; on process 0, after a save."""
        paths = {n: p for n, p in self._paths().items() if steps.is_whole(p)}
        best = None if self.best is None else self._best_of(paths)
        for old in policy.steps_to_delete(
            list(paths), self._keep, self._keep_every, kept={best, step}
        ):
            try:
                steps.delete(paths[old])
            except OSError as error:
                msg = (
                    f"step {step} is saved, but step {old}, which is not kept, could "
                    f"not be deleted: {orbax.reason(error)}."
                )
                raise CheckpointError(msg) from error

    # Queries.

    def all_steps(self) -> list[int]:
        """Returns the saved steps in ascending order; a running save is not one yet."""
        self._raise_pending()
        return list(self._paths())

    def latest_step(self) -> int | None:
        """Returns the highest saved step, or None."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """Returns the step with the best value of a metric, or None if none has it."""
        self._raise_pending()
        return self._best_of(self._paths())

    def inspect(self, step: int | Literal["latest", "best"] = "latest") -> Inspection:
        """Returns a table of a step's contents, without loading any array."""
        self.wait()
        path = self._paths()[self._candidate(step, {})]
        return Inspection.of(steps.read_facts(path), steps.num_bytes(path))

    def _raise_pending(self) -> None:
        """Raises the error of a save that has finished, without waiting for others."""
        if self._saving is not None and self._saving.is_done:
            self.wait()

    def _paths(self) -> dict[int, Path]:
        return steps.step_paths(self.directory)

    def _best_of(self, paths: Mapping[int, Path]) -> int | None:
        if self.best is None:
            msg = (
                "there is no best step without a metric. Write "
                "Checkpointer(directory, best=('val_accuracy', 'max'))."
            )
            raise CheckpointError(msg)
        metrics: dict[int, Mapping[str, float]] = {}
        for step, path in paths.items():
            with contextlib.suppress(CheckpointError):  # a damaged one is never best
                metrics[step] = steps.read_facts(path)["metrics"]
        return policy.best_of(self.best, metrics)

    def _candidate(self, step: int | str, damaged: Mapping[int, str]) -> int:
        """Returns the step to try next, which is older than the damaged ones."""
        paths, number = self._paths(), None
        listed = ", ".join(map(str, list(paths)[-10:]))
        problem = f"has no step {step}; it has {listed}"
        if not paths:
            problem = "has no checkpoints: nothing was saved there yet"
            if not self.directory.exists():
                problem = "does not exist, at least not on this machine"
        elif damaged:
            number = max((x for x in paths if x < min(damaged)), default=None)
            facts = " ".join(damaged.values()).removesuffix(".")
            problem = f"has no intact step that is older. Damaged: {facts}"
        elif step == "latest":
            number = max(paths)
        elif step == "best":
            number = self._best_of(paths)
            problem = "has no step whose metrics hold the one of best="
        else:
            hint = f"{self.directory} has the steps {listed}."
            _checks.count("step", step, at_least=0, error=CheckpointError, hint=hint)
            number = step if step in paths else None
        if number is None:
            kind = DamagedCheckpointError if damaged else CheckpointError
            raise kind(f"{self.directory} {problem}.")
        return int(number)

    # Restoring.

    def restore(
        self,
        like: PyTree = None,
        *,
        step: int | Literal["latest", "best"] = "latest",
        layouts: LayoutMap | None = None,
        data: positions.Continues | None = None,
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
            like: The state to restore into, concrete or abstract (`ml.describe`,
                `jax.eval_shape`), which sets shapes, dtypes and layouts; or a layout
                map, for nested dicts of all saved arrays. None for nested dicts on one
                device.
            step: The step; `"latest"`, or `"best"` by the metric of `best`.
            layouts: The layouts of the arrays, if not those of `like`.
            data: The input iterator, which is moved to its saved position. One that
                cannot go there directly is read up to it.
            partial: Whether arrays of `like` may be missing, and keep their values, and
                extra saved arrays are ignored; or patterns of the paths to leave as
                they are.
            rename: `{pattern: replacement}`, applied to the saved paths as by
                `re.sub`, for example `{r"^encoder/": "model/encoder/"}`.
            dtype: A dtype for every array of its kind, if not that of `like`.
            verify: Whether to compare the hashes of all files, and not only the sizes.
            fallback: Whether to restore the newest intact step if this one is damaged,
                with a CheckpointWarning.

        Raises:
            RestoreDiffError: If the saved arrays do not match `like`.
            DamagedCheckpointError: If files are damaged; it names one.
            CheckpointError: If the step does not exist.
        """
        request = Request(
            like=like, layouts=layouts, rename=rename, partial=partial, dtype=dtype
        )
        read = functools.partial(_load, request=request, data=data)
        return _moved(self._read(step, read, verify=verify, fallback=fallback), data)

    def restore_numpy(
        self,
        *,
        step: int | Literal["latest", "best"] = "latest",
        verify: bool = True,
        fallback: bool = False,
    ) -> Any:
        """Returns nested dicts of NumPy arrays; PRNG keys as the words they consist of.

        Use this to look into a checkpoint, or to convert it. No device is used; the
        arguments are those of `restore`.
        """

        def read(saved: SavedStep) -> Any:
            return to_numpy(saved.source())

        return self._read(step, read, verify=verify, fallback=fallback)

    def resume(self, state: T, *, data: positions.Continues | None = None) -> T:
        """Returns the newest intact state, or `state` itself if nothing was saved.

        Use this at the beginning of a training loop that calls `save` after each step.
        From then on, until the checkpointer is closed, SIGTERM has the next `save`
        save, and end the process with status 75: started again, it resumes there. The
        iterator `data` is moved to its saved position. A damaged newest step is skipped
        with a CheckpointWarning.
        """
        read = functools.partial(_load, request=Request(like=state), data=data)
        restored = self.read_newest(read)
        self._preemption.close()
        self._is_preempted = self._preemption.enter_context(Preemption()).is_due
        return state if restored is None else _moved(restored, data)

    def read_newest(self, read: Callable[[SavedStep], T]) -> T | None:
        """Reads the newest intact step; None if nothing was saved. For `Trainer`.

        `read` is called again for an older step if arrays are damaged.
        """
        self.wait()
        if not self._main.on_first(lambda: bool(self._paths())):
            return None
        return self._read("latest", read, verify=True, fallback=True)

    def _read(
        self,
        step: int | str,
        read: Callable[[SavedStep], T],
        *,
        verify: bool,
        fallback: bool,
    ) -> T:
        """Reads the first step that is intact, the same on all processes."""
        self.wait()
        _checks.flag("verify", verify, where="restore", error=CheckpointError)
        _checks.flag("fallback", fallback, where="restore", error=CheckpointError)
        damaged: dict[int, str] = {}
        num_gone = 0
        while True:
            number = self._main.on_first(
                functools.partial(self._candidate, step, damaged)
            )
            result, damage = self._read_step(number, read, verify=verify)
            if damage is None:
                break
            is_gone = isinstance(damage, GoneError)
            num_gone += is_gone
            if num_gone == _ATTEMPTS:
                raise CheckpointError(str(damage))
            if not (fallback or is_gone):
                raise damage
            if not is_gone:
                logger.warning("step %d is damaged: %s", number, damage)
                damaged[number] = str(damage)
        if damaged:
            msg = (
                f"restored step {number}, the newest that is intact. Damaged: "
                f"{' '.join(damaged.values())}"
            )
            warnings.warn(msg, CheckpointWarning, stacklevel=stack_level())
        self._last = number  # the next save is due `every` steps after it
        activity.now.checkpoint = f"step {number} in {self.directory}"
        logger.info("restored step %d of %s", number, self.directory)
        return cast("T", result)

    def _read_step(
        self, number: int, read: Callable[[SavedStep], T], *, verify: bool
    ) -> tuple[T | None, Exception | None]:
        confirm = functools.partial(self._main.exchange, None)
        saved, damage = self._agreed(
            lambda: SavedStep.open(self.directory, number, confirm, verify=verify)
        )
        return (
            (None, damage) if saved is None else self._agreed(lambda: saved.read(read))
        )

    def _agreed(self, work: Callable[[], T]) -> tuple[T | None, Exception | None]:
        """Returns what `work` returns, or the damage that any process has found."""
        result, damage = None, None
        name = f"restoring from {self.directory}"
        with self._main.failure_told(), activity.during(name):
            try:
                result = work()
            except DamagedCheckpointError as error:
                damage = error
        damages = self._main.exchange(damage).values()
        first = next((other for other in damages if other is not None), None)
        return (result, None) if first is None else (None, first)


def _load(saved: SavedStep, request: Request, data: object) -> tuple[Any, list[Any]]:
    """Returns a state, and the positions of the input iterators."""
    places = [] if data is None else saved.positions(data)
    return saved.load(request), places


def _moved(restored: tuple[Any, list[Any]], data: object) -> Any:
    state, places = restored
    if data is not None:
        positions.move_to_position(data, places)
    return state
