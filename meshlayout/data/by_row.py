"""Batches of a source with random access: a function of the position alone.

The rows of a batch follow from seed, epoch and the number of the batch, so that any
number of processes agree without communicating, and resuming is arithmetic. The shuffle
is a Feistel network, which needs no table and never changes: NumPy's permutation may
differ between releases, and a run that resumed after an upgrade would lose some rows
and repeat others. Up to a million rows, the order of an epoch is computed once as a
table, which is faster per batch; it is the same order.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshlayout import _checks
from meshlayout.data.examples import ExampleSpec, empty
from meshlayout.data.position import Position
from meshlayout.data.protocols import RandomAccessSource
from meshlayout.data.report import Clock


# Up to this many rows, the order of a whole epoch is computed at once: 8 MB.
_LARGEST_TABLE = 2**20

# Rounds of the Feistel network. Four make a good permutation of random functions (Luby
# and Rackoff, 1988); two more, since small datasets have halves of a few bits. Changing
# this would change the order of every resumed run.
_ROUNDS = 6


@dataclass(frozen=True)
class HostBatch:
    """This process's rows of one batch, before they are placed.

    Attributes:
        leaves: In JAX's order, on the host; or a single batch that is on the mesh.
        count: The number of real rows among those that this process read for it.
        after: The position after the batch.
        is_padded_elsewhere: Whether other processes, with sources of their own, have
            padding in this batch.
    """

    leaves: list[Any]
    count: int
    after: Position
    is_padded_elsewhere: bool = False


class Order:
    """The order of one epoch: a function of seed, epoch and number of rows.

    Args:
        num_rows: Rows of the source.
        seed: The seed of the shuffle; None keeps the order of the source.
        epoch: The epoch, from 0.

    Example:
        >>> order = Order(5, seed=0, epoch=3)
        >>> sorted(order.at(np.arange(5)).tolist())
        [0, 1, 2, 3, 4]
        >>> Order(5, seed=None, epoch=3).at(np.array([1, 2]))
        array([1, 2])
    """

    def __init__(self, num_rows: int, seed: int | None, epoch: int) -> None:
        self._num_rows = num_rows
        self._table: np.ndarray | None = None
        self._keys: list[np.uint64] | None = None
        if seed is None:
            return
        # NumPy promises that seed sequences do not change, unlike its generators.
        entropy = np.random.SeedSequence([seed, epoch])
        self._keys = list(entropy.generate_state(_ROUNDS, np.uint64))
        if num_rows <= _LARGEST_TABLE:
            self._table = self._permuted_rows(np.arange(num_rows))

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Returns the row indices at some positions of the order, int64."""
        if self._table is not None:
            return self._table[positions]
        return positions if self._keys is None else self._permuted_rows(positions)

    def _permuted_rows(self, positions: np.ndarray) -> np.ndarray:
        """Returns the row at each position, by a permutation that needs no table.

        A Feistel network permutes the integers below a power of 4. A result that is
        not a row is permuted again until it is one: cycle walking (Black and Rogaway,
        2002, "Ciphers with arbitrary finite domains"). At most three quarters of the
        integers are not rows, so few rounds are needed.
        """
        half = ((self._num_rows - 1).bit_length() + 1) // 2
        rows = self._permuted(positions.astype(np.uint64), half)
        outside = np.flatnonzero(rows >= self._num_rows)
        while outside.size:
            rows[outside] = self._permuted(rows[outside], half)
            outside = outside[rows[outside] >= self._num_rows]
        return rows.astype(np.int64)

    def _permuted(self, values: np.ndarray, half: int) -> np.ndarray:
        # Whatever the mixing function, a round can be undone, so this is a permutation.
        shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
        left, right = values >> shift, values & mask
        for key in self._keys or ():
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return (left << shift) | right


