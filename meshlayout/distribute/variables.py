"""The Variables and modules that a function touches, watched while it is traced.

A replica's function reaches its models and optimizers in any way that Python has, as if
nothing were compiled. So reads and writes are watched where all of them pass: at the
slot of a Variable's value, exchanged for a property while a trace is open. In the
thread of that trace, a Variable that was made outside has a traced value, and belongs
to the trace as Flax sees it; the slot itself never changes, so other threads see what
they always saw, and nothing has to be put back. Of modules, attributes are put back
after a trace, and compared before each call: `eval()` is another program.
"""

import contextlib
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Self, TypeAlias

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
# the look-ups here raise, and all of tests/test_distribute.py fails.
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

    `"metric"` is for states of metrics, which are added up if the function adds to
    them; None means that it must not differ.
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
    """Returns a context in which nothing is watched."""
    token = current.set(None)
    try:
        yield
    finally:
        current.reset(token)


class TraceWatch(contextlib.AbstractContextManager["TraceWatch"]):
    """Watches what happens to Variables and modules, in this thread.

    A subclass says which values Variables have and get, by `enter` and `write`.

    Attributes:
        entered: The Variables from outside that were read or set, by id, and the values
            with which they entered the trace.
        values: The values that they have now.
        nodes: The modules from outside of which an attribute was read or set, by id,
            and their attributes before, as they are and in a form to compare.
    """

    def __init__(self) -> None:
        self._level, self._trace = tracers.TraceState(), _jax.current_trace()
        # What the objects belong to that are made in this trace, by id.
        self._levels: dict[int, Any] = {}
        self.entered: dict[int, tuple[Variable, Any]] = {}
        self.values: dict[int, Any] = {}
        self.nodes: dict[int, tuple[Any, dict[str, Any], Any]] = {}

    def enter(self, variable: Variable) -> Any:
        """Returns the value that a Variable has when it is met first."""
        raise NotImplementedError

    def write(self, variable: Variable, old: Leaf, new: Leaf) -> Any:
        """Returns the value that a Variable gets, of what the function writes."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        _patches.__enter__()
        _jaxprs.short_sharding_errors.__enter__()  # Flax asks for one at each value
        self._token = current.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        current.reset(self._token)
        _jaxprs.short_sharding_errors.__exit__()
        _patches.__exit__()
        for node, before, _ in self.nodes.values():
            vars(node).clear()
            vars(node).update(before)

    def check_attributes(self, name: str) -> None:
        """Refuses a function that changes modules in Python, once for all calls."""
        for node, before, frozen in self.nodes.values():
            live = object.__getattribute__(node, "__dict__")
            now = _frozen(live)
            for key in {**frozen, **now}:
                if frozen.get(key, ...) == now.get(key, ...):
                    continue
                verb = "removes" if key not in live else "sets"
                verb = verb if key in before else "adds"
                is_variable = isinstance(live.get(key), nnx.Variable)
                msg = (
                    f"run: {name} {verb} {'the variable ' * is_variable}"
                    f"{type(node).__name__}.{key}. It runs in Python once per compiled "
                    "program, not at every call: create variables before the call, set "
                    "them with variable[...] = value, return other values (nnx.pop "
                    "takes out what sow() keeps), and call model.eval() outside."
                )
                raise StrategyError(msg)

    def read(self, variable: Variable, _: object = None) -> Any:
        """Returns the value of a Variable in the trace."""
        key = id(variable)
        if key not in self.values:
            if self._is_made(variable, _trace_slot):
                return raw_value(variable)
            # Of the whole function, wherever in it, as in a scan, the value is read.
            with unwatched(), _jax.in_trace(self._trace):
                self.values[key] = value = self.enter(variable)
            self.entered[key] = variable, value
        return self.values[key]

    def set(self, variable: Variable, _: object, value: Leaf) -> None:
        """Sets the value of a Variable in the trace."""
        if self._is_made(variable, _trace_slot):
            set_raw_value(variable, value)
            return
        before = self.read(variable)
        with unwatched():
            self.values[id(variable)] = self.write(variable, before, value)

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
        """Notes a module from outside, whose attributes are put back and compared."""
        if id(node) not in self.nodes:
            live = object.__getattribute__(node, "__dict__")
            state = live.get(_STATE)
            if state is not None and not self._is_made(state, _state_trace_slot):
                self.nodes[id(node)] = node, dict(live), _frozen(live)


# The patches. Other threads come here, too, and have no watch.


def _watched(read: Any, write: Any) -> Callable[[Any], property]:
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
    # Flax computes `variable[...] = 0` from the old value, if types differ.
    def replacement(self: Any, value: Any, **options: Any) -> Any:
        if current.get() is not None and options.get("index") is ...:
            old = getattr(self, _VALUE)
            value = jnp.broadcast_to(jnp.asarray(value, old.dtype), old.shape)
        return set_value(self, value, **options)

    return replacement


_levels = _watched(TraceWatch.read_level, TraceWatch.set_level)
_patches = SharedPatches(
    (nnx.Variable, _VALUE, _watched(TraceWatch.read, TraceWatch.set)),
    (nnx.Variable, _TRACE, _levels),
    (PytreeState, _TRACE, _levels),
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
        items = value.items()
        return {k: _frozen(x) for k, x in items if not str(k).startswith(_BOOKKEEPING)}
    is_object = isinstance(value, nnx.Variable | jax.Array)
    is_object |= type(value).__hash__ is None
    return _Same(value) if is_object else (type(value), value)


def _values(attributes: Iterable[Any]) -> Iterator[Iterable[Any]]:
    """Yields views of the values in dicts and lists, and in those among them."""
    for value in attributes:
        if type(value) is list or type(value) is dict:
            view = value.values() if isinstance(value, dict) else value
            yield view
            yield from _values(view)


class Modes:
    """The attributes of modules for which a program was compiled.

    They are nearly always the same objects as before, which is compared in C: a
    ResNet-50 has 2,400. Modules that no other one holds are not kept alive: once one
    is gone, `gone` is called.
    """

    def __init__(self, nodes: list[Any], gone: Callable[[], None]) -> None:
        self._refs = [weakref.ref(node, lambda _: gone()) for node in nodes]
        self._attributes = [vars(node) for node in nodes]
        self._frozen = list(map(_frozen, self._attributes))
        self._look()

    def _look(self) -> None:
        self._views = [*_values(self._attributes)]
        self._before = [*itertools.chain.from_iterable(self._views)]

    def are_current(self) -> bool:
        """Returns whether all attributes are what they were."""
        now = [*itertools.chain.from_iterable(self._views)]
        if len(now) == len(self._before) and all(map(operator.is_, now, self._before)):
            return True
        if list(map(_frozen, self._attributes)) != self._frozen:
            return False
        self._look()  # Flax's transforms replace attributes by equal ones
        return True
