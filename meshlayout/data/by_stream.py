"""Batches of a stream: elements are copied into a batch as they are read.

A generator may yield the same buffer again and again, or views of one that it refills.
So each example is copied into the batch before the next one is read. That is also the
fastest way: an example is written once, to where it stays. Every process that shares a
stream fills the whole batch, since it has to decode all rows anyway, and then keeps its
own rows of it.

The first element has to be looked at before anything else can be decided (its shapes,
and whether it is a batch), and a generator yields it only once. So `Elements` remembers
the element it has looked at, and yields it again.
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
        name, flags = type(source).__name__, (True, False, None)
        _checks.choice(f"batched of the {name}", source.batched, flags, error=DataError)
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
        """
        try:
            if self._first is None:
                self.seek(0)
            state = self.position()
            for element in self.rest():
                rows, count = _with_rows(element, self.source.batched)
                if count != 0:  # empty batches have no rows to learn shapes from
                    self._first = element, state
                    return rows, count
                state = self.position()
            raise DataError(no_rows(0))
        except BaseException:
            self.close()
            raise

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
                msg = (
                    f"open({epoch}) of the {type(self.source).__name__} returned "
                    f"{_checks.shown(stream)}, which is no Stream: an iterator with "
                    "get_state (which may return None), set_state and close."
                )
                raise DataError(msg)
            self._stream, self._epoch = stream, epoch
        if state is not None and self._stream is not None:
            self._first = None
            self._stream.set_state(state)

    def rest(self) -> Iterator[PyTree]:
        """Returns the elements that come next; at least one of them must be taken."""
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


def _with_rows(element: PyTree, batched: bool | None) -> tuple[PyTree, int | None]:
    if batched is not False and is_placed(element):
        return element, len(jax.tree.leaves(element)[0])
    if batched is None and looks_batched(element):
        raise DataError(ambiguous("the source"))
    return as_batch(element) if batched else (stack([element]), None)


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
        # The source's latest batch, how many of its rows were used and are left, and
        # the stream's position before it.
        self._block: list[np.ndarray] = []
        self._used = self._left = 0
        self._before: JSON = None

    def close(self) -> None:
        """Closes the open pass."""
        self._open(None)

    def read(self, position: Position) -> HostBatch | None:
        """Returns the next batch, or None at the epoch's end.

        A stream that is elsewhere is moved to the position; if it cannot seek, by
        reading and dropping rows.
        """
        with self._clock.timed("read_s"):
            if self._next != (position.epoch, position.row):
                self._seek(position)
            self._next = None
            if self._spec is None:
                batch = self._next_placed(position)
            else:
                batch = self._next_rows(self._spec, position)
        after = position if batch is None else batch.after
        self._next = after.epoch, after.row
        if batch is None or self._spec is None or batch.count == self._size:
            return batch
        if self._remainder == "drop" and not position.batch:
            msg = (
                f"the source has {batch.count} rows in epoch {position.epoch + 1}, "
                f"fewer than a batch of {self._size}: remainder='drop' drops all of "
                "them. Take a smaller global_batch_size, or another remainder=."
            )
            raise DataError(msg)
        if self._remainder == "drop":
            self._clock.warn(f"Dropped the last {rows_text(batch.count)} of an epoch.")
            return None
        return batch

    def _open(self, epoch: int | None, state: JSON = None) -> None:
        self._next, self._block, self._left = None, [], 0
        if epoch is None:
            self._elements.close()
        else:
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
        size, own = self._size, self._own
        out = [
            empty((size, *leaf.shape), (self._batched and leaf.to) or leaf.dtype)
            for leaf in spec.leaves
        ]
        filled, epoch, row = 0, position.epoch, position.row
        with _checks.noted(
            lambda: f"after {rows_text(row + filled)} of epoch {epoch + 1} were read."
        ):
            while filled < size:
                before, filled = filled, self._fill(spec, out, filled)
                if filled > before:
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
                # The batch runs on into the next epoch, whose rows count from 0 after
                # those that were read before.
                epoch, row = epoch + 1, -filled
                self._open(epoch)
            leaves = []
            for leaf, array in zip(spec.leaves, out, strict=True):
                array[filled:] = array[filled - 1]  # padding repeats the last row
                rows = array if len(own) == size else array[own]
                leaves.append(leaf.converted(rows))
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
        return HostBatch(leaves, filled, after)

    def _fill(self, spec: ExampleSpec, out: list[np.ndarray], filled: int) -> int:
        """Copies rows to after those that are filled; returns how many are then."""
        if not self._batched:
            return _copy_examples(spec, self._elements.rest(), out, filled)
        if not self._left and not self._next_block(spec):
            return filled
        count = min(self._left, self._size - filled)
        for leaf, array, block in zip(spec.leaves, out, self._block, strict=True):
            rows = block[self._used : self._used + count]
            leaf.copy(rows, array[filled : filled + count])
        self._used += count
        self._left -= count
        return filled + count

    def _next_block(self, spec: ExampleSpec) -> bool:
        """Reads a batch that is not empty; returns whether there was one."""
        count = 0
        while not count:
            self._before = self._elements.position()
            element = self._next_batch(on_mesh=False)
            if element is None:
                return False
            rows, count = as_batch(element)
            if count:
                self._block = spec.checked(rows)
        self._used, self._left = 0, count
        return True

    def _next_placed(self, position: Position) -> HostBatch | None:
        """Returns the next batch of a stream whose batches are on the mesh."""
        batch = self._next_batch(on_mesh=True)
        if batch is None:
            return None
        count = len(jax.tree.leaves(batch)[0])
        after = position._replace(
            batch=position.batch + 1,
            row=position.row + count,
            source=self._elements.position(),
        )
        return HostBatch([batch], count, after)

    def _next_batch(self, *, on_mesh: bool) -> PyTree:
        batch = next(self._elements.rest(), None)
        if batch is not None and is_placed(batch) != on_mesh:
            here, others = "the host", "devices"
            here, others = (here, others) if on_mesh else (others, here)
            msg = (
                f"the source yielded a batch on {here} after others on {others}. Yield "
                "all of them in one place."
            )
            raise DataError(msg)
        return batch


