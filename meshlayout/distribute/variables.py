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

# The slot itself, for calls in C: without hooks, checks, or a watch.
_slot: Any = vars(nnx.Variable)[_VALUE]
raw_value: Callable[[Variable], Any] = _slot.__get__
set_raw_value: Callable[[Variable, Any], None] = _slot.__set__


def belongs_here(variable: Variable) -> bool:
    """Returns whether the current trace, or code outside of any, may set a Variable."""
    return getattr(variable, _TRACE).is_valid()


def aggregation(variable: Variable, watch: "TraceWatch | None" = None) -> Any:
    """Returns how the replicas' values of a Variable become one.

    What its metadata say; `"mean"` for statistics of batches; `"sum"` for the totals of
    Flax's averages, and `"increments"` for other states of metrics, which are added up
    if the function adds to them. Else None: it must not differ.
    """
    choice = variable.get_metadata().get("aggregation")
    if choice is not None:
        kinds, error = ("sum", "mean", "first", "per_replica"), StrategyError
        return _checks.choice("aggregation", choice, kinds, error=error)
    if not isinstance(variable, nnx.metrics.MetricState):
        return "mean" if isinstance(variable, nnx.BatchStat) else None
    nodes = [x.node for x in watch.nodes.values()] if watch is not None else []
    owners = (x for x in nodes if any(v is variable for v in vars(x).values()))
    owner = next(owners, None)
    if isinstance(owner, nnx.metrics.Welford):
        return None  # its update takes the rows of all replicas
    return "sum" if isinstance(owner, nnx.metrics.Average) else "increments"


_current: ContextVar["TraceWatch | None"] = ContextVar("watch", default=None)


class TraceWatch(contextlib.AbstractContextManager["TraceWatch"]):
    """Watches what happens to Variables and modules, in this thread.

    Args:
        enter: Returns the value that a Variable has in the trace, when it is met first.
        write: Returns the value that a Variable gets: it is called with the Variable,
            its value so far, and the one that is written.

    Attributes:
        variables: The Variables from outside that were read or written, in order.
        entered: The values with which they entered the trace.
        nodes: The modules from outside of which an attribute was read or set.
        was_read: The ids of Variables that were read, other than to set them.
    """

    def __init__(self, enter: Callable[..., Any], write: Callable[..., Any]) -> None:
        self._enter, self._write = enter, write
        self._level, self._trace = tracers.TraceState(), _jax.current_trace()
        self._values: dict[int, Any] = {}
        self._made: dict[int, Any] = {}  # kept alive, as their ids are keys
        self.variables: list[Variable] = []
        self.entered: list[Any] = []
        self.nodes: dict[int, _Attributes] = {}
        self.was_read: set[int] = set()
        self._num_settings = 0

    def __enter__(self) -> "TraceWatch":
        _patches.__enter__()
        _jaxprs.short_sharding_errors.__enter__()  # Flax asks for one at each value
        self._token = _current.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _current.reset(self._token)
        _jaxprs.short_sharding_errors.__exit__()
        _patches.__exit__()
        for attributes in self.nodes.values():
            attributes.put_back()

    @property
    def values(self) -> list[Any]:
        """The values that the Variables have now."""
        return [self._values[id(variable)] for variable in self.variables]

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

    def read(self, variable: Variable, slot: Any) -> Any:
        """Returns the value of a Variable in the trace."""
        key = id(variable)
        if key in self._made:
            return slot.__get__(variable)
        if not self._num_settings:
            self.was_read.add(key)
        if key not in self._values:
            slot.__get__(variable)  # raises for what is under construction
            # Of the whole function, wherever in it, as in a scan, the value is read.
            with _unwatched(), _jax.in_trace(self._trace):
                self._values[key] = value = self._enter(variable)
            self.variables.append(variable)
            self.entered.append(value)
        return self._values[key]

    def set(self, variable: Variable, slot: Any, value: Leaf) -> None:
        """Sets the value of a Variable in the trace."""
        if self._is_made(variable, slot):
            slot.__set__(variable, value)
            return
        with self.setting():
            before = self.read(variable, slot)
        with _unwatched():
            self._values[id(variable)] = self._write(variable, before, value)

    def read_level(self, holder: Any, slot: Any) -> Any:
        """Returns the trace that may change a Variable or module."""
        return slot.__get__(holder) if id(holder) in self._made else self._level

    def set_level(self, holder: Any, slot: Any, value: Leaf) -> None:
        """Sets it for what was made in this trace."""
        if self._is_made(holder, slot):
            slot.__set__(holder, value)

    def _is_made(self, holder: Any, slot: Any) -> bool:
        """Returns whether an object was made in this trace: its slot was empty."""
        if id(holder) not in self._made and id(holder) not in self._values:
            try:
                slot.__get__(holder)
            except AttributeError:
                self._made[id(holder)] = holder
        return id(holder) in self._made

    def meet(self, node: Any) -> None:
        """Notes a module, whose attributes are put back and compared."""
        if id(node) not in self.nodes and id(node) not in self._made:
            attributes = object.__getattribute__(node, "__dict__")
            state = attributes.get(_STATE)
            if state is None or id(state) in self._made:
                self._made[id(node)] = node
            else:
                self.nodes[id(node)] = _Attributes(node, attributes)

    @contextlib.contextmanager
    def setting(self) -> Iterator[None]:
        """Returns a context in which Flax reads a Variable to set it."""
        self._num_settings += 1
        try:
            yield
        finally:
            self._num_settings -= 1


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


