"""Losses and gradients of one global batch, in one program over it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshlayout import _paths, losses
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.step.batch_norm import Masking
from meshlayout.step.model_call import ModelCall, Outcome
from meshlayout.step.objective import (
    Share,
    check_rows,
    example_losses,
    joined,
    parts_of,
    penalties_of,
)
from meshlayout.step.weights import num_examples, weights_of, without_nan_padding


@dataclass(frozen=True)
class Loss:
    """How a batch becomes one number to minimise.

    Attributes:
        call: Calls the model.
        weights: Where a batch carries its weights.
        denominator: What sums are divided by.
        regularizers: Penalties on parameters.
    """

    call: ModelCall
    weights: str | int
    denominator: losses.Denominator
    regularizers: tuple[losses.Regularizer, ...]

    def weights_of(self, batch: Any) -> Any:
        """Returns a batch's weights, or None."""
        return weights_of(batch, self.weights)

    def share(self, batch: Any) -> Share:
        """Returns the share of a whole batch: all of it."""
        weights = self.weights_of(batch)
        denominator = self.denominator_of(batch, weights)
        return Share(weights, denominator, 1.0, isinstance(self.denominator, str))

    def provisional_share(self, batch: Any) -> tuple[Share, Any]:
        """Returns a whole batch's share, and by what to correct what comes of it.

        The sum of the weights takes the replicas a round of communication. Divided by
        their number instead, gradients need not wait for it: both are added in one.
        """
        share = self.share(batch)
        if share.weights is None or self.denominator != "real":
            return share, None
        count = jnp.float32(self._count(batch, share.weights))
        return replace(share, denominator=count), count / share.denominator

    def denominator_of(self, batch: Any, weights: Any) -> jax.Array:
        """Returns what the sums over a whole batch are divided by."""
        count = self._count(batch, weights)
        return losses.denominator_of(self.denominator, weights, count)

    def _count(self, batch: Any, weights: Any) -> int:
        """Returns how many losses count one each, where they do."""
        rows = num_examples(batch)
        return rows if weights is None else math.prod(jnp.shape(weights))


@dataclass(frozen=True)
class Gradients:
    """The gradients of one global batch, and what else came of it.

    Attributes:
        grads: In the structure of the parameters that were trained.
        parts: The objective's parts by name; their sum is the loss.
        model_state: The model's other arrays, after.
        metrics: The metrics, with this batch added.
    """

    grads: Any
    parts: dict[str, jax.Array]
    model_state: Any
    metrics: Metrics


class Trainable:
    """Which parameters a step trains.

    Args:
        params: All parameters.
        matches: Tells of a path whether it is trained.
    """

    def __init__(self, params: Any, matches: Callable[[str], bool]) -> None:
        flat = _paths.flatten(params)
        self._treedef = jax.tree.structure(params)
        self.mask = [matches(leaf.path) for leaf in flat.leaves]

    @property
    def is_all(self) -> bool:
        """Whether all of them are trained."""
        return all(self.mask)

    def chosen(self, tree: Any) -> list[Any]:
        """Returns the trained leaves of a tree in the parameters' structure."""
        return [x for x, is_in in self._pairs(tree) if is_in]

    def filled(self, chosen: list[Any], rest: Any) -> Any:
        """Returns a tree of trained leaves, with the others from `rest`."""
        new = iter(chosen)
        return self._treedef.unflatten(
            [next(new) if is_in else x for x, is_in in self._pairs(rest)]
        )

    def zeros_elsewhere(self, chosen: list[Any], like: Any) -> Any:
        """Returns a tree of trained leaves, with zeros for the others."""
        return self.filled(chosen, jax.tree.map(jnp.zeros_like, like))

    def _pairs(self, tree: Any) -> list[tuple[Any, bool]]:
        return list(zip(jax.tree.leaves(tree), self.mask, strict=True))


