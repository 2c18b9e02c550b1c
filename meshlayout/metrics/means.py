"""Sums and means over examples, and the losses that are means."""

from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from meshlayout.errors import MetricError
from meshlayout.metrics.elements import (
    as_float,
    class_scores,
    counts_any,
    element_weights,
    is_class,
    same_shape,
    weighted,
)
from meshlayout.metrics.metric import EMPTY, Metric, accumulator, metric_class, setting
from meshlayout.metrics.total import Total


# What to do for two classes and one score per example.
_BINARY = "give the losses of optax.sigmoid_binary_cross_entropy to Mean"


class _MeanOf(Metric):
    """What means have in common.

    Attributes:
        sums: The weighted sum, and the sum of the weights.
    """

    sums: Total

    def _start(self) -> dict[str, Any]:
        return {"sums": Total.zeros((2,))}

    def _added(self, elements: jax.Array, weights: Any, name: str) -> Total:
        """Returns the sums with elements added."""
        where = type(self).__name__
        if elements.ndim == 0 and weights is not None:
            each = counts_any(weights, where)
        else:
            each = element_weights(weights, elements, name, where)
        new = [jnp.sum(weighted(elements, each)), jnp.sum(each)]
        return self.sums.add(jnp.stack(new))

    def compute(self) -> jax.Array:
        """Returns the weighted mean; NaN where nothing was counted."""
        total, count = self.sums.value
        return total / count


@metric_class
class Mean(_MeanOf):
    """The weighted mean of values.

    A value without dims, such as an auxiliary loss of a whole batch, counts once per
    update, unless all weights are 0.

    Args:
        values: The name of the values in a step's outputs or batch; the per-example
            losses by default.

    Example:
        >>> mean = Mean().update(jnp.array([1.0, 2.0, jnp.nan]), jnp.array([1, 1, 0]))
        >>> float(mean.compute())
        1.5
    """

    values: str | int = setting(default="losses")
    sums: Total = accumulator(default=EMPTY)
    inputs: ClassVar[tuple[str, ...]] = ("values",)

    def update(self, values: Any, weights: Any = None) -> Self:
        """Returns the metric with a batch of values added.

        Args:
            values: Any numbers.
            weights: Per element; see `Metric`.

        Raises:
            MetricError: If the weights do not fit the values.
        """
        elements = as_float(values, "values", "Mean")
        sums = self._added(elements, weights, "values")
        return type(self)(self.values, sums=sums)


@metric_class
class Sum(Metric):
    """The weighted sum of values; 0 where nothing was counted.

    A value without dims counts once per update, unless all weights are 0. Whole
    numbers are added exactly beyond 2**24, to 2**48; the result is rounded to float32.

    Args:
        values: The name of the values in a step's outputs or batch.

    Example:
        >>> float(Sum("tokens").update(jnp.array([3, 4])).compute())
        7.0
    """

    values: str | int = setting(default="losses")
    total: Total = accumulator(default=EMPTY)
    inputs: ClassVar[tuple[str, ...]] = ("values",)

    def _start(self) -> dict[str, Any]:
        return {"total": Total.zeros()}

    def update(self, values: Any, weights: Any = None) -> Self:
        """Returns the metric with a batch of values added.

        Args:
            values: Any numbers.
            weights: Per element; see `Metric`.

        Raises:
            MetricError: If the weights do not fit the values.
        """
        elements = as_float(values, "values", "Sum")
        if elements.ndim == 0 and weights is not None:
            each = counts_any(weights, "Sum")
        else:
            each = element_weights(weights, elements, "values", "Sum")
        total = self.total.add(jnp.sum(weighted(elements, each)))
        return type(self)(self.values, total=total)

    def compute(self) -> jax.Array:
        """Returns the sum."""
        return self.total.value


@metric_class
class Last(Metric):
    """The most recent value: of a batch, the last element whose weight is not 0.

    For what is a number per step, such as a learning rate. Merging keeps the value of
    the later metric, the one that is merged in, if it has one.

    Args:
        values: The name of the values in a step's outputs or batch.

    Example:
        >>> rate = Last("learning_rate").update(0.1).update(0.01)
        >>> round(float(rate.compute()), 3)
        0.01
    """

    values: str | int = setting(default="losses")
    value: Any = accumulator(default=EMPTY)
    seen: Any = accumulator(default=EMPTY)
    inputs: ClassVar[tuple[str, ...]] = ("values",)

    def _start(self) -> dict[str, Any]:
        return {"value": np.array(np.nan, np.float32), "seen": np.zeros((), np.float32)}

    def update(self, values: Any, weights: Any = None) -> Self:
        """Returns the metric with the last of these values, if any has weight.

        Args:
            values: Any numbers, the last in row-major order the most recent.
            weights: Per element; see `Metric`.

        Raises:
            MetricError: If the weights do not fit the values.
        """
        elements = as_float(values, "values", "Last")
        if elements.ndim == 0 and weights is not None:
            each = counts_any(weights, "Last")
        else:
            each = element_weights(weights, elements, "values", "Last")
        counted = each != 0
        last = elements
        # From the last dim on: the last counted element along each dim.
        while last.ndim:
            at = jnp.arange(last.shape[-1]).reshape(*[1] * (last.ndim - 1), -1)
            newest = jnp.max(jnp.where(counted, at, -1), axis=-1, keepdims=True)
            last = jnp.sum(jnp.where(counted & (at == newest), last, 0), axis=-1)
            counted = jnp.any(counted, axis=-1)
        newer = type(self)(self.values, value=last, seen=counted.astype(jnp.float32))
        return self._merged(newer)

    def _merged(self, other: Any) -> Self:
        value = jnp.where(jnp.asarray(other.seen) > 0, other.value, self.value)
        seen = jnp.maximum(self.seen, other.seen)
        return type(self)(self.values, value=value, seen=seen)

    def compute(self) -> jax.Array:
        """Returns the value; NaN where nothing was counted."""
        return jnp.asarray(self.value)


