"""Batches of a stream: elements are copied into a batch as they are read.

A generator may yield the same buffer again and again, or views of one that it refills.
So each example is copied into the batch before the next one is read; nothing is
collected first, and nothing is inferred from the addresses of arrays. That is also the
fastest way: an example is written once, to where it stays. Every process that shares a
stream fills the whole batch, since it has to decode all rows anyway, and then keeps its
own rows of it.

The first element has to be looked at before anything else can be decided (its shapes,
and whether it is a batch), and a generator yields it only once. So `Elements` reads the
stream, remembers the element it has looked at, and yields it again.
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
    empty,
    is_placed,
    leaf_array,
    looks_batched,
    no_rows,
    rows_text,
    stack,
    structure_error,
)
from meshlayout.data.position import Position
from meshlayout.data.protocols import JSON, Stream, StreamSource
from meshlayout.data.report import Clock
from meshlayout.errors import DataError


class Elements:
    """The elements of a stream, one pass after another."""

    def __init__(self, source: StreamSource) -> None:
        name = type(source).__name__
        choices = (True, False, None)
        _checks.choice(f"batched of the {name}", source.batched, choices, error=DataError)
        if source.num_rows is not None:
            what = f"num_rows of the {name}"
            _checks.count(what, source.num_rows, at_least=0, error=DataError)
        self.source = source
        self._stream: Stream | None = None
        # The element that was looked at, with the position before it; until it is read.
        self._first: tuple[PyTree, JSON] | None = None
        self._epoch: int | None = None  # of the open pass

    def look(self) -> tuple[PyTree, int | None]:
        """Returns the first element that has rows, as arrays, and the number of rows.

        The number is None for a single example, to which a dim for the rows is added.
        Raises DataError if no element has rows, or if it could be either.
        """
        try:
            if self._first is None:
                self.seek(0)
            state = self.position()
            for element in self.rest():
                rows, count = _with_rows(element, batched=self.source.batched)
                if count != 0:  # empty batches have no rows to learn shapes from
                    self._first = element, state
                    return rows, count
                state = self.position()
            raise DataError(no_rows(0))
        except BaseException:
            self.close()
            raise

    def is_only_batch(self) -> bool:
        """Returns whether the batch that was looked at is all there is, if known."""
        rows, count = self.look()
        del rows
        if self.source.num_rows is not None:
            return self.source.num_rows == count
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
            self._stream, self._epoch = _opened(self.source, epoch), epoch
        if state is not None and self._stream is not None:
            self._first = None
            self._stream.set_state(state)

    def rest(self) -> Iterator[PyTree]:
        """Returns the elements that come next; at least one of them must be taken.

        The element that was looked at is part of this iterator alone.
        """
        first, self._first = self._first, None
        stream = iter(() if self._stream is None else self._stream)
        return stream if first is None else itertools.chain(first[:1], stream)

    def position(self) -> JSON:
        """Returns the stream's own position before the next element; None if unknown."""
        if self._first is not None:
            return self._first[1]
        state = None if self._stream is None else self._stream.get_state()
        try:
            # A copy: the stream may return the same dict again, changed.
            return None if state is None else json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            msg = (
                f"the source's get_state() returned {_checks.type_text(state)} that is "
                f"not JSON-serializable: {error}. Return numbers, strings, lists and "
                "dicts."
            )
            raise DataError(msg) from error

    def close(self) -> None:
        """Closes the open pass."""
        stream, self._stream, self._first = self._stream, None, None
        self._epoch = None
        if stream is not None:
            stream.close()


def _opened(source: StreamSource, epoch: int) -> Stream:
    """Opens a source, which must return something with all methods of a `Stream`."""
    stream = source.open(epoch)
    # A list, say, is no iterator: every batch would start at its first element.
    for method in ("__next__", "__iter__", "get_state", "set_state", "close"):
        if not hasattr(stream, method):
            msg = (
                f"open({epoch}) of the {type(source).__name__} returned "
                f"{_checks.shown(stream)}, which lacks {method}: a Stream is an "
                "iterator with get_state (which may return None), set_state and close."
            )
            raise DataError(msg)
    return stream


