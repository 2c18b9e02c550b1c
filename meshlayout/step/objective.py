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

# Names in a step's metrics that no part may have.
RESERVED = (
    "loss",
    DATA,
    "grad_norm",
    "learning_rate",
    "loss_scale",
    "skipped",
    "nonfinite_loss",
)


@dataclass(frozen=True)
class Share:
    """What a part of a global batch contributes to the whole batch's mean.

    Attributes:
        weights: The part's weights, or None for ones.
        denominator: The whole batch's.
        fraction: The part's share of the examples, for scalars.
        is_mean: Whether the denominator is that of a mean, as a scalar's is.
    """

    weights: Any
    denominator: Any
    fraction: float
    is_mean: bool


def parts_of(outcome: Outcome, share: Share) -> dict[str, jax.Array]:
    """Returns the parts of the objective that depend on the batch, by name.

    Args:
        outcome: What the loss function and the model gave for a part of the batch.
        share: How much that part counts.

    Raises:
        LossError: If a scalar is all there is for a batch with weights, or the shapes
            of losses and weights do not fit.
    """
    if jnp.ndim(outcome.losses) == 0 and not share.is_mean:
        msg = (
            "the loss function returned a scalar, which has been divided already, and "
            "denominator= is a number. Return one loss per example, (batch,)."
        )
        raise LossError(msg)
    parts = {DATA: _part("the loss function returned", outcome.losses, share)}
    for path, recorded in outcome.recorded.items():
        if path in RESERVED:
            msg = (
                f"the model records a loss as {path!r}, which every step reports. "
                "Record it under another name."
            )
            raise LossError(msg)
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
) -> dict[str, jax.Array]:
    """Returns the regularisers' penalties by name."""
    return {one.name: one(params) for one in regularizers}


def joined(parts: Mapping[str, Any], penalties: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all parts of the objective.

    Raises:
        LossError: If two have the same name.
    """
    for name in penalties:
        if name in parts:
            msg = (
                f"a regularizer is called {name!r}, as another part of the loss is. "
                f"Give it another name: losses.l2(1e-5, name='weights_{name}')."
            )
            raise LossError(msg)
    return {**parts, **penalties}
