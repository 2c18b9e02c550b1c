"""Fingerprints of arrays that do not depend on their layout.

Each element is multiplied by an odd number, in its own width, so that a changed bit
changes those above it. The rows of the array are then read as 64-bit words, the last
one of each row padded with zeros. Each word is multiplied by odd numbers for its
indices in the whole array, and the products are summed modulo 2**64, twice: the words
with the bytes of each element reversed, and, with other numbers, the words with all
their bytes reversed. A sum does not depend on the order of its terms, and a word is the
sum of its elements, so that slices may cut through a word: every layout has the same
fingerprint.

Each of these operations is one to one: a change of one element always changes both
sums. A change of several goes unseen if the products of the differences cancel. In the
sum, a bit counts the more the lower it is; reversing the bytes moves the bits that few
others follow to the bottom, and makes differences depend on the values. Flips of the
same bit in two elements cancel in both sums for one in 2**64 pairs at worst if elements
have 16 bits or more, and for one in 2**56 pairs of the top bits of bytes.

The sums are computed on the host, from the copies that saving and restoring make
anyway. They are computed block by block, since memory is slower than multiplication.
Devices would need a program for every shape, compiled in each process.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np


# The factor of the elements (2**64 divided by the golden ratio), and the seeds of the
# weights of both sums (digits of pi): fixed numbers that nobody chose to fit.
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)

# Words that NumPy processes at a time: with their weights they fit into a core's cache.
_BLOCK = 1 << 15

# Rows of fewer words are not worth a matrix product of their own.
_SHORT = 64

Sums = tuple[int, int]


def host_fingerprint(x: np.ndarray[Any, Any]) -> str:
    """Returns the fingerprint of a whole array.

    Args:
        x: An array of numbers.

    Example:
        >>> host_fingerprint(np.arange(6, dtype=np.float32))
        '993b04744a37179ab1f5bc71d5177edd'
    """
    return text_of(slice_sums(x, (0,) * x.ndim, x.shape))


def slice_sums(
    x: np.ndarray[Any, Any], starts: Sequence[int], shape: Sequence[int]
) -> Sums:
    """Returns a slice's contribution to the two sums of its array's fingerprint.

    `total` adds up the sums of slices. For slices that cover an array, each element
    once, they are the sums of the array, which `text_of` turns into its fingerprint.

    Args:
        x: The slice.
        starts: The index of its first element in the whole array, one entry per dim.
        shape: The shape of the whole array.

    Example:
        >>> x = np.arange(6, dtype=np.float32).reshape(2, 3)
        >>> left = slice_sums(x[:, :1], (0, 0), x.shape)
        >>> right = slice_sums(x[:, 1:], (0, 1), x.shape)
        >>> text_of(total([left, right])) == host_fingerprint(x)
        True
    """
    if not x.size:
        return 0, 0
    # Dims of size 1 are left out: if the last one is, each element would fill a word.
    dims = [dim for dim, size in enumerate(shape) if size != 1]
    x = _plain(x).reshape([x.shape[dim] for dim in dims] or [1])
    starts = [starts[dim] for dim in dims] or [0]
    first, second = 0, 0
    element = np.dtype(f"u{min(x.itemsize, 8)}")
    for block in itertools.product(*_cuts(x, starts)):
        # The indices of the block's first word in the whole array.
        corner = [start + part.start for start, part in zip(starts, block, strict=True)]
        corner[-1], offset = divmod(corner[-1] * x.itemsize, 8)
        mixed = _words(x[block], offset).view(element) * _MIX.astype(element)
        first += _weighted_sum(mixed.byteswap().view(np.uint64), corner, _SEEDS[0])
        second += _weighted_sum(mixed.view(np.uint64).byteswap(), corner, _SEEDS[1])
    return total([(first, second)])


def total(sums: Iterable[Sequence[int]]) -> Sums:
    """Returns the sums of several slices together."""
    pairs = list(sums)
    return sum(pair[0] for pair in pairs) % 2**64, sum(p[1] for p in pairs) % 2**64


def text_of(sums: Sequence[int]) -> str:
    """Returns the fingerprint of two sums."""
    return "".join(f"{part:016x}" for part in sums)


def _cuts(x: np.ndarray[Any, Any], starts: Sequence[int]) -> list[list[slice]]:
    """Returns where to cut each dim, so that blocks have up to `_BLOCK` words.

    Cuts are at multiples of a divisor of `_BLOCK` in the whole array, and in the last
    dim at multiples of that many words. So a block never straddles a multiple of
    `_BLOCK`, where the second factor of the weights changes.
    """
    cuts: list[list[slice]] = []
    step, num_words = _BLOCK * 8 // x.itemsize, 1
    # From the last dim on: whole rows first, as they are contiguous.
    for start, size in zip(reversed(starts), reversed(x.shape), strict=True):
        edges = [*range(start - start % step, start + size, step), start + size]
        cuts.append(
            [slice(max(a - start, 0), b - start) for a, b in itertools.pairwise(edges)]
        )
        length = min(step, size)
        if len(cuts) == 1:  # in words, one more for a start inside a word
            length = -(-length * x.itemsize // 8) + 1
        num_words *= length
        step = 1 << max(1, _BLOCK // num_words).bit_length() - 1
    return cuts[::-1]


def _plain(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns an array whose bytes hold the bits of its elements, and nothing else."""
    if x.itemsize > 1:
        return x
    if x.dtype == np.bool_:
        return x.view(np.uint8)
    # Types of 2 or 4 bits leave the rest of their byte undefined: mask it.
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)
    num_bits = (jnp.iinfo(x.dtype) if is_integer else jnp.finfo(x.dtype)).bits
    x = x.view(np.uint8)
    return x if num_bits == 8 else x & np.uint8(2**num_bits - 1)


