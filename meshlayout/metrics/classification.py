"""Metrics of predicted classes."""

from typing import Any, ClassVar, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from meshlayout import _checks
from meshlayout.errors import MetricError
from meshlayout.metrics.metric import (
    MeanMetric,
    SumMetric,
    as_array,
    metric_class,
    setting,
    source,
    text,
)
from meshlayout.metrics.predictions import (
    PairMetric,
    check_class_numbers,
    class_scores,
    highest_class,
    is_class,
    is_explicit,
    label_numbers,
    ranks,
    same_shape,
)


Average: TypeAlias = Literal["binary", "macro", "micro", "weighted"] | None
_AVERAGES = ("binary", "macro", "micro", "weighted", None)

# The advice for two classes with one score per example.
_THRESHOLD = (
    "give threshold=: 0.0 where predictions are logits, 0.5 where they are "
    "probabilities"
)
_CLASSES = "give class numbers as predictions, as (logits > 0).astype(int)"


def _above(predictions: jax.Array, threshold: float) -> jax.Array:
    # Like scikit-learn, Keras and torchmetrics: a score at the threshold predicts 0.
    return predictions.astype(jnp.float32) > threshold


def _are_classes(predictions: jax.Array, labels: jax.Array) -> bool:
    """Returns whether both are class numbers, one prediction per label."""
    floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in (predictions, labels)]
    return predictions.shape == labels.shape and not any(floats)


def _class_pair(
    predictions: ArrayLike, labels: ArrayLike, num_classes: int, where: str
) -> tuple[jax.Array, jax.Array]:
    """Returns predicted and true class numbers.

    A row of scores with NaN predicts no class: its number is -1.
    """
    predictions = as_array(predictions, "predictions", where)
    labels = as_array(labels, "labels", where)
    if _are_classes(predictions, labels):
        return predictions.astype(jnp.int32), labels.astype(jnp.int32)
    scores, labels = class_scores(predictions, labels, where, _CLASSES)
    # A label beyond the state's classes would be counted nowhere.
    if scores.shape[-1] != num_classes:
        msg = (
            f"{where}: num_classes={num_classes}, and {text('predictions', scores)} "
            f"has {scores.shape[-1]} classes in its last dim."
        )
        raise MetricError(msg)
    numbers = label_numbers(scores, labels)
    check_class_numbers(numbers, where)
    return highest_class(scores), numbers


