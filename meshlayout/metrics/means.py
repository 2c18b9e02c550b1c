"""Sums and means over examples, and the losses that are means."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from meshlayout import _checks
from meshlayout.metrics.metric import (
    EMPTY,
    MeanMetric,
    SumMetric,
    ValueMetric,
    accumulator,
    metric_class,
    setting,
    source,
    weighted,
)
from meshlayout.metrics.predictions import (
    PairMetric,
    class_scores,
    is_class,
    same_shape,
)


# The advice for two classes with one score per example.
_BINARY = "give the losses of optax.sigmoid_binary_cross_entropy to Mean"


@metric_class
class Mean(MeanMetric, ValueMetric):
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


@metric_class
class Sum(SumMetric, ValueMetric):
    """The weighted sum of values; 0 if nothing was counted.

    A value without dims counts once per update, unless all weights are 0. Integers
    are added exactly beyond 2**24, to 2**48; the result is rounded to float32.

    Args:
        values: The name of the values in a step's outputs or batch.

    Example:
        >>> float(Sum("tokens").update(jnp.array([3, 4])).compute())
        7.0
    """

    values: str | int = source(default="losses")

    def _sums_of(self, elements: Any, weights: jax.Array) -> jax.Array:
        return jnp.sum(weighted(elements, weights))

    def compute(self) -> jax.Array:
        """Returns the sum."""
        return self.sums.value


@metric_class
class Last(ValueMetric):
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
    value: Any = accumulator(default=EMPTY, kw_only=True)
    seen: Any = accumulator(default=EMPTY, kw_only=True)

    def _start(self) -> dict[str, Any]:
        return {"value": np.array(np.nan, np.float32), "seen": np.zeros((), np.float32)}

    def _added(self, elements: Any, weights: jax.Array) -> Self:
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
        seen = counted.astype(jnp.float32)
        return self._merged(dataclasses.replace(self, value=last, seen=seen))

    def _merged(self, other: Any) -> Self:
        # Not a sum: a later metric that has seen nothing leaves the value alone.
        value = jnp.where(jnp.asarray(other.seen) > 0, other.value, self.value)
        seen = jnp.maximum(self.seen, other.seen)
        return dataclasses.replace(self, value=value, seen=seen)

    def compute(self) -> jax.Array:
        """Returns the value; NaN if nothing was counted."""
        return jnp.asarray(self.value)


class _MeanError(MeanMetric, PairMetric):
    """Base of the mean errors."""

    def _elements(self, predictions: Any, labels: Any) -> tuple[Any, jax.Array]:
        predictions, labels = same_shape(predictions, labels, type(self).__name__)
        # In float32 before the difference: unsigned pixels would wrap around.
        differences = predictions.astype(jnp.float32) - labels.astype(jnp.float32)
        errors = self._error(differences)
        return errors, errors

    def _error(self, differences: jax.Array) -> jax.Array:
        """Returns the error of each difference."""
        raise NotImplementedError


@metric_class
class MeanSquaredError(_MeanError):
    """The mean of the squared differences between predictions and labels.

    Predictions and labels have the same shape; predictions may have an extra last dim
    of 1.

    Args:
        predictions: Their name in a step's outputs or batch.
        labels: Their name there.

    Example:
        >>> error = MeanSquaredError().update(jnp.array([1.0, 2.0]), jnp.array([1, 4]))
        >>> float(error.compute())
        2.0
    """

    predictions: str | int = source(default="predictions")
    labels: str | int = source(default="label")

    def _error(self, differences: jax.Array) -> jax.Array:
        return jnp.square(differences)


@metric_class
class MeanAbsoluteError(_MeanError):
    """The mean of the absolute differences; takes what `MeanSquaredError` takes.

    Example:
        >>> error = MeanAbsoluteError().update(jnp.array([1.0, 2.0]), jnp.array([1, 4]))
        >>> float(error.compute())
        1.0
    """

    predictions: str | int = source(default="predictions")
    labels: str | int = source(default="label")

    def _error(self, differences: jax.Array) -> jax.Array:
        return jnp.abs(differences)


@metric_class
class CrossEntropy(MeanMetric, PairMetric):
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

    def _elements(self, predictions: Any, labels: Any) -> tuple[Any, jax.Array]:
        where = type(self).__name__
        scores, labels = class_scores(predictions, labels, where, _BINARY)
        logs = jax.nn.log_softmax(scores) if self.from_logits else jnp.log(scores)
        if labels.ndim == logs.ndim:
            # 0 times the log of 0 is 0 here, not NaN.
            shares = labels.astype(jnp.float32)
            losses = -jnp.sum(jnp.where(shares != 0, shares * logs, 0), axis=-1)
        else:
            # A comparison with all classes rather than a gather, which would fetch
            # logits whose classes are sharded.
            is_own = is_class(labels, logs.shape[-1])
            losses = -jnp.sum(jnp.where(is_own, logs, 0), axis=-1)
            losses = jnp.where(jnp.any(is_own, axis=-1), losses, jnp.nan)
        return losses, losses


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
