"""Resuming a `fit` from the newest intact checkpoint: state, metrics, history, data.

A step may add arrays to the state that training begins with (a moving average, a loss
scale), and only the step knows the structure of its metrics. So the step is called once
on a first batch, to see both; its result is thrown away, and the values come from the
checkpoint, where the metrics of the epoch so far are a tree beside the state.
"""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from meshlayout._annotations import Leaf
from meshlayout.checkpoint.checkpointer import Checkpointer
from meshlayout.checkpoint.load import Request
from meshlayout.checkpoint.orbax import SavedStep
from meshlayout.checkpoint.positions import move_to_position
from meshlayout.errors import CheckpointError
from meshlayout.metrics import Metrics


if TYPE_CHECKING:
    from meshlayout.trainer.epochs import TrainerInput
    from meshlayout.trainer.trainer import Trainer


# The key of the values to resume from in the metadata of a checkpoint, and the name of
# the metrics of the epoch so far, beside the state.
KEY, METRICS = "resume", "epoch_metrics"


def notes_of(trainer: "Trainer", place: Mapping[str, Any], *, is_end: bool) -> Any:
    """Returns the metadata to resume from at a place in the data, for `KEY`."""
    position, history, source = trainer.position, trainer.history, trainer.input
    return {
        "place": place,
        "is_end": is_end,
        "stopped": trainer.stopped,
        "batch_rows": 0 if source is None else source.placer.size,
        "position": {
            "step_in_epoch": position.step_in_epoch,
            "steps_per_epoch": position.steps_per_epoch,
            "examples_in_epoch": position.examples_in_epoch,
        },
        "history": {"epochs": history.epochs, "values": history.to_dict()},
    }


def resume_fit(
    trainer: "Trainer",
    source: "TrainerInput",
    checkpointer: Checkpointer,
    group_size: int,
) -> Metrics | None:
    """Restores a trainer from the newest intact checkpoint, if there is one.

    Returns the metrics of the epoch so far; None if it is over. Raises CheckpointError
    if the newest checkpoint cannot be resumed from, or all are damaged.
    """
    abstract: list[Any] = []

    def structures(notes: Mapping[str, Any]) -> list[Any]:
        """Returns the state and the metrics after a step, without their values."""
        if not abstract:  # else an older checkpoint is tried
            # Padded as before, so that the same program computes the same bits.
            source.placer.size = notes["batch_rows"]
            batch = source.first_batch()
            batches = batch if group_size == 1 else [batch] * group_size
            result = trainer.train_step(trainer.state, batches, None)
            abstract.extend(jax.tree.map(_abstract, result))
        return abstract

    def read(saved: SavedStep) -> tuple[SavedStep, Any, Metrics | None]:
        notes = _notes(saved)
        state, metrics = structures(notes)
        if notes["is_end"]:
            return saved, saved.load(Request(like=state)), None
        # A metric without arrays is what the first step returned.
        if METRICS in saved.facts["items"]:
            metrics = saved.load(Request(like=metrics), METRICS)
        return saved, saved.load(Request(like=state)), metrics

    try:
        found = checkpointer.newest(lambda step: checkpointer.read(step, read))
    except Exception as error:
        if abstract:
            error.add_note("The trainer's state is used up: make a new Trainer.")
        raise
    if found is None:
        return None
    saved, trainer.state, metrics = found
    notes, data = _notes(saved), saved.facts["data"]
    move = None if data is None else functools.partial(move_to_position, positions=data)
    source.resume(notes["place"], move, is_end=notes["is_end"])
    trainer.history._restore(**notes["history"])
    position, num_epochs = trainer.position, len(trainer.history.epochs)
    last_epoch = position.last_epoch - position.epoch
    trainer.position = replace(
        position,
        epoch=num_epochs,
        last_epoch=last_epoch,
        step=saved.number,
        **notes["position"],
    )
    if notes["is_end"]:
        trainer.stopped = trainer.history.stopped = notes["stopped"]
    return metrics


def _notes(saved: SavedStep) -> Mapping[str, Any]:
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
