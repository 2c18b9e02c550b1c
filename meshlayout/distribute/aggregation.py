"""How the values of replicas become one: of gradients, and of Variables that are set.

As in tf.distribute, optimizers add up the gradients of all replicas, except what the
function has combined itself, and a Variable says how what replicas write is combined.
The first trace, under `jax.vmap`, tells which values differ between replicas. It does
not tell whether an equal value has been combined: the gradients of a regularization
loss do not depend on the batch, and each replica has its part. Nor does it tell whether
a new value is computed from the old one. Where that has to be known, the first trace
begins anew with marks on what collectives return, and on the values of Variables that
are added up. A mark is an axis of a `vmap` that has no other use: JAX carries it along,
through every operation and transformation.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from meshlayout import _jax
from meshlayout._annotations import Leaf, PyTree
from meshlayout._patches import SharedPatches
from meshlayout.collectives import ReduceOp, ReplicaContext
from meshlayout.distribute.variables import (
    TraceWatch,
    Variable,
    aggregation,
    current,
    unwatched,
)
from meshlayout.errors import StrategyError


# The axes of marks: of what the function has combined, of what it has sent around, and
# of what it computes from the values of Variables that are added up.
COMBINED, SENT, ADDED_UP = MARKS = "combined", "sent", "added_up"


class MarksNeeded(BaseException):
    """A first trace without marks has come to where they are needed."""


class ReplicaTrace(TraceWatch):
    """What one replica sees and sets in a trace.

    Args:
        context: The context of the replica.
        value_of: Returns a traced value of a Variable.
        decisions: What the first trace decided, for the second one to repeat.
        marks: In a first trace with marks, bools that are mapped over their axes.
        path_of: Returns the path of a Variable, for messages.
    """

    def __init__(
        self,
        context: ReplicaContext,
        value_of: Callable[[Variable], Any],
        decisions: list[Any] | None = None,
        marks: dict[str, jax.Array] | None = None,
        path_of: Callable[[Variable], str] = str,
    ) -> None:
        super().__init__()
        self.context, self._axis, self._value_of = context, context.axis_name, value_of
        self._marks, self._path_of, self._used = marks or {}, path_of, set[str]()
        self._earlier = None if decisions is None else iter(decisions)
        self.decisions: list[Any] = []
        # By the id of a value: the value, and the ids of what is a term of it.
        self.terms: dict[int, tuple[Any, frozenset[int]]] = {}

    def differs(self, value: PyTree) -> bool:
        """Returns whether a value differs between replicas, in a first trace."""
        return self._has_axis(value, self._axis)

    def _has_axis(self, value: PyTree, axis: str | None) -> bool:
        leaves = jax.tree.leaves(value)
        return axis is not None and any(_jax.is_mapped(x, axis) for x in leaves)

    def _is_marked(self, mark: str, value: PyTree) -> bool:
        if mark in self._used and not self._marks:
            raise MarksNeeded
        return self._has_axis(value, mark)

    def marked(self, mark: str, value: PyTree) -> PyTree:
        """Returns a value with a mark, which its derivatives do not have."""
        self._used.add(mark)
        if mark not in self._marks:
            return value

        def add(x: Leaf) -> Any:
            if not isinstance(x, Tracer) or _jax.is_extended(x.dtype):
                return x  # a sum of constants, as the number of replicas, is a number
            return x + self._marks[mark].astype(x.dtype)

        return jax.tree.map(add, value)

    def _decide(self, choice: Callable[[], Any]) -> Any:
        """Decides in the first trace, and repeats that in the second."""
        earlier = self._earlier
        self.decisions.append(choice() if earlier is None else next(earlier, None))
        return self.decisions[-1]

    def _is_combined(self, value: PyTree) -> bool:
        return not self.differs(value) and self._is_marked(COMBINED, value)

    def summed(self, grads: PyTree) -> PyTree:
        """Returns the sums over replicas of gradients that are not combined yet."""
        if self._axis is None:
            return grads

        def combine(x: Leaf) -> Any:
            if self._decide(lambda: self._is_combined(x)):
                return x
            if self._earlier is None and self._is_marked(SENT, x) and self.differs(x):
                msg = (
                    "the gradients given to optimizer.update are computed from what "
                    "jax.lax.ppermute has sent between replicas, and may be their sum "
                    "already. Add them up by get_replica_context().all_reduce('SUM', "
                    "grads), or send within the function that is differentiated."
                )
                raise StrategyError(msg)
            with unwatched():  # this sum is ours
                return self.context.combine(ReduceOp.SUM, x)

        return jax.tree.map(combine, grads)

    def enter(self, variable: Variable) -> Any:
        """Returns the value that a Variable has when it is met first."""
        value = self.context.strategy._entered(variable, self._value_of(variable))

        def own(x: Leaf) -> Any:
            is_typed = _jax.is_extended(jax.typeof(x).dtype)
            if not self._axis or not (is_typed or isinstance(variable, nnx.RngKey)):
                return x
            # Otherwise all replicas would drop the same features. The layers of a scan
            # have an array of keys.
            fold_in = jax.random.fold_in
            for _ in range(x.ndim if is_typed else x.ndim - 1):
                fold_in = jax.vmap(fold_in, in_axes=(0, None))
            return fold_in(x, jax.lax.axis_index(self._axis))

        return self._followed(variable, jax.tree.map(own, value))

    def write(self, variable: Variable, old: Leaf, new: Leaf) -> Any:
        """Returns the value that a Variable gets, of what the replica writes."""
        kind = aggregation(variable)
        if self._axis is None or new is old or kind in (None, "per_replica"):
            return new
        how = self._decide(lambda: self._choose(kind, variable, new))
        if how is not None:
            new = jax.tree.map(functools.partial(self._combined, how), old, new)
        return self._followed(variable, new)

    def _followed(self, variable: Variable, value: Any) -> Any:
        """Marks a value that is added up, to see what is computed from it."""
        if self._earlier is None and aggregation(variable) in ("sum", "metric"):
            value = self.marked(ADDED_UP, jax.tree.map(jnp.asarray, value))
            self.note(value, id(variable))
        return value

    def note(self, value: PyTree, key: int) -> None:
        """Notes what the leaves of a value are, to see where they are terms."""
        for x in jax.tree.leaves(value):
            self.terms[id(x)] = x, frozenset([key])

    def terms_of(self, x: Leaf) -> frozenset[int]:
        """Returns the ids of what is a term of a value."""
        return self.terms.get(id(x), (x, frozenset[int]()))[1]

    def _choose(self, kind: str, variable: Variable, new: Leaf) -> str | None:
        if kind in ("mean", "first"):
            return kind if self.differs(new) else None
        if kind == "metric" and self._is_combined(new):
            return None
        if all(id(variable) in self.terms_of(x) for x in jax.tree.leaves(new)):
            return "add"
        if not self._is_marked(ADDED_UP, new):
            return "assign" if kind == "sum" else None
        msg = (
            f"the new value of the variable {self._path_of(variable)} is computed from "
            "the old one, and not by `variable[...] += change`, which would be added "
            "up. Write that, outside of nnx.jit; or combine what differs, as "
            "get_replica_context().all_reduce('MAX', x) does, and set a variable "
            "without aggregation='sum'."
        )
        raise StrategyError(msg)

    def _combined(self, how: str, old: Leaf, new: Leaf) -> jax.Array:
        context, new, op = self.context, jnp.asarray(new), ReduceOp.SUM
        if how == "add":
            value = old + context.combine(op, new - old)
        elif how == "assign":
            value = context.combine(op, new)
        elif how == "first":
            is_first = context.replica_id_in_sync_group == 0
            value = context.combine(op, jnp.where(is_first, new, jnp.zeros_like(new)))
        elif context.mask is None:
            value = context.combine(ReduceOp.MEAN, new)
        else:  # of those replicas that have any real row; if none has, of all
            has_rows = context.mask.any()
            has_rows |= ~jax.lax.pmax(has_rows, self._axis)
            count = context.combine(op, has_rows.astype("float32"))
            value = context.combine(op, jnp.where(has_rows, new, 0)) / count
        return value.astype(new.dtype)


# The patches. Outside of a trace, and for other threads, they do nothing.


def _trace() -> ReplicaTrace | None:
    return cast("ReplicaTrace | None", current.get())


def _summing(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def replacement(self: Any, model: Any, grads: Any, **kwargs: Any) -> Any:
        if (trace := _trace()) is not None:
            grads = jax.tree.map(_jax.in_device_memory, grads)
            grads, state = trace.summed(grads), nnx.state(model)
            if any(map(_jax.is_on_host, jax.tree.leaves(state))):
                nnx.update(model, jax.tree.map(_jax.in_device_memory, state))
        return update(self, model, grads, **kwargs)

    return replacement


def _marking(mark: str, sends: Any, bind: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(*args: Any, **params: Any) -> Any:
        result, trace = bind(sends, *args, **params), _trace()
        # What a loss has sent is sent back for its gradients, which combines nothing.
        if trace is None or _jax.is_transposing():
            return result
        return trace.marked(mark, result)

    return replacement


def _noting(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operator)
    def replacement(self: Any, other: Any) -> Any:
        result, trace = operator(self, other), _trace()
        if trace is not None and (name != "getitem" or other is ...):
            x, y = map(trace.terms_of, (self, other))
            # v + v does not add to v, and neither does x - v.
            if terms := x - y if name == "sub" else x ^ y:
                trace.terms[id(result)] = result, terms
        return result

    return replacement


# Optimizers have no hook between gradients and update. If Flax renames the method,
# variables differ between replicas, which is an error, and nearly every test in
# tests/test_distribute.py fails. The operators are those of `variable += x` (and of
# `variable[...]` in flax 0.11).
patches = SharedPatches(
    (nnx.Optimizer, "update", _summing),
    *((x, "bind", functools.partial(_marking, COMBINED, x)) for x in _jax.COMBINING),
    (_jax.SENDING, "bind", functools.partial(_marking, SENT, _jax.SENDING)),
    *(
        (cast("type", Tracer), f"__{name}__", functools.partial(_noting, name))
        for name in ("add", "radd", "sub", "getitem")
    ),
)
