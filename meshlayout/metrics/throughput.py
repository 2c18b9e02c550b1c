"""`Throughput`: counts on the device, timed by the host's clock.

The count stays on the device like any other sum; only `compute` waits for it, so that
measuring does not slow down what it measures.
"""

import dataclasses
import time
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from meshlayout import _checks, _jax
from meshlayout._annotations import Batch
from meshlayout.errors import MetricError
from meshlayout.metrics.metric import (
    EMPTY,
    Metric,
    Total,
    accumulator,
    as_array,
    metric_class,
    setting,
)


@metric_class
class Throughput(Metric):
    """Examples or steps per second, since the metric was made or reset.

    Merging takes the earlier start, on the clock of one process. A metric that is made
    while JAX traces has no start: it only counts, takes the start of the metric it is
    merged with, and computes to NaN by itself.

    Args:
        unit: `"examples"`, the rows of the batch whose weight is not 0; or
            `"steps"`, the number of updates.

    Example:
        >>> speed = Throughput().update({"image": jnp.ones((32, 4))})
        >>> bool(speed.compute() > 0), float(speed.count)
        (True, 32.0)
    """

    unit: Literal["examples", "steps"] = setting(default="examples")
    sums: Total = accumulator(default=EMPTY, kw_only=True)
    start_s: Total = accumulator(default=EMPTY, kw_only=True)

    def _check(self) -> None:
        units = ("examples", "steps")
        self._set(unit=_checks.choice("unit", self.unit, units, **self._context))

    def _start(self) -> dict[str, Any]:
        # Infinity is later than any start, so that merging takes the other one. A
        # float32 alone would have a resolution of milliseconds after some hours.
        now = np.inf if _jax.is_tracing() else time.perf_counter()
        high = np.float32(now)
        low = now - float(high) if np.isfinite(now) else 0
        start = Total(np.array([high, low], np.float32))
        return {"sums": Total.zeros(), "start_s": start}

    def update(self, batch: Batch, weights: ArrayLike | None = None) -> Self:
        """Returns the metric with a batch counted.

        Args:
            batch: Any pytree of arrays, all with one row per example.
            weights: Per example, or None: rows of weight 0 are not counted.

        Raises:
            MetricError: If there are no rows to count.
        """
        added = jnp.ones((), jnp.float32)
        if self.unit == "examples":
            added = _num_examples(batch, weights)
        return dataclasses.replace(self, sums=self.sums.add(added))

    def started(self) -> Self:
        """Returns the metric with the same count, and a start of now."""
        return dataclasses.replace(self, start_s=EMPTY)

    def _merged(self, other: Any) -> Self:
        # Two float32 numbers compare like a version: first the high parts.
        mine, theirs = jnp.asarray(self.start_s.parts), other.start_s.parts
        is_later = (mine[0] > theirs[0]) | (
            (mine[0] == theirs[0]) & (mine[1] > theirs[1])
        )
        start = Total(jnp.where(is_later, theirs, mine))
        sums = self.sums.merge(other.sums)
        return dataclasses.replace(self, sums=sums, start_s=start)

    @property
    def count(self) -> jax.Array:
        """The number of examples or steps that were counted."""
        return self.sums.value

    def compute(self) -> jax.Array:
        """Waits for the device, and returns the count per second up to now.

        Raises:
            MetricError: Inside jit, where there is no clock.
        """
        if _jax.is_tracing():
            msg = (
                "Throughput.compute() reads the host's clock, which does not run "
                "inside jit. Return the metric from the step, and compute it outside."
            )
            raise MetricError(msg)
        # First wait, then look at the clock: the steps are dispatched ahead of time.
        count = jax.block_until_ready(self.count)
        high, low = map(float, self.start_s.parts)
        passed_s = time.perf_counter() - (high + low)
        if passed_s <= 0:  # started at infinity: made inside jit, and never merged
            return jnp.full((), jnp.nan, jnp.float32)
        return count / jnp.float32(passed_s)


def _num_examples(batch: Batch, weights: ArrayLike | None) -> jax.Array:
    """Returns the number of rows whose weight is not 0."""
    if weights is not None:
        weights = as_array(weights, "weights", "Throughput")
        rows = jnp.any(weights != 0, axis=tuple(range(1, weights.ndim)))
        return jnp.sum(rows, dtype=jnp.float32)
    for leaf in jax.tree.leaves(batch):
        if np.ndim(leaf):
            return jnp.asarray(np.shape(leaf)[0], jnp.float32)
    msg = "Throughput: the batch holds no array with rows to count, and no weights."
    raise MetricError(msg)
