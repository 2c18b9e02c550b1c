"""NNX variables as the state of a compiled program, in place.

A replica function calls models and optimizers that it closes over, or gets passed, as
if nothing were compiled. So while it is traced, their Variables hold the traced values,
and the objects themselves belong to the current trace as Flax sees it; afterwards
everything is as it was. `nnx.split` and `nnx.merge`, Flax's own way, make copies, and a
closure would go on to use the originals.

All threads share the objects. One lock is held while any of them are bound, so `get`,
`set` and `bound` of several threads wait for each other. Other reads of a model while
another thread traces a function that uses it see traced values, as with `nnx.jit`.
"""

import contextlib
import functools
import inspect
import itertools
import operator
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

import jax
import numpy as np
from flax import nnx
from flax.nnx import tracers
from jax.sharding import NamedSharding

from meshlayout import _checks, _jax, _paths
from meshlayout._annotations import Leaf
from meshlayout.errors import StrategyError


Aggregation: TypeAlias = Literal["sum", "mean", "first", "per_replica"]
NnxObject: TypeAlias = "nnx.Pytree | nnx.Variable[Any]"

_AGGREGATIONS: tuple[Aggregation, ...] = ("sum", "mean", "first", "per_replica")

ONLY_ONCE = (
    "The function runs once per compiled program, not at every call, so this would "
    "happen only once."
)

# Flax's private attributes, none of which has a public counterpart that may be called
# while a trace is under way. If Flax renames one, `bound` raises AttributeError or
# KeyError, and nearly every test in tests/test_distribute_bindings.py fails.
# - The value of a Variable: `_raw_value`, which was `raw_value` in flax 0.11. The
#   public setters refuse values of another trace, and take microseconds each.
_RAW_VALUE = "_raw_value" if hasattr(nnx.Variable, "_raw_value") else "raw_value"
# - The trace that may change a Variable, or a node through its state.
_TRACE_STATE = "_trace_state"
_NODE_STATE = "_pytree__state"
# - Flax's bookkeeping in the attributes of nodes, which its transforms replace freely.
_BOOKKEEPING = ("_pytree__", "_object__")

_raw_value = operator.attrgetter(_RAW_VALUE)
_trace_state = operator.attrgetter(_TRACE_STATE)

_lock = threading.RLock()


class BoundVariables:
    """What became of Variables in a block of `Variables.bound`.

    Attributes:
        new_values: Their raw values at the end of the block.
        changed: For each, whether it got another value, by identity.
    """

    def __init__(self) -> None:
        self.new_values: list[Any] = []
        self.changed: tuple[bool, ...] = ()


class Variables:
    """The distinct Variables of NNX objects, in an order that does not change.

    Args:
        objects: Models, optimizers, metrics, Rngs and bare Variables, each with the
            name by which the user knows it. What two of them share occurs once, under
            the first name.

    Attributes:
        paths: The path of each Variable, such as `model/encoder/kernel`.
        variables: The Variables.
        aggregations: What to do with each if it differs between replicas; see
            `aggregation`.

    Raises:
        StrategyError: If a Variable holds what a program cannot have as its state.
    """

    def __init__(self, objects: Sequence[tuple[str, NnxObject]]) -> None:
        self._objects = tuple(objects)
        self._graph = graph = _Graph.of(self._objects)
        self.paths = tuple(graph.variables)
        self.variables = tuple(graph.variables.values())
        self.aggregations: tuple[Aggregation | None, ...] = tuple(
            aggregation(variable, graph.owners.get(id(variable)), path)
            for path, variable in graph.variables.items()
        )
        for path, variable in graph.variables.items():
            _check_value(path, variable)
        self._attributes = _Attributes(graph)

    def is_current(self) -> bool:
        """Returns whether the objects hold the same Variables and other attributes.

        They do not after `model.eval()`, or if a layer was replaced: a program that was
        traced before would compute something else. Takes some microseconds per module.
        """
        if self._attributes.are_current():
            return True
        with _lock:
            graph = _Graph.of(self._objects)
            if graph.difference(self._graph) is not None:
                return False
            # Flax's transforms replace containers and bookkeeping by equal ones.
            self._graph, self._attributes = graph, _Attributes(graph)
        return True

    def get(self) -> list[Any]:
        """Returns the raw values: arrays, or pytrees of arrays."""
        with _lock:
            return [_raw_value(variable) for variable in self.variables]

    def set(self, values: Iterable[Any]) -> None:
        """Puts other raw values in place, for use outside of a trace.

        Metadata stays, hooks do not run, and modules that share a Variable still do.
        """
        with _lock:
            for variable, value in zip(self.variables, values, strict=True):
                object.__setattr__(variable, _RAW_VALUE, value)

    @contextlib.contextmanager
    def bound(self, values: Sequence[Any]) -> Iterator[BoundVariables]:
        """Gives the Variables traced values, and the objects to the current trace.

        Inside, models, optimizers and Flax's transforms work as always. Afterwards,
        also after an error, every object has its former values and attributes.

        Args:
            values: The raw values, as those of `get`.

        Yields:
            Where the values will be found that they have at the end of the block.

        Raises:
            StrategyError: If Variables were added, removed or replaced in the block, or
                attributes that are not Variables were changed.
        """
        with _lock:
            graph = _Graph.of(self._objects)
            # Callers ask `is_current` first: values of other Variables are no use.
            assert tuple(graph.variables) == self.paths, "the objects have changed"
            result = BoundVariables()
            with graph.restored():
                graph.enter_trace()
                self.set(values)
                yield result
                result.new_values = self.get()
                pairs = zip(values, result.new_values, strict=True)
                result.changed = tuple(itertools.starmap(_is_changed, pairs))
                difference = _Graph.of(self._objects).difference(graph)
                if difference is not None:
                    raise StrategyError(difference)


