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
from typing import Any, cast

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


# The axes of marks: of what a function has combined, and of what it computes from the
# values of Variables that are added up.
COMBINED, ADDED_UP = "combined", "added_up"


class ReplicaTrace:
    """What one replica sees and sets in a trace; see `TraceWatch`.

    Args:
        context: The context of the replica.
        value_of: Returns a traced value of a Variable.
        decisions: What the first trace decided, for the second one to repeat.
        marks: In the first trace, bools that are mapped over the axes of marks.
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
        self.context, self._axis, self._value_of = context, context.axis_name, value_of
        self._marks, self._path_of = marks or {}, path_of
        self._earlier = None if decisions is None else iter(decisions)
        self.decisions: list[Any] = []
        # By the id of a value: the value, and the ids of Variables that are its terms.
        self.terms: dict[int, tuple[Any, frozenset[int]]] = {}
        self._averages: set[int] = set()

    def is_mapped(self, value: PyTree, axis: str | None = None) -> bool:
        """Returns whether a value is marked, or else differs between replicas."""
        name, leaves = axis or self._axis, jax.tree.leaves(value)
        return name is not None and any(_jax.is_mapped(x, name) for x in leaves)

    def marked(self, axis: str, value: PyTree) -> PyTree:
        """Returns a value with a mark, in a first trace."""
        if axis not in self._marks:
            return value
        mark = self._marks[axis]
        # A sum of constants, as the number of replicas, is a number of Python's.
        return jax.tree.map(
            lambda x: jax.lax.select_n(mark, x, x) if isinstance(x, Tracer) else x,
            value,
        )

    def _decide(self, choice: Callable[[], Any]) -> Any:
        """Decides in the first trace, and repeats that in the second."""
        earlier = self._earlier
        self.decisions.append(choice() if earlier is None else next(earlier, None))
        return self.decisions[-1]

    def summed(self, grads: PyTree) -> PyTree:
        """Returns the sums over replicas of gradients that are not combined yet."""
        if self._axis is None:
            return grads
        leaves, treedef = jax.tree.flatten(grads)
        is_combined = self._decide(
            lambda: [
                self.is_mapped(x, COMBINED) and not self.is_mapped(x) for x in leaves
            ]
        )
        combine = functools.partial(self.context.combine, ReduceOp.SUM)
        with unwatched():  # these sums are ours
            pairs = zip(leaves, is_combined, strict=True)
            sums = [x if is_whole else combine(x) for x, is_whole in pairs]
        return treedef.unflatten(sums)

    # What a watch calls.

    def meet(self, node: object, attributes: dict[str, Any]) -> None:
        """Notes that Flax's averages are sums, wherever they are updated."""
        if isinstance(node, nnx.metrics.Average):
            self._averages.update(map(id, attributes.values()))

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
        if self._marks and aggregation(variable) in ("sum", "metric"):
            value = self.marked(ADDED_UP, jax.tree.map(jnp.asarray, value))
            for x in jax.tree.leaves(value):
                self.terms[id(x)] = x, frozenset([id(variable)])
        return value

    def terms_of(self, x: Leaf) -> frozenset[int]:
        """Returns the ids of the Variables that are a term of a value."""
        return self.terms.get(id(x), (x, frozenset[int]()))[1]

    def _choose(self, kind: str, variable: Variable, new: Leaf) -> str | None:
        differs = self.is_mapped(new)
        if kind in ("mean", "first"):
            return kind if differs else None
        is_assigned = not self.is_mapped(new, ADDED_UP)
        is_combined = self.is_mapped(new, COMBINED) and not differs
        if kind == "metric" and (is_assigned or is_combined):
            return None
        if is_assigned:
            return "assign"
        terms = map(self.terms_of, jax.tree.leaves(new))
        if id(variable) in self._averages or all(id(variable) in x for x in terms):
            return "add"
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


def _summing(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def replacement(self: Any, model: Any, grads: Any, **kwargs: Any) -> Any:
        if (watch := current.get()) is not None:
            grads = jax.tree.map(_jax.in_device_memory, grads)
            grads, state = watch.replica.summed(grads), nnx.state(model)
            if any(map(_jax.is_on_host, jax.tree.leaves(state))):
                nnx.update(model, jax.tree.map(_jax.in_device_memory, state))
        return update(self, model, grads, **kwargs)

    return replacement


def _marking(reduce: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reduce)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        result, watch = reduce(*args, **kwargs), current.get()
        return result if watch is None else watch.replica.marked(COMBINED, result)

    return replacement


def _noting(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operator)
    def replacement(self: Any, other: Any) -> Any:
        result, watch = operator(self, other), current.get()
        if watch is not None and (name != "getitem" or other is ...):
            x, y = map(watch.replica.terms_of, (self, other))
            # v + v does not add to v, and neither does x - v.
            if terms := x - y if name == "sub" else x ^ y:
                watch.replica.terms[id(result)] = result, terms
        return result

    return replacement


# Optimizers have no hook between gradients and update. If Flax renames the method,
# variables differ between replicas, which is an error, and nearly every test in
# tests/test_distribute.py fails. jax.lax's functions are what all_reduce and all_gather
# call, and what a function may call itself; the operators are those of `variable += x`
# (and of `variable[...]` in flax 0.11).
patches = SharedPatches(
    (nnx.Optimizer, "update", _summing),
    *((cast("type", jax.lax), x, _marking) for x in ("psum", "pmean", "all_gather")),
    *(
        (cast("type", Tracer), f"__{name}__", functools.partial(_noting, name))
        for name in ("add", "radd", "sub", "getitem")
    ),
)
