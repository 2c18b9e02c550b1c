"""Iterables, iterators and generator functions as streams.

An iterator that has `get_state` and `set_state`, as Grain's have, resumes where it was;
any other is read again from the start of the epoch, if the user agrees.
"""

import base64
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout.data.adapters.arrays import is_table
from meshlayout.data.element_rows import looks_batched
from meshlayout.data.protocols import JSON
from meshlayout.errors import DataError


@dataclass(frozen=True)
class IteratorSource:
    """A source of the elements of iterators, one iterator per pass.

    Attributes:
        begin: Returns the iterator of an epoch. Its methods `get_state`, `set_state`
            and `close` are called if it has them; a state may be bytes.
        batched: Whether its elements are batches; None infers it from them.
        num_rows: The number of examples in a pass, if known without reading them.
    """

    begin: Callable[[int], Iterator[PyTree]]
    batched: bool | None
    num_rows: int | None = None

    def open(self, epoch: int) -> "IteratorStream":
        """Starts a pass."""
        return IteratorStream(self.begin(epoch))


class IterableSource(IteratorSource):
    """The source of an iterable of no framework, whose elements could be anything.

    A class of its own, because `distribute_datasets_from_function` takes ambiguous
    elements of such a source for batches.
    """


class IteratorStream:
    """One pass over an iterator, which can seek if it has the methods for it."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[PyTree]:
        return self._iterator  # saves a call of this class's `__next__` per element

    def __next__(self) -> PyTree:
        return next(self._iterator)

    def get_state(self) -> JSON:
        """Returns the iterator's own position, or None if it has none."""
        if not hasattr(self._iterator, "set_state"):
            return None
        state = self._iterator.get_state()
        if isinstance(state, bytes):  # of Grain's DataLoader
            return {"base64": base64.b64encode(state).decode("ascii")}
        return state

    def set_state(self, state: JSON) -> None:
        """Moves the iterator to a position.

        Raises:
            DataError: If the iterator refuses it.
        """
        with seek_errors():
            if isinstance(state, dict) and state.keys() == {"base64"}:
                state = base64.b64decode(state["base64"])
            self._iterator.set_state(state)

    def close(self) -> None:
        """Closes a generator, so that its `finally` clauses run."""
        if hasattr(self._iterator, "close"):
            self._iterator.close()


@contextlib.contextmanager
def seek_errors() -> Iterator[None]:
    """Turns whatever a source raises when it is moved to a position into DataError."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        msg = (
            f"the source refuses the position of the state ({type(error).__name__}: "
            f"{error}). The state is of another source or of another version of its "
            "library, or it is damaged."
        )
        raise DataError(msg) from error


class NumberedItems(Iterator[PyTree]):
    """The items of an indexable object in order, as an iterator that can seek.

    Args:
        items: An object with `__getitem__`.
        length: The number of items.
        first: The index of the first item.
        skip_none: Whether to leave out items that are None, as Grain does.
    """

    def __init__(
        self, items: Any, length: int, *, first: int = 0, skip_none: bool = False
    ) -> None:
        self._items, self._length, self._first = items, length, first
        self._skip_none = skip_none
        self._next = 0

    def __next__(self) -> PyTree:
        while self._next < self._length:
            item = self._items[self._first + self._next]
            self._next += 1
            if item is not None or not self._skip_none:
                return item
        raise StopIteration

    def get_state(self) -> int:
        """Returns the number of items that were read."""
        return self._next

    def set_state(self, state: JSON) -> None:
        """Moves to a position.

        Raises:
            IndexError: If there are fewer items.
        """
        if not 0 <= state <= self._length:
            msg = f"the position is after item {state}, and there are {self._length}"
            raise IndexError(msg)
        self._next = state


def adapt(obj: Any, *, batched: bool | None) -> IterableSource:
    """Returns an iterable, an iterator or a generator function as a source.

    Raises:
        DataError: If it can neither be iterated nor called.
    """
    # Iterating over a data frame yields the names of its columns, which nobody wants.
    if is_table(obj) and not isinstance(obj, dict):
        msg = (
            f"a {type(obj).__name__} holds columns by name, but is not a tree of "
            "arrays. Make it one with dict(...)."
        )
        raise DataError(msg)
    is_other = isinstance(obj, (str, bytes, dict))
    if is_other or not (callable(obj) or _is_iterable(obj)):
        msg = (
            "source must be arrays, a list of examples, an iterable, a function that "
            "makes a generator, or a dataset of Grain, TFDS, tf.data, PyTorch or "
            f"Hugging Face, got {_checks.shown(obj)}."
        )
        raise DataError(msg)
    # An exhausted iterator would look like an epoch without examples.
    was_read = False

    def begin(epoch: int) -> Iterator[PyTree]:
        nonlocal was_read
        if was_read and hasattr(obj, "__next__"):
            msg = (
                f"the source is an iterator ({type(obj).__name__}), which can be read "
                f"once, and epoch {epoch + 1} starts. Give a function that makes one, "
                "as lambda: make_iterator()."
            )
            raise DataError(msg)
        was_read = True
        return _begin(obj)

    return IterableSource(begin, batched, _num_rows(obj, batched=batched))


def _begin(obj: Any) -> Iterator[PyTree]:
    """Returns an iterator over an iterable, or over what a function returns."""
    if isinstance(obj, Sequence):  # which can seek, unlike iter(obj)
        return NumberedItems(obj, len(obj))
    iterable = obj if _is_iterable(obj) else obj()
    if not _is_iterable(iterable):
        msg = (
            f"the source is a function that returned {_checks.shown(iterable)}; it "
            "must return an iterator, or be a generator function."
        )
        raise DataError(msg)
    return iter(iterable) if hasattr(iterable, "__iter__") else iterable


def _num_rows(obj: Any, *, batched: bool | None) -> int | None:
    """Returns the number of examples, if known without reading them."""
    if batched is False and hasattr(obj, "__len__"):
        return len(obj)
    if not batched or not isinstance(obj, list):
        return None
    if not all(map(looks_batched, obj)):
        return None  # reading raises a better error
    return sum(len(jax.tree.leaves(batch)[0]) for batch in obj)


def _is_iterable(obj: object) -> bool:
    return hasattr(obj, "__iter__") or hasattr(obj, "__next__")
