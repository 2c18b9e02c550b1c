"""Batches of a stream: elements are copied into batches as they are read.

A generator may yield the same buffer again and again, or views of one that it refills.
So each example is copied into the batch before the next one is read; nothing is
collected first, and nothing is inferred from the addresses of arrays. That is also the
fastest way: an example is written once, to where it stays.
"""

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from meshlayout import _checks
from meshlayout._annotations import Batch, Leaf, PyTree
from meshlayout.data.agreement import RowDigest
from meshlayout.data.by_row import Cut, HostBatch
from meshlayout.data.clock import Clock
from meshlayout.data.element_rows import as_batch, is_placed, leaf_array
from meshlayout.data.elements import ElementReader, no_rows, rows_text
from meshlayout.data.examples import ExampleSpec, LeafSpec, empty, structure_error
from meshlayout.data.position import Position
from meshlayout.data.protocols import JSON
from meshlayout.errors import DataError


class StreamReader:
    """Copies this process's rows of a stream into batches.

    Without a `spec`, elements are batches on the mesh, which are passed on unchanged.
    """

    def __init__(
        self,
        elements: ElementReader,
        spec: ExampleSpec | None,
        cut: Cut,
        *,
        batched: bool,
        remainder: str,
        compared: bool,
        clock: Clock,
    ) -> None:
        self._elements, self._spec, self._cut = elements, spec, cut
        self._compared = compared  # whether other processes read the same rows
        self._batched, self._remainder, self._clock = batched, remainder, clock
        # The epoch and row that the open pass would read next; None after an error,
        # which leaves the stream somewhere in between.
        self._next: tuple[int, int] | None = None
        # The source's latest batch, how many of its rows were used and are left, and
        # the stream's position before it.
        self._block: list[np.ndarray] = []
        self._used = self._left = 0
        self._before: JSON = None

    def read(self, position: Position) -> HostBatch | None:
        """Returns the next batch, or None at the epoch's end.

        Args:
            position: The position after the previous batch, or the start of an epoch.
                A stream that is elsewhere is moved there; if it cannot seek, by reading
                and dropping rows.

        Raises:
            DataError: If the rows do not fit, or the source ends before the position.
        """
        if self._next != (position.epoch, position.row):
            self._seek(position)
        self._next = None
        with self._clock.stage("read") as timer:
            if self._spec is None:
                batch = self._next_placed(position)
            else:
                batch = self._next_rows(self._spec, position)
            timer.rows = 0 if batch is None else batch.count
        after = position if batch is None else batch.position
        self._next = after.epoch, after.row
        return batch if batch is None else self._checked(batch, position)

    def close(self) -> None:
        """Closes the open pass."""
        self._next = None
        self._block, self._left = [], 0
        self._elements.close()

    def _open(self, epoch: int, state: JSON = None) -> None:
        self._block, self._left = [], 0
        self._elements.seek(epoch, state)

    def _seek(self, position: Position) -> None:
        """Moves the stream to a position; by reading if it has none of its own."""
        # At the start of an epoch, the stream's state may still be of the one before.
        state = position.source if position.row else None
        self._open(position.epoch, state)
        missing = position.row if state is None else position.offset
        with self._clock.stage("read"):
            if missing and (self._spec is None or not self._batched):
                # One element per example; or per batch, if they are on the mesh.
                missing = position.batch if self._spec is None else missing
                skipped = itertools.islice(self._elements.elements(), missing)
                missing -= sum(1 for _ in skipped)
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
        """Returns the next batch of a stream on the host, before it is checked."""
        digest = RowDigest(spec.paths) if self._compared else None
        buffer = _RowBuffer(spec, self._cut, batched=self._batched, digest=digest)
        epoch, row = position.epoch, position.row
        with _checks.noted(
            lambda: (
                f"after {rows_text(row + buffer.filled)} of epoch {epoch + 1} were "
                "read."
            )
        ):
            while buffer.filled < self._cut.size:
                if self._fill(buffer):
                    continue
                self._note_length(epoch, row + buffer.filled)
                if self._remainder != "repeat" or not buffer.filled:
                    break
                # The batch runs on into the next epoch, whose rows count from 0 after
                # those that were read before.
                epoch, row = epoch + 1, -buffer.filled
                self._open(epoch)
                if not self._fill(buffer):
                    raise DataError(no_rows(epoch))
            if not buffer.filled:
                return None
            leaves = buffer.finished()
        after = position._replace(
            epoch=epoch,
            batch=0 if epoch != position.epoch else position.batch + 1,
            row=row + buffer.filled,
            # In the middle of the source's batch, a resumed stream reads it again, and
            # the rows that were used are skipped.
            source=self._before if self._left else self._elements.position(),
            offset=self._used if self._left else 0,
        )
        digests = {} if digest is None else digest.by_leaf()
        return HostBatch(leaves, buffer.filled, after, digests)

    def _note_length(self, epoch: int, num_rows: int) -> None:
        """Warns if a pass has ended with other rows than the source says it has."""
        expected = self._elements.source.num_rows
        if expected not in (None, num_rows):
            self._clock.warn(
                f"The source has num_rows={expected}, and yielded "
                f"{rows_text(num_rows)} in epoch {epoch + 1}."
            )

    def _fill(self, buffer: "_RowBuffer") -> bool:
        """Adds rows to a batch; returns whether there were any left in the pass."""
        before = buffer.filled
        missing = self._cut.size - before
        if not self._batched:
            buffer.add_examples(self._elements.elements(), missing)
        elif self._left or self._next_block(buffer.spec):
            count = min(self._left, missing)
            buffer.add_rows(self._block, self._used, count)
            self._used += count
            self._left -= count
        return buffer.filled > before

    def _next_block(self, spec: ExampleSpec) -> bool:
        """Reads a batch that is not empty; returns whether there was one."""
        while True:
            self._before = self._elements.position()
            element = next(self._elements.elements(), None)
            if element is None:
                return False
            if is_placed(element):
                msg = (
                    "the source yielded a batch on devices after others on the host. "
                    "Yield all of them in one place."
                )
                raise DataError(msg)
            rows, count = as_batch(element)
            if count:
                break
        self._block = spec.checked(rows)
        self._used, self._left = 0, count
        return True

    def _next_placed(self, position: Position) -> HostBatch | None:
        """Returns the next batch of a stream whose batches are on the mesh."""
        batch: Batch = next(self._elements.elements(), None)
        if batch is None:
            return None
        if not is_placed(batch):
            msg = (
                "the source yielded a batch on the host after others on devices. Yield "
                "all of them in one place."
            )
            raise DataError(msg)
        count = len(jax.tree.leaves(batch)[0])
        after = position._replace(
            batch=position.batch + 1,
            row=position.row + count,
            source=self._elements.position(),
        )
        return HostBatch([batch], count, after)

    def _checked(self, batch: HostBatch, position: Position) -> HostBatch | None:
        """Returns a batch that is full or will be padded; None if it is dropped."""
        size, count = self._cut.size, batch.count
        if count == size or self._spec is None:
            return batch
        if self._remainder == "drop":
            if not position.batch:
                msg = (
                    f"the source has {count} rows in epoch {position.epoch + 1}, fewer "
                    f"than a batch of {size}: remainder='drop' drops all of them. Take "
                    "a smaller global_batch_size, or another remainder=."
                )
                raise DataError(msg)
            self._clock.warn(f"Dropped the last {rows_text(count)} of an epoch.")
            return None
        if self._remainder == "error":
            msg = (
                f"the source's epoch ends with {rows_text(count)} left, in batches of "
                f"{size}. Choose another remainder=, or another global_batch_size."
            )
            raise DataError(msg)
        return batch


