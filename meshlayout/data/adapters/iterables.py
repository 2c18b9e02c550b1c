"""Iterables, iterators and generator functions as sources that are streamed."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from meshlayout.data.adapters.arrays import is_table, looks_batched
from meshlayout.data.adapters.streams import Elements, ElementStream
from meshlayout.data.clock import Clock
from meshlayout.data.source import Source
from meshlayout.errors import DataError


def adapt(obj: Any, clock: Clock, *, batched: bool | None) -> Source:
    """Returns an iterable, an iterator or a generator function as a source.

    Args:
        obj: What the user gave.
        clock: Not needed here.
        batched: Whether its elements are batches; None where they tell.

    Raises:
        DataError: If it can neither be iterated nor called.
    """
    del clock
    if is_table(obj) and not isinstance(obj, dict):
        msg = (
            f"a {type(obj).__name__} gives columns by name, and is no tree of arrays. "
            "Make it one with dict(...)."
        )
        raise DataError(msg)
    is_other = isinstance(obj, (str, bytes, dict))
    if is_other or not (callable(obj) or _is_iterable(obj)):
        msg = (
            f"a {type(obj).__name__} is no source of examples. Give arrays, a list of "
            "examples, an iterable, a function that makes a generator, or a data set "
            "of Grain, TFDS, tf.data, PyTorch or Hugging Face."
        )
        raise DataError(msg)
    return IterableSource(obj, batched=batched)


class IterableSource:
    """A source of the elements of an iterable.

    Args:
        obj: An iterable, an iterator, or a function that returns one of them.
        batched: Whether its elements are batches; None where they tell.
    """

    def __init__(self, obj: Any, *, batched: bool | None) -> None:
        self._obj, self._batched = obj, batched
        self._was_opened = False
        self.num_rows = _num_rows(obj, batched=batched)
        self.is_one_way = hasattr(obj, "__next__")

    def open(self, epoch: int) -> ElementStream:
        """Begins a pass.

        Raises:
            DataError: If it cannot be read again.
        """
        if self._was_opened and self.is_one_way:
            msg = (
                f"the source is an iterator ({type(self._obj).__name__}), which can be "
                f"read once, and epoch {epoch + 1} begins. Give a function that makes "
                "one, as lambda: make_iterator()."
            )
            raise DataError(msg)
        self._was_opened = True
        return ElementStream(_IteratorElements(self._begin()), batched=self._batched)

    def _begin(self) -> Any:
        if _is_iterable(self._obj):
            if isinstance(self._obj, Sequence):
                return _Items(self._obj)
            return _iterator(self._obj)
        made = self._obj()
        if not _is_iterable(made):
            msg = (
                f"the source is a function that returned a {type(made).__name__}; it "
                "has to return an iterator, or be a generator function."
            )
            raise DataError(msg)
        return _iterator(made)


class _IteratorElements(Elements):
    """The elements of an iterator.

    It tells its place if it has `get_state` and `set_state`.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self._iterator

    def __next__(self) -> Any:
        return next(self._iterator)

    def get_state(self) -> Any:
        if not hasattr(self._iterator, "set_state"):
            return None
        return self._iterator.get_state()

    def set_state(self, state: Any) -> None:
        self._iterator.set_state(state)

    def close(self) -> None:
        """Closes a generator, so that its `finally` clauses run."""
        close: Callable[[], None] | None = getattr(self._iterator, "close", None)
        if close is not None:
            close()


class _Items:
    """An iterator over a sequence that knows its place."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items, self._next = items, 0

    def __iter__(self) -> "_Items":
        return self

    def __next__(self) -> Any:
        if self._next >= len(self._items):
            raise StopIteration
        self._next += 1
        return self._items[self._next - 1]

    def get_state(self) -> int:
        return self._next

    def set_state(self, state: int) -> None:
        self._next = state


def _num_rows(obj: Any, *, batched: bool | None) -> int | None:
    """Returns how many examples there are, where that is seen without reading them."""
    if batched is False and hasattr(obj, "__len__"):
        return len(obj)
    if not batched or not isinstance(obj, list):
        return None
    if not all(map(looks_batched, obj)):
        return None  # reading says what is wrong
    return sum(len(jax.tree.leaves(batch)[0]) for batch in obj)


def _is_iterable(obj: Any) -> bool:
    return hasattr(obj, "__iter__") or hasattr(obj, "__next__")


def _iterator(obj: Any) -> Any:
    return iter(obj) if hasattr(obj, "__iter__") else obj
