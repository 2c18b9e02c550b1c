"""flax.nnx's Average, Accuracy and Welford as immutable metrics.

Those of flax change themselves, cannot be merged, and take a mask only in later
versions. They count elements, and do not weigh them.
"""

from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from meshlayout.errors import MetricError
from meshlayout.metrics.means import MeanMetric
from meshlayout.metrics.metric import (
    Metric,
    as_array,
    as_float,
    element_weights,
    mean_sums,
    metric_class,
    setting,
    source,
    text,
    weighted,
)


def _counts(weights: ArrayLike | None, elements: jax.Array, where: str) -> jax.Array:
    """Returns 1 for each element that counts, and 0 for the others."""
    given = element_weights(weights, elements, "values", where)
    return (given != 0).astype(jnp.float32)


@metric_class
class NnxAverage(MeanMetric):
    """`nnx.metrics.Average`."""

    values: str = source(default="values")

    def update(self, values: ArrayLike, weights: ArrayLike | None = None) -> Self:
        """Returns the metric with a batch of values added."""
        elements = as_float(values, self.values, "Average")
        return self._added(mean_sums(elements, _counts(weights, elements, "Average")))


@metric_class
class NnxAccuracy(MeanMetric):
    """`nnx.metrics.Accuracy`."""

    logits: str = source(default="logits")
    labels: str = source(default="labels")
    threshold: float | None = setting(default=None)

    def update(
        self, logits: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None
    ) -> Self:
        """Returns the metric with a batch added."""
        scores = as_array(logits, "logits", "Accuracy")
        true = as_array(labels, "labels", "Accuracy")
        classes = 0 if self.threshold is not None else 1
        if scores.shape[: scores.ndim - classes] != true.shape:
            both = f"{text('logits', scores)} and {text('labels', true)}"
            raise MetricError(f"Accuracy: {both} do not fit.")
        if self.threshold is not None:
            right = (scores >= self.threshold) == (true > 0)
        else:
            right = jnp.argmax(scores, axis=-1) == true
        right = right.astype(jnp.float32)
        return self._added(mean_sums(right, _counts(weights, right, "Accuracy")))


@metric_class
class NnxWelford(Metric):
    """`nnx.metrics.Welford`: a count, a mean, and a sum of squared deviations."""

    values: str = source(default="values")

    @property
    def _shape(self) -> tuple[int, ...]:
        return (3,)

    def update(self, values: ArrayLike, weights: ArrayLike | None = None) -> Self:
        """Returns the metric with a batch of values added."""
        elements = as_float(values, self.values, "Welford")
        counts = _counts(weights, elements, "Welford")
        total, count = mean_sums(elements, counts)
        mean = total / jnp.maximum(count, 1)
        squares = jnp.sum(weighted(jnp.square(elements - mean), counts))
        return self._added(jnp.stack([count, mean, squares]))

    def _merged(self, sums: ArrayLike, others: ArrayLike) -> jax.Array:
        # As by Chan, Golub and LeVeque (1979), which does not lose precision as sums
        # of squares do.
        (before, mean, m2), (count, other, more) = (
            jnp.asarray(sums),
            jnp.asarray(others),
        )
        after = before + count
        share = count / jnp.maximum(after, 1)
        delta = other - mean
        m2 = m2 + more + jnp.square(delta) * before * share
        return jnp.stack([after, mean + delta * share, m2])

    def compute(self) -> Any:
        """Returns the mean and its deviations, as flax does."""
        count, mean, m2 = jnp.asarray(self.sums)
        deviation = jnp.sqrt(m2 / count)
        return nnx.metrics.Statistics(
            mean=mean,
            standard_error_of_mean=deviation / jnp.sqrt(count),
            standard_deviation=deviation,
        )


STATISTICS: dict[type, Callable[[Any], Metric]] = {
    nnx.metrics.Average: lambda metric: NnxAverage(metric.argname),
    nnx.metrics.Accuracy: lambda metric: NnxAccuracy(threshold=metric.threshold),
    nnx.metrics.Welford: lambda metric: NnxWelford(metric.argname),
}
