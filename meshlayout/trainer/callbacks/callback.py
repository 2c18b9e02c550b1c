"""`Callback`: the moments of training at which a user's code can run."""

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from meshlayout import _checks
from meshlayout.errors import MeshLayoutError
from meshlayout.metrics import Metrics


if TYPE_CHECKING:
    from meshlayout.trainer import trainer as trainer_module


Trainer: TypeAlias = "trainer_module.Trainer"
"""The trainer, which imports the callbacks."""

Logs: TypeAlias = dict[str, Any]
"""An epoch's values by name: floats, or arrays for metrics that have dims."""


class Callback:
    """Code that a trainer calls during training; override the methods you need.

    Callbacks run in the order in which they were passed, on every process. Their
    trainer has `state`, `position`, `history` and `stop(reason)`. The next step donates
    the state, so copy any arrays that you keep. Decisions must be the same on all
    processes, as metrics are; broadcast other values, such as the time, with
    `ml.cluster.broadcast`.

    Examples:
        >>> class Curriculum(Callback):
        ...     def on_epoch_end(self, trainer, epoch, logs):
        ...         if logs["loss"] < 0.1:
        ...             trainer.stop("the loss is below 0.1")
    """

    _monitor: str = ""  # the value that it needs

    def on_fit_start(self, trainer: Trainer) -> None:
        """Called before the first epoch of a `fit`."""

    def on_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        """Called before the first step of an epoch; epochs are numbered from 1."""

    def on_step_end(self, trainer: Trainer, step: int, metrics: Metrics) -> None:
        """Called after each call of the train step, which may still be running.

        `step` is the number of steps of the state so far. `metrics` are those of the
        epoch so far, on the device: reading a value waits for it.
        """

    def on_validation_start(self, trainer: Trainer) -> None:
        """Called after an epoch's last step, if there is validation data."""

    def on_epoch_end(self, trainer: Trainer, epoch: int, logs: Logs) -> None:
        """Called after an epoch and its validation; the history already has it.

        `logs` holds its values by name; names of validation values begin with `val_`.
        What you add to it is in the history, and later callbacks can watch it.
        """

    def on_fit_end(self, trainer: Trainer) -> None:
        """Called after the last epoch, unless an error or Ctrl-C ended the `fit`."""

    def close(self) -> None:
        """Called last, however the `fit` ended; close files here."""


def checked_callbacks(callbacks: Any) -> list[Any]:
    """Returns callbacks, each of whose methods will be and can be called."""
    moments = [name for name in vars(Callback) if name.startswith("on_")]
    chosen = [*callbacks] if isinstance(callbacks, Iterable) else [callbacks]
    for callback in chosen:
        if not isinstance(callback, Callback):
            msg = "fit: callbacks must be a list of instances of ml.callbacks.Callback,"
            raise MeshLayoutError(f"{msg} got {_checks.shown(callback)}.")
        for name in [name for name in dir(callback) if name.startswith("on_")]:
            where = f"{type(callback).__name__}.{name}"
            if name not in moments:
                msg = f"fit never calls {where}. The methods of a callback are"
                raise MeshLayoutError(f"{msg} {', '.join(moments)}.")
            names = [*inspect.signature(getattr(Callback, name)).parameters][1:]
            _checks.function(where, getattr(callback, name), *names)
    return chosen
