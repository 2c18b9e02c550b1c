"""Arrays on devices, made of slices that are read one by one."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from meshlayout import _jax
from meshlayout.checkpoint.wanted import Slot
from meshlayout.errors import CheckpointError


def place(
    shape: tuple[int, ...],
    dtype: Any,
    sharding: jax.sharding.Sharding | None,
    read: Callable[[tuple[slice, ...]], np.ndarray[Any, Any]],
) -> jax.Array:
    """Makes an array of slices that are read one by one, each of them once.

    Args:
        shape: The global shape.
        dtype: The dtype of the slices.
        sharding: Where the array goes; None for JAX's default device.
        read: Returns the slice at an index.
    """
    if sharding is None:
        return jax.device_put(np.array(read((slice(None),) * len(shape))))
    devices: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        index = index or ()
        sizes = zip(index, shape, strict=True)
        bounds = tuple(one.indices(size)[:2] for one, size in sizes)
        devices.setdefault(bounds, []).append(device)
    kind = sharding.memory_kind
    parts: list[jax.Array] = []
    for bounds, some in devices.items():
        part = read(tuple(slice(*bound) for bound in bounds))
        # The devices of a CPU may use the memory of a NumPy array as their own.
        made = [
            jax.device_put(np.array(part), SingleDeviceSharding(one, memory_kind=kind))
            for one in some
        ]
        parts.extend(jax.block_until_ready(made))
    return jax.make_array_from_single_device_arrays(shape, sharding, parts, dtype=dtype)


def place_keys(
    slot: Slot,
    shape: tuple[int, ...],
    read: Callable[[tuple[slice, ...]], np.ndarray[Any, Any]],
) -> jax.Array:
    """Makes an array of PRNG keys of slices of their words.

    Args:
        slot: The keys that are wanted.
        shape: The global shape of the words.
        read: Returns the words at an index.
    """
    sharding = slot.sharding
    words_sharding = sharding
    if isinstance(sharding, NamedSharding):
        rank = len(slot.value.shape)
        spec = [*sharding.spec, *[None] * (rank - len(sharding.spec))]
        words_sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec, None))
    words = place(shape, np.dtype("uint32"), words_sharding, read)
    impl = _jax.key_impl(slot.value.dtype)
    keys = jax.random.wrap_key_data(words, impl=impl)
    is_there = sharding is None or keys.sharding == sharding
    return keys if is_there else jax.device_put(keys, sharding)


def cast(values: np.ndarray[Any, Any], dtype: Any, where: str) -> np.ndarray[Any, Any]:
    """Returns values in another dtype of the same kind.

    Args:
        values: The values.
        dtype: The dtype.
        where: The array, for messages.

    Raises:
        CheckpointError: If a value is beyond what the dtype can hold.
    """
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        made = values.astype(dtype)
        if np.issubdtype(values.dtype, np.integer):
            lost = made.astype(values.dtype) != values
            # Between signed and unsigned, the bits alone come back.
            lost |= (made < 0) != (values < 0)
        else:
            lost = np.isfinite(values) & ~np.isfinite(made)
    if lost.any():
        worst = values[lost].flat[0]
        msg = (
            f"{where}: it holds {worst}, which {dtype} cannot hold. Give another "
            "dtype=."
        )
        raise CheckpointError(msg)
    return made
