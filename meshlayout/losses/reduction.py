"""Losses of examples: their weights, their sums, and the denominators of these.

A loss stays one number per example until the weights are known, since padding must not
count. A mean of microbatches' or replicas' means would weight their examples
differently if some are padded, so sums are added up and divided once.
`compute_average_loss` and `scale_regularization_loss` are tf.distribute's two scalings.
Under a strategy, the replica context says how many replicas there are and which rows
are padding.
"""

import math
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from meshlayout import _checks, _jax
from meshlayout.collectives import get_replica_context
from meshlayout.errors import LossError


Denominator: TypeAlias = Literal["real", "global_batch_size"]


def per_example(losses: ArrayLike, weights: ArrayLike | None = None) -> jax.Array:
    """Averages losses over all dims except those of the weights.

    Use this before summing losses that have one number per pixel or token. Returns
    float32 losses of the weights' shape, or (batch,).

    Args:
        losses: Losses of shape (batch, ...).
        weights: Weights of shape (batch,) or of a longer leading part of the losses'
            shape (one per token, say); None for (batch,).

    Raises:
        LossError: If the weights' shape is not a leading part of the losses'.

    Example:
        >>> per_example(jnp.array([[1.0, 3.0], [5.0, 5.0]])).tolist()
        [2.0, 5.0]
    """
    # In float32 first: a mean over thousands of pixels in bfloat16 keeps three digits.
    losses = real_array("losses", losses, "per_example").astype("float32")
    if losses.ndim == 0:
        raise LossError("losses are a scalar; give one loss per example, (batch,).")
    num_kept = 1
    if weights is not None:  # of which one may be for all examples
        num_kept = max(1, _fitting_weights(weights, losses).ndim)
    return losses.mean(axis=tuple(range(num_kept, losses.ndim)))


def weighted_sum(losses: ArrayLike, weights: ArrayLike | None = None) -> jax.Array:
    """Returns the weighted sum of losses, in float32; weight 0 adds 0, even for NaN.

    Raises:
        LossError: If the weights' shape is not a leading part of the losses'.

    Example:
        >>> float(weighted_sum(jnp.array([1.0, jnp.nan]), jnp.array([2.0, 0.0])))
        2.0
    """
    return weighted(real_array("losses", losses, "weighted_sum"), weights).sum()


def denominator_of(
    denominator: Denominator, weights: ArrayLike | None, num_examples: int
) -> jax.Array:
    """Returns the number by which the weighted sum over a global batch is divided.

    A positive float32 scalar: 1 for a batch without real examples, whose sum is 0.

    Args:
        denominator: `"real"`, the sum of the weights; or `"global_batch_size"`, the
            number of examples including padding.
        weights: The weights of the whole batch, or None for ones.
        num_examples: The number of losses: examples, or tokens if each has a weight.

    Raises:
        LossError: If `denominator` is neither of these.

    Example:
        >>> float(denominator_of("real", jnp.array([1, 1, 0]), 3))
        2.0
    """
    check_denominator(denominator)
    if denominator == "global_batch_size" or weights is None:
        return jnp.float32(num_examples)
    total = real_array("weights", weights, "losses").astype("float32").sum()
    return jnp.where(total > 0, total, 1)  # a loss of 0 rather than NaN


def check_denominator(denominator: object) -> None:
    """Raises LossError unless this is a denominator."""
    choices = ("real", "global_batch_size")
    _checks.choice("denominator", denominator, choices, error=LossError)


