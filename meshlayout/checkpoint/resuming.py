"""Going on from the newest intact checkpoint: state, metrics so far, data."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshlayout import _jax
from meshlayout.arrays import to_numpy
from meshlayout.checkpoint.checkpointer import Checkpointer
from meshlayout.checkpoint.data_state import DataState
from meshlayout.checkpoint.input import Input
from meshlayout.checkpoint.manifest import Manifest
from meshlayout.checkpoint.steps import Steps
from meshlayout.checkpoint.verifying import check_files
from meshlayout.errors import (
    CheckpointError,
    CheckpointWarning,
    DamagedCheckpointError,
    stack_level,
)


logger = logging.getLogger("meshlayout.checkpoint")

# Where the metadata of a checkpoint says how to go on from it.
KEY = "resume"


@dataclass(frozen=True)
class Resumed:
    """What a run goes on with.

    Attributes:
        step: The step of the checkpoint.
        state: The state.
        metrics: The metrics so far; None if there are none, or nothing is left to
            add to them.
        values: Their values.
        notes: What else was saved with `notes_of`.
    """

    step: int
    state: Any
    metrics: Any
    values: Mapping[str, Any]
    notes: Mapping[str, Any]


def notes_of(
    batches: Input, metrics: Any, num_used: int | None, **notes: Any
) -> tuple[Mapping[str, Any], Any]:
    """Returns metadata to go on from, and what to save as `data=`.

    The metadata is made when it is read: if a checkpoint is due, and not at each step.

    Args:
        batches: The data.
        metrics: The metrics so far: a pytree with `to_host`; None if there are none.
            They are kept in the metadata, so that the state can be restored alone; all
            accumulators have to be small.
        num_used: As for `Input.place`.
        **notes: What else to keep.
    """
    place, data = batches.place(num_used)

    def made() -> dict[str, Any]:
        found: dict[str, Any] = {"place": place, **notes}
        if metrics is not None:
            leaves = [_packed(leaf) for leaf in jax.tree.leaves(metrics)]
            found |= {"metrics": leaves, "values": metrics.to_host()}
        return found

    return Later(made), data


def resume(
    checkpointer: Checkpointer,
    state: Any,
    batches: Input,
    first_step: Callable[[Any, Any], tuple[Any, Any]] | None,
) -> Resumed | None:
    """Goes on from the newest intact checkpoint, if there is one.

    Args:
        checkpointer: Where the checkpoints are.
        state: The state that training would begin with. `first_step` uses it up.
        batches: The data, which is put where it was.
        first_step: Returns the state and the metrics after a batch, to see what both
            look like once training has begun: a step may keep more beside the state
            than was there at first. What it returns is not used otherwise. None if
            the state says that already, and there are no metrics.

    Raises:
        CheckpointError: If no checkpoint was made to go on from, or all are damaged.
        RestoreDiffError: If the state is another one.

    Warns:
        CheckpointWarning: If a newer checkpoint is damaged.
    """
    checkpointer.wait()
    shapes = _Shapes(state, first_step)
    damaged: list[str] = []
    del state
    for step, found in _newest_first(checkpointer, damaged):
        folder = checkpointer.directory / str(step)
        try:
            resumed = _resume_from(checkpointer, found, folder, batches, shapes)
        except DamagedCheckpointError as error:
            damaged.append(f"step {step}: {error}")
            continue
        if damaged:
            msg = (
                f"resuming from step {step}, the newest that is intact. Damaged: "
                f"{'; '.join(damaged)}"
            )
            warnings.warn(msg, CheckpointWarning, stacklevel=stack_level())
        if jax.process_index() == 0:
            logger.info("resumed from step %d", step)
        return resumed
    if damaged:
        msg = (
            f"no intact checkpoint is left in {checkpointer.directory}. Damaged: "
            f"{'; '.join(damaged)}"
        )
        raise DamagedCheckpointError(msg)
    return None


class Later(Mapping[str, Any]):
    """A dict that is made when it is read.

    Args:
        make: Makes it.
    """

    def __init__(self, make: Callable[[], Mapping[str, Any]]) -> None:
        self._make = make
        self._made: Mapping[str, Any] | None = None

    def _dict(self) -> Mapping[str, Any]:
        if self._made is None:
            self._made = self._make()
        return self._made

    def __getitem__(self, name: str) -> Any:
        return self._dict()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._dict())

    def __len__(self) -> int:
        return len(self._dict())


class _Shapes:
    """What state and metrics look like; found when it is asked for, once."""

    def __init__(self, state: Any, first_step: Callable[..., Any] | None) -> None:
        self._state, self._first_step = state, first_step
        self._metrics: Any = None

    def look(self, batches: Input) -> tuple[Any, Any]:
        """Returns the shapes of the state and the metrics."""
        if self._first_step is not None:
            batch = batches.look()
            if batch is not None:
                first_step, self._first_step = self._first_step, None
                state, metrics = first_step(self._state, batch)
                self._state = jax.tree.map(_described, state)
                self._metrics = jax.tree.map(_described, metrics)
        return self._state, self._metrics


def _newest_first(
    checkpointer: Checkpointer, damaged: list[str]
) -> Iterator[tuple[int, Manifest]]:
    """Gives the steps with their manifests; notes those that cannot be read."""
    steps = Steps(checkpointer.directory)
    for step in reversed(steps.with_manifest()):
        try:
            yield step, steps.manifest(step)
        except DamagedCheckpointError as error:
            damaged.append(f"step {step}: {error}")


def _resume_from(
    checkpointer: Checkpointer,
    found: Manifest,
    folder: Any,
    batches: Input,
    shapes: _Shapes,
) -> Resumed:
    notes = checkpointer.inspect(found.step).metadata
    notes = notes.get(KEY) if isinstance(notes, Mapping) else None
    if not isinstance(notes, Mapping) or "place" not in notes:
        msg = (
            f"step {found.step} in {checkpointer.directory} holds a state and does not "
            "say where in the data it was made: it was saved by hand. Restore it with "
            "Checkpointer.restore, or resume from another directory."
        )
        raise CheckpointError(msg)
    check_files(folder, found)

    def put(iterator: Any) -> None:
        DataState.read(folder / found.data).set(iterator)

    to_drop = batches.take_up(notes["place"], put)
    like, empty = shapes.look(batches)
    state = checkpointer.restore(like, step=found.step)
    batches.drop(notes["place"], to_drop)
    metrics = None
    if "metrics" in notes and empty is not None:
        metrics = _unpacked(notes["metrics"], empty)
    return Resumed(found.step, state, metrics, notes.get("values", {}), notes)


# Metrics as small arrays in the metadata.


def _packed(leaf: Any) -> dict[str, Any]:
    """Returns a leaf as plain values that keep every bit."""
    if isinstance(leaf, jax.Array) and _jax.is_extended(leaf.dtype):
        leaf = jax.random.key_data(leaf)
    host = to_numpy(leaf) if isinstance(leaf, jax.Array) else np.asarray(leaf)
    return {"dtype": host.dtype.name, "shape": [*host.shape], "bytes": host.tobytes()}


def _unpacked(leaves: Any, empty: Any) -> Any:
    """Returns metrics of known shapes with the values that were saved.

    Raises:
        CheckpointError: If the metrics are others.
    """
    wanted, treedef = jax.tree.flatten(empty)
    shapes = [(one.dtype.name, tuple(one.shape)) for one in map(_words, wanted)]
    kept = [(one["dtype"], tuple(one["shape"])) for one in leaves]
    if shapes != kept:
        msg = (
            "the metrics are not those of the run that saved the checkpoint: their "
            f"arrays were {_listed(kept)}, and are {_listed(shapes)}. Resume with the "
            "same metrics."
        )
        raise CheckpointError(msg)
    made = [_placed(one, like) for one, like in zip(leaves, wanted, strict=True)]
    return treedef.unflatten(made)


def _placed(packed: Mapping[str, Any], like: Any) -> Any:
    dtype = np.dtype(jax.numpy.dtype(packed["dtype"]))
    host = np.frombuffer(packed["bytes"], dtype).reshape(packed["shape"])
    if not isinstance(like, jax.ShapeDtypeStruct):
        return host.copy()
    if _jax.is_extended(like.dtype):
        impl = _jax.key_impl(like.dtype)
        make = jax.jit(
            lambda words: jax.random.wrap_key_data(words, impl=impl),
            out_shardings=like.sharding,
        )
        return make(host)
    if like.sharding is None or like.sharding.is_fully_addressable:
        return jax.device_put(host, like.sharding)
    return jax.make_array_from_callback(
        host.shape, like.sharding, lambda index: host[index]
    )


def _words(like: Any) -> Any:
    """Returns the shape of PRNG keys as their words."""
    if isinstance(like, jax.ShapeDtypeStruct) and _jax.is_extended(like.dtype):
        return jax.eval_shape(jax.random.key_data, like)
    return like if hasattr(like, "dtype") else np.asarray(like)


def _described(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.weak_type
        )
    return leaf


def _listed(shapes: list[tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for dtype, shape in shapes) or "none"
