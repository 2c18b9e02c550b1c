"""`Input`: passes over the data that can be left in the middle and resumed."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from meshlayout._annotations import Batch
from meshlayout.checkpoint.data_state import Continues
from meshlayout.errors import CheckpointError


logger = logging.getLogger("meshlayout.checkpoint")

Data: TypeAlias = Iterable[Any] | Callable[[], Iterable[Any]]
"""Batches that can be gone through again, a function that returns them, an iterator."""

_END: Any = object()


def why_not(data: object) -> str:
    """Returns why data cannot be batches; empty if it may be.

    Example:
        >>> why_not([1, 2]), why_not({"x": 1}), why_not(5)
        ('', 'one batch', 'not iterable')
    """
    if isinstance(data, (Mapping, str, np.ndarray, jax.Array)) or (
        isinstance(data, tuple) and all(hasattr(x, "dtype") for x in data)
    ):
        return "one batch"
    is_data = isinstance(data, Iterable) or callable(data)
    return "" if is_data else "not iterable"


class Input:
    """The batches of successive passes over the data.

    It counts the batches of the pass that were yielded, and saves the position of
    iterators that have one (`get_state` and `set_state`). To be resumed, other data
    must yield the same batches in each pass and in each run.

    Args:
        data: An iterable, of which each pass is a new iteration; a function that
            returns one; or an iterator, of which there is a single pass.

    Attributes:
        num_given: The batches of this pass that were yielded.

    Example:
        >>> batches = Input([10, 20, 30])
        >>> batches.begin()
        >>> next(batches), batches.look(), batches.num_given
        (10, 20, 1)
        >>> list(batches)
        [20, 30]
    """

    def __init__(self, data: Data) -> None:
        self._data = data
        self._pass: Iterator[Any] | None = None
        # Batches that were peeked at and not yielded yet, including the next pass's.
        self._seen: list[Any] = []
        self._next: tuple[Iterator[Any], Any] | None = None
        self._is_over = False
        self.num_given = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Batch:
        if self._seen:
            batch = self._seen.pop()
        elif self._pass is None:
            raise StopIteration
        else:
            batch = next(self._pass, _END)
            self._is_over = batch is _END
            if self._is_over:
                raise StopIteration
        self.num_given += 1
        return batch

    def begin(self) -> None:
        """Begins a pass, or continues the only one there is."""
        self._is_over = False
        if self._next is not None:
            (self._pass, batch), self._next = self._next, None
            self._seen = [] if batch is _END else [batch]
        elif self._pass is None or not isinstance(self._data, Iterator):
            self._pass = self._new_pass()
            self._seen = []
        if not isinstance(self._data, Iterator):
            self.num_given = 0

    def look(self) -> Batch:
        """Returns the next batch, even of the next pass, or None; yields it later."""
        if not self._seen and self._pass is not None:
            batch = next(self._pass, _END)
            self._seen = [] if batch is _END else [batch]
        if self._seen:
            return self._seen[-1]
        if isinstance(self._data, Iterator):
            return None
        if self._next is None:
            following = self._new_pass()
            self._next = following, next(following, _END)
        return None if self._next[1] is _END else self._next[1]

    # Its position.

    def place(self, *, keep: bool = False) -> tuple[dict[str, Any], Continues | None]:
        """Returns the position, and the object with the iterator's state, or None.

        With `keep`, that state is frozen, whatever is read later.
        """
        iterator = self._pass if isinstance(self._pass, Continues) else None
        place = {
            "given": self.num_given,
            "over": self._is_over,
            "tells": iterator is not None,
        }
        if iterator is not None and keep:
            iterator = _SavedPosition(iterator.get_state())
        return place, iterator

    def take_up(
        self, place: Mapping[str, Any], put: Callable[[Continues], None]
    ) -> None:
        """Begins a pass; `put` moves its iterator to the saved place if it can go."""
        self._next = None
        self.begin()
        if place["tells"] and isinstance(self._pass, Continues):
            put(self._pass)
            self._seen = []
            self.num_given = place["given"]

    def catch_up(self, place: Mapping[str, Any]) -> None:
        """Drops batches up to a place, where `take_up` could not go there.

        Raises:
            CheckpointError: If there are fewer batches.
        """
        count = place["given"] - self.num_given
        if count > 0 and place["over"] and not isinstance(self._data, Iterator):
            self._pass, self._seen, count = iter(()), [], 0
        if count > 0:
            logger.info(
                "the data has no position: dropping its first %d batches", count
            )
        for dropped in range(count):
            if next(self, _END) is _END:
                msg = (
                    f"the checkpoint was made after {place['given']} batches of a pass "
                    f"over the data, which now ends {count - dropped} earlier. Resume "
                    "with the data of that run."
                )
                raise CheckpointError(msg)
        self.num_given, self._is_over = place["given"], place["over"]

    def _new_pass(self) -> Iterator[Any]:
        if isinstance(self._data, Iterable):
            return iter(self._data)
        return iter(self._data())


@dataclass
class _SavedPosition:
    """A frozen state that stands in for its iterator."""

    state: object

    def get_state(self) -> object:
        return self.state

    def set_state(self, state: object) -> None:
        self.state = state