def _copy_examples(
    spec: ExampleSpec, elements: Iterator[PyTree], out: list[np.ndarray], filled: int
) -> int:
    """Copies examples, each before the next is read; returns the rows then filled."""
    # This loop runs for every example: a flat dict is taken apart without JAX, the
    # types of numbers that were checked once need no array, and zip is faster without
    # strict= (there is one leaf per column).
    paths = [leaf.path for leaf in spec.leaves]
    is_flat = spec.treedef == jax.tree.structure(dict.fromkeys(paths, 0))
    flatten, ndarray = spec.treedef.flatten_up_to, np.ndarray
    columns = [
        (array, leaf.dtype, leaf.shape, set[type](), leaf)
        for array, leaf in zip(out, spec.leaves, strict=True)
    ]
    # The slots first: the iterator of the elements must not be read once too often.
    for slot, example in zip(range(filled, len(out[0])), elements, strict=False):
        try:
            is_plain = is_flat and type(example) is dict and len(example) == len(paths)
            leaves: Any = [*map(example.__getitem__, paths)] if is_plain else None
            leaves = flatten(example) if leaves is None else leaves
        except (ValueError, KeyError):
            raise structure_error(example, paths) from None
        try:
            for (array, dtype, shape, numbers, leaf), value in zip(columns, leaves):  # noqa: B905
                kind = type(value)
                if kind is ndarray:
                    if value.dtype != dtype or value.shape != shape:
                        leaf.check(value.shape, value)
                elif kind not in numbers:
                    value = leaf_array(leaf.path, value)
                    leaf.check(value.shape, value)
                    if issubclass(kind, (bool, int, float, complex, np.generic)):
                        numbers.add(kind)
                array[slot] = value
        except OverflowError as error:
            msg = f"an example holds an integer beyond 64 bits: {error}."
            raise DataError(msg) from None
        filled = slot + 1
    return filled
