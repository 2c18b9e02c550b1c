"""Losses over real examples, losses that models record, penalties on parameters.

Losses stay one number per example until the weights are known, since padding must not
count. A mean of the means of microbatches or replicas would weight examples differently
if some are padded, so sums are added and divided once. Recorded scalars do not depend
on the number of examples, and are added unchanged.
"""

import contextlib
import functools
import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx
from jax.typing import ArrayLike

from meshlayout import _checks, _jax, _paths
from meshlayout._annotations import PyTree
from meshlayout.collectives import get_replica_context
from meshlayout.errors import LossError


Denominator: TypeAlias = Literal["real", "global_batch_size"]

Regularizer: TypeAlias = Callable[[PyTree], jax.Array]
"""A penalty on parameters: a function that returns a scalar."""

# Linen's collection for recorded losses.
COLLECTION = "losses"

_real = functools.partial(_checks.real_array, error=LossError)


@_checks.user_call
def per_example(losses: ArrayLike, weights: ArrayLike | None = None) -> jax.Array:
    """Averages losses over all dims except those of the weights.

    Use this before summing losses that have one number per pixel or token. Returns
    float32 losses of the weights' shape, a prefix of the losses' shape; or (batch,).

    Examples:
        >>> per_example(jnp.array([[1.0, 3.0], [5.0, 5.0]])).tolist()
        [2.0, 5.0]
    """
    # In float32 first: a mean over thousands of pixels in bfloat16 keeps three digits.
    losses = _real("losses", losses, where="per_example").astype("float32")
    if losses.ndim == 0:
        raise LossError("losses are a scalar; give one loss per example, (batch,).")
    # One weight may be for all examples.
    num_kept = 0 if weights is None else _fitting_weights(weights, losses).ndim
    return losses.mean(axis=tuple(range(max(1, num_kept), losses.ndim)))


@_checks.user_call
def weighted_sum(losses: ArrayLike, weights: ArrayLike | None = None) -> jax.Array:
    """Returns the weighted sum of losses, in float32; weight 0 adds 0, even for NaN.

    Examples:
        >>> float(weighted_sum(jnp.array([1.0, jnp.nan]), jnp.array([2.0, 0.0])))
        2.0
    """
    return weighted(_real("losses", losses, where="weighted_sum"), weights).sum()


def denominator_of(
    denominator: Denominator, weights: ArrayLike | None, num_examples: int
) -> jax.Array:
    """Returns the number by which the weighted sum over a global batch is divided.

    That is `"real"`, the sum of the whole batch's weights (1 if all is padding), or
    `"global_batch_size"`, the number of examples, padding included. float32.

    Examples:
        >>> float(denominator_of("real", jnp.array([1, 1, 0]), 3))
        2.0
    """
    _checks.choice("denominator", denominator, get_args(Denominator), error=LossError)
    if denominator == "global_batch_size" or weights is None:
        return jnp.float32(num_examples)
    total = _real("weights", weights, where="losses").astype("float32").sum()
    return jnp.where(total > 0, total, 1)  # a loss of 0 rather than NaN


@_checks.user_call
def compute_average_loss(
    per_example_loss: ArrayLike,
    sample_weight: ArrayLike | None = None,
    global_batch_size: int | jax.Array | None = None,
) -> jax.Array:
    """Divides the sum of losses by the global batch size; 0 without examples.

    Use this to port a step from tf.distribute. In a program over the whole batch, it
    returns the mean. In replica code (a strategy's `run`, or `jax.shard_map`), it
    returns this replica's share; all shares add up to the mean. Padding is not counted.
    Losses with more dims are summed; see `per_example`.

    Args:
        per_example_loss: Losses of shape (batch, ...); summed in float32.
        sample_weight: A weight per example, (batch,), or None for ones; 0 adds nothing.
        global_batch_size: Examples of all replicas together, padding included. By
            default the size of this batch, times the number of replicas in replica
            code; under a strategy, the number of real examples.

    Raises:
        LossError: If the shapes do not fit, the number of replicas is unknown, or a
            strategy's batch may have padding and the losses are not one per row.

    Examples:
        >>> float(compute_average_loss(jnp.array([2.0, 3.0]), global_batch_size=4))
        1.25
    """
    where = "compute_average_loss"
    losses = _real("per_example_loss", per_example_loss, where=where)
    if losses.ndim == 0:
        raise LossError(f"{where} takes one loss per example, (batch,), got a scalar.")
    weights, size = sample_weight, global_batch_size
    if weights is not None:
        weights = _fitting_weights(weights, losses)
    context = get_replica_context()
    if context is not None and context.mask is not None:
        mask = context.mask
        if len(mask) == len(losses):
            context.mask_was_read = True
            size = context.num_examples if size is None else size
            # A user's weights may be NaN for padding.
            factors = mask if weights is None else weights
            is_real = jnp.expand_dims(mask > 0, range(1, factors.ndim))
            weights = jnp.where(is_real, factors, 0)
        # Otherwise a part of the batch, from a function that has read the mask itself.
        elif weights is None or size is None or not context.mask_was_read:
            raise LossError(
                f"{where}: the losses have {len(losses)} rows and this replica's batch "
                f"{len(mask)}, some of which may be padding. Give one loss per row; or "
                "for a part of the batch, both global_batch_size and sample_weight, "
                "with 0 where get_replica_context().example_mask is 0."
            )
    if size is None:
        size = len(losses) * _num_replicas()
    size = _real("global_batch_size", size, where=where).astype("float32")
    # Both branches of a `where` are differentiated: the division must be finite in the
    # other branch, too, or the gradient is NaN.
    total = weighted(losses, weights).sum()
    return jnp.where(size == 0, 0, total / jnp.where(size == 0, 1, size))


