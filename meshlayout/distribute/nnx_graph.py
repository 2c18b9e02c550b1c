"""NNX objects taken apart, compared, and put in place again.

All private parts of Flax that `meshlayout.distribute` touches are named here.
"""

import contextlib
import functools
import inspect
import itertools
import operator
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import jax
from flax import nnx
from flax.nnx import tracers
from jax.core import Tracer

from meshlayout import _checks, _paths


NnxObject: TypeAlias = "nnx.Pytree | nnx.Variable[Any]"

ONLY_ONCE = (
    "The function runs once per compiled program, not at every call, so this would "
    "happen only once."
)

# Flax's private attributes, none of which has a public counterpart that may be called
# while a trace is under way. If Flax renames one, `bound` raises AttributeError or
# KeyError, and nearly every test in tests/test_distribute_variables.py fails.
# - The value of a Variable: `_raw_value`, which was `raw_value` in flax 0.11. The
#   public setters refuse values of another trace, and take microseconds each.
_RAW_VALUE = "_raw_value" if hasattr(nnx.Variable, "_raw_value") else "raw_value"
# - The trace that may change a Variable, or a node through its state.
_TRACE_STATE = "_trace_state"
_NODE_STATE = "_pytree__state"
# - Flax's bookkeeping in the attributes of nodes, which its transforms replace freely.
_BOOKKEEPING = ("_pytree__", "_object__")

raw_value = operator.attrgetter(_RAW_VALUE)
_trace_state = operator.attrgetter(_TRACE_STATE)


def set_raw_value(variable: "nnx.Variable[Any]", value: Any) -> None:
    """Sets the value of a Variable without hooks or checks."""
    object.__setattr__(variable, _RAW_VALUE, value)


def belongs_here(variable: "nnx.Variable[Any]") -> bool:
    """Returns whether the current trace, or code outside of any, may set a Variable."""
    return _trace_state(variable).is_valid()


class _Absent:
    """Stands for an attribute that is not there."""


ABSENT = _Absent()


def text(value: object) -> str:
    """Returns what messages call the value of an attribute, or its absence."""
    if isinstance(value, Tracer):
        return "a traced value"
    return "nothing" if value is ABSENT else _checks.shown(value)


def is_same(before: object, after: object) -> bool:
    """Returns whether a name still stands for the same value.

    Arrays, functions and other objects are the same by identity; numbers, strings and
    whatever else can be hashed also if they are equal and of one type.

    Example:
        >>> is_same((1, "a"), (1, "a")), is_same(1, True), is_same([1], [1])
        (True, False, False)
    """
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, tuple) and isinstance(after, tuple):
        return len(before) == len(after) and all(map(is_same, before, after))
    if isinstance(before, jax.Array) or not isinstance(before, Hashable):
        return False
    try:
        return hash(before) == hash(after) and bool(before == after)
    except Exception:  # of a user's own class
        return False


