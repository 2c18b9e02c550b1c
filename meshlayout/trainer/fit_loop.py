"""The loops of a trainer around the steps, which a user may override.

The host only dispatches work: nothing here waits for the device except the end of an
epoch, and an evaluation that would run too far ahead of it.
"""

import functools
import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout.cluster import broadcast
from meshlayout.errors import LossError, MeshLayoutError, RecompileWarning
from meshlayout.metrics import Metrics
from meshlayout.trainer.batch_placement import PlacedBatch
from meshlayout.trainer.callbacks import Callback, Checkpoint, Progress
from meshlayout.trainer.epochs import TrainerInput
from meshlayout.trainer.interruption import Interrupts, Saver, resume_fit


if TYPE_CHECKING:
    from meshlayout.trainer.trainer import Trainer


_log = logging.getLogger("meshlayout")

# How many batches an evaluation may run ahead of the devices. More would gain nothing,
# fill them with batches, and move the progress bar to its end at once.
_MAX_PENDING = 2

# The result of `call_step` if a group has to be called batch by batch.
_ONE_BY_ONE: Any = object()


class FitLoop:
    """One call of `Trainer.fit`: its epochs, callbacks, validation and saving.

    Args:
        trainer: The trainer, whose state, position and history it updates.
        source: The training data.
        validation: The validation data, or None.
        callbacks: As the user gave them.
        group_size: How many batches a call of the train step takes.
        progress: Whether to show progress, if no callback does.
    """

    def __init__(
        self,
        trainer: "Trainer",
        source: TrainerInput,
        validation: TrainerInput | None,
        callbacks: Any,
        *,
        group_size: int,
        progress: bool,
    ) -> None:
        self._trainer, self._source, self._validation = trainer, source, validation
        self._group_size = group_size
        ordered = _as_callbacks(callbacks)
        if progress and not any(isinstance(callback, Progress) for callback in ordered):
            ordered.insert(0, Progress())
        # Those that save come last: what others do, such as stopping, is saved.
        self._callbacks = sorted(ordered, key=lambda x: isinstance(x, Checkpoint))
        self._saver, self._interrupts = Saver(self._callbacks), Interrupts()
        self._metrics: Metrics | None = None  # of the epoch so far

    def run(self, *, resume: bool) -> None:
        """Trains; with `resume`, from the newest checkpoint."""
        trainer, saver = self._trainer, self._saver
        if resume:
            self._metrics = resume_fit(trainer, self._source, saver, self._group_size)
        else:
            saver.check_new(trainer.position.step)
        with ExitStack() as closing, self._interrupts, saver:
            for callback in self._callbacks:
                closing.callback(callback.close)
            self._notify("on_fit_start")
            while trainer.position.epoch < trainer.position.last_epoch:
                if trainer.stopped:
                    break
                self._train_epoch()
                self._end_epoch()
                saver.end_if_due(trainer, None)
            self._notify("on_fit_end")

    def _notify(self, moment: str, *args: Any) -> None:
        for callback in self._callbacks:
            note = functools.partial(self._moment_text, callback, moment)
            with _checks.noted(note):
                getattr(callback, moment)(self._trainer, *args)

    def _moment_text(self, callback: Callback, moment: str) -> str:
        position = self._trainer.position
        where = f"at step {position.step}, epoch {position.epoch}"
        return f"in {type(callback).__name__}.{moment}, {where}"

    def _train_epoch(self) -> None:
        """Trains for an epoch, or for the rest of a resumed one."""
        trainer = self._trainer
        epoch = len(trainer.history.epochs) + 1
        trainer.position = replace(trainer.position, epoch=epoch)
        if self._metrics is None:  # else restored, with the position in the epoch
            trainer.position = replace(
                trainer.position, step_in_epoch=0, examples_in_epoch=0
            )
        self._notify("on_epoch_start", epoch)
        num_done = trainer.position.step_in_epoch
        groups = self._source.groups(self._group_size, num_done=num_done, epoch=epoch)
        for group in groups:
            self._train(group)
            if trainer.stopped:
                break

    def _train(self, group: list[PlacedBatch]) -> None:
        """Calls the train step on a group of batches."""
        trainer, source = self._trainer, self._source
        # The call donates the state: until the result is assigned, Ctrl-C must wait.
        with source.located(group), self._interrupts.held():
            result = call_step(
                trainer,
                source,
                trainer.train_step,
                group,
                self._metrics,
                as_list=self._group_size > 1,
            )
            if result is not _ONE_BY_ONE:
                trainer.state, self._metrics = _as_pair(trainer, result)
                self._advance(group)
        if result is _ONE_BY_ONE:
            for placed in group:
                if not trainer.stopped:
                    self._train([placed])
            return
        _check_metrics(trainer, "train_step", self._metrics)
        self._notify("on_step_end", trainer.position.step, self._metrics)
        self._saver.end_if_due(trainer, self._metrics)

    def _advance(self, group: list[PlacedBatch]) -> None:
        position, num_steps = self._trainer.position, len(group)
        self._trainer.steps_in_call = num_steps
        self._source.used = group[-1]
        self._trainer.position = replace(
            position,
            step=position.step + num_steps,
            step_in_fit=position.step_in_fit + num_steps,
            step_in_epoch=position.step_in_epoch + num_steps,
            examples_in_epoch=position.examples_in_epoch
            + sum(placed.num_examples for placed in group),
        )

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
        logs = _values_of(metrics)
        if self._validation is not None and not trainer.stopped:
            trainer.validation_steps = self._validation.num_steps
            self._notify("on_validation_start")
            values = evaluate(trainer, self._validation, self._notify)
            logs.update({f"val_{name}": value for name, value in values.items()})
        if position.steps_per_epoch is None and not trainer.stopped:
            # Unknown until a whole pass is over; for the progress of the next epochs.
            steps = position.step_in_epoch
            trainer.position = replace(position, steps_per_epoch=steps)
        trainer.history.add(position.epoch, logs)
        self._notify("on_epoch_end", position.epoch, logs)
        trainer.history.stopped = trainer.stopped


