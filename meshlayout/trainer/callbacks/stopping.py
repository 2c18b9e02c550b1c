"""Callbacks that end training: no progress any more, or no numbers any more."""

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import jax

from meshlayout.errors import (
    CheckpointWarning,
    MeshLayoutError,
    did_you_mean,
    stack_level,
)
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.trainer.callbacks.callback import Callback
from meshlayout.trainer.callbacks.late import Late


if TYPE_CHECKING:
    from meshlayout.trainer.trainer import Trainer


class EarlyStopping(Callback):
    """Stops when a value has not become better for some epochs.

    Args:
        monitor: The name of the value, as `"val_loss"`.
        patience: Epochs in a row without a better value after which training stops.
        min_delta: By how much a value has to be better than the best to count.
        mode: Whether `"min"` or `"max"` is better.
        restore_best: Whether the parameters of the best epoch, with the model's other
            arrays and the moving average, are put back when training ends, whether it
            was stopped or not. They are copied on the devices at each better epoch.

    Raises:
        MeshLayoutError: If an option is wrong; at the end of an epoch, if nothing of
            that name was measured.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        patience: int = 1,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
        restore_best: bool = False,
    ) -> None:
        if mode not in ("min", "max"):
            msg = f"EarlyStopping: mode={mode!r} is not 'min' or 'max'."
            raise MeshLayoutError(msg)
        if patience < 1:
            msg = f"EarlyStopping: patience={patience!r} is no whole number from 1 on."
            raise MeshLayoutError(msg)
        if min_delta < 0:
            msg = f"EarlyStopping: min_delta={min_delta!r} is below 0."
            raise MeshLayoutError(msg)
        self._monitor, self._patience = monitor, patience
        self._min_delta, self._restore_best = min_delta, restore_best
        self._sign = 1 if mode == "min" else -1
        self._forget()

    def _forget(self) -> None:
        self._best, self._best_epoch, self._bad_epochs = math.inf, 0, 0
        self._kept: Any = None

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Forgets earlier training, but not that of a run that is resumed."""
        self._forget()
        if trainer.reading is None or not trainer.reading.is_resumed:
            return
        values = trainer.history.to_dict().get(self._monitor, [])
        for epoch, value in zip(trainer.history.epochs, values, strict=False):
            self._is_better(epoch, float(value))
        if self._restore_best and self._best_epoch:
            msg = (
                "EarlyStopping: the parameters of the best epoch so far, "
                f"{self._best_epoch}, are not in the checkpoint that training goes on "
                "from; only those of a better one can be put back. With "
                "Checkpointer(best=...), they can be restored."
            )
            warnings.warn(msg, CheckpointWarning, stacklevel=stack_level())

    def _is_better(self, epoch: int, value: float) -> bool:
        """Compares an epoch's value with the best one, and notes it."""
        value *= self._sign
        if value < self._best - self._min_delta:
            self._best, self._best_epoch, self._bad_epochs = value, epoch, 0
            return True
        self._bad_epochs += 1
        return False

    def on_epoch_end(
        self, trainer: "Trainer", epoch: int, logs: Mapping[str, Any]
    ) -> None:
        """Compares the value with the best one."""
        if self._monitor not in logs and trainer.stopped:
            return
        value = float(found(type(self).__name__, self._monitor, logs))
        if self._is_better(epoch, value):
            if self._restore_best:
                self._kept = jax.tree.map(lambda x: x.copy(), _weights(trainer.state))
            return
        if self._bad_epochs >= self._patience:
            trainer.stop(
                f"{self._monitor} has not become better since epoch {self._best_epoch}"
            )

    def on_fit_end(self, trainer: "Trainer") -> None:
        """Puts the best parameters back."""
        if self._kept is not None:
            trainer.state = _with_weights(trainer.state, self._kept)
        self._kept = None


def _weights(state: Any) -> Any:
    """Returns what a model computes with, of each train state in a tree."""

    def one(part: Any) -> Any:
        if not isinstance(part, TrainState):
            return part
        ema = {name: x for name, x in part.extra.items() if name == "ema"}
        return part.params, part.model_state, ema

    return jax.tree.map(one, state, is_leaf=_is_state)


def _with_weights(state: Any, weights: Any) -> Any:
    def one(part: Any, kept: Any) -> Any:
        if not isinstance(part, TrainState):
            return kept
        params, model_state, ema = kept
        extra = {**part.extra, **ema}
        return part.replace(params=params, model_state=model_state, extra=extra)

    return jax.tree.map(one, state, weights, is_leaf=_is_state)


def _is_state(node: Any) -> bool:
    return isinstance(node, TrainState)


def found(who: str, name: str, values: Mapping[str, Any]) -> Any:
    """Returns a value, or raises MeshLayoutError if there is none of that name."""
    if name not in values:
        msg = (
            f"{who}: there is no {name!r} among {', '.join(map(repr, values))}."
            f"{did_you_mean(name, values)}"
        )
        raise MeshLayoutError(msg)
    return values[name]


class StopOnNaN(Callback):
    """Stops when a value is not finite.

    It looks at the epoch's mean so far, which stays NaN once it is, as soon as the
    device has it: some steps later, without waiting for any.

    Args:
        monitor: The name of the value.
        every: Steps between two looks.
    """

    def __init__(self, monitor: str = "loss", *, every: int = 1) -> None:
        check_every("StopOnNaN", every)
        self._monitor, self._every = monitor, every
        self._late = Late()

    def on_epoch_start(self, trainer: "Trainer", epoch: int) -> None:
        """Forgets what was still on its way."""
        self._late.clear()

    def on_step_end(self, trainer: "Trainer", step: int, metrics: Metrics) -> None:
        """Looks at the values that are there."""
        if is_due(trainer, self._every):
            found(type(self).__name__, self._monitor, metrics)
            only = {self._monitor: metrics.metric(self._monitor)}
            self._late.add(trainer.position, Metrics(only))
        for position, values in self._late.ready():
            self._look(trainer, position.step, values)

    def on_epoch_end(
        self, trainer: "Trainer", epoch: int, logs: Mapping[str, Any]
    ) -> None:
        """Looks at the epoch's value."""
        if not trainer.stopped:
            found(type(self).__name__, self._monitor, logs)
            self._look(trainer, trainer.position.step, logs)

    def _look(self, trainer: "Trainer", step: int, values: Mapping[str, Any]) -> None:
        value = float(values[self._monitor])
        if not math.isfinite(value) and not trainer.stopped:
            trainer.stop(f"{self._monitor} is {value} at step {step}")


def check_every(who: str, every: Any) -> None:
    """Raises MeshLayoutError for what is no number of steps."""
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        msg = f"{who}: every={every!r} is no whole number of steps from 1 on."
        raise MeshLayoutError(msg)


def is_due(trainer: "Trainer", every: int) -> bool:
    """Tells whether the last call made a step whose number divides by `every`."""
    now = trainer.position.step
    return now // every > (now - trainer.steps_in_call) // every