def _mixed(values: np.ndarray) -> np.ndarray:
    """Returns 64-bit numbers with their bits mixed, by the finalizer of SplitMix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class RowReader:
    """Gathers this process's `own` rows of each batch of `size` rows.

    An epoch has `num_batches`, or runs into the next one (None).
    """

    def __init__(
        self,
        source: RandomAccessSource,
        spec: ExampleSpec,
        size: int,
        own: np.ndarray,
        num_batches: int | None,
        seed: int | None,
        clock: Clock,
    ) -> None:
        self._source, self._spec, self._clock = source, spec, clock
        self._size, self._own, self._num_batches = size, own, num_batches
        self._num_rows = num_rows = len(source)
        # A batch may span two epochs, so two orders are kept.
        self._order = functools.lru_cache(2)(functools.partial(Order, num_rows, seed))

    def close(self) -> None:
        """Does nothing: a source with random access is the user's to close."""

    def read(self, position: Position) -> HostBatch | None:
        """Returns the next batch, or None at the end of the epoch."""
        size, num_rows, start = self._size, self._num_rows, position.row
        if self._num_batches is None:  # epochs run into each other
            if start >= num_rows:
                return None
            epochs, places = np.divmod(start + self._own, num_rows)
            parts = [(int(i), places[epochs == i]) for i in np.unique(epochs)]
            passed, row = divmod(start + size, num_rows)
            if not row:
                # The end of this epoch, not the start of the next: an iteration that
                # ends here has not started another epoch.
                passed, row = passed - 1, num_rows
            batch, epoch = 0 if passed else position.batch + 1, position.epoch + passed
            after = position._replace(epoch=epoch, batch=batch, row=row)
            return HostBatch(self._rows(position, parts), size, after)
        if position.batch >= self._num_batches:
            return None
        start = position.batch * size
        # 0 if this process has no rows left, and other processes do.
        count = min(max(num_rows - start, 0), size)
        places = np.minimum(start + self._own, num_rows - 1)
        if count < size:
            places = np.unique(places)  # padding repeats the last row, read once
        leaves = self._rows(position, [(0, places)])
        leaves = [_filled_up(leaf, len(self._own)) for leaf in leaves]
        after = position._replace(batch=position.batch + 1, row=start + count)
        return HostBatch(leaves, count, after)

    def _rows(
        self, position: Position, parts: list[tuple[int, np.ndarray]]
    ) -> list[np.ndarray]:
        """Returns the rows at places of the orders of this and later epochs."""
        specs = self._spec.leaves
        if not len(self._own):  # no device of this process is in the mesh
            return [np.empty((0, *spec.shape), spec.to or object) for spec in specs]
        batch, epoch = position.batch + 1, position.epoch + 1
        count = sum(len(places) for _, places in parts)
        columns = []
        with (
            self._clock.timed("read_s", rows=count),
            _checks.noted(lambda: f"while batch {batch} of epoch {epoch} was read."),
        ):
            for passed, places in parts:
                number = position.epoch + passed
                leaves = self._read(self._order(number).at(places), number)
                pairs = zip(specs, leaves, strict=True)
                columns.append([spec.converted(leaf) for spec, leaf in pairs])
        if len(columns) == 1:
            return columns[0]
        return [np.concatenate(column) for column in zip(*columns, strict=True)]

    def _read(self, indices: np.ndarray, epoch: int) -> list[np.ndarray]:
        try:
            rows = self._source.read_rows(indices, epoch)
        except StopIteration as error:  # would pass for the end of the iteration
            msg = "the source raised StopIteration when it was asked for rows."
            raise RuntimeError(msg) from error
        return self._spec.checked(rows, len(indices))


def _filled_up(leaf: np.ndarray, num_rows: int) -> np.ndarray:
    """Returns a leaf with its last row repeated, in memory that devices can share."""
    if len(leaf) < num_rows:
        given, leaf = leaf, empty((num_rows, *leaf.shape[1:]), leaf.dtype)
        leaf[: len(given)], leaf[len(given) :] = given, given[-1:]
    return leaf
