"""Iterables, iterators and generator functions as sources that are streamed."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout.data.adapters.arrays import is_table
from meshlayout.data.examples import looks_batched
from meshlayout.data.protocols import JSON, StreamSource
from meshlayout.errors import DataError


def adapt(obj: Any, *, batched: bool | None) -> StreamSource:
    """Returns an iterable, an iterator or a generator function as a source.

    Args:
        obj: What the user gave.
        batched: Whether its elements are batches; None infers it from them.

    Raises:
        DataError: If it can neither be iterated nor called.
    """
    if is_table(obj) and not isinstance(obj, dict):
        msg = (
            f"a {type(obj).__name__} gives columns by name, and is not a tree of "
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
    return IterableSource(obj, batched=batched)


class IterableSource:
    """A source of the elements of an iterable.

    Attributes:
        batched: Whether its elements are batches; None infers it from them.
        num_rows: How many examples it has, if known without reading them.

    Args:
        obj: An iterable, an iterator, or a function that returns one of them.
        batched: Whether its elements are batches; None infers it from them.
    """

    def __init__(self, obj: Any, *, batched: bool | None) -> None:
        self._obj, self.batched = obj, batched
        self._was_opened = False
        self.num_rows = _num_rows(obj, batched=batched)

    def open(self, epoch: int) -> "IteratorStream":
        """Begins a pass.

        Raises:
            DataError: If it cannot be read again.
        """
        if self._was_opened and hasattr(self._obj, "__next__"):
            msg = (
                f"the source is an iterator ({type(self._obj).__name__}), which can be "
                f"read once, and epoch {epoch + 1} begins. Give a function that makes "
                "one, as lambda: make_iterator()."
            )
            raise DataError(msg)
        self._was_opened = True
        return IteratorStream(self._begin())

    def _begin(self) -> Iterator[PyTree]:
        if _is_iterable(self._obj):
            if isinstance(self._obj, Sequence):
                return _Items(self._obj)
            return _iterator(self._obj)
        made = self._obj()
        if not _is_iterable(made):
            msg = (
                f"the source is a function that returned {_checks.shown(made)}; it has "
                "to return an iterator, or be a generator function."
            )
            raise DataError(msg)
        return _iterator(made)


class IteratorStream:
    """One pass over an iterator, which knows its place if it has the methods for it."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[PyTree]:
        return self._iterator  # saves a call of this class's `__next__` per element

    def __next__(self) -> PyTree:
        return next(self._iterator)

    def get_state(self) -> JSON:
        """Returns the iterator's own place, or None."""
        if not hasattr(self._iterator, "set_state"):
            return None
        return self._iterator.get_state()

    def set_state(self, state: JSON) -> None:
        """Goes to a place."""
        self._iterator.set_state(state)

    def close(self) -> None:
        """Closes a generator, so that its `finally` clauses run."""
        if hasattr(self._iterator, "close"):
            self._iterator.close()


class _Items(Iterator[PyTree]):
    """An iterator over a sequence that knows its place."""

    def __init__(self, items: Sequence[PyTree]) -> None:
        self._items, self._next = items, 0

    def __next__(self) -> PyTree:
        if self._next >= len(self._items):
            raise StopIteration
        self._next += 1
        return self._items[self._next - 1]

    def get_state(self) -> int:
        return self._next

    def set_state(self, state: int) -> None:
        self._next = state


def _num_rows(obj: Any, *, batched: bool | None) -> int | None:
    """Returns how many examples there are, if known without reading them."""
    if batched is False and hasattr(obj, "__len__"):
        return len(obj)
    if not batched or not isinstance(obj, list):
        return None
    if not all(map(looks_batched, obj)):
        return None  # reading raises a better error
    return sum(len(jax.tree.leaves(batch)[0]) for batch in obj)


def _is_iterable(obj: object) -> bool:
    return hasattr(obj, "__iter__") or hasattr(obj, "__next__")


def _iterator(obj: Any) -> Iterator[PyTree]:
    return iter(obj) if hasattr(obj, "__iter__") else obj
