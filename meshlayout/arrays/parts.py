"""Whole arrays and the parts of devices: `pack`, `unpack`, `to_numpy`."""

import functools
import itertools
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, SingleDeviceSharding

from meshlayout import _checks, _jax, _render
from meshlayout._annotations import Leaf
from meshlayout.arrays.placement import (
    LayoutLike,
    as_array,
    broadcast,
    can_compare,
    for_each,
    is_concrete,
    plain_array,
    with_lists_as_arrays,
)
from meshlayout.cluster.agreement import all_gather, barrier, difference, digest
from meshlayout.errors import LayoutError
from meshlayout.layout import Layout, as_layout


@_checks.user_call
def pack(parts: Iterable[Any], layout: LayoutLike, *, verify: bool = False) -> Any:
    """Makes global arrays from the parts that the devices hold; inverse of `unpack`.

    Each part goes directly to its device. Parts that do not fit, and host replicas that
    differ, raise a LayoutError. To split a whole array, use `relayout`.

    Args:
        parts: One part per device of this process, in mesh order: anything array-like,
            such as a list of numbers, or pytrees of those, of the same structure.
        layout: The layout of the global array, or a tree of layouts.
        verify: Whether to compare replicas on devices, too, bit by bit.

    Examples:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> x = ml.pack([[0, 1]] * 4 + [[2, 3]] * 4, mesh.layout("batch"), verify=True)
        >>> x.shape, ml.to_numpy(x).tolist()
        ((4,), [0, 1, 2, 3])
    """
    specs = layout.specs if isinstance(layout, Layout) else (...,)
    is_whole = ... not in specs and getattr(parts, "ndim", 0) == len(specs)
    is_list = not (is_whole or isinstance(parts, dict))
    parts = [with_lists_as_arrays(x) for x in parts] if is_list else []
    if not parts:
        msg = "pack: parts must be a list, with one part per device."
        raise LayoutError(f"{msg} To split a whole array, write relayout(x, layout).")
    leaves, structures = zip(*map(jax.tree.flatten, parts), strict=True)
    for index, structure in enumerate(structures):
        if structure != structures[0]:
            raise LayoutError(f"part {index} is {structure}, part 0 {structures[0]}.")
    columns = list(zip(*leaves, strict=True))
    pack_leaf = functools.partial(_pack_leaf, verify=verify)
    numbers = structures[0].unflatten(range(len(columns)))  # for their names
    packed = for_each(pack_leaf, numbers, columns, broadcast(layout, parts[0]))
    return structures[0].unflatten(packed)


def _pack_leaf(
    _: int, column: Sequence[Any], layout: object, *, verify: bool
) -> jax.Array:
    if any(isinstance(part, Tracer) for part in column):
        raise LayoutError("pack joins arrays on devices: inside jit, use relayout.")
    parts = [as_array(part) for part in column]
    layout = as_layout(layout, parts[0].ndim)
    mesh, devices = layout.mesh, layout.mesh.local_devices
    if len(parts) != len(devices):
        msg = f"got {len(parts)} parts for the {len(devices)} devices of "
        msg += f"{mesh!r} on this process. Give one part per device, in mesh order, "
        raise LayoutError(f"{msg}including devices that hold replicas.")
    indices = dict(zip(mesh.devices.flat, layout.offset_to_shard(), strict=True))
    of_process = f" of process {jax.process_index()}" * (jax.process_count() > 1)
    facts: list[tuple[str, str, str]] = []
    shards: list[jax.Array] = []
    for number, (part, device) in enumerate(zip(parts, devices, strict=True)):
        name = f"part {number}{of_process}"
        # On the devices: float64 and float32 parts fit together without x64.
        dtype = _jax.canonical_dtype(part.dtype)
        is_on_host = isinstance(part, np.ndarray)
        kind = _render.array_text(dtype, part.shape)
        facts.append((name, "the parts of an array", kind))
        # Copied: a CPU device would use the user's memory, which a step may donate.
        part = np.array(part, dtype) if is_on_host else part
        if verify or (is_on_host and len({*indices.values()}) < len(indices)):
            # By bits: NaN equals itself here, and -0.0 differs from 0.0.
            bits = f"the digest {digest(_host_value(part).tobytes())}"
            facts.append((name, f"replicas of shard {indices[device]}", bits))
        place = SingleDeviceSharding(device, memory_kind=layout.memory_kind)
        shards.append(jax.device_put(part, place))
    _check_facts(facts, layout)
    shape = layout.global_shape(parts[0].shape)
    return jax.make_array_from_single_device_arrays(shape, layout.sharding, shards)


def _check_facts(facts: list[tuple[str, str, str]], layout: Layout) -> None:
    """Raises LayoutError if parts of all processes that must be alike are not."""
    text = json.dumps(facts)
    texts = all_gather(text) if can_compare(layout.mesh.devices.flat) else [text]
    first: dict[str, tuple[str, str]] = {}
    for name, what, fact in itertools.chain(*map(json.loads, texts)):
        other, expected = first.setdefault(what, (name, fact))
        if fact != expected:
            msg = f"{what} must be alike: {other} has {expected}, and {name} has {fact}"
            hint = "To split a whole array, write relayout(x, layout)."
            raise LayoutError(f"{msg} ({layout!r}). {hint}")


