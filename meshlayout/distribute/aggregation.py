"""What becomes of a Variable that replicas set to different values.

A value is combined when it is written, as in TensorFlow: what a function reads after
that is the value of all replicas.
"""

from typing import Any

import jax
import jax.numpy as jnp

from meshlayout import _jax
from meshlayout._annotations import Leaf
from meshlayout.collectives import ReduceOp, ReplicaContext
from meshlayout.distribute.gradients import ReplicaTrace
from meshlayout.distribute.variables import TraceWatch, Variable, aggregation
from meshlayout.errors import StrategyError


class Combination:
    """Combines what replicas write; see `TraceWatch`.

    Args:
        context: The context of the replica.
        trace: The trace that is under way.

    Attributes:
        watch: The watch that calls it.
    """

    def __init__(self, context: ReplicaContext, trace: ReplicaTrace) -> None:
        self._context, self._trace = context, trace
        self.watch: TraceWatch | None = None

    def __call__(self, variable: Variable, old: Leaf, new: Leaf) -> Any:
        """Returns the value that a Variable gets, of what is written."""
        if new is old or self._context.axis_name is None:
            return new
        kind = aggregation(variable, self.watch)
        if kind is None or kind == "per_replica":
            return new
        how = self._trace.decisions.of(lambda: self._decide(kind, variable, new))
        if how is None:
            return new
        value = jax.tree.map(lambda a, b: self._combined(how, a, b), old, new)
        if self._trace.increments is not None:
            self._trace.increments.start(variable, value)
        return value

    def _decide(self, kind: str, variable: Variable, new: Leaf) -> str | None:
        axis = self._context.axis_name or ""
        differs = any(_jax.is_mapped(x, axis) for x in jax.tree.leaves(new))
        if kind in ("mean", "first"):
            return kind if differs else None
        is_increment = self._trace.increments.is_increment(variable, new)
        if kind == "increments":
            return "add" if is_increment else None
        was_read = self.watch is not None and id(variable) in self.watch.was_read
        return "assign" if is_increment is False or not was_read else "add"

    def _combined(self, how: str, old: Leaf, new: Leaf) -> jax.Array:
        context, new = self._context, jnp.asarray(new)
        if how == "mean":
            return self._mean(new)
        if how == "first":
            is_first = context.replica_id_in_sync_group == 0
            chosen = jnp.where(is_first, new, jnp.zeros_like(new))
            return context.combine(ReduceOp.SUM, chosen).astype(new.dtype)
        if new.dtype == jnp.bool_:
            msg = "a variable of booleans has aggregation='sum', and cannot be summed."
            raise StrategyError(msg)
        change = context.combine(ReduceOp.SUM, new - old if how == "add" else new)
        return (old + change if how == "add" else change).astype(jnp.asarray(old).dtype)

    def _mean(self, x: jax.Array) -> jax.Array:
        """Returns the mean of the values of those replicas that have any real row."""
        context = self._context
        if context.mask is None or context.axis_name is None:
            return context.combine(ReduceOp.MEAN, x).astype(x.dtype)
        is_counted = context.mask.any()
        # Without any such replica, all of them count.
        is_counted |= ~jax.lax.pmax(is_counted, context.axis_name)
        total = context.combine(ReduceOp.SUM, jnp.where(is_counted, x, 0))
        count = context.combine(ReduceOp.SUM, is_counted.astype("float32"))
        return (total / count).astype(x.dtype)
