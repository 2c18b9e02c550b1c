"""Metrics of predictions and labels: scores per class with the true class.

Written without gathers and scatters: comparisons and sums keep logits on their shards,
whichever dim is sharded. `where` is the name of the metric throughout, which opens the
message of a MetricError.
"""

import math
from typing import Any, ClassVar, Literal, Self, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.typing import ArrayLike

from meshlayout import _checks
from meshlayout.errors import MetricError
from meshlayout.metrics.means import MeanMetric
from meshlayout.metrics.metric import (
    Metric,
    as_array,
    element_weights,
    mean_sums,
    metric_class,
    setting,
    source,
    text,
)


Average: TypeAlias = Literal["binary", "macro", "micro", "weighted"] | None
_AVERAGES = ("binary", "macro", "micro", "weighted", None)

# The advice for two classes with one score per example.
_THRESHOLD = (
    "give threshold=: 0.0 where predictions are logits, 0.5 where they are "
    "probabilities"
)
_CLASSES = "give class numbers as predictions, as (logits > 0).astype(int)"
_BINARY = "give the losses of optax.sigmoid_binary_cross_entropy to Mean"


class _PairMetric(Metric):
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
        return self._added(self._sums_of(predictions, labels, weights))

    def _sums_of(
        self, predictions: ArrayLike, labels: ArrayLike, weights: ArrayLike | None
    ) -> jax.Array:
        """Returns the sums of a batch alone."""
        raise NotImplementedError


def _num_classes(metric: Any) -> int:
    """Returns a metric's number of classes, checked."""
    context = {"at_least": 2, "where": type(metric).__name__, "error": MetricError}
    return _checks.count("num_classes", metric.num_classes, **context)


@metric_class
class Accuracy(_PairMetric, MeanMetric):
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

    def _sums_of(
        self, predictions: ArrayLike, labels: ArrayLike, weights: ArrayLike | None
    ) -> jax.Array:
        where = type(self).__name__
        right = self._is_right(predictions, labels, where).astype(jnp.float32)
        return mean_sums(right, element_weights(weights, right, "labels", where))

    def _is_right(
        self, predictions: ArrayLike, labels: ArrayLike, where: str
    ) -> jax.Array:
        """Returns for each label whether it was predicted."""
        if self.threshold is not None:
            scores, labels = _same_shape(predictions, labels, where)
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
        scores, labels = _class_scores(predictions, labels, where, _THRESHOLD)
        if self.top_k > scores.shape[-1]:
            msg = (
                f"{where}: top_k={self.top_k} is more than the {scores.shape[-1]} "
                f"classes of {text('predictions', scores)}."
            )
            raise MetricError(msg)
        numbers = _label_numbers(scores, labels)
        if self.top_k == 1:  # cheaper than ranks; -1 stands for no class on both sides
            return (_highest_class(scores) == numbers) & (numbers >= 0)
        rank = _ranks(scores, numbers)
        return (rank >= 0) & (rank < self.top_k)

    @property
    def correct(self) -> jax.Array:
        """The weight of the labels that were predicted correctly, out of `count`."""
        return self.total


