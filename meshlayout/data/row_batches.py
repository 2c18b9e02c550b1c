"""Batches of a source with random access: a function of the place alone."""

from typing import Any

import numpy as np

from meshlayout.data.clock import Clock
from meshlayout.data.elements import Element
from meshlayout.data.host_batches import Cut, HostBatch
from meshlayout.data.leaves import empty
from meshlayout.data.position import Position
from meshlayout.data.row_plan import RowPlan, batches_in_epoch
from meshlayout.data.source import RowsAhead, RowSource


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
        self._repeat, self._clock = remainder == "repeat", clock
        self._num_rows = len(source)
        if num_batches is None:
            num_batches = batches_in_epoch(self._num_rows, cut.size, remainder)
        self._plan = RowPlan(
            self._num_rows,
            cut,
            seed=seed,
            num_batches=num_batches,
            repeats=self._repeat,
            pads=getattr(source, "maps_batches", False),
        )
        self._ahead = rows_ahead(source, self._plan)

    def seek(self, position: Position) -> None:
        """Any place is as near as any other."""

    def close(self) -> None:
        """Lets go of what reads ahead."""
        if self._ahead is not None:
            self._ahead.close()

    def read(self, position: Position) -> HostBatch | None:
        """Returns the next batch, or None at the epoch's end."""
        if self._repeat:
            return self._repeated(position)
        if position.batch >= self._plan.num_batches:
            return None
        start = position.batch * self._cut.size
        count = min(max(self._num_rows - start, 0), self._cut.size)
        found = self._gathered(position)
        leaves = [_filled_up(leaf, self._cut.num_kept) for leaf in found]
        after = position._replace(batch=position.batch + 1, row=start + count)
        return HostBatch(leaves, count, after)

    def _repeated(self, position: Position) -> HostBatch | None:
        if position.row >= self._num_rows:
            return None
        leaves = self._gathered(position)
        passed, row = divmod(position.row + self._cut.size, self._num_rows)
        if not row:
            passed, row = passed - 1, self._num_rows
        batch = 0 if passed else position.batch + 1
        after = position._replace(epoch=position.epoch + passed, batch=batch, row=row)
        return HostBatch(leaves, self._cut.size, after)

    def _gathered(self, position: Position) -> list[Any]:
        specs = self._element.leaves
        if not self._cut.num_kept:
            return [np.empty((0, *spec.shape), spec.to or object) for spec in specs]
        place = self._plan.place(position)
        wanted = self._plan.rows(place)
        with self._clock.stage("read", sum(len(rows) for _, rows in wanted)):
            if self._ahead is not None:
                parts = self._ahead.rows(place)
            else:
                parts = [self._rows(epoch, rows) for epoch, rows in wanted]
            columns = [self._converted(part) for part in parts]
        if len(columns) == 1:
            return columns[0]
        return [np.concatenate(column) for column in zip(*columns, strict=True)]

    def _converted(self, rows: Any) -> list[Any]:
        leaves = zip(self._element.leaves, self._element.checked(rows), strict=True)
        return [spec.converted(leaf) for spec, leaf in leaves]

    def _rows(self, epoch: int, indices: np.ndarray[Any, Any]) -> Any:
        try:
            return _of_epoch(self._source, epoch).rows(indices)
        except StopIteration as error:  # would end the epoch
            msg = "the source raised StopIteration when it was asked for rows."
            raise RuntimeError(msg) from error


def rows_ahead(source: Any, plan: RowPlan) -> RowsAhead | None:
    """Returns what reads a source's batches ahead, or None where it does not.

    Args:
        source: The source.
        plan: The rows of each batch.
    """
    ahead = getattr(source, "ahead", None)
    return None if ahead is None else ahead(plan)


def _filled_up(leaf: np.ndarray[Any, Any], num_rows: int) -> np.ndarray[Any, Any]:
    """Returns a leaf with its last row repeated up to a number of rows."""
    if len(leaf) == num_rows:
        return leaf
    found = empty((num_rows, *leaf.shape[1:]), leaf.dtype)
    found[: len(leaf)] = leaf
    found[len(leaf) :] = leaf[-1:]
    return found


def _of_epoch(source: Any, epoch: int) -> RowSource:
    """Returns the rows of an epoch: some sources shuffle by themselves."""
    at_epoch = getattr(source, "at_epoch", None)
    return source if at_epoch is None else at_epoch(epoch)
