"""One loss per example, and what its sum is divided by."""

from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from meshlayout.errors import LossError
from meshlayout.losses.averages import weighted


Denominator: TypeAlias = Literal["real", "global_batch_size"] | float


def per_example(losses: Any, weights: Any = None) -> jax.Array:
    """Averages losses over all dims but those that have weights, or but the first.

    Args:
        losses: Losses of shape (batch, ...).
        weights: Weights of shape (batch,), or of the losses' own shape (one per token,
            say), or None.

    Returns:
        Losses in float32, of the weights' shape, or (batch,).

    Raises:
        LossError: If the weights' shape is no leading part of the losses'.

    Example:
        >>> import jax.numpy as jnp
        >>> per_example(jnp.array([[1.0, 3.0], [5.0, 5.0]])).tolist()
        [2.0, 5.0]
    """
    losses = jnp.asarray(losses).astype("float32")
    if losses.ndim == 0:
        msg = "losses are a scalar, and one per example, (batch,), is needed."
        raise LossError(msg)
    kept = 1 if weights is None else jnp.ndim(weights)
    if weights is not None and jnp.shape(weights) != losses.shape[:kept]:
        msg = (
            f"the batch's weights have shape {jnp.shape(weights)} and the losses "
            f"{losses.shape}; a loss per example, or per weight, is needed."
        )
        raise LossError(msg)
    if losses.ndim == kept:
        return losses
    return losses.mean(axis=tuple(range(kept, losses.ndim)))


def weighted_sum(losses: Any, weights: Any = None) -> jax.Array:
    """Sums losses by weight, in float32; what has weight 0 adds nothing, NaN or not.

    Args:
        losses: Losses of shape (batch, ...).
        weights: Weights of a leading part of that shape, or None for ones.

    Raises:
        LossError: If the weights' shape is no leading part of the losses'.

    Example:
        >>> import jax.numpy as jnp
        >>> float(weighted_sum(jnp.array([1.0, jnp.nan]), jnp.array([2.0, 0.0])))
        2.0
    """
    return weighted(jnp.asarray(losses), weights).sum()


def denominator_of(
    denominator: Denominator, weights: Any, num_examples: int
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
        total = jnp.asarray(weights).astype("float32").sum()
        return jnp.where(total > 0, total, 1)
    if isinstance(denominator, str):
        return jnp.float32(num_examples)
    return jnp.float32(denominator)


def check_denominator(denominator: Any) -> None:
    """Raises LossError unless this is a denominator."""
    if denominator in ("real", "global_batch_size"):
        return
    is_number = isinstance(denominator, (int, float, np.number))
    if isinstance(denominator, bool) or not is_number or not 0 < denominator < np.inf:
        msg = (
            f"denominator={denominator!r} is none of 'real' (the sum of the weights), "
            "'global_batch_size' (the examples with padding) or a positive number."
        )
        raise LossError(msg)
