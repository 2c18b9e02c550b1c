"""How the values of replicas become one: of gradients, and of Variables that are set.

As in tf.distribute, optimizers add up the gradients of all replicas, except what the
function has combined itself, and a Variable says how what replicas write is combined.
The first trace, under `jax.vmap`, tells which values differ between replicas. It does
not tell whether an equal value has been combined: the gradients of a regularization
loss do not depend on the batch, and each replica has its part. Nor does it tell whether
a new value is computed from the old one. So sums over replicas are marked there, and
the values of Variables that are added up, each by a `vmap` that has no other use: JAX
carries marks along, through every operation and transformation.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from meshlayout import _jax
from meshlayout._annotations import Leaf, PyTree
from meshlayout._patches import SharedPatches
from meshlayout.collectives import ReduceOp, ReplicaContext
from meshlayout.distribute.variables import Variable, aggregation, current, unwatched
from meshlayout.errors import StrategyError


T = TypeVar("T")

# The axes of marks: of what a function has combined, and of what it computes from the
# values of Variables that are added up.
COMBINED, ADDED_UP = "combined", "added_up"


class ReplicaTrace:
    """What is combined in one trace of a replica's function; see `TraceWatch`.

    Args:
        context: The context of the replica.
        value_of: Returns a traced value of a Variable.
        decisions: What the first trace decided, for another one to repeat.
        marks: In a first trace, bools that are mapped over the axes of marks.
        path_of: Returns the path of a Variable, for messages.

    Attributes:
        context: As given.
        decisions: What has been decided, in order.
    """

    def __init__(
        self,
        context: ReplicaContext,
        value_of: Callable[[Variable], Any],
        decisions: list[Any] | None = None,
        marks: dict[str, jax.Array] | None = None,
        path_of: Callable[[Variable], str] = str,
    ) -> None:
        self.context, self._axis, self._value_of = context, context.axis_name, value_of
        self._path_of, self._marks = path_of, marks or {}
        self._earlier = None if decisions is None else iter(decisions)
        self.decisions: list[Any] = []
        # The Variables that are a term of a value, by its id; the value is kept alive.
        self._terms: dict[int, tuple[Any, frozenset[int]]] = {}
        self._averages: set[int] = set()

    def differs(self, value: PyTree) -> bool:
        """Returns whether a value differs between replicas, in a first trace."""
        return self._is_mapped(value, self._axis)

    def _is_mapped(self, value: PyTree, axis: str | None) -> bool:
        leaves = jax.tree.leaves(value)
        return axis is not None and any(_jax.is_mapped(x, axis) for x in leaves)

    def _decide(self, choice: Callable[[], T]) -> T:
        """Decides in the first trace, and repeats that in later ones."""
        self.decisions.append(
            choice() if self._earlier is None else next(self._earlier, None)
        )
        return self.decisions[-1]

    def marked(self, axis: str, value: PyTree) -> PyTree:
        """Returns a value with a mark."""
        mark = self._marks.get(axis)
        if mark is None:
            return value
        # A sum of constants, such as the number of replicas, is a number of Python's.
        return jax.tree.map(
            lambda x: jax.lax.select_n(mark, x, x) if isinstance(x, Tracer) else x,
            value,
        )

    def summed(self, grads: PyTree) -> PyTree:
        """Returns the sums over replicas of gradients that are not combined yet."""
        leaves, treedef = jax.tree.flatten(grads)

        def missing() -> list[bool]:
            return [self.differs(x) or not self._is_mapped(x, COMBINED) for x in leaves]

        if self._axis is None:
            return grads
        combine = self.context.combine
        with unwatched():  # these sums are ours
            pairs = zip(leaves, self._decide(missing), strict=True)
            sums = [combine(ReduceOp.SUM, x) if m else x for x, m in pairs]
        return treedef.unflatten(sums)

    # What a watch calls.

    def meet(self, node: object, attributes: dict[str, Any]) -> None:
        """Notes that Flax's averages are sums, wherever their update adds to them."""
        if isinstance(node, nnx.metrics.Average):
            self._averages.update(map(id, attributes.values()))

    def enter(self, variable: Variable) -> Any:
        """Returns the value that a Variable has in the trace, when it is met first."""
        value = self.context.strategy._entered(variable, self._value_of(variable))
        return self._followed(variable, jax.tree.map(self._own_key(variable), value))

    def _own_key(self, variable: Variable) -> Callable[[Leaf], Any]:
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

        return own

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
        is_added_up = aggregation(variable) in ("sum", "metric")
        if not is_added_up or ADDED_UP not in self._marks:
            return value
        value = self.marked(ADDED_UP, jax.tree.map(jnp.asarray, value))
        for x in jax.tree.leaves(value):
            self._terms[id(x)] = x, frozenset([id(variable)])
        return value

    def note_sum(self, x: Leaf, y: Leaf, result: Leaf, *, is_added: bool) -> None:
        """Notes that a value is `x + y`, or another one with the terms of `x` alone."""
        _, terms = self._terms.get(id(x), _NO_TERMS)
        _, others = self._terms.get(id(y), _NO_TERMS)
        # v + v is no change of v, nor is x - v.
        terms = terms ^ others if is_added else terms - others
        if terms:
            self._terms[id(result)] = result, terms

    def _choose(self, kind: str, variable: Variable, new: Leaf) -> str | None:
        if kind in ("mean", "first"):
            return kind if self.differs(new) else None
        is_assigned = not self._is_mapped(new, ADDED_UP)
        is_combined = self._is_mapped(new, COMBINED) and not self.differs(new)
        if kind == "metric" and (is_assigned or is_combined):
            return None
        if is_assigned:
            return "assign"
        terms = [self._terms.get(id(x), _NO_TERMS)[1] for x in jax.tree.leaves(new)]
        if id(variable) in self._averages or all(id(variable) in t for t in terms):
            return "add"
        path = self._path_of(variable)
        msg = (
            f"the new value of the variable {path} is computed from the old one, and "
            "it is unknown how those of all replicas become one. What is added up over "
            "replicas is changed by `variable[...] += change`, outside of nnx.jit; "
            "combine other values first, as get_replica_context().all_reduce('MAX', x) "
            'does, and make the variable with nnx.Variable(x, aggregation="mean").'
        )
        raise StrategyError(msg)

    def _combined(self, how: str, old: Leaf, new: Leaf) -> jax.Array:
        context, new = self.context, jnp.asarray(new)
        if how == "mean":
            return self._mean(new)
        if how == "first":
            is_first = context.replica_id_in_sync_group == 0
            chosen = jnp.where(is_first, new, jnp.zeros_like(new))
            return context.combine(ReduceOp.SUM, chosen).astype(new.dtype)
        if how == "assign":
            return context.combine(ReduceOp.SUM, new).astype(new.dtype)
        return (old + context.combine(ReduceOp.SUM, new - old)).astype(new.dtype)

    def _mean(self, x: jax.Array) -> jax.Array:
        """Returns the mean of the values of those replicas that have any real row."""
        context = self.context
        if context.mask is None:
            return context.combine(ReduceOp.MEAN, x).astype(x.dtype)
        has_rows = context.mask.any()
        # Without any such replica, all of them count.
        has_rows |= ~jax.lax.pmax(has_rows, context.axis_name)
        total = context.combine(ReduceOp.SUM, jnp.where(has_rows, x, 0))
        count = context.combine(ReduceOp.SUM, has_rows.astype("float32"))
        return (total / count).astype(x.dtype)


