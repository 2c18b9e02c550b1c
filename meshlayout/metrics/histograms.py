"""Metrics of the distribution of values, counted in bins of equal width.

Bins make them mergeable: a metric of the values themselves would grow with every batch.
How far a result can be off is documented, or can be computed.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from meshlayout import _checks
from meshlayout.errors import MetricError
from meshlayout.metrics.metric import (
    SumMetric,
    ValueMetric,
    metric_class,
    setting,
    source,
)
from meshlayout.metrics.predictions import (
    PairMetric,
    is_class,
    is_explicit,
    same_shape,
)


# Below any weight that counts; keeps a division by zero from making NaN.
_TINY = 1e-30


def _binned(bins: jax.Array, weights: jax.Array, num_bins: int) -> jax.Array:
    """Returns the weight that falls into each bin."""
    # JAX does not infer the layout of a scatter on Explicit axes.
    if is_explicit(bins) or is_explicit(weights):
        shares = jnp.where(is_class(bins, num_bins), weights[..., None], 0)
        return jnp.sum(shares, axis=tuple(range(bins.ndim)))
    return jnp.zeros(num_bins, jnp.float32).at[bins].add(weights)


@metric_class
class AUC(SumMetric, PairMetric):
    """The area under the ROC or the precision-recall curve, from binned scores.

    Scores are probabilities, one per label, sorted into `num_thresholds` bins of equal
    width on [0, 1]; a probability outside goes into the first or last bin, and NaN
    makes the result NaN. Labels above 0 are positive. More bins make the result more
    accurate and the state larger:

    - ROC: points joined by straight lines. Equals the probability that a positive
      scores above a negative, where a pair in the same bin counts one half.
    - PR: the average precision, the sum of precision times the increase in recall,
      without interpolation, like scikit-learn's `average_precision_score`.

    Both are exact if scores in the same bin are equal. `error_bound()` returns how far
    off the area can be at most.

    Args:
        predictions: The name of the predictions in a step's outputs or batch.
        labels: The name of the labels there.
        num_thresholds: The number of bins.
        curve: `"ROC"` or `"PR"`.
        from_logits: Whether predictions are logits, to be put through a sigmoid.

    Example:
        >>> logits, labels = jnp.array([2.0, 1.0, -1.0, 0.5]), jnp.array([1, 0, 0, 1])
        >>> float(AUC().update(logits, labels).compute())
        0.75
    """

    predictions: str | int = source(default="logits")
    labels: str | int = source(default="label")
    num_thresholds: int = setting(default=1024)
    curve: Literal["ROC", "PR"] = setting(default="ROC")
    from_logits: bool = setting(default=True)

    def _check(self) -> None:
        context = self._context
        size = _checks.count(
            "num_thresholds", self.num_thresholds, at_least=2, **context
        )
        self._set(
            num_thresholds=size,
            curve=_checks.choice("curve", self.curve, ("ROC", "PR"), **context),
            from_logits=_checks.flag("from_logits", self.from_logits, **context),
        )

    @property
    def _shape(self) -> tuple[int, ...]:
        return (2, self.num_thresholds)  # positives, negatives; by bin

    def _elements(self, predictions: Any, labels: Any) -> tuple[Any, jax.Array]:
        scores, labels = same_shape(predictions, labels, type(self).__name__)
        return (scores, labels), labels

    def _sums_of(self, elements: Any, weights: jax.Array) -> jax.Array:
        scores, labels = elements
        scores = scores.astype(jnp.float32)
        scores = jax.nn.sigmoid(scores) if self.from_logits else scores
        is_nan, size = jnp.isnan(scores), self.num_thresholds
        position = jnp.where(is_nan, 0, jnp.clip(scores, 0, 1)) * size
        bins = jnp.minimum(jnp.floor(position).astype(jnp.int32), size - 1)
        # NaN fits into no bin; as a weight, it makes the result NaN.
        weights = jnp.where(is_nan & (weights != 0), jnp.nan, weights)
        positive = _binned(bins, jnp.where(labels > 0, weights, 0), size)
        negative = _binned(bins, jnp.where(labels > 0, 0, weights), size)
        return jnp.stack([positive, negative])

    @property
    def positives(self) -> jax.Array:
        """The weight of the positive labels in each bin of scores."""
        return self.sums.value[0]

    @property
    def negatives(self) -> jax.Array:
        """The weight of the negative labels in each bin of scores."""
        return self.sums.value[1]

    def compute(self) -> jax.Array:
        """Returns the area; NaN without positives or, for ROC, without negatives."""
        hits, misses = self._from_the_top()
        hits_before = jnp.cumsum(hits) - hits
        if self.curve == "ROC":
            area = jnp.sum(misses * (hits_before + hits / 2))
            return area / (jnp.sum(hits) * jnp.sum(misses))
        true_positives = jnp.cumsum(hits)
        predicted = true_positives + jnp.cumsum(misses)
        precision = true_positives / jnp.maximum(predicted, _TINY)
        return jnp.sum(hits * precision) / jnp.sum(hits)

    def error_bound(self) -> jax.Array:
        """Returns how far the area can be from that of the unbinned scores."""
        hits, misses = self._from_the_top()
        # Only the order within a bin is unknown: take the best and the worst one.
        if self.curve == "ROC":
            return jnp.sum(hits * misses) / 2 / (jnp.sum(hits) * jnp.sum(misses))
        true, false = jnp.cumsum(hits), jnp.cumsum(misses)
        middle = true / jnp.maximum(true + false, _TINY)
        best = true / jnp.maximum(true + false - misses, _TINY)
        worst = (true - hits) / jnp.maximum(true - hits + false, _TINY)
        apart = jnp.maximum(best - middle, middle - worst)
        return jnp.sum(hits * apart) / jnp.sum(hits)

    def _from_the_top(self) -> tuple[jax.Array, jax.Array]:
        """Returns positives and negatives per bin, highest scores first."""
        return self.positives[::-1], self.negatives[::-1]


class _BinnedValues(SumMetric, ValueMetric):
    """Base of `Histogram` and `Quantile`: the weight in each bin."""

    low: float
    high: float
    num_bins: int

    def _check(self) -> None:
        context = self._context
        low = _checks.number("low", self.low, **context)
        high = _checks.number("high", self.high, **context)
        if low >= high:
            msg = (
                f"{type(self).__name__}: low must be less than high, got low={low:g} "
                f"and high={high:g}."
            )
            raise MetricError(msg)
        num_bins = _checks.count("num_bins", self.num_bins, **context)
        self._set(low=low, high=high, num_bins=num_bins)

    @property
    def _shape(self) -> tuple[int, ...]:
        return (self.num_bins + 2,)  # below, the bins, above

    def _sums_of(self, elements: Any, weights: jax.Array) -> jax.Array:
        # Floor, rather than a search in the edges: it needs no gather, and keeps
        # values on their shards.
        is_nan = jnp.isnan(elements)
        width = (self.high - self.low) / self.num_bins
        clipped = jnp.clip(jnp.where(is_nan, self.low, elements), self.low, self.high)
        bins = jnp.floor((clipped - self.low) / width).astype(jnp.int32)
        bins = jnp.clip(bins, 0, self.num_bins - 1) + 1
        bins = jnp.where(elements < self.low, 0, bins)
        bins = jnp.where(is_nan | (elements > self.high), self.num_bins + 1, bins)
        weights = jnp.where(is_nan & (weights != 0), jnp.nan, weights)
        return _binned(bins, weights, self.num_bins + 2)

    def quantile(self, q: float) -> jax.Array:
        """Returns the value below which a fraction `q` of the weight is.

        Within a bin the weight is taken to be uniform, so that the result is off by at
        most one bin's width. It is -inf or inf if the value is outside the bins, and
        NaN if nothing was counted.

        Args:
            q: From 0 to 1.

        Raises:
            MetricError: If `q` is outside that range.
        """
        q = _checks.number("q", q, at_least=0, at_most=1, **self._context)
        weights = self.sums.value
        total = jnp.sum(weights)
        target = q * total
        reached = jnp.cumsum(weights)
        # The first bin that has weight and reaches the target; or, if rounding keeps
        # all of them below it, the last bin that has weight.
        enough = (reached >= target) & (weights > 0)
        last = weights.size - 1 - jnp.argmax((weights > 0)[::-1])
        index = jnp.where(jnp.any(enough), jnp.argmax(enough), last)
        inside = (target - (reached[index] - weights[index])) / weights[index]
        width = (self.high - self.low) / self.num_bins
        value = self.low + width * (index - 1 + jnp.clip(inside, 0, 1))
        value = jnp.where(index == 0, -jnp.inf, value)
        value = jnp.where(index == self.num_bins + 1, jnp.inf, value)
        return jnp.where(total > 0, value, jnp.nan).astype(jnp.float32)


@metric_class
class Histogram(_BinnedValues):
    """The weight of the values in bins of equal width, from `low` to `high`.

    A bin includes its lower edge, and the last one its upper edge as well. Values
    outside are counted separately, in `below` and `above`; NaN makes `above` NaN.

    Args:
        low: The lower edge of the first bin.
        high: The upper edge of the last bin.
        num_bins: The number of bins.
        values: The name of the values in a step's outputs or batch.

    Example:
        >>> histogram = Histogram(0, 4, 4).update(jnp.array([0.5, 1.0, 1.5, 9.0]))
        >>> histogram.compute().tolist(), float(histogram.above)
        ([1.0, 2.0, 0.0, 0.0], 1.0)
    """

    low: float = setting()
    high: float = setting()
    num_bins: int = setting(default=100)
    values: str | int = source(default="losses")

    @property
    def edges(self) -> jax.Array:
        """The edges of the bins, `num_bins + 1` of them."""
        return jnp.linspace(self.low, self.high, self.num_bins + 1, dtype=jnp.float32)

    @property
    def below(self) -> jax.Array:
        """The weight of values less than `low`."""
        return self.sums.value[0]

    @property
    def above(self) -> jax.Array:
        """The weight of values greater than `high`."""
        return self.sums.value[-1]

    def compute(self) -> jax.Array:
        """Returns the weight in each bin, shape `(num_bins,)`."""
        return self.sums.value[1:-1]


@metric_class
class Quantile(_BinnedValues):
    """The value below which a fraction `q` of the weight is, from a histogram.

    Off by at most one bin's width; see `Histogram.quantile`.

    Args:
        q: From 0 to 1; 0.5 is the median.
        low: The lowest value expected.
        high: The highest value expected.
        num_bins: The number of bins.
        values: The name of the values in a step's outputs or batch.

    Example:
        >>> median = Quantile(0.5, 0, 10, num_bins=1000)
        >>> round(float(median.update(jnp.array([1.0, 2.0, 7.0])).compute()), 1)
        2.0
    """

    q: float = setting()
    low: float = setting()
    high: float = setting()
    num_bins: int = setting(default=1000)
    values: str | int = source(default="losses")

    def _check(self) -> None:
        q = _checks.number("q", self.q, at_least=0, at_most=1, **self._context)
        self._set(q=q)
        super()._check()

    def compute(self) -> jax.Array:
        """Returns the quantile; NaN if nothing was counted."""
        return self.quantile(self.q)