class _Slot:
    """Stands in for a slot of Flax's, for threads that watch it."""

    def __init__(self, slot: Any, read: Any, write: Any) -> None:
        self._slot, self._read, self._write = slot, read, write

    def __get__(self, holder: Any, kind: type | None = None) -> Any:
        watch = _current.get()
        if holder is None or watch is None:
            return self if holder is None else self._slot.__get__(holder, kind)
        return self._read(watch, holder, self._slot)

    def __set__(self, holder: Any, value: Leaf) -> None:
        watch = _current.get()
        if watch is None:
            self._slot.__set__(holder, value)
        else:
            self._write(watch, holder, self._slot, value)


def _value_slot(slot: Any) -> _Slot:
    return _Slot(slot, TraceWatch.read, TraceWatch.set)


def _level_slot(slot: Any) -> _Slot:
    return _Slot(slot, TraceWatch.read_level, TraceWatch.set_level)


def _meeting(getattribute: Any) -> Any:
    def __getattribute__(self: Any, name: str) -> Any:  # noqa: N807
        if (watch := _current.get()) is not None:
            watch.meet(self)
        return getattribute(self, name)

    return __getattribute__


def _setting(set_value: Any) -> Any:
    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = _current.get()
        with watch.setting() if watch is not None else contextlib.nullcontext():
            return set_value(self, *args, **kwargs)

    return replacement


# Flax looks at the value that it replaces. flax 0.11 sets values by a property.
_SETTERS: list[Any] = (
    [(nnx.Variable, "set_value", _setting)]
    if hasattr(nnx.Variable, "set_value")
    else [
        (nnx.Variable, "__setitem__", _setting),
        (nnx.Variable, "value", lambda x: property(x.fget, _setting(x.fset))),
    ]
)

_patches = SharedPatches(
    (nnx.Variable, _VALUE, _value_slot),
    (nnx.Variable, _TRACE, _level_slot),
    (PytreeState, _TRACE, _level_slot),
    (nnx.Pytree, "__getattribute__", _meeting),
    *_SETTERS,
)


# Attributes of modules.