class _RowBuffer:
    """The rows of one batch, being filled.

    Single examples are written in the source's dtypes, and converted together at the
    end, which is faster than one by one; the rows of batches are converted as they are
    copied. If this process keeps only some rows, one more is allocated than it keeps:
    the rows of other processes are written over each other there, because the last one
    of them may be the row that padding repeats.
    """

    def __init__(
        self, spec: ExampleSpec, cut: Cut, *, batched: bool, digest: RowDigest | None
    ) -> None:
        self.spec, self._cut, self._digest = spec, cut, digest
        self.filled = 0
        num_rows = cut.num_kept + (cut.keep is not None)
        self._out = [
            empty(
                (num_rows, *leaf.shape),
                (object if leaf.to is None else leaf.to) if batched else leaf.dtype,
            )
            for leaf in spec.leaves
        ]
        # By leaf, the types of numbers and strings that need no further check.
        self._scalars: list[set[type]] = [set() for _ in spec.leaves]

    def add_examples(self, elements: Iterator[PyTree], count: int) -> None:
        """Adds at most `count` single examples, each before the next one is read."""
        # This loop runs for every example: locals are faster than attributes, a
        # comparison of types faster than isinstance, and zip faster without strict=
        # (`flatten` returns one leaf per column).
        flatten, ndarray = _flattener(self.spec), np.ndarray
        columns = [
            (out, spec.dtype, spec.shape, scalars, spec)
            for out, spec, scalars in zip(
                self._out, self.spec.leaves, self._scalars, strict=True
            )
        ]
        digest = self._digest
        slots = self._cut.slots[self.filled : self.filled + count]
        for slot, example in zip(slots, elements, strict=False):
            try:
                leaves = flatten(example)
            except (ValueError, KeyError):
                raise structure_error(example, self.spec.paths) from None
            try:
                for (out, dtype, shape, scalars, spec), leaf in zip(  # noqa: B905
                    columns, leaves
                ):
                    kind = type(leaf)
                    if kind is ndarray:
                        if leaf.dtype != dtype or leaf.shape != shape:
                            spec.check(leaf.shape, leaf)
                        out[slot] = leaf
                    elif kind in scalars:
                        out[slot] = leaf
                    else:
                        out[slot] = _checked(spec, leaf, scalars)
            except OverflowError as error:
                msg = f"an example holds an integer beyond 64 bits: {error}."
                raise DataError(msg) from None
            self.filled += 1
            if digest is not None:  # also of rows that only other processes keep
                digest.add([out[slot : slot + 1] for out in self._out])

    def add_rows(self, block: list[np.ndarray], start: int, count: int) -> None:
        """Adds the rows of a source batch that this process keeps."""
        cut, stop = self._cut, start + count
        low = cut.num_kept_before(self.filled)
        high = cut.num_kept_before(self.filled + count)
        chosen: Any = slice(start, stop)
        if cut.keep is not None:
            chosen = cut.keep[low:high] - self.filled + start
            is_contiguous = high > low and chosen[-1] - chosen[0] == high - low - 1
            if is_contiguous:  # a view instead of a gathered copy
                chosen = slice(int(chosen[0]), int(chosen[-1]) + 1)
        for spec, out, leaf in zip(self.spec.leaves, self._out, block, strict=True):
            if high > low:
                spec.copy(leaf[chosen], out[low:high])
            if cut.keep is not None:
                spec.copy(leaf[stop - 1 : stop], out[cut.num_kept :])
        self.filled += count
        if self._digest is not None:
            self._digest.add([leaf[start:stop] for leaf in block])

    def finished(self) -> list[np.ndarray]:
        """Returns the leaves; rows that were not filled repeat the last one.

        The last row of the whole batch, not of this process's rows: padding is the
        same on any number of processes.
        """
        num_kept = self._cut.num_kept
        num_filled = self._cut.num_kept_before(self.filled)
        leaves = []
        for spec, out in zip(self.spec.leaves, self._out, strict=True):
            if num_filled < num_kept:
                out[num_filled:num_kept] = out[self._cut.slots[self.filled - 1]]
            leaves.append(spec.converted(out[:num_kept]))
        return leaves


