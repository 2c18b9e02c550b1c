"""Batches of a source that is read one way: blocks of rows, cut and joined."""

from typing import Any

import jax
import numpy as np

from meshlayout.data.clock import Clock
from meshlayout.data.elements import Element, LeafSpec
from meshlayout.data.host_batches import Cut, HostBatch
from meshlayout.data.leaves import empty
from meshlayout.data.peeked import next_block
from meshlayout.data.position import Position, check_json
from meshlayout.data.source import Stream, StreamSource
from meshlayout.errors import DataError


class StreamReader:
    """Reads blocks, and copies this process's rows of them into batches.

    Rows are copied out of a block before the next one is read: a source may use its
    arrays again.

    Args:
        source: The source.
        element: What its examples are.
        cut: How batches are cut.
        remainder: What becomes of rows that do not fill a batch.
        clock: Where the time and notes go.
    """

    def __init__(
        self,
        source: StreamSource,
        element: Element,
        cut: Cut,
        *,
        remainder: str,
        clock: Clock,
    ) -> None:
        self._source, self._element, self._cut = source, element, cut
        self._remainder, self._clock = remainder, clock
        self._stream: Stream | None = None
        self._epoch = -1
        self._block: list[Any] = []
        self._used = self._left = 0
        self._before: Any = None  # the source's place before the block
        self._is_own = False

    def seek(self, position: Position) -> None:
        """Goes to a place; by reading and dropping where the source tells none."""
        self._open(position.epoch)
        stream: Any = self._stream
        if not position.row:
            return
        if position.source is not None:
            stream.set_state(position.source)
            self._drop(position.offset)
        else:
            self._drop(position.row)

    def read(self, position: Position) -> HostBatch | None:
        """Returns the next batch, or None at the epoch's end."""
        if self._stream is None or self._epoch != position.epoch:
            self._open(position.epoch)
        batch = _Batch(self._element, self._cut)
        row = position.row
        while batch.filled < self._cut.size:
            wanted = self._cut.size - batch.filled
            if not self._left and not self._next_block(wanted):
                if self._remainder != "repeat" or not batch.filled:
                    break
                self._open(self._epoch + 1)
                row = -batch.filled
                if not self._next_block(wanted):
                    raise DataError(no_rows(self._epoch))
            count = min(self._left, wanted)
            with self._clock.stage("read"):
                batch.append(self._block, self._used, count, is_own=self._is_own)
            self._used += count
            self._left -= count
        if not batch.filled:
            return None
        return self._finished(batch, position, row + batch.filled)

    def close(self) -> None:
        """Closes the pass that is open."""
        stream, self._stream = self._stream, None
        self._block, self._left = [], 0
        if stream is not None:
            stream.close()

    def _finished(
        self, batch: "_Batch", position: Position, row: int
    ) -> HostBatch | None:
        size, count = self._cut.size, batch.filled
        if count < size and self._remainder == "drop":
            if not position.batch:
                msg = (
                    f"the source has {count} rows in epoch {position.epoch + 1}, fewer "
                    f"than a batch of {size}: remainder='drop' drops all of them. Take "
                    "a smaller global_batch_size, or another remainder=."
                )
                raise DataError(msg)
            self._clock.note(f"Dropped the last {rows_text(count)} of an epoch.")
            return None
        if count < size and self._remainder == "error":
            msg = (
                f"the source's epoch ends with {rows_text(count)} left, in batches of "
                f"{size}. Choose another remainder=, or another global_batch_size."
            )
            raise DataError(msg)
        is_next = self._epoch != position.epoch
        after = position._replace(
            epoch=self._epoch,
            batch=0 if is_next else position.batch + 1,
            row=row,
            source=self._place(),
            offset=self._used if self._left else 0,
        )
        return HostBatch(batch.finished(), count, after)

    def _place(self) -> Any:
        if self._stream is None:
            return None
        return self._before if self._left else check_json(self._stream.get_state())

    def _open(self, epoch: int) -> None:
        self.close()
        self._stream = self._source.open(epoch)
        self._epoch = epoch

    def _next_block(self, wanted: int) -> bool:
        """Reads a block that is not empty; tells whether there was one."""
        stream: Any = self._stream
        while True:
            self._before = check_json(stream.get_state())
            with self._clock.stage("read"):
                try:
                    block = next_block(stream, wanted)
                except StopIteration:
                    return False
            self._clock.add("read", block.count, 0.0)
            if block.count:
                break
        if _is_on_devices(block.rows):
            msg = (
                "the source gave a batch on devices after others on the host. Give all "
                "of them in one place."
            )
            raise DataError(msg)
        self._block = self._element.checked(block.rows)
        self._used, self._left = 0, block.count
        self._is_own = block.is_own
        return True

    def _drop(self, count: int) -> None:
        while count:
            if not self._left and not self._next_block(count):
                msg = (
                    "the source ended before the place of the state: it is shorter "
                    "than when the state was taken."
                )
                raise DataError(msg)
            dropped = min(count, self._left)
            self._used += dropped
            self._left -= dropped
            count -= dropped


