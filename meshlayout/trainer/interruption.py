"""How a `fit` is interrupted, and resumed in another process.

Ctrl-C must not come between a step, which uses up the state that it is given, and the
assignment of its result: no state at all would be left. SIGTERM is the notice of a
scheduler that takes the machine away: the run saves, and ends with a status that says
that it should be started again.
"""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import jax

from meshlayout._annotations import Batch, PyTree
from meshlayout.checkpoint.preemption import Preempted, Preemption
from meshlayout.checkpoint.resume import Notes, resume
from meshlayout.errors import CheckpointError, MeshLayoutError, StepError
from meshlayout.metrics import Metrics
from meshlayout.trainer.callbacks import Callback, Checkpoint
from meshlayout.trainer.epochs import TrainerInput


if TYPE_CHECKING:
    from meshlayout.trainer.trainer import Trainer


# Ctrl-Cs that one step holds back, so that a step that hangs in Python can be ended.
_MAX_HELD = 2


class Interrupts:
    """Holds Ctrl-C back inside `with interrupts.held():`, and nowhere else.

    The third Ctrl-C in one step is not held back. Outside the main thread, where Python
    sees no signals, and where SIGINT is not Python's to handle, it does nothing.
    """

    def __init__(self) -> None:
        self._previous: Any = None
        self._is_holding = False
        self._signals: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        previous = signal.getsignal(signal.SIGINT)
        if is_main and callable(previous):
            self._previous = previous
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Defers signals to the end of the block."""
        self._is_holding = True
        try:
            yield
        finally:
            self._is_holding = False
            if self._signals:
                first, *_ = self._signals
                self._signals.clear()
                self._previous(*first)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_holding and len(self._signals) < _MAX_HELD:
            self._signals.append((number, frame))
        else:
            self._signals.clear()
            self._previous(number, frame)


class Saver:
    """Watches for SIGTERM in a `fit` that has a `Checkpoint`, and saves then."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.checkpoints = [x for x in callbacks if isinstance(x, Checkpoint)]
        self._preemption = Preemption()

    def __enter__(self) -> Self:
        if self.checkpoints:
            self._preemption.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.checkpoints:
            self._preemption.__exit__(kind, error, trace)
        if isinstance(error, StepError):
            for callback in self.checkpoints:
                _note_newest(error, callback)

    def check_new(self, step: int) -> None:
        """Raises CheckpointError if a directory holds steps after the first one."""
        for callback in self.checkpoints:
            checkpointer = callback.checkpointer
            checkpointer.wait()
            later = [saved for saved in checkpointer.all_steps() if saved > step]
            if later:
                last = later[-1]
                has = f"{len(later)} steps up to {last}"
                msg = (
                    f"fit begins at step {step}, and {checkpointer.directory} holds "
                    f"{f'step {last}' if len(later) == 1 else has} of another "
                    f"training: resume=True would later resume from step {last}, and "
                    "not from this training. Give resume=True to resume from there "
                    "now, or save in another directory."
                )
                raise CheckpointError(msg)

    def end_if_due(self, trainer: "Trainer", metrics: Metrics | None) -> None:
        """Saves and raises Preempted after SIGTERM; called after each step.

        Args:
            trainer: The trainer.
            metrics: Those of the epoch so far; None at its end.
        """
        if self.checkpoints and self._preemption.is_due():
            for callback in self.checkpoints:
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


def resume_fit(
    trainer: "Trainer", source: TrainerInput, saver: Saver, group_size: int
) -> Metrics | None:
    """Restores a trainer from the newest intact checkpoint.

    Args:
        trainer: The trainer, at the beginning of a `fit`.
        source: The training data.
        saver: Has the callback that saved.
        group_size: The batches of a call of the train step.

    Returns:
        The metrics of the epoch so far; None if it is over, or there is no checkpoint.
    """
    if not saver.checkpoints:
        msg = (
            "fit(resume=True) resumes from what a Checkpoint has saved, and there is "
            "none among the callbacks. Add ml.callbacks.Checkpoint(checkpointer)."
        )
        raise MeshLayoutError(msg)
    checkpointer = saver.checkpoints[0].checkpointer
    is_used_up = False

    def first_step(state: PyTree, batch: Batch) -> Any:
        nonlocal is_used_up
        is_used_up = True
        placed = source.placer(batch).batch
        group = placed if group_size == 1 else [placed] * group_size
        return trainer.train_step(state, group, None)

    def look(notes: Notes) -> None:
        if "history" not in notes:
            msg = (
                f"the newest checkpoint in {checkpointer.directory} was saved by a "
                "checkpoint.Loop, and fit(resume=True) resumes from what the callback "
                "Checkpoint has saved. Resume with the Loop, or give another "
                "directory; Checkpointer.restore returns the state alone."
            )
            raise CheckpointError(msg)
        source.placer.size = notes["batch_rows"]
        source.placer.pad = notes.get("pads", source.placer.pad)

    try:
        resumed = resume(checkpointer, trainer.state, source.passes, first_step, look)
    except Exception as error:
        if is_used_up:
            error.add_note("The trainer's state is used up: make a new Trainer.")
        raise
    if resumed is None:
        return None
    notes, position = resumed.notes, trainer.position
    trainer.state, source.is_resumed = resumed.state, True
    trainer.history.set(**notes["history"])
    trainer.position = replace(
        position,
        epoch=len(trainer.history.epochs),
        last_epoch=position.last_epoch - position.epoch,
        step=resumed.step,
        **notes["position"],
    )
    if notes["is_end"]:
        source.resume(None)
        trainer.stopped = trainer.history.stopped = notes["stopped"]
        return None
    source.resume(trainer.position.step_in_epoch)
    return resumed.metrics
