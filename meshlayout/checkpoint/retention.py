"""Which steps are kept, as a pure function."""

import math
from collections.abc import Mapping, Sequence


def steps_to_delete(
    steps: Sequence[int],
    *,
    keep: int | None,
    keep_every: int | None = None,
    best: tuple[str, str] | None = None,
    metrics: Mapping[int, Mapping[str, float]] | None = None,
    newest: int | None = None,
) -> list[int]:
    """Returns the steps that go, oldest first.

    Args:
        steps: The steps that there are.
        keep: How many of the last steps stay; None for all.
        keep_every: Steps that this divides stay as well.
        best: A metric's name and `"max"` or `"min"`: the best step stays as well.
        metrics: What was measured, by step.
        newest: The step that was saved last, which stays; it has not the highest
            number where a run went back to an earlier step.

    Example:
        >>> steps_to_delete([1, 2, 3, 4, 5, 6], keep=2, keep_every=3)
        [1, 2, 4]
    """
    if keep is None:
        return []
    ordered = sorted(set(steps))
    kept = set(ordered[-max(1, keep) :])
    kept |= {step for step in ordered if keep_every and step % keep_every == 0}
    kept |= {newest, best_of(ordered, best, metrics or {})}
    return [step for step in ordered if step not in kept]


def best_of(
    steps: Sequence[int],
    best: tuple[str, str] | None,
    metrics: Mapping[int, Mapping[str, float]],
) -> int | None:
    """Returns the step with the best metric, the later of equals, or None.

    Args:
        steps: The steps that there are.
        best: As for `steps_to_delete`.
        metrics: As for `steps_to_delete`.

    Example:
        >>> measured = {1: {"loss": 0.5}, 2: {"loss": 0.3}, 3: {"loss": 0.4}, 4: {}}
        >>> best_of([1, 2, 3, 4], ("loss", "min"), measured)
        2
    """
    if best is None:
        return None
    name, mode = best
    sign = 1.0 if mode == "max" else -1.0
    found = {
        step: sign * metrics[step][name]
        for step in steps
        if not math.isnan(metrics.get(step, {}).get(name, math.nan))
    }
    return max(found, key=lambda step: (found[step], step), default=None)
