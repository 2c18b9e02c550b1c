"""One global batch on the host: this process's rows of it, before they are placed."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from meshlayout.data.position import Position


@dataclass(frozen=True)
class Cut:
    """How batches are cut from the rows that a process reads.

    Attributes:
        size: The rows of one batch, of those that this process reads.
        keep: Which of them are this process's own, ascending; None for all.
    """

    size: int
    keep: np.ndarray[Any, Any] | None

    @property
    def num_kept(self) -> int:
        """How many rows of a batch are this process's own."""
        return self.size if self.keep is None else len(self.keep)

    def is_real(self, count: int) -> np.ndarray[Any, Any] | None:
        """Returns which of the rows that are kept are no padding; None for all.

        Args:
            count: How many rows of the batch are real; the others come after them.
        """
        if count >= self.size:
            return None
        kept = np.arange(self.size) if self.keep is None else self.keep
        return kept < count


@dataclass(frozen=True)
class HostBatch:
    """This process's rows of one batch.

    Attributes:
        leaves: In JAX's order, on the host; or on devices if `is_placed`.
        count: How many rows of the batch are real.
        position: The place after it.
        is_placed: Whether it is a batch that its maker has placed.
    """

    leaves: list[Any]
    count: int
    position: Position
    is_placed: bool = False


class Reader(Protocol):
    """What cuts a source into batches."""

    def seek(self, position: Position) -> None:
        """Goes to a place.

        Args:
            position: The place.

        Raises:
            DataError: If the source cannot go there.
        """
        ...

    def read(self, position: Position) -> HostBatch | None:
        """Returns the next batch, or None at the epoch's end.

        Args:
            position: The place after the batch before it, or an epoch's start.
        """
        ...

    def close(self) -> None:
        """Lets go of what it holds."""
        ...