class _Batch:
    """One batch that is filled with rows."""

    def __init__(self, element: Element, cut: Cut) -> None:
        self._specs, self._cut = element.leaves, cut
        self.filled = 0
        self._kept = 0
        self._out: list[Any] = []
        self._last: list[Any] = []

    def append(self, block: list[Any], start: int, count: int, *, is_own: bool) -> None:
        """Adds rows of a block: those that are kept."""
        if is_own and self._is_whole(block, count):
            self._out = [
                spec.converted(leaf)
                for spec, leaf in zip(self._specs, block, strict=True)
            ]
            self.filled = self._kept = count
            return
        self._begin()
        chosen, number = self._chosen(start, count)
        if number:
            into = slice(self._kept, self._kept + number)
            for spec, out, leaf in zip(self._specs, self._out, block, strict=True):
                rows = leaf[chosen]
                _copy(spec, rows, out[into])
        self.filled += count
        self._kept += number
        if self._cut.keep is not None and self.filled < self._cut.size:
            last = start + count - 1
            self._last = [leaf[last : last + 1].copy() for leaf in block]

    def _is_whole(self, block: list[Any], count: int) -> bool:
        """Tells whether a block is all that the batch needs."""
        is_all = self._cut.keep is None and count == self._cut.size
        return is_all and len(block[0]) == count

    def _begin(self) -> None:
        if self._out:
            return
        dtypes = [object if spec.to is None else spec.to for spec in self._specs]
        self._out = [
            empty((self._cut.num_kept, *spec.shape), dtype)
            for spec, dtype in zip(self._specs, dtypes, strict=True)
        ]

    def finished(self) -> list[Any]:
        """Returns the leaves; rows that were not filled repeat the last one."""
        if self._kept < self._cut.num_kept:
            for number, out in enumerate(self._out):
                last = self._last[number] if self._last else out[self._kept - 1]
                out[self._kept :] = last
        return self._out

    def _chosen(self, start: int, count: int) -> tuple[Any, int]:
        """Returns which rows of a block are kept, and how many."""
        keep = self._cut.keep
        if keep is None:
            return slice(start, start + count), count
        low, high = np.searchsorted(keep, [self.filled, self.filled + count]).tolist()
        chosen = keep[low:high] - self.filled + start
        if high > low and chosen[-1] - chosen[0] == high - low - 1:
            return slice(int(chosen[0]), int(chosen[-1]) + 1), high - low
        return chosen, high - low


def first_row(element: Element, rows: Any) -> list[Any]:
    """Returns the leaves of a batch of the first of some rows alone.

    Args:
        element: What examples are.
        rows: Some of them.
    """
    batch = _Batch(element, Cut(1, None))
    batch.append(element.checked(rows), 0, 1, is_own=False)
    return batch.finished()


def _copy(
    spec: LeafSpec, rows: np.ndarray[Any, Any], out: np.ndarray[Any, Any]
) -> None:
    """Copies rows into a batch, in the dtype that they have on the devices."""
    if rows.dtype == out.dtype:
        out[...] = rows
        return
    spec.check_fits(rows)
    with np.errstate(over="ignore"):  # to infinity, as JAX does
        out[...] = rows


def no_rows(epoch: int) -> str:
    """Returns the sentence about an epoch without examples.

    Args:
        epoch: Which one, from 0.
    """
    if not epoch:
        return "the source is empty: it gave no examples."
    return (
        f"the source gave no examples in epoch {epoch + 1}, after those before it: it "
        "can be read once. A function that makes the generator has to make a new one "
        "at every call."
    )


def _is_on_devices(rows: Any) -> bool:
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(rows))


def rows_text(count: int) -> str:
    """Returns a number of rows in words."""
    return f"{count} row" if count == 1 else f"{count} rows"