def scale_regularization_loss(regularization_loss: ArrayLike) -> jax.Array:
    """Divides a regularization loss by the number of replicas; an array is summed.

    Use this in replica code, like `compute_average_loss`; elsewhere it changes nothing.

    Examples:
        >>> float(scale_regularization_loss(0.5))
        0.5
    """
    where = "scale_regularization_loss"
    loss = _real("regularization_loss", regularization_loss, where=where)
    return loss.astype("float32").sum() / _num_replicas()


def weighted(losses: jax.Array, weights: ArrayLike | None) -> jax.Array:
    """Returns losses times their weights; weight 0 gives 0, even for NaN."""
    losses = losses.astype("float32")
    if weights is None:
        return losses
    factors = _fitting_weights(weights, losses)
    factors = jnp.expand_dims(factors, range(factors.ndim, losses.ndim))
    return jnp.where(factors != 0, losses * factors, 0)  # 0 times NaN would be NaN


def _fitting_weights(weights: ArrayLike, losses: jax.Array) -> jax.Array:
    weights = _real("weights", weights, where="losses").astype("float32")
    if weights.shape != losses.shape[: weights.ndim]:
        fix = f"give one weight per example, ({losses.shape[0]},), or one per loss."
        if losses.shape == weights.shape[: losses.ndim]:
            fix = f"give all losses, {weights.shape}: steps take the weighted mean."
        msg = f"weights of shape {weights.shape} do not fit losses of shape"
        raise LossError(f"{msg} {losses.shape}; {fix}")
    return weights


def _num_replicas() -> int:
    """Returns the number of replicas that run this code; 1 outside replica code."""
    context = get_replica_context()
    if context is not None and context.strategy is not None:
        return context.num_replicas_in_sync
    sizes = _jax.manual_axis_sizes()  # of a plain jax.shard_map
    if sum(size > 1 for size in sizes.values()) > 1:
        raise LossError(
            f"this code runs under the axes {', '.join(map(repr, sizes))}, and it is "
            "not known which of them are replicas. Give global_batch_size=, or divide "
            "by the number of replicas yourself."
        )
    return math.prod(sizes.values())


# A separate type, so that steps can tell losses from values sown for debugging.
class ModelLoss(nnx.Intermediate[Any]):
    """A loss that an NNX module has recorded; train and eval steps add it."""


@_checks.user_call
def record(module: nnx.Module | nn.Module, name: str, loss: ArrayLike) -> None:
    """Records a loss inside a module; train and eval steps add it to the total.

    Use this for losses of activations, such as load balancing of experts. Recording
    under the same name again adds another loss.

    Args:
        module: The NNX or Linen module, usually `self`.
        name: Its name; the metrics show it under the module's path.
        loss: One per example, (batch, ...); or a scalar, for batches without weights.

    Examples:
        >>> class Active(nnx.Module):
        ...     def __call__(self, x):
        ...         record(self, "activity", 0.01 * jnp.square(x))
        ...         return x
    """
    loss = _real("loss", loss, where="record")
    if isinstance(module, nn.Module):
        module.sow(COLLECTION, name, loss)
        return
    with quiet_sow():
        module.sow(ModelLoss, name, loss)


@contextlib.contextmanager
def quiet_sow() -> Iterator[None]:
    """Silences Flax's warning to capture sown values, which the step does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "\\s*Using 'Module.sow", DeprecationWarning)
        yield


@_checks.user_call
def l2(strength: float, where: str | re.Pattern[str] = "") -> Regularizer:
    """Returns the penalty `strength * sum(w ** 2)`, like Keras' `regularizers.l2`.

    Use it as `make_train_step(..., regularizers={"l2": l2(1e-5)})`. It is part of the
    loss, so the optimizer scales its gradient; to decay weights, use `optax.adamw`.

    Args:
        strength: The factor, not negative.
        where: A regular expression to search for in parameter paths; one must match.

    Examples:
        >>> float(l2(0.5, where="kernel")({"kernel": jnp.ones(4), "bias": jnp.ones(2)}))
        2.0
    """
    return _penalty("l2", strength, where, jnp.square)


@_checks.user_call
def l1(strength: float, where: str | re.Pattern[str] = "") -> Regularizer:
    """Returns the penalty `strength * sum(abs(w))`; arguments and errors as `l2`."""
    return _penalty("l1", strength, where, jnp.abs)


def _penalty(
    name: str,
    strength: float,
    where: str | re.Pattern[str],
    function: Callable[[jax.Array], jax.Array],
) -> Regularizer:
    context: Any = {"where": name, "error": LossError}
    strength = _checks.number("strength", strength, at_least=0, **context)
    pattern = _checks.pattern("where", where, **context)

    def penalty(params: PyTree) -> jax.Array:
        leaves = _paths.flatten(params).leaves
        chosen = [leaf.value for leaf in leaves if pattern.search(leaf.path)]
        if not chosen:  # a typing error would switch regularization off
            paths = ", ".join(repr(leaf.path) for leaf in leaves[:4])
            raise LossError(
                f"{name}: no parameter's path matches {pattern.pattern!r}; there are "
                f"{paths}{', ...' if len(leaves) > 4 else ''}."
            )
        # Summed in float32, as bfloat16 stops counting at 256.
        sums = [function(jnp.asarray(x).astype("float32")).sum() for x in chosen]
        return jnp.float32(strength) * jnp.stack(sums).sum()

    return penalty
