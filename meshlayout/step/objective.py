"""What a step minimizes: a batch, as the sum of named parts."""

import logging
import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshlayout import _checks, losses
from meshlayout._annotations import Batch, PyTree
from meshlayout._batches import (
    check_weights_key,
    get_weights,
    num_examples,
    weights_of,
)
from meshlayout.errors import LossError, StepError
from meshlayout.losses.averages import weighted
from meshlayout.state import TrainState
from meshlayout.step.batch_norm import WeightMask
from meshlayout.step.model_call import ModelCall, Outcome


_log = logging.getLogger("meshlayout")

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
class LossShare:
    """What a part of a global batch contributes to the whole batch's mean.

    Attributes:
        weights: The part's weights, or None for ones.
        denominator: The whole batch's.
        fraction: The part's share of the examples, for scalars.
        is_mean: Whether the denominator is that of a mean, as a scalar's is.
    """

    weights: jax.Array | None
    denominator: jax.Array
    fraction: float
    is_mean: bool


@dataclass(frozen=True)
class Loss:
    """How a batch becomes one number to minimize.

    Attributes:
        call: Calls the model.
        weights: Where a batch carries its weights.
        denominator: What sums are divided by.
        regularizers: Penalties on parameters.
        has_metrics: Whether metrics read the outputs.
    """

    call: ModelCall
    weights: str | int
    denominator: losses.Denominator
    regularizers: tuple[losses.Regularizer, ...]
    has_metrics: bool = False

    def weights_of(self, batch: Batch) -> jax.Array | None:
        """Returns a batch's weights, or None; NaN for negative ones."""
        weights = weights_of(batch, self.weights)
        return None if weights is None else jnp.where(weights >= 0, weights, jnp.nan)

    def share(self, batch: Batch) -> LossShare:
        """Returns the share of a whole batch: all of it."""
        weights = self.weights_of(batch)
        count = jnp.float32(self._count(batch, weights))
        denominator = losses.denominator_of(self.denominator, weights, count)
        return LossShare(weights, denominator, 1.0, isinstance(self.denominator, str))

    def provisional_share(self, batch: Batch) -> tuple[LossShare, jax.Array | None]:
        """Returns a whole batch's share, and the factor to correct its results by.

        The sum of the weights takes the devices a round of communication. Divided by
        their number instead, gradients need not wait for it: both are added in one.
        """
        share = self.share(batch)
        if share.weights is None or self.denominator != "real":
            return share, None
        count = jnp.float32(self._count(batch, share.weights))
        return replace(share, denominator=count), count / share.denominator

    def _count(self, batch: Batch, weights: jax.Array | None) -> int:
        """Returns how many losses there are if each counts one."""
        rows = num_examples(batch)
        return rows if weights is None else math.prod(jnp.shape(weights))

    def forward(
        self,
        state: TrainState,
        params: PyTree,
        model_state: PyTree,
        batch: Batch,
        key: jax.Array,
        weights: jax.Array | None,
    ) -> Outcome:
        """Calls the loss function, with batch statistics of real rows.

        Args:
            state: Gives the model's structure.
            params: The parameters to use instead of the state's.
            model_state: The model's other arrays, likewise.
            batch: A batch or a microbatch.
            key: For this call's random numbers.
            weights: The batch's weights.

        Raises:
            LossError: If there are losses for another number of examples.
        """
        mask = ()
        if weights is not None and self.call.train:
            mask = (WeightMask(weights),)
        outcome = self.call(state, params, model_state, batch, key, mask)
        _check_rows(outcome, num_examples(batch))
        is_per_loss = weights is not None and weights.ndim > 1
        if not is_per_loss and self.call.loss_fn not in _noted:
            _note_pairs(outcome, num_examples(batch), self.call.loss_fn)
        if self.has_metrics:
            _note_hidden(outcome, batch, self.call.loss_fn)
        return outcome


