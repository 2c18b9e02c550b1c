"""The Variables and modules that a function touches, watched while it is traced.

A replica's function reaches its models and optimizers in any way that Python has, as if
nothing were compiled. So reads and writes are watched where all of them pass: at the
slot of a Variable's value, exchanged for a descriptor while a trace is open. In the
thread of that trace, a Variable that was made outside has a traced value, and belongs
to the trace as Flax sees it; the slot itself never changes, so other threads see what
they always saw, and nothing has to be put back. Of modules, attributes are put back
after a trace, and compared before each call: `eval()` is another program.
"""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import tracers
from flax.nnx.pytreelib import PytreeState

from meshlayout import _checks, _jax, _jaxprs
from meshlayout._annotations import Leaf
from meshlayout._patches import SharedPatches
from meshlayout.errors import StrategyError


Variable: TypeAlias = "nnx.Variable[Any]"

# Flax's private attributes, none of which has a public counterpart. If one is renamed,
# SharedPatches or a look-up here raises, and all of tests/test_distribute.py fails.
# - The slot of a Variable's value: `_raw_value`, which was `raw_value` in flax 0.11.
_VALUE = "_raw_value" if hasattr(nnx.Variable, "_raw_value") else "raw_value"
# - The trace that may change a Variable, or a module by way of its state.
_TRACE, _STATE = "_trace_state", "_pytree__state"
# - Flax's bookkeeping in the attributes of modules, which its transforms replace.
_BOOKKEEPING = ("_pytree__", "_object__")

# The slots themselves, for calls in C: without hooks, checks, or a watch.
_slot: Any = vars(nnx.Variable)[_VALUE]
_trace_slot, _state_trace_slot = vars(nnx.Variable)[_TRACE], vars(PytreeState)[_TRACE]
raw_value: Callable[[Variable], Any] = _slot.__get__
set_raw_value: Callable[[Variable, Any], None] = _slot.__set__


def belongs_here(variable: Variable) -> bool:
    """Returns whether the current trace, or code outside of any, may set a Variable."""
    return getattr(variable, _TRACE).is_valid()


def aggregation(variable: Variable) -> str | None:
    """Returns how the replicas' values of a Variable become one.

    What its metadata say; `"mean"` for statistics of batches; `"metric"` for states of
    metrics, which are added up if the function adds to them. Else None: it must not
    differ.
    """
    choice = variable.get_metadata().get("aggregation")
    if choice is not None:
        kinds, error = ("sum", "mean", "first", "per_replica"), StrategyError
        return _checks.choice("aggregation", choice, kinds, error=error)
    if isinstance(variable, nnx.metrics.MetricState):
        return "metric"
    return "mean" if isinstance(variable, nnx.BatchStat) else None


