"""Resuming a `fit` from the newest intact checkpoint: the state, the metrics, the data.

A step may add arrays to the state that training begins with (a moving average, a loss
scale), and only the step knows the structure of its metrics. So the step is called once
on the first batch, to see both; its result is thrown away, and the values come from the
checkpoint, where the metrics of the epoch so far are a tree beside the state.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from meshlayout._annotations import Batch, Leaf, PyTree
from meshlayout.checkpoint.checkpointer import Checkpointer
from meshlayout.checkpoint.load import Request
from meshlayout.checkpoint.orbax import SavedStep
from meshlayout.checkpoint.positions import Continues, move_to_position
from meshlayout.errors import CheckpointError
from meshlayout.trainer.passes import Input


# The key of the values to resume from in the metadata of a checkpoint, and the name of
# the metrics of the epoch so far, beside the state.
KEY, METRICS = "resume", "epoch_metrics"

Notes: TypeAlias = Mapping[str, Any]
"""The values to resume from, as `notes_of` returned them before the save."""

FirstStep: TypeAlias = Callable[[PyTree, Batch], tuple[PyTree, PyTree]]


@dataclass(frozen=True)
class Resumed:
    """The values that a run continues with.

    Attributes:
        step: The step of the checkpoint.
        state: The state.
        metrics: The metrics so far; None if there are none, and `Values` if no batch is
            left that could show their structure.
        notes: The other values that `notes_of` returned.
    """

    step: int
    state: PyTree
    metrics: PyTree
    notes: Notes


class Values(dict[str, Any]):
    """Final values of metrics, by name, on the host."""

    def to_host(self) -> dict[str, Any]:
        """Returns the values by name."""
        return dict(self)


def notes_of(place: Notes, metrics: PyTree, **notes: Any) -> dict[str, Any]:
    """Returns the metadata to resume from, for the key `KEY`.

    Args:
        place: The position in the data, from `Input.place`.
        metrics: The metrics so far; None if there are none.
        **notes: Other values to keep.
    """
    notes |= {"place": place}
    if metrics is not None:
        notes["values"] = metrics.to_host() if hasattr(metrics, "to_host") else {}
    return notes


def resume(
    checkpointer: Checkpointer,
    state: PyTree,
    batches: Input,
    first_step: FirstStep,
    look: Callable[[Notes], None],
) -> Resumed | None:
    """Resumes from the newest intact checkpoint, if there is one.

    Args:
        checkpointer: The checkpointer of the run's directory.
        state: The state that training would begin with; `first_step` uses it up.
        batches: The data, which is moved to its saved position.
        first_step: Returns the state and the metrics after a batch; only their
            structure is used.
        look: Called with the notes of a checkpoint before its arrays are read.

    Raises:
        CheckpointError: If the newest checkpoint cannot be resumed from, or all are
            damaged.
        RestoreDiffError: If the state differs from the saved one.

    Warns:
        CheckpointWarning: If a newer checkpoint is damaged.
    """
    like, empty, is_known = state, None, False
    del state  # `first_step` donates it: nothing else may hold it

    def read(saved: SavedStep) -> Resumed:
        nonlocal like, empty, is_known
        notes = _notes(saved)
        look(notes)

        def put(iterator: Continues) -> None:
            move_to_position(iterator, saved.facts["data"])

        batches.take_up(notes["place"], put)
        batch = batches.look()
        # Called once, even if this checkpoint is damaged and an older one is tried.
        if batch is not None and not is_known:
            like, empty = jax.tree.map(_abstract, first_step(like, batch))
            is_known = True
        state = saved.load(Request(like=like))
        batches.catch_up(notes["place"])
        metrics = empty if "values" in notes else None
        if METRICS in saved.facts["items"]:
            metrics = Values(notes["values"])
            if is_known:
                metrics = saved.load(Request(like=empty), METRICS)
        return Resumed(saved.number, state, metrics, notes)

    return checkpointer.newest(lambda step: checkpointer.read(step, read))


def _notes(saved: SavedStep) -> Notes:
    """Returns the values that `notes_of` returned before a step was saved."""
    metadata = saved.facts["metadata"]
    notes = metadata.get(KEY) if isinstance(metadata, Mapping) else None
    if not isinstance(notes, Mapping) or "place" not in notes:
        msg = (
            f"{saved.path} holds a state, but not its position in the data: it was "
            "saved with Checkpointer.save. Restore it with Checkpointer.restore, or "
            "resume from another directory."
        )
        raise CheckpointError(msg)
    return notes


def _abstract(leaf: Leaf) -> Any:
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=leaf.sharding,
            weak_type=getattr(leaf, "weak_type", False),
        )
    return leaf
