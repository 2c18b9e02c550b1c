"""What a replica's function does to Variables and modules, watched while it is traced.

Reads and writes are watched at the slot of a Variable's value, exchanged for a property
while a trace is open. The slot itself never changes, so other threads see what they
always saw. Attributes of modules are put back after a trace.

The first trace, under `jax.vmap`, tells which values differ between replicas. Marks
tell whether an equal gradient was combined (that of a regularization loss does not
depend on the batch, and each replica has its part), and what is computed from a
Variable's old value; where they are needed, the first trace begins anew with them. A
mark is an axis of a `vmap` without another use: JAX carries it through every operation.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import tracers
from flax.nnx.pytreelib import PytreeState
from jax.core import Tracer

from meshlayout import _jax
from meshlayout._annotations import Box, Leaf, PyTree
from meshlayout._patches import SharedPatches
from meshlayout.collectives import ReduceOp, ReplicaContext
from meshlayout.distribute.variables import (
    STATE,
    TRACE,
    VALUE,
    Variable,
    aggregation,
    current,
    frozen,
    keep_numbers,
    raw_value,
    set_raw_value,
    unwatched,
)
from meshlayout.errors import StrategyError


# The axes of marks: of what the function has combined, of what it has sent around, and
# of what it computes from the values of Variables that are added up.
COMBINED, SENT, ADDED_UP = MARKS = "combined", "sent", "added_up"
GIVEN = "given"  # a term of replicated arguments and of Variables, and no mark

_trace_slot, _state_trace_slot = vars(nnx.Variable)[TRACE], vars(PytreeState)[TRACE]


class MarksNeeded(BaseException):
    """A first trace without marks has reached a point that needs them."""


class ReplicaTrace:
    """What one replica reads and sets in a trace; a context that watches this thread.

    The first trace has `path_of` for messages, and `marks` if it was restarted; the
    second one repeats the first one's `decisions`.
    """

    def __init__(
        self,
        context: ReplicaContext,
        value_of: Callable[[Variable], Any],
        path_of: Callable[[Variable], str] = str,
        marks: dict[str, jax.Array] | None = None,
        decisions: list[Any] | None = None,
    ) -> None:
        self.context, self._axis, self._value_of = context, context.axis_name, value_of
        self._path_of, self._marks, self.used = path_of, marks or {}, set[str]()
        self._earlier = None if decisions is None else iter(decisions)
        self.decisions: list[Any] = []
        self._level, self._trace = tracers.TraceState(), _jax.current_trace()
        # What the objects belong to that are made in this trace, by id.
        self._levels: dict[int, Any] = {}
        # By id: Variables from outside that were read or set, with their first values;
        # their current values; modules that were used, with their first attributes.
        self.entered: dict[int, tuple[Variable, Any]] = {}
        self.values: dict[int, Any] = {}
        self.nodes: dict[int, tuple[Any, dict[str, Any], Any]] = {}
        # By the id of a value: the value, and the ids of its terms, with COMBINED or
        # GIVEN if it is (a multiple of) such a value.
        self._terms: dict[int, tuple[Any, frozenset[Any]]] = {}
        # The ids of Variables whose old values are marked.
        self._added_up: set[int] = set()

    def __enter__(self) -> "ReplicaTrace":
        self._token = current.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        current.reset(self._token)
        for node, before, _ in self.nodes.values():
            vars(node).clear()
            vars(node).update(before)

    def meet(self, node: Any) -> None:
        """Notes a module from outside, whose attributes are restored and compared."""
        if id(node) not in self.nodes:
            live = object.__getattribute__(node, "__dict__")
            state = live.get(STATE)
            if state is not None and not self._is_made(state, _state_trace_slot):
                if issubclass(type(node), nnx.Optimizer):
                    keep_numbers(live["opt_state"], _state_trace_slot.__get__(state))
                self.nodes[id(node)] = node, dict(live), frozen(live)

    def check_attributes(self, name: str) -> None:
        """Refuses a function that changes modules in Python, once for all calls."""
        for node, _, before in self.nodes.values():
            now = frozen(object.__getattribute__(node, "__dict__"))
            keys = {**before, **now}
            for key in [x for x in keys if before.get(x, ...) != now.get(x, ...)]:
                msg = f"run: {name} changes {type(node).__name__}.{key}. It runs in "
                msg += "Python once per compiled program, not at every call: create "
                msg += "variables before the call, set them with variable[...] = value,"
                msg += " return other values (nnx.pop takes out what sow() keeps), "
                msg += "call model.eval() outside, leave out nnx.jit around updates."
                raise StrategyError(msg)

    def read(self, variable: Variable, _: object) -> Any:
        """Returns the value of a Variable that code in the trace reads."""
        value = self.value(variable)
        if id(variable) in self._added_up:
            self.used.add(ADDED_UP)
        return value

    def value(self, variable: Variable) -> Any:
        """Returns it without a note of that."""
        key = id(variable)
        if key not in self.values:
            if self._is_made(variable, _trace_slot):
                return raw_value(variable)
            # Of the whole function, wherever in it, as in a scan, the value is read.
            with unwatched(), _jax.in_trace(self._trace):
                self.values[key] = value = self._enter(variable)
            self.entered[key] = variable, value
        return self.values[key]

    def set(self, variable: Variable, _: object, value: Leaf) -> None:
        """Sets the value of a Variable in the trace to what the replica writes."""
        if self._is_made(variable, _trace_slot):
            set_raw_value(variable, value)
            return
        old, kind = self.value(variable), aggregation(variable)
        if self._axis and value is not old and kind not in (None, "per_replica"):
            with unwatched():
                how = self._decide(lambda: self._choose(kind, variable, value))
                if how is not None:
                    combine = functools.partial(self._combined, how)
                    value = jax.tree.map(combine, old, value)
                value = self._followed(variable, value)
        self.values[id(variable)] = value

    def changed(self) -> list[Variable]:
        """Returns the Variables whose values have changed since they entered."""

        def is_changed(variable: Variable, before: Leaf) -> bool:
            old, structure = jax.tree.flatten(before)
            new, new_structure = jax.tree.flatten(self.values[id(variable)])
            return structure != new_structure or [*map(id, old)] != [*map(id, new)]

        entered = self.entered.values()
        # Keys stay what they are: nnx.scan hands a replica's own back as new arrays.
        changed = [x for x, before in entered if is_changed(x, before)]
        return [x for x in changed if not isinstance(x, nnx.RngKey)]

    def level(self, holder: Box, slot: Any) -> Any:
        """Returns the trace that may change a Variable, or a module by its state."""
        return slot.__get__(holder) if self._is_made(holder, slot) else self._level

    def set_level(self, holder: Box, slot: Any, level: Any) -> None:
        """Sets it for what is made in this trace."""
        self._levels[id(level)] = level
        slot.__set__(holder, level)

    def _is_made(self, holder: Box, slot: Any) -> bool:
        """Returns whether an object was, or is being, made in this trace."""
        try:
            return id(slot.__get__(holder)) in self._levels
        except AttributeError:
            return True

    def _enter(self, variable: Variable) -> Any:
        value = self.context.strategy._entered(variable, self._value_of(variable))

        def own(x: Leaf) -> Any:
            is_typed = _jax.is_extended(jax.typeof(x).dtype)
            if not self._axis or not (is_typed or isinstance(variable, nnx.RngKey)):
                return x
            # So replicas drop different features. Layers of a scan have several keys.
            fold_in = jax.random.fold_in
            for _ in range(x.ndim if is_typed else x.ndim - 1):
                fold_in = jax.vmap(fold_in, in_axes=(0, None))
            return fold_in(x, jax.lax.axis_index(self._axis))

        return self._followed(variable, jax.tree.map(own, value))

    def differs(self, value: PyTree, mark: str | None = None) -> bool:
        """Returns whether a value differs between replicas, or has a mark."""
        axis, leaves = mark or self._axis, jax.tree.leaves(value)
        return axis is not None and any(_jax.is_mapped(x, axis) for x in leaves)

    def mark(self, mark: str, value: PyTree, *terms: Any) -> PyTree:
        """Returns a value with a mark, which its derivatives lack, and notes it."""
        axis = self._marks.get(mark)

        def add(x: Leaf) -> Any:
            # A sum of constants, as the number of replicas, is a number.
            if axis is not None and isinstance(x, Tracer):
                x = x + axis.astype(x.dtype)
            self.note_terms(x, frozenset(terms))
            return x

        return jax.tree.map(add, value)

    def _is_marked(self, mark: str, value: PyTree) -> bool:
        if mark in self.used and not self._marks:
            raise MarksNeeded
        return self.differs(value, mark)

    def _is_combined(self, value: PyTree) -> bool:
        if self.differs(value):
            return False
        is_known = all(COMBINED in self.terms_of(x) for x in jax.tree.leaves(value))
        return is_known or self._is_marked(COMBINED, value)

    def _decide(self, choice: Callable[[], Any]) -> Any:
        """Decides in the first trace, and repeats the decision in the second."""
        earlier = self._earlier
        self.decisions.append(choice() if earlier is None else next(earlier, None))
        return self.decisions[-1]

    def summed(self, grads: PyTree) -> PyTree:
        """Returns the sums over replicas of gradients that are not combined yet."""
        # Those from outside are, unless others differ: then, equal ones are parts, too.
        given = frozenset([GIVEN] * (not self.differs(grads)))
        summed = functools.partial(self._summed, given)
        return jax.tree.map(summed, grads) if self._axis else grads

    def _summed(self, given: frozenset[str], x: Leaf) -> Any:
        terms = self.terms_of(x) if isinstance(x, Tracer) else {GIVEN}
        if self._decide(lambda: bool(given & terms) or self._is_combined(x)):
            return x
        if self._earlier is None and self._is_marked(SENT, x) and self.differs(x):
            raise StrategyError(
                "the gradients given to optimizer.update are computed from what "
                "jax.lax.ppermute has sent between replicas, and may be their sum "
                "already. Add them up by get_replica_context().all_reduce('SUM', "
                "grads), or send within the function that is differentiated."
            )
        with unwatched():  # this sum is ours
            return self.context.combine(ReduceOp.SUM, x)

    def _followed(self, variable: Variable, value: Any) -> Any:
        """Marks a value that is summed, to see what is computed from it."""
        if self._earlier is None and aggregation(variable) in ("sum", "metric"):
            self._added_up.add(id(variable))
            value = jax.tree.map(jnp.asarray, value)
            return self.mark(ADDED_UP, value, id(variable), GIVEN)
        return self.mark("", value, GIVEN)

    def note_terms(self, x: Leaf, terms: frozenset[Any]) -> None:
        """Notes the ids of Variables and values to which others were added for this."""
        self._terms[id(x)] = x, terms

    def terms_of(self, x: Leaf) -> frozenset[Any]:
        """Returns these ids."""
        return self._terms.get(id(x), (x, frozenset[Any]()))[1]

    def _choose(self, kind: str | None, variable: Variable, new: Leaf) -> str | None:
        if kind in ("mean", "first"):
            return kind if self.differs(new) else None
        if kind == "metric" and self._is_combined(new):
            return None
        if all(id(variable) in self.terms_of(x) for x in jax.tree.leaves(new)):
            return "add"
        if not self._is_marked(ADDED_UP, new):
            return "assign" if kind == "sum" else None
        raise StrategyError(
            f"the new value of the variable {self._path_of(variable)} is computed from "
            "the old one. Write `variable[...] += change`, outside of nnx.jit, which "
            "is added up; or combine what differs, as all_reduce('MAX', x) does, and "
            "set a variable without aggregation='sum'."
        )

    def _combined(self, how: str, old: Leaf, new: Leaf) -> jax.Array:
        context, new, op = self.context, jnp.asarray(new), ReduceOp.SUM
        if how == "add":
            value = old + context.combine(op, new - old)
        elif how in ("assign", "first"):
            counts = how == "assign" or context.replica_id_in_sync_group == 0
            value = context.combine(op, jnp.where(counts, new, jnp.zeros_like(new)))
        elif context.mask is None:
            value = context.combine(ReduceOp.MEAN, new)
        else:  # of those replicas that have any real row; if none has, of all
            has_rows = context.mask.any()
            has_rows |= ~jax.lax.pmax(has_rows, self._axis)
            count = context.combine(op, has_rows.astype("float32"))
            value = context.combine(op, jnp.where(has_rows, new, 0)) / count
        return value.astype(new.dtype)


# The patches. Outside of a trace, and for other threads, they do nothing.


def _watched(read: Any, write: Any) -> Callable[[Any], property]:
    def make(slot: Any) -> property:
        def get(holder: Box) -> Any:
            trace = current.get()
            return slot.__get__(holder) if trace is None else read(trace, holder, slot)

        def put(holder: Box, value: Leaf) -> None:
            trace = current.get()
            if trace is None:
                slot.__set__(holder, value)
            else:
                write(trace, holder, slot, value)

        return property(get, put)

    return make


def _meeting(getattribute: Any) -> Any:
    def __getattribute__(self: Any, name: str) -> Any:  # noqa: N807
        if (trace := current.get()) is not None:
            trace.meet(self)
        return getattribute(self, name)

    return __getattribute__


def _setting(set_value: Any) -> Any:
    def replacement(self: Any, value: Any, **options: Any) -> None:
        trace, is_whole = current.get(), options.get("index", ...) is ...
        if trace is None or not is_whole or "on_set_value" in self.get_metadata():
            set_value(self, value, **options)
            return
        if options:  # Flax would compute `variable[...] = 0` from the old value
            old = trace.value(self)
            value = jnp.broadcast_to(jnp.asarray(value, old.dtype), old.shape)
        setattr(self, VALUE, value)

    return replacement


def _summing(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def replacement(self: Any, model: Any, grads: Any, **kwargs: Any) -> Any:
        if (trace := current.get()) is not None:
            grads = jax.tree.map(_jax.in_device_memory, grads)
            grads, state = trace.summed(grads), nnx.state(model)
            if any(map(_jax.is_on_host, jax.tree.leaves(state))):
                nnx.update(model, jax.tree.map(_jax.in_device_memory, state))
        return update(self, model, grads, **kwargs)

    return replacement


def _marking(mark: str, sends: Any, bind: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(*args: Any, **params: Any) -> Any:
        trace = current.get()
        with unwatched():  # derivatives are sent as well, and have no marks
            result = bind(sends, *args, **params)
        axes = params.get("axes", params.get("axis_name", ()))
        # What a loss has sent is sent back for its gradients, which combines nothing.
        if trace is None or _jax.is_transposing():
            return result
        if str(trace.context.axis_name) not in axes:
            return result
        trace.used.add(mark)
        return trace.mark(mark, result, mark)

    return replacement


def _noting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def replacement(self: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        result, trace = method(self, other, *args, **kwargs), current.get()
        if trace is not None and (name != "__getitem__" or other is ...):
            x, y = map(trace.terms_of, (self, other))
            # v + v does not add to v, and neither do x - v or v / 2.
            terms = x - y if name == "__sub__" else x ^ y
            if name in ("__add__", "__radd__", "__sub__"):
                terms = (terms - {GIVEN}) | (x & y & {GIVEN})  # not a gradient plus v
            if name in ("__mul__", "__rmul__", "__truediv__"):
                terms = (x | y) & {COMBINED, GIVEN}
            trace.note_terms(result, terms)
        return result

    return replacement


_CONVERTS: Any = jax.lax.convert_element_type_p
_levels = _watched(ReplicaTrace.level, ReplicaTrace.set_level)
_set_value = [(nnx.Variable, "set_value", _setting)] if VALUE == "_raw_value" else []
# Optimizers have no hook between gradients and update. If Flax renames the method,
# nearly every test in tests/test_distribute.py fails. The operators are those of
# `variable += x` (and of `variable[...]` in flax 0.11).
patches = SharedPatches(
    (nnx.Variable, VALUE, _watched(ReplicaTrace.read, ReplicaTrace.set)),
    (nnx.Variable, TRACE, _levels),
    (PytreeState, TRACE, _levels),
    (nnx.Pytree, "__getattribute__", _meeting),
    *_set_value,
    (nnx.Optimizer, "update", _summing),
    *(
        (cast("type", sends), "bind", functools.partial(_marking, mark, sends))
        for mark, collectives in ((COMBINED, _jax.COMBINING), (SENT, _jax.SENDING))
        for sends in collectives
    ),
    *(
        (cast("type", Tracer), name, functools.partial(_noting, name))
        for name in (
            *("__add__", "__radd__", "__sub__", "__getitem__"),
            *("__mul__", "__rmul__", "__truediv__"),
        )
    ),
    (_CONVERTS, "bind", lambda x: functools.partial(_noting("bind", x), _CONVERTS)),
)
