"""Batches of a stream: elements become blocks of rows, which fill one batch at a time.

A generator may yield the same buffer again and again, so each example is copied before
the next one is read. Every process that shares a stream fills the whole batch, since it
has to decode all rows anyway, and then keeps its own rows of it.
"""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout.data.by_row import HostBatch
from meshlayout.data.examples import (
    ExampleSpec,
    ambiguous,
    as_batch,
    copied,
    empty,
    is_placed,
    looks_batched,
    no_rows,
    rows_text,
    stack,
)
from meshlayout.data.position import Position
from meshlayout.data.protocols import JSON, Stream, StreamSource
from meshlayout.data.report import Clock
from meshlayout.errors import DataError


class Elements:
    """The elements of a stream, one pass after another.

    The first decides about all (its shapes, and whether it is a batch), and a generator
    yields it only once: it is looked at, remembered, and yielded again. If it could be
    an example or a batch, that is an error unless the caller would `prefer_batches`.
    """

    def __init__(self, source: StreamSource, *, prefer_batches: bool = False) -> None:
        name, flags = type(source).__name__, (True, False, None)
        _checks.choice(f"batched of the {name}", source.batched, flags, error=DataError)
        if source.num_rows is not None:
            what = f"num_rows of the {name}"
            _checks.count(what, source.num_rows, at_least=0, error=DataError)
        self.source, self._prefer_batches = source, prefer_batches
        self._stream: Any = None
        # The element that was looked at, with the position before it; until it is read.
        self._first: tuple[PyTree, JSON] | None = None
        self._epoch: int | None = None  # of the open pass

    def look(self) -> tuple[PyTree, int | None]:
        """Returns the first rows, as arrays, and their number; None for one example."""
        self.seek(0)
        batched, state = self.source.batched, self.position()
        for element in self.rest():
            if batched is None and not is_placed(element) and looks_batched(element):
                if not self._prefer_batches:
                    raise DataError(ambiguous("the source"))
                batched = True
            if batched is not False and is_placed(element):
                rows, count = element, len(jax.tree.leaves(element)[0])
            else:
                rows, count = as_batch(element) if batched else (stack([element]), None)
            if count != 0:  # empty batches have no rows to learn shapes from
                self._first = element, state
                return rows, count
            state = self.position()
        raise DataError(no_rows(0))

    def is_only_batch(self) -> bool:
        """Returns whether the first batch is all there is, if that can be known."""
        try:
            stream = self.source.open(0)
        except DataError:  # an iterator, which can be read only once
            return False
        try:
            return len(list(itertools.islice(stream, 2))) == 1
        finally:
            stream.close()

    def seek(self, epoch: int, state: JSON = None) -> None:
        """Starts a pass, at a position of the stream's own if there is one."""
        # The pass whose first element was looked at is still at its start.
        if self._first is None or self._epoch != epoch:
            self.close()
            stream = self.source.open(epoch)
            if not isinstance(stream, Stream):  # a list would begin anew in each batch
                given = f"open of the {type(self.source).__name__} returned"
                msg = f"{given} {_checks.shown(stream)}, which is no ml.data.Stream."
                raise DataError(msg)
            self._stream, self._epoch = stream, epoch
        if state is not None:
            self._first = None
            self._stream.set_state(state)

    def rest(self) -> Iterator[PyTree]:
        """Returns the elements that come next; at least one of them must be taken."""
        first, self._first = self._first, None
        stream = iter(self._stream)
        return stream if first is None else itertools.chain(first[:1], stream)

    def position(self) -> JSON:
        """Returns the stream's position before the next element; None if unknown."""
        if self._first is not None:
            return self._first[1]
        # A copy: the stream may return the same dict again, changed.
        with _checks.noted("The source's get_state must return JSON."):
            return json.loads(json.dumps(self._stream.get_state()))

    def close(self) -> None:
        """Closes the open pass."""
        stream, self._stream, self._first = self._stream, None, None
        self._epoch = None
        if stream is not None:
            stream.close()