_NO_TERMS: tuple[None, frozenset[int]] = (None, frozenset())


def _marking(reduce: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reduce)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        result, watch = reduce(*args, **kwargs), current.get()
        return result if watch is None else watch.replica.marked(COMBINED, result)

    return replacement


def _noting(operator: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operator)
    def replacement(self: Tracer, other: Any) -> Any:
        result, watch = operator(self, other), current.get()
        if watch is not None and (other is ... or operator.__name__ != "__getitem__"):
            is_added = operator.__name__ in ("__add__", "__radd__")
            watch.replica.note_sum(self, other, result, is_added=is_added)
        return result

    return replacement


def _summing(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def replacement(self: Any, model: Any, grads: Any, **kwargs: Any) -> Any:
        if (watch := current.get()) is not None:
            grads = watch.replica.summed(grads)
            grads = jax.tree.map(_jax.in_device_memory, grads)
            state = nnx.state(model)
            if any(map(_jax.is_on_host, jax.tree.leaves(state))):
                nnx.update(model, jax.tree.map(_jax.in_device_memory, state))
        return update(self, model, grads, **kwargs)

    return replacement


# Optimizers have no hook between gradients and update. If Flax renames the method,
# variables differ between replicas, which is an error, and nearly every test in
# tests/test_distribute.py fails. jax.lax's functions are what all_reduce and all_gather
# call, and what a function may call itself; the operators are those of `variable += x`,
# where "__getitem__" is how flax 0.11 reads `variable[...]`.
patches = SharedPatches(
    (nnx.Optimizer, "update", _summing),
    *((cast("type", jax.lax), x, _marking) for x in ("psum", "pmean", "all_gather")),
    *(
        (cast("type", Tracer), f"__{name}__", _noting)
        for name in ("add", "radd", "sub", "getitem")
    ),
)
