"""Batches of a stream: rows are copied into one batch after another as they come.

A generator may yield the same buffer again and again, so each element is copied before
the next one is read. Every process that shares a stream fills the whole batch, since it
has to decode all rows anyway, and then keeps its own rows of it.
"""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout.data.by_row import HostBatch
from meshlayout.data.examples import (
    NUMBERS,
    Division,
    ambiguous,
    as_array,
    as_batch,
    looks_batched,
    no_rows,
    rows_text,
    stack,
)
from meshlayout.data.position import Position
from meshlayout.data.protocols import JSON, Stream, StreamSource
from meshlayout.errors import DataError


class StreamPass:
    """One pass over a stream, whose first element is inspected, and yielded later."""

    def __init__(self, source: StreamSource, epoch: int) -> None:
        stream = source.open(epoch)
        if not isinstance(stream, Stream):  # a list would begin anew in each batch
            raise DataError(
                f"{type(source).__name__}.open returned {_checks.shown(stream)}, which "
                "is not an ml.data.Stream."
            )
        self.epoch, self._stream, self._elements = epoch, stream, iter(stream)
        # The element that was looked at, with the position before it; until it is read.
        self.first: tuple[PyTree, JSON] | None = None

    def look(
        self, *, batched: bool | None, prefers_batches: bool
    ) -> tuple[PyTree, int | None]:
        """Returns the first rows, as arrays, and their number; None for one example."""
        state = self.position()
        for element in self._elements:
            if batched is None and looks_batched(element):
                if not prefers_batches:
                    raise DataError(ambiguous("the source"))
                batched = True
            rows, count = as_batch(element) if batched else (stack([element]), None)
            if count != 0:  # empty batches have no rows to learn shapes from
                self.first = element, state
                return rows, count
            state = self.position()
        raise DataError(no_rows(0))

    def rest(self) -> Iterator[PyTree]:
        """Returns the next elements; at least one of them must be taken."""
        first, self.first = self.first, None
        return itertools.chain(() if first is None else first[:1], self._elements)

    def position(self) -> JSON:
        """Returns the stream's position before the next element; None if unknown."""
        if self.first is not None:
            return self.first[1]
        # A copy: the stream may return the same dict again, changed.
        with _checks.noted("The source's get_state must return JSON."):
            return json.loads(json.dumps(self._stream.get_state()))

    def seek(self, state: JSON) -> None:
        """Moves to a position of the stream's own."""
        self.first = None
        self._stream.set_state(state)
        self._elements = iter(self._stream)

    def close(self) -> None:
        """Releases what the stream holds."""
        self._stream.close()


