"""How a `fit` is saved at preemption, and resumed in another process."""

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import jax

from meshlayout._annotations import Batch, PyTree
from meshlayout.checkpoint.preemption import Preempted, Preemption
from meshlayout.checkpoint.resume import resume
from meshlayout.errors import CheckpointError, MeshLayoutError, StepError
from meshlayout.metrics import Metrics
from meshlayout.trainer.callbacks import Callback, Checkpoint, Progress


if TYPE_CHECKING:
    from meshlayout.trainer.trainer import Trainer


def in_order(callbacks: Sequence[Callback], *, progress: bool) -> list[Callback]:
    """Returns the callbacks in the order of their calls: those that save are last.

    So the effects of the others at a step, such as stopping, are saved with it.

    Args:
        callbacks: What the user gave.
        progress: Whether to show progress, if none of them does.
    """
    ordered = [*callbacks]
    if progress and not any(isinstance(callback, Progress) for callback in ordered):
        ordered.insert(0, Progress())
    return sorted(ordered, key=lambda callback: isinstance(callback, Checkpoint))


class Saver:
    """Watches for SIGTERM in a `fit` that has a `Checkpoint`, and saves then.

    Args:
        callbacks: All callbacks.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._checkpoints = [x for x in callbacks if isinstance(x, Checkpoint)]
        self._preemption = Preemption()

    @property
    def first(self) -> Checkpoint | None:
        """The first `Checkpoint`."""
        return next(iter(self._checkpoints), None)

    def __enter__(self) -> Self:
        if self._checkpoints:
            self._preemption.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._checkpoints:
            self._preemption.__exit__(kind, error, trace)
        if isinstance(error, StepError):
            for callback in self._checkpoints:
                _note_newest(error, callback)

    def check_new(self, step: int) -> None:
        """Refuses directories with steps that this run would not have saved.

        Args:
            step: Where training begins.

        Raises:
            CheckpointError: If a directory holds later steps.
        """
        for callback in self._checkpoints:
            checkpointer = callback.checkpointer
            checkpointer.wait()
            later = [saved for saved in checkpointer.all_steps() if saved > step]
            if later:
                raise CheckpointError(_others(checkpointer.directory, step, later))

    def end_if_due(self, trainer: "Trainer", metrics: Metrics | None) -> None:
        """Saves and ends the process after SIGTERM; called after each step.

        Args:
            trainer: The trainer.
            metrics: Those of the epoch so far; None at its end.

        Raises:
            Preempted: If so, once everything is saved.
        """
        if self._checkpoints and self._preemption.is_due():
            for callback in self._checkpoints:
                callback.save_now(trainer, metrics)
            raise Preempted(trainer.position.step)


def _note_newest(error: StepError, callback: Checkpoint) -> None:
    """Says in an error of a step from where training can start again."""
    checkpointer = callback.checkpointer
    try:
        # A save that is running ends on all processes or on none, and the others may
        # not have come to this error yet.
        if jax.process_count() == 1:
            checkpointer.wait()
        step = checkpointer.latest_step()
    except CheckpointError as problem:  # a save that failed is not the first problem
        error.add_note(f"No checkpoint is named here: {problem}")
        return
    if step is not None:
        error.add_note(
            f"The newest checkpoint is step {step} in {checkpointer.directory}; "
            "fit(resume=True) resumes from it."
        )


def _others(directory: Any, step: int, later: Sequence[int]) -> str:
    """Returns the message for steps that another run has saved."""
    last = later[-1]
    has = f"step {last}" if len(later) == 1 else f"{len(later)} steps up to {last}"
    return (
        f"fit begins at step {step}, and {directory} holds {has} of another training: "
        f"resume=True would later resume from step {last}, and not from this training. "
        "Give resume=True to resume from there now, or save in another directory."
    )


def resume_fit(
    trainer: "Trainer", saved: Checkpoint | None, group_size: int
) -> Metrics | None:
    """Restores a trainer from the newest intact checkpoint.

    Args:
        trainer: The trainer, at the beginning of a `fit`.
        saved: The callback that saved.
        group_size: The batches of a call of the train step.

    Returns:
        The metrics of the epoch so far; None if it is over, or there is no checkpoint.

    Raises:
        MeshLayoutError: If there is no `Checkpoint`.
        CheckpointError: If the checkpoint cannot be resumed from.
    """
    training_input = trainer.input
    if saved is None or training_input is None:
        msg = (
            "fit(resume=True) resumes from what a Checkpoint has saved, and there is "
            "none among the callbacks. Add ml.callbacks.Checkpoint(checkpointer)."
        )
        raise MeshLayoutError(msg)

    is_used_up = False

    def first_step(state: PyTree, batch: Batch) -> Any:
        nonlocal is_used_up
        is_used_up = True
        placed = training_input.placer(batch).batch
        group = placed if group_size == 1 else [placed] * group_size
        return trainer.train_step(state, group, None)

    def look(notes: Any) -> None:
        if "history" not in notes:
            msg = (
                f"the newest checkpoint in {saved.checkpointer.directory} was saved by "
                "a checkpoint.Loop, and fit(resume=True) resumes from what the "
                "callback Checkpoint has saved. Resume with the Loop, or give another "
                "directory; Checkpointer.restore returns the state alone."
            )
            raise CheckpointError(msg)
        training_input.placer.size = notes["batch_rows"]
        training_input.placer.pad = notes.get("pads", training_input.placer.pad)

    try:
        found = resume(
            saved.checkpointer,
            trainer.state,
            training_input.passes.input,
            first_step,
            look,
        )
    except Exception as error:
        if is_used_up:
            error.add_note("The trainer's state is used up: make a new Trainer.")
        raise
    if found is None:
        return None
    notes, epochs = found.notes, trainer.position.last_epoch - trainer.position.epoch
    trainer.state, training_input.is_resumed = found.state, True
    trainer.history.set(**notes["history"])
    done = len(trainer.history.epochs)
    trainer.position = replace(
        trainer.position,
        epoch=done,
        last_epoch=epochs,
        step=found.step,
        **notes["position"],
    )
    if notes["is_end"]:
        training_input.passes.resume(None)
        trainer.stop(notes["stopped"])
        trainer.history.stopped = trainer.stopped
        return None
    training_input.passes.resume(trainer.position.step_in_epoch)
    return found.metrics