class _Attributes:
    """The attributes of one module before a trace, and live."""

    def __init__(self, node: Any, live: dict[str, Any]) -> None:
        self.node, self._live, self._before = node, live, dict(live)
        self._containers = [(x, x.copy()) for x in _containers(live.values())]

    def change(self) -> str:
        """Returns what has changed for good, in words, or an empty string."""
        name = f"{type(self.node).__name__}."
        for key in {**self._before, **self._live}:
            old, new = self._before.get(key, _ABSENT), self._live.get(key, _ABSENT)
            if not key.startswith(_BOOKKEEPING) and not _is_same(old, new):
                kind = "the variable " if isinstance(new, nnx.Variable) else ""
                verb = "adds" if old is _ABSENT else "sets"
                return f"{'removes' if new is _ABSENT else verb} {kind}{name}{key}"
        changed = (x for x, before in self._containers if not _is_same(x, before))
        return next((f"changes the {type(x).__name__} in {name}" for x in changed), "")

    def put_back(self) -> None:
        for live, before in ((self._live, self._before), *self._containers):
            live.clear()
            (live.extend if type(live) is list else live.update)(before)


_ABSENT = object()


def _containers(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if type(value) is list or type(value) is dict:
            yield value
            yield from _containers(value.values() if isinstance(value, dict) else value)


def _is_same(old: Leaf, new: Leaf) -> bool:
    """Returns whether an attribute is what it was; objects are by identity."""
    if old is new or type(old) is not type(new):
        return old is new
    if isinstance(old, (list, tuple)):
        return len(old) == len(new) and all(map(_is_same, old, new))
    if type(old) is dict:
        return old.keys() == new.keys() and all(_is_same(old[k], new[k]) for k in old)
    is_object = isinstance(old, nnx.Pytree | nnx.Variable | jax.Array)
    return not is_object and type(old).__hash__ is not None and bool(old == new)


class Modes:
    """The attributes of modules for which a program was compiled.

    Modules are not kept alive: once one is gone, `gone` is called. All attributes are
    in one sequence, to compare them in C: a ResNet-50 has 2,400.
    """

    def __init__(self, nodes: list[Any], gone: Callable[[], None]) -> None:
        inner = [x for node in nodes for x in vars(node).values()]
        every = {id(x): x for x in (*nodes, *inner) if isinstance(x, nnx.Pytree)}
        self._refs = [weakref.ref(node) for node in nodes]
        self._watched = [weakref.ref(x, lambda _: gone()) for x in every.values()]
        self._remember([vars(node) for node in nodes])

    def _remember(self, dicts: list[dict[str, Any]]) -> None:
        containers = [*_containers(x for d in dicts for x in d.values())]
        self._lists = [x for x in containers if type(x) is list]
        self._inner = [x for x in containers if type(x) is dict]
        self._ids, self._before = self._read(dicts), list(map(_frozen, dicts))

    def _read(self, dicts: list[dict[str, Any]]) -> list[int]:
        values = map(dict.values, (*dicts, *self._inner))
        return list(map(id, itertools.chain.from_iterable((*values, *self._lists))))

    def are_current(self) -> bool:
        """Returns whether all attributes are what they were."""
        nodes = [ref() for ref in self._refs]
        if None in nodes:
            return False
        dicts = [vars(node) for node in nodes]
        if self._read(dicts) == self._ids:
            return True
        if not all(map(_is_same, self._before, map(_frozen, dicts))):
            return False
        self._remember(dicts)  # Flax's transforms replace attributes by equal ones
        return True


def _frozen(value: Leaf) -> Any:
    """Returns an attribute as it is now, without keeping modules alive."""
    if isinstance(value, nnx.Pytree):
        return weakref.ref(value)  # of a living object, always the same
    if type(value) is list:
        return list(map(_frozen, value))
    if type(value) is dict:
        items = value.items()
        is_own = lambda key: not str(key).startswith(_BOOKKEEPING)  # noqa: E731
        return {key: _frozen(item) for key, item in items if is_own(key)}
    return value
