"""Batches of a source that is read one way: elements, copied into batches as they come.

A generator may yield the same buffer again and again, or views of one that it refills.
So each example is copied into the batch before the next one is asked for; nothing is
gathered first, and nothing is inferred from the addresses of arrays. That is also
the fastest way: an example is written once, where it stays.
"""

import contextlib
import hashlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from meshlayout import _checks
from meshlayout._annotations import Leaf, PyTree
from meshlayout.data.agreement import row_bytes
from meshlayout.data.by_row import Cut, HostBatch
from meshlayout.data.clock import Clock
from meshlayout.data.examples import (
    ExampleSpec,
    LeafSpec,
    as_batch,
    empty,
    is_placed,
    leaf_array,
    looks_batched,
    stack,
)
from meshlayout.data.position import Position, check_json
from meshlayout.data.protocols import JSON, Stream, StreamSource
from meshlayout.errors import DataError


class Reader(Protocol):
    """Cuts a source into batches."""

    def seek(self, position: Position) -> None:
        """Goes to a place.

        Raises:
            DataError: If the source cannot go there.
        """
        ...

    def read(self, position: Position, *, digest: bool = False) -> HostBatch | None:
        """Returns the next batch, or None at the epoch's end.

        Args:
            position: The place after the batch before it, or an epoch's start.
            digest: Whether to digest the rows that are read.
        """
        ...

    def close(self) -> None:
        """Releases what it holds."""
        ...


@dataclass(frozen=True)
class OpenedStream:
    """A pass whose first element was read, to see what the examples are.

    The first iteration continues it, so that nothing is read twice.

    Attributes:
        stream: The pass.
        start: The stream's place before that element.
        first: The element.
        rows: The same as a tree of arrays with a dim for the examples.
        count: How many examples it holds; None for one example without such a dim.
    """

    stream: Stream
    start: JSON
    first: PyTree
    rows: PyTree
    count: int | None


def open_first(source: StreamSource) -> OpenedStream:
    """Begins the first pass over a source, and reads the first element with rows.

    Raises:
        DataError: If there is none, or it may be an example or a batch.
    """
    stream = source.open(0)
    try:
        start = check_json(stream.get_state())
        for element in stream:
            rows, count = _with_rows(element, batched=source.batched)
            if count != 0:
                return OpenedStream(stream, start, element, rows, count)
            start = check_json(stream.get_state())
        raise DataError(no_rows(0))
    except BaseException:
        stream.close()
        raise


def _with_rows(element: PyTree, *, batched: bool | None) -> tuple[PyTree, int | None]:
    """Returns an element as rows, and how many they are; None for a single example."""
    if batched is not False and is_placed(element):
        return element, len(jax.tree.leaves(element)[0])
    if batched is None:
        batched = False
        if looks_batched(element):
            raise DataError(ambiguous("the source"))
    return as_batch(element) if batched else (stack([element]), None)


def ambiguous(what: str) -> str:
    """Returns the sentence that asks for `batched=`.

    Args:
        what: The source, in words.
    """
    return (
        f"the elements of {what} may be examples or batches: all their arrays have the "
        "same first dim. Say batched=False for examples, or batched=True for batches."
    )


class _Pass:
    """The pass over a source that is open, if any.

    Args:
        source: The source.
        opened: The first pass, if nobody has taken it yet; emptied here.
    """

    def __init__(self, source: StreamSource, opened: list[OpenedStream]) -> None:
        self._source, self._opened = source, opened
        self._stream: Stream | None = None
        self._first: OpenedStream | None = None  # its element was not given yet
        self.epoch = -1

    def go_to(self, epoch: int, state: JSON = None) -> None:
        """Begins an epoch, and goes to a place in it."""
        self.close()
        if epoch == 0:
            with contextlib.suppress(IndexError):
                self._first = self._opened.pop()
        first = self._first
        self._stream = self._source.open(epoch) if first is None else first.stream
        self.epoch = epoch
        if state is not None:
            self._first = None
            self._stream.set_state(state)

    def elements(self) -> Iterator[PyTree]:
        """Returns the elements that come next; at least one of them must be taken."""
        if self._stream is None:
            return iter(())
        first, self._first = self._first, None
        return itertools.chain([] if first is None else [first.first], self._stream)

    def place(self) -> JSON:
        """Returns the place before the next element; None if it is not known."""
        if self._first is not None:
            return self._first.start
        return None if self._stream is None else check_json(self._stream.get_state())

    def close(self) -> None:
        """Closes the stream."""
        stream, self._stream, self._first = self._stream, None, None
        self.epoch = -1
        if stream is not None:
            stream.close()


