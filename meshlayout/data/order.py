"""The order in which an epoch visits the rows of a source."""

from typing import Any

import numpy as np


# Up to here the whole order of an epoch is made at once, which is faster per row.
_LARGEST_TABLE = 2**22

_ROUNDS = 6


class Order:
    """The order of one epoch: a function of seed, epoch and number of rows.

    Args:
        num_rows: Rows of the source.
        seed: What shuffles them; None leaves them as they are.
        epoch: Which epoch, from 0.

    Example:
        >>> order = Order(5, seed=0, epoch=3)
        >>> sorted(order.at(np.arange(5)).tolist())
        [0, 1, 2, 3, 4]
        >>> Order(5, seed=None, epoch=3).at(np.array([1, 2]))
        array([1, 2])
    """

    def __init__(self, num_rows: int, seed: int | None, epoch: int) -> None:
        self._num_rows = num_rows
        self._table: np.ndarray[Any, Any] | None = None
        self._keys: list[np.uint64] | None = None
        if seed is None:
            return
        entropy = np.random.SeedSequence([seed, epoch])
        if num_rows <= _LARGEST_TABLE:
            generator = np.random.Generator(np.random.Philox(entropy))
            self._table = generator.permutation(num_rows)
        else:
            self._keys = list(entropy.generate_state(_ROUNDS, np.uint64))

    def at(self, places: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns the numbers of the rows at some places of the order.

        Args:
            places: From 0 to the number of rows, exclusive, as int64.
        """
        if self._table is not None:
            return self._table[places]
        if self._keys is None:
            return places
        return _walked(places, self._num_rows, self._keys)


def _walked(
    places: np.ndarray[Any, Any], num_rows: int, keys: list[np.uint64]
) -> np.ndarray[Any, Any]:
    """Returns places under a permutation that needs no table.

    A Feistel network permutes the next power of 4; a place that lands outside of the
    rows is permuted again until it is inside (Black and Rogaway, 2002, "Ciphers with
    arbitrary finite domains", cycle walking).
    """
    half = ((num_rows - 1).bit_length() + 1) // 2
    found = _permuted(places.astype(np.uint64), half, keys)
    outside = np.flatnonzero(found >= num_rows)
    while outside.size:
        found[outside] = _permuted(found[outside], half, keys)
        outside = outside[found[outside] >= num_rows]
    return found.astype(np.int64)


def _permuted(
    values: np.ndarray[Any, Any], half: int, keys: list[np.uint64]
) -> np.ndarray[Any, Any]:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << shift) | right


def _mixed(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns 64-bit numbers with their bits mixed: the finalizer of SplitMix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