def _flattener(spec: ExampleSpec) -> Callable[[PyTree], Sequence[Any]]:
    """Returns a function from an example to its leaves, fast for a flat dict.

    It does not check that the values of such a dict are leaves: `_checked` does, when
    they are written.
    """
    flatten = spec.treedef.flatten_up_to
    names = [leaf.path for leaf in spec.leaves]
    if len(names) < 2 or spec.treedef != jax.tree.structure(dict.fromkeys(names, 0)):
        return flatten
    items, count = operator.itemgetter(*names), len(names)

    def leaves(example: PyTree) -> Sequence[Any]:
        is_plain = type(example) is dict and len(example) == count
        return items(example) if is_plain else flatten(example)

    return leaves


def _checked(spec: LeafSpec, leaf: Leaf, scalars: set[type]) -> Any:
    """Returns a leaf of one example, after checking it against the first example's.

    Its type is added to `scalars` if no value of that type needs the check again.
    """
    array = leaf_array(spec.path, leaf)
    spec.check(array.shape, array)
    is_text = isinstance(leaf, (str, bytes))
    if is_text or isinstance(leaf, (bool, int, float, complex, np.generic)):
        scalars.add(type(leaf))
    return leaf if is_text else array


def first_row(spec: ExampleSpec, rows: PyTree) -> list[np.ndarray]:
    """Returns the leaves of the first row alone, as copies."""
    return [
        leaf_spec.converted(leaf[:1].astype(leaf_spec.dtype))
        for leaf_spec, leaf in zip(spec.leaves, spec.checked(rows), strict=True)
    ]
