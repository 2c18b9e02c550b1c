"""The roots of a function: by which names it reaches objects, and whether they changed.

A program is compiled for the objects that a function reaches: a closure's cells, the
globals that its code names, the attributes of its `self`. Before each call they are
looked up again and compared by identity, so that a name that is bound to another model
means that model. Which Variables the function uses is not found here: its first trace
tells (`variables.TraceWatch`). So a path that this walk does not see costs nothing but
the notice of a rebinding, and nothing in it needs to know what code does with a name.
"""

import collections
import contextlib
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.core import FrozenDict

from meshlayout.errors import StrategyError


# Numbers and strings are frozen, as under jax.jit. A bool or None is compared: there
# are few of them, and they decide what code does.
_PLAIN = (int, float, complex, str, bytes, np.generic)
_LEAVES = (*_PLAIN, bool, type(None), jax.Array, np.ndarray, types.ModuleType, type)
_MAPPINGS = (
    *(dict, types.MappingProxyType, FrozenDict),
    *(collections.UserDict, collections.ChainMap),
)
_LIBRARIES = {"flax", "grain", "jax", "jaxlib", "meshlayout", "numpy", "optax", "orbax"}


def function_key(fn: Any) -> Any:
    """Returns what a function has in common with one that is defined anew."""
    if isinstance(fn, types.MethodType):
        return "method", function_key(fn.__func__)
    if isinstance(fn, functools.partial):
        return function_key(fn.func), len(fn.args), tuple(fn.keywords)
    return getattr(fn, "__code__", type(fn))


def is_nnx(value: object) -> bool:
    """Returns whether this is an NNX object: a module, an optimizer, a Variable ..."""
    return isinstance(value, nnx.Pytree | nnx.Variable)


