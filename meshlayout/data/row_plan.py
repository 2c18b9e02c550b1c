"""Which rows a process reads for each batch: a function of the place alone."""

import math
from typing import Any

import numpy as np

from meshlayout.data.host_batches import Cut
from meshlayout.data.order import Order
from meshlayout.data.position import Position


Array = np.ndarray[Any, Any]


class RowPlan:
    """The rows of each batch, from any place on and through all epochs.

    A place is a number that grows by `step` with every batch. A plan can be sent to
    another process.

    Attributes:
        num_batches: Batches of an epoch.
        step: By how much a place grows with a batch.

    Args:
        num_rows: Rows of the source.
        cut: How batches are cut.
        seed: What shuffles the rows; None leaves them as they are.
        num_batches: Batches of an epoch; without a meaning if epochs run into each
            other.
        repeats: Whether epochs run into each other.
        pads: Whether the padding of a short batch is read, too.

    Example:
        >>> plan = RowPlan(5, Cut(2, None), seed=None, num_batches=3)
        >>> [plan.rows(place) for place in (2, 3)]
        [[(0, array([4]))], [(1, array([0, 1]))]]
    """

    def __init__(
        self,
        num_rows: int,
        cut: Cut,
        *,
        seed: int | None,
        num_batches: int,
        repeats: bool = False,
        pads: bool = False,
    ) -> None:
        self._num_rows, self._cut, self._seed = num_rows, cut, seed
        self.num_batches, self._repeats, self._pads = num_batches, repeats, pads
        self._kept = np.arange(cut.size) if cut.keep is None else cut.keep
        self.step = cut.size if repeats else 1
        self._orders: dict[int, Order] = {}

    @property
    def key(self) -> tuple[Any, ...]:
        """What is the same for plans of the same rows."""
        numbers = (self._num_rows, self._cut.size, self._seed, self.num_batches)
        return (*numbers, self._repeats, self._pads, self._kept.tobytes())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_orders": {}}

    def place(self, position: Position) -> int:
        """Returns the place of the batch after a position.

        Args:
            position: The position.
        """
        if self._repeats:
            return position.epoch * self._num_rows + position.row
        return position.epoch * self.num_batches + position.batch

    def end_of_epoch(self, place: int) -> int | None:
        """Returns the place after the last batch of an epoch.

        Args:
            place: The place of one of its batches.

        Returns:
            None if epochs run into each other.
        """
        if self._repeats:
            return None
        return (place // self.num_batches + 1) * self.num_batches

    def rows(self, place: int) -> list[tuple[int, Array]]:
        """Returns what is read for a batch: epochs, and rows of each.

        Args:
            place: The place of the batch.
        """
        if self._repeats:
            epochs, places = np.divmod(place + self._kept, self._num_rows)
            return [
                (int(epoch), self._order(int(epoch)).at(places[epochs == epoch]))
                for epoch in np.unique(epochs)
            ]
        epoch, batch = divmod(place, self.num_batches)
        start = batch * self._cut.size
        places = np.minimum(start + self._kept, self._num_rows - 1)
        # Padding is the last row again, which is read once.
        if start + self._cut.size > self._num_rows and not self._pads:
            places = np.unique(places)
        return [(epoch, self._order(epoch).at(places))]

    def _order(self, epoch: int) -> Order:
        order = self._orders.get(epoch)
        if order is None:
            order = Order(self._num_rows, self._seed, epoch)
            # A batch may lie in two epochs; no more orders than that are kept.
            kept = {
                known: kept
                for known, kept in self._orders.items()
                if known >= epoch - 1
            }
            self._orders = {**kept, epoch: order}
        return order


def batches_in_epoch(num_rows: int, size: int, remainder: str) -> int:
    """Returns how many batches an epoch has.

    Args:
        num_rows: Rows of the source.
        size: Rows of a batch.
        remainder: What becomes of rows that do not fill one.
    """
    return num_rows // size if remainder == "drop" else math.ceil(num_rows / size)
