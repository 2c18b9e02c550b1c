"""`Callback`: the moments of training at which something else can be done."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshlayout.metrics import Metrics


if TYPE_CHECKING:
    from meshlayout.trainer.trainer import Trainer


class Callback:
    """What a trainer calls as it goes. Override what is needed; the rest does nothing.

    Callbacks run in the order in which they were given, on every process. What they
    find in the trainer: `state`, `position`, `history`, and `stop(reason)`. A state is
    used up by the next step, so that what is to be kept of it has to be copied.

    Example:
        >>> class Curriculum(Callback):
        ...     def on_epoch_end(self, trainer, epoch, logs):
        ...         if logs["loss"] < 0.1:
        ...             trainer.stop("the loss is below 0.1")
    """

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Is called before the first epoch of a `fit`."""

    def on_epoch_start(self, trainer: "Trainer", epoch: int) -> None:
        """Is called before the first step of an epoch.

        Args:
            trainer: The trainer.
            epoch: The epoch's number, from 1.
        """

    def on_step_end(self, trainer: "Trainer", step: int, metrics: Metrics) -> None:
        """Is called after each call of the train step, which may still be running.

        Args:
            trainer: The trainer.
            step: How many steps the state has made.
            metrics: Those of the epoch so far, on the device: reading a value waits.
        """

    def on_validation_start(self, trainer: "Trainer") -> None:
        """Is called after an epoch's last step, before validation, if there is any."""

    def on_epoch_end(
        self, trainer: "Trainer", epoch: int, logs: Mapping[str, Any]
    ) -> None:
        """Is called after an epoch and its validation.

        Args:
            trainer: The trainer; its history has the epoch already.
            epoch: The epoch's number.
            logs: What was measured, as floats; of validation with `val_` in front.
        """

    def on_fit_end(self, trainer: "Trainer") -> None:
        """Is called after the last epoch, unless an error or Ctrl-C ended the `fit`."""

    def close(self) -> None:
        """Is called last, however the `fit` ended: the place to close files."""
