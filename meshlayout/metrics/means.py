"""Sums and means over examples."""

from typing import Self

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from meshlayout.metrics.metric import (
    Metric,
    as_float,
    element_weights,
    mean_sums,
    metric_class,
    source,
    weighted,
)


class _ValueMetric(Metric):
    """Base of the metrics of one array of numbers."""

    def update(self, values: ArrayLike, weights: ArrayLike | None = None) -> Self:
        """Returns the metric with a batch of values added.

        Args:
            values: Any numbers.
            weights: Per element; see `Metric`. A value without dims counts once per
                update, unless all weights are 0.

        Raises:
            MetricError: If the weights do not fit the values.
        """
        where = type(self).__name__
        elements = as_float(values, "values", where)
        counts = element_weights(weights, elements, "values", where)
        return self._added(self._sums_of(elements, counts))

    def _sums_of(self, elements: jax.Array, weights: jax.Array) -> jax.Array:
        """Returns the sums of a batch alone."""
        raise NotImplementedError


class MeanMetric(Metric):
    """Base of the metrics that are a weighted mean."""

    @property
    def _shape(self) -> tuple[int, ...]:
        return (2,)

    @property
    def total(self) -> jax.Array:
        """The weighted sum so far, a float32 scalar."""
        return jnp.asarray(self.sums)[0]

    @property
    def count(self) -> jax.Array:
        """The sum of the weights so far, a float32 scalar."""
        return jnp.asarray(self.sums)[1]

    def compute(self) -> jax.Array:
        """Returns the weighted mean; NaN where nothing was counted."""
        return self.total / self.count


@metric_class
class Mean(_ValueMetric, MeanMetric):
    """The weighted mean of values: `total` divided by `count`.

    Use this for losses and any other numbers per example or per token. A value without
    dims, such as an auxiliary loss of a whole batch, counts once per update, unless all
    weights are 0.

    Args:
        values: The name of the values in a step's outputs or batch; the per-example
            losses by default.

    Example:
        >>> mean = Mean().update(jnp.array([1.0, 2.0, jnp.nan]), jnp.array([1, 1, 0]))
        >>> float(mean.compute()), float(mean.total), float(mean.count)
        (1.5, 3.0, 2.0)
    """

    values: str | int = source(default="losses")

    def _sums_of(self, elements: jax.Array, weights: jax.Array) -> jax.Array:
        return mean_sums(elements, weights)


@metric_class
class Sum(_ValueMetric):
    """The weighted sum of values; 0 if nothing was counted.

    A value without dims counts once per update, unless all weights are 0.

    Args:
        values: The name of the values in a step's outputs or batch.

    Example:
        >>> float(Sum("tokens").update(jnp.array([3, 4])).compute())
        7.0
    """

    values: str | int = source(default="losses")

    def _sums_of(self, elements: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.sum(weighted(elements, weights))

    def compute(self) -> jax.Array:
        """Returns the sum."""
        return jnp.asarray(self.sums)


@metric_class
class Last(_ValueMetric):
    """The most recent value: of a batch, the last element whose weight is not 0.

    Use this for a number per step, such as a learning rate. Merging keeps the value of
    the other metric, which is taken to be the later one, if it has any.

    Args:
        values: The name of the values in a step's outputs or batch.

    Example:
        >>> rate = Last("learning_rate").update(0.1).update(0.01)
        >>> round(float(rate.compute()), 3)
        0.01
    """

    values: str | int = source(default="losses")

    @property
    def _shape(self) -> tuple[int, ...]:
        return (2,)  # the value, and whether there is one

    def _sums_of(self, elements: jax.Array, weights: jax.Array) -> jax.Array:
        counted, last = weights != 0, elements
        # One dim after another, starting from the last: reduce it to its last counted
        # element. As a sum, since indexing would gather a sharded array.
        while last.ndim:
            index = jnp.arange(last.shape[-1]).reshape(*[1] * (last.ndim - 1), -1)
            newest = jnp.max(
                jnp.where(counted, index, -1), axis=-1, keepdims=True, initial=-1
            )
            last = jnp.sum(jnp.where(counted & (index == newest), last, 0), axis=-1)
            counted = jnp.any(counted, axis=-1)
        return jnp.stack([jnp.where(counted, last, 0), counted.astype(jnp.float32)])

    def _merged(self, sums: ArrayLike, others: ArrayLike) -> jax.Array:
        others = jnp.asarray(others)
        return jnp.where(others[1] > 0, others, sums)

    def compute(self) -> jax.Array:
        """Returns the value; NaN if nothing was counted."""
        value, seen = jnp.asarray(self.sums)
        return jnp.where(seen > 0, value, jnp.nan)
