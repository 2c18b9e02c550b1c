"""What a step minimises, as the sum of named parts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshlayout import losses
from meshlayout.errors import LossError
from meshlayout.step.model_call import Outcome


# What the loss function's own part is called in the metrics.
DATA = "data_loss"


@dataclass(frozen=True)
class Share:
    """What a part of a global batch contributes to the whole batch's mean.

    Attributes:
        weights: The part's weights, or None for ones.
        denominator: The whole batch's.
        fraction: The part's share of the examples, for scalars.
    """

    weights: Any
    denominator: Any
    fraction: float


def parts_of(outcome: Outcome, share: Share) -> dict[str, jax.Array]:
    """Returns the parts of the objective that depend on the batch, by name.

    Args:
        outcome: What the loss function and the model gave for a part of the batch.
        share: How much that part counts.

    Raises:
        LossError: If a scalar is all there is for a batch with weights, or the shapes
            of losses and weights do not fit.
    """
    parts = {DATA: _part("the loss function returned", outcome.losses, share)}
    for path, recorded in outcome.recorded.items():
        parts[path] = _part(f"the model recorded, as {path!r},", recorded, share)
    return parts


def _part(what: str, value: Any, share: Share) -> jax.Array:
    if jnp.ndim(value) == 0:
        if share.weights is not None:
            msg = (
                f"{what} a scalar, and the batch has weights: it may hold padding, "
                "which a scalar has already averaged in. Return one loss per example, "
                "(batch,), or take the weights out of the batch."
            )
            raise LossError(msg)
        return jnp.asarray(value).astype("float32") * share.fraction
    try:
        each = losses.per_example(value, share.weights)
        return losses.weighted_sum(each, share.weights) / share.denominator
    except LossError as error:
        msg = f"{what} losses that do not fit: {error}"
        raise LossError(msg) from None


def check_rows(outcome: Outcome, num_rows: int) -> None:
    """Raises LossError if losses are there for another number of examples."""
    found = {"the loss function's losses": outcome.losses, **outcome.recorded}
    for name, value in found.items():
        if jnp.ndim(value) and jnp.shape(value)[0] != num_rows:
            msg = (
                f"{name} have shape {jnp.shape(value)} in a batch of {num_rows} "
                "examples: the first dim has to be the batch dim."
            )
            raise LossError(msg)


def example_losses(outcome: Outcome, weights: Any) -> Any:
    """Returns the loss function's losses per example, or None for a scalar."""
    if jnp.ndim(outcome.losses) == 0:
        return None
    return losses.per_example(outcome.losses, weights)


def penalties_of(
    params: Any, regularizers: tuple[losses.Regularizer, ...]
) -> Mapping[str, jax.Array]:
    """Returns the regularisers' penalties by name."""
    return {one.name: one(params) for one in regularizers}
