"""Batches of a source with random access: a function of the place alone."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from meshlayout.data.clock import Clock
from meshlayout.data.elements import Element
from meshlayout.data.host_batches import Cut, HostBatch
from meshlayout.data.leaves import empty
from meshlayout.data.order import Order
from meshlayout.data.position import Position
from meshlayout.data.source import RowSource


class RowReader:
    """Gathers this process's rows of each batch.

    Args:
        source: The source.
        element: What its examples are.
        cut: How batches are cut.
        remainder: What becomes of rows that do not fill a batch.
        seed: What shuffles them.
        num_batches: Batches of an epoch, where other processes have more than this
            source has rows for; None for as many as it has.
        clock: Where the time goes.
    """

    def __init__(
        self,
        source: RowSource,
        element: Element,
        cut: Cut,
        *,
        remainder: str,
        seed: int | None,
        num_batches: int | None,
        clock: Clock,
    ) -> None:
        self._source, self._element, self._cut = source, element, cut
        self._repeat, self._seed, self._clock = remainder == "repeat", seed, clock
        self._num_rows = len(source)
        if num_batches is None:
            num_batches = batches_in_epoch(self._num_rows, cut.size, remainder)
        self._num_batches = num_batches
        self._orders: dict[int, Order] = {}

    def seek(self, position: Position) -> None:
        """Any place is as near as any other."""

    def close(self) -> None:
        """There is nothing to let go of."""

    def read(self, position: Position) -> HostBatch | None:
        """Returns the next batch, or None at the epoch's end."""
        if self._repeat:
            return self._repeated(position)
        if position.batch >= self._num_batches:
            return None
        start = position.batch * self._cut.size
        count = min(max(self._num_rows - start, 0), self._cut.size)
        places = np.minimum(start + self._kept(), self._num_rows - 1)
        # Padding is the last row again, which is read once.
        is_short = count < self._cut.size and not _maps_batches(self._source)
        read = np.unique(places) if is_short else places
        found = self._gathered(position.epoch, read)
        leaves = [_filled_up(leaf, len(places)) for leaf in found]
        after = replace(position, batch=position.batch + 1, row=start + count)
        return HostBatch(leaves, count, after)

    def _repeated(self, position: Position) -> HostBatch | None:
        if position.row >= self._num_rows:
            return None
        places = position.row + self._kept()
        epochs = position.epoch + places // self._num_rows
        places %= self._num_rows
        parts = [
            self._gathered(int(epoch), places[epochs == epoch])
            for epoch in np.unique(epochs)
        ]
        leaves = [np.concatenate(column) for column in zip(*parts, strict=True)]
        if len(parts) == 1:
            leaves = parts[0]
        passed, row = divmod(position.row + self._cut.size, self._num_rows)
        if not row:
            passed, row = passed - 1, self._num_rows
        batch = 0 if passed else position.batch + 1
        after = replace(position, epoch=position.epoch + passed, batch=batch, row=row)
        return HostBatch(leaves, self._cut.size, after)

    def _kept(self) -> np.ndarray[Any, Any]:
        return np.arange(self._cut.size) if self._cut.keep is None else self._cut.keep

    def _gathered(self, epoch: int, places: np.ndarray[Any, Any]) -> list[Any]:
        specs = self._element.leaves
        if not len(places):
            return [np.empty((0, *spec.shape), spec.to or object) for spec in specs]
        with self._clock.stage("read", len(places)):
            rows = self._rows(epoch, self._order(epoch).at(places))
            leaves = zip(specs, self._element.checked(rows), strict=True)
            return [spec.converted(leaf) for spec, leaf in leaves]

    def _rows(self, epoch: int, indices: np.ndarray[Any, Any]) -> Any:
        try:
            return _of_epoch(self._source, epoch).rows(indices)
        except StopIteration as error:  # would end the epoch
            msg = "the source raised StopIteration when it was asked for rows."
            raise RuntimeError(msg) from error

    def _order(self, epoch: int) -> Order:
        if epoch not in self._orders:
            order = Order(self._num_rows, self._seed, epoch)
            # A batch may lie in two epochs; no more orders than that are kept.
            self._orders = {
                known: kept
                for known, kept in self._orders.items()
                if known >= epoch - 1
            }
            self._orders[epoch] = order
        return self._orders[epoch]


def batches_in_epoch(num_rows: int, size: int, remainder: str) -> int:
    """Returns how many batches an epoch has.

    Args:
        num_rows: Rows of the source.
        size: Rows of a batch.
        remainder: What becomes of rows that do not fill one.
    """
    return num_rows // size if remainder == "drop" else math.ceil(num_rows / size)


def _filled_up(leaf: np.ndarray[Any, Any], num_rows: int) -> np.ndarray[Any, Any]:
    """Returns a leaf with its last row repeated up to a number of rows."""
    if len(leaf) == num_rows:
        return leaf
    found = empty((num_rows, *leaf.shape[1:]), leaf.dtype)
    found[: len(leaf)] = leaf
    found[len(leaf) :] = leaf[-1:]
    return found


def _maps_batches(source: Any) -> bool:
    """Tells whether a source has a function of the user's that takes whole batches."""
    return getattr(source, "maps_batches", False)


def _of_epoch(source: Any, epoch: int) -> RowSource:
    """Returns the rows of an epoch: some sources shuffle by themselves."""
    at_epoch = getattr(source, "at_epoch", None)
    return source if at_epoch is None else at_epoch(epoch)
