"""Callbacks that end training: a value no longer improves, or is not finite."""

import math
from collections import deque
from typing import Any, Literal

import jax

from meshlayout import _checks
from meshlayout.errors import MeshLayoutError
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.trainer.callbacks.callback import Callback, Logs, Trainer


# A value is read so many calls later: it is computed by then, and on several processes
# all of them stop after the same step.
_CALLS_LATER = 4


@_checks.user_call
class EarlyStopping(Callback):
    """Stops training if a value has not improved for some epochs.

    A resumed run also counts the epochs before its interruption.

    Args:
        monitor: The name of the value, such as `"val_loss"`.
        patience: The number of epochs without improvement after which training stops.
        min_delta: The smallest difference that counts as an improvement.
        mode: `"min"` or `"max"`: the better values; by default lower for losses.
        restore_best: Whether `fit` ends with the parameters, other arrays of the model
            and moving average of the best epoch, which the devices keep a copy of.
            Checkpoints have the latest: restore `step="best"` of a `Checkpointer`.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        patience: int = 1,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] | None = None,
        restore_best: bool = False,
    ) -> None:
        name = type(self).__name__
        self._patience = _checks.count("patience", patience, where=name)
        self._min_delta = _checks.number("min_delta", min_delta, at_least=0, where=name)
        if mode is None and not monitor.endswith("loss"):
            msg = f"{name}({monitor!r}): say mode='max' if higher values are better,"
            raise MeshLayoutError(f"{msg} or mode='min'.")
        mode = _checks.choice("mode", mode or "min", ("min", "max"), where=name)
        self._monitor, self._sign = monitor, 1 if mode == "min" else -1
        self._restore_best = restore_best
        self._weights: dict[str, Any] = {}  # copies of the best ones

    def on_fit_start(self, trainer: Trainer) -> None:
        self._first = 0 if trainer.position.is_resumed else len(trainer.history.epochs)
        self._best_epoch, self._weights = 0, {}
        if self._restore_best and not isinstance(trainer.state, TrainState):
            msg = "EarlyStopping(restore_best=True) restores the model of a TrainState."
            raise MeshLayoutError(f"{msg} The state is {_checks.shown(trainer.state)}.")

    def on_epoch_end(self, trainer: Trainer, epoch: int, logs: Logs) -> None:
        if self._monitor not in logs and trainer.stopped:  # and so not validated
            return
        best, self._best_epoch = math.inf, 0
        for number, value in enumerate(trainer.history[self._monitor], 1):
            score = value * self._sign
            # False for NaN, which thus counts as an epoch without improvement.
            if number > self._first and score < best - self._min_delta:
                best, self._best_epoch = score, number
        if self._best_epoch == epoch and self._restore_best:
            # A copy, but not of the optimizer's state and the step, which go on.
            state: TrainState = trainer.state
            weights = {"params": state.params, "model_state": state.model_state}
            weights["extra"] = {x: state.extra[x] for x in {"ema"} & {*state.extra}}
            self._weights = jax.tree.map(lambda leaf: leaf.copy(), weights)
        if epoch - max(self._best_epoch, self._first) >= self._patience:
            since = f"has not improved since epoch {self._best_epoch}"
            never = "was not a number in any epoch"
            trainer.stop(f"{self._monitor} {since if self._best_epoch else never}")

    def on_fit_end(self, trainer: Trainer) -> None:
        if self._weights:
            extra = {**trainer.state.extra, **self._weights.pop("extra")}
            trainer.state = trainer.state.replace(**self._weights, extra=extra)
        elif self._restore_best and self._best_epoch:
            fact = f"the best epoch, {self._best_epoch}, was before the run was resumed"
            trainer._report.warn(f"{fact}, and is not restored: restore step='best'.")
        self._weights = {}


@_checks.user_call
class StopOnNaN(Callback):
    """Stops training if a value is not finite.

    It checks the mean of the epoch so far, which it reads when four more calls of the
    step are running, so training stops some steps later.

    Args:
        monitor: The name of the value.
    """

    def __init__(self, monitor: str = "loss") -> None:
        self._monitor = monitor
        self._pending: deque[tuple[int, Any]] = deque()

    def on_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        self._pending.clear()

    def on_step_end(self, trainer: Trainer, step: int, metrics: Metrics) -> None:
        if self._monitor in metrics.names:  # else it is of validation
            # New arrays: the next step donates the metrics themselves.
            watched = Metrics({self._monitor: metrics.metric(self._monitor)})
            self._pending.append((step, watched.local_values()[self._monitor]))
        if len(self._pending) > _CALLS_LATER:
            self._check(trainer, *self._pending.popleft())

    def on_epoch_end(self, trainer: Trainer, epoch: int, logs: Logs) -> None:
        self._check(trainer, trainer.position.step, logs.get(self._monitor, 0.0))

    def _check(self, trainer: Trainer, step: int, value: Any) -> None:
        if not math.isfinite(value):
            trainer.stop(f"{self._monitor} is {value} at step {step}")
