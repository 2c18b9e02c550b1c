"""What the user gives a checkpointer, checked."""

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from meshlayout.errors import CheckpointError, did_you_mean


def check_step(step: Any) -> int:
    """Returns the number of a step.

    Args:
        step: What the user gave.

    Raises:
        CheckpointError: If it is none.
    """
    number = _index(step)
    if number < 0:
        msg = (
            f"step is {step!r} of type {type(step).__name__}; it is a number from 0 on."
        )
        raise CheckpointError(msg)
    return number


def _index(number: Any) -> int:
    """Returns a whole number, or -1."""
    if isinstance(number, (bool, np.bool_)):
        return -1
    try:
        return operator.index(number)
    except TypeError:
        return -1


def check_count(name: str, count: Any) -> int | None:
    """Returns a number from 1 on, or None.

    Args:
        name: The option's name, for messages.
        count: What the user gave.

    Raises:
        CheckpointError: If it is neither.
    """
    if count is None:
        return None
    number = _index(count)
    if number < 1:
        msg = f"{name}={count!r} is no number of steps from 1 on. None leaves it out."
        raise CheckpointError(msg)
    return number


def check_best(best: Any) -> tuple[str, str] | None:
    """Returns a metric's name and `"max"` or `"min"`, or None.

    Args:
        best: What the user gave.

    Raises:
        CheckpointError: If it is neither.
    """
    if best is None:
        return None
    if (
        not isinstance(best, tuple)
        or len(best) != 2
        or not isinstance(best[0], str)
        or best[1] not in ("max", "min")
    ):
        msg = (
            f"best={best!r} is not a metric's name and 'max' or 'min'. Write "
            "best=('val_accuracy', 'max')."
        )
        raise CheckpointError(msg)
    return best


def check_metrics(
    metrics: Mapping[str, Any] | None, best: tuple[str, str] | None
) -> dict[str, float]:
    """Returns what was measured as numbers.

    Args:
        metrics: What the user gave.
        best: The metric that the best step is told by, which has to be there.

    Raises:
        CheckpointError: If a value is no number, or that metric is missing.
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        msg = (
            f"metrics={metrics!r} of type {type(metrics).__name__} holds no numbers by "
            "name. Write metrics={'val_accuracy': 0.9}."
        )
        raise CheckpointError(msg)
    found = {}
    for name, value in (metrics or {}).items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError):
            msg = (
                f"metrics[{name!r}] is {value!r} of type {type(value).__name__}, "
                "which is no number."
            )
            raise CheckpointError(msg) from None
    if found and best is not None and best[0] not in found:
        name = best[0]
        msg = (
            f"best={best!r} needs the metric {name!r}, and metrics= holds "
            f"{', '.join(map(repr, found))}.{did_you_mean(name, found)}"
        )
        raise CheckpointError(msg)
    return found
