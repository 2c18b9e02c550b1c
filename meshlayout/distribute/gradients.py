"""Gradients that optimizers add up over replicas, as those of tf.distribute do.

While a replica's function is traced, `nnx.Optimizer.update` first adds up the gradients
of all replicas, except what the function has combined itself. The first trace, under
`jax.vmap`, tells which those are: what differs between replicas has not been combined.
What is the same may not depend on the batch, as the gradients of a regularization loss,
of which each replica has its part. So what a sum over replicas returns is marked there,
by a second, otherwise unused `vmap`: JAX carries the mark along.
"""

import dataclasses
import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, cast

import jax
from flax import nnx

from meshlayout import _jax
from meshlayout._annotations import PyTree
from meshlayout._patches import SharedPatches
from meshlayout.collectives import ReduceOp, get_replica_context


class Decisions:
    """What a first trace decided at each of its steps, for later ones to repeat."""

    def __init__(self) -> None:
        self._all: list[Any] = []
        self._next: int | None = None

    def replay(self) -> None:
        """Repeats all decisions, from the first one on."""
        self._next = 0

    def of(self, decide: Callable[[], Any]) -> Any:
        """Decides, or repeats what was decided here."""
        if self._next is None:
            self._all.append(decide())
            return self._all[-1]
        self._next += 1
        return self._all[self._next - 1]


# The mapped axis of what has been combined, in a first trace.
MARKED = "combined"


@dataclasses.dataclass
class ReplicaTrace:
    """A trace of a replica's function that is under way.

    Attributes:
        decisions: What the first trace decides, and later ones repeat.
        mark: In a first trace, a bool that is mapped over the axis of marks; or None.
        increments: In a first trace, what follows values of Variables; or None.
    """

    decisions: Decisions
    mark: jax.Array | None = None
    increments: Any = None


current: ContextVar[ReplicaTrace | None] = ContextVar("replica_trace", default=None)


def summed(grads: PyTree) -> PyTree:
    """Returns gradients added up over replicas, where the function has not done that.

    Outside of a strategy's `run`, they are returned as they are.
    """
    context, trace = get_replica_context(), current.get()
    if trace is None or context is None or context.axis_name is None:
        return grads
    axis, (leaves, treedef) = context.axis_name, jax.tree.flatten(grads)

    def missing() -> list[bool]:
        return [
            _jax.is_mapped(x, axis) or not _jax.is_mapped(x, MARKED) for x in leaves
        ]

    is_missing = trace.decisions.of(missing)
    mark, trace.mark = trace.mark, None  # these sums are ours
    pairs = zip(leaves, is_missing, strict=True)
    sums = [context.combine(ReduceOp.SUM, x) if m else x for x, m in pairs]
    trace.mark = mark
    return treedef.unflatten(sums)


def _marking(reduce: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reduce)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        result, trace = reduce(*args, **kwargs), current.get()
        if trace is None or trace.mark is None:
            return result
        mark = trace.mark
        return jax.tree.map(lambda x: jax.lax.select_n(mark, x, x), result)

    return replacement


def _summing(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def replacement(self: Any, model: Any, grads: Any, **kwargs: Any) -> Any:
        if current.get() is not None:
            grads = jax.tree.map(_jax.in_device_memory, summed(grads))
            state = nnx.state(model)
            if any(map(_jax.is_on_host, jax.tree.leaves(state))):
                nnx.update(model, jax.tree.map(_jax.in_device_memory, state))
        return update(self, model, grads, **kwargs)

    return replacement


# Optimizers have no hook between gradients and update. If Flax renames the method,
# variables differ between replicas, which is an error, and nearly every test in
# tests/test_distribute.py fails. jax.lax's sums are what all_reduce calls, and what a
# function may call itself.
patches = SharedPatches(
    (nnx.Optimizer, "update", _summing),
    (cast("type", jax.lax), "psum", _marking),
    (cast("type", jax.lax), "pmean", _marking),
)