def _with_rows(element: PyTree, *, batched: bool | None) -> tuple[PyTree, int | None]:
    """Returns an element as rows, and their number; None for a single example."""
    if batched is not False and is_placed(element):
        return element, len(jax.tree.leaves(element)[0])
    if batched is None and looks_batched(element):
        raise DataError(ambiguous("the source"))
    return as_batch(element) if batched else (stack([element]), None)


class StreamReader:
    """Fills batches with the rows of a stream.

    Args:
        elements: Reads the stream.
        spec: The spec of its examples; None for batches that are on the mesh already,
            which are passed on unchanged.
        size: The rows of the stream that make one batch.
        own: Which of them are this process's own, ascending.
        batched: Whether elements are batches.
        remainder: As for `distribute_dataset`.
        clock: Takes the time of reading.
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
        # The source's latest batch, how many of its rows were used and are left, and
        # the stream's position before it.
        self._block: list[np.ndarray] = []
        self._used = self._left = 0
        self._before: JSON = None

    def close(self) -> None:
        """Closes the open pass."""
        self._next = None
        self._block, self._left = [], 0
        self._elements.close()

    def read(self, position: Position) -> HostBatch | None:
        """Returns the next batch, or None at the epoch's end.

        A stream that is elsewhere is moved to the position; if it cannot seek, by
        reading and dropping rows.
        """
        if self._next != (position.epoch, position.row):
            self._seek(position)
        self._next = None
        with self._clock.reading():
            if self._spec is None:
                batch = self._next_placed(position)
            else:
                batch = self._next_rows(self._spec, position)
        after = position if batch is None else batch.after
        self._next = after.epoch, after.row
        if batch is None or self._spec is None or batch.count == self._size:
            return batch
        if self._remainder != "drop":
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

    def _open(self, epoch: int, state: JSON = None) -> None:
        self._block, self._left = [], 0
        self._elements.seek(epoch, state)

    def _seek(self, position: Position) -> None:
        # At the start of an epoch, the stream's state may still be of the one before.
        state = position.source if position.row else None
        self._open(position.epoch, state)
        missing = position.row if state is None else position.offset
        if missing and (self._spec is None or not self._batched):
            # One element per example; or per batch, if they are on the mesh.
            missing = position.batch if self._spec is None else missing
            missing -= sum(1 for _ in itertools.islice(self._elements.rest(), missing))
        while missing and self._spec is not None and self._next_block(self._spec):
            self._used = min(missing, self._left)
            self._left -= self._used
            missing -= self._used
        if missing:
            msg = (
                "the source ended before the position of the state: it is shorter than "
                "when the state was saved."
            )
            raise DataError(msg)

    def _next_rows(self, spec: ExampleSpec, position: Position) -> HostBatch | None:
        """Returns the next batch of a stream on the host, whatever its length."""
        out = [
            empty((self._size, *leaf.shape), leaf.to if self._batched else leaf.dtype)
            for leaf in spec.leaves
        ]
        filled, epoch, row = 0, position.epoch, position.row
        with _checks.noted(
            lambda: f"after {rows_text(row + filled)} of epoch {epoch + 1} were read."
        ):
            while filled < self._size:
                count = self._fill(spec, out, filled)
                filled += count
                if count:
                    continue
                self._note_length(epoch, row + filled)
                if self._remainder != "repeat" or not filled:
                    break
                # The batch runs on into the next epoch, whose rows count from 0 after
                # those that were read before.
                epoch, row = epoch + 1, -filled
                self._open(epoch)
                count = self._fill(spec, out, filled)
                filled += count
                if not count:
                    raise DataError(no_rows(epoch))
            if not filled:
                return None
            leaves = []
            for leaf, array in zip(spec.leaves, out, strict=True):
                array[filled:] = array[filled - 1]  # padding repeats the last row
                is_all = len(self._own) == self._size
                leaves.append(leaf.converted(array if is_all else array[self._own]))
        after = position._replace(
            epoch=epoch,
            batch=0 if epoch != position.epoch else position.batch + 1,
            row=row + filled,
            # In the middle of the source's batch, a resumed stream reads it again, and
            # the rows that were used are skipped.
            source=self._before if self._left else self._elements.position(),
            offset=self._used if self._left else 0,
        )
        self._clock.read_rows(filled)
        return HostBatch(leaves, filled, after)

    def _note_length(self, epoch: int, num_rows: int) -> None:
        expected = self._elements.source.num_rows
        if expected not in (None, num_rows):
            self._clock.warn(
                f"The source has num_rows={expected}, and yielded "
                f"{rows_text(num_rows)} in epoch {epoch + 1}."
            )

    def _fill(self, spec: ExampleSpec, out: list[np.ndarray], filled: int) -> int:
        """Copies rows to after those that are filled; returns 0 at the pass's end."""
        if not self._batched:
            return _copy_examples(spec, self._elements.rest(), out, filled) - filled
        if not self._left and not self._next_block(spec):
            return 0
        count = min(self._left, self._size - filled)
        for leaf, array, block in zip(spec.leaves, out, self._block, strict=True):
            rows = block[self._used : self._used + count]
            leaf.copy(rows, array[filled : filled + count])
        self._used += count
        self._left -= count
        return count

    def _next_block(self, spec: ExampleSpec) -> bool:
        """Reads a batch that is not empty; returns whether there was one."""
        count = 0
        while not count:
            self._before = self._elements.position()
            element = next(self._elements.rest(), None)
            if element is None:
                return False
            _check_place(element, on_mesh=False)
            rows, count = as_batch(element)
            if count:
                self._block = spec.checked(rows)
        self._used, self._left = 0, count
        return True

    def _next_placed(self, position: Position) -> HostBatch | None:
        """Returns the next batch of a stream whose batches are on the mesh."""
        batch = next(self._elements.rest(), None)
        if batch is None:
            return None
        _check_place(batch, on_mesh=True)
        count = len(jax.tree.leaves(batch)[0])
        after = position._replace(
            batch=position.batch + 1,
            row=position.row + count,
            source=self._elements.position(),
        )
        return HostBatch([batch], count, after)


