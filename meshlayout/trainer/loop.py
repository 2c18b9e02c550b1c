"""The loops of a trainer around the steps, which a user may override.

The host only dispatches work: nothing here waits for the device except the end of an
epoch, and an evaluation that would run too far ahead of it.
"""

import contextlib
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout.cluster.preemption import Preempted, Preemption, interrupts_later
from meshlayout.errors import MeshLayoutError, RecompileWarning
from meshlayout.metrics import Metrics
from meshlayout.trainer.callbacks import Callback, Checkpoint, Progress, StopOnNaN
from meshlayout.trainer.callbacks.callback import Trainer
from meshlayout.trainer.epochs import PlacedBatch, TrainerInput


# How many batches an evaluation may run ahead of the devices. More would gain nothing,
# fill them with batches, and move the progress bar to its end at once.
_MAX_PENDING = 2


class FitLoop:
    """One call of `Trainer.fit`, which updates its state, position and history."""

    def __init__(
        self, trainer: Trainer, source: TrainerInput, callbacks: Sequence[Callback]
    ) -> None:
        is_list = isinstance(callbacks, Iterable)
        for callback in callbacks if is_list else [callbacks]:
            if not is_list or not isinstance(callback, Callback):
                msg = "fit: callbacks must be a list of instances of ml.callbacks."
                shown = _checks.shown(callback)
                raise MeshLayoutError(f"{msg}Callback, and has {shown}.")
        # Those that save come last: what others do, such as stopping, is saved.
        self._callbacks = sorted(callbacks, key=lambda x: isinstance(x, Checkpoint))
        self._checkpoints = [x for x in self._callbacks if isinstance(x, Checkpoint)]
        self._trainer, self._source, self._preemption = trainer, source, Preemption()
        self._metrics: Metrics | None = None  # of the epoch so far

    def run(self, *, progress: bool, resume: bool) -> None:
        """Trains; with `resume`, from the newest checkpoint."""
        trainer = self._trainer
        if progress and not any(isinstance(x, Progress) for x in self._callbacks):
            self._callbacks.insert(0, Progress())
        if resume and not self._checkpoints:
            msg = (
                "fit(resume=True) needs a Checkpoint among the callbacks, from whose "
                "directory it resumes. Add ml.callbacks.Checkpoint(checkpointer)."
            )
            raise MeshLayoutError(msg)
        if resume:
            self._metrics = self._checkpoints[0].resume(trainer, self._source)
        with contextlib.ExitStack() as closing:
            if self._checkpoints:
                closing.enter_context(self._preemption)
            for callback in self._callbacks:
                closing.callback(callback.close)
            self._notify("on_fit_start")
            while trainer.position.epoch < trainer.position.last_epoch:
                if trainer.stopped:
                    break
                self._train_epoch()
                self._end_epoch()
                self._end_if_preempted()
            self._notify("on_fit_end")

    def _notify(self, moment: str, *args: Any) -> None:
        position = self._trainer.position
        where = f"at step {position.step}, epoch {position.epoch}"
        for callback in self._callbacks:
            with _checks.noted(f"in {type(callback).__name__}.{moment}, {where}"):
                getattr(callback, moment)(self._trainer, *args)

    def _train_epoch(self) -> None:
        """Trains for an epoch, or for the rest of a resumed one."""
        trainer, epoch = self._trainer, len(self._trainer.history.epochs) + 1
        trainer.position = replace(trainer.position, epoch=epoch)
        if self._metrics is None:  # else restored, with the position in the epoch
            start = {"step_in_epoch": 0, "examples_in_epoch": 0}
            trainer.position = replace(trainer.position, **start)
        self._notify("on_epoch_start", epoch)
        size, text = trainer._steps.group_size, f" of epoch {epoch}"
        for group in self._source.groups(size, text=text):
            with _checks.noted(self._source.where):
                self._train(group)
            self._notify("on_step_end", trainer.position.step, self._metrics)
            self._end_if_preempted()
            if trainer.stopped:
                break

    def _train(self, group: list[PlacedBatch]) -> None:
        """Calls the train step on a group of batches."""
        trainer, position, count = self._trainer, self._trainer.position, len(group)
        batches = [placed.batch for placed in group]
        batch = batches if trainer._steps.group_size > 1 else batches[0]
        # The call donates the state: until the result is assigned, Ctrl-C must wait.
        with interrupts_later(patience=2), contextlib.ExitStack() as quiet:
            if group[-1].is_odd:  # it cannot be padded: advice to do so would not help
                quiet.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore", RecompileWarning)
            state, metrics = trainer.train_step(trainer.state, batch, self._metrics)
            trainer.state, self._metrics = state, _checked("train_step", metrics)
            trainer.steps_in_call = count
            trainer.position = replace(
                position,
                step=position.step + count,
                step_in_fit=position.step_in_fit + count,
                step_in_epoch=position.step_in_epoch + count,
                examples_in_epoch=position.examples_in_epoch
                + sum(placed.num_examples for placed in group),
            )

    def _end_if_preempted(self) -> None:
        """Saves and raises Preempted after SIGTERM; called after each step."""
        if self._checkpoints and self._preemption.is_due():
            for callback in self._checkpoints:
                callback.save_now(self._trainer, self._metrics)
            raise Preempted(self._trainer.position.step)

    def _end_epoch(self) -> None:
        """Reads the epoch's metrics and validates; drops an epoch without steps."""
        trainer, position = self._trainer, self._trainer.position
        metrics, self._metrics = self._metrics, None
        if self._source.is_over:
            trainer.stop(f"the training data ended at step {position.step}")
        if metrics is None:  # the data ended exactly with the epoch before
            trainer.position = replace(position, epoch=position.epoch - 1)
            trainer.history.stopped = trainer.stopped
            return
        logs = metrics.to_host()
        if trainer.validation is not None and not trainer.stopped:
            self._notify("on_validation_start")
            values = evaluate(trainer, trainer.validation, self._notify)
            logs.update({f"val_{name}": value for name, value in values.items()})
        if position.steps_per_epoch is None and not trainer.stopped:
            # Unknown until a whole pass is over; for the progress of the next epochs.
            steps = position.step_in_epoch
            trainer.position = replace(position, steps_per_epoch=steps)
        trainer.history.add(position.epoch, logs)
        is_nan = isinstance(logs.get("loss"), float) and math.isnan(logs["loss"])
        if is_nan and not any(isinstance(x, StopOnNaN) for x in self._callbacks):
            trainer._tell(
                f"the loss of epoch {position.epoch} is NaN, and training continues. "
                "callbacks=[ml.callbacks.StopOnNaN()] stops it, on_nonfinite='skip' "
                "leaves such steps out, and jax.config.update('jax_debug_nans', True) "
                "shows where NaN comes from.",
                topic="NaN",
            )
        self._notify("on_epoch_end", position.epoch, logs)
        trainer.history.stopped = trainer.stopped


def evaluate(
    trainer: Trainer,
    source: TrainerInput,
    notify: Callable[..., None] = lambda *args: None,
) -> dict[str, Any]:
    """Returns the metrics of the eval step over a dataset, by name."""
    metrics: Metrics | None = None
    pending: deque[PyTree] = deque()
    for number, (placed,) in enumerate(source.groups(), 1):
        with _checks.noted(source.where):
            metrics = trainer.eval_step(trainer.state, placed.batch, metrics)
        pending.append(_checked("eval_step", metrics))
        if len(pending) > _MAX_PENDING:
            for leaf in jax.tree.leaves(pending.popleft()):
                # A user's eval step may donate the metrics that it gets.
                if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                    leaf.block_until_ready()
        notify("on_validation_step_end", number)
    return {} if metrics is None else metrics.to_host()


def _checked(step: str, metrics: object) -> Metrics:
    """Returns the metrics of a step, which may be overridden."""
    if not isinstance(metrics, Metrics):
        shown = _checks.shown(metrics)
        msg = f"{step} must return metrics of type ml.metrics.Metrics, got {shown}."
        raise MeshLayoutError(msg)
    return metrics
