"""Metrics of predicted classes."""

import dataclasses
from typing import Any, ClassVar, Literal, Self, TypeAlias

import jax
import jax.numpy as jnp

from meshlayout.errors import MetricError, did_you_mean
from meshlayout.metrics.elements import (
    as_array,
    check_class_numbers,
    class_scores,
    element_weights,
    is_class,
    is_explicit,
    label_numbers,
    ranks,
    same_shape,
    text,
)
from meshlayout.metrics.metric import EMPTY, Metric, accumulator, metric_class, setting
from meshlayout.metrics.total import Total


Average: TypeAlias = Literal["binary", "macro", "micro"] | None
_AVERAGES = ("binary", "macro", "micro")

# What to do for two classes and one score per example.
_THRESHOLD = (
    "give threshold=: 0.0 where predictions are logits, 0.5 where they are "
    "probabilities"
)
_CLASSES = "give class numbers as predictions, as (logits > 0).astype(int)"


def is_count(x: Any, least: int = 1) -> bool:
    """Tells whether a setting is a whole number, and not too small."""
    return isinstance(x, int) and not isinstance(x, bool) and x >= least


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and x == x


def _above(predictions: jax.Array, threshold: float) -> jax.Array:
    return predictions.astype(jnp.float32) >= threshold


def _pair_text(predictions: jax.Array, labels: jax.Array) -> str:
    return f"{text('predictions', predictions)} and {text('labels', labels)}"


@metric_class
class Accuracy(Metric):
    """The share of labels that are predicted.

    Of equal scores, the class with the lower number is predicted, as by `argmax`. NaN
    among a row's scores makes it wrong, and so does a label that is no class.

    Args:
        predictions: The name of the predictions in a step's outputs or batch.
        labels: The name of the labels there.
        top_k: How many of the highest scores count as predicted.
        threshold: For two classes and one score each: scores from here on predict 1.

    Example:
        >>> logits = jnp.array([[1.0, 3.0, 2.0], [5.0, 0.0, 1.0]])
        >>> float(Accuracy().update(logits, jnp.array([1, 2])).compute())
        0.5
        >>> float(Accuracy(top_k=2).update(logits, jnp.array([1, 2])).compute())
        1.0
    """

    predictions: str | int = setting(default="logits")
    labels: str | int = setting(default="label")
    top_k: int = setting(default=1)
    threshold: float | None = setting(default=None)
    sums: Total = accumulator(default=EMPTY)  # of what is right, and of all
    inputs: ClassVar[tuple[str, ...]] = ("predictions", "labels")

    def _check(self) -> None:
        if not is_count(self.top_k):
            msg = f"Accuracy: top_k={self.top_k!r} has to be a whole number from 1 on."
            raise MetricError(msg)
        if self.threshold is None:
            return
        if not _is_number(self.threshold):
            msg = f"Accuracy: threshold={self.threshold!r} has to be a number."
            raise MetricError(msg)
        if self.top_k != 1:
            msg = (
                f"Accuracy: top_k={self.top_k} is for one score per class, and "
                f"threshold={self.threshold} for one score per label. Give one of them."
            )
            raise MetricError(msg)

    def _start(self) -> dict[str, Any]:
        return {"sums": Total.zeros((2,))}

    def update(self, predictions: Any, labels: Any, weights: Any = None) -> Self:
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
        right = self._right(predictions, labels)
        each = element_weights(weights, right, "labels", "Accuracy")
        settings = (self.predictions, self.labels, self.top_k, self.threshold)
        new = jnp.stack([jnp.sum(jnp.where(right, each, 0)), jnp.sum(each)])
        return type(self)(*settings, sums=self.sums.add(new))

    def _right(self, predictions: Any, labels: Any) -> jax.Array:
        """Returns for each label whether it was predicted."""
        if self.threshold is not None:
            predictions, labels = same_shape(predictions, labels, "Accuracy")
            right = _above(predictions, self.threshold) == (labels > 0)
            return right & (predictions == predictions)
        predictions = as_array(predictions, "predictions", "Accuracy")
        labels = as_array(labels, "labels", "Accuracy")
        if _are_classes(predictions, labels):
            if self.top_k == 1:
                return predictions == labels
            msg = (
                f"Accuracy: with top_k={self.top_k}, there has to be one score per "
                f"class, and {_pair_text(predictions, labels)} are class numbers."
            )
            raise MetricError(msg)
        scores, labels = class_scores(predictions, labels, "Accuracy", _THRESHOLD)
        if self.top_k > scores.shape[-1]:
            msg = (
                f"Accuracy: top_k={self.top_k} is more than the {scores.shape[-1]} "
                f"classes of {text('predictions', scores)}."
            )
            raise MetricError(msg)
        rank = ranks(scores, label_numbers(scores, labels))
        return (rank >= 0) & (rank < self.top_k)

    def compute(self) -> jax.Array:
        """Returns the accuracy; NaN where nothing was counted."""
        correct, count = self.sums.value
        return correct / count


