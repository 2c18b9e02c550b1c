"""`Input`: passes over the data that can be left in the middle and taken up again."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from meshlayout.checkpoint.data_state import Continues
from meshlayout.errors import CheckpointError


logger = logging.getLogger("meshlayout.checkpoint")

# Batches that can be gone through again, a function that gives them, or an iterator.
Data: TypeAlias = Iterable[Any] | Callable[[], Iterable[Any]]

_END: Any = object()


def why_not(data: Any) -> str:
    """Returns what data is instead of batches; nothing if it may be some.

    Args:
        data: What the user gave.

    Example:
        >>> why_not([1, 2]), why_not({"x": 1}), why_not(5)
        ('', 'one batch', 'no iterable')
    """
    if isinstance(data, (Mapping, str, np.ndarray, jax.Array)) or (
        isinstance(data, tuple) and all(hasattr(x, "dtype") for x in data)
    ):
        return "one batch"
    return "" if isinstance(data, Iterable) or callable(data) else "no iterable"


class Input:
    """The batches of one pass over the data after the other.

    It knows how many batches of the pass were given, and with iterators that tell their
    place (`get_state` and `set_state`) it keeps that as well. Other data has to give
    the same batches in each pass, or in each run, to be taken up.

    Args:
        data: An iterable, of which each pass is a new iteration; a function that
            returns one; or an iterator, of which there is a single pass.

    Attributes:
        num_given: The batches of this pass that were given.

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
        # Batches that were looked at, and not given yet; of the next pass, too.
        self._seen: list[Any] = []
        self._next: tuple[Iterator[Any], Any] | None = None
        self._is_over = False
        self.num_given = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
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

    @property
    def tells(self) -> bool:
        """Whether the iterator of this pass tells its place."""
        return isinstance(self._pass, Continues)

    def begin(self) -> None:
        """Begins a pass, or goes on with the only one there is."""
        self._is_over = False
        if self._next is not None:
            (self._pass, batch), self._next = self._next, None
            self._seen = [] if batch is _END else [batch]
        elif self._pass is None or not isinstance(self._data, Iterator):
            self._pass = self._new_pass()
            self._seen = []
        if not isinstance(self._data, Iterator):
            self.num_given = 0

    def look(self) -> Any:
        """Returns the next batch, of the next pass if need be, and does not give it.

        Returns:
            The batch; None if there is none.
        """
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

    # Its place.

    def place(self, *, keep: bool = False) -> tuple[dict[str, Any], Any]:
        """Returns the place, and what tells the iterator's state; None if nothing does.

        Args:
            keep: Whether that is to tell the state of now, whatever is read later.
        """
        place = {"given": self.num_given, "over": self._is_over, "tells": self.tells}
        told: Any = self._pass if self.tells else None
        return place, _Told(told.get_state()) if keep and self.tells else told

    def take_up(self, place: Mapping[str, Any], put: Callable[[Any], None]) -> None:
        """Begins a pass and, if the iterator tells its place, goes to a place in it.

        Args:
            place: What `place` returned.
            put: Puts an iterator where it was.
        """
        self._next = None
        self.begin()
        if place["tells"] and self.tells:
            put(self._pass)
            self._seen = []
            self.num_given = place["given"]

    def catch_up(self, place: Mapping[str, Any]) -> None:
        """Drops batches up to a place, where `take_up` could not go there.

        Args:
            place: What `take_up` was given.

        Raises:
            CheckpointError: If there are not so many.
        """
        count = place["given"] - self.num_given
        if count > 0 and place["over"] and not isinstance(self._data, Iterator):
            self._pass, self._seen, count = iter(()), [], 0
        if count > 0:
            logger.info("the data tells no place: dropping its first %d batches", count)
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


class _Told:
    """An iterator's state as it was, in the place of the iterator."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def get_state(self) -> Any:
        """Returns the state."""
        return self._state

    def set_state(self, state: Any) -> None:
        """Takes another state."""
        self._state = state
