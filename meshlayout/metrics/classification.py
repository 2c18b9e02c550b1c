"""Metrics of predicted classes."""

import dataclasses
from typing import Any, ClassVar, Literal, Self, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from meshlayout import _checks
from meshlayout.errors import MetricError
from meshlayout.metrics.elements import (
    as_array,
    check_class_numbers,
    class_scores,
    element_weights,
    highest_class,
    is_class,
    is_explicit,
    label_numbers,
    ranks,
    same_shape,
    text,
)
from meshlayout.metrics.means import MeanMetric
from meshlayout.metrics.metric import (
    EMPTY,
    Metric,
    Total,
    accumulator,
    metric_class,
    setting,
    source,
)


Average: TypeAlias = Literal["binary", "macro", "micro", "weighted"] | None
_AVERAGES = ("binary", "macro", "micro", "weighted", None)

# What to do for two classes and one score per example.
_THRESHOLD = (
    "give threshold=: 0.0 where predictions are logits, 0.5 where they are "
    "probabilities"
)
_CLASSES = "give class numbers as predictions, as (logits > 0).astype(int)"


def _above(predictions: jax.Array, threshold: float) -> jax.Array:
    # As scikit-learn, Keras and torchmetrics: a score at the threshold predicts 0.
    return predictions.astype(jnp.float32) > threshold


@metric_class
class Accuracy(MeanMetric):
    """The share of labels that are predicted.

    Of equal scores, the class with the lower number is predicted, as by `argmax`. NaN
    among a row's scores makes it wrong, and so does a label that is not a class.

    Args:
        predictions: The name of the predictions in a step's outputs or batch.
        labels: The name of the labels there.
        top_k: How many of the highest scores count as predicted.
        threshold: For two classes and one score each: higher scores predict 1.

    Example:
        >>> logits = jnp.array([[1.0, 3.0, 2.0], [5.0, 0.0, 1.0]])
        >>> float(Accuracy().update(logits, jnp.array([1, 2])).compute())
        0.5
        >>> float(Accuracy(top_k=2).update(logits, jnp.array([1, 2])).compute())
        1.0
    """

    predictions: str | int = source(default="logits")
    labels: str | int = source(default="label")
    top_k: int = setting(default=1)
    threshold: float | None = setting(default=None)
    sums: Total = accumulator(default=EMPTY)

    def _check(self) -> None:
        self._set(top_k=_checks.count("top_k", self.top_k, **self._context))
        if self.threshold is None:
            return
        threshold = _checks.number("threshold", self.threshold, **self._context)
        self._set(threshold=threshold)
        if self.top_k != 1:
            msg = (
                f"{type(self).__name__}: top_k={self.top_k} is for one score per "
                f"class, and threshold={threshold} for one score per label. Give one "
                "of them."
            )
            raise MetricError(msg)

    def update(
        self,
        predictions: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None = None,
    ) -> Self:
        """Returns the metric with a batch added.

        Args:
            predictions: Scores of shape `(..., classes)`; with a threshold, scores of
                the labels' shape; or integers of the labels' shape, the classes.
            labels: Class numbers of shape `(...)`, or one-hot `(..., classes)`; with
                a threshold, positive numbers are 1.
            weights: Per label; see `Metric`.

        Raises:
            MetricError: If shapes or dtypes do not fit.
        """
        where = type(self).__name__
        right = self._is_right(predictions, labels, where)
        return self._add(right, element_weights(weights, right, "labels", where))

    def _is_right(
        self, predictions: ArrayLike, labels: ArrayLike, where: str
    ) -> jax.Array:
        """Returns for each label whether it was predicted."""
        if self.threshold is not None:
            scores, labels = same_shape(predictions, labels, where)
            right = _above(scores, self.threshold) == (labels > 0)
            return right & (scores == scores)  # NaN predicts nothing
        predictions = as_array(predictions, "predictions", where)
        labels = as_array(labels, "labels", where)
        if _are_classes(predictions, labels):
            if self.top_k == 1:
                return predictions == labels
            msg = (
                f"{where}: with top_k={self.top_k}, there must be one score per class, "
                f"and {text('predictions', predictions)} and {text('labels', labels)} "
                "are class numbers."
            )
            raise MetricError(msg)
        scores, labels = class_scores(predictions, labels, where, _THRESHOLD)
        if self.top_k > scores.shape[-1]:
            msg = (
                f"{where}: top_k={self.top_k} is more than the {scores.shape[-1]} "
                f"classes of {text('predictions', scores)}."
            )
            raise MetricError(msg)
        numbers = label_numbers(scores, labels)
        if self.top_k == 1:
            return (highest_class(scores) == numbers) & (numbers >= 0)
        rank = ranks(scores, numbers)
        return (rank >= 0) & (rank < self.top_k)

    @property
    def correct(self) -> jax.Array:
        """The weight of the labels that were predicted; `count` is that of all."""
        return self.total

    def compute(self) -> jax.Array:
        """Returns the accuracy; NaN where nothing was counted."""
        return super().compute()


