"""Replicas: whether shards that several processes hold have the same bits on all."""

import functools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from meshlayout.cluster.agreement import difference


# A sum of bits for each group of processes that hold the same shards.
Sums: TypeAlias = dict[tuple[int, ...], int]


def replica_sums(arrays: Iterable[jax.Array | np.ndarray[Any, Any]]) -> Sums:
    """Returns sums that differ between processes if their copies of arrays do.

    Each process takes one copy of each of its shards that others hold, too; a program
    per device sums their bits, and nothing but the sums comes to the host.
    """
    everybody = tuple(range(jax.process_count()))
    sums, shards = dict[Any, int](), dict[Any, list[Any]]()
    for index, array in enumerate(arrays if len(everybody) > 1 else ()):
        if not isinstance(array, jax.Array):
            content = zlib.crc32(array.tobytes(), index)
            sums[everybody] = sums.get(everybody, 0) + content
        else:
            holders, seen = _holders_of(array), set[int]()
            for shard in array.addressable_shards if holders else ():
                number, processes = holders[shard.device]
                if len(processes) > 1 and number not in seen:
                    seen.add(number)
                    factor = np.uint32(2 * (1_000_003 * index + number) % 2**32 + 1)
                    parts = shards.setdefault((processes, shard.device), [])
                    parts.append((shard.data, factor))
    for (processes, _), parts in shards.items():
        total = int(_sum_of_bits(*zip(*parts, strict=True)))
        sums[processes] = sums.get(processes, 0) + total
    return sums


def replica_difference(sums: Mapping[int, Sums]) -> str:
    """Describes between which processes the sums differ; empty if nowhere."""
    groups = sorted({group for of_process in sums.values() for group in of_process})
    name = "the sum of the arrays and numbers that processes share"
    texts = (
        difference({p: {name: f"{sums[p].get(group, 0):x}"} for p in group})
        for group in groups
    )
    return next(filter(None, texts), "")


def _holders_of(array: jax.Array) -> dict[Any, tuple[int, tuple[int, ...]]]:
    """Returns, by device, the number of its shard and the processes that hold that."""
    if isinstance(array.sharding, NamedSharding):
        spec = [axes or () for axes in array.sharding.spec]
        axes = [(x,) if isinstance(x, str) else tuple(x) for x in spec]
        return _holders(array.sharding.mesh, sum(axes, ()))
    devices: dict[str, list[Any]] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        devices.setdefault(repr(index), []).append(device)
    groups = [tuple(sorted({x.process_index for x in row})) for row in devices.values()]
    pairs = enumerate(zip(devices.values(), groups, strict=True))
    return {x: (number, group) for number, (row, group) in pairs for x in row}


@functools.lru_cache(maxsize=64)
def _holders(
    mesh: Mesh, axes: tuple[str, ...]
) -> dict[Any, tuple[int, tuple[int, ...]]]:
    """Returns the same of a mesh, fast; empty if no shard is on several processes."""
    dims = [mesh.axis_names.index(axis) for axis in axes]
    devices = np.moveaxis(mesh.devices, dims, range(len(dims)))
    rows = devices.reshape(int(np.prod(devices.shape[: len(dims)])), -1)
    groups = [tuple(sorted({x.process_index for x in row})) for row in rows]
    if all(len(group) == 1 for group in groups):
        return {}
    pairs = enumerate(zip(rows, groups, strict=True))
    return {x: (number, group) for number, (row, group) in pairs for x in row}


@jax.jit
def _sum_of_bits(arrays: Sequence[jax.Array], factors: Sequence[Any]) -> jax.Array:
    total = jnp.uint32(0)
    for array, factor in zip(arrays, factors, strict=True):
        is_complex = jnp.iscomplexobj(array)
        for x in (array.real, array.imag) if is_complex else (array,):
            if x.dtype != bool:
                info = jnp.iinfo if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo
                bits = min(32, int(info(x.dtype).bits))
                x = jax.lax.bitcast_convert_type(x, f"uint{bits}")
            words = x.astype(jnp.uint32).ravel()
            # Odd factors and a shift: a change of any one word changes the sum.
            words += jax.lax.iota(jnp.uint32, words.size)
            words *= jnp.uint32(2654435761)
            total += factor * jnp.sum(words ^ (words >> 15))
    return total