# The watch of the trace that is under way in this thread.
current: ContextVar["TraceWatch | None"] = ContextVar("watch", default=None)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Returns a context in which a Variable has the value that it has outside."""
    token = current.set(None)
    try:
        yield
    finally:
        current.reset(token)


class TraceWatch(contextlib.AbstractContextManager["TraceWatch"]):
    """Watches what happens to Variables and modules, in this thread.

    Args:
        replica: Says what values Variables have and get, by `enter(variable)` and
            `write(variable, old, new)`; `meet(node, attributes)` is called for modules.

    Attributes:
        replica: As given.
        entered: The Variables from outside that were read or set, by id, and the values
            with which they entered the trace.
        values: The values that they have now, by id.
        nodes: The modules from outside of which an attribute was read or set.
    """

    def __init__(self, replica: Any) -> None:
        self.replica = replica
        self._level, self._trace = tracers.TraceState(), _jax.current_trace()
        self.values: dict[int, Any] = {}
        # What the objects belong to that are made in this trace, by id.
        self._levels: dict[int, Any] = {}
        self.entered: dict[int, tuple[Variable, Any]] = {}
        self.nodes: dict[int, _Attributes] = {}

    def __enter__(self) -> "TraceWatch":
        _patches.__enter__()
        _jaxprs.short_sharding_errors.__enter__()  # Flax asks for one at each value
        self._token = current.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        current.reset(self._token)
        _jaxprs.short_sharding_errors.__exit__()
        _patches.__exit__()
        for attributes in self.nodes.values():
            attributes.put_back()

    def check_attributes(self, name: str) -> None:
        """Refuses a function that changes modules in Python, once for all calls."""
        for attributes in self.nodes.values():
            change = attributes.change()
            if change:
                msg = (
                    f"run: {name} {change}. It runs in Python once per compiled "
                    "program, not at every call: create variables before the call, set "
                    "them with variable[...] = value, return other values, and switch "
                    "modes, as model.eval() does, outside. (What sow() keeps can be "
                    "taken out with nnx.pop inside the function.)"
                )
                raise StrategyError(msg)

    def read(self, variable: Variable) -> Any:
        """Returns the value of a Variable in the trace."""
        key = id(variable)
        if key not in self.values:
            if self._is_made(variable, _trace_slot):
                return _slot.__get__(variable)
            # Of the whole function, wherever in it, as in a scan, the value is read.
            with unwatched(), _jax.in_trace(self._trace):
                self.values[key] = value = self.replica.enter(variable)
            self.entered[key] = variable, value
        return self.values[key]

    def set(self, variable: Variable, value: Leaf) -> None:
        """Sets the value of a Variable in the trace."""
        if self._is_made(variable, _trace_slot):
            _slot.__set__(variable, value)
            return
        before = self.read(variable)
        with unwatched():
            self.values[id(variable)] = self.replica.write(variable, before, value)

    def read_level(self, holder: Any, slot: Any) -> Any:
        """Returns the trace that may change a Variable, or a module by its state."""
        return slot.__get__(holder) if self._is_made(holder, slot) else self._level

    def set_level(self, holder: Any, slot: Any, level: Any) -> None:
        """Sets it for what is made in this trace."""
        self._levels[id(level)] = level
        slot.__set__(holder, level)

    def _is_made(self, holder: Any, slot: Any) -> bool:
        """Returns whether an object was made in this trace, or still is made."""
        try:
            return id(slot.__get__(holder)) in self._levels
        except AttributeError:
            return True

    def meet(self, node: Any) -> None:
        """Notes a module, whose attributes are put back and compared."""
        if id(node) not in self.nodes:
            attributes = object.__getattribute__(node, "__dict__")
            state = attributes.get(_STATE)
            if state is not None and not self._is_made(state, _state_trace_slot):
                self.nodes[id(node)] = _Attributes(node, attributes)
                self.replica.meet(node, attributes)


def _watched(read: Any, write: Any) -> Callable[[Any], Any]:
    """Returns a replacement of a slot, which watches threads that have a trace open."""

    def make(slot: Any) -> property:
        def get(holder: Any) -> Any:
            watch = current.get()
            return slot.__get__(holder) if watch is None else read(watch, holder, slot)

        def put(holder: Any, value: Leaf) -> None:
            watch = current.get()
            if watch is None:
                slot.__set__(holder, value)
            else:
                write(watch, holder, slot, value)

        return property(get, put)

    return make


def _meeting(getattribute: Any) -> Any:
    def __getattribute__(self: Any, name: str) -> Any:  # noqa: N807
        if (watch := current.get()) is not None:
            watch.meet(self)
        return getattribute(self, name)

    return __getattribute__


def _setting(set_value: Any) -> Any:
    # `variable[...] = 0` would be computed from the old value, if types differ.
    def replacement(self: Any, value: Any, **options: Any) -> Any:
        if current.get() is not None and options.get("index") is ...:
            old = getattr(self, _VALUE)
            value = jnp.broadcast_to(jnp.asarray(value, old.dtype), old.shape)
        return set_value(self, value, **options)

    return replacement


_patches = SharedPatches(
    (
        nnx.Variable,
        _VALUE,
        _watched(
            lambda watch, variable, _: watch.read(variable),
            lambda watch, variable, _, value: watch.set(variable, value),
        ),
    ),
    (nnx.Variable, _TRACE, _watched(TraceWatch.read_level, TraceWatch.set_level)),
    (PytreeState, _TRACE, _watched(TraceWatch.read_level, TraceWatch.set_level)),
    (nnx.Pytree, "__getattribute__", _meeting),
    *([(nnx.Variable, "set_value", _setting)] if _VALUE == "_raw_value" else []),
)


# Attributes of modules.


class _Same:
    """Stands for an object that is compared by identity, and keeps it alive."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    __hash__ = None  # type: ignore[assignment]


