"""`Input`: passes over the data of a `fit` that can be interrupted and resumed.

Two ways lead back into the middle of a pass: an
iterator with `get_state` and `set_state` is moved there, and any other data is read up
to there and dropped. Looking at a batch without yielding it (to see the structure of
metrics before a restore) must not change what the training sees, so that batches and
even a whole next pass may be waiting here.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from meshlayout._annotations import Batch
from meshlayout.checkpoint.positions import Continues
from meshlayout.errors import CheckpointError


logger = logging.getLogger("meshlayout.checkpoint")

Data: TypeAlias = Iterable[Any] | Callable[[], Iterable[Any]]
"""An iterable of batches, a function that returns one, or an iterator."""

_END: Any = object()


def why_not(data: object) -> str:
    """Returns why data cannot be an iterable of batches; empty if it can.

    Example:
        >>> why_not([1, 2]), why_not({"x": 1}), why_not(5)
        ('', 'one batch', 'not iterable')
    """
    # All of these are iterable, and none of them is an iterable of batches.
    if isinstance(data, (Mapping, str, np.ndarray, jax.Array)) or (
        isinstance(data, tuple) and all(hasattr(x, "dtype") for x in data)
    ):
        return "one batch"
    is_data = isinstance(data, Iterable) or callable(data)
    return "" if is_data else "not iterable"


class Input:
    """The batches of successive passes over the data.

    It counts the batches that the pass has yielded, and saves the position of iterators
    that have one (`get_state` and `set_state`). Data without positions must yield the
    same batches in each pass and in each run to be resumed.

    Args:
        data: An iterable, each pass a new iteration of it; a function that returns an
            iterable; or an iterator, which is a single pass.

    Attributes:
        num_given: How many batches this pass has yielded.

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
        # A batch of this pass, and the first one of the next pass with its iterator,
        # that were looked at and not yielded yet.
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
        """Begins a pass; an iterator continues its only one."""
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
        """Returns the next batch without yielding it, if need be of the next pass.

        None if no batch is left.
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

    # Position.

    def place(self, *, keep: bool = False) -> tuple[dict[str, Any], Continues | None]:
        """Returns the position, and the object with the iterator's state, or None.

        Args:
            keep: Whether to freeze that state now. Otherwise it is the iterator itself,
                whose state changes with the next batch.
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
        """Begins a pass, and moves its iterator to a saved place if it has positions.

        Args:
            place: What `place` returned.
            put: Moves an iterator to the saved position.
        """
        self._next = None
        self.begin()
        if place["tells"] and isinstance(self._pass, Continues):
            put(self._pass)
            self._seen = []  # a batch from before the move
            self.num_given = place["given"]

    def catch_up(self, place: Mapping[str, Any]) -> None:
        """Drops batches up to a place to which `take_up` could not move.

        Separate from `take_up`, as reading may take long: the state is restored in
        between, and a damaged step is noticed before.

        Raises:
            CheckpointError: If there are not enough batches.
        """
        count = place["given"] - self.num_given
        if count > 0 and place["over"] and not isinstance(self._data, Iterator):
            # The pass was at its end: an empty one is as good, and reads nothing.
            self._pass, self._seen, count = iter(()), [], 0
        if count > 0:
            logger.info(
                "the data has no position: dropping its first %d batches", count
            )
        for dropped in range(count):
            if next(self, _END) is _END:
                msg = (
                    f"the checkpoint was saved after {place['given']} batches of a "
                    f"pass over the data, which now ends {count - dropped} batches "
                    "earlier. Resume with the data of that run."
                )
                raise CheckpointError(msg)
        self.num_given, self._is_over = place["given"], place["over"]

    def _new_pass(self) -> Iterator[Any]:
        if isinstance(self._data, Iterable):
            return iter(self._data)
        return iter(self._data())


@dataclass
class _SavedPosition:
    """A frozen position that stands in for its iterator."""

    state: object

    def get_state(self) -> object:
        return self.state

    def set_state(self, state: object) -> None:
        self.state = state