class StreamReader:
    """Fills batches with rows of a stream, and keeps this process's own."""

    def __init__(
        self, cut: Division, first: StreamPass | None, *, batched: bool
    ) -> None:
        self._cut, self._first, self._batched = cut, first, batched
        self._pass: StreamPass | None = None
        # The latest batch of the source, how many of its rows were used and are left,
        # and the stream's position before it.
        self._block: list[np.ndarray] = []
        self._used = self._left = 0
        self._before: JSON = None

    def close(self) -> None:
        """Closes the open pass, if any."""
        for stream in (self._first, self._pass):
            if stream is not None:
                stream.close()

    def read(self, position: Position) -> HostBatch | None:
        """Returns the batch after a position, or None at the epoch's end."""
        cut = self._cut
        if self._pass is None or self._pass.epoch != position.epoch:
            self._seek(position)
        out, filled, epoch, row = self._empty(), 0, position.epoch, position.row
        stream: Any = self._pass
        while filled < cut.size:
            count = self._add(stream, out, filled)
            filled, row = filled + count, row + count
            if count:
                continue
            self._check_length(epoch, row)
            if not filled:
                return None
            if cut.remainder != "repeat":
                break
            # The batch runs on into the next epoch.
            epoch, row = epoch + 1, 0
            stream = self._open(epoch)
        cut.clock.rows += filled
        if filled < cut.size and cut.remainder == "drop":
            if not position.batch:
                raise DataError(no_rows(epoch, filled))
            cut.clock.warn(f"Dropped the last {rows_text(filled)} of an epoch.")
            return None
        leaves, rows = [], cut.rows(filled)
        for spec, array in zip(cut.spec.leaves, out, strict=True):
            is_all = filled == cut.size == len(rows)
            leaves.append(spec.converted(array if is_all else array[rows]))
        after = position._replace(
            epoch=epoch,
            batch=0 if epoch != position.epoch else position.batch + 1,
            row=row,
            # In the middle of the source's batch, a resumed stream reads it again, and
            # the rows that were used are skipped.
            source=self._before if self._left else stream.position(),
            offset=self._used if self._left else 0,
        )
        return HostBatch(leaves, filled, after)

    def _check_length(self, epoch: int, num_rows: int) -> None:
        """Checks the rows of an epoch that has ended."""
        if not num_rows:
            raise DataError(no_rows(epoch))
        said = self._cut.source.num_rows
        if said not in (None, num_rows):
            self._cut.clock.warn(
                f"The source says that an epoch has {rows_text(said)}, and epoch "
                f"{epoch + 1} has {num_rows}."
            )

    def _open(self, epoch: int) -> StreamPass:
        """Returns the pass of an epoch at its start."""
        first, self._first = self._first, None
        self.close()
        if first is None or epoch:
            first = StreamPass(self._cut.source, epoch)
        self._pass = first
        return first

    def _seek(self, position: Position) -> None:
        """Moves the stream, by reading and dropping rows if it has no position."""
        self._left, stream, missing = 0, self._open(position.epoch), position.row
        # At the start of an epoch, the position is still that of the one before.
        if missing and position.source is not None:
            stream.seek(position.source)
            missing = position.offset
        out = self._empty()
        while missing:
            count = self._add(stream, out, max(self._cut.size - missing, 0))
            if not count:
                msg = "the source ended before the position: it is shorter than it was."
                raise DataError(msg)
            missing -= count

    def _empty(self) -> list[np.ndarray]:
        leaves = self._cut.spec.leaves
        return [np.empty((self._cut.size, *x.shape), x.dtype) for x in leaves]

    def _add(self, stream: StreamPass, out: list[np.ndarray], start: int) -> int:
        """Copies rows of the stream into `out[start:]`; returns how many, if any."""
        if not self._batched:
            return self._add_examples(stream, out, start)
        while not self._left:
            self._before = stream.position()
            element = next(stream.rest(), None)
            if element is None:
                return 0
            self._block, self._used = self._cut.spec.checked(element), 0
            self._left = len(self._block[0])
        count = min(self._left, self._cut.size - start)
        for array, rows in zip(out, self._block, strict=True):
            array[start : start + count] = rows[self._used : self._used + count]
        self._used, self._left = self._used + count, self._left - count
        return count

    def _add_examples(
        self, stream: StreamPass, out: list[np.ndarray], start: int
    ) -> int:
        # By leaf, the type of its last number: others of that type need no check.
        kinds: list[type | None] = [None] * len(out)
        leaves = [(spec, spec.shape, spec.dtype) for spec in self._cut.spec.leaves]
        flatten, row = self._cut.spec.treedef.flatten_up_to, start - 1
        # The rows first: behind the last one, no other example is read.
        rows = range(start, self._cut.size)
        for row, example in zip(rows, stream.rest(), strict=False):
            for i, leaf in enumerate(flatten(example)):
                value = leaf
                if type(leaf) is not kinds[i]:
                    spec, shape, dtype = leaves[i]
                    value = as_array(spec.path, leaf)
                    if value.shape != shape or value.dtype != dtype:
                        spec.check(value)
                    if value is not leaf and isinstance(leaf, NUMBERS):
                        kinds[i] = type(leaf)
                out[i][row] = value
        return row + 1 - start
