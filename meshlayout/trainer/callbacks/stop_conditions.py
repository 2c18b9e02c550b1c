"""Callbacks that end training: a value no longer improves, or is not finite."""

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout._tracebacks import user_call
from meshlayout.errors import (
    CheckpointWarning,
    MeshLayoutError,
    did_you_mean,
    stack_level,
)
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.trainer.callbacks.callback import AsyncMetrics, Callback, is_due


if TYPE_CHECKING:
    from meshlayout.trainer.trainer import Trainer


def _measured(where: str, name: str, values: Mapping[str, Any]) -> float:
    """Returns a value that a callback watches, which must be a single number."""
    if name not in values:
        msg = (
            f"{where}: no value is named {name!r}, only "
            f"{', '.join(map(repr, values))}.{did_you_mean(name, values)}"
        )
        raise MeshLayoutError(msg)
    if np.ndim(values[name]):
        shown = _checks.shown(values[name])
        msg = f"{where}: {name!r} is {shown}; monitor a value that is a single number."
        raise MeshLayoutError(msg)
    return float(values[name])


class EarlyStopping(Callback):
    """Stops training if a value has not improved for some epochs.

    Use this with `validation_data`, so that training ends before it overfits.

    Args:
        monitor: The name of the value, such as `"val_loss"`.
        patience: The number of epochs in a row without improvement after which training
            stops.
        min_delta: How much better than the best a value must be to count.
        mode: `"min"` or `"max"`: whether lower or higher values are better.
        restore_best: Whether to restore the parameters of the best epoch at the end of
            training, stopped or not, with the other arrays of the model and the moving
            average. They are copied on the devices at each better epoch.
    """

    @user_call
    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        patience: int = 1,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
        restore_best: bool = False,
    ) -> None:
        name = type(self).__name__
        self._patience = _checks.count("patience", patience, where=name)
        self._min_delta = _checks.number("min_delta", min_delta, at_least=0, where=name)
        _checks.choice("mode", mode, ("min", "max"), where=name)
        self._restore_best = _checks.flag("restore_best", restore_best, where=name)
        self._monitor, self._sign = monitor, 1 if mode == "min" else -1
        self._weights: Any = None

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Resets the best value, except in a run that is resumed."""
        self._best, self._best_epoch, self._bad_epochs = math.inf, 0, 0
        self._weights = None
        if trainer.input is None or not trainer.input.is_resumed:
            return
        # As if this callback had seen the epochs of the interrupted run.
        values = trainer.history.to_dict().get(self._monitor, [])
        for epoch, value in zip(trainer.history.epochs, values, strict=False):
            self._is_better(epoch, value)
        if self._restore_best and self._best_epoch:
            msg = (
                f"EarlyStopping: the parameters of epoch {self._best_epoch}, the best "
                "so far, are not in the checkpoint that training resumes from; only "
                "those of a better epoch can be restored at the end. "
                "Checkpointer(best=...) keeps the best ones in a step of their own."
            )
            warnings.warn(msg, CheckpointWarning, stacklevel=stack_level())

    def _is_better(self, epoch: int, value: float) -> bool:
        """Returns whether an epoch's value is the best so far, and records it."""
        value *= self._sign
        # False for NaN, which thus counts as an epoch without improvement.
        if value < self._best - self._min_delta:
            self._best, self._best_epoch, self._bad_epochs = value, epoch, 0
            return True
        self._bad_epochs += 1
        return False

    def on_epoch_end(
        self, trainer: "Trainer", epoch: int, logs: Mapping[str, Any]
    ) -> None:
        """Compares the value with the best one."""
        if self._monitor not in logs and trainer.stopped:  # and so not validated
            return
        value = _measured(type(self).__name__, self._monitor, logs)
        if self._is_better(epoch, value):
            if self._restore_best:
                # A copy, as the next step donates the state.
                state = trainer.state
                self._weights = jax.tree.map(_weights, state, is_leaf=_is_state)
        elif self._bad_epochs >= self._patience:
            since = f"has not improved since epoch {self._best_epoch}"
            never = "was not a number in any epoch"
            trainer.stop(f"{self._monitor} {since if self._best_epoch else never}")

    def on_fit_end(self, trainer: "Trainer") -> None:
        """Restores the best parameters."""
        if self._weights is not None:
            trainer.state = jax.tree.map(
                _with_weights, trainer.state, self._weights, is_leaf=_is_state
            )
        self._weights = None


def _is_state(node: Any) -> bool:
    return isinstance(node, TrainState)


def _weights(part: PyTree) -> PyTree:
    """Returns copies of what a model computes with; of any other leaf, a copy.

    The optimizer's state and the step number say how far training is.
    """
    if not _is_state(part):
        return part.copy()
    ema = {name: x for name, x in part.extra.items() if name == "ema"}
    return jax.tree.map(lambda x: x.copy(), (part.params, part.model_state, ema))


def _with_weights(part: PyTree, weights: PyTree) -> PyTree:
    if not _is_state(part):
        return weights
    params, model_state, ema = weights
    extra = {**part.extra, **ema}
    return part.replace(params=params, model_state=model_state, extra=extra)


class StopOnNaN(Callback):
    """Stops training if a value is not finite.

    It checks the mean of the epoch so far, which stays NaN once it is NaN. It never
    waits: a value is checked once the device has computed it, some steps later; on
    several processes four checks later, so that all stop after the same step.

    Args:
        monitor: The name of the value.
        every: Steps between two checks.
    """

    @user_call
    def __init__(self, monitor: str = "loss", *, every: int = 1) -> None:
        self._every = _checks.count("every", every, where="StopOnNaN")
        self._monitor, self._pending = monitor, AsyncMetrics(in_step=True)

    def on_epoch_start(self, trainer: "Trainer", epoch: int) -> None:
        """Drops the values of an earlier epoch."""
        self._pending.clear()

    def on_step_end(self, trainer: "Trainer", step: int, metrics: Metrics) -> None:
        """Checks the values that are ready."""
        if is_due(trainer, self._every):
            known = [self._monitor] if self._monitor in metrics else []
            watched = Metrics({name: metrics.metric(name) for name in known})
            self._pending.add(trainer.position, watched)
        for position, values in self._pending.read():
            # Another name, or one with dims, is refused at the end of the epoch.
            self._look(trainer, position.step, values.get(self._monitor, 0.0))

    def on_epoch_end(
        self, trainer: "Trainer", epoch: int, logs: Mapping[str, Any]
    ) -> None:
        """Checks the epoch's value."""
        if not trainer.stopped:
            value = _measured("StopOnNaN", self._monitor, logs)
            self._look(trainer, trainer.position.step, value)

    def _look(self, trainer: "Trainer", step: int, value: float) -> None:
        if not math.isfinite(value) and not trainer.stopped:
            trainer.stop(f"{self._monitor} is {value} at step {step}")