@metric_class
class _ErrorOf(_MeanOf):
    """What the mean errors have in common."""

    predictions: str | int = setting(default="predictions")
    labels: str | int = setting(default="label")
    sums: Total = accumulator(default=EMPTY)
    inputs: ClassVar[tuple[str, ...]] = ("predictions", "labels")

    def update(self, predictions: Any, labels: Any, weights: Any = None) -> Self:
        """Returns the metric with a batch added.

        Args:
            predictions: Numbers of the labels' shape; a last dim of 1 may be extra.
            labels: Numbers.
            weights: Per element; see `Metric`.

        Raises:
            MetricError: If the shapes do not fit.
        """
        predictions, labels = same_shape(predictions, labels, type(self).__name__)
        differences = predictions.astype(jnp.float32) - labels.astype(jnp.float32)
        sums = self._added(self._size(differences), weights, "labels")
        return type(self)(self.predictions, self.labels, sums=sums)

    def _size(self, differences: jax.Array) -> jax.Array:
        """Returns what the mean is of."""
        raise NotImplementedError


@metric_class
class MeanSquaredError(_ErrorOf):
    """The mean of the squared differences between predictions and labels.

    Args:
        predictions: Their name in a step's outputs or batch.
        labels: Their name there.

    Example:
        >>> error = MeanSquaredError().update(jnp.array([1.0, 2.0]), jnp.array([1, 4]))
        >>> float(error.compute())
        2.0
    """

    def _size(self, differences: jax.Array) -> jax.Array:
        return jnp.square(differences)


@metric_class
class MeanAbsoluteError(_ErrorOf):
    """The mean of the absolute differences between predictions and labels.

    Args:
        predictions: Their name in a step's outputs or batch.
        labels: Their name there.

    Example:
        >>> error = MeanAbsoluteError().update(jnp.array([1.0, 2.0]), jnp.array([1, 4]))
        >>> float(error.compute())
        1.0
    """

    def _size(self, differences: jax.Array) -> jax.Array:
        return jnp.abs(differences)


@metric_class
class CrossEntropy(_MeanOf):
    """The mean cross-entropy of labels under predicted classes, in nats.

    A label that is no class makes the result NaN; give it weight 0 to leave it out.

    Args:
        predictions: The name of the logits in a step's outputs or batch.
        labels: The name of the labels there: class numbers, or one probability per
            class, as one-hot labels.
        from_logits: Whether predictions are logits; otherwise they are probabilities.

    Example:
        >>> loss = CrossEntropy().update(jnp.zeros((2, 4)), jnp.array([1, 3]))
        >>> round(float(loss.compute()), 4)  # log(4)
        1.3863
    """

    predictions: str | int = setting(default="logits")
    labels: str | int = setting(default="label")
    from_logits: bool = setting(default=True)
    sums: Total = accumulator(default=EMPTY)
    inputs: ClassVar[tuple[str, ...]] = ("predictions", "labels")

    def _check(self) -> None:
        # Identity: `0 in (False, True)` holds.
        if self.from_logits is not True and self.from_logits is not False:
            msg = (
                f"{type(self).__name__}: from_logits={self.from_logits!r} has to be "
                "True or False."
            )
            raise MetricError(msg)

    def update(self, predictions: Any, labels: Any, weights: Any = None) -> Self:
        """Returns the metric with a batch added.

        Args:
            predictions: Shape `(..., classes)`.
            labels: Integers of shape `(...)`, or probabilities `(..., classes)`.
            weights: Per label; see `Metric`.

        Raises:
            MetricError: If shapes or dtypes do not fit.
        """
        where = type(self).__name__
        scores, labels = class_scores(predictions, labels, where, _BINARY)
        logs = jax.nn.log_softmax(scores) if self.from_logits else jnp.log(scores)
        if labels.ndim == logs.ndim:
            chances = labels.astype(jnp.float32)
            losses = -jnp.sum(jnp.where(chances != 0, chances * logs, 0), axis=-1)
        else:
            is_own = is_class(labels, logs.shape[-1])
            losses = -jnp.sum(jnp.where(is_own, logs, 0), axis=-1)
            losses = jnp.where(jnp.any(is_own, axis=-1), losses, jnp.nan)
        settings = (self.predictions, self.labels, self.from_logits)
        return type(self)(*settings, sums=self._added(losses, weights, "labels"))


@metric_class
class Perplexity(CrossEntropy):
    """The exponential of the mean cross-entropy: `CrossEntropy`, read as a perplexity.

    Example:
        >>> value = Perplexity().update(jnp.zeros((2, 4)), jnp.array([1, 3])).compute()
        >>> round(float(value), 4)
        4.0
    """

    def compute(self) -> jax.Array:
        """Returns the perplexity; NaN where nothing was counted."""
        return jnp.exp(super().compute())
