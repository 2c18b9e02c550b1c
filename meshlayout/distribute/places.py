"""Places in Python that may change: names, attributes, containers, random numbers.

A place is read into a tuple, which is cheap to compare with an earlier one. The same
comparison finds that a program is out of date, and that a function had a side effect.
"""

import functools
import itertools
import operator
import pickle
import random
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType
from typing import Any, TypeAlias

import numpy as np

from meshlayout.distribute.nnx_graph import ABSENT, ONLY_ONCE, is_same, text


Contents: TypeAlias = tuple[Any, ...]

RANDOM = (random.Random, np.random.Generator, np.random.RandomState)

# Longer containers are compared by their length and their beginning.
MOST_ENTRIES = 1000
# NumPy arrays up to the first size are compared before every call, and up to the
# second while a function is traced. Larger ones would take time.
_SMALL_BYTES = 1024
_MOST_BYTES = 2**24


@dataclass(frozen=True)
class Rebinding:
    """One difference between two readings of a place.

    Attributes:
        label: What the user calls the content that differs.
        before: What it was; for a container, all its entries.
        after: What it is.
    """

    label: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Place:
    """Something that may change: the names of a scope, or what an object holds.

    Attributes:
        labels: What the user calls each content, or one name for all together.
        read: Returns the present contents.
        fact: Says of a change what the function does.
        is_input: Whether a compiled program depends on the contents.
        is_fixed: Whether a new program would not see that they changed.
    """

    labels: tuple[str, ...] | str
    read: Callable[[], Contents]
    fact: Callable[[Rebinding], str]
    is_input: bool = True
    is_fixed: bool = False

    def change(self, before: Contents) -> Rebinding | None:
        """Returns the first difference from an earlier reading, or None."""
        contents = self.read()
        has_size = len(contents) == len(before)
        if has_size and all(map(operator.is_, contents, before)):
            return None
        if isinstance(self.labels, str):
            same = has_size and all(map(is_same, before, contents))
            return None if same else Rebinding(self.labels, before, contents)
        for label, old, new in zip(self.labels, before, contents, strict=True):
            if not is_same(old, new):
                return Rebinding(label, old, new)
        return None

    def refusal(self, change: Rebinding) -> str:
        """Returns the sentences that refuse a function which makes this change."""
        return f"run: the function {self.fact(change)}"


class Cells:
    """The nonlocals of a function.

    Args:
        cells: The cells by name.
    """

    def __init__(self, cells: Mapping[str, CellType]) -> None:
        self._cells = cells

    def get(self, name: str, default: object) -> Any:
        """Returns the value of a nonlocal, or the default if it has none yet."""
        try:
            return self._cells[name].cell_contents
        except ValueError:
            return default


class Slots:
    """The attributes of an object that has `__slots__`.

    Args:
        owner: The object.
    """

    def __init__(self, owner: object) -> None:
        self._owner = owner

    def get(self, name: str, default: object) -> Any:
        """Returns the value of an attribute, or the default if it is not set."""
        return getattr(self._owner, name, default)


def names_place(
    prefix: str, names: Iterable[str], get: Callable[[str, object], Any]
) -> Place:
    """Returns the place of some names of a scope, set or not.

    Args:
        prefix: What the user writes before a name, such as `self.`.
        names: The names.
        get: Returns the value of a name, or its second argument if it has none.
    """
    names = tuple(names)
    absent = itertools.repeat(ABSENT)
    labels = tuple(f"{prefix}{name}" for name in names)
    return Place(labels, lambda: tuple(map(get, names, absent)), _sets)


def object_place(name: str, value: Any) -> Place | None:
    """Returns the place of what an object holds, or None if that cannot be read."""
    if isinstance(value, RANDOM):
        return Place(name, lambda: (_random_state(value),), _draws, is_input=False)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject or value.nbytes > _MOST_BYTES:
            return None
        is_small = value.nbytes <= _SMALL_BYTES
        read = functools.partial(_array_bytes, value)
        return Place(name, read, _writes, is_input=is_small, is_fixed=True)
    if isinstance(value, types.GeneratorType) or _is_builtin_iterator(value):
        state = functools.partial(_iterator_state, value)
        return Place(name, lambda: (state(),), _advances, is_input=False)
    return None


def container_place(name: str, value: Any) -> Place:
    """Returns the place of the entries of a list, dict, set or deque."""
    kind = type(value).__name__

    def read() -> Contents:
        entries = itertools.islice(value, MOST_ENTRIES)
        if isinstance(value, dict):
            values = itertools.islice(value.values(), MOST_ENTRIES)
            return len(value), *entries, *values
        return len(value), *entries

    return Place(f"the {kind} {name}", read, _changes)


def _sets(change: Rebinding) -> str:
    return (
        f"sets {change.label} from {text(change.before)} to {text(change.after)}. "
        f"{ONLY_ONCE} Return the value, or keep it in an nnx.Variable."
    )


def _changes(change: Rebinding) -> str:
    sizes = change.before[0], change.after[0]
    extent = f" from {sizes[0]} to {sizes[1]} entries" if sizes[0] != sizes[1] else ""
    return (
        f"changes {change.label}{extent}. {ONLY_ONCE} Return the value, or keep it in "
        "an nnx.Variable."
    )


def _writes(change: Rebinding) -> str:
    return (
        f"writes to the NumPy array {change.label}. {ONLY_ONCE} Return the value, or "
        "keep it in an nnx.Variable."
    )


def _draws(change: Rebinding) -> str:
    return (
        f"draws random numbers from {change.label}. The function runs once per "
        "compiled program, so every call would use the same numbers. Use nnx.Rngs or "
        "jax.random, or pass the numbers as an argument."
    )


def _advances(change: Rebinding) -> str:
    return (
        f"advances the iterator {change.label}. The function runs once per compiled "
        "program, so every call would use the same element. Pass the element as an "
        "argument."
    )


def _array_bytes(x: np.ndarray[Any, Any]) -> Contents:
    return (x.tobytes(),)


def _random_state(generator: Any) -> bytes:
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    if isinstance(generator, np.random.Generator):
        return pickle.dumps(generator.bit_generator.state)
    return pickle.dumps(generator.get_state(legacy=False))


def _is_builtin_iterator(value: object) -> bool:
    kind = type(value)
    return kind.__module__ in ("builtins", "itertools") and isinstance(value, Iterator)


def _iterator_state(iterator: Any) -> Any:
    """Returns how far an iterator has come, as far as Python shows it."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        if frame is None:
            return None
        return frame.f_lasti, *((x, id(y)) for x, y in frame.f_locals.items())
    if (remaining := operator.length_hint(iterator, -1)) >= 0:
        return remaining
    with warnings.catch_warnings():  # of itertools, from Python 3.12 on
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            _, *arguments = iterator.__reduce__()
        except (TypeError, AttributeError):  # Python 3.14, of itertools
            return repr(iterator)
    flat = itertools.chain(*(x if isinstance(x, tuple) else (x,) for x in arguments))
    return tuple(
        _iterator_state(x)
        if _is_builtin_iterator(x)
        # itertools.cycle returns a new list each time.
        else len(x)
        if isinstance(x, list)
        else x
        for x in flat
    )