@metric_class
class CrossEntropy(_PairMetric, MeanMetric):
    """The mean cross-entropy of labels under predicted classes, in nats.

    Predictions have shape `(..., classes)`; labels are integers of shape `(...)`, or
    probabilities of shape `(..., classes)`, such as one-hot labels. A label that is not
    a class makes the result NaN; give it weight 0 to leave it out.

    Args:
        predictions: The name of the logits in a step's outputs or batch.
        labels: The name of the labels there.
        from_logits: Whether predictions are logits; otherwise they are probabilities.

    Example:
        >>> loss = CrossEntropy().update(jnp.zeros((2, 4)), jnp.array([1, 3]))
        >>> round(float(loss.compute()), 4)  # log(4)
        1.3863
    """

    predictions: str | int = source(default="logits")
    labels: str | int = source(default="label")
    from_logits: bool = setting(default=True)

    def _check(self) -> None:
        flag = _checks.flag("from_logits", self.from_logits, **self._context)
        self._set(from_logits=flag)  # a Python bool, which is part of the structure

    def _sums_of(
        self, predictions: ArrayLike, labels: ArrayLike, weights: ArrayLike | None
    ) -> jax.Array:
        where = type(self).__name__
        scores, true = _class_scores(predictions, labels, where, _BINARY)
        logs = jax.nn.log_softmax(scores) if self.from_logits else jnp.log(scores)
        if true.ndim == logs.ndim:
            # 0 times the log of 0 is 0 here, not NaN.
            shares = true.astype(jnp.float32)
            losses = -jnp.sum(jnp.where(shares != 0, shares * logs, 0), axis=-1)
        else:
            # A comparison with all classes rather than a gather, which would fetch
            # logits whose classes are sharded.
            is_own = _is_class(true, logs.shape[-1])
            losses = -jnp.sum(jnp.where(is_own, logs, 0), axis=-1)
            losses = jnp.where(jnp.any(is_own, axis=-1), losses, jnp.nan)
        return mean_sums(losses, element_weights(weights, losses, "labels", where))


@metric_class
class Perplexity(CrossEntropy):
    """The exponential of the mean cross-entropy: `CrossEntropy`, read as a perplexity.

    Example:
        >>> value = Perplexity().update(jnp.zeros((2, 4)), jnp.array([1, 3])).compute()
        >>> round(float(value), 4)
        4.0
    """

    def compute(self) -> jax.Array:
        """Returns the perplexity; NaN if nothing was counted."""
        return jnp.exp(super().compute())


@metric_class
class ConfusionMatrix(_PairMetric):
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
        self._set(num_classes=_num_classes(self))

    @property
    def _shape(self) -> tuple[int, ...]:
        return (self.num_classes or 0,) * 2

    def _sums_of(
        self, predictions: ArrayLike, labels: ArrayLike, weights: ArrayLike | None
    ) -> jax.Array:
        size, where = self.num_classes or 0, type(self).__name__
        guess, true = _class_pair(predictions, labels, size, where)
        counts = element_weights(weights, true, "labels", where)
        dims = tuple(range(true.ndim))
        rows = jnp.where(_is_class(true, size), counts[..., None], 0)
        columns = _is_class(guess, size).astype(jnp.float32)
        # JAX does not infer the layout of a contraction over sharded Explicit axes.
        if _is_explicit(rows) or _is_explicit(columns):
            return jnp.sum(rows[..., None] * columns[..., None, :], axis=dims)
        # A matrix product of one-hot rows: no scatter, and partial sums stay on their
        # shards. At the highest precision, since TPUs would round weights to bfloat16.
        contracted = ((dims, dims), ((), ()))
        return jax.lax.dot_general(rows, columns, contracted, precision="highest")

    def compute(self) -> jax.Array:
        """Returns the weights, of shape `(num_classes, num_classes)`."""
        return jnp.asarray(self.sums)


# The rows of the sums of precision, recall and F1, each with a column per class.
_COUNTED = ("hits", "predicted", "actual", "count")


@metric_class
class _ClassShare(_PairMetric):
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
            self._set(num_classes=_num_classes(self))
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

    def _sums_of(
        self, predictions: ArrayLike, labels: ArrayLike, weights: ArrayLike | None
    ) -> jax.Array:
        where = type(self).__name__
        if self.num_classes is None:
            scores, true = _same_shape(predictions, labels, where)
            guess, truth = _above(scores, self.threshold or 0), true > 0
            counts = element_weights(weights, true, "labels", where)
        else:
            numbers, true = _class_pair(predictions, labels, self.num_classes, where)
            guess = _is_class(numbers, self.num_classes)
            truth = _is_class(true, self.num_classes)
            counts = element_weights(weights, true, "labels", where)[..., None]
        counted = (guess & truth, guess, truth, jnp.ones_like(guess))  # as _COUNTED
        dims = tuple(range(true.ndim))
        return jnp.stack([jnp.sum(jnp.where(x, counts, 0), axis=dims) for x in counted])

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
        return jnp.asarray(self.sums)[_COUNTED.index(name)]

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