def iter_graph(node: NnxObject) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields all that an NNX object holds, with its path, and the object last."""
    return _iter_graph(node)


# Since flax 0.12, a setting of the user's may forbid shared references here.
_iter_graph = (
    functools.partial(nnx.iter_graph, graph=True)
    if "graph" in inspect.signature(nnx.iter_graph).parameters
    else nnx.iter_graph
)


def is_bookkeeping(path: tuple[Any, ...]) -> bool:
    """Returns whether a path is that of attributes that Flax keeps for itself."""
    return any(str(part).startswith(_BOOKKEEPING) for part in path)


@dataclass
class NnxGraph:
    """NNX objects, taken apart.

    Attributes:
        variables: The distinct Variables by path.
        leaves: All else that they hold by path; of nodes the type.
        nodes: The modules, optimizers and other objects with attributes.
        containers: The lists and dicts among their attributes.
        owners: The object that holds a Variable, by the Variable's id.
    """

    variables: dict[str, "nnx.Variable[Any]"] = field(default_factory=dict)
    leaves: dict[str, object] = field(default_factory=dict)
    nodes: list[nnx.Pytree] = field(default_factory=list)
    containers: list[list[Any] | dict[Any, Any]] = field(default_factory=list)
    owners: dict[int, object] = field(default_factory=dict)

    @classmethod
    def of(cls, objects: Iterable[tuple[str, NnxObject]]) -> "NnxGraph":
        """Takes objects apart, each under its name."""
        graph = cls()
        seen: set[int] = set()
        for name, root in objects:
            for parts, node in iter_graph(root):
                if is_bookkeeping(parts):
                    continue
                path = "/".join((name, *map(str, parts)))
                if isinstance(node, nnx.Variable):
                    if id(node) not in seen:
                        graph.variables[path] = node
                elif _paths.is_nnx_object(node):
                    graph.leaves[path] = type(node)
                    if id(node) not in seen:
                        graph._add_node(cast("nnx.Pytree", node))
                elif not isinstance(node, (list, tuple, dict, nnx.State)):
                    graph.leaves[path] = node
                    continue  # small numbers share one id
                seen.add(id(node))
        return graph

    def _add_node(self, node: nnx.Pytree) -> None:
        self.nodes.append(node)
        for value in vars(node).values():
            if isinstance(value, nnx.Variable):
                self.owners.setdefault(id(value), node)
            self.containers.extend(_containers(value))

    def difference(self, before: "NnxGraph") -> str | None:
        """Returns a sentence about the first thing that was not so before, or None."""
        for path, variable in self.variables.items():
            if path not in before.variables:
                return (
                    f"run: the function adds the variable {path}, and the "
                    "state of a compiled program cannot grow. Create it before the "
                    "call, in the strategy's scope. (What sow() keeps can be taken out "
                    "with nnx.pop inside the function.)"
                )
            if before.variables[path] is not variable:
                return (
                    f"run: the function replaces the variable {path} by "
                    "another one. Give it a new value instead: variable[...] = value."
                )
        removed = [path for path in before.variables if path not in self.variables]
        if removed:
            return (
                f"run: the function removes the variable {removed[0]}. "
                f"{ONLY_ONCE} Remove it before the call."
            )
        for path in {**before.leaves, **self.leaves}:
            old = before.leaves.get(path, ABSENT)
            new = self.leaves.get(path, ABSENT)
            if not is_same(old, new):
                return (
                    f"run: the function sets {path}, which is not an "
                    f"nnx.Variable, from {text(old)} to {text(new)}. {ONLY_ONCE} "
                    "Return the value or keep it in an nnx.Variable; switch modes, as "
                    "model.eval() does, before the call."
                )
        return None

    def enter_trace(self) -> None:
        """Makes the current trace the one that may change these objects."""
        state = tracers.TraceState()
        for variable in self.variables.values():
            object.__setattr__(variable, _TRACE_STATE, state)
        for node in self.nodes:
            setattr(vars(node)[_NODE_STATE], _TRACE_STATE, state)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Returns a context after which all is as before, traces and all."""
        values = [(x, raw_value(x), _trace_state(x)) for x in self.variables.values()]
        nodes = [(node, dict(vars(node))) for node in self.nodes]
        states = [
            (vars(x)[_NODE_STATE], vars(x)[_NODE_STATE].trace_state) for x in self.nodes
        ]
        containers = [(x, x.copy()) for x in self.containers]
        try:
            yield
        finally:
            for variable, value, state in values:
                set_raw_value(variable, value)
                object.__setattr__(variable, _TRACE_STATE, state)
            for node, attributes in nodes:
                vars(node).clear()
                vars(node).update(attributes)
            for node_state, state in states:
                setattr(node_state, _TRACE_STATE, state)
            for container, contents in containers:
                container.clear()
                if isinstance(container, list):
                    container.extend(contents)
                else:
                    container.update(contents)


class NnxAttributes:
    """All attributes of nodes in one sequence, to compare them in C.

    A ResNet-50 has 2,400; one call of a Python function for each would be slower than
    the rest of a step's host work.
    """

    def __init__(self, graph: NnxGraph) -> None:
        self._dicts = [
            *map(vars, graph.nodes),
            *(x for x in graph.containers if isinstance(x, dict)),
        ]
        self._lists = [x for x in graph.containers if isinstance(x, list)]
        self._contents = list(self._read())
        self._sizes = self._lengths()

    def are_current(self) -> bool:
        """Returns whether every attribute is the same object as before."""
        if self._lengths() != self._sizes:
            return False
        return all(map(operator.is_, self._read(), self._contents))

    def _read(self) -> Iterator[object]:
        values = map(dict.values, self._dicts)
        return itertools.chain.from_iterable(itertools.chain(values, self._lists))

    def _lengths(self) -> list[int]:
        return list(map(len, itertools.chain(self._dicts, self._lists)))


def _containers(value: object) -> Iterator[list[Any] | dict[Any, Any]]:
    """Yields a plain list or dict, and those inside."""
    if type(value) is list or type(value) is dict:
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers(item)
