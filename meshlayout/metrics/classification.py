"""Metrics of predictions and labels: scores per class against true classes.

Comparisons and sums, without gathers and sorts, keep logits on their shards.
"""

import functools
from dataclasses import KW_ONLY
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from meshlayout import _checks, _jax
from meshlayout.arrays.placement import array_text
from meshlayout.errors import MetricError
from meshlayout.metrics.metric import Arrays, MeanMetric, Metric


class _PairMetric(Metric):
    _: KW_ONLY
    predictions: str | int = "logits"
    labels: str | int = "label"

    _inputs: ClassVar[tuple[str, ...]] = ("predictions", "labels")

    def update(
        self,
        predictions: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None = None,
    ) -> Self:
        """Returns the metric with a batch added, or raises MetricError."""
        return self._added(predictions, labels, weights=weights)

    def _per_label(self, scores: jax.Array, labels: jax.Array) -> jax.Array:
        if scores.shape == (*labels.shape, 1):  # as a dense layer with one output makes
            scores = scores[..., 0]
        # Left as it is, broadcasting would compare every prediction with every label.
        if scores.shape != labels.shape:
            fact = "With a threshold, there must be one prediction per label."
            if scores.shape[:-1] == labels.shape and hasattr(self, "num_classes"):
                write = f"{type(self).__name__}(num_classes={scores.shape[-1]}"
                fact = f"For several classes, write {write}, labels={self.labels!r})."
            raise self._misfit(scores, labels, fact)
        return scores.astype(jnp.float32)

    def _per_class(
        self, scores: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns float32 scores per class, and labels as class numbers."""
        has_classes = scores.ndim > 0 and scores.shape[-1] > 1
        if has_classes and labels.shape == scores.shape and labels.ndim > 1:
            labels = jnp.argmax(labels, axis=-1)  # of one-hot ones
        is_integer = not jnp.issubdtype(labels.dtype, jnp.floating)
        if not (has_classes and is_integer and labels.shape == scores.shape[:-1]):
            fact = "Labels are class numbers, which are integers, or one-hot. "
            fact += "Predictions have a last dim for the classes. One score per "
            fact += "example takes threshold=: 0.0 for logits, 0.5 for probabilities."
            raise self._misfit(scores, labels, fact)
        return scores.astype(jnp.float32), labels

    def _one_hot_pair(
        self, inputs: Arrays, num_classes: int
    ) -> tuple[jax.Array, jax.Array]:
        """Returns predicted and true classes as one-hot bools; none for no class."""
        classes, labels = inputs
        if not _are_classes(classes, labels):
            scores, labels = self._per_class(classes, labels)
            if scores.shape[-1] != num_classes:  # some would be counted nowhere
                fact = f"There are num_classes={num_classes}."
                raise self._misfit(scores, labels, fact)
            classes = _highest(scores)
        one_hot = functools.partial(jax.nn.one_hot, dtype=jnp.bool_)
        return one_hot(classes, num_classes), one_hot(labels, num_classes)

    def _misfit(self, scores: jax.Array, labels: jax.Array, fact: str) -> MetricError:
        arrays = {"predictions": scores, "labels": labels}
        both = " and ".join(array_text(name, x) for name, x in arrays.items())
        return MetricError(f"{type(self).__name__}: {both} do not fit. {fact}")


def _are_classes(predictions: jax.Array, labels: jax.Array) -> bool:
    is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in (predictions, labels)]
    return predictions.shape == labels.shape and not any(is_float)


def _highest(scores: jax.Array) -> jax.Array:
    """Returns the class with the highest score, the first of equals; -1 for NaN."""
    is_nan = jnp.isnan(jnp.max(scores, axis=-1))
    return jnp.where(is_nan, -1, jnp.argmax(scores, axis=-1))


def _score_of(classes: jax.Array, scores: jax.Array) -> jax.Array:
    """Returns the score of each class number; NaN where there is no such class."""
    is_own = jax.nn.one_hot(classes, scores.shape[-1], dtype=jnp.bool_)
    own = jnp.sum(jnp.where(is_own, scores, 0), axis=-1)
    return jnp.where(jnp.any(is_own, axis=-1), own, jnp.nan)


class Accuracy(_PairMetric, MeanMetric):
    """The fraction of labels that are predicted correctly.

    Predictions are scores of shape `(..., classes)`; class numbers of the labels'
    shape; or, with a threshold, scores of the labels' shape. Labels are class numbers
    or one-hot; with a threshold, labels above 0 are positive. On ties, the lower class
    is predicted. Scores with NaN are wrong, as are labels that are not a class.

    Args:
        top_k: The number of classes with the highest scores that count as predicted.
        threshold: For two classes with one score per label: scores above it predict 1.
        predictions: The name of the predictions in a step's outputs or batch.
        labels: The name of the labels in them.

    Examples:
        >>> logits = jnp.array([[1.0, 3.0, 2.0], [5.0, 0.0, 1.0]])
        >>> float(Accuracy().update(logits, jnp.array([1, 2])).compute())
        0.5
        >>> float(Accuracy(top_k=2).update(logits, jnp.array([1, 2])).compute())
        1.0
    """

    _: KW_ONLY
    top_k: int = 1
    threshold: float | None = None

    def _shape(self) -> tuple[int, ...]:
        if self.threshold is not None and self.top_k != 1:
            raise MetricError("Accuracy: give threshold= or top_k=, not both.")
        return super()._shape()

    def _sums_of(self, inputs: Arrays, weights: ArrayLike | None) -> jax.Array:
        scores, labels = inputs
        if self.threshold is not None:
            scores = self._per_label(scores, labels)
            right = (scores > self.threshold) == (labels > 0)
            right &= scores == scores  # NaN predicts neither class
        elif self.top_k == 1 and _are_classes(scores, labels):
            right = scores == labels
        else:
            scores, labels = self._per_class(scores, labels)
            if self.top_k == 1:
                right = (_highest(scores) == labels) & (labels >= 0)
            else:
                right = _is_in_top(scores, labels, self.top_k)
        counts = self._weights(weights, right)
        hits, misses = (jnp.sum(jnp.where(x, counts, 0)) for x in (right, ~right))
        return jnp.stack([hits, hits + misses])  # exactly 1, if nothing is missed


def _is_in_top(scores: jax.Array, labels: jax.Array, top_k: int) -> jax.Array:
    """Returns for each label whether at most `top_k - 1` classes rank above its own.

    On ties, the lower class number ranks higher; NaN ranks above all. `jax.lax.top_k`
    would sort, and gather logits whose classes are sharded.
    """
    own = _score_of(labels, scores)[..., None]
    classes = jnp.expand_dims(jnp.arange(scores.shape[-1]), tuple(range(labels.ndim)))
    is_tied = (scores == own) & (classes < labels[..., None])
    num_above = jnp.sum(~(scores <= own) | is_tied, axis=-1)  # all, if `own` is NaN
    return num_above < min(top_k, scores.shape[-1])


class Perplexity(_PairMetric, MeanMetric):
    """The exponential of the mean cross-entropy of labels, in nats.

    Predictions are logits of shape `(..., classes)`; labels as for `Accuracy`. A label
    that is not a class makes the result NaN; give it weight 0 to leave it out.

    Examples:
        >>> value = Perplexity().update(jnp.zeros((2, 4)), jnp.array([1, 3])).compute()
        >>> round(float(value), 4)
        4.0
    """

    def _sums_of(self, inputs: Arrays, weights: ArrayLike | None) -> jax.Array:
        logits, classes = self._per_class(*inputs)
        losses = jax.nn.logsumexp(logits, axis=-1) - _score_of(classes, logits)
        return self._mean_sums(losses, weights)

    def compute(self) -> jax.Array:
        """Returns the perplexity; NaN if nothing was counted."""
        return jnp.exp(super().compute())


class ConfusionMatrix(_PairMetric):
    """How often each class was predicted for each label, with labels in rows.

    Predictions are scores of shape `(..., num_classes)` or class numbers; labels as for
    `Accuracy`. A label or prediction that is not a class, or a row of scores with NaN,
    is not counted, which makes `compute().sum()` less than the total weight.

    Examples:
        >>> predictions, labels = jnp.array([0, 1, 1]), jnp.array([0, 0, 1])
        >>> ConfusionMatrix(2).update(predictions, labels).compute().tolist()
        [[1.0, 1.0], [0.0, 1.0]]
    """

    num_classes: int

    def _shape(self) -> tuple[int, ...]:
        return (self.num_classes, self.num_classes)

    def _sums_of(self, inputs: Arrays, weights: ArrayLike | None) -> jax.Array:
        guess, truth = self._one_hot_pair(inputs, self.num_classes)
        counts = self._weights(weights, truth[..., 0])
        rows = jnp.where(truth, counts[..., None], 0)
        # On Explicit axes, JAX wants to be told the layout of the result.
        sharding, whole = jax.typeof(rows).sharding, None
        if _jax.is_explicit(sharding):
            whole = NamedSharding(sharding.mesh, PartitionSpec())
        # A product of one-hot rows: partial sums stay on their shards. At the highest
        # precision, since TPUs would round weights to bfloat16.
        options: Any = {"precision": "highest", "out_sharding": whole}
        return jnp.einsum("...i,...j->ij", rows, guess.astype(jnp.float32), **options)

    def compute(self) -> jax.Array:
        """Returns the weights, of shape `(num_classes, num_classes)`."""
        return jnp.asarray(self.sums)


class _ClassShare(_PairMetric):
    """Base of precision, recall and F1: shares of one table, a column per class."""

    num_classes: int | None = None
    _: KW_ONLY
    threshold: float | None = None
    average: Literal["macro"] | None = "macro"

    _shares: ClassVar[tuple[float, float]]  # of predictions and labels in the divisor

    def _shape(self) -> tuple[int, ...]:
        where = type(self).__name__
        choices = ("macro", None)
        _checks.choice("average", self.average, choices, where=where, error=MetricError)
        if self.threshold is not None and self.num_classes is not None:
            raise MetricError(f"{where}: give threshold= or num_classes=, not both.")
        return (3, self.num_classes or 1)  # one column, of the positive class

    def _sums_of(self, inputs: Arrays, weights: ArrayLike | None) -> jax.Array:
        if self.num_classes is not None:
            guess, truth = self._one_hot_pair(inputs, self.num_classes)
        else:
            truth = (inputs[1] > 0)[..., None]
            guess = self._per_label(*inputs)[..., None] > (self.threshold or 0)
        counts = self._weights(weights, truth[..., 0])[..., None]
        dims = tuple(range(truth.ndim - 1))
        table = guess & truth, guess & ~truth, ~guess & truth
        hits, *misses = (jnp.sum(jnp.where(x, counts, 0), axis=dims) for x in table)
        return jnp.stack([hits, *(hits + x for x in misses)])  # so that shares can be 1

    def compute(self) -> jax.Array:
        """Returns the mean over classes, or one value each; NaN if no class occurs."""
        hits, predicted, actual = jnp.asarray(self.sums)
        divisor = self._shares[0] * predicted + self._shares[1] * actual
        share = hits / jnp.where(divisor > 0, divisor, 1)
        # As scikit-learn: a class that is neither predicted nor present has no share.
        share = jnp.where(predicted + actual > 0, share, jnp.nan)
        return share if self.average is None else jnp.nanmean(share)


class Precision(_ClassShare):
    """The fraction of positive predictions that are correct.

    By default a score of the labels' shape above the threshold predicts 1, and labels
    above 0 are positive. With `num_classes`, both are as for `ConfusionMatrix`.

    A division by 0 gives 0. A class that occurs neither among labels nor among
    predictions is NaN, and does not count in the mean over classes. For other means,
    `sums` has the rows hits, predictions and labels, and a column per class.

    Args:
        threshold: The default, 0.0, is for logits; use 0.5 for probabilities.
        num_classes: The number of classes, if there are more than two.
        average: `"macro"` for the mean over classes; None for one value per class.

    Examples:
        >>> scores, labels = jnp.array([0.9, 0.8, 0.3]), jnp.array([1, 0, 1])
        >>> float(Precision(threshold=0.5).update(scores, labels).compute())
        0.5
    """

    _shares = (1.0, 0.0)


class Recall(_ClassShare):
    """The fraction of positive labels that are predicted; arguments as `Precision`."""

    _shares = (0.0, 1.0)


class F1(_ClassShare):
    """The harmonic mean of precision and recall; arguments as `Precision`."""

    _shares = (0.5, 0.5)  # the harmonic mean