def _are_classes(predictions: jax.Array, labels: jax.Array) -> bool:
    """Returns whether both are class numbers, one prediction per label."""
    floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in (predictions, labels)]
    return predictions.shape == labels.shape and not any(floats)


def _class_pair(
    predictions: ArrayLike, labels: ArrayLike, num_classes: int, where: str
) -> tuple[jax.Array, jax.Array]:
    """Returns predicted and true class numbers.

    A row that holds NaN predicts no class: its number is -1.
    """
    predictions = as_array(predictions, "predictions", where)
    labels = as_array(labels, "labels", where)
    if _are_classes(predictions, labels):
        return predictions.astype(jnp.int32), labels.astype(jnp.int32)
    scores, labels = class_scores(predictions, labels, where, _CLASSES)
    if scores.shape[-1] != num_classes:
        msg = (
            f"{where}: num_classes={num_classes}, and {text('predictions', scores)} "
            f"has {scores.shape[-1]} classes in its last dim."
        )
        raise MetricError(msg)
    numbers = label_numbers(scores, labels)
    check_class_numbers(numbers, "labels", where)
    return highest_class(scores), numbers


@metric_class
class ConfusionMatrix(Metric):
    """How often each class was predicted for each label: labels in rows.

    A label or prediction that is not a class, and a row of scores with NaN, is in no
    cell; `compute().sum()` is then less than the weight of what was given.

    Args:
        num_classes: How many classes there are.
        predictions: The name of the predictions in a step's outputs or batch.
        labels: The name of the labels there.

    Example:
        >>> matrix = ConfusionMatrix(2).update(
        ...     jnp.array([0, 1, 1]), jnp.array([0, 0, 1])
        ... )
        >>> matrix.compute().tolist()
        [[1.0, 1.0], [0.0, 1.0]]
    """

    num_classes: int | None = setting(default=None)
    predictions: str | int = source(default="logits")
    labels: str | int = source(default="label")
    cells: Total = accumulator(default=EMPTY)

    def _check(self) -> None:
        self._check_num_classes(self.num_classes)

    def _start(self) -> dict[str, Any]:
        return {"cells": Total.zeros((self._size, self._size))}

    @property
    def _size(self) -> int:
        return self.num_classes or 0

    def update(
        self,
        predictions: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None = None,
    ) -> Self:
        """Returns the metric with a batch added.

        Args:
            predictions: Scores `(..., classes)`, or class numbers `(...)`.
            labels: Class numbers `(...)`, or one-hot `(..., classes)`.
            weights: Per label; see `Metric`.

        Raises:
            MetricError: If shapes or dtypes do not fit.
        """
        where = type(self).__name__
        predicted, true = _class_pair(predictions, labels, self._size, where)
        each = element_weights(weights, true, "labels", where)
        rows = jnp.where(is_class(true, self._size), each[..., None], 0)
        columns = is_class(predicted, self._size).astype(jnp.float32)
        dims = tuple(range(true.ndim))
        if is_explicit(rows) or is_explicit(columns):
            cells = jnp.sum(rows[..., None] * columns[..., None, :], axis=dims)
        else:
            contracted = ((dims, dims), ((), ()))
            cells = jax.lax.dot_general(rows, columns, contracted, precision="highest")
        return dataclasses.replace(self, cells=self.cells.add(cells))

    def compute(self) -> jax.Array:
        """Returns the weights, shape `(num_classes, num_classes)`; 0 where empty."""
        return self.cells.value


# What precision, recall and F1 count for each class. In one array, because every
# array of a step's state costs host time.
_COUNTED = ("hits", "predicted", "actual", "count")


