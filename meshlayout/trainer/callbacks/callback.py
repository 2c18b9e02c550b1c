"""`Callback`: the moments of training at which a user's code can run."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshlayout.metrics import Metrics


if TYPE_CHECKING:
    from meshlayout.trainer.trainer import Trainer


class Callback:
    """Code that a trainer calls as it goes; override what you need.

    Callbacks run in the order they were passed, on every process. The trainer they get
    has `state`, `position`, `history` and `stop(reason)`. The next step donates the
    state, so copy the arrays that you keep.

    Example:
        >>> class Curriculum(Callback):
        ...     def on_epoch_end(self, trainer, epoch, logs):
        ...         if logs["loss"] < 0.1:
        ...             trainer.stop("the loss is below 0.1")
    """

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Called before the first epoch of a `fit`."""

    def on_epoch_start(self, trainer: "Trainer", epoch: int) -> None:
        """Called before the first step of an epoch.

        Args:
            trainer: The trainer.
            epoch: The epoch's number, from 1.
        """

    def on_step_end(self, trainer: "Trainer", step: int, metrics: Metrics) -> None:
        """Called after each call of the train step, which may still be running.

        Args:
            trainer: The trainer.
            step: How many steps the state has made.
            metrics: Those of the epoch so far, on the device: reading a value waits.
        """

    def on_validation_start(self, trainer: "Trainer") -> None:
        """Called after an epoch's last step, before validation, if there is any."""

    def on_validation_step_end(self, trainer: "Trainer", step: int) -> None:
        """Called after each batch of validation, which may still be running.

        Args:
            trainer: The trainer.
            step: How many batches were measured so far.
        """

    def on_epoch_end(
        self, trainer: "Trainer", epoch: int, logs: Mapping[str, Any]
    ) -> None:
        """Called after an epoch and its validation.

        Args:
            trainer: The trainer; its history has the epoch already.
            epoch: The epoch's number.
            logs: The epoch's values as floats; those of validation begin with `val_`.
        """

    def on_fit_end(self, trainer: "Trainer") -> None:
        """Called after the last epoch, unless an error or Ctrl-C ended the `fit`."""

    def close(self) -> None:
        """Called last, however the `fit` ended: the place to close files."""
