"""The gradient of a global batch that goes through the model in parts.

The parts' losses are divided by the whole batch's denominator, so that their
gradients add up to the whole batch's.

Batch statistics are those of the whole batch, too, although no part sees it. Let s be
the statistics of all layers, m(w, s) those that come of normalising by s, and l(w, s)
the loss. A layer's statistics depend only on those of layers before it, so s = m(w, s)
is reached from anywhere in as many passes over the parts as there are layers, and so
is the adjoint equation t = dl/ds + t dm/ds. The gradient is d(l + t m)/dw.
"""

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.step.batch_norm import Moments
from meshlayout.step.gradients import (
    Gradients,
    Loss,
    Trainable,
    kept_without_examples,
    scaled,
    updated,
    with_penalties,
)
from meshlayout.step.microbatches import Microbatches
from meshlayout.step.model_call import Outcome
from meshlayout.step.replicas import Replicas


_log = logging.getLogger("meshlayout")


def accumulated(
    loss: Loss,
    state: TrainState,
    trainable: Trainable,
    batch: Any,
    key: jax.Array,
    metrics: Metrics,
    scale: Any,
    *,
    num_parts: int,
    replicas: Replicas,
    reduce_dtype: Any,
) -> Gradients:
    """Returns the gradients of a batch that goes through the model in parts.

    Args:
        loss: What is minimised.
        state: The state.
        trainable: With respect to what.
        batch: The global batch.
        key: For this step's random numbers.
        metrics: The metrics so far.
        scale: A factor for the loss, which the gradients keep; None for 1.
        num_parts: How many microbatches.
        replicas: How the batch is sharded.
        reduce_dtype: The dtype in which replicas' gradients are added; None for that
            of the parameters.

    Raises:
        StepError: If the batch does not divide.
    """
    cut = Microbatches(loss, state, trainable, batch, key, num_parts, replicas)
    given, adjoint = None, {}
    if cut.facts.order:
        given = _statistics(cut)
        adjoint = _adjoint(cut, given, scale)

    def add(carry: Any, part: Any, at: Any) -> Any:
        grads, parts, model_state, _, metrics = carry

        def one(part: Any) -> Any:
            def value(chosen: list[Any]) -> Any:
                found, aux = _lagrangian(
                    cut, chosen, given, adjoint, part, at, model_state
                )
                return scaled(found, scale), aux

            grads, (parts, outcome) = jax.grad(value, has_aux=True)(cut.chosen)
            rows = (outcome.losses, outcome.outputs)
            return (grads, parts, rows), outcome.model_state

        (new, found, rows), after = cut.over_replicas(one, part)
        each, outputs = jax.tree.map(_joined, rows)
        seen = Outcome(each, outputs, {}, None, {})
        carried = cut.carried(model_state, after)
        metrics = updated(metrics, seen, part, loss.weights_of(part))
        return (
            _add(grads, jax.tree.map(lambda g: g.astype("float32"), new)),
            _add(parts, _sum_replicas(found)),
            carried,
            after,
            metrics,
        )

    replicas_of_grads = replicas.count if cut.is_split else 1
    start = (
        [_grad_zeros(x, replicas_of_grads, replicas) for x in cut.chosen],
        {name: jnp.float32(0) for name in cut.facts.names},
        state.model_state,
        state.model_state,
        metrics,
    )
    grads, parts, _, after, metrics = cut.each(add, start)
    parts = {name: parts[name] for name in cut.facts.names}
    grads = [
        g.astype(reduce_dtype or g.dtype).sum(axis=0).astype(x.dtype)
        for g, x in zip(grads, cut.chosen, strict=True)
    ]
    share = loss.share(batch)
    after = kept_without_examples(share, state.model_state, after)
    found = Gradients(grads, parts, after, metrics)
    return with_penalties(found, loss, state, trainable, scale)


def _statistics(cut: Microbatches) -> Any:
    """Returns the whole batch's moments, normalised by themselves."""
    start = jax.tree.map(
        lambda m: Moments(
            jnp.zeros(m.first.shape),
            jnp.zeros(m.second.shape),
            jnp.ones(m.count.shape),
        ),
        cut.facts.moments,
        is_leaf=lambda x: isinstance(x, Moments),
    )

    def again(_: Any, given: Any) -> Any:
        def moments(part: Any, at: Any, state: Any) -> tuple[Any, Any]:
            _, (_, outcome, _) = cut.run(cut.chosen, given, part, at, state)
            return outcome.moments, outcome.model_state

        return _summed(cut, moments)

    return jax.lax.fori_loop(0, cut.facts.order, again, start)


def _adjoint(cut: Microbatches, given: Any, scale: Any) -> Any:
    """Returns how the whole objective depends on the statistics."""

    def again(_: Any, adjoint: Any) -> Any:
        def slope(part: Any, at: Any, state: Any) -> tuple[Any, Any]:
            def value(given: Any) -> Any:
                found, (_, outcome) = _lagrangian(
                    cut, cut.chosen, given, adjoint, part, at, state
                )
                return scaled(found, scale), outcome.model_state

            return jax.grad(value, has_aux=True)(given)

        return _unscaled(_summed(cut, slope), scale)

    start = _zeros(cut.facts.moments)
    return jax.lax.fori_loop(0, cut.facts.order, again, start)


def _summed(
    cut: Microbatches, function: Callable[[Any, Any, Any], tuple[Any, Any]]
) -> Any:
    """Returns the sum of what is like the moments, over parts and replicas.

    Args:
        cut: The batch.
        function: Of a part, its number and the model's state; returns what is summed,
            and the model's state after.
    """

    def add(carry: Any, part: Any, at: Any) -> Any:
        total, state = carry
        found, after = cut.over_replicas(lambda part: function(part, at, state), part)
        return _add(total, _sum_replicas(found)), cut.carried(state, after)

    start = _zeros(cut.facts.moments), cut.state.model_state
    return cut.each(add, start)[0]


def _lagrangian(
    cut: Microbatches,
    chosen: list[Any],
    given: Any,
    adjoint: Any,
    part: Any,
    at: Any,
    state: Any,
) -> tuple[jax.Array, tuple[dict[str, Any], Outcome]]:
    """Returns a part's share of the objective and of the statistics' adjoint."""
    value, (parts, outcome, _) = cut.run(chosen, given, part, at, state)
    terms = jax.tree.map(lambda a, m: (a * m).sum(), adjoint, outcome.moments)
    return sum(jax.tree.leaves(terms), value), (parts, outcome)


def _joined(x: jax.Array) -> jax.Array:
    """Undoes the cut over replicas."""
    return x.reshape(-1, *x.shape[2:]) if x.ndim > 1 else x[0]


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


def _sum_replicas(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sum(axis=0), tree)


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _unscaled(tree: Any, scale: Any) -> Any:
    return tree if scale is None else jax.tree.map(lambda x: x / scale, tree)


def _grad_zeros(x: jax.Array, count: int, replicas: Replicas) -> jax.Array:
    zeros = jnp.zeros((count, *x.shape), "float32")
    return replicas.constrain(zeros, 0) if count > 1 else zeros
