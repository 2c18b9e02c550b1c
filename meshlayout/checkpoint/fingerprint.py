"""Fingerprints of arrays that do not depend on their layout.

An array's bits are taken as 32-bit words. Each word is combined with a number for its
position, the product of odd numbers for its indices in the whole array, and mixed; the
results are summed modulo 2**32, twice with different numbers. Sums of integers do not
depend on their order, so every layout has the same fingerprint. Mixing (the finalizer
of MurmurHash3, Appleby 2011) is one to one, so that a change inside one word always
changes both sums; and it is not linear, so that changes of several words cancel each
other as rarely as two random 64-bit numbers are equal.

They are computed on the host, from the copies that saving and restoring make anyway.
Devices would need a program for every shape, compiled in each process, and on a CPU
three times the time.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np


_SEEDS = (0x243F6A88, 0x85A308D3)

# The key of the words of one element, as if they were a dim of the array.
_WORDS = 255

# Elements that NumPy processes at a time, so that they stay in a core's cache.
_CHUNK = 1 << 15

# Of MurmurHash3's finalizer.
_FACTORS = np.array([0x85EBCA6B, 0xC2B2AE35], np.uint32)


def host_fingerprint(x: np.ndarray[Any, Any]) -> str:
    """Returns the fingerprint of a whole array.

    Args:
        x: An array of numbers.

    Example:
        >>> host_fingerprint(np.arange(6, dtype=np.float32))
        '896b03fd0b3de71a'
    """
    return text_of(slice_sums(x, (0,) * x.ndim, x.shape))


def slice_sums(
    x: np.ndarray[Any, Any], starts: Sequence[int], shape: Sequence[int]
) -> tuple[int, int]:
    """Returns a slice's contribution to the two sums of its array's fingerprint.

    The sums of slices that cover an array, each element once, add up to those of the
    array, modulo 2**32; `text_of` turns them into the fingerprint.

    Args:
        x: The slice.
        starts: The index of its first element in the whole array, one entry per dim.
        shape: The shape of the whole array.

    Example:
        >>> x = np.arange(6, dtype=np.float32).reshape(2, 3)
        >>> top = slice_sums(x[:1], (0, 0), x.shape)
        >>> bottom = slice_sums(x[1:], (1, 0), x.shape)
        >>> total = [(a + b) % 2**32 for a, b in zip(top, bottom)]
        >>> text_of(total) == host_fingerprint(x)
        True
    """
    rows = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    num_words = 1 if not x.size else _host_words(rows[:1]).shape[-1]
    weights = []
    for seed in _SEEDS:
        outer, inner = np.ones(1, np.uint32), np.ones(1, np.uint32)
        for dim, start in enumerate(starts):
            of_dim = _weights(shape[dim], dim, seed)[start : start + x.shape[dim]]
            if dim < x.ndim - 1:
                outer = np.multiply.outer(outer, of_dim).reshape(-1)
            else:
                inner = of_dim
        words = np.multiply.outer(inner, _weights(num_words, _WORDS, seed))
        weights.append((outer, words))
    # Some elements at a time, whose words and scratch space stay in a core's cache.
    width = max(1, min(rows.shape[1], _CHUNK))
    height = _CHUNK // width
    sums = [0, 0]
    for top in range(0, len(rows), height):
        for left in range(0, rows.shape[1], width):
            chunk = slice(top, top + height), slice(left, left + width)
            words = _host_words(rows[chunk])
            for index, (outer, inner) in enumerate(weights):
                mixed = np.multiply.outer(outer[chunk[0]], inner[chunk[1]])
                sums[index] += _mixed_sum(mixed, words)
    return sums[0] % 2**32, sums[1] % 2**32


def _mixed_sum(mixed: np.ndarray[Any, Any], words: np.ndarray[Any, Any]) -> int:
    """Returns the sum of mixed words; overwrites `mixed`, which holds their weights."""
    mixed ^= words
    scratch = mixed >> 16
    mixed ^= scratch
    mixed *= _FACTORS[0]
    np.right_shift(mixed, 13, out=scratch)
    mixed ^= scratch
    mixed *= _FACTORS[1]
    np.right_shift(mixed, 16, out=scratch)
    mixed ^= scratch
    return int(mixed.sum(dtype=np.uint32))


def text_of(sums: Iterable[int]) -> str:
    """Returns the fingerprint of two sums, each modulo 2**32."""
    return "".join(f"{int(total) % 2**32:08x}" for total in sums)


def _host_words(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the bits of every element as words, along one more dim."""
    x = np.ascontiguousarray(x)
    if x.dtype.kind == "c":
        half = np.dtype(f"float{x.dtype.itemsize * 4}")
        return _host_words(x.view(half)).reshape(*x.shape, -1)
    if x.dtype == np.bool_:
        return x.astype(np.uint32)[..., None]
    bits = _num_bits(x.dtype)
    if bits == 64:
        return x.view(np.uint32).reshape(*x.shape, 2)
    if bits < 8:  # NumPy stores one per byte
        return (x.view(np.uint8) & (2**bits - 1)).astype(np.uint32)[..., None]
    return x.view(f"uint{bits}").astype(np.uint32, copy=False)[..., None]


def _mixed(x: Any) -> Any:
    """Returns words mixed."""
    x = (x ^ (x >> np.uint32(16))) * _FACTORS[0]
    x = (x ^ (x >> np.uint32(13))) * _FACTORS[1]
    return x ^ (x >> np.uint32(16))


def _num_bits(dtype: Any) -> int:
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    return int((jnp.iinfo(dtype) if is_integer else jnp.finfo(dtype)).bits)


@functools.lru_cache(maxsize=512)
def _weights(size: int, dim: int, seed: int) -> np.ndarray[Any, Any]:
    """Returns an odd number for every index of a dim."""
    x = np.arange(size, dtype=np.uint32) * np.uint32(0x9E3779B1)
    x += np.uint32((seed + dim * 0x7F4A7C15) % 2**32)
    return _mixed(x) | np.uint32(1)
