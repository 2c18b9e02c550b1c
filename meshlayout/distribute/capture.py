"""The roots of a function: by which names it reaches objects, and whether they changed.

A program is compiled for the objects that a function reaches: a closure's cells, the
globals that its code names, the attributes of its `self`. Before each call they are
looked up again and compared by identity, so that a name that is bound to another model
means that model. Which Variables the function uses is not found here: its first trace
tells (`variables.TraceWatch`). So a path that this walk does not see costs nothing but
the notice of a rebinding.
"""

import contextlib
import functools
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, getitem
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

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


class _Entry(NamedTuple):
    """A value that a function reaches: `get(value of the parent, key)`."""

    parent: int
    get: Callable[[Any, Any], Any]
    key: Any
    path: str
    value: Any


def _cell(fn: Any, name: str) -> Any:
    return fn.__closure__[fn.__code__.co_freevars.index(name)].cell_contents


def _global(fn: Any, name: str) -> Any:
    return fn.__globals__[name]


def _attribute(instance: Any, name: str) -> Any:
    return instance.__dict__[name]


class Roots:
    """What a function reaches by names.

    Args:
        fn: The function.
        objects: The NNX objects among its arguments, with their names.
    """

    def __init__(self, fn: Any, objects: Sequence[tuple[str, Any]] = ()) -> None:
        named = [(getattr(fn, "__name__", type(fn).__name__), fn), *objects]
        self._names, found = set[str](), {"__call__"}
        while not found <= self._names:  # methods are found by the names in others
            self._names |= found
            self._entries = _walk(named, self._names)
            functions = filter(_is_users_function, (x.value for x in self._entries))
            found = {name for fn in functions for name in _names(fn.__code__)}

    def path_of(self, variable: Any) -> str:
        """Returns the path of a Variable, such as `model/encoder/kernel`."""
        for *_, path, value in self._entries:
            for parts, node in nnx.iter_graph(value) if is_nnx(value) else ():
                if node is variable:
                    return "/".join((path, *map(str, parts)))
        return f"a {type(variable).__name__} that no name leads to"

    @contextlib.contextmanager
    def refuse_appends(self, name: str) -> Iterator[None]:
        """Refuses that the function of a name makes a list or dict longer in the block.

        Raises:
            StrategyError: If a list or dict has become longer or shorter.
        """
        containers = [x for x in self._entries if isinstance(x.value, (list, dict))]
        copies = [entry.value.copy() for entry in containers]
        yield
        for (*_, path, value), before in zip(containers, copies, strict=True):
            now = len(value)
            if now != len(before):
                value.clear()  # so that a dict is refused the next time as well
                (value.extend if isinstance(value, list) else value.update)(before)
                msg = (
                    f"{name} changes the {type(value).__name__} {path}, which had "
                    f"{len(before)} entries before the call and has {now} after it. It "
                    "runs in Python once per compiled program, not at every call: "
                    "return the value instead, or keep it in an nnx.Variable."
                )
                raise StrategyError(msg)

    def keep(self, touched: set[int], gone: Callable[[], None]) -> None:
        """Keeps what decides on a program, and no NNX object alive.

        Names are compared, whatever they stand for. Of items, and of attributes that no
        code names, those count that lead to what the function used.

        Args:
            touched: The ids of the NNX objects that it used.
            gone: Called when an object is gone.
        """
        entries, self._entries = self._entries, []
        # Items of lists and dicts, other than those of defaults.
        is_loose = [
            isinstance(entry.value, (list, dict)) and entry.get is not getattr
            for entry in entries
        ]
        used = {x.parent for x in entries if id(x.value) in touched} - {0}
        kept = {0}
        for index, (parent, get, key, _, value) in enumerate(entries):  # parents first
            is_named = key in self._names if get is _attribute else not is_loose[parent]
            is_beside = is_loose[parent] and parent in used and is_nnx(value)
            if (is_named and parent in kept) or is_beside:
                kept.add(index)
        num_kept = Counter[int]()
        for index in range(len(entries) - 1, 0, -1):
            if index in kept or id(entries[index].value) in touched:
                parent = entries[index].parent
                kept |= {index, parent}
                num_kept[id(entries[parent].value)] += 1
        places = {index: place for place, index in enumerate(sorted(kept))}
        self._functions: dict[int, Any] = {}
        self._alive: list[Any] = []
        self._rows: list[tuple[Any, ...]] = []
        for index, place in places.items():
            parent, get, key, path, value = entries[index]
            token: Any = id
            if isinstance(value, types.FunctionType):
                token, self._functions[place] = _code, weakref.ref(value)
            elif isinstance(value, _NUMBERS) and not isinstance(value, bool):
                token = _typed
            elif isinstance(value, types.MethodType | functools.partial) or (
                # It would keep models alive, and all of its items are compared.
                isinstance(value, (tuple, list, dict))
                and (get is getattr or len(value) == num_kept[id(value)] > 0)
            ):
                token = _size
            else:  # its id must stay this value's
                try:
                    self._alive.append(weakref.ref(value, lambda _: gone()))
                except TypeError:
                    self._alive.append(value)
            row = (places[parent], get, key, token, token(value), path)
            self._rows.append(row)

    def difference(self, fn: Any, objects: Sequence[Any]) -> tuple[str, Any] | None:
        """Returns the name and value of the first root that is another one, or None."""
        values: list[Any] = [(fn, *objects)]
        for parent, get, key, token, expected, path in self._rows[1:]:
            try:
                value = get(values[parent], key)
                is_same = token(value) == expected
            except (AttributeError, LookupError, TypeError, ValueError):
                return path, None
            if not is_same:
                # Numbers and strings are frozen in what is not defined anew.
                same = self._functions.get(parent, lambda: None)() is values[parent]
                is_frozen = token is _typed and isinstance(value, _NUMBERS)
                if not is_frozen or not (same or get is _attribute):
                    return path, value
            values.append(value)
        return None