def evaluate(
    trainer: "Trainer",
    source: TrainerInput,
    notify: Callable[..., None] = lambda *args: None,
) -> dict[str, Any]:
    """Returns the metrics of the eval step over a dataset, by name."""
    metrics: Metrics | None = None
    pending: deque[PyTree] = deque()
    for number, group in enumerate(source.groups(), 1):
        with source.located(group):
            metrics = call_step(trainer, source, trainer.eval_step, group, metrics)
        _check_metrics(trainer, "eval_step", metrics)
        pending.append(metrics)
        if len(pending) > _MAX_PENDING:
            for leaf in jax.tree.leaves(pending.popleft()):
                # A user's eval step may donate the metrics that it gets.
                if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                    leaf.block_until_ready()
        notify("on_validation_step_end", number)
    return {} if metrics is None else _values_of(metrics)


def _values_of(metrics: Metrics) -> dict[str, Any]:
    """Returns values by name; those of process 0 on all processes.

    Values that are read from a clock differ, and what processes decide by their values,
    such as when to stop, must not.
    """
    values = metrics.to_host()
    is_shared = any(
        isinstance(x, jax.Array) and not x.is_fully_addressable
        for x in jax.tree.leaves(metrics)
    )
    if not is_shared:
        return values
    # A tree's dicts come back in the order of their keys.
    shared = broadcast(values, name="the metrics")
    return {name: shared[name] for name in values}


def call_step(
    trainer: "Trainer",
    source: TrainerInput,
    step: Callable[..., Any],
    group: list[PlacedBatch],
    *args: Any,
    as_list: bool = False,
) -> Any:
    """Calls a step; if the loss function returns a mean, without added weights.

    Whether it returns a mean is only known once it is traced, in the first call. From
    then on the trainer adds no weights.

    Args:
        trainer: The trainer.
        source: The data.
        step: A step of the trainer.
        group: The batches of the call.
        *args: Arguments of the step after the state and the batch.
        as_list: Whether the step takes a list of batches.

    Returns:
        The result of the step; `_ONE_BY_ONE` if it was not called, because the batches
        have different sizes without their padding.
    """

    def called(group: list[PlacedBatch]) -> Any:
        batches = [placed.batch for placed in group]
        batch = batches if as_list else batches[0]
        if not _is_any_odd(group):
            return step(trainer.state, batch, *args)
        # The batch cannot be padded, so that advice to pad it would not help.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecompileWarning)
            return step(trainer.state, batch, *args)

    group = source.placer.renewed(group)
    try:
        return called(group)
    except LossError as error:
        # Raised in tracing, before anything runs: the state is not used up.
        unweighted = source.placer.without_weights(group)
        if unweighted is None:
            raise
        result = _ONE_BY_ONE
        if len(group) == 1 or not _is_any_odd(unweighted):
            try:
                result = called(unweighted)
            except LossError:  # weights were not the problem: as if nothing was tried
                source.placer.pad = True
                raise error from None
        _log.info("the loss function returns a mean: batches get no weights")
        trainer._takes_no_weights = True
        return result


def _is_any_odd(group: list[PlacedBatch]) -> bool:
    return any(placed.is_odd for placed in group)


def _as_callbacks(callbacks: Any) -> list[Callback]:
    """Returns the callbacks of a `fit` as a list, or raises MeshLayoutError."""
    if isinstance(callbacks, (Callback, type)) or not isinstance(callbacks, Iterable):
        msg = (
            f"fit: callbacks must be a list of callbacks, got "
            f"{_checks.shown(callbacks)}. Write callbacks=[...], or omit it."
        )
        raise MeshLayoutError(msg)
    callbacks = [*callbacks]
    for index, callback in enumerate(callbacks):
        if isinstance(callback, Callback):
            continue
        fix = "A callback is an instance of a subclass of ml.callbacks.Callback."
        if isinstance(callback, type) and issubclass(callback, Callback):
            fix = f"Give an instance of it, {callback.__name__}(...)."
        msg = f"fit: callbacks[{index}] is {_checks.shown(callback)}. {fix}"
        raise MeshLayoutError(msg)
    return callbacks


def _as_pair(trainer: "Trainer", result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        size = f" of {len(result)}" if isinstance(result, tuple) else ""
        text = "None" if result is None else f"a {type(result).__name__}{size}"
        msg = (
            f"{type(trainer).__name__}.train_step must return a pair, (state, "
            f"metrics), got {text}."
        )
        raise MeshLayoutError(msg)
    return result


def _check_metrics(trainer: "Trainer", step: str, metrics: Any) -> None:
    if not isinstance(metrics, Metrics):
        pair = "(state, metrics)" if step == "train_step" else "metrics"
        msg = (
            f"{type(trainer).__name__}.{step} must return {pair}, with metrics of type "
            f"ml.metrics.Metrics, got a {type(metrics).__name__}."
        )
        raise MeshLayoutError(msg)
