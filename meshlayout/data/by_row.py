"""Batches of a source with random access: a function of the position alone.

The rows of a batch follow from seed, epoch and the number of the batch, so that any
number of processes agree without communicating, and resuming is arithmetic. The shuffle
is a Feistel network, which needs no table and never changes: NumPy's permutation may
differ between releases, and a run resumed after an upgrade would skip some rows and
repeat others.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshlayout.data.examples import Division
from meshlayout.data.position import Position


# Up to this many rows, the order of a whole epoch is computed at once, which is faster
# per batch: 8 MB.
_LARGEST_TABLE = 2**20

# Rounds of the Feistel network. Four make a good permutation of random functions (Luby
# and Rackoff, 1988); two more, since small datasets have halves of a few bits. Changing
# this would change the order of every resumed run.
_ROUNDS = 6


@dataclass(frozen=True)
class HostBatch:
    """This process's rows of a batch, of which `count` are real, in JAX's order."""

    leaves: list[np.ndarray]
    count: int
    after: Position
    parts: frozenset[Any] = frozenset()  # rows per replica on processes, if agreed


def order(
    num_rows: int, seed: int | None, epoch: int
) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the order of an epoch, from 0: a function of places that gives rows."""
    if seed is None:
        return lambda places: places
    # NumPy promises that seed sequences do not change, unlike its generators.
    keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)
    permuted = functools.partial(_permuted_rows, num_rows, keys)
    if num_rows > _LARGEST_TABLE:
        return permuted
    return permuted(np.arange(num_rows)).__getitem__


def _permuted_rows(num_rows: int, keys: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Returns the row at each place, by a permutation that needs no table.

    A Feistel network permutes the integers below a power of 4. A result that is not a
    row is permuted again until it is one: cycle walking (Black and Rogaway, 2002,
    "Ciphers with arbitrary finite domains"). At most three quarters of the integers are
    not rows, so few rounds are needed.
    """
    half = ((num_rows - 1).bit_length() + 1) // 2
    rows = _permuted(places.astype(np.uint64), keys, half)
    outside = np.flatnonzero(rows >= num_rows)
    while outside.size:
        rows[outside] = _permuted(rows[outside], keys, half)
        outside = outside[rows[outside] >= num_rows]
    return rows.astype(np.int64)


def _permuted(values: np.ndarray, keys: np.ndarray, half: int) -> np.ndarray:
    # Whatever the mixing function, a round can be undone, so this is a permutation.
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << shift) | right


def _mixed(values: np.ndarray) -> np.ndarray:
    """Returns 64-bit numbers with their bits mixed, by the finalizer of SplitMix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class RowReader:
    """Gathers this process's rows; an epoch of None batches runs into the next one."""

    def __init__(
        self, cut: Division, num_batches: int | None, seed: int | None
    ) -> None:
        self._cut, self._num_batches = cut, num_batches
        self._num_rows = num_rows = len(cut.source)
        # A batch may span two epochs, so two orders are kept.
        self._order = functools.lru_cache(2)(functools.partial(order, num_rows, seed))

    def close(self) -> None:
        """Does nothing: closing a source with random access is up to the user."""

    def read(self, position: Position) -> HostBatch | None:
        """Returns the next batch, or None at the end of the epoch."""
        size, num_rows, passed = self._cut.size, self._num_rows, 0
        batch, row, count = position.batch + 1, position.row + size, size
        if self._num_batches is None:  # epochs run into each other
            if position.row >= num_rows:
                return None
            # At the end of an epoch, the next one has not started.
            passed = (row - 1) // num_rows
            batch, row = 0 if passed else batch, row - passed * num_rows
        else:
            if position.batch >= self._num_batches:
                return None
            # 0 if this process has no rows left, and other processes do.
            row = min(row, num_rows)
            count = row - position.row
        places, copies = position.row + self._cut.rows(count), None
        if count < size:  # the last row, which padding repeats, is read once
            places, copies = np.unique(places, return_inverse=True)
        leaves = self._rows(position.epoch, places)
        if copies is not None:
            leaves = [leaf[copies] for leaf in leaves]
        self._cut.clock.rows += len(places)
        places = {"epoch": position.epoch + passed, "batch": batch, "row": row}
        return HostBatch(leaves, count, position._replace(**places))

    def _rows(self, epoch: int, places: np.ndarray) -> list[np.ndarray]:
        """Returns the rows at places of the order of an epoch and those after it."""
        specs = self._cut.spec.leaves
        if not len(places):  # no device of this process is in the mesh
            return [np.empty((0, *spec.shape), spec.to or object) for spec in specs]
        passed, parts = places // self._num_rows, []
        for number in range(int(passed[0]), int(passed[-1]) + 1):
            here = places[passed == number] % self._num_rows
            indices = self._order(epoch + number)(here)
            if len(indices):
                rows = self._cut.source.read_rows(indices, epoch + number)
                parts.append(self._cut.spec.checked(rows, len(indices)))
        columns = zip(specs, *parts, strict=True)
        return [
            spec.converted(leaves[0] if len(leaves) == 1 else np.concatenate(leaves))
            for spec, *leaves in columns
        ]