class StreamReader:
    """Copies this process's rows of a stream into batches.

    Args:
        source: The source.
        opened: The first pass, if nobody has taken it yet; emptied here.
        spec: What its examples are.
        cut: How batches are cut.
        batched: Whether its elements are batches.
        remainder: What becomes of rows that do not fill a batch.
        clock: Where the time and notes go.
    """

    def __init__(
        self,
        source: StreamSource,
        opened: list[OpenedStream],
        spec: ExampleSpec,
        cut: Cut,
        *,
        batched: bool,
        remainder: str,
        clock: Clock,
    ) -> None:
        self._pass = _Pass(source, opened)
        self._spec, self._cut = spec, cut
        self._batched, self._remainder = batched, remainder
        self._clock = clock
        # Rows of the source's batch that were not used yet; and the place before it.
        self._block: list[np.ndarray] = []
        self._used = self._left = 0
        self._before: JSON = None

    def seek(self, position: Position) -> None:
        """Goes to a place; by reading and dropping where the source knows none."""
        state = position.source if position.row else None
        self._open(position.epoch, state)
        missing = position.row if state is None else position.offset
        with self._clock.stage("read"):
            if not self._batched and missing:
                rows = itertools.islice(self._pass.elements(), missing)
                missing -= sum(1 for _ in rows)
            while missing and self._batched and self._next_block():
                self._used = min(missing, self._left)
                self._left -= self._used
                missing -= self._used
        if missing:
            msg = (
                "the source ended before the place of the state: it is shorter than "
                "when the state was taken."
            )
            raise DataError(msg)

    def read(self, position: Position, *, digest: bool = False) -> HostBatch | None:
        """Returns the next batch, or None at the epoch's end."""
        if self._pass.epoch != position.epoch:
            self._open(position.epoch)
        batch = _Batch(self._spec, self._cut, batched=self._batched, digest=digest)
        row = position.row
        with (
            self._clock.stage("read"),
            _checks.noted(
                lambda: (
                    f"after {rows_text(row + batch.filled)} of epoch "
                    f"{self._pass.epoch + 1} were read."
                )
            ),
        ):
            while batch.filled < self._cut.size:
                if self._fill(batch):
                    continue
                if self._remainder != "repeat" or not batch.filled:
                    break
                row = -batch.filled
                self._open(self._pass.epoch + 1)
                if not self._fill(batch):
                    raise DataError(no_rows(self._pass.epoch))
            leaves = batch.finished() if batch.filled else []
        self._clock.add("read", batch.filled, 0.0)
        if not batch.filled:
            return None
        return self._finished(batch, leaves, position, row + batch.filled)

    def close(self) -> None:
        """Closes the pass that is open."""
        self._block, self._left = [], 0
        self._pass.close()

    def _open(self, epoch: int, state: JSON = None) -> None:
        self._block, self._left = [], 0
        self._pass.go_to(epoch, state)

    def _fill(self, batch: "_Batch") -> bool:
        """Adds rows to a batch; returns whether there were any."""
        before = batch.filled
        missing = self._cut.size - before
        if not self._batched:
            batch.add_examples(self._pass.elements(), missing)
        elif self._left or self._next_block():
            count = min(self._left, missing)
            batch.add_rows(self._block, self._used, count)
            self._used += count
            self._left -= count
        return batch.filled > before

    def _next_block(self) -> bool:
        """Reads a batch that is not empty; returns whether there was one."""
        while True:
            self._before = self._pass.place()
            element = next(self._pass.elements(), None)
            if element is None:
                return False
            if is_placed(element):
                msg = (
                    "the source gave a batch on devices after others on the host. Give "
                    "all of them in one place."
                )
                raise DataError(msg)
            rows, count = as_batch(element)
            if count:
                break
        self._block = self._spec.checked(rows)
        self._used, self._left = 0, count
        return True

    def _finished(
        self, batch: "_Batch", leaves: list[np.ndarray], position: Position, row: int
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
            self._clock.warn(f"Dropped the last {rows_text(count)} of an epoch.")
            return None
        if count < size and self._remainder == "error":
            msg = (
                f"the source's epoch ends with {rows_text(count)} left, in batches of "
                f"{size}. Choose another remainder=, or another global_batch_size."
            )
            raise DataError(msg)
        epoch = self._pass.epoch
        after = position._replace(
            epoch=epoch,
            batch=0 if epoch != position.epoch else position.batch + 1,
            row=row,
            source=self._before if self._left else self._pass.place(),
            offset=self._used if self._left else 0,
        )
        return HostBatch(leaves, count, after, batch.digests())


class _Batch:
    """One batch that is being filled with rows.

    Examples are collected in the source's dtypes, and converted together; the rows of
    batches are converted as they are copied. One row more than this process keeps is
    allocated: the last row of another process's, which may have to be repeated as
    padding, is written there.
    """

    def __init__(
        self, spec: ExampleSpec, cut: Cut, *, batched: bool, digest: bool = False
    ) -> None:
        self._spec, self._cut, self._batched = spec, cut, batched
        self.filled = self._kept = 0
        self._is_last_kept = True
        self._hashes = [hashlib.blake2b(digest_size=8) for _ in spec.leaves]
        self._has_digest = digest
        self._spare = cut.num_kept
        # By leaf, the types of lone numbers and strings that have its dtype.
        self._scalars: list[set[type]] = [set() for _ in spec.leaves]
        self._out = [
            empty((cut.num_kept + (cut.keep is not None), *leaf.shape), dtype)
            for leaf, dtype in zip(spec.leaves, self._dtypes(), strict=True)
        ]

    def _dtypes(self) -> list[Any]:
        if self._batched:
            return [
                object if leaf.to is None else leaf.to for leaf in self._spec.leaves
            ]
        return [leaf.dtype for leaf in self._spec.leaves]

    def add_examples(self, elements: Iterator[PyTree], count: int) -> None:
        """Adds at most `count` single examples, each before the next one is read."""
        # This loop runs for every example, and locals are faster than attributes.
        flatten, ndarray = _flattener(self._spec), np.ndarray
        columns = [
            (out, spec.dtype, spec.shape, scalars, spec)
            for out, spec, scalars in zip(
                self._out, self._spec.leaves, self._scalars, strict=True
            )
        ]
        slots = self._slots()[self.filled : self.filled + count]
        for slot, example in zip(slots, elements, strict=False):
            try:
                leaves = flatten(example)
            except (ValueError, KeyError):
                raise self._spec.structure_error(example) from None
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
            if self._has_digest:
                self._digest(out[slot : slot + 1] for out in self._out)
        if self._cut.keep is not None:
            self._kept = int(np.searchsorted(self._cut.keep, self.filled))
            self._is_last_kept = bool(
                self.filled and self._slots()[self.filled - 1] < self._spare
            )

    def _slots(self) -> Any:
        """Returns the row of the arrays to which each row of the batch is written."""
        if self._cut.keep is None:
            return range(self._cut.size)
        slots = np.full(self._cut.size, self._spare)
        slots[self._cut.keep] = np.arange(self._spare)
        return slots.tolist()

    def add_rows(self, block: list[np.ndarray], start: int, count: int) -> None:
        """Adds the rows of a source batch that this process keeps."""
        chosen, number = self._chosen(start, count)
        for spec, out, leaf in zip(self._spec.leaves, self._out, block, strict=True):
            if number:
                spec.copy(leaf[chosen], out[self._kept : self._kept + number])
            if self._cut.keep is not None:
                last = start + count
                spec.copy(leaf[last - 1 : last], out[self._spare :])
        if self._has_digest:
            self._digest(leaf[start : start + count] for leaf in block)
        self.filled += count
        self._kept += number
        self._is_last_kept = self._cut.keep is None

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

    def finished(self) -> list[np.ndarray]:
        """Returns the leaves; rows that were not filled repeat the last one."""
        kept = self.filled if self._cut.keep is None else self._kept
        leaves = []
        for spec, out in zip(self._spec.leaves, self._out, strict=True):
            if kept < self._cut.num_kept:
                last = out[kept - 1] if self._is_last_kept else out[self._spare]
                out[kept : self._cut.num_kept] = last
            leaves.append(spec.converted(out[: self._cut.num_kept]))
        return leaves

    def digests(self) -> dict[str, str] | None:
        """Returns a digest of the rows of each leaf, by its name."""
        if not self._has_digest:
            return None
        named = zip(self._spec.leaves, self._hashes, strict=True)
        return {spec.path: digest.hexdigest() for spec, digest in named}

    def _digest(self, leaves: Iterator[np.ndarray]) -> None:
        for digest, leaf in zip(self._hashes, leaves, strict=True):
            digest.update(row_bytes(leaf))


def _flattener(spec: ExampleSpec) -> Callable[[PyTree], Sequence[Any]]:
    """Returns a function from an example to its leaves, quick for a dict of leaves.

    What is not a leaf in such a dict is refused where it is written.
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
    """Returns a leaf of one example that is not an array like the first one's.

    Args:
        spec: What the first example's leaf is.
        leaf: The leaf.
        scalars: Where its type is added if all values of it will do.

    Raises:
        DataError: If it is of another shape or dtype than the first example's.
    """
    array = leaf_array(spec.path, leaf)
    spec.check(array.shape, array)
    is_text = isinstance(leaf, (str, bytes))
    if is_text or isinstance(leaf, (bool, int, float, complex, np.generic)):
        scalars.add(type(leaf))
    return leaf if is_text else array


def first_row(spec: ExampleSpec, rows: PyTree) -> list[np.ndarray]:
    """Returns the leaves of the first row alone."""
    batch = _Batch(spec, Cut(1, None), batched=True)
    batch.add_rows(spec.checked(rows), 0, 1)
    return batch.finished()


class PlacedReader:
    """Passes on batches that are on the devices already, unchanged.

    Args:
        source: The source, whose elements are such batches.
        opened: The first pass, if nobody has taken it yet; emptied here.
        clock: Where the time goes.
    """

    def __init__(
        self, source: StreamSource, opened: list[OpenedStream], clock: Clock
    ) -> None:
        self._pass, self._clock = _Pass(source, opened), clock

    def seek(self, position: Position) -> None:
        """Goes to a place; by reading and dropping where the source knows none."""
        state = position.source if position.batch else None
        self._pass.go_to(position.epoch, state)
        if position.batch and state is None:
            for _ in itertools.islice(self._pass.elements(), position.batch):
                pass

    def read(self, position: Position, *, digest: bool = False) -> HostBatch | None:
        """Returns the next batch, or None at the epoch's end."""
        del digest  # global arrays are the same on all processes
        if self._pass.epoch != position.epoch:
            self._pass.go_to(position.epoch)
        with self._clock.stage("read"):
            batch = next(self._pass.elements(), None)
        if batch is None:
            return None
        if not is_placed(batch):
            msg = (
                "the source gave a batch on the host after others on devices. Give all "
                "of them in one place."
            )
            raise DataError(msg)
        count = len(jax.tree.leaves(batch)[0])
        self._clock.add("read", count, 0.0)
        after = position._replace(
            batch=position.batch + 1,
            row=position.row + count,
            source=self._pass.place(),
        )
        return HostBatch([batch], count, after)

    def close(self) -> None:
        """Closes the pass that is open."""
        self._pass.close()


def no_rows(epoch: int) -> str:
    """Returns the sentence about an epoch without examples; the first one is 0."""
    if not epoch:
        return "the source is empty: it gave no examples."
    return (
        f"the source gave no examples in epoch {epoch + 1}, after those before it: it "
        "can be read once. A function that makes the generator has to make a new one "
        "at every call."
    )


def rows_text(count: int) -> str:
    """Returns a number of rows in words."""
    return f"{count} row" if count == 1 else f"{count} rows"