@metric_class
class _ClassShare(Metric):
    """What precision, recall and F1 have in common: hits, per mean of some wholes."""

    predictions: str | int = source(default="logits")
    labels: str | int = source(default="label")
    threshold: float | None = setting(default=None)
    num_classes: int | None = setting(default=None)
    average: Average = setting(default="binary")
    counts: Total = accumulator(default=EMPTY)  # one row for each of _COUNTED
    _wholes: ClassVar[tuple[str, ...]] = ()

    def _check(self) -> None:
        average = _checks.choice("average", self.average, _AVERAGES, **self._context)
        if average == "binary":
            self._check_binary()
            return
        self._check_num_classes(self.num_classes)
        if self.threshold is not None:
            msg = (
                f"{type(self).__name__}: threshold={self.threshold!r} is for "
                f"average='binary'; with average={average!r}, the class with the "
                "highest score is predicted."
            )
            raise MetricError(msg)

    def _check_binary(self) -> None:
        if self.num_classes is not None:
            msg = (
                f"{type(self).__name__}: with num_classes={self.num_classes!r}, "
                "average must be 'macro', 'micro', 'weighted' or None."
            )
            raise MetricError(msg)
        threshold = 0.0 if self.threshold is None else self.threshold
        self._set(threshold=_checks.number("threshold", threshold, **self._context))

    def _start(self) -> dict[str, Any]:
        classes = () if self.num_classes is None else (self.num_classes,)
        return {"counts": Total.zeros((len(_COUNTED), *classes))}

    def update(
        self,
        predictions: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None = None,
    ) -> Self:
        """Returns the metric with a batch added.

        Args:
            predictions: For two classes, scores of the labels' shape. Otherwise
                scores `(..., classes)`, or class numbers `(...)`.
            labels: For two classes, positive numbers are 1. Otherwise class numbers
                `(...)`, or one-hot `(..., classes)`.
            weights: Per label; see `Metric`.

        Raises:
            MetricError: If shapes or dtypes do not fit.
        """
        where = type(self).__name__
        if self.num_classes is None:
            scores, labels = same_shape(predictions, labels, where)
            share = element_weights(weights, labels, "labels", where)
            guess, truth = _above(scores, self.threshold or 0), labels > 0
        else:
            size = self.num_classes
            numbers, labels = _class_pair(predictions, labels, size, where)
            share = element_weights(weights, labels, "labels", where)[..., None]
            guess, truth = is_class(numbers, size), is_class(labels, size)
        counted = {
            "hits": guess & truth,
            "predicted": guess,
            "actual": truth,
            "count": jnp.ones_like(guess),
        }
        dims = tuple(range(labels.ndim))
        sums = [jnp.sum(jnp.where(counted[k], share, 0), axis=dims) for k in _COUNTED]
        return dataclasses.replace(self, counts=self.counts.add(jnp.stack(sums)))

    @property
    def hits(self) -> jax.Array:
        """The weight of what was predicted and is so; per class if there are more."""
        return self._row("hits")

    @property
    def predicted(self) -> jax.Array:
        """The weight of what was predicted, right or wrong."""
        return self._row("predicted")

    @property
    def actual(self) -> jax.Array:
        """The weight of the labels that are so, predicted or not."""
        return self._row("actual")

    @property
    def count(self) -> jax.Array:
        """The weight of all labels, a scalar."""
        count = self._row("count")
        return count[0] if count.ndim else count

    def _row(self, name: str) -> jax.Array:
        return self.counts.value[_COUNTED.index(name)]

    def compute(self) -> jax.Array:
        """Returns the value, averaged as asked; NaN where nothing was counted."""
        hits, predicted, actual = self.hits, self.predicted, self.actual
        wholes = [self._row(name) for name in self._wholes]
        whole = sum(wholes[1:], wholes[0]) / len(wholes)
        if self.average == "micro":
            hits, whole = jnp.sum(hits), jnp.sum(whole)
        share = jnp.where(whole > 0, hits / whole, 0)
        if self.average in ("binary", "micro"):
            return jnp.where(self.count > 0, share, jnp.nan)
        if self.average == "weighted":
            return jnp.sum(share * actual) / jnp.sum(actual)
        occurs = (predicted > 0) | (actual > 0)
        if self.average is None:
            return jnp.where(occurs, share, jnp.nan)
        return jnp.sum(jnp.where(occurs, share, 0)) / jnp.sum(occurs)


@metric_class
class Precision(_ClassShare):
    """The share of what was predicted that is right.

    With `average="binary"` there are two classes and one score each, and a score above
    the threshold predicts 1. With more classes, the highest score is predicted:
    `"macro"` is the mean over the classes that occur among labels or predictions,
    `"weighted"` the mean over the labels, `"micro"` counts all classes together, and
    None gives one value per class. The value is 0 where what it divides by is 0, and
    NaN where nothing was counted and for a class that does not occur.

    What it is made of can be read as `hits`, `predicted`, `actual` and `count`.

    Args:
        predictions: The name of the predictions in a step's outputs or batch.
        labels: The name of the labels there.
        threshold: For two classes: 0.0, for logits, if not given; 0.5 is for
            probabilities.
        num_classes: For more classes: how many.
        average: `"binary"`, `"macro"`, `"micro"`, `"weighted"` or None.

    Example:
        >>> precision = Precision(threshold=0.5)
        >>> scores, labels = jnp.array([0.9, 0.8, 0.3]), jnp.array([1, 0, 1])
        >>> float(precision.update(scores, labels).compute())
        0.5
    """

    _wholes: ClassVar[tuple[str, ...]] = ("predicted",)


@metric_class
class Recall(_ClassShare):
    """The share of the actual ones that are predicted; takes what `Precision` takes.

    Example:
        >>> recall = Recall(num_classes=2, average=None)
        >>> recall.update(jnp.array([0, 1, 1]), jnp.array([0, 0, 1])).compute().tolist()
        [0.5, 1.0]
    """

    _wholes: ClassVar[tuple[str, ...]] = ("actual",)


@metric_class
class F1(_ClassShare):
    """The harmonic mean of precision and recall; takes what `Precision` takes.

    Example:
        >>> scores, labels = jnp.array([0.9, 0.8, 0.3]), jnp.array([1, 0, 1])
        >>> float(F1(threshold=0.5).update(scores, labels).compute())
        0.5
    """

    _wholes: ClassVar[tuple[str, ...]] = ("predicted", "actual")
