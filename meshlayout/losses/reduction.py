"""Losses of examples: their weights, their sums, and the denominators of these.

A loss stays one number per example until the weights are known, since padding must not
count. A mean of microbatches' or replicas' means would weight their examples
differently if some are padded, so sums are added up and divided once.
`compute_average_loss` and `scale_regularization_loss` are tf.distribute's two scalings,
for whole programs and for replica code. Under a strategy, the replica context says how
many replicas there are and which rows are padding; in a plain `jax.shard_map`, JAX
knows the number of replicas alone.
"""

import math
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike

from meshlayout import _checks, _jax
from meshlayout.collectives import ReplicaContext, get_replica_context
from meshlayout.errors import LossError, MeshLayoutError


Denominator: TypeAlias = Literal["real", "global_batch_size"] | float


def per_example(losses: ArrayLike, weights: ArrayLike | None = None) -> jax.Array:
    """Averages losses over all dims except those of the weights.

    Use this before summing losses that have one number per pixel or token.

    Args:
        losses: Losses of shape (batch, ...).
        weights: Weights of shape (batch,) or of a longer leading part of the losses'
            shape (one per token, say); None for (batch,).

    Returns:
        Losses in float32, of the weights' shape, or (batch,).

    Raises:
        LossError: If the weights' shape is not a leading part of the losses'.

    Example:
        >>> import jax.numpy as jnp
        >>> per_example(jnp.array([[1.0, 3.0], [5.0, 5.0]])).tolist()
        [2.0, 5.0]
    """
    # In float32 first: a mean over thousands of pixels in bfloat16 keeps three digits.
    losses = real_array("losses", losses, "per_example").astype("float32")
    if losses.ndim == 0:
        msg = "losses are a scalar; one loss per example, (batch,), is needed."
        raise LossError(msg)
    num_kept = 1
    if weights is not None:
        weights = real_array("weights", weights, "per_example")
        num_kept = max(1, weights.ndim)  # also with one weight for all examples
        if weights.shape != losses.shape[: weights.ndim]:
            msg = (
                f"the batch's weights have shape {weights.shape} and the losses "
                f"{losses.shape}; one loss per example, or per weight, is needed."
            )
            raise LossError(msg)
    if losses.ndim == num_kept:
        return losses
    return losses.mean(axis=tuple(range(num_kept, losses.ndim)))


def weighted_sum(losses: ArrayLike, weights: ArrayLike | None = None) -> jax.Array:
    """Returns the weighted sum of losses, in float32; weight 0 adds 0, even for NaN.

    Args:
        losses: Losses of shape (batch, ...).
        weights: Weights whose shape is a leading part of that, or None for ones.

    Raises:
        LossError: If the weights' shape is not a leading part of the losses'.

    Example:
        >>> import jax.numpy as jnp
        >>> float(weighted_sum(jnp.array([1.0, jnp.nan]), jnp.array([2.0, 0.0])))
        2.0
    """
    return weighted(real_array("losses", losses, "weighted_sum"), weights).sum()


def denominator_of(
    denominator: Denominator, weights: ArrayLike | None, num_examples: int
) -> jax.Array:
    """Returns the number by which the weighted sum over a global batch is divided.

    Args:
        denominator: `"real"`, the sum of the weights; `"global_batch_size"`, the
            number of examples including padding; or a number.
        weights: The weights of the whole batch, or None for ones.
        num_examples: The number of losses: examples, or tokens if every token has a
            weight.

    Returns:
        A positive float32 scalar: 1 for a batch without real examples, whose sum is 0.

    Raises:
        LossError: If `denominator` is none of these.
    """
    check_denominator(denominator)
    if denominator == "real" and weights is not None:
        total = real_array("weights", weights, "losses").astype("float32").sum()
        # A batch of padding alone has the sum 0, and the loss 0 rather than NaN.
        return jnp.where(total > 0, total, 1)
    if isinstance(denominator, str):
        return jnp.float32(num_examples)
    return jnp.float32(denominator)


