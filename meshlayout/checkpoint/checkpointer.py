"""`Checkpointer`: saves a state during training, and restores it on any mesh."""

import contextlib
import functools
import hashlib
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, cast

import jax
from jax.typing import DTypeLike

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout.arrays.parts import replica_difference, replica_sums
from meshlayout.checkpoint import directory as steps, orbax, positions
from meshlayout.checkpoint.load import Request, to_numpy
from meshlayout.checkpoint.orbax import Inspection, SavedStep
from meshlayout.checkpoint.save import Save, failures, finish_in
from meshlayout.cluster.agreement import difference
from meshlayout.cluster.channel import Channel
from meshlayout.cluster.preemption import Preempted, Preemption, interrupts_later
from meshlayout.errors import (
    CheckpointError,
    CheckpointWarning,
    DamagedCheckpointError,
    did_you_mean,
    warn,
)
from meshlayout.layout_map import LayoutMap


logger = logging.getLogger("meshlayout.checkpoint")

T = TypeVar("T")
Step: TypeAlias = int | Literal["latest", "best"]

# Checkpointers are opened in the same order on all processes, so the numbers agree.
_numbers = itertools.count()


@_checks.user_call
class Checkpointer(_checks.WithReflexes):
    """Saves a state during training, and restores it on any mesh.

    Use this in your own loop, as below, or in the callback `Checkpoint`.

    A step is saved completely or not at all. A killed process or a full disk leaves
    earlier steps intact. Saving a step again keeps the old files until the new ones are
    complete (in gs://, the old ones are deleted first). A step is a plain Orbax
    directory. A restore verifies the hashes of its files, except in gs://.

    `save` returns as soon as the state may be donated; a copy of this process's shards
    stays in host memory until the files are written. The next `save`, `wait`, `close`
    or `restore` waits for that and raises any error. A process finishes its save before
    it exits.

    The first save locks the directory until `close`, or until another Checkpointer of
    this process saves there; any number of others may read. All processes of a run
    share the directory, and save and restore in the same order.

    Args:
        directory: A local path, or `gs://bucket/run`: without locks, with extra `gcs`.
        keep: How many of the latest steps to keep; None for all.
        every: Save only when this many steps have passed since the last save.
        best: The name of a metric, and `"max"` or `"min"`: also keep the best step.

    Examples:
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
        every: int | None = None,
        best: tuple[str, Literal["max", "min"]] | None = None,
    ) -> None:
        self._saving: Save | None = None
        self._unlock: Callable[[], Any] | None = None
        self._preemption, self._is_preempted = contextlib.ExitStack(), lambda: False
        self._last = 0  # the step that was saved or restored last
        self.directory = steps.as_directory(directory)
        for name, count in {"keep": keep, "every": every}.items():
            if count is not None:
                _checks.count(name, count, error=CheckpointError)
        if best is not None and (len(best) != 2 or best[1] not in ("max", "min")):
            msg = f"best must be a pair such as ('val_accuracy', 'max'), got {best!r}."
            raise CheckpointError(msg)
        self.best, self._keep, self._every = best, keep, every
        # A channel pairs messages by their order. The threads of saves share it, since
        # this thread uses it only after the last save.
        self._channel = Channel(
            f"checkpoint/{next(_numbers)}",
            what="the same save or restore",
            hint="All processes must save and restore the same steps in one order.",
            timeout_s=1200.0,  # longer than a slow store takes for a large file
            error=CheckpointError,
        )

    def save(
        self,
        step: int,
        state: PyTree,
        *,
        data: positions.Continues | None = None,
        metadata: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
        metrics: Mapping[str, Any] | None = None,
        force: bool = False,
        _beside: Mapping[str, PyTree] | None = None,
    ) -> bool:
        """Saves a state if a save is due, and returns whether it was.

        The state may be donated as soon as this returns. After SIGTERM, in a loop that
        began with `resume`, this always saves, and ends the process with status 75.

        Args:
            step: The number of the step.
            state: Any tree of arrays and numbers: a `TrainState`, an NNX module,
                Linen variables, an Optax state.
            data: The input iterator, whose position is saved with the state.
            metadata: Other values that JSON can hold, or a function that returns them.
                It is called only if a save is due.
            metrics: Metrics by name, for `best`.
            force: Whether to save even if no save is due.

        Raises:
            CheckpointError: If the state cannot be saved, an earlier save failed, or
                the processes save different states.
            Preempted: After SIGTERM, once the step is saved.
        """
        is_preempted, every = self._is_preempted(), self._every or 1
        is_certain = force or is_preempted or self._every is None
        if is_certain:  # all processes come here, and learn that one has a wrong step
            self.wait()
        with self._channel.failure_told() if is_certain else contextlib.nullcontext():
            step = _checks.count("step", step, at_least=0, error=CheckpointError)
        # Not `step % every`: with several steps per call, multiples may be passed over.
        if not is_certain and step // every <= min(self._last, step) // every:
            return False
        # Two saves at a time would hold two copies of the state in host memory.
        self.wait()
        # Else other processes would wait in Orbax for one that has left.
        is_alone = jax.process_count() == 1
        with contextlib.nullcontext() if is_alone else interrupts_later(patience=1):
            token = self._channel.on_first(functools.partial(self._open, step))
            facts: dict[str, Any] = {"format": 4, "step": step, "data": None}
            with self._channel.failure_told(), orbax.undisturbed():
                steps.find_token(self.directory, token)
                trees = {"state": state, **(_beside or {})}
                saved = {name: orbax.saved_leaves(tree) for name, tree in trees.items()}
                arrays = {name: arrays for name, (_, arrays) in saved.items()}
                facts["items"] = {name: leaves for name, (leaves, _) in saved.items()}
                facts["metrics"] = _metric_values(metrics, self.best)
                values = metadata() if callable(metadata) else metadata
                facts["metadata"] = positions.as_json(values, "metadata")
                facts |= {"time": time.time(), "processes": jax.process_count()}
                digest = hashlib.sha256(repr(facts["items"]).encode()).hexdigest()
                own = {"the step": str(step)}
                own["the digest of paths, shapes and dtypes"] = digest[:8]
                sums = replica_sums(x for xs in arrays.values() for x in xs.values())
                position = positions.position_of(data)
            messages = self._channel.exchange((own, sums, position))
            unlike = difference({p: x for p, (x, _, _) in messages.items()})
            unlike += replica_difference({p: x for p, (_, x, _) in messages.items()})
            if unlike:
                msg = f"nothing was saved, because the processes differ: {unlike}."
                raise CheckpointError(msg)
            places = [x for _, _, x in messages.values()]
            if data is not None:  # a single one if all are equal
                is_one = places.count(places[0]) == len(places)
                facts["data"] = places[:1] if is_one else places
            self._last, after = step, functools.partial(self._delete_old, step)
            save = Save(self.directory, step, arrays, facts, self._channel, after)
            self._saving = save
            save.start()
        if is_preempted:
            self.close()
            raise Preempted(step)
        return True

    def wait(self) -> None:
        """Waits until the last save has finished; raises its error if it failed."""
        if self._saving is not None:
            error = self._saving.error()
            # Only now: after Ctrl-C during the wait, it can be waited for again.
            self._saving = None
            if error is not None:
                raise error

    def close(self) -> None:
        """Waits as `wait` does, then lets other processes save in the directory."""
        self._preemption.close()
        self._is_preempted = lambda: False
        self._release()

    def _release(self) -> None:
        """Waits, then frees the lock; `steps.lock` calls this on process 0 alone."""
        try:
            self.wait()
        finally:
            # If the wait was interrupted, the save still runs and needs the lock.
            if self._saving is None and self._unlock is not None:
                self._unlock()
                self._unlock = None

    def __repr__(self) -> str:
        return f"Checkpointer({str(self.directory)!r})"

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self, step: int) -> str:
        """Locks the directory, makes room for a step, and leaves a token there."""
        with failures(step, self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            if self._unlock is None:
                finish_in(self.directory)
                self._unlock = steps.lock(self.directory, self)
            steps.recover(self.directory)
            steps.clear(self.directory, step)
            return steps.leave_token(self.directory)

    def _delete_old(self, step: int) -> None:
        """Deletes the steps that are not kept; on process 0, after a save."""
        paths = steps.step_paths(self.directory)
        paths = {n: path for n, path in paths.items() if steps.is_whole(path)}
        kept = {step, None if self.best is None else self._best_of(paths)}
        for old in [] if self._keep is None else [*paths][: -self._keep]:
            if old not in kept:
                steps.delete(paths[old])

    def all_steps(self) -> list[int]:
        """Returns the saved steps in ascending order, without a running save."""
        return list(steps.step_paths(self.directory))

    def latest_step(self) -> int | None:
        """Returns the highest step saved so far, without a running save; or None."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """Returns the step with the best value of a metric, or None if none has it."""
        return self._best_of(steps.step_paths(self.directory))

    def inspect(self, step: Step = "latest") -> Inspection:
        """Returns a table of a step's contents, without loading any array."""
        self.wait()
        _, name, _ = self._choose(step)
        return Inspection.of(steps.read_facts(self.directory / name))

    def _best_of(self, paths: Mapping[int, Path]) -> int | None:
        if self.best is None:
            facts = [steps.read_facts(path)["metrics"] for path in paths.values()]
            names = ", ".join(map(repr, facts[-1] if facts else ())) or "none"
            way = "the best step needs Checkpointer(directory, best=(name, 'max'))"
            raise CheckpointError(f"{way}, or 'min'; the last one's names are {names}.")
        (name, mode), values = self.best, dict[int, float]()
        for step, path in paths.items():
            with contextlib.suppress(CheckpointError):  # a damaged one is never best
                value = steps.read_facts(path)["metrics"].get(name, math.nan)
                values[step] = value if mode == "max" else -value
        # NaN compares false with everything, so that one NaN would decide a maximum.
        values = {step: value for step, value in values.items() if value == value}
        return max(values, key=lambda step: (values[step], step), default=None)

    def _choose(self, step: Step) -> tuple[int, str, bytes | None]:
        """Returns a step's number, and the name and mark of its directory."""
        paths, number = steps.step_paths(self.directory), step
        if step == "latest":
            number = max(paths, default=None)
        elif step == "best":
            number = self._best_of(paths)
        else:
            _checks.count("step", step, at_least=0, error=CheckpointError)
        if number not in paths:
            listed = ", ".join(map(str, list(paths)[-10:])) or "none (see load_orbax)"
            listed = listed if self.directory.exists() else "no such directory"
            msg = f"{self.directory} has no step {step!r}: there is {listed}."
            raise CheckpointError(msg)
        return number, paths[number].name, steps.mark(paths[number])

    def restore(
        self,
        like: PyTree = None,
        *,
        step: Step = "latest",
        layouts: LayoutMap | None = None,
        data: positions.Continues | None = None,
        partial: bool | str | Sequence[str] = False,
        rename: Mapping[str, str] | None = None,
        dtype: DTypeLike | None = None,
        verify: bool = True,
    ) -> Any:
        """Returns a new state or model with the saved values.

        It does not change `like`: write `model = checkpointer.restore(model)`. Every
        device reads only its own slices, whatever the mesh, the layouts and the number
        of processes were when the state was saved.

        Args:
            like: A state with the shapes, dtypes and layouts to restore, concrete or
                abstract (`ml.describe`, `jax.eval_shape`), or a model, to predict; or
                a layout map, to get nested dicts of all arrays; or None, to get them
                on one device.
            step: The step; `"latest"`, or `"best"` by the metric of `best`.
            layouts: Layouts to use instead of those of `like`.
            data: The input iterator to move to its saved position.
            partial: True keeps the values in `like` of arrays that were not saved, and
                ignores extra saved ones. Patterns list paths to leave unchanged.
            rename: `{pattern: replacement}`, applied to the saved paths as by `re.sub`.
            dtype: A dtype for all arrays of its kind, instead of those of `like`.
            verify: Whether to verify the hashes of all files, not only their sizes.

        Raises:
            RestoreDiffError: If the saved arrays do not match `like`.
            DamagedCheckpointError: If files are damaged; it names one.
            CheckpointError: If the step does not exist.
        """
        request = Request(like, layouts, rename, partial=partial, dtype=dtype)
        state, places = self.read(
            step, lambda x: (x.load(request), x.facts["data"]), verify=verify
        )
        if data is not None:
            positions.move_to_position(data, places)
        return state

    def restore_numpy(self, *, step: Step = "latest") -> Any:
        """Returns nested dicts of NumPy arrays, with PRNG keys as uint32 words.

        Use this to inspect or convert a checkpoint. It uses no device.
        """
        return self.read(step, lambda saved: to_numpy(saved.source()))

    def resume(self, state: T, *, data: positions.Continues | None = None) -> T:
        """Returns the newest intact state, or `state` itself if there is none.

        Use this before a training loop that calls `save` after each step. From then on
        until `close`, the next `save` after SIGTERM saves and ends the process with
        status 75. This moves the iterator `data` to its saved position, and skips
        damaged steps with a CheckpointWarning.
        """
        restored = self.newest(lambda step: self.restore(state, step=step, data=data))
        self._preemption.close()
        self._is_preempted = self._preemption.enter_context(Preemption()).is_due
        return state if restored is None else restored

    def newest(self, read: Callable[[int], T]) -> T | None:
        """Calls `read` with the newest steps until one is intact; None if none is."""
        self.wait()
        damaged: list[str] = []
        for step in reversed(self._channel.on_first(self.all_steps)):
            try:
                result = read(step)
            except DamagedCheckpointError as error:  # which all processes raise
                damaged.append(str(error))
                continue
            if damaged:
                damaged.insert(0, f"restored step {step}, the newest that is intact.")
                text = " ".join(damaged)
                warn(text, CheckpointWarning)
            return result
        if damaged:
            damaged.insert(0, f"{self.directory} has no intact step.")
            raise DamagedCheckpointError(" ".join(damaged))
        return None

    def read(
        self, step: Step, read: Callable[[SavedStep], T], *, verify: bool = True
    ) -> T:
        """Reads a step, the same on all processes, as `restore` and `Trainer` do."""
        self.wait()
        while True:
            number, name, mark = self._channel.on_first(lambda: self._choose(step))
            path, result = self.directory / name, None
            saved, damage = self._agreed(
                functools.partial(SavedStep.open, number, path, verify=verify)
            )
            if saved is not None:
                result, damage = self._agreed(functools.partial(read, saved))
            # Another run may have deleted it meanwhile, or put another copy there.
            if self._channel.on_first(functools.partial(steps.mark, path)) == mark:
                break
        if damage is not None:
            raise damage
        self._last = number  # the next save is due `every` steps after it
        logger.info("restored step %d of %s", number, self.directory)
        return cast("T", result)

    def _agreed(self, work: Callable[[], T]) -> tuple[T | None, Exception | None]:
        """Returns what `work` returns, or the damage that any process has found."""
        result, damage = None, None
        with self._channel.failure_told():
            try:
                result = work()
            except DamagedCheckpointError as error:
                damage = error
        damages = [x for x in self._channel.exchange(damage).values() if x is not None]
        return (None, damages[0]) if damages else (result, None)


def _metric_values(
    metrics: Mapping[str, Any] | None, best: tuple[str, str] | None
) -> dict[str, float]:
    """Returns metrics as floats, with that of `best` if there are any."""
    values = {name: float(value) for name, value in (metrics or {}).items()}
    if values and best is not None and best[0] not in values:
        names = ", ".join(map(repr, values))
        msg = f"best={best!r} needs the metric {best[0]!r}, and metrics= holds {names}."
        raise CheckpointError(msg + did_you_mean(best[0], values))
    return values
