"""One leaf on its way from a file to its place in a state: slices, dtype, devices.

This is the only place that casts, cuts and places what a restore reads, whatever format
it comes from. It works on NumPy slices: what no device of this process needs is never
read, and 64-bit values and PRNG keys need no special way through JAX.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from meshlayout import _jax
from meshlayout.checkpoint.difference import Leaf, is_number
from meshlayout.checkpoint.matching import Pair, key_words
from meshlayout.checkpoint.target import TargetLeaf
from meshlayout.errors import CheckpointError, LayoutError
from meshlayout.layout import Layout


Index: TypeAlias = tuple[slice, ...]
"""One slice per dim, each with a start and a stop."""

Bounds: TypeAlias = tuple[tuple[int, int], ...]
"""The start and the stop of a slice in every dim: an index that can be compared."""

HostArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class LeafRestore:
    """A leaf of the target, and the saved array that it is restored from.

    Attributes:
        target: The leaf.
        pair: How it was matched.
        saved: The array as it is in the files.
        dims: The permutation that makes the target's dims of the saved ones.
    """

    target: TargetLeaf
    pair: Pair
    saved: Leaf
    dims: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape to read, in the target's dims; of PRNG keys, their words'."""
        leaf = self.target.leaf
        if leaf.is_key:
            return key_words(leaf.dtype, leaf.shape)["shape"]
        return leaf.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, in the target's dtype."""
        dtype = np.dtype("uint32") if self.target.leaf.is_key else self.pair.dtype
        return math.prod(self.shape) * np.dtype(dtype).itemsize

    @property
    def sharding(self) -> Sharding | None:
        """Where it is placed; None for the host and for the default device."""
        sharding = self.target.sharding
        if self.target.on_host:
            return None
        if isinstance(sharding, NamedSharding) and self.target.leaf.is_key:
            # The words of a key stay together.
            rank = len(self.target.leaf.shape)
            spec = [*sharding.spec, *[None] * (rank + 1 - len(sharding.spec))]
            kind = sharding.memory_kind
            return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=kind)
        return sharding

    def check(self) -> None:
        """Raises CheckpointError if JAX cannot hold the array as it is asked for."""
        if self.target.on_host:
            return
        sharding = self.sharding
        if sharding is not None:
            _check_divides(sharding, self.shape, str(self.pair.saved))
        dtype = self._dtype
        if _jax.canonical_dtype(dtype) != dtype:
            narrow = _jax.canonical_dtype(dtype)
            msg = (
                f"{self.pair.saved}: JAX makes {narrow} of {dtype}. Ask for it with "
                f"dtype='{narrow}', or set jax_enable_x64."
            )
            raise CheckpointError(msg)

    def slices(self) -> list[tuple[Index, list[Any]]]:
        """Returns what this process reads, and the devices that each slice goes to."""
        sharding = self.sharding
        if sharding is None:
            return [(tuple(slice(0, size) for size in self.shape), [])]
        devices: dict[Bounds, list[Any]] = {}
        indices = sharding.addressable_devices_indices_map(self.shape)
        for device, index in indices.items():
            devices.setdefault(bounds_of(index, self.shape), []).append(device)
        return [
            (tuple(slice(*bound) for bound in bounds), group)
            for bounds, group in devices.items()
        ]

    def saved_index(self, index: Index) -> Index:
        """Returns the slice in the file of a slice of the target."""
        if self.dims is None:
            return index
        order = [self.dims.index(dim) for dim in range(len(self.dims))]
        return tuple(index[dim] for dim in order)

    def place(self, parts: Iterator[HostArray]) -> Any:
        """Returns the leaf's new value.

        Args:
            parts: What was read, in the order of `slices`.

        Raises:
            CheckpointError: If the dtype that is asked for cannot hold a value.
        """
        sharding = self.sharding
        if sharding is None:
            part = self._converted(next(parts))
            if self.target.on_host:
                return self._on_host(part)
            return self._finished(jax.device_put(part))
        arrays: list[jax.Array] = []
        kind = sharding.memory_kind
        for _, devices in self.slices():
            part = self._converted(next(parts))
            # A CPU device may use a NumPy array's memory as its own: one for each.
            copies = [part, *(part.copy() for _ in devices[1:])]
            places = [SingleDeviceSharding(d, memory_kind=kind) for d in devices]
            # Waiting here bounds what the host holds while devices are being filled.
            arrays.extend(jax.block_until_ready(jax.device_put(copies, places)))
        dtype = np.dtype("uint32") if self.target.leaf.is_key else self._dtype
        return self._finished(
            jax.make_array_from_single_device_arrays(
                self.shape, sharding, arrays, dtype=dtype
            )
        )

    @property
    def _dtype(self) -> Any:
        # A Python number that becomes an array is as wide as JAX's arrays are.
        if is_number(self.pair.saved.dtype) and not is_number(self.pair.dtype):
            return _jax.canonical_dtype(self.pair.dtype)
        return self.pair.dtype

    def _converted(self, part: HostArray) -> HostArray:
        part = part if self.dims is None else part.transpose(self.dims).copy()
        if self.target.leaf.is_key or is_number(self.target.leaf.dtype):
            return part
        return cast(part, self._dtype, str(self.pair.saved))

    def _on_host(self, part: HostArray) -> Any:
        if is_number(self.target.leaf.dtype):
            return self.target.leaf.dtype(part.item())
        return part[()] if isinstance(self.target.value, np.generic) else part

    def _finished(self, value: jax.Array) -> jax.Array:
        """Returns an array as the target has it: a key again, or weakly typed."""
        target = self.target
        if target.leaf.is_key:
            impl = _jax.key_impl(target.leaf.dtype)
            keys = jax.random.wrap_key_data(value, impl=impl)
            sharding = target.sharding
            is_there = sharding is None or keys.sharding == sharding
            return keys if is_there else jax.device_put(keys, sharding)
        is_weak = bool(getattr(target.value, "weak_type", False))
        return _jax.with_weak_type(value, is_weak) if is_weak else value


def bounds_of(index: Index | None, shape: tuple[int, ...]) -> Bounds:
    """Returns the start and the stop of an index in every dim.

    Args:
        index: Slices, as JAX gives them; None for all of an array without dims.
        shape: The shape of the whole array.
    """
    pairs = zip(index or (), shape, strict=True)
    return tuple(part.indices(size)[:2] for part, size in pairs)


def cast(values: HostArray, dtype: Any, where: str) -> HostArray:
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
        result = values.astype(dtype)
        if jax.numpy.issubdtype(values.dtype, np.integer):
            lost = result.astype(values.dtype) != values
            # Between signed and unsigned, the bits alone come back.
            lost |= (result < 0) != (values < 0)
        else:
            lost = np.isfinite(values) & ~np.isfinite(result)
    if lost.any():
        msg = (
            f"{where}: it holds {values[lost].flat[0]}, which {dtype} cannot hold. Ask "
            "for another dtype, or leave this array out of dtype={pattern: dtype}."
        )
        raise CheckpointError(msg)
    return result


def _check_divides(sharding: Sharding, shape: tuple[int, ...], where: str) -> None:
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        why = str(error)
        if isinstance(sharding, NamedSharding):
            # The layout says the same with the mesh's names, and sizes that fit.
            try:
                Layout.of(sharding, len(shape)).shard_shape(shape)
            except LayoutError as layout_error:
                why = str(layout_error)
        msg = f"{where} does not fit its layout: {why}"
        raise CheckpointError(msg) from None
