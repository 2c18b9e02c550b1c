"""How a `fit` is interrupted, and resumed in another process.

Ctrl-C must not come between a step, which uses up its state, and the assignment of its
result: no state would be left. SIGTERM is how a scheduler announces that it takes the
machine away: the run saves, and ends with a status that says "start it again".
"""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import jax

from meshlayout._annotations import Batch, PyTree
from meshlayout.cluster.preemption import Preempted, Preemption
from meshlayout.errors import CheckpointError, MeshLayoutError, StepError
from meshlayout.metrics import Metrics
from meshlayout.trainer.callbacks import Callback, Checkpoint
from meshlayout.trainer.epochs import TrainerInput
from meshlayout.trainer.resume import Notes, resume


if TYPE_CHECKING:
    from meshlayout.trainer.trainer import Trainer


# How many Ctrl-Cs a step may hold back: a step that hangs in Python can be ended.
_MAX_HELD = 2


class Interrupts:
    """Holds Ctrl-C back inside `with interrupts.held():`, and nowhere else.

    The third Ctrl-C in one step is not held back. In other threads than the main one,
    where Python sees no signals, this does nothing, nor if SIGINT is ignored or handled
    outside Python.
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
                # Once, however often it was pressed: the handler raises.
                first, *_ = self._signals
                self._signals.clear()
                self._previous(*first)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_holding and len(self._signals) < _MAX_HELD:
            self._signals.append((number, frame))
        else:  # the step hangs, or nothing is to be protected
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
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        if self.checkpoints:
            self._preemption.__exit__(kind, error, trace)
        if isinstance(error, StepError):
            for callback in self.checkpoints:
                _note_newest(error, callback)

    def check_new(self, step: int) -> None:
        """Raises CheckpointError if a directory holds steps later than `step`."""
        for callback in self.checkpoints:
            checkpointer = callback.checkpointer
            checkpointer.wait()
            later = [saved for saved in checkpointer.all_steps() if saved > step]
            if later:
                last = later[-1]
                has = f"{len(later)} steps up to {last}"
                msg = (
                    f"fit begins at step {step}, but {checkpointer.directory} holds "
                    f"{f'step {last}' if len(later) == 1 else has} of another run: "
                    f"resume=True would later resume from step {last}, not from this "
                    "run. Give resume=True to resume from there now, or save to "
                    "another directory."
                )
                raise CheckpointError(msg)

    def end_if_due(self, trainer: "Trainer", metrics: Metrics | None) -> None:
        """Saves and raises Preempted after SIGTERM; called after each step.

        Args:
            trainer: The trainer.
            metrics: The metrics of the epoch so far; None at its end.
        """
        if self.checkpoints and self._preemption.is_due():
            for callback in self.checkpoints:
                callback.save_now(trainer, metrics)
            raise Preempted(trainer.position.step)


def _note_newest(error: StepError, callback: Checkpoint) -> None:
    """Adds a note to an error of a step: the checkpoint to resume from."""
    checkpointer = callback.checkpointer
    try:
        # On several processes a running save waits for all of them, and the others may
        # never come to this error.
        if jax.process_count() == 1:
            checkpointer.wait()
        step = checkpointer.latest_step()
    except CheckpointError as problem:  # the step's error came first, and is raised
        error.add_note(f"The newest checkpoint is not known: {problem}")
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
        saver: Its first `Checkpoint` is resumed from.
        group_size: The batches of a call of the train step.

    Returns:
        The metrics of the epoch so far; None if it is over, or there is no checkpoint.
    """
    if not saver.checkpoints:
        msg = (
            "fit(resume=True) needs a Checkpoint among the callbacks, from whose "
            "directory it resumes. Add ml.callbacks.Checkpoint(checkpointer)."
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
        # Padded as before, so that the same program computes the same bits.
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