@metric_class
class Accuracy(MeanMetric, PairMetric):
    """The fraction of labels that are predicted correctly.

    Predictions are scores of shape `(..., classes)`; class numbers of the labels'
    shape; or, with a threshold, scores of the labels' shape. Labels are class numbers
    of shape `(...)`, or one-hot of shape `(..., classes)`; with a threshold, labels
    above 0 are positive.

    Of equal scores, the class with the lower number is predicted, like `argmax`. A row
    of scores with NaN is wrong, and so is a label that is not a class.

    Args:
        predictions: The name of the predictions in a step's outputs or batch.
        labels: The name of the labels there.
        top_k: How many classes with the highest scores count as predicted.
        threshold: For two classes with one score per label: scores above it predict 1.

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

    def _elements(self, predictions: Any, labels: Any) -> tuple[Any, jax.Array]:
        right = self._is_right(predictions, labels, type(self).__name__)
        return right, right

    def _is_right(
        self, predictions: ArrayLike, labels: ArrayLike, where: str
    ) -> jax.Array:
        """Returns for each label whether it was predicted."""
        if self.threshold is not None:
            scores, labels = same_shape(predictions, labels, where)
            right = _above(scores, self.threshold) == (labels > 0)
            return right & (scores == scores)  # NaN predicts neither class
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
        if self.top_k == 1:  # cheaper than ranks; -1 stands for no class on both sides
            return (highest_class(scores) == numbers) & (numbers >= 0)
        rank = ranks(scores, numbers)
        return (rank >= 0) & (rank < self.top_k)

    @property
    def correct(self) -> jax.Array:
        """The weight of the labels that were predicted correctly, out of `count`."""
        return self.total


class _ClassMetric(SumMetric, PairMetric):
    """Base of the metrics of a given number of classes."""

    num_classes: int | None

    def _check_num_classes(self) -> None:
        context = {"at_least": 2, **self._context}
        self._set(num_classes=_checks.count("num_classes", self.num_classes, **context))

    def _elements(self, predictions: Any, labels: Any) -> tuple[Any, jax.Array]:
        size, where = self.num_classes or 0, type(self).__name__
        predicted, true = _class_pair(predictions, labels, size, where)
        return (predicted, true), true


@metric_class
class ConfusionMatrix(_ClassMetric):
    """How often each class was predicted for each label: labels in rows.

    Predictions are scores of shape `(..., classes)`, or class numbers of shape `(...)`;
    labels are class numbers of shape `(...)`, or one-hot of shape `(..., classes)`. A
    label or prediction that is not a class, and a row of scores with NaN, is in no
    cell; `compute().sum()` is then less than the total weight.

    Args:
        num_classes: The number of classes.
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

    def _check(self) -> None:
        self._check_num_classes()

    @property
    def _shape(self) -> tuple[int, ...]:
        return (self.num_classes or 0,) * 2

    def _sums_of(self, elements: Any, weights: jax.Array) -> jax.Array:
        predicted, true = elements
        size, dims = self.num_classes or 0, tuple(range(true.ndim))
        rows = jnp.where(is_class(true, size), weights[..., None], 0)
        columns = is_class(predicted, size).astype(jnp.float32)
        # JAX does not infer the layout of a contraction over sharded Explicit axes.
        if is_explicit(rows) or is_explicit(columns):
            return jnp.sum(rows[..., None] * columns[..., None, :], axis=dims)
        # A matrix product of one-hot rows: no scatter, and partial sums stay on their
        # shards. At the highest precision, since TPUs would round weights to bfloat16.
        contracted = ((dims, dims), ((), ()))
        return jax.lax.dot_general(rows, columns, contracted, precision="highest")

    def compute(self) -> jax.Array:
        """Returns the weights, of shape `(num_classes, num_classes)`."""
        return self.sums.value


# The rows of the sums of precision, recall and F1, each with a column per class.
_COUNTED = ("hits", "predicted", "actual", "count")


@metric_class
class _ClassShare(_ClassMetric):
    """Base of precision, recall and F1: hits, divided by a mean of some of the sums.

    F1 is the harmonic mean of the other two, which is hits divided by the mean of what
    they divide by.
    """

    predictions: str | int = source(default="logits")
    labels: str | int = source(default="label")
    threshold: float | None = setting(default=None)
    num_classes: int | None = setting(default=None)
    average: Average = setting(default="binary")
    _denominators: ClassVar[tuple[str, ...]] = ()

    def _check(self) -> None:
        name = type(self).__name__
        average = _checks.choice("average", self.average, _AVERAGES, **self._context)
        if average != "binary":
            self._check_num_classes()
            if self.threshold is not None:
                msg = (
                    f"{name}: threshold={self.threshold!r} is for average='binary'; "
                    f"with average={average!r}, the class with the highest score is "
                    "predicted."
                )
                raise MetricError(msg)
            return
        if self.num_classes is not None:
            msg = (
                f"{name}: with num_classes={self.num_classes!r}, average must be "
                "'macro', 'micro', 'weighted' or None."
            )
            raise MetricError(msg)
        threshold = 0.0 if self.threshold is None else self.threshold
        self._set(threshold=_checks.number("threshold", threshold, **self._context))

    @property
    def _shape(self) -> tuple[int, ...]:
        # No array of all pairs of classes: precision and recall need its margins only.
        classes = () if self.num_classes is None else (self.num_classes,)
        return (len(_COUNTED), *classes)

    def _elements(self, predictions: Any, labels: Any) -> tuple[Any, jax.Array]:
        if self.num_classes is not None:
            return super()._elements(predictions, labels)
        scores, labels = same_shape(predictions, labels, type(self).__name__)
        return (scores, labels), labels

    def _sums_of(self, elements: Any, weights: jax.Array) -> jax.Array:
        predictions, labels = elements
        if self.num_classes is None:
            guess, truth = _above(predictions, self.threshold or 0), labels > 0
        else:
            guess = is_class(predictions, self.num_classes)
            truth = is_class(labels, self.num_classes)
            weights = weights[..., None]
        counted = {
            "hits": guess & truth,
            "predicted": guess,
            "actual": truth,
            "count": jnp.ones_like(guess),
        }
        dims = tuple(range(labels.ndim))
        sums = [jnp.sum(jnp.where(counted[k], weights, 0), axis=dims) for k in _COUNTED]
        return jnp.stack(sums)

    @property
    def hits(self) -> jax.Array:
        """The weight of correct positive predictions; per class, if there are more."""
        return self._row("hits")

    @property
    def predicted(self) -> jax.Array:
        """The weight of all positive predictions, right or wrong."""
        return self._row("predicted")

    @property
    def actual(self) -> jax.Array:
        """The weight of all positive labels, predicted or not."""
        return self._row("actual")

    @property
    def count(self) -> jax.Array:
        """The weight of all labels, a scalar."""
        count = self._row("count")
        return count[0] if count.ndim else count

    def _row(self, name: str) -> jax.Array:
        return self.sums.value[_COUNTED.index(name)]

    def compute(self) -> jax.Array:
        """Returns the value, averaged as configured; NaN if nothing was counted."""
        hits, predicted, actual = self.hits, self.predicted, self.actual
        denominators = [self._row(name) for name in self._denominators]
        denominator = sum(denominators[1:], denominators[0]) / len(denominators)
        if self.average == "micro":  # add up before dividing
            hits, denominator = jnp.sum(hits), jnp.sum(denominator)
        share = jnp.where(denominator > 0, hits / denominator, 0)
        if self.average in ("binary", "micro"):
            return jnp.where(self.count > 0, share, jnp.nan)
        if self.average == "weighted":
            return jnp.sum(share * actual) / jnp.sum(actual)
        # As scikit-learn: a class that is neither predicted nor present has no share.
        occurs = (predicted > 0) | (actual > 0)
        if self.average is None:
            return jnp.where(occurs, share, jnp.nan)
        return jnp.sum(jnp.where(occurs, share, 0)) / jnp.sum(occurs)


