"""How fast it goes: counts on the device, and the host's clock."""

import dataclasses
import time
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from meshlayout import _jax
from meshlayout.errors import MetricError, did_you_mean
from meshlayout.metrics.elements import as_array
from meshlayout.metrics.metric import EMPTY, Metric, accumulator, metric_class, setting
from meshlayout.metrics.total import Total


_UNITS = ("examples", "steps")


@metric_class
class Throughput(Metric):
    """Examples or steps per second, since the metric was made or reset.

    What is made while JAX traces has no clock: it counts, and takes the start of what
    it is merged with; alone, it computes to NaN. Merged metrics start at the earlier
    of their starts, on one process's clock.

    Args:
        unit: `"examples"`, the rows of the batch whose weight is not 0, or
            `"steps"`, the number of updates.

    Example:
        >>> speed = Throughput().update({"image": jnp.ones((32, 4))})
        >>> bool(speed.compute() > 0), float(speed.count.value)
        (True, 32.0)
    """

    unit: Literal["examples", "steps"] = setting(default="examples")
    count: Total = accumulator(default=EMPTY)
    start_s: Total = accumulator(default=EMPTY)
    inputs: ClassVar[tuple[str, ...]] = ()

    def _check(self) -> None:
        if self.unit not in _UNITS:
            hint = did_you_mean(self.unit, _UNITS)
            msg = f"Throughput: unit={self.unit!r} is not 'examples' or 'steps'.{hint}"
            raise MetricError(msg)

    def _start(self) -> dict[str, Any]:
        now = np.inf if _jax.is_tracing() else time.perf_counter()
        high = np.float32(now)
        low = now - float(high) if np.isfinite(now) else 0
        start = Total(np.array([high, low], np.float32))
        return {"count": Total.zeros(), "start_s": start}

    def update(self, batch: Any, weights: Any = None) -> Self:
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
        return type(self)(self.unit, count=self.count.add(added), start_s=self.start_s)

    def started(self) -> Self:
        """Returns the metric with the same count, and a clock that starts now."""
        return dataclasses.replace(self, start_s=EMPTY)

    def _merged(self, other: Any) -> Self:
        mine, others = self.start_s, other.start_s
        is_later = (jnp.asarray(mine.high) > others.high) | (
            (jnp.asarray(mine.high) == others.high)
            & (jnp.asarray(mine.low) > others.low)
        )
        start = jax.tree.map(lambda a, b: jnp.where(is_later, b, a), mine, others)
        return type(self)(self.unit, count=self.count.merge(other.count), start_s=start)

    def compute(self) -> jax.Array:
        """Returns the count per second until now, when the device has counted.

        Raises:
            MetricError: Inside jit, where there is no clock.
        """
        if _jax.is_tracing():
            msg = (
                "Throughput.compute() reads the host's clock, which does not run "
                "inside jit. Return the metric from the step, and compute it outside."
            )
            raise MetricError(msg)
        count = jax.block_until_ready(self.count.value)
        start_s = float(self.start_s.high) + float(self.start_s.low)
        passed_s = time.perf_counter() - start_s
        if passed_s <= 0:
            return jnp.full((), jnp.nan, jnp.float32)
        return count / jnp.float32(passed_s)


def _num_examples(batch: Any, weights: Any) -> jax.Array:
    """Returns how many rows count."""
    if weights is not None:
        weights = as_array(weights, "weights", "Throughput")
        rows = jnp.any(weights != 0, axis=tuple(range(1, weights.ndim)))
        return jnp.sum(rows, dtype=jnp.float32)
    for leaf in jax.tree.leaves(batch):
        if np.ndim(leaf):
            return jnp.asarray(np.shape(leaf)[0], jnp.float32)
    msg = "Throughput: the batch holds no array with rows to count, and no weights."
    raise MetricError(msg)
