"""When a checkpointer saves and which steps it keeps: decisions about numbers."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from meshlayout.errors import CheckpointError, did_you_mean


def is_due(step: int, every: int | None, last: int) -> bool:
    """Returns whether a step is to be saved, after the one saved or restored last."""
    # Not `step % every`: with several steps per call, multiples may be passed over.
    return every is None or step // every > min(last, step) // every


def steps_to_delete(
    steps: Collection[int], keep: int | None, kept: Collection[int | None] = ()
) -> list[int]:
    """Returns the steps to delete: neither the last ones nor `kept`."""
    old = [] if keep is None else sorted(steps)[:-keep]
    return [step for step in old if step not in kept]


def best_of(
    best: tuple[str, str], metrics: Mapping[int, Mapping[str, float]]
) -> int | None:
    """Returns the step with the best metric, the latest of a tie, or None."""
    name, mode = best
    sign = 1.0 if mode == "max" else -1.0
    values = {step: sign * found.get(name, math.nan) for step, found in metrics.items()}
    # NaN compares false with everything, so that one NaN would decide a maximum.
    values = {step: value for step, value in values.items() if not math.isnan(value)}
    return max(values, key=lambda step: (values[step], step), default=None)


def metric_values(
    metrics: Mapping[str, Any] | None, best: tuple[str, str] | None
) -> dict[str, float]:
    """Returns metrics as floats, with that of `best` if there are any."""
    values = {name: float(value) for name, value in (metrics or {}).items()}
    if values and best is not None and best[0] not in values:
        msg = (
            f"best={best!r} needs the metric {best[0]!r}, and metrics= holds "
            f"{', '.join(map(repr, values))}.{did_you_mean(best[0], values)}"
        )
        raise CheckpointError(msg)
    return values
