"""Iterables, iterators and generator functions as streams.

An iterator that has `get_state` and `set_state`, as Grain's have, resumes where it was;
any other is read again from the start of the epoch, if the user agrees.
"""

import ast
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout.data.examples import looks_batched
from meshlayout.data.protocols import JSON
from meshlayout.errors import DataError


@dataclass(frozen=True)
class IteratorSource:
    """A source of the elements of iterators: `begin` returns that of an epoch.

    Its methods `get_state`, `set_state` and `close` are called if it has them.
    """

    begin: Callable[[int], Iterator[PyTree]]
    batched: bool | None
    num_rows: int | None = None

    def open(self, epoch: int) -> "IteratorStream":
        """Starts a pass."""
        return IteratorStream(self.begin(epoch))


class IteratorStream:
    """One pass over an iterator, which can seek if it has the methods for it."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[PyTree]:
        return self._iterator  # saves a call of this class's `__next__` per element

    def __next__(self) -> PyTree:
        return next(self._iterator)

    def get_state(self) -> JSON:
        """Returns the iterator's own position, or None if it has none.

        As a Python literal: JSON lacks bytes, which are the state of Grain's
        DataLoader, and makes lists of tuples, which mean another position to Grain.
        """
        if not hasattr(self._iterator, "set_state"):
            return None
        state = self._iterator.get_state()
        text = None if state is None else repr(state)
        ast.literal_eval(text or "None")  # what cannot be read back is an error now
        return text

    def set_state(self, state: JSON) -> None:
        """Moves the iterator to a position; raises DataError if it refuses it."""
        try:
            self._iterator.set_state(ast.literal_eval(state))
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"the source refuses the position of the state ({type(error).__name__}"
                f": {error}). The state is of another source or of another version of "
                "its library, or it is damaged."
            ) from error

    def close(self) -> None:
        """Closes a generator, so that its `finally` clauses run."""
        if hasattr(self._iterator, "close"):
            self._iterator.close()


class NumberedItems(Iterator[PyTree]):
    """The items of an indexable object in order, as an iterator that can seek."""

    def __init__(
        self, items: Any, length: int, *, first: int = 0, skip_none: bool = False
    ) -> None:
        self._items, self._length, self._first = items, length, first
        self._skip_none, self._next = skip_none, 0

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

    def set_state(self, state: int) -> None:
        """Moves to a position."""
        if not 0 <= state <= self._length:
            msg = f"the position is after item {state}, and there are {self._length}"
            raise IndexError(msg)
        self._next = state


def adapt(obj: Any, *, batched: bool | None) -> IteratorSource:
    """Returns an iterable, an iterator or a generator function as a source."""
    is_source = callable(obj) or hasattr(obj, "__iter__")
    # Iterating over a table would yield the names of its columns.
    if isinstance(obj, (str, bytes)) or hasattr(obj, "keys") or not is_source:
        raise DataError(
            "the source must be arrays, a list of examples, an iterable, a function "
            "that makes a generator, or a dataset of Grain, TFDS, tf.data, PyTorch or "
            f"Hugging Face, got {_checks.shown(obj)}."
        )
    source: Any = obj
    passes = itertools.count()

    def begin(epoch: int) -> Iterator[PyTree]:
        # An exhausted iterator would look like an epoch without examples.
        if next(passes) and hasattr(obj, "__next__"):
            msg = f"the source is an iterator ({type(obj).__name__}), which can be read"
            msg += (
                f" once, and epoch {epoch + 1} starts. Give a function that makes one"
            )
            raise DataError(f"{msg}, as lambda: make_iterator().")
        if isinstance(obj, Sequence):  # which can seek, unlike iter(obj)
            return NumberedItems(obj, len(obj))
        return iter(source if hasattr(obj, "__iter__") else source())

    num_rows = len(source) if batched is False and hasattr(obj, "__len__") else None
    # Where batches differ, reading them raises a better error.
    if batched and isinstance(obj, list) and all(map(looks_batched, obj)):
        num_rows = sum(len(jax.tree.leaves(batch)[0]) for batch in obj)
    return IteratorSource(begin, batched, num_rows)
