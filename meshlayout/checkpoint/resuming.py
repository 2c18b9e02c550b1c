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
from meshlayout.checkpoint.damage import check_files
from meshlayout.checkpoint.data_state import DataState
from meshlayout.checkpoint.input import Input
from meshlayout.checkpoint.manifest import Manifest
from meshlayout.checkpoint.steps import Steps
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
        metrics: The metrics so far; None if there are none, and `Values` if it is not
            known what they look like, as no batch is left.
        notes: What else was saved with `notes_of`.
    """

    step: int
    state: Any
    metrics: Any
    notes: Mapping[str, Any]


def notes_of(place: Mapping[str, Any], metrics: Any, **notes: Any) -> Mapping[str, Any]:
    """Returns metadata to go on from, for the key `KEY`.

    The metadata is made when it is read: if a checkpoint is due, and not at each step.

    Args:
        place: What `Input.place` returned.
        metrics: The metrics so far: a pytree of arrays; None if there are none.
            They are kept in the metadata, so that the state can be restored alone; all
            accumulators have to be small.
        **notes: What else to keep.
    """

    def made() -> dict[str, Any]:
        found: dict[str, Any] = {"place": place, **notes}
        if metrics is not None:
            leaves = [_packed(leaf) for leaf in jax.tree.leaves(metrics)]
            values = metrics.to_host() if hasattr(metrics, "to_host") else {}
            found |= {"metrics": leaves, "values": values}
        return found

    return Later(made)


def resume(
    checkpointer: Checkpointer,
    state: Any,
    batches: Input,
    first_step: Callable[[Any, Any], tuple[Any, Any]] | None,
    look: Callable[[Mapping[str, Any]], None] = lambda notes: None,
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
        look: Is called with the notes of a checkpoint before it is read.

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
        try:
            resumed = _resume_from(checkpointer, found, batches, shapes, look)
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


class Values(Mapping[str, Any]):
    """Values of metrics that nothing is added to any more.

    Args:
        values: The values by name, on the host.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def to_host(self) -> dict[str, Any]:
        """Returns the values by name."""
        return dict(self._values)


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
    batches: Input,
    shapes: _Shapes,
    look: Callable[[Mapping[str, Any]], None],
) -> Resumed:
    folder = checkpointer.directory / str(found.step)
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
    look(notes)

    def put(iterator: Any) -> None:
        DataState.read(folder / found.data).set(iterator)

    batches.take_up(notes["place"], put)
    like, empty = shapes.look(batches)
    state = checkpointer.restore(like, step=found.step)
    batches.catch_up(notes["place"])
    return Resumed(found.step, state, _metrics(notes, empty), notes)


def _metrics(notes: Mapping[str, Any], empty: Any) -> Any:
    """Returns the metrics so far."""
    if "metrics" not in notes:
        return None
    if empty is None:
        return Values(notes["values"])
    return _unpacked(notes["metrics"], empty)


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
            leaf.shape,
            leaf.dtype,
            sharding=leaf.sharding,
            weak_type=getattr(leaf, "weak_type", False),
        )
    return leaf


def _listed(shapes: list[tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for dtype, shape in shapes) or "none"