class StreamReader:
    """Fills batches of `size` rows of a stream, and keeps this process's `own`.

    Without a `spec`, elements are batches on the mesh, which are passed on unchanged.
    """

    def __init__(
        self,
        elements: Elements,
        spec: ExampleSpec | None,
        size: int,
        own: np.ndarray,
        *,
        batched: bool,
        remainder: str,
        clock: Clock,
    ) -> None:
        self._elements, self._spec, self._size, self._own = elements, spec, size, own
        self._batched, self._remainder, self._clock = batched, remainder, clock
        # The epoch and row that the open pass would read next; None after an error,
        # which leaves the stream somewhere in between.
        self._next: tuple[int, int] | None = None
        # The latest block of rows, how many of them were used and are left, and the
        # stream's position before it.
        self._block: list[Any] = []
        self._used = self._left = 0
        self._before: JSON = None

    def close(self) -> None:
        """Closes the open pass."""
        self._next, self._block, self._left = None, [], 0
        self._elements.close()

    def read(self, position: Position) -> HostBatch | None:
        """Returns the batch after a position, or None at the epoch's end."""
        with self._clock.timed("read_s"):
            if self._next != (position.epoch, position.row):
                self._seek(position)
            self._next = None
            batch = self._next_rows(position)
        after = position if batch is None else batch.after
        self._next = after.epoch, after.row
        is_short = batch is not None and self._spec and batch.count < self._size
        if batch is None or not is_short or self._remainder != "drop":
            return batch
        if not position.batch:
            msg = (
                f"the source has {batch.count} rows in epoch {position.epoch + 1}, "
                f"fewer than a batch of {self._size}: remainder='drop' drops all of "
                "them. Take a smaller global_batch_size, or another remainder=."
            )
            raise DataError(msg)
        self._clock.warn(f"Dropped the last {rows_text(batch.count)} of an epoch.")
        return None

    def _seek(self, position: Position) -> None:
        """Moves the stream; if it has no position, by reading and dropping rows."""
        # At the start of an epoch, the stream's state may still be of the one before.
        state = position.source if position.row else None
        self._block, self._left = [], 0
        self._elements.seek(position.epoch, state)
        missing = position.row if state is None else position.offset
        while missing and self._next_block(missing):
            self._used = min(missing, self._left)
            self._left -= self._used
            missing -= self._used
        if missing:
            msg = "the source ended before the position: it is shorter than it was."
            raise DataError(msg)

    def _next_rows(self, position: Position) -> HostBatch | None:
        """Returns the next batch, whatever its length."""
        size, spec = self._size, self._spec
        specs = () if spec is None else spec.leaves
        out = [empty((size, *leaf.shape), leaf.to or object) for leaf in specs]
        filled, epoch, row = 0, position.epoch, position.row
        while filled < size:
            with _checks.noted(
                f"after {rows_text(row + filled)} of epoch {epoch + 1} were read."
            ):
                has_rows = self._left or self._next_block(size - filled)
            if has_rows:
                count = self._left if spec is None else min(self._left, size - filled)
                for leaf, array, block in zip(specs, out, self._block, strict=False):
                    rows = block[self._used : self._used + count]
                    leaf.copy(rows, array[filled : filled + count])
                self._used, self._left = self._used + count, self._left - count
                filled += count
                if spec is None:  # a batch on the mesh is one of ours
                    break
                continue
            if filled and row + filled == 0:
                raise DataError(no_rows(epoch))  # of the epoch that was just begun
            expected = self._elements.source.num_rows
            if expected not in (None, row + filled):
                self._clock.warn(
                    f"The source has num_rows={expected}, and yielded "
                    f"{rows_text(row + filled)} in epoch {epoch + 1}."
                )
            if not filled:
                return None
            if self._remainder != "repeat":
                break
            # The batch runs on into the next epoch, whose rows count from 0 after those
            # that were read before.
            epoch, row = epoch + 1, -filled
            self._elements.seek(epoch)
        for array in out:
            array[filled:] = array[filled - 1]  # padding repeats the last row
        own = self._own
        leaves = out if len(own) == size else [array[own] for array in out]
        self._clock.add(rows=filled)
        after = position._replace(
            epoch=epoch,
            batch=0 if epoch != position.epoch else position.batch + 1,
            row=row + filled,
            # In the middle of the source's batch, a resumed stream reads it again, and
            # the rows that were used are skipped.
            source=self._before if self._left else self._elements.position(),
            offset=self._used if self._left else 0,
        )
        return HostBatch(self._block if spec is None else leaves, filled, after)

    def _next_block(self, missing: int) -> int:
        """Reads a batch, or the examples that are missing; returns the rows, or 0."""
        rows, count, spec = None, 0, self._spec
        while not count:
            self._before = self._elements.position()
            if self._batched or spec is None:
                element = next(self._elements.rest(), None)
                if element is None:
                    return 0
                if is_placed(element) != (spec is None):
                    msg = (
                        "the source yielded batches on devices and others on the host. "
                        "Yield all of them in one place."
                    )
                    raise DataError(msg)
                rows, count = element, len(jax.tree.leaves(element)[0])
                if spec is not None:
                    rows, count = as_batch(element)
            else:
                examples = itertools.islice(self._elements.rest(), missing)
                copies = [copied(example) for example in examples]
                if not copies:
                    return 0
                rows, count = stack(copies), len(copies)
        self._block = [rows] if spec is None else spec.checked(rows)
        self._used, self._left = 0, count
        return count
