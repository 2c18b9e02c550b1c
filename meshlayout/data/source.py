"""What a source of examples is, inside: rows by number, or blocks one after another."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True)
class Block:
    """Some examples, one after another.

    Attributes:
        rows: A tree of arrays whose first dim counts the examples.
        count: How many there are.
        is_own: Whether the source does not use the arrays' memory again.
    """

    rows: Any
    count: int
    is_own: bool = False


@runtime_checkable
class RowSource(Protocol):
    """A source that gives any of its rows, by number."""

    def __len__(self) -> int:
        """Returns the number of rows."""
        ...

    def rows(self, indices: np.ndarray[Any, Any]) -> Any:
        """Returns rows, in the order asked for, in memory of their own.

        Args:
            indices: Row numbers, int64.

        Returns:
            A tree of NumPy arrays whose first dim is `len(indices)`.
        """
        ...


class RowsAhead(Protocol):
    """What reads the rows of batches ahead, of a source with a method `ahead(plan)`."""

    def rows(self, place: int) -> list[Any]:
        """Returns the rows of a batch, a tree of arrays for each epoch in it.

        Args:
            place: The place of the batch in the plan.
        """
        ...

    def close(self) -> None:
        """Lets go of what the reading holds."""
        ...


class Stream(Protocol):
    """One pass over a source.

    Where it has a method `take(count)`, that is called for the next block, of at most
    `count` examples if the stream has a choice.
    """

    def __next__(self) -> Block:
        """Returns the next block; raises StopIteration at the epoch's end."""
        ...

    def get_state(self) -> Any:
        """Returns the place after the last block, as JSON takes it.

        None means that the source cannot tell. The state before the first block is
        that of the epoch's start.
        """
        ...

    def set_state(self, state: Any) -> None:
        """Goes to a place that `get_state` has named.

        Args:
            state: What it returned.
        """
        ...

    def close(self) -> None:
        """Lets go of what the pass holds: files, threads, processes."""
        ...


@runtime_checkable
class StreamSource(Protocol):
    """A source that is read from its start to its end.

    Attributes:
        num_rows: How many examples an epoch has, or None where that is not known.
    """

    num_rows: int | None

    def open(self, epoch: int) -> Stream:
        """Begins a pass.

        Args:
            epoch: Which one, from 0.
        """
        ...


Source = RowSource | StreamSource