def _are_classes(predictions: jax.Array, labels: jax.Array) -> bool:
    """Tells whether both are class numbers, one prediction per label."""
    floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in (predictions, labels)]
    return predictions.shape == labels.shape and not any(floats)


def _check_num_classes(metric: Any) -> None:
    if not is_count(metric.num_classes, 2):
        where = type(metric).__name__
        msg = (
            f"{where}: num_classes={metric.num_classes!r} has to be a whole number "
            "from 2 on."
        )
        raise MetricError(msg)


def _class_pair(
    predictions: Any, labels: Any, num_classes: int, where: str
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
    predicted = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    unknown = jnp.any(jnp.isnan(scores), axis=-1)
    return jnp.where(unknown, -1, predicted), numbers


@metric_class
class ConfusionMatrix(Metric):
    """How often each class was predicted for each label: labels in rows.

    A label or prediction that is no class, and a row of scores with NaN, is in no
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
    predictions: str | int = setting(default="logits")
    labels: str | int = setting(default="label")
    cells: Total = accumulator(default=EMPTY)
    inputs: ClassVar[tuple[str, ...]] = ("predictions", "labels")

    def _check(self) -> None:
        _check_num_classes(self)

    def _start(self) -> dict[str, Any]:
        size = self.num_classes or 0
        return {"cells": Total.zeros((size, size))}

    def update(self, predictions: Any, labels: Any, weights: Any = None) -> Self:
        """Returns the metric with a batch added.

        Args:
            predictions: Scores `(..., classes)`, or class numbers `(...)`.
            labels: Class numbers `(...)`, or one-hot `(..., classes)`.
            weights: Per label; see `Metric`.

        Raises:
            MetricError: If shapes or dtypes do not fit.
        """
        size = self.num_classes or 0
        predicted, true = _class_pair(predictions, labels, size, "ConfusionMatrix")
        each = element_weights(weights, true, "labels", "ConfusionMatrix")
        rows = jnp.where(is_class(true, size), each[..., None], 0)
        columns = is_class(predicted, size).astype(jnp.float32)
        dims = tuple(range(true.ndim))
        if is_explicit(rows) or is_explicit(columns):
            cells = jnp.sum(rows[..., None] * columns[..., None, :], axis=dims)
        else:
            contracted = ((dims, dims), ((), ()))
            cells = jax.lax.dot_general(rows, columns, contracted, precision="highest")
        settings = (self.num_classes, self.predictions, self.labels)
        return type(self)(*settings, cells=self.cells.add(cells))

    def compute(self) -> jax.Array:
        """Returns the weights, shape `(num_classes, num_classes)`; 0 where empty."""
        return self.cells.value


@metric_class
class _Hits(Metric):
    """What precision, recall and F1 have in common."""

    predictions: str | int = setting(default="logits")
    labels: str | int = setting(default="label")
    threshold: float | None = setting(default=None)
    num_classes: int | None = setting(default=None)
    average: Average = setting(default="binary")
    hits: Total = accumulator(default=EMPTY)  # predicted, and rightly so
    predicted: Total = accumulator(default=EMPTY)
    actual: Total = accumulator(default=EMPTY)
    count: Total = accumulator(default=EMPTY)
    inputs: ClassVar[tuple[str, ...]] = ("predictions", "labels")

    def _check(self) -> None:
        where = type(self).__name__
        if self.average is not None and self.average not in _AVERAGES:
            msg = (
                f"{where}: average={self.average!r} is not one of "
                f"{', '.join(map(repr, _AVERAGES))}, None."
                f"{did_you_mean(self.average, _AVERAGES)}"
            )
            raise MetricError(msg)
        if self.average == "binary":
            self._check_binary(where)
            return
        _check_num_classes(self)
        if self.threshold is not None:
            msg = (
                f"{where}: threshold={self.threshold!r} is for average='binary'; with "
                f"average={self.average!r}, the class with the highest score is "
                "predicted."
            )
            raise MetricError(msg)

    def _check_binary(self, where: str) -> None:
        if self.num_classes is not None:
            msg = (
                f"{where}: with num_classes={self.num_classes!r}, average has to be "
                "'macro', 'micro' or None."
            )
            raise MetricError(msg)
        if not _is_number(self.threshold):
            msg = (
                f"{where}: threshold={self.threshold!r} has to be a number: 0.0 where "
                "predictions are logits, 0.5 where they are probabilities. For more "
                "than two classes, give num_classes and average."
            )
            raise MetricError(msg)

    def _start(self) -> dict[str, Any]:
        shape = () if self.num_classes is None else (self.num_classes,)
        names = ("hits", "predicted", "actual")
        return {name: Total.zeros(shape) for name in names} | {"count": Total.zeros()}

    def update(self, predictions: Any, labels: Any, weights: Any = None) -> Self:
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
        if self.threshold is not None:
            scores, labels = same_shape(predictions, labels, where)
            each = element_weights(weights, labels, "labels", where)
            guess, truth, share = _above(scores, self.threshold), labels > 0, each
        else:
            size = self.num_classes or 0
            numbers, labels = _class_pair(predictions, labels, size, where)
            each = element_weights(weights, labels, "labels", where)
            guess, truth = is_class(numbers, size), is_class(labels, size)
            share = each[..., None]
        dims = tuple(range(labels.ndim))

        def total(old: Total, chosen: jax.Array) -> Total:
            return old.add(jnp.sum(jnp.where(chosen, share, 0), axis=dims))

        return dataclasses.replace(
            self,
            hits=total(self.hits, guess & truth),
            predicted=total(self.predicted, guess),
            actual=total(self.actual, truth),
            count=self.count.add(jnp.sum(each)),
        )

    def _share(self, wholes: tuple[Total, ...]) -> jax.Array:
        """Returns the hits, per mean of the wholes, averaged as asked."""
        counted = self.count.value > 0
        hits = self.hits.value
        whole = sum((total.value for total in wholes), jnp.zeros_like(hits))
        whole = whole / len(wholes)
        if self.average == "micro":
            hits, whole = jnp.sum(hits), jnp.sum(whole)
        share = jnp.where(whole > 0, hits / whole, 0)
        if self.average in ("binary", "micro"):
            return jnp.where(counted, share, jnp.nan)
        occurs = (self.predicted.value > 0) | (self.actual.value > 0)
        if self.average is None:
            return jnp.where(occurs, share, jnp.nan)
        return jnp.sum(jnp.where(occurs, share, 0)) / jnp.sum(occurs)


@metric_class
class Precision(_Hits):
    """The share of predicted ones that are right.

    With `average="binary"` there are two classes and one score each, and a score from
    `threshold` on predicts 1. With more classes, the highest score is predicted;
    `"macro"` is the mean over the classes that occur among labels or predictions,
    `"micro"` counts all classes together, and None gives one value per class. The
    value is 0 where what it divides by is 0, and NaN where nothing was counted and
    for a class that does not occur.

    Args:
        predictions: The name of the predictions in a step's outputs or batch.
        labels: The name of the labels there.
        threshold: For two classes: 0.0 for logits, 0.5 for probabilities.
        num_classes: For more classes: how many.
        average: `"binary"`, `"macro"`, `"micro"` or None.

    Example:
        >>> precision = Precision(threshold=0.5)
        >>> scores, labels = jnp.array([0.9, 0.8, 0.3]), jnp.array([1, 0, 1])
        >>> float(precision.update(scores, labels).compute())
        0.5
    """

    def compute(self) -> jax.Array:
        """Returns the precision."""
        return self._share((self.predicted,))


@metric_class
class Recall(_Hits):
    """The share of actual ones that are predicted.

    Averages, and what is 0 and NaN, are as for `Precision`.

    Args:
        predictions: The name of the predictions in a step's outputs or batch.
        labels: The name of the labels there.
        threshold: For two classes: 0.0 for logits, 0.5 for probabilities.
        num_classes: For more classes: how many.
        average: `"binary"`, `"macro"`, `"micro"` or None.

    Example:
        >>> recall = Recall(num_classes=2, average=None)
        >>> recall.update(jnp.array([0, 1, 1]), jnp.array([0, 0, 1])).compute().tolist()
        [0.5, 1.0]
    """

    def compute(self) -> jax.Array:
        """Returns the recall."""
        return self._share((self.actual,))


@metric_class
class F1(_Hits):
    """The harmonic mean of precision and recall.

    Averages, and what is 0 and NaN, are as for `Precision`.

    Args:
        predictions: The name of the predictions in a step's outputs or batch.
        labels: The name of the labels there.
        threshold: For two classes: 0.0 for logits, 0.5 for probabilities.
        num_classes: For more classes: how many.
        average: `"binary"`, `"macro"`, `"micro"` or None.

    Example:
        >>> scores, labels = jnp.array([0.9, 0.8, 0.3]), jnp.array([1, 0, 1])
        >>> float(F1(threshold=0.5).update(scores, labels).compute())
        0.5
    """

    def compute(self) -> jax.Array:
        """Returns the F1 score."""
        return self._share((self.predicted, self.actual))