def _check_place(batch: PyTree, *, on_mesh: bool) -> None:
    if is_placed(batch) != on_mesh:
        here, there = ("host", "devices") if on_mesh else ("devices", "the host")
        msg = (
            f"the source yielded a batch on {'the ' * on_mesh}{here} after others on "
            f"{there}. Yield all of them in one place."
        )
        raise DataError(msg)


def _copy_examples(
    spec: ExampleSpec, elements: Iterator[PyTree], out: list[np.ndarray], filled: int
) -> int:
    """Copies examples, each before the next is read; returns the rows then filled."""
    # This loop runs for every example: a flat dict is taken apart without JAX, and the
    # types of numbers that were checked once need no array.
    paths = [leaf.path for leaf in spec.leaves]
    is_flat = spec.treedef == jax.tree.structure(dict.fromkeys(paths, 0))
    columns = [
        (array, leaf.dtype, leaf.shape, set[type](), leaf)
        for array, leaf in zip(out, spec.leaves, strict=True)
    ]
    size = len(out[0])
    # The slots first: the iterator of the elements must not be read once too often.
    for slot, example in zip(range(filled, size), elements, strict=False):
        try:
            if is_flat and type(example) is dict and len(example) == len(paths):
                leaves: list[Any] = [example[path] for path in paths]
            else:
                leaves = spec.treedef.flatten_up_to(example)
        except (ValueError, KeyError):
            raise structure_error(example, paths) from None
        try:
            for (array, dtype, shape, numbers, leaf), value in zip(
                columns, leaves, strict=True
            ):
                kind = type(value)
                if kind is not np.ndarray and kind not in numbers:
                    value = leaf_array(leaf.path, value)
                    leaf.check(value.shape, value)
                    if issubclass(kind, (bool, int, float, complex, np.generic)):
                        numbers.add(kind)
                elif kind is np.ndarray:
                    if value.dtype != dtype or value.shape != shape:
                        leaf.check(value.shape, value)
                array[slot] = value
        except OverflowError as error:
            msg = f"an example holds an integer beyond 64 bits: {error}."
            raise DataError(msg) from None
        filled = slot + 1
    return filled
