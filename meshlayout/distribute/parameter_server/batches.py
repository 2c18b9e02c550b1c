"""Batches on a worker: read ahead, and drawn while a closure is traced."""

from collections.abc import Iterator, Mapping
from contextvars import ContextVar

import jax

from meshlayout._annotations import PyTree
from meshlayout.distribute.parameter_server.closures import to_host
from meshlayout.errors import StrategyError


class BatchSource:
    """A worker's own iterator of a dataset, and what was read from it ahead.

    Args:
        iterator: Yields batches: trees of arrays.
        description: Which dataset this is, for messages.
    """

    def __init__(self, iterator: Iterator[PyTree], description: str) -> None:
        self.description = description
        self._iterator = iterator
        self._ahead: list[PyTree] = []
        self._has_ended = False

    def peek(self, count: int) -> list[PyTree]:
        """Returns the next batches, which stay; fewer if the dataset ends."""
        while len(self._ahead) < count and not self._has_ended:
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._has_ended = True
                break
            self._ahead.append(
                jax.tree.map(lambda leaf: to_host(leaf, self.description), batch)
            )
        return self._ahead[:count]

    def drop(self, count: int) -> None:
        """Goes on after some batches."""
        del self._ahead[:count]


class WorkerIterator:
    """What a closure sees of an iterator on the worker that runs it."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __iter__(self) -> "WorkerIterator":
        return self

    def __next__(self) -> PyTree:
        current = draws.get(None)
        if current is None:
            msg = "next(iterator) was called on a worker outside of a closure."
            raise StrategyError(msg)
        return current.draw(self._number)


class NotEnough(BaseException):
    """A function draws more batches than were read; not for users to catch."""

    def __init__(self, number: int) -> None:
        self.number = number


class Draws:
    """The batches that a function draws while it is traced."""

    def __init__(self, batches: Mapping[int, list[PyTree]], ended: set[int]) -> None:
        self._batches = batches
        self._ended = ended
        self.counts = dict.fromkeys(batches, 0)

    def draw(self, number: int) -> PyTree:
        """Returns the next batch of an iterator."""
        index = self.counts.get(number, 0)
        batches = self._batches.get(number, [])
        if index < len(batches):
            self.counts[number] = index + 1
            return batches[index]
        if number in self._ended:
            raise StopIteration
        raise NotEnough(number)


# The batches of the trace that is under way.
draws: ContextVar[Draws] = ContextVar("draws")