def _frozen(value: Leaf) -> Any:
    """Returns what an attribute is now, to compare; it keeps no module alive."""
    if isinstance(value, nnx.Pytree):
        return _Same(weakref.ref(value))  # of a living object, always the same
    if isinstance(value, (list, tuple)):
        return type(value), list(map(_frozen, value))
    if type(value) is dict:
        return {
            key: _frozen(item)
            for key, item in value.items()
            if not str(key).startswith(_BOOKKEEPING)
        }
    is_object = isinstance(value, nnx.Variable | jax.Array)
    is_object |= type(value).__hash__ is None
    return _Same(value) if is_object else (type(value), value)


def _containers(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if type(value) is list or type(value) is dict:
            yield value
            yield from _containers(value.values() if isinstance(value, dict) else value)


class _Attributes:
    """The attributes of one module before a trace, and live."""

    def __init__(self, node: Any, live: dict[str, Any]) -> None:
        self.node, self._live, self._before = node, live, _frozen(live)
        self._copies = [(x, x.copy()) for x in (live, *_containers(live.values()))]

    def change(self) -> str:
        """Returns what has changed for good, in words, or an empty string."""
        before, after = self._before, _frozen(self._live)
        for key in {**before, **after}:
            if key not in before or key not in after or before[key] != after[key]:
                verb = "sets" if key in before else "adds"
                is_variable = isinstance(self._live.get(key), nnx.Variable)
                what = "the variable " if is_variable else ""
                name = f"{what}{type(self.node).__name__}.{key}"
                return f"{verb if key in after else 'removes'} {name}"
        return ""

    def put_back(self) -> None:
        for live, before in self._copies:
            live.clear()
            (live.extend if type(live) is list else live.update)(before)


class Modes:
    """The attributes of modules for which a program was compiled.

    Modules are not kept alive: once one is gone, `gone` is called. The attributes are
    nearly always the same objects as before, which is compared in C: a ResNet-50 has
    2,400.
    """

    def __init__(self, nodes: list[Any], gone: Callable[[], None]) -> None:
        inner = (x for node in nodes for x in vars(node).values())
        every = {id(x): x for x in (*nodes, *inner) if isinstance(x, nnx.Pytree)}
        self._refs = [weakref.ref(node) for node in nodes]
        self._watched = [weakref.ref(x, lambda _: gone()) for x in every.values()]
        self._remember([vars(node) for node in nodes])

    def _remember(self, attributes: list[dict[str, Any]]) -> None:
        self._inner = [*_containers(x for each in attributes for x in each.values())]
        self._before, self._ids = list(map(_frozen, attributes)), self._read(attributes)

    def _read(self, attributes: list[dict[str, Any]]) -> list[int]:
        values = (x.values() if isinstance(x, dict) else x for x in self._inner)
        own = itertools.chain.from_iterable(map(dict.values, attributes))
        return list(map(id, itertools.chain(own, *values)))

    def are_current(self) -> bool:
        """Returns whether all attributes are what they were."""
        nodes = [ref() for ref in self._refs]
        if None in nodes:
            return False
        attributes = [vars(node) for node in nodes]
        if self._read(attributes) == self._ids:
            return True
        if list(map(_frozen, attributes)) != self._before:
            return False
        self._remember(attributes)  # Flax's transforms replace attributes by equal ones
        return True
