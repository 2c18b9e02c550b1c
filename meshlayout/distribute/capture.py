"""The roots of a function: the names by which it reaches objects, and their changes.

Before each call, closure cells, globals that the code names, attributes of `self` and
arguments are looked up again and compared by identity: a name bound to another model
now means that model. The first trace shows which Variables a function uses.
"""

import contextlib
import dis
import functools
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter, getitem
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from meshlayout._paths import is_nnx_object
from meshlayout.errors import StrategyError


_NUMBERS = (int, float, complex, str, bytes, np.generic)  # and strings
_LIBRARIES = {"flax", "grain", "jax", "jaxlib", "meshlayout", "numpy", "optax", "orbax"}
_LIBRARIES |= sys.stdlib_module_names - {"collections", "types"}  # UserDict ...
_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    types.FunctionType: ("__defaults__", "__kwdefaults__", "__wrapped__"),
    types.MethodType: ("__self__", "__func__"),
    functools.partial: ("func", "args", "keywords"),
    property: ("fget",),
}


class _Entry(NamedTuple):
    """A value that a function reaches: `get(value of the parent, key)`."""

    parent: int
    get: Callable[[Any, Any], Any]
    key: Any
    path: str
    value: Any
    is_named: bool = True  # by code, and no item of a list or dict


def _cell(fn: Any, name: str) -> Any:
    return fn.__closure__[fn.__code__.co_freevars.index(name)].cell_contents


def _global(fn: Any, name: str) -> Any:
    return fn.__globals__[name]


def _attribute(instance: Any, name: str) -> Any:
    return instance.__dict__[name]


class Roots:
    """What a function, and the NNX objects among its arguments, reach by names."""

    def __init__(self, fn: Any, objects: Iterable[tuple[str, Any]] = ()) -> None:
        objects = [(name, x) for name, x in objects if is_nnx_object(x)]
        self.name = getattr(fn, "__name__", type(fn).__name__)
        roots = [(self.name, fn), *objects]
        self._names, num_names = {"__call__"}, 0
        while num_names < len(self._names):  # methods are found by names in others
            num_names, seen = len(self._names), set[int]()
            self._entries = [_Entry(0, getitem, 0, "", None)]
            for key, root in enumerate(roots):
                self._entries.append(_Entry(0, getitem, key, *root))
            for index, entry in enumerate(self._entries):  # which grow
                if id(entry.value) not in seen:
                    seen.add(id(entry.value))
                    self._entries.extend(_parts(index, entry, self._names))

    def path_of(self, variable: Any) -> str:
        """Returns the path of a Variable, such as `model/encoder/kernel`."""
        for _, _, _, path, value, _ in self._entries:
            for parts, node in nnx.iter_graph(value) if is_nnx_object(value) else ():
                if node is variable:
                    return "/".join((path, *map(str, parts)))
        return f"a {type(variable).__name__} that no name leads to"

    @contextlib.contextmanager
    def refuse_changes(self, name: str) -> Iterator[None]:
        """Raises StrategyError if the call inside appends to a list or counts."""
        containers = [x for x in self._entries if isinstance(x.value, (list, dict))]
        copies, bound = [entry.value.copy() for entry in containers], self._bound()
        yield
        changes = list[str]()
        for (_, _, _, path, value, _), before in zip(containers, copies, strict=True):
            if len(value) != len(before):
                value.clear()  # so that a dict is refused the next time as well
                (value.extend if isinstance(value, list) else value.update)(before)
                changes.append(f"the {type(value).__name__} {path}")
        for place, value in self._bound().items():
            old = bound.get(place)  # flags are switched, and what is None is filled
            is_other = isinstance(value, Tracer) or type(value) is type(old) is not bool
            changes += [place[1]] * (is_other and value is not old)
        if changes:
            msg = f"{name} changes {changes[0]}. It runs in Python once per compiled "
            msg += "program, not at every call: return the value instead, or keep it in"
            raise StrategyError(f"{msg} an nnx.Variable.")

    def _bound(self) -> dict[tuple[int, str], Any]:
        """Returns the current values of names and attributes."""
        return {
            (x.parent, x.path): x.value
            for index, entry in enumerate(self._entries)
            for x in _parts(index, entry, self._names)
            if x.get in (_attribute, _global, _cell)
        }

    def keep(self, touched: set[int], gone: Callable[[], None]) -> None:
        """Keeps what code names or leads to the ids touched, and no object alive."""
        entries, self._entries = self._entries, []
        used = [x for x in entries if id(x.value) in touched and not x.is_named]
        containers = {x.parent for x in used if x.get is getitem}
        kept, num_parts = {0}, Counter[int]()
        for index in range(len(entries) - 1, 0, -1):
            parent, _, _, _, value, is_named = entries[index]
            is_beside = parent in containers and is_nnx_object(value)
            if is_named or is_beside or index in kept or id(value) in touched:
                kept |= {index, parent}
                num_parts[parent] += 1
        places = {index: place for place, index in enumerate(sorted(kept))}
        self._functions: dict[int, Any] = {}
        self._alive: list[Any] = []
        self._rows: list[tuple[Any, ...]] = []
        for index, place in places.items():
            parent, get, key, path, value, _ = entries[index]
            token: Callable[[Any], Any] = id
            if isinstance(value, types.FunctionType):
                token = attrgetter("__code__")
                self._functions[place] = weakref.ref(value)
            elif isinstance(value, types.MethodType | functools.partial):
                token = type
            elif isinstance(value, _NUMBERS) and not isinstance(value, bool):
                token = repr
            elif isinstance(value, (tuple, list, dict)) and (
                get is getattr or len(value) == num_parts[index] > 0
            ):
                token = len  # all its items are compared, and it would keep them alive
            else:  # its id must stay this value's
                try:
                    self._alive.append(weakref.ref(value, lambda _: gone()))
                except TypeError:
                    self._alive.append(value)
            row = (places[parent], get, key, token, token(value), path)
            self._rows.append(row)

    def difference(self, fn: Any, objects: Sequence[Any]) -> str | None:
        """Returns the name of the first root that has changed, or None."""
        values: list[Any] = [(fn, *objects)]
        for parent, get, key, token, expected, path in self._rows[1:]:
            try:
                value = get(values[parent], key)
                if token(value) != expected:
                    # Numbers and strings are frozen in what is not defined anew.
                    is_frozen = token is repr and isinstance(value, _NUMBERS)
                    function = self._functions.get(parent, lambda: None)()
                    is_same = function is values[parent] or get is _attribute
                    if not (is_frozen and is_same):
                        return path
            except (AttributeError, LookupError, TypeError, ValueError):
                return path
            values.append(value)
        return None


