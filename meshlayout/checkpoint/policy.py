"""When a checkpointer saves and which steps it keeps: decisions about numbers."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from meshlayout import _checks
from meshlayout.errors import CheckpointError, did_you_mean


def is_due(step: int, every: int | None, last: int) -> bool:
    """Returns whether a step is to be saved, after the one saved or restored last.

    Example:
        >>> [is_due(step, 10, 12) for step in (19, 20, 25)]
        [False, True, True]
    """
    # Not `step % every`: with several steps per call, multiples may be passed over.
    return every is None or step // every > min(last, step) // every


def steps_to_delete(
    steps: Sequence[int],
    keep: int | None,
    keep_every: int | None,
    kept: Collection[int | None] = (),
) -> list[int]:
    """Returns the steps to delete: not the last ones, nor some multiples, nor `kept`.

    Example:
        >>> steps_to_delete([1, 2, 3, 4, 5, 6], 2, 3)
        [1, 2, 4]
    """
    ordered = sorted(set(steps))
    multiples = {step for step in ordered if keep_every and step % keep_every == 0}
    retained = {*(ordered if keep is None else ordered[-keep:]), *kept} | multiples
    return [step for step in ordered if step not in retained]


def best_of(
    best: tuple[str, str], metrics: Mapping[int, Mapping[str, float]]
) -> int | None:
    """Returns the step with the best metric, the latest of a tie, or None.

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
    """Returns metrics as floats, with that of `best` if there are any."""
    names = metrics if isinstance(metrics, Mapping) else {}
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong or (metrics is not None and metrics is not names):
        given = _checks.shown(wrong[0] if wrong else metrics)
        msg = f"metrics must be numbers by name, such as {{'loss': 0.9}}, got {given}."
        raise CheckpointError(msg)
    if names and best is not None and best[0] not in names:
        name, listed = best[0], ", ".join(map(repr, names))
        msg = (
            f"best={best!r} needs the metric {name!r}, and metrics= holds {listed}."
            f"{did_you_mean(name, names)}"
        )
        raise CheckpointError(msg)
    return {
        name: _checks.number(
            f"metrics[{name!r}]", value, finite=False, error=CheckpointError
        )
        for name, value in names.items()
    }