def parts_of(outcome: Outcome, share: LossShare) -> dict[str, jax.Array]:
    """Returns the parts of the objective that depend on the batch, by name.

    Each is what its examples contribute, of shape (batch,), or a scalar. They are not
    added up here, because adding up what is sharded takes a round of communication.

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


def _part(what: str, value: jax.Array, share: LossShare) -> jax.Array:
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
        each = weighted(each, share.weights)
        return each.reshape(each.shape[0], -1).sum(axis=1) / share.denominator
    except LossError as error:
        msg = f"{what} losses that do not fit: {error}"
        raise LossError(msg) from None


def _check_rows(outcome: Outcome, num_rows: int) -> None:
    """Raises LossError if losses are there for another number of examples."""
    values = {"the loss function's losses": outcome.losses, **outcome.recorded}
    if num_rows == 0:
        msg = "the batch has no examples, and there is nothing to learn from it."
        raise StepError(msg)
    for name, value in values.items():
        if jnp.ndim(value) and jnp.shape(value)[0] != num_rows:
            msg = (
                f"{name} have shape {jnp.shape(value)} in a batch of {num_rows} "
                "examples: the first dim has to be the batch dim."
            )
            raise LossError(msg)


# Loss functions of which it was said that they compare all pairs of examples.
_noted: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def _note_pairs(outcome: Outcome, num_rows: int, loss_fn: Callable[..., Any]) -> None:
    """Logs once for each loss function that its losses are one per pair of examples."""
    shape = jnp.shape(outcome.losses)
    if shape == (num_rows, num_rows) and num_rows > 1:
        _noted.add(loss_fn)
        _log.warning(
            "the losses have shape %s, one for every pair of examples, and are "
            "averaged. Predictions of shape (batch, 1) minus labels of shape (batch,) "
            "give that: take predictions[:, 0].",
            shape,
        )


# Loss functions of which it was said that their outputs hide parts of the batch.
_hiding: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def _note_hidden(outcome: Outcome, batch: Batch, loss_fn: Callable[..., Any]) -> None:
    """Logs once for each loss function which outputs metrics take for the batch's."""
    if not isinstance(batch, Mapping) or loss_fn in _hiding:
        return
    hidden = [
        repr(name)
        for name, value in outcome.outputs.items()
        if name in batch and value is not batch[name]
    ]
    if hidden:
        _hiding.add(loss_fn)
        _log.warning(
            "the loss function's outputs %s have the names of entries of the batch: "
            "metrics that read these names get the outputs. Rename the outputs if "
            "the entries of the batch are meant.",
            ", ".join(hidden),
        )


def example_losses(outcome: Outcome, weights: jax.Array | None) -> jax.Array | None:
    """Returns the loss function's losses per example, or None for a scalar."""
    if jnp.ndim(outcome.losses) == 0:
        return None
    return losses.per_example(outcome.losses, weights)


def penalties_of(
    params: PyTree, regularizers: tuple[losses.Regularizer, ...]
) -> dict[str, jax.Array]:
    """Returns the regularizers' penalties by name."""
    return {one.name: one(params) for one in regularizers}


def joined(
    parts: Mapping[str, jax.Array], penalties: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
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


def check_weights(weights: str | int) -> None:
    """Raises StepError unless this is a key or an index."""
    if not isinstance(weights, (str, int)) or isinstance(weights, bool):
        msg = (
            f"weights must be a key of the batch, as 'weight', or an index, as 2, got "
            f"{_checks.shown(weights)}."
        )
        raise StepError(msg)


def check_batch(batch: Batch, key: str | int) -> None:
    """Raises StepError if the weights of a batch are elsewhere, or not weights.

    Args:
        batch: A batch.
        key: Where the step looks for weights.
    """
    check_weights_key(batch, key)
    weights = get_weights(batch, key)
    # On devices, looking would mean waiting: there the loss becomes NaN.
    on_host = isinstance(weights, np.ndarray) and weights.dtype.kind in "fiu"
    if on_host and not ((weights >= 0) & np.isfinite(weights)).all():
        msg = (
            f"the weights of a batch must be finite and not negative; {key!r} has "
            f"values from {weights.min()} to {weights.max()}."
        )
        raise StepError(msg)


def check_state(name: str, state: TrainState) -> None:
    """Raises StepError unless this is a train state.

    Args:
        name: The step, as `"eval_step"`.
        state: What it was called with.
    """
    if type(state) is not TrainState:
        article = "an" if name[0] in "aeiou" else "a"
        words = name.replace("_", " ")
        msg = f"{article} {words} takes a TrainState, and got {_checks.shown(state)}."
        raise StepError(msg)