def check_denominator(denominator: object) -> None:
    """Raises LossError unless this is a denominator."""
    if isinstance(denominator, str) and denominator in ("real", "global_batch_size"):
        return
    try:
        _checks.number("denominator", denominator, above=0)
    except MeshLayoutError:
        msg = (
            f"denominator must be 'real' (the sum of the weights), 'global_batch_size' "
            "(the examples with padding) or a positive number, got "
            f"{_checks.shown(denominator)}."
        )
        raise LossError(msg) from None


def compute_average_loss(
    per_example_loss: ArrayLike,
    sample_weight: ArrayLike | None = None,
    global_batch_size: int | jax.Array | None = None,
) -> jax.Array:
    """Divides the sum of per-example losses by the global batch size.

    Use this in your own step, or to port one from tf.distribute. In a program over the
    whole batch this is the mean. In replica code (inside `jax.shard_map`) it is this
    replica's share: the shares of all replicas add up to the mean over the global
    batch. Losses of more dims are summed, like `tf.nn.compute_average_loss` does;
    average them per example first, with `losses.per_example`.

    In a function that a strategy runs, rows that pad a short batch add nothing, not
    even to the gradient, and are not counted.

    Args:
        per_example_loss: Losses of shape (batch,) or (batch, ...), of any float dtype;
            summed in float32.
        sample_weight: A weight per example, (batch,), or None for ones. An example of
            weight 0 adds nothing, even if its loss is not finite.
        global_batch_size: Examples of all replicas together, padding included. By
            default the size of this batch, times the number of replicas in replica
            code; under a strategy, the number of real examples.

    Returns:
        A float32 scalar; 0 for a batch without examples.

    Raises:
        LossError: If the losses are a scalar or not real numbers, the weights have
            another batch size, the global batch size is not a number of examples, the
            number of replicas is ambiguous, or a strategy's batch may have padding and
            the losses are not one per row.

    Example:
        >>> import jax.numpy as jnp
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
    context = _strategy_replica()
    mask = None if context is None else context.mask
    is_own_sum = sample_weight is not None and global_batch_size is not None
    if context is not None and mask is not None:
        if mask.shape[0] == losses.shape[0]:
            mask = context.example_mask
        # Microbatches, say, of a function that has looked at the mask itself.
        elif is_own_sum and context.mask_was_read:
            mask = None
        else:
            raise LossError(_other_rows(losses, mask))
    if global_batch_size is not None:
        size = _checked_size(global_batch_size)
    elif context is not None and mask is not None:
        size = context.num_examples
    else:
        size = losses.shape[0] * num_replicas(losses)
    if mask is not None and sample_weight is not None:
        given = real_array("sample_weight", sample_weight, where)
        _check_weights(given, losses)
        is_real = mask.reshape(-1, *[1] * (given.ndim - 1)) > 0
        mask = jnp.where(is_real, given, 0)  # a weight of padding may be NaN, too
    total = weighted(losses, sample_weight if mask is None else mask).sum()
    size = jnp.asarray(size, "float32")
    # Both branches of a `where` are differentiated: the division must be finite in the
    # one that is not taken, too, or the gradient is NaN.
    return jnp.where(size > 0, total / jnp.where(size > 0, size, 1), 0)


def scale_regularization_loss(regularization_loss: ArrayLike) -> jax.Array:
    """Divides a regularization loss by the number of replicas.

    Use this next to `compute_average_loss`. In replica code every replica computes the
    whole regularization loss, and the replicas' losses are added up; in a program over
    the whole batch there is only one, which is returned unchanged.

    Args:
        regularization_loss: A scalar, or an array to be summed.

    Returns:
        A float32 scalar.

    Raises:
        LossError: If it is not a real number, or the number of replicas is ambiguous.

    Example:
        >>> float(scale_regularization_loss(0.5))
        0.5
    """
    where = "scale_regularization_loss"
    loss = real_array("regularization_loss", regularization_loss, where)
    return loss.astype("float32").sum() / num_replicas(None)


def real_array(name: str, value: ArrayLike | None, where: str) -> jax.Array:
    """Returns losses or weights as an array of real numbers, or raises LossError."""
    return _checks.real_array(name, value, where=where, error=LossError)


def weighted(losses: jax.Array, weights: ArrayLike | None) -> jax.Array:
    """Returns losses times their weights, in float32; weight 0 gives 0, also for NaN.

    Args:
        losses: Losses of shape (batch, ...).
        weights: Weights whose shape is a leading part of that, or None.

    Raises:
        LossError: If the weights' shape is not a leading part of the losses'.
    """
    losses = losses.astype("float32")
    if weights is None:
        return losses
    weights = real_array("weights", weights, "losses").astype("float32")
    _check_weights(weights, losses)
    spread = weights.reshape(weights.shape + (1,) * (losses.ndim - weights.ndim))
    # 0 times a loss that is not finite would be NaN.
    return jnp.where(spread != 0, losses * spread, 0)


def _check_weights(weights: jax.Array, losses: jax.Array) -> None:
    """Raises LossError unless the weights' shape is a leading part of the losses'."""
    if weights.shape != losses.shape[: weights.ndim]:
        msg = (
            f"weights of shape {weights.shape} do not fit losses of shape "
            f"{losses.shape}; give one weight per example, ({losses.shape[0]},), or "
            "one per loss."
        )
        raise LossError(msg)


def _checked_size(size: int | jax.Array) -> int | jax.Array:
    """Returns a global batch size, perhaps a traced one, if it is a count."""
    name, where = "global_batch_size", "compute_average_loss"
    if isinstance(size, Tracer) and not size.shape:
        return real_array(name, size, where)  # such as a psum of the replicas' counts
    return _checks.count(name, size, at_least=0, where=where, error=LossError)


def _other_rows(losses: jax.Array, mask: jax.Array) -> str:
    """Returns what to say of losses that are not one per row of a padded batch."""
    rows, padded = losses.shape[0], mask.shape[0]
    fix = f"one loss per row, ({padded},) or ({padded}, ...)"
    if padded and rows and rows % padded == 0:
        fix += f", such as losses.reshape({padded}, -1)"
    return (
        f"compute_average_loss: the losses have {rows} rows and this replica's batch "
        f"has {padded}, some of which may be padding; which losses are of padding is "
        f"not known. Give {fix}. For a part of the batch, give both sample_weight (0 "
        "for padding, from get_replica_context().example_mask) and global_batch_size."
    )


def _strategy_replica() -> ReplicaContext | None:
    """Returns the context of a replica that a strategy runs, or None."""
    context = get_replica_context()
    return None if context is None or context.strategy is None else context


def num_replicas(value: jax.Array | None) -> int:
    """Returns the number of replicas that run this code; 1 outside replica code.

    A strategy knows. In a plain `jax.shard_map`, replicas are along the manual axes. If
    there are several, some may be for model parallelism: JAX knows along which of them
    a value varies.

    Args:
        value: A value of this replica, which varies along the axes of replicas; or
            None for all manual axes.

    Raises:
        LossError: If several axes are manual and the value varies along none.
    """
    context = _strategy_replica()
    if context is not None:
        return context.num_replicas_in_sync
    axes = _jax.manual_axis_sizes()
    if value is not None:
        # Unknown where shard_map runs with check_vma=False: then all manual axes count.
        varying = _jax.varying_axes(value)
        if varying:
            axes = {name: size for name, size in axes.items() if name in varying}
    if sum(size > 1 for size in axes.values()) > 1 and (
        value is None or not _jax.varying_axes(value)
    ):
        msg = (
            f"this code runs under the axes {', '.join(map(repr, axes))}, and it is "
            "not known which of them are replicas. Give global_batch_size=, or divide "
            "by the number of replicas yourself."
        )
        raise LossError(msg)
    return math.prod(axes.values())