def _iter_graph(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields all that an NNX object holds, with its path."""
    # Since flax 0.12, a setting of the user's may forbid shared references here.
    has_option = "graph" in inspect.signature(nnx.iter_graph).parameters
    return nnx.iter_graph(value, graph=True) if has_option else nnx.iter_graph(value)


def namer(entries: "Sequence[_Entry]") -> Callable[[Any], str]:
    """Returns a function from Variables to paths, such as `model/encoder/kernel`."""
    found: dict[int, str] = {}

    def path(variable: Any) -> str:
        for entry in entries if not found else ():
            if is_nnx(entry.value):
                for parts, value in _iter_graph(entry.value):
                    name = "/".join((entry.path, *map(str, parts)))
                    found.setdefault(id(value), name)
        return found.get(
            id(variable), f"a {type(variable).__name__} that no name leads to"
        )

    return path


# How a value is looked up, from that of the entry above it.


def _root(_: Any, value: Any) -> Any:
    return value


def _cell(fn: Any, index: int) -> Any:
    return fn.__closure__[index].cell_contents


def _keyword(fn: Any, name: str) -> Any:
    is_partial = isinstance(fn, functools.partial)
    return (fn.keywords if is_partial else fn.__kwdefaults__)[name]


def _item(container: Any, key: Any) -> Any:
    return container[key]


def _global(_: Any, place: tuple[dict[str, Any], str]) -> Any:
    return place[0][place[1]]


def _attribute(instance: Any, name: str) -> Any:
    return object.__getattribute__(instance, "__dict__")[name]


# How it is compared.
_IDENTITY, _CODE, _NUMBER, _LENGTH = range(4)


class _Entry:
    """A value that a function reaches, and how."""

    __slots__ = ("expected", "get", "key", "kind", "named", "parent", "path", "value")

    def __init__(
        self, parent: int, get: Any, key: Any, path: str, value: Any, *, named: bool
    ) -> None:
        self.parent, self.get, self.key, self.path = parent, get, key, path
        self.value, self.named = value, named
        self.kind, self.expected = _IDENTITY, id(value)
        if isinstance(value, types.FunctionType):
            self.kind, self.expected = _CODE, value.__code__
        elif isinstance(value, _PLAIN) and not isinstance(value, bool):
            self.kind, self.expected = _NUMBER, value
        elif isinstance(value, tuple | types.MethodType | functools.partial):
            self.kind, self.expected = _LENGTH, _length(value)


def _length(value: Any) -> Any:
    return type(value), len(value) if isinstance(value, tuple) else None


def walk(fn: Any, objects: Sequence[tuple[str, Any]] = ()) -> list[_Entry]:
    """Returns what a function and its arguments reach, first things first.

    Args:
        fn: The function.
        objects: The NNX objects among its arguments, with their names.
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    entries = [_Entry(-1, _root, 0, name, fn, named=True)]
    for index, (path, value) in enumerate(objects):
        entries.append(_Entry(-1, _root, index + 1, path, value, named=True))
    names: set[str] = set()
    seen: set[int] = set()
    for index, entry in enumerate(entries):  # which grow
        # Function and method objects are made anew, with parts that have to be found.
        if id(entry.value) not in seen:
            seen.add(id(entry.value))
            parts = _parts(entry.value, "" if index == 0 else entry.path, names)
            entries.extend(_Entry(index, *part[:4], named=part[4]) for part in parts)
    for entry in entries:  # parents first
        if entry.get is _attribute:
            entry.named = entry.key in names
        elif entry.parent >= 0 and entry.get is not _global:
            entry.named &= entries[entry.parent].named
    return entries


def _parts(value: Any, path: str, names: set[str]) -> Iterator[tuple[Any, ...]]:
    """Yields what a value leads to: getter, key, path, part, whether code names it."""
    if isinstance(value, _LEAVES):
        return
    if isinstance(value, types.MethodType):
        yield getattr, "__self__", "self", value.__self__, True
        yield getattr, "__func__", path, value.__func__, True
    elif isinstance(value, functools.partial):
        for part in ("func", "args"):
            yield getattr, part, path, getattr(value, part), True
        for key, item in value.keywords.items():
            yield _keyword, key, key, item, True
    elif isinstance(value, types.FunctionType):
        yield from _function_parts(value, names)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            if not isinstance(item, _LEAVES) or isinstance(value, tuple):
                is_named = isinstance(value, tuple)
                yield _item, index, f"{path}[{index}]", item, is_named
    elif isinstance(value, _MAPPINGS):
        for key in tuple(value):
            yield _item, key, f"{path}[{key!r}]", value[key], False
    else:
        if hasattr(type(value), "__wrapped__") or "__wrapped__" in _vars(value):
            yield getattr, "__wrapped__", path, value.__wrapped__, True
        if not _is_library(type(value).__module__):
            yield from _class_parts(type(value), names)
        is_users = not _is_library(type(value).__module__)
        if not is_nnx(value) and (is_users or type(value) is types.SimpleNamespace):
            for name, item in tuple(_vars(value).items()):
                label = f"{path}.{name}" if path else name
                yield _attribute, name, label, item, False


def _function_parts(fn: Any, names: set[str]) -> Iterator[tuple[Any, ...]]:
    for index, cell in enumerate(fn.__closure__ or ()):
        with contextlib.suppress(ValueError):  # an empty cell
            yield _cell, index, fn.__code__.co_freevars[index], cell.cell_contents, True
    if fn.__defaults__:
        yield getattr, "__defaults__", "a default value", fn.__defaults__, True
    for name, value in (fn.__kwdefaults__ or {}).items():
        yield _keyword, name, name, value, True
    if hasattr(fn, "__wrapped__"):
        yield getattr, "__wrapped__", fn.__name__, fn.__wrapped__, True
    if not _is_library(fn.__module__):
        own = set(_names(fn.__code__))
        names |= own
        for name in sorted(own & fn.__globals__.keys()):
            place = (fn.__globals__, name)
            yield _global, place, name, fn.__globals__[name], True


def _class_parts(kind: type, names: set[str]) -> Iterator[tuple[Any, ...]]:
    """Yields what the methods of a user's class name."""
    for base in kind.__mro__:
        for value in () if _is_library(base.__module__) else vars(base).values():
            method = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(method, types.FunctionType):
                # Reached by no name of its own: its cells stay as they are.
                for part in _function_parts(method, names):
                    if part[0] is _global:
                        yield part


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names(const)


def _is_library(module: str | None) -> bool:
    top = (module or "").partition(".")[0]
    return top in _LIBRARIES or (top != "__main__" and top in sys.stdlib_module_names)


def _vars(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})