def _parts(index: int, entry: _Entry, names: set[str]) -> Iterator[_Entry]:
    """Yields the parts of a value, and adds to the names in code."""
    value, path, are_named = entry.value, entry.path, entry.is_named
    found: list[tuple[Any, Any, str]] = []
    if isinstance(value, (*_NUMBERS, type(None), jax.Array, np.ndarray)):
        return
    if isinstance(value, types.FunctionType):
        found += [(_cell, name, name) for name in value.__code__.co_freevars]
        if _is_users(value):
            own = _names(value.__code__)
            names |= own.keys()
            found += [(_global, x, x) for x in sorted(value.__globals__) if own.get(x)]
    elif isinstance(value, (tuple, list, dict)):
        keys = value if isinstance(value, dict) else range(len(value))
        found += [(getitem, key, f"{path}[{key!r}]") for key in keys]
        are_named &= isinstance(value, tuple) or entry.get is getattr  # of a default
    elif isinstance(value, type):
        if _is_users(value):
            own = {"__base__", *(names & {*dir(value)})}
            found += [(getattr, name, name) for name in sorted(own)]
    elif _is_users(type(value)):
        found += [(getattr, "__class__", path)]
        for name in () if is_nnx_object(value) else getattr(value, "__dict__", ()):
            found += [(_attribute, name, f"{path}.{name}")]
    wrapped = ("__wrapped__",) if callable(value) else ()
    for name in _ATTRIBUTES.get(type(value), wrapped):
        found += [(getattr, name, "self" if name == "__self__" else path)]
    for get, key, path in found:
        with contextlib.suppress(AttributeError, ValueError):  # an empty cell
            part, is_named = get(value, key), get is not _attribute or key in names
            is_named &= are_named
            if get is getitem and _is_users(type(part)):  # its methods may be called
                is_named |= bool(names & {*dir(type(part))} - {*dir(object)})
            if part is not None or get is not getattr:
                yield _Entry(index, get, key, path, part, is_named)


@functools.cache
def _names(code: types.CodeType) -> dict[str, bool]:
    """Returns the names in code, and those that are globals, not only attributes."""
    loads = {x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL"}
    names = {name: name in loads for name in code.co_names}
    for inner in (x for x in code.co_consts if isinstance(x, types.CodeType)):
        names |= {x: names.get(x, False) or y for x, y in _names(inner).items()}
    return names


def _is_users(defined: Any) -> bool:
    return (defined.__module__ or "").partition(".")[0] not in _LIBRARIES
