"""`Position`: how far a trainer is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """How far a trainer is, in numbers that the host knows without the device.

    Attributes:
        epoch: The epoch, from 1.
        last_epoch: The number of the last epoch of this `fit`.
        step: The steps of the state so far, those before this `fit` too.
        step_in_fit: The steps of this `fit` so far.
        step_in_epoch: The steps of this epoch so far.
        steps_per_epoch: The steps of an epoch, where that is known.
        examples_in_epoch: The examples of this epoch so far, without padding that the
            trainer added.
    """

    epoch: int = 0
    last_epoch: int = 0
    step: int = 0
    step_in_fit: int = 0
    step_in_epoch: int = 0
    steps_per_epoch: int | None = None
    examples_in_epoch: int = 0