class Roots:
    """The roots of one program: what was looked up, and whether it still is that.

    NNX objects, and what can be referred to weakly, are not kept alive: once one is
    gone, `gone` is called, and the roots are those of nothing any more.

    Args:
        entries: What `walk` found.
        touched: The ids of the NNX objects that the function used.
        gone: Called when one of the objects is gone.
    """

    def __init__(
        self, entries: Sequence[_Entry], touched: set[int], gone: Callable[[], None]
    ) -> None:
        needed: set[int] = set()
        for index in reversed(range(len(entries))):
            entry = entries[index]
            # Names are compared, whatever they stand for; of attributes and items,
            # those on the way to an object.
            if entry.named or index in needed or id(entry.value) in touched:
                needed |= {index, entry.parent}
        places = {index: i for i, index in enumerate(sorted(needed - {-1}))}
        self._alive: list[Any] = []
        self._entries = []
        self._functions: dict[int, Any] = {}
        for index, place in places.items():
            entry = entries[index]
            if entry.kind == _CODE:
                self._functions[place] = weakref.ref(entry.value)
            elif entry.kind == _IDENTITY:
                self._hold(entry, gone, leads=_leads_on(entries, needed, index))
            parent = places.get(entry.parent, -1)
            row = (parent, entry.get, entry.key, entry.kind, entry.expected, entry.path)
            self._entries.append(row)

    def _hold(self, entry: _Entry, gone: Callable[[], None], *, leads: bool) -> None:
        """Makes sure that the id of a value stays that value's."""
        try:
            self._alive.append(weakref.ref(entry.value, lambda _: gone()))
        except TypeError:
            # Lists and dicts that lead to objects would keep those alive.
            if not (leads and isinstance(entry.value, (list, *_MAPPINGS))):
                self._alive.append(entry.value)

    def difference(self, fn: Any, objects: Sequence[tuple[str, Any]]) -> Any:
        """Returns the name and value of the first root that is another one, or None."""
        roots = (fn, *(value for _, value in objects))
        values: list[Any] = []
        for parent, get, key, kind, expected, path in self._entries:
            try:
                if get is _root:
                    value = roots[key]
                else:
                    value = get(values[parent] if parent >= 0 else None, key)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError):
                return path, None
            if kind == _IDENTITY:
                is_same = id(value) == expected
            elif kind == _CODE:
                code = getattr(value, "__code__", None)
                is_same = code is expected or code == expected
            elif kind == _LENGTH:
                is_same = _length(value) == expected
            else:
                is_same = type(value) is type(expected) and value == expected
                # Globals and attributes are frozen, and cells of the same function.
                ref = self._functions.get(parent)
                is_frozen = get in (_global, _attribute)
                is_frozen |= ref is not None and ref() is values[parent]
                is_same |= is_frozen and isinstance(value, _PLAIN)
            if not is_same:
                return path, value
            values.append(value)
        return None


def _leads_on(entries: Sequence[_Entry], needed: set[int], index: int) -> bool:
    return any(entries[other].parent == index for other in needed if other >= 0)


@contextlib.contextmanager
def refuse_appends(fn: Any, name: str, entries: Any = None) -> Iterator[None]:
    """Refuses a function that appends to a list or dict that it reaches by a name.

    The function runs once, when it is traced, and not at every call. What it added is
    taken out again.

    Args:
        fn: The function that runs in the block.
        name: What messages call it.
        entries: What `walk` returned, if that is known already.

    Raises:
        StrategyError: If a list or dict has become longer or shorter.
    """
    containers = [
        (entry.path, entry.value, len(entry.value), set(entry.value.keys()))
        if isinstance(entry.value, dict)
        else (entry.path, entry.value, len(entry.value), None)
        for entry in (walk(fn) if entries is None else entries)
        if isinstance(entry.value, (list, dict))
    ]
    yield
    for path, container, length, keys in containers:
        if len(container) != length:
            now = len(container)
            if keys is None:
                del container[length:]
            else:
                for key in [key for key in container if key not in keys]:
                    del container[key]
            msg = (
                f"{name} changes the {type(container).__name__} {path}, which had "
                f"{length} entries before the call and has {now} after it. It runs in "
                "Python once per compiled program, not at every call: return the value "
                "instead, or keep it in an nnx.Variable."
            )
            raise StrategyError(msg)