_code = attrgetter("__code__")


def _typed(value: Any) -> Any:
    return type(value), value


def _size(value: Any) -> Any:
    return type(value), len(value) if isinstance(value, (tuple, list, dict)) else None


def _walk(named: list[tuple[str, Any]], names: set[str]) -> list[_Entry]:
    roots = tuple(value for _, value in named)
    entries = [_Entry(0, getitem, 0, "", roots)]
    for key, (path, value) in enumerate(named):
        entries.append(_Entry(0, getitem, key, path, value))
    seen = {id(roots)}
    for index, (*_, path, value) in enumerate(entries):  # which grow
        for get, key, name in _parts(value, names) if id(value) not in seen else ():
            with contextlib.suppress(AttributeError, ValueError):  # an empty cell
                part = get(value, key)
                inner = path + name if name[:1] in ("", ".", "[") else name
                entries.append(_Entry(index, get, key, inner, part))
        seen.add(id(value))
    return entries


def _parts(value: Any, names: set[str]) -> Iterator[tuple[Any, Any, str]]:
    """Yields what a value leads to: how it is got, its key, and its part of a path."""
    if isinstance(value, (*_NUMBERS, type(None), jax.Array, np.ndarray)):
        return
    if isinstance(value, types.FunctionType):
        yield from ((_cell, name, name) for name in value.__code__.co_freevars)
        if _is_users_function(value):
            own = {*_names(value.__code__)} & value.__globals__.keys()
            yield from ((_global, name, name) for name in sorted(own))
    elif isinstance(value, (tuple, list)):
        yield from ((getitem, index, f"[{index}]") for index in range(len(value)))
    elif isinstance(value, dict):
        yield from ((getitem, key, f"[{key!r}]") for key in tuple(value))
    elif isinstance(value, type):
        if _is_users(value):
            own = {"__base__", *(names & {*dir(value)})}
            yield from ((getattr, name, name) for name in sorted(own))
    elif _is_users(type(value)):
        yield getattr, "__class__", ""
        own = () if is_nnx(value) else tuple(getattr(value, "__dict__", ()))
        yield from ((_attribute, name, f".{name}") for name in own)
    wrapped = ("__wrapped__",) if callable(value) else ()
    for name in _ATTRIBUTES.get(type(value), wrapped):
        yield getattr, name, "self" if name == "__self__" else ""


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names(const)


def _is_users(defined: Any) -> bool:
    """Returns whether a function or class is the user's."""
    return (defined.__module__ or "").partition(".")[0] not in _LIBRARIES


def _is_users_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and _is_users(value)
