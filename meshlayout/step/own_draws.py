"""A replica's rows of the random numbers that are drawn for all replicas' examples.

Replicas that run a model on rows of their own would draw numbers of their own, and what
is dropped would depend on the mesh. Here each draws its rows of what one device draws
for all rows: its keys are of a generator that knows the number of the replica, as one
more word, and the shapes that draws have for the rows of all.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from meshlayout import _jax


# From the shape of a draw for a replica's rows to that for all rows.
Shapes: TypeAlias = frozenset[tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True)
class OwnDraws:
    """How replicas draw.

    Attributes:
        shapes: The draws that have a row per example; others are the same everywhere.
    """

    shapes: Shapes = frozenset()

    def keys(self, tree: Any, replica: Any) -> Any:
        """Returns a tree with its keys as those of a replica.

        Args:
            tree: Any tree of arrays.
            replica: The replica's number.
        """

        def one(leaf: Any) -> Any:
            if not _is_key(leaf):
                return leaf
            words = jax.random.key_data(leaf)
            number = jnp.broadcast_to(
                jnp.asarray(replica, words.dtype), (*words.shape[:-1], 1)
            )
            words = jnp.concatenate([words, number], axis=-1)
            impl = _replica_impl(_jax.random_impl(leaf.dtype), self.shapes)
            return jax.random.wrap_key_data(words, impl=impl)

        return jax.tree.map(one, tree)

    def common(self, tree: Any, like: Any) -> Any:
        """Returns a tree with keys as they were before, without the replica's number.

        Args:
            tree: A tree with keys of a replica.
            like: A tree of that structure, with the keys' own generators.
        """

        def one(leaf: Any, before: Any) -> Any:
            if not _is_key(leaf) or leaf.dtype == before.dtype:
                return leaf
            words = jax.random.key_data(leaf)[..., :-1]
            impl = _jax.random_impl(before.dtype)
            return jax.random.wrap_key_data(words, impl=impl)

        return jax.tree.map(one, tree, like)


def draws_like(
    whole: list[_jax.Draw], own: list[_jax.Draw], rows: int
) -> OwnDraws | None:
    """Returns how a replica draws its rows, or None if that cannot be told.

    Args:
        whole: The draws of a trace on all rows.
        own: Those of a trace on a replica's rows, with keys from `OwnDraws().keys`.
        rows: The rows of a replica.
    """
    if len(whole) != len(own):
        return None
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
    for all_, mine in zip(whole, own, strict=True):
        if not mine.is_plain or not _is_replica_impl(mine.impl):
            return None
        if not _is_cut(all_.shape, mine.shape, rows):
            return None
        if shapes.setdefault(mine.shape, all_.shape) != all_.shape:
            return None
    return OwnDraws(frozenset((a, b) for a, b in shapes.items() if a != b))


def _is_cut(whole: tuple[int, ...], own: tuple[int, ...], rows: int) -> bool:
    """Tells whether a shape is another's with the rows of a replica in one dim."""
    if len(whole) != len(own):
        return False
    differing = [b for a, b in zip(whole, own, strict=True) if a != b]
    return differing in ([], [rows])


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


# The generator.

_NAME = "replica_of_"


def _is_replica_impl(impl: Any) -> bool:
    return impl is not None and impl.name.startswith(_NAME)


@functools.lru_cache(maxsize=256)
def _replica_impl(base: Any, shapes: Shapes) -> Any:
    """Returns a generator whose keys are a base generator's and a replica's number."""
    of_all: Mapping[tuple[int, ...], tuple[int, ...]] = dict(shapes)

    def numbered(words: jax.Array, key: jax.Array) -> jax.Array:
        number = jnp.broadcast_to(key[-1:], (*words.shape[:-1], 1))
        return jnp.concatenate([words, number], axis=-1)

    def seed(number: jax.Array) -> jax.Array:
        words = base.seed(number)
        return jnp.concatenate([words, jnp.zeros_like(words[:1])])

    def split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        whole = of_all.get(tuple(shape), tuple(shape))
        return numbered(_rows(base.split(key[:-1], whole), shape, key[-1]), key)

    def fold_in(key: jax.Array, data: Any) -> jax.Array:
        return numbered(base.fold_in(key[:-1], data), key)

    def random_bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
        whole = of_all.get(tuple(shape))
        if whole is None:
            return base.random_bits(key[:-1], width, shape)
        if _jax.is_counted(base, whole):
            starts = [
                key[-1] * size if size != all_ else 0
                for size, all_ in zip(shape, whole, strict=True)
            ]
            return _jax.counted_bits(key[:-1], width, whole, starts, shape)
        return _rows(base.random_bits(key[:-1], width, whole), shape, key[-1])

    return _jax.define_random_impl(
        base, _NAME + base.name, seed, split, random_bits, fold_in
    )


def _rows(whole: jax.Array, shape: tuple[int, ...], replica: jax.Array) -> jax.Array:
    """Returns a replica's part of an array, whose first dims become `shape`."""
    for dim, size in enumerate(shape):
        if whole.shape[dim] != size:
            start = replica.astype("int32") * size
            whole = jax.lax.dynamic_slice_in_dim(whole, start, size, dim)
    return whole