# Predictions and labels.


def _same_shape(
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


def _class_scores(
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
    _check_class_numbers(labels, where)
    return scores, labels


def _check_class_numbers(labels: jax.Array, where: str) -> None:
    """Raises MetricError if labels are not integers."""
    # Rounded class numbers, or probabilities of the wrong shape: nobody means these.
    if jnp.issubdtype(labels.dtype, jnp.floating):
        msg = (
            f"{where}: {text('labels', labels)} must hold class numbers, which are "
            "integers."
        )
        raise MetricError(msg)


def _label_numbers(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns labels as class numbers."""
    is_one_hot = labels.ndim == scores.ndim
    return (jnp.argmax(labels, axis=-1) if is_one_hot else labels).astype(jnp.int32)


def _is_class(labels: jax.Array, num_classes: int) -> jax.Array:
    """Returns for each label and class whether the label is the class."""
    return labels[..., None] == _class_numbers(num_classes, labels.ndim + 1)


def _class_numbers(num_classes: int, ndim: int) -> jax.Array:
    """Returns 0, 1, ... in the last of `ndim` dims."""
    numbers = jnp.arange(num_classes, dtype=jnp.int32)
    return numbers.reshape(*[1] * (ndim - 1), num_classes)


def _is_explicit(x: jax.Array) -> bool:
    """Returns whether an array is on Explicit axes, where JAX infers no layouts."""
    mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
    return AxisType.Explicit in getattr(mesh, "axis_types", ())


def _highest_class(scores: jax.Array) -> jax.Array:
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
    num_blocks = 1 if _is_explicit(scores) else math.gcd(num_classes, largest)
    size = num_classes // num_blocks
    blocks = scores.reshape(*scores.shape[:-1], num_blocks, size)
    highest = jnp.max(blocks, axis=-1)
    first = _class_numbers(num_blocks, scores.ndim) * size
    classes = jnp.argmax(blocks, axis=-1).astype(jnp.int32) + first
    is_highest = highest == jnp.max(highest, axis=-1, keepdims=True)  # NaN never is
    predicted = jnp.min(jnp.where(is_highest, classes, num_classes), axis=-1)
    return jnp.where(predicted < num_classes, predicted, -1)


def _ranks(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns how many classes rank above each label's class; -1 for no such class.

    Of equal scores the lower class number ranks higher, and NaN ranks above all: a row
    with NaN is never right.
    """
    # Counting takes one pass over the scores; `jax.lax.top_k` sorts, and gathers logits
    # whose classes are sharded.
    num_classes = scores.shape[-1]
    is_own = _is_class(labels, num_classes)
    own = jnp.sum(jnp.where(is_own, scores, 0), axis=-1, keepdims=True)
    is_lower = _class_numbers(num_classes, scores.ndim) < labels[..., None]
    tied = (scores == own) & is_lower
    rank = jnp.sum(~(scores <= own) | tied, axis=-1)
    return jnp.where(jnp.any(is_own, axis=-1), rank, -1)


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
    scores, labels = _class_scores(predictions, labels, where, _CLASSES)
    # A label beyond the state's classes would be counted nowhere.
    if scores.shape[-1] != num_classes:
        msg = (
            f"{where}: num_classes={num_classes}, and {text('predictions', scores)} "
            f"has {scores.shape[-1]} classes in its last dim."
        )
        raise MetricError(msg)
    numbers = _label_numbers(scores, labels)
    _check_class_numbers(numbers, where)
    return _highest_class(scores), numbers