@metric_class
class Precision(_ClassShare):
    """The fraction of positive predictions that are correct.

    With `average="binary"` there are two classes, and one score of the labels' shape: a
    score above the threshold predicts 1, and labels above 0 are positive. With more
    classes, predictions are scores of shape `(..., classes)`, of which the highest is
    predicted, or class numbers of shape `(...)`; labels are class numbers or one-hot.
    `"macro"` is the mean over the classes that occur among labels or predictions,
    `"weighted"` the mean over the labels, `"micro"` counts all classes together, and
    None gives one value per class. A division by 0 gives 0; the value is NaN if nothing
    was counted, and for a class that does not occur.

    The sums can be read as `hits`, `predicted`, `actual` and `count`.

    Args:
        predictions: The name of the predictions in a step's outputs or batch.
        labels: The name of the labels there.
        threshold: For two classes; 0.0 by default, for logits. Use 0.5 for
            probabilities.
        num_classes: For more classes: their number.
        average: `"binary"`, `"macro"`, `"micro"`, `"weighted"` or None.

    Example:
        >>> precision = Precision(threshold=0.5)
        >>> scores, labels = jnp.array([0.9, 0.8, 0.3]), jnp.array([1, 0, 1])
        >>> float(precision.update(scores, labels).compute())
        0.5
    """

    _denominators: ClassVar[tuple[str, ...]] = ("predicted",)


@metric_class
class Recall(_ClassShare):
    """The fraction of positive labels that are predicted; arguments as `Precision`.

    Example:
        >>> recall = Recall(num_classes=2, average=None)
        >>> recall.update(jnp.array([0, 1, 1]), jnp.array([0, 0, 1])).compute().tolist()
        [0.5, 1.0]
    """

    _denominators: ClassVar[tuple[str, ...]] = ("actual",)


@metric_class
class F1(_ClassShare):
    """The harmonic mean of precision and recall; arguments as `Precision`.

    Example:
        >>> scores, labels = jnp.array([0.9, 0.8, 0.3]), jnp.array([1, 0, 1])
        >>> float(F1(threshold=0.5).update(scores, labels).compute())
        0.5
    """

    _denominators: ClassVar[tuple[str, ...]] = ("predicted", "actual")
