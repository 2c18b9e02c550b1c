"""Shardings for arrays that nobody gave one: finest, and with the bits of the whole.

What is made on the way to a state has no layout of its own, must not be whole on any
device, and must have the bits that it has on one device.
"""

import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _jax
from meshlayout.layout import Layout
from meshlayout.mesh import Mesh


def finest_layout(mesh: Mesh, shape: Sequence[int]) -> Layout:
    """Returns a layout that cuts an array as finely as its shape allows.

    No layout on this mesh that fits the array holds less of it on a device by more
    than the axes that no dim can take.
    """
    entries: list[tuple[str, ...]] = [()] * len(shape)
    left = list(shape)
    for axis, size in sorted(mesh.shape.items(), key=lambda item: -item[1]):
        fitting = [dim for dim, extent in enumerate(left) if extent % size == 0]
        if fitting and size > 1:
            dim = max(fitting, key=lambda dim: left[dim])
            entries[dim] = (*entries[dim], axis)
            left[dim] //= size
    return Layout(entries, mesh)


# XLA's CPU compiler runs the last elements of a loop, too few to fill a vector, as
# scalar code that may round otherwise, and it divides by a broadcast array otherwise
# where nothing is broadcast. Shards that fill vectors, and are longer than 1 where the
# whole is, have the bits of the whole; small arrays that cannot be cut so are made
# whole, and cut then.
_VECTOR = 16
_SMALL_BYTES = 512 * 1024


def bit_exact_sharding(
    sharding: NamedSharding, shape: tuple[int, ...], dtype: Any, mesh: Mesh
) -> NamedSharding:
    """Returns a sharding in which every element gets the bits it has in the whole."""
    whole = NamedSharding(mesh.jax_mesh, PartitionSpec())
    if not math.prod(shape):
        return whole  # JAX does not cut what is empty, or fails
    if mesh.platform != "cpu" or preserves_bits(sharding, shape):
        return sharding
    if not is_large(shape, dtype):
        return whole
    others = [
        [*finest_layout(mesh, shape[:-1]).specs, None],
        [*[None] * (len(shape) - 1), *finest_layout(mesh, shape[-1:]).specs],
        finest_layout(mesh, shape).specs,
    ]
    cuts = [Layout(specs, mesh).sharding for specs in others]
    exact = [cut for cut in cuts if preserves_bits(cut, shape)]
    finest = min([*exact, whole], key=lambda cut: math.prod(cut.shard_shape(shape)))
    return sharding if finest.is_fully_replicated else finest


def is_large(shape: tuple[int, ...], dtype: Any) -> bool:
    """Returns whether an array is too large to be made whole on the way."""
    return math.prod(shape) * _jax.itemsize(dtype) > _SMALL_BYTES


def preserves_bits(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    """Returns whether shards have the bits of the whole."""
    if sharding.is_fully_replicated:
        return True
    shard = sharding.shard_shape(shape)
    if any(here == 1 < there for here, there in zip(shard, shape, strict=True)):
        return False
    if shard[-1] != shape[-1]:
        return shard[-1] % _VECTOR == 0
    return math.prod(shard) % _VECTOR == 0