def whole_batch(
    loss: Loss,
    state: TrainState,
    trainable: Trainable,
    batch: Any,
    key: jax.Array,
    metrics: Metrics,
    scale: Any,
) -> Gradients:
    """Returns the gradients of a batch that goes through the model at once.

    Args:
        loss: What is minimised.
        state: The state.
        trainable: With respect to what.
        batch: The global batch.
        key: For this step's random numbers.
        metrics: The metrics so far.
        scale: A factor for the loss, which the gradients keep; None for 1.
    """
    share, factor = loss.provisional_share(batch)
    batch = without_nan_padding(batch, share.weights)

    def objective(chosen: list[Any]) -> tuple[Any, tuple[Mapping[str, Any], Outcome]]:
        params = trainable.filled(chosen, state.params)
        outcome = forward(loss, state, params, batch, key, share.weights)
        parts = parts_of(outcome, share)
        names.extend(parts)
        return scaled(sum(parts.values()), scale), (parts, outcome)

    names: list[str] = []  # in their order, which JAX does not keep
    chosen = trainable.chosen(state.params)
    grads, (parts, outcome) = jax.grad(objective, has_aux=True)(chosen)
    if factor is not None:
        grads = jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)
        parts = {name: part * factor for name, part in parts.items()}
    metrics = updated(metrics, outcome, batch, share.weights)
    after = kept_without_examples(share, state.model_state, outcome.model_state)
    parts = {name: parts[name] for name in names}
    found = Gradients(grads, parts, after, metrics)
    return with_penalties(found, loss, state, trainable, scale)


def with_penalties(
    found: Gradients, loss: Loss, state: TrainState, trainable: Trainable, scale: Any
) -> Gradients:
    """Adds the regularisers, which do not depend on the batch."""
    if not loss.regularizers:
        return found

    def penalty(chosen: list[Any]) -> Any:
        params = trainable.filled(chosen, state.params)
        parts = penalties_of(params, loss.regularizers)
        return scaled(sum(parts.values()), scale), parts

    grads, parts = jax.grad(penalty, has_aux=True)(trainable.chosen(state.params))
    return Gradients(
        jax.tree.map(jnp.add, found.grads, grads),
        joined(found.parts, {one.name: parts[one.name] for one in loss.regularizers}),
        found.model_state,
        found.metrics,
    )


def forward(
    loss: Loss, state: TrainState, params: Any, batch: Any, key: Any, weights: Any
) -> Outcome:
    """Calls the loss function on a whole batch, with batch statistics of real rows."""
    masking = () if weights is None or not loss.call.train else (Masking(weights),)
    outcome = loss.call(state, params, state.model_state, batch, key, masking)
    check_rows(outcome, num_examples(batch))
    return outcome


def updated(metrics: Metrics, outcome: Outcome, batch: Any, weights: Any) -> Metrics:
    """Returns metrics with a batch added."""
    return metrics.update_from(
        outputs=outcome.outputs,
        batch=batch,
        losses=example_losses(outcome, weights),
        weights=weights,
    )


def kept_without_examples(share: Share, before: Any, after: Any) -> Any:
    """Returns the model's state after a batch: as it was if that was all padding."""
    if share.weights is None:
        return after
    seen = (share.weights != 0).any()
    return select(seen, after, before)


def select(condition: Any, ours: Any, theirs: Any) -> Any:
    """Returns one of two trees; leaves that are the same object stay as they are."""
    return jax.tree.map(
        lambda a, b: a if a is b else jnp.where(condition, a, b), ours, theirs
    )


def scaled(loss: Any, scale: Any) -> Any:
    """Returns a loss times a factor, which is None for 1."""
    return loss if scale is None else loss * scale


def is_finite(tree: Any) -> jax.Array:
    """Tells whether all numbers in a tree are finite."""
    leaves = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
    return jnp.stack(leaves).all() if leaves else jnp.asarray(np.True_)
