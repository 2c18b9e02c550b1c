"""Checks of the options of a step."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshlayout.errors import StepError, did_you_mean


def check_loss_fn(name: str, loss_fn: Any) -> None:
    """Raises StepError unless this can be a loss function."""
    if not callable(loss_fn):
        msg = (
            f"{name} takes a function of the model and a batch first, and got a "
            f"{type(loss_fn).__name__}."
        )
        raise StepError(msg)


def check_weights(weights: Any) -> None:
    """Raises StepError unless this is a key or a place."""
    if not isinstance(weights, (str, int)) or isinstance(weights, bool):
        msg = (
            f"weights={weights!r} is neither a key of the batch, as 'weight', nor a "
            "place in it, as 2."
        )
        raise StepError(msg)


def check_schedule(schedule: Any) -> None:
    """Raises StepError unless this is None or a function of the step."""
    if schedule is not None and not callable(schedule):
        msg = (
            f"learning_rate={schedule!r} is no schedule: give the function of the step "
            "that the optimizer was made with, as optax.cosine_decay_schedule(...)."
        )
        raise StepError(msg)


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raises StepError unless a value is one of some."""
    if value not in choices:
        msg = (
            f"{name}={value!r} is not one of {', '.join(map(repr, choices))}."
            f"{did_you_mean(value, map(str, choices))}"
        )
        raise StepError(msg)


def check_whole(name: str, value: Any) -> None:
    """Raises StepError unless a value is a whole number from 1 on."""
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_whole or value < 1:
        msg = f"{name}={value!r} is no whole number from 1 on."
        raise StepError(msg)


def check_positive(name: str, value: Any) -> None:
    """Raises StepError unless a value is None or a positive number."""
    if value is None:
        return
    is_number = isinstance(value, (int, float, np.number))
    if isinstance(value, bool) or not is_number or not 0 < value < np.inf:
        msg = f"{name}={value!r} is no positive number."
        raise StepError(msg)


def check_ema(value: Any) -> None:
    """Raises StepError unless a value is None or a decay."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 <= value < 1):
        msg = f"ema={value!r} is no decay: a number from 0 on and below 1, as 0.999."
        raise StepError(msg)


def check_pattern(name: str, value: Any) -> None:
    """Raises StepError unless a value is None or a regular expression."""
    if value is None:
        return
    try:
        re.compile(value)
    except (re.error, TypeError) as error:
        msg = f"{name}={value!r} is no regular expression: {error}."
        raise StepError(msg) from None
