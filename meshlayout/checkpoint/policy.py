"""When a checkpointer saves and which steps it keeps, by the options of `Checkpointer`.

These are decisions about numbers: the list of steps is handed in, and no file is opened
here.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from meshlayout import _checks
from meshlayout.errors import CheckpointError, did_you_mean


def is_due(step: int, every: int | None, last: int) -> bool:
    """Returns whether a step is to be saved.

    Args:
        step: The step.
        every: Save when this many steps have passed; None for every step.
        last: The step that was saved or restored last.

    Example:
        >>> [is_due(step, 10, 12) for step in (19, 20, 25)]
        [False, True, True]
    """
    # Not `step % every`: with several steps per call, multiples may be passed over.
    return every is None or step // every > min(last, step) // every


def steps_to_delete(
    steps: Sequence[int],
    *,
    keep: int | None,
    keep_every: int | None = None,
    best: int | None = None,
    newest: int | None = None,
) -> list[int]:
    """Returns the steps to delete, oldest first.

    Args:
        steps: The existing steps.
        keep: How many of the last steps to keep; None for all.
        keep_every: Multiples of this number are kept as well.
        best: The best step, which is kept as well.
        newest: The step that was saved last, which is kept; its number is not the
            highest if a run went back to an earlier step.

    Example:
        >>> steps_to_delete([1, 2, 3, 4, 5, 6], keep=2, keep_every=3)
        [1, 2, 4]
    """
    if keep is None:
        return []
    ordered = sorted(set(steps))
    retained = {*ordered[-keep:], newest, best}
    retained |= {step for step in ordered if keep_every and step % keep_every == 0}
    return [step for step in ordered if step not in retained]


def best_of(
    best: tuple[str, str], metrics: Mapping[int, Mapping[str, float]]
) -> int | None:
    """Returns the step with the best metric, the latest of a tie, or None.

    Args:
        best: A metric's name and `"max"` or `"min"`.
        metrics: The metrics by step.

    Example:
        >>> best_of(("loss", "min"), {1: {"loss": 0.5}, 2: {"loss": 0.3}, 3: {}})
        2
    """
    name, mode = best
    sign = 1.0 if mode == "max" else -1.0
    # NaN compares false with everything, so that one NaN would decide a maximum.
    values = {
        step: sign * found[name]
        for step, found in metrics.items()
        if not math.isnan(found.get(name, math.nan))
    }
    return max(values, key=lambda step: (values[step], step), default=None)


# Arguments.


def check_count(name: str, count: object) -> int | None:
    """Returns a positive integer or None, or raises CheckpointError."""
    if count is None:
        return None
    hint = "None leaves it out."
    return _checks.count(name, count, error=CheckpointError, hint=hint)


def check_best(best: object) -> tuple[str, str] | None:
    """Returns a metric's name and its mode, or None; or raises CheckpointError."""
    match best:
        case None:
            return None
        case (str(name), "max" | "min" as mode) if isinstance(best, tuple):
            return name, mode
    msg = (
        f"best={_checks.shown(best)} is not a metric's name and 'max' or 'min'. Write "
        "best=('val_accuracy', 'max')."
    )
    raise CheckpointError(msg)


def metric_values(
    metrics: Mapping[str, Any] | None, best: tuple[str, str] | None
) -> dict[str, float]:
    """Returns metrics as floats; NaN is allowed, and is never the best.

    Raises:
        CheckpointError: If they are not numbers by name, or lack the one of `best`.
    """
    is_named = metrics is None or isinstance(metrics, Mapping)
    if not is_named or not all(isinstance(name, str) for name in metrics or {}):
        msg = (
            f"metrics must be numbers by name, got {_checks.shown(metrics)}. Write "
            "metrics={'val_accuracy': 0.9}."
        )
        raise CheckpointError(msg)
    numbers = {
        name: _checks.number(
            f"metrics[{name!r}]", value, finite=False, error=CheckpointError
        )
        for name, value in (metrics or {}).items()
    }
    if numbers and best is not None and best[0] not in numbers:
        name = best[0]
        msg = (
            f"best={best!r} needs the metric {name!r}, and metrics= holds "
            f"{', '.join(map(repr, numbers))}.{did_you_mean(name, numbers)}"
        )
        raise CheckpointError(msg)
    return numbers