@_checks.user_call
def unpack(x: Leaf) -> list[Any]:
    """Splits arrays into the parts that their devices hold, without copying.

    Returns one array, or pytree of them, per device of this process, in mesh order.
    Arrays on different devices, abstract, or inside jit raise a LayoutError.

    Examples:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> x = ml.arrays.zeros((4, 8), mesh.layout(None, "model"))
        >>> {part.shape for part in ml.unpack(x)}
        {(4, 2)}
    """
    columns = for_each(_unpack_leaf, x)
    if not columns or any([*column] != [*columns[0]] for column in columns):
        raise LayoutError("unpack: x must be arrays on the same devices, in order.")
    unflatten = jax.tree.structure(x).unflatten
    return [unflatten(column[device] for column in columns) for device in columns[0]]


def _unpack_leaf(x: Leaf) -> dict[_jax.Device, jax.Array]:
    """Returns the parts by device, in mesh order."""
    if not is_concrete(x):
        raise LayoutError("unpack needs an array on a mesh, and outside of jit.")
    parts = {s.device: s.data for s in _jax.with_shards(x).addressable_shards}
    if not isinstance(x.sharding, NamedSharding):
        return parts
    # In mesh order, in which `pack` takes them; JAX's order may be another one.
    return {device: parts[device] for device in Layout.of(x).mesh.local_devices}


@_checks.user_call
def to_numpy(x: Leaf) -> Any:
    """Returns full values on the host, gathered from all devices and processes.

    Use this for results and tests, not for large states, which may not fit into host
    memory. All processes must call it. PRNG keys become their words.

    Examples:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 8})
        >>> ml.to_numpy({"x": ml.arrays.arange(8, layout=mesh.layout("batch"))})
        {'x': array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)}
    """
    leaves = [leaf for leaf in jax.tree.leaves(x) if is_concrete(leaf)]
    apart = [leaf for leaf in leaves if not leaf.is_fully_addressable]
    apart = [leaf.sharding for leaf in apart if not leaf.is_fully_replicated]
    if any(can_compare(sharding.device_set) for sharding in apart):
        barrier("ml.to_numpy, which all processes must call")
    return jax.tree.structure(x).unflatten(for_each(_host_value, x))


def _host_value(x: Leaf) -> Any:
    """Returns the full value of an array or number; for PRNG keys, their words."""
    x = _jax.concrete_value(x)  # eager grad and the like still have values
    if isinstance(x, (Tracer, jax.ShapeDtypeStruct)):
        raise LayoutError("an abstract array has no value; return it from jit.")
    if not isinstance(x, jax.Array):
        is_array = hasattr(x, "__array__") or isinstance(x, (bool, int, float, complex))
        return plain_array(x) if is_array else x
    if not x.is_fully_addressable and not _jax.with_shards(x).addressable_shards:
        msg = f"process {jax.process_index()} has no part of the array, which is on "
        raise LayoutError(f"{msg}devices of other processes.")
    return _jax.to_host(_jax.key_words(x))


# Several processes.


def replica_sums(arrays: Iterable[jax.Array | np.ndarray[Any, Any]]) -> dict[str, int]:
    """Returns sums of the bits of parts that several processes hold, by part.

    A program per device sums one copy of each shard; only sums reach the host.
    """
    sums, shards = defaultdict[str, int](int), defaultdict[Any, list[Any]](list)
    for number, array in enumerate(arrays if jax.process_count() > 1 else ()):
        if not isinstance(array, jax.Array):
            sums["numbers"] += zlib.crc32(array.tobytes(), number)
            continue
        sharding, shape = array.sharding, array.sharding.shard_shape(array.shape)
        is_single = math.prod(shape) * sharding.num_devices == array.size
        if is_single or array.is_fully_addressable:  # no other process has it
            continue
        for shard in {str(x.index): x for x in array.addressable_shards}.values():
            starts = [part.start or 0 for part in shard.index]
            part = [x // max(1, size) for x, size in zip(starts, shape, strict=True)]
            pair = shard.data, np.uint32(2 * number + 1)
            shards[f"{sharding} {part}", shard.device].append(pair)
    for (part, _), pairs in shards.items():
        sums[part] += int(_sum_of_bits(*zip(*pairs, strict=True)))
    return dict(sums)


def replica_difference(sums: Mapping[int, Mapping[str, int]]) -> str:
    """Describes which processes have different sums; empty if none."""
    name = "the sum of the arrays and numbers that processes share"
    for part in sorted({part for parts in sums.values() for part in parts}):
        texts = {p: {name: f"{x[part]:x}"} for p, x in sums.items() if part in x}
        if text := difference(texts):
            return text
    return ""


@jax.jit
def _sum_of_bits(arrays: Sequence[jax.Array], factors: Sequence[Any]) -> jax.Array:
    total = jnp.uint32(0)
    for array, factor in zip(arrays, factors, strict=True):
        x = array.astype("uint8") if array.dtype == bool else array
        info = jnp.iinfo if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo
        bits = min(32, int(info(x.dtype).bits))
        words = x.ravel().view(f"uint{bits}").astype(jnp.uint32)
        # Odd factors and a shift: a change of any one word changes the sum.
        words += jax.lax.iota(jnp.uint32, words.size)
        words *= jnp.uint32(2654435761)
        total += factor * jnp.sum(words ^ (words >> 15))
    return total