def aggregation(
    variable: "nnx.Variable[Any]", owner: object = None, path: str = ""
) -> Aggregation | None:
    """Returns what to do with a Variable that differs between replicas.

    Metadata has the last word: `nnx.Variable(x, aggregation="mean")`. Statistics of
    batches are averaged, and the totals of Flax's `Average` and `Accuracy` added. Other
    metrics, such as `Welford` or a user's own, may hold what cannot be added.

    Args:
        variable: The Variable.
        owner: The NNX object that holds it.
        path: Its path, for messages.

    Returns:
        `"sum"` of the replicas' changes, `"mean"` of their values, the `"first"`
        replica's value, one value `"per_replica"`; or None: it must not differ.

    Raises:
        StrategyError: If the metadata has something else.

    Example:
        >>> aggregation(nnx.BatchStat(np.zeros(2)))
        'mean'
        >>> aggregation(nnx.Param(np.zeros(2))) is None
        True
    """
    choice = variable.get_metadata().get("aggregation")
    if choice is not None:
        return _checks.choice(
            "aggregation", choice, _AGGREGATIONS, where=path, error=StrategyError
        )
    if isinstance(variable, nnx.BatchStat):
        return "mean"
    is_total = isinstance(variable, nnx.metrics.MetricState)
    return "sum" if is_total and isinstance(owner, nnx.metrics.Average) else None


def is_on(x: Leaf, mesh: jax.sharding.Mesh) -> bool | None:
    """Returns whether a value is replicated over the devices of a mesh.

    Returns:
        True if it is; None if it may be moved there freely, as NumPy arrays, numbers
        and JAX arrays that were never placed; False if it was placed elsewhere.

    Example:
        >>> mesh = jax.make_mesh((2,), ("batch",), devices=jax.devices()[:2])
        >>> whole = NamedSharding(mesh, jax.sharding.PartitionSpec())
        >>> is_on(jax.device_put(1.0, whole), mesh)
        True
        >>> is_on(jax.device_put(1.0, jax.devices()[1]), mesh)
        False
        >>> is_on(jax.numpy.ones(2), mesh) is None
        True
    """
    if not _jax.is_committed(x):
        return None
    sharding = x.sharding
    if not sharding.is_fully_replicated or _jax.is_in_other_memory(sharding):
        return False
    if isinstance(sharding, NamedSharding):
        # In the same order: jit refuses arrays on the same devices in another one.
        devices: Any = sharding.mesh.devices
        return list(mesh.devices.flat) == list(devices.flat)
    return mesh.size == 1 and sharding.device_set == set(mesh.devices.flat)


def belongs_here(variable: "nnx.Variable[Any]") -> bool:
    """Returns whether the current trace, or code outside of any, may set a Variable."""
    return _trace_state(variable).is_valid()


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


