"""When a checkpointer saves and which steps it keeps, by the options of `Checkpointer`.

These are decisions about numbers: the clock and the list of steps are handed in, and no
file is opened here.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from meshlayout import _checks
from meshlayout.cluster.channel import Channel
from meshlayout.errors import CheckpointError, did_you_mean


class Schedule:
    """Decides when a save is due, by steps or by the clock of process 0.

    Args:
        every: Save when this many steps have passed; None for no such limit.
        every_s: Save when this many seconds have passed; None for no such limit.
        list_steps: Returns the saved steps.
        channel: Exchanges messages between the processes.

    Attributes:
        last_step: The step that was saved or restored last; None if not known yet.

    Raises:
        CheckpointError: If a limit is not a number, or both are given.
    """

    def __init__(
        self,
        every: int | None,
        every_s: float | None,
        list_steps: Callable[[], Sequence[int]],
        channel: Channel,
    ) -> None:
        self._every = check_count("every", every)
        if every is not None and every_s is not None:
            msg = (
                f"every={every} and every_s={every_s} are both given. Leave one out: "
                "saves are due by steps or by the clock."
            )
            raise CheckpointError(msg)
        if every_s is not None:
            every_s = _checks.number(
                "every_s", every_s, at_least=0, error=CheckpointError
            )
        self._every_s = every_s
        self._list_steps, self._channel = list_steps, channel
        self.last_step: int | None = None
        self._last_s = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Returns whether a step is to be saved."""
        if self._every_s is not None:
            # Clocks of different processes pass the limit at different calls; all of
            # them must save the same step.
            passed_s = time.monotonic() - self._last_s
            return self._channel.from_first(passed_s >= self._every_s)
        if self._every is None:
            return True
        if self.last_step is None:
            # A run that continues without a restore. Later steps are of a run that
            # this one replaces: they would suppress saves until it reaches them.
            earlier = [number for number in self._list_steps() if number < step]
            self.last_step = max(earlier, default=0)
        # Not `step % every`: with several steps per call, multiples may be passed over.
        return step // self._every > min(self.last_step, step) // self._every

    def saved(self, step: int) -> None:
        """Records that a step is being saved."""
        self.last_step, self._last_s = step, time.monotonic()


def steps_to_delete(
    steps: Sequence[int],
    *,
    keep: int | None,
    keep_every: int | None = None,
    best: tuple[str, str] | None = None,
    metrics: Mapping[int, Mapping[str, float]] | None = None,
    newest: int | None = None,
) -> list[int]:
    """Returns the steps to delete, oldest first.

    Args:
        steps: The existing steps.
        keep: How many of the last steps to keep; None for all.
        keep_every: Multiples of this number are kept as well.
        best: A metric's name and `"max"` or `"min"`: the best step is kept as well.
        metrics: The metrics by step.
        newest: The step that was saved last, which is kept; its number is not the
            highest if a run went back to an earlier step.

    Example:
        >>> steps_to_delete([1, 2, 3, 4, 5, 6], keep=2, keep_every=3)
        [1, 2, 4]
    """
    if keep is None:
        return []
    ordered = sorted(set(steps))
    retained = set(ordered[-max(1, keep) :])
    retained |= {step for step in ordered if keep_every and step % keep_every == 0}
    retained |= {newest, best_of(ordered, best, metrics or {})}
    return [step for step in ordered if step not in retained]


def best_of(
    steps: Sequence[int],
    best: tuple[str, str] | None,
    metrics: Mapping[int, Mapping[str, float]],
) -> int | None:
    """Returns the step with the best metric, the latest of a tie, or None.

    Example:
        >>> measured = {1: {"loss": 0.5}, 2: {"loss": 0.3}, 3: {"loss": 0.4}, 4: {}}
        >>> best_of([1, 2, 3, 4], ("loss", "min"), measured)
        2
    """
    if best is None:
        return None
    name, mode = best
    sign = 1.0 if mode == "max" else -1.0
    # NaN compares false with everything, so that one NaN would decide a maximum.
    values = {
        step: sign * metrics[step][name]
        for step in steps
        if not math.isnan(metrics.get(step, {}).get(name, math.nan))
    }
    return max(values, key=lambda step: (values[step], step), default=None)


# Arguments.


def check_count(name: str, count: object) -> int | None:
    """Returns a positive integer or None, or raises CheckpointError."""
    if count is None:
        return None
    hint = "None leaves it out."
    return _checks.count(name, count, error=CheckpointError, hint=hint)


def check_best(
    best: tuple[str, Literal["max", "min"]] | None,
) -> tuple[str, str] | None:
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
    if metrics is not None and not isinstance(metrics, Mapping):
        msg = (
            f"metrics must be numbers by name, got {_checks.shown(metrics)}. Write "
            "metrics={'val_accuracy': 0.9}."
        )
        raise CheckpointError(msg)
    for name in metrics or {}:
        if not isinstance(name, str):
            msg = f"metrics= holds the name {_checks.shown(name)}: names are strings."
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