def _words(x: np.ndarray[Any, Any], start: int) -> np.ndarray[Any, Any]:
    """Returns the 64-bit words of a block, padded with zeros at both ends of a row.

    Args:
        x: The block.
        start: The byte of the first word at which each row of the block starts.
    """
    x = np.ascontiguousarray(x)
    stop = start + x.shape[-1] * x.itemsize
    if start or stop % 8:
        x = x.view(f"u{x.itemsize}")
        num_words, per_word = -(-stop // 8), 8 // x.itemsize
        padded = np.zeros((*x.shape[:-1], num_words * per_word), x.dtype)
        padded[..., start // x.itemsize : stop // x.itemsize] = x
        x = padded
    return x.view(np.uint64)


def _weighted_sum(words: np.ndarray[Any, Any], corner: Sequence[int], seed: int) -> int:
    """Returns the sum of a block's words times their weights, modulo 2**64.

    Args:
        words: The words.
        corner: The indices of the first word in the whole array.
        seed: The seed of the weights.
    """
    factor, inner = 1, np.ones(1, np.uint64)
    for dim, size in reversed([*enumerate(words.shape)]):
        first = corner[dim]
        # A weight has two factors, one for the index within `_BLOCK` and one for the
        # multiple of it: a table for each index of a long dim would not fit a cache.
        weights = _weights(dim, seed)[first % _BLOCK : first % _BLOCK + size]
        factor *= _weight(dim, seed, _BLOCK + first // _BLOCK)
        # Short dims are joined first: NumPy's products of long vectors are fast.
        if len(inner) < _SHORT:
            inner = np.multiply.outer(weights, inner).reshape(-1)
        else:
            words, inner = np.dot(words.reshape(-1, len(inner)), inner), weights
    return int(np.dot(words.reshape(-1), inner)) * factor % 2**64


@functools.lru_cache(maxsize=1024)
def _weight(dim: int, seed: int, index: int) -> int:
    """Returns an odd number for an index of a dim."""
    return int(_odd(np.array([index], np.uint64), dim, seed)[0])


@functools.lru_cache(maxsize=16)
def _weights(dim: int, seed: int) -> np.ndarray[Any, Any]:
    """Returns odd numbers for the first indices of a dim."""
    return _odd(np.arange(_BLOCK, dtype=np.uint64), dim, seed)


def _odd(x: np.ndarray[Any, Any], dim: int, seed: int) -> np.ndarray[Any, Any]:
    """Returns numbers mixed as SplitMix64 does (Steele et al., 2014), and made odd."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x += np.uint64((seed + dim * 0xD1B54A32D192ED03) % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)
