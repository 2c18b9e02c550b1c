"""How a `fit` is saved at preemption, and gone on with in another process."""

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from meshlayout.checkpoint.preemption import Preempted, Preemption
from meshlayout.checkpoint.resume import resume
from meshlayout.errors import CheckpointError, MeshLayoutError
from meshlayout.trainer.callbacks import Callback, Checkpoint, Progress


if TYPE_CHECKING:
    from meshlayout.trainer.trainer import Trainer


def in_order(callbacks: Sequence[Callback], *, progress: bool) -> list[Callback]:
    """Returns the callbacks as they are called: those that save are last.

    So what others have done at a step, as stopping, is saved with it.

    Args:
        callbacks: What the user gave.
        progress: Whether to show progress, if none of them does.
    """
    called = [*callbacks]
    if progress and not any(isinstance(one, Progress) for one in called):
        called.insert(0, Progress())
    return sorted(called, key=lambda one: isinstance(one, Checkpoint))


class Saver:
    """Looks out for SIGTERM in a `fit` that has a `Checkpoint`, and saves then.

    Args:
        callbacks: All callbacks.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._checkpoints = [one for one in callbacks if isinstance(one, Checkpoint)]
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

    def check_new(self, step: int) -> None:
        """Raises where steps lie that training from a step on would not have made.

        Args:
            step: Where training begins.

        Raises:
            CheckpointError: If a directory holds later steps.
        """
        for one in self._checkpoints:
            one.checkpointer.wait()
            later = [found for found in one.checkpointer.all_steps() if found > step]
            if later:
                raise CheckpointError(_others(one.checkpointer.directory, step, later))

    def look(self, trainer: "Trainer", metrics: Any) -> None:
        """Saves and ends the process, if it was told to; to be called after each step.

        Args:
            trainer: The trainer.
            metrics: Those of the epoch so far; None at its end.

        Raises:
            Preempted: If so, once everything is saved.
        """
        if self._checkpoints and self._preemption.is_due():
            for one in self._checkpoints:
                one.save_now(trainer, metrics)
            raise Preempted(trainer.position.step)


def _others(directory: Any, step: int, later: Sequence[int]) -> str:
    """Returns the message for steps that another training has made."""
    last = later[-1]
    has = f"step {last}" if len(later) == 1 else f"{len(later)} steps up to {last}"
    return (
        f"fit begins at step {step}, and {directory} holds {has} of another training: "
        f"resume=True would later go on from step {last}, and not from this training. "
        "Give resume=True to go on from there now, or save in another directory."
    )


def resume_fit(trainer: "Trainer", saved: Checkpoint | None, group_size: int) -> Any:
    """Puts a trainer where the newest intact checkpoint was made.

    Args:
        trainer: The trainer, at the beginning of a `fit`.
        saved: What saved.
        group_size: The batches of a call of the train step.

    Returns:
        The metrics of the epoch so far; None if it is over, or there is no checkpoint.

    Raises:
        MeshLayoutError: If nothing saves.
        CheckpointError: If the checkpoint cannot be gone on from.
    """
    reading = trainer.reading
    if saved is None or reading is None:
        msg = (
            "fit(resume=True) goes on from what a Checkpoint has saved, and there is "
            "none among the callbacks. Add ml.callbacks.Checkpoint(checkpointer)."
        )
        raise MeshLayoutError(msg)

    is_used_up = False

    def first_step(state: Any, batch: Any) -> Any:
        nonlocal is_used_up
        is_used_up = True
        fed = reading.feeder(batch).batch
        group = fed if group_size == 1 else [fed] * group_size
        return trainer.train_step(state, group, None)

    def look(notes: Any) -> None:
        if "history" not in notes:
            msg = (
                f"the newest checkpoint in {saved.checkpointer.directory} was saved by "
                "a checkpoint.Loop, and fit(resume=True) goes on from what the "
                "callback Checkpoint has saved. Go on with the Loop, or give another "
                "directory; Checkpointer.restore returns the state alone."
            )
            raise CheckpointError(msg)
        reading.feeder.size = notes["batch_rows"]

    try:
        found = resume(
            saved.checkpointer, trainer.state, reading.passes.input, first_step, look
        )
    except Exception as error:
        if is_used_up:
            error.add_note("The trainer's state is used up: make a new Trainer.")
        raise
    if found is None:
        return None
    notes, epochs = found.notes, trainer.position.last_epoch - trainer.position.epoch
    trainer.state, reading.is_resumed = found.state, True
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
        reading.passes.go_on(None)
        trainer.stop(notes["stopped"])
        trainer.history.stopped = trainer.stopped
        return None
    reading.passes.go_on(trainer.position.step_in_epoch)
    return found.metrics
