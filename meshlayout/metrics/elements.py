"""Inputs of metrics: checked, in float32, and with one weight per element."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from meshlayout import _render
from meshlayout.errors import MetricError


def as_array(x: Any, name: str, where: str) -> jax.Array:
    """Returns an input as an array of numbers or booleans.

    Raises:
        MetricError: If it is none.
    """
    try:
        x = x if isinstance(x, jax.Array) else jnp.asarray(np.asarray(x))
    except (TypeError, ValueError):
        msg = f"{where}: {name} is a {type(x).__name__}, and has to be an array."
        raise MetricError(msg) from None
    real = any(
        jnp.issubdtype(x.dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)
    )
    if not real:
        msg = f"{where}: {text(name, x)} does not hold real numbers."
        raise MetricError(msg)
    return x


def as_float(x: Any, name: str, where: str) -> jax.Array:
    """Returns an input as a float32 array."""
    return as_array(x, name, where).astype(jnp.float32)


def text(name: str, x: Any) -> str:
    """Returns an array's name and type, for a message."""
    return f"{name} {_render.array_text(x.dtype, x.shape)}"


def element_weights(
    weights: Any, elements: jax.Array, name: str, where: str
) -> jax.Array:
    """Returns one float32 weight per element.

    Args:
        weights: None, or an array whose shape is that of the elements' first dims.
        elements: What is weighed.
        name: What the elements are called.
        where: The metric.

    Raises:
        MetricError: If the shapes do not fit.
    """
    if weights is None:
        return jnp.ones_like(elements, dtype=jnp.float32)
    weights = as_float(weights, "weights", where)
    if weights.shape != elements.shape[: weights.ndim]:
        msg = (
            f"{where}: {text('weights', weights)} does not fit {text(name, elements)}. "
            "Weights have the shape of the elements or of their first dims, such as "
            f"{elements.shape[:1]}."
        )
        raise MetricError(msg)
    missing = range(weights.ndim, elements.ndim)
    return jnp.broadcast_to(jnp.expand_dims(weights, tuple(missing)), elements.shape)


def is_explicit(x: jax.Array) -> bool:
    """Tells whether an array lies on Explicit axes, where JAX wants layouts said."""
    mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
    return AxisType.Explicit in getattr(mesh, "axis_types", ())


def weighted(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns values times weights, and 0 where the weight is 0."""
    return jnp.where(weights != 0, values * weights, 0)


def counts_any(weights: Any, where: str) -> jax.Array:
    """Returns 1 where any weight is not 0 or there are none, else 0; in float32."""
    if weights is None:
        return jnp.ones((), jnp.float32)
    return jnp.any(as_array(weights, "weights", where) != 0).astype(jnp.float32)


def same_shape(
    predictions: Any, labels: Any, where: str
) -> tuple[jax.Array, jax.Array]:
    """Returns predictions and labels of one shape; a last dim of 1 may be extra.

    Raises:
        MetricError: If the shapes differ.
    """
    predictions = as_array(predictions, "predictions", where)
    labels = as_array(labels, "labels", where)
    if predictions.shape == (*labels.shape, 1):
        predictions = predictions[..., 0]
    if predictions.shape != labels.shape:
        msg = (
            f"{where}: {text('predictions', predictions)} and {text('labels', labels)} "
            "differ in shape; there has to be one prediction per label."
        )
        raise MetricError(msg)
    return predictions, labels


def class_scores(
    predictions: Any, labels: Any, where: str, binary: str
) -> tuple[jax.Array, jax.Array]:
    """Returns float32 scores per class, and labels: numbers, or one per class.

    Args:
        predictions: One score per class in the last dim.
        labels: Of one dim less, or of the same shape.
        where: The metric.
        binary: What it says to do for two classes and one score per example.

    Raises:
        MetricError: If the shapes or dtypes do not fit.
    """
    given = as_array(predictions, "predictions", where)
    scores = given.astype(jnp.float32)
    labels = as_array(labels, "labels", where)
    is_alike = labels.shape == scores.shape
    # Of equal shapes and rank 1, the last dim is that of the examples.
    if scores.shape[-1:] == (1,) or (scores.ndim == 1 and is_alike):
        msg = (
            f"{where}: {text('predictions', given)} and {text('labels', labels)} "
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
    check_class_numbers(labels, "labels", where)
    return scores, labels


def check_class_numbers(x: jax.Array, name: str, where: str) -> None:
    """Raises MetricError if an array does not hold whole numbers."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        msg = f"{where}: {text(name, x)} has to hold class numbers, which are integers."
        raise MetricError(msg)


def label_numbers(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns labels as class numbers."""
    if labels.ndim == scores.ndim:
        return jnp.argmax(labels, axis=-1).astype(jnp.int32)
    return labels.astype(jnp.int32)


def is_class(labels: jax.Array, num_classes: int) -> jax.Array:
    """Returns for each label and class whether the label is the class."""
    return labels[..., None] == _class_numbers(num_classes, labels.ndim)


def _class_numbers(num_classes: int, ndim: int) -> np.ndarray[Any, Any]:
    return np.arange(num_classes, dtype=np.int32).reshape(*[1] * ndim, num_classes)


def ranks(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns how many classes come before each label's class; -1 for no such class.

    Of equal scores the lower class number comes first, and NaN comes before all.
    """
    num_classes = scores.shape[-1]
    is_own = is_class(labels, num_classes)
    own = jnp.sum(jnp.where(is_own, scores, 0), axis=-1, keepdims=True)
    number = _class_numbers(num_classes, labels.ndim)
    tied = (scores == own) & (number < labels[..., None])
    rank = jnp.sum(~(scores <= own) | tied, axis=-1)
    return jnp.where(jnp.any(is_own, axis=-1), rank, -1)