@dataclass
class _Graph:
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
    def of(cls, objects: Iterable[tuple[str, NnxObject]]) -> "_Graph":
        graph = cls()
        seen: set[int] = set()
        for name, root in objects:
            for parts, node in iter_graph(root):
                if any(str(part).startswith(_BOOKKEEPING) for part in parts):
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

    def difference(self, before: "_Graph") -> str | None:
        """Returns a sentence about the first thing that was not so before, or None."""
        for path, variable in self.variables.items():
            if path not in before.variables:
                return (
                    f"strategy.run: the function adds the variable {path}, and the "
                    "state of a compiled program cannot grow. Create it before the "
                    "call, in the strategy's scope. (What sow() keeps can be taken out "
                    "with nnx.pop inside the function.)"
                )
            if before.variables[path] is not variable:
                return (
                    f"strategy.run: the function replaces the variable {path} by "
                    "another one. Give it a new value instead: variable[...] = value."
                )
        removed = [path for path in before.variables if path not in self.variables]
        if removed:
            return (
                f"strategy.run: the function removes the variable {removed[0]}. "
                f"{ONLY_ONCE} Remove it before the call."
            )
        for path in {**before.leaves, **self.leaves}:
            old = before.leaves.get(path, _ABSENT)
            new = self.leaves.get(path, _ABSENT)
            if not is_same(old, new):
                return (
                    f"strategy.run: the function sets {path}, which is not an "
                    f"nnx.Variable, from {_text(old)} to {_text(new)}. {ONLY_ONCE} "
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
        values = [(x, _raw_value(x), _trace_state(x)) for x in self.variables.values()]
        nodes = [(node, dict(vars(node))) for node in self.nodes]
        states = [
            (vars(x)[_NODE_STATE], vars(x)[_NODE_STATE].trace_state) for x in self.nodes
        ]
        containers = [(x, x.copy()) for x in self.containers]
        try:
            yield
        finally:
            for variable, value, state in values:
                object.__setattr__(variable, _RAW_VALUE, value)
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


class _Attributes:
    """All attributes of nodes in one sequence, to compare them in C.

    A ResNet-50 has 2,400; one call of a Python function for each would be slower than
    the rest of a step's host work.
    """

    def __init__(self, graph: _Graph) -> None:
        self._dicts = [
            *map(vars, graph.nodes),
            *(x for x in graph.containers if isinstance(x, dict)),
        ]
        self._lists = [x for x in graph.containers if isinstance(x, list)]
        self._contents = list(self._read())
        self._sizes = self._lengths()

    def are_current(self) -> bool:
        if self._lengths() != self._sizes:
            return False
        return all(map(operator.is_, self._read(), self._contents))

    def _read(self) -> Iterator[object]:
        values = map(dict.values, self._dicts)
        return itertools.chain.from_iterable(itertools.chain(values, self._lists))

    def _lengths(self) -> list[int]:
        return list(map(len, itertools.chain(self._dicts, self._lists)))


class _Absent:
    """Stands for an attribute that is not there."""


_ABSENT = _Absent()


def _containers(value: object) -> Iterator[list[Any] | dict[Any, Any]]:
    """Yields a plain list or dict, and those inside."""
    if type(value) is list or type(value) is dict:
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers(item)


def _check_value(path: str, variable: "nnx.Variable[Any]") -> None:
    """Refuses a Variable that has no plain value to pass to a program."""
    if type(variable).__name__ == "HijaxVariable":
        msg = (
            f"{path} is a variable with hijax=True, which cannot be the state of a "
            "compiled program. Create it without."
        )
        raise StrategyError(msg)
    for leaf in jax.tree.leaves(_raw_value(variable)):
        if _jax.is_ref(leaf):
            msg = (
                f"{path} keeps its value in a jax.Ref (ref=True), which cannot be the "
                "state of a compiled program. Create it without."
            )
            raise StrategyError(msg)
        if not isinstance(
            leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
        ):
            msg = (
                f"{path} is a variable that holds {_checks.type_text(leaf)}; the state "
                "of a compiled program consists of arrays. Make it a plain attribute."
            )
            raise StrategyError(msg)


def _is_changed(before: Any, after: Any) -> bool:
    if before is after:
        return False
    old, old_structure = jax.tree.flatten(before)
    new, new_structure = jax.tree.flatten(after)
    return old_structure != new_structure or not all(map(operator.is_, old, new))


def _text(value: object) -> str:
    return "nothing" if value is _ABSENT else _checks.shown(value)