def compute_average_loss(
    per_example_loss: ArrayLike,
    sample_weight: ArrayLike | None = None,
    global_batch_size: int | jax.Array | None = None,
) -> jax.Array:
    """Divides the sum of losses by the global batch size; 0 without examples.

    Use this in your own step, or to port one from tf.distribute. In a program over the
    whole batch this is the mean. In replica code (a function that a strategy runs, or
    inside `jax.shard_map`) it is this replica's share: the shares of all replicas add
    up to the mean over the global batch. Rows that pad a strategy's short batch add
    nothing, not even to the gradient, and are not counted. Losses of more dims are
    summed, as by `tf.nn.compute_average_loss`; average them first (`per_example`).

    Args:
        per_example_loss: Losses of shape (batch,) or (batch, ...); summed in float32.
        sample_weight: A weight per example, (batch,), or None for ones. An example of
            weight 0 adds nothing, even if its loss is not finite.
        global_batch_size: Examples of all replicas together, padding included. By
            default the size of this batch, times the number of replicas in replica
            code; under a strategy, the number of real examples.

    Raises:
        LossError: If the shapes do not fit, the number of replicas is unknown, or a
            strategy's batch may have padding and the losses are not one per row.

    Example:
        >>> float(compute_average_loss(jnp.array([2.0, 3.0, 4.0, 5.0])))
        3.5
        >>> float(compute_average_loss(jnp.array([2.0, 3.0]), global_batch_size=4))
        1.25
    """
    where = "compute_average_loss"
    losses = real_array("per_example_loss", per_example_loss, where)
    if losses.ndim == 0:
        msg = (
            "compute_average_loss takes one loss per example, (batch,), got a "
            "scalar. Do not average in the loss function; optax's losses do not."
        )
        raise LossError(msg)
    weights, size = sample_weight, global_batch_size
    if weights is not None:
        weights = _fitting_weights(weights, losses)
    context = get_replica_context()
    mask = None if context is None else context.mask
    if mask is not None and len(mask) == len(losses):
        context.mask_was_read = True
        size = context.num_examples if size is None else size
        # A user's weights may be NaN for padding.
        factors = mask if weights is None else weights
        weights = jnp.where(_spread(mask, factors.ndim) > 0, factors, 0)
    # A part of the batch, say, of a function that has looked at the mask itself.
    elif mask is not None and (
        weights is None or size is None or not context.mask_was_read
    ):
        msg = (
            f"{where}: the losses have {len(losses)} rows and this replica's batch "
            f"{len(mask)}, of which some may be padding. Give one loss per row; or, "
            "for a part of the batch, both global_batch_size and sample_weight, with 0 "
            "where get_replica_context().example_mask is 0."
        )
        raise LossError(msg)
    if size is None:
        size = len(losses) * _num_replicas()
    size = real_array("global_batch_size", size, where).astype("float32")
    # Both branches of a `where` are differentiated: the division must be finite in the
    # one that is not taken, too, or the gradient is NaN.
    total = weighted(losses, weights).sum()
    return jnp.where(size == 0, 0, total / jnp.where(size == 0, 1, size))


def scale_regularization_loss(regularization_loss: ArrayLike) -> jax.Array:
    """Divides a regularization loss by the number of replicas.

    Use this next to `compute_average_loss`. In replica code every replica computes the
    whole regularization loss, and the replicas' losses are added up; in a program over
    the whole batch there is only one, which is returned unchanged. An array is summed.

    Raises:
        LossError: If it is not a real number, or the number of replicas is unknown.

    Example:
        >>> float(scale_regularization_loss(0.5))
        0.5
    """
    where = "scale_regularization_loss"
    loss = real_array("regularization_loss", regularization_loss, where)
    return loss.astype("float32").sum() / _num_replicas()


def real_array(name: str, value: ArrayLike | None, where: str) -> jax.Array:
    """Returns losses or weights as an array of real numbers, or raises LossError."""
    return _checks.real_array(name, value, where=where, error=LossError)


def weighted(losses: jax.Array, weights: ArrayLike | None) -> jax.Array:
    """Returns losses times their weights; weight 0 gives 0, also for NaN."""
    losses = losses.astype("float32")
    if weights is None:
        return losses
    factors = _spread(_fitting_weights(weights, losses), losses.ndim)
    return jnp.where(factors != 0, losses * factors, 0)  # 0 times NaN would be NaN


def _fitting_weights(weights: ArrayLike, losses: jax.Array) -> jax.Array:
    """Returns float32 weights whose shape is a leading part of the losses'."""
    weights = real_array("weights", weights, "losses").astype("float32")
    if weights.shape != losses.shape[: weights.ndim]:
        msg = (
            f"weights of shape {weights.shape} do not fit losses of shape "
            f"{losses.shape}; give one weight per example, ({losses.shape[0]},), or "
            "one per loss."
        )
        raise LossError(msg)
    return weights


def _spread(x: jax.Array, ndim: int) -> jax.Array:
    return x.reshape(x.shape + (1,) * (ndim - x.ndim))


def _num_replicas() -> int:
    """Returns the number of replicas that run this code; 1 outside replica code."""
    context = get_replica_context()
    if context is not None and context.strategy is not None:
        return context.num_replicas_in_sync
    sizes = _jax.manual_axis_sizes()  # of a plain jax.shard_map
    if sum(size > 1 for size in sizes.values()) > 1:
        msg = (
            f"this code runs under the axes {', '.join(map(repr, sizes))}, and it is "
            "not known which of them are replicas. Give global_batch_size=, or divide "
            "by the number of replicas yourself."
        )
        raise LossError(msg)
    return math.prod(sizes.values())
