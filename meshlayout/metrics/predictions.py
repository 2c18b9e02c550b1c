"""Predictions and labels: of one shape, or scores per class with the true class.

Everything here is written without gathers and scatters: comparisons and sums keep
logits on their shards, whichever dim is sharded. `where` is the name of the metric
throughout, which opens the message of a MetricError.
"""

import math
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.typing import ArrayLike

from meshlayout.errors import MetricError
from meshlayout.metrics.metric import Metric, as_array, element_weights, text


def is_explicit(x: jax.Array) -> bool:
    """Returns whether an array is on Explicit axes, where JAX infers no layouts."""
    mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
    return AxisType.Explicit in getattr(mesh, "axis_types", ())


def same_shape(
    predictions: ArrayLike, labels: ArrayLike, where: str
) -> tuple[jax.Array, jax.Array]:
    """Returns predictions and labels, checked to have one shape.

    Predictions may have an extra last dim of 1, as a dense layer with one output makes.
    """
    predictions = as_array(predictions, "predictions", where)
    labels = as_array(labels, "labels", where)
    # Left as it is, broadcasting would compare every prediction with every label.
    if predictions.shape == (*labels.shape, 1):
        predictions = predictions[..., 0]
    if predictions.shape != labels.shape:
        msg = (
            f"{where}: {text('predictions', predictions)} and {text('labels', labels)} "
            "differ in shape; there must be one prediction per label."
        )
        raise MetricError(msg)
    return predictions, labels


class PairMetric(Metric):
    """Base of the metrics of predictions and labels."""

    def update(
        self,
        predictions: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None = None,
    ) -> Self:
        """Returns the metric with a batch added.

        Args:
            predictions: The model's outputs, in the shape that the class documents.
            labels: The true values.
            weights: Per label; see `Metric`.

        Raises:
            MetricError: If shapes or dtypes do not fit.
        """
        elements, checked = self._elements(predictions, labels)
        where = type(self).__name__
        return self._added(elements, element_weights(weights, checked, "labels", where))

    def _elements(self, predictions: Any, labels: Any) -> tuple[Any, jax.Array]:
        """Returns what is counted, and an array with an element for each label."""
        raise NotImplementedError


# Classes.


def class_scores(
    predictions: ArrayLike, labels: ArrayLike, where: str, binary: str
) -> tuple[jax.Array, jax.Array]:
    """Returns float32 scores per class, and labels as class numbers or one-hot.

    Args:
        predictions: One score per class in the last dim.
        labels: Of one dim less, or of the same shape.
        where: The name of the metric.
        binary: The advice for two classes with one score per example, for messages.

    Raises:
        MetricError: If the shapes or dtypes do not fit.
    """
    predictions = as_array(predictions, "predictions", where)
    scores = predictions.astype(jnp.float32)
    labels = as_array(labels, "labels", where)
    is_alike = labels.shape == scores.shape
    # Two arrays of shape (batch,) are one score per example, not one-hot labels.
    if scores.shape[-1:] in ((0,), (1,)) or (scores.ndim == 1 and is_alike):
        msg = (
            f"{where}: {text('predictions', predictions)} and {text('labels', labels)} "
            "have no dim of two or more classes. For two classes and one score per "
            f"example {binary}."
        )
        raise MetricError(msg)
    if scores.ndim and is_alike:
        return scores, labels
    if not scores.ndim or labels.shape != scores.shape[:-1]:
        msg = (
            f"{where}: {text('predictions', scores)} and {text('labels', labels)} do "
            "not fit. Predictions have one more dim than class numbers, for the "
            "classes, and the shape of one-hot labels."
        )
        raise MetricError(msg)
    check_class_numbers(labels, where)
    return scores, labels


def check_class_numbers(labels: jax.Array, where: str) -> None:
    """Raises MetricError if labels are not integers."""
    # Rounded class numbers, or probabilities of the wrong shape: nobody means these.
    if jnp.issubdtype(labels.dtype, jnp.floating):
        msg = (
            f"{where}: {text('labels', labels)} must hold class numbers, which are "
            "integers."
        )
        raise MetricError(msg)


def label_numbers(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns labels as class numbers."""
    is_one_hot = labels.ndim == scores.ndim
    return (jnp.argmax(labels, axis=-1) if is_one_hot else labels).astype(jnp.int32)


def is_class(labels: jax.Array, num_classes: int) -> jax.Array:
    """Returns for each label and class whether the label is the class."""
    return labels[..., None] == _class_numbers(num_classes, labels.ndim + 1)


def _class_numbers(num_classes: int, ndim: int) -> jax.Array:
    """Returns 0, 1, ... in the last of `ndim` dims."""
    numbers = jnp.arange(num_classes, dtype=jnp.int32)
    return numbers.reshape(*[1] * (ndim - 1), num_classes)


def highest_class(scores: jax.Array) -> jax.Array:
    """Returns the class with the highest score; -1 where a score is NaN.

    Of equal scores the lower class number is taken. The classes are read once, in
    blocks: the highest of each block, then the highest of those. A comparison of all
    scores with the highest one would keep a copy of the logits alive past the loss,
    and a plain argmax gathers logits whose classes are sharded; blocks stay on their
    shards. `test_accuracy_costs_no_memory_and_no_collectives` counts both.

    Args:
        scores: Float scores of shape `(..., classes)`.
    """
    num_classes = scores.shape[-1]
    largest = 2 ** int(math.log2(max(1, math.isqrt(num_classes))))
    # JAX refuses to split a sharded dim on Explicit axes.
    num_blocks = 1 if is_explicit(scores) else math.gcd(num_classes, largest)
    size = num_classes // num_blocks
    blocks = scores.reshape(*scores.shape[:-1], num_blocks, size)
    highest = jnp.max(blocks, axis=-1)
    first = _class_numbers(num_blocks, scores.ndim) * size
    classes = jnp.argmax(blocks, axis=-1).astype(jnp.int32) + first
    is_highest = highest == jnp.max(highest, axis=-1, keepdims=True)  # NaN never is
    predicted = jnp.min(jnp.where(is_highest, classes, num_classes), axis=-1)
    return jnp.where(predicted < num_classes, predicted, -1)


def ranks(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns how many classes rank above each label's class; -1 for no such class.

    Of equal scores the lower class number ranks higher, and NaN ranks above all: a row
    with NaN is never right.
    """
    # Counting takes one pass over the scores; `jax.lax.top_k` sorts, and gathers logits
    # whose classes are sharded.
    num_classes = scores.shape[-1]
    is_own = is_class(labels, num_classes)
    own = jnp.sum(jnp.where(is_own, scores, 0), axis=-1, keepdims=True)
    is_lower = _class_numbers(num_classes, scores.ndim) < labels[..., None]
    tied = (scores == own) & is_lower
    rank = jnp.sum(~(scores <= own) | tied, axis=-1)
    return jnp.where(jnp.any(is_own, axis=-1), rank, -1)
