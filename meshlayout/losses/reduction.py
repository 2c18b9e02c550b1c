"""One loss per example, and what its sum is divided by."""

from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from meshlayout import _checks
from meshlayout.errors import LossError, MeshLayoutError
from meshlayout.losses.averages import real_array, weighted


Denominator: TypeAlias = Literal["real", "global_batch_size"] | float


def per_example(losses: ArrayLike, weights: ArrayLike | None = None) -> jax.Array:
    """Averages losses over all dims but those that have weights, or but the first.

    Args:
        losses: Losses of shape (batch, ...).
        weights: Weights of shape (batch,), or of the losses' own shape (one per token,
            say), or None.

    Returns:
        Losses in float32, of the weights' shape, or (batch,).

    Raises:
        LossError: If the weights' shape is not a leading part of the losses'.

    Example:
        >>> import jax.numpy as jnp
        >>> per_example(jnp.array([[1.0, 3.0], [5.0, 5.0]])).tolist()
        [2.0, 5.0]
    """
    losses = real_array("losses", losses, "per_example").astype("float32")
    if losses.ndim == 0:
        msg = "losses are a scalar, and one per example, (batch,), is needed."
        raise LossError(msg)
    if weights is not None:
        weights = real_array("weights", weights, "per_example")
    num_kept = 1 if weights is None else weights.ndim
    if weights is not None and weights.shape != losses.shape[:num_kept]:
        msg = (
            f"the batch's weights have shape {weights.shape} and the losses "
            f"{losses.shape}; a loss per example, or per weight, is needed."
        )
        raise LossError(msg)
    if losses.ndim == num_kept:
        return losses
    return losses.mean(axis=tuple(range(num_kept, losses.ndim)))


def weighted_sum(losses: ArrayLike, weights: ArrayLike | None = None) -> jax.Array:
    """Sums losses by weight, in float32; weight 0 adds nothing, even for NaN.

    Args:
        losses: Losses of shape (batch, ...).
        weights: Weights of a leading part of that shape, or None for ones.

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
    """Returns what the weighted sum over a global batch is divided by.

    Args:
        denominator: `"real"`, the sum of the weights; `"global_batch_size"`, the
            examples with padding; or a number.
        weights: The whole batch's weights, or None for ones.
        num_examples: The losses that count one each: examples, or tokens where each
            token has a weight.

    Returns:
        A positive float32 scalar: 1 for a batch of no real examples, whose sum is 0.

    Raises:
        LossError: If `denominator` is none of these.
    """
    check_denominator(denominator)
    if denominator == "real" and weights is not None:
        total = real_array("weights", weights, "losses").astype("float32").sum()
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
