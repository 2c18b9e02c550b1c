"""The target of a restore: the state to build, and how each of its leaves is filled.

Only this module casts, slices and places the arrays of a restore, whatever their
format. It works on NumPy slices: parts that no device of this process needs are never
read, no array is ever whole on the host unless a device holds it whole, and 64-bit
values and PRNG keys need no special handling in JAX.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from meshlayout import _jax, _paths
from meshlayout._annotations import Leaf, PyTree
from meshlayout.arrays import copy_to_mesh
from meshlayout.checkpoint.difference import ArraySpec, is_number
from meshlayout.errors import CheckpointError, LayoutError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap
from meshlayout.state.create import StateDescription, eager_sharding_off


Index: TypeAlias = tuple[slice, ...]
"""One slice per dim, each with a start and a stop."""

Bounds: TypeAlias = tuple[tuple[int, int], ...]
"""The start and the stop of a slice in every dim: an index that can be hashed."""

HostArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]

Rebuild: TypeAlias = Callable[[Sequence[Any]], PyTree]
"""Builds a state from the new values of its arrays and numbers."""


def bounds_of(index: Index | None, shape: tuple[int, ...]) -> Bounds:
    """Returns the bounds of a slice whose index JAX returned, with None for ends."""
    pairs = zip(index or (), shape, strict=True)
    return tuple(part.indices(size)[:2] for part, size in pairs)


@dataclass(frozen=True)
class LeafRestore:
    """A leaf of the state to build, and the saved array that it is restored from.

    Attributes:
        spec: Its path, shape and dtype.
        value: The leaf in the state to restore, concrete or abstract.
        destination: The sharding of the result; None for JAX's default device.
        moves: Whether a layout map set it, so that `value` may be elsewhere.
        saved: The saved array, its dims in the order of the target; None to keep
            `value`.
        dtype: The dtype of the result on the host.
    """

    spec: ArraySpec
    value: Any = None
    destination: Sharding | None = None
    moves: bool = False
    saved: ArraySpec | None = None
    dtype: Any = None

    @property
    def on_host(self) -> bool:
        """Whether the result is a NumPy array or a Python number, not a `jax.Array`."""
        if is_number(self.spec.dtype):
            return True
        return isinstance(self.value, (np.ndarray, np.generic)) and not self.moves

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, in its new dtype."""
        return math.prod(self.spec.host_shape) * np.dtype(self.dtype).itemsize

    @property
    def sharding(self) -> Sharding | None:
        """The sharding of what is placed; None for the host and the default device."""
        sharding = self.destination
        if self.on_host:
            return None
        if isinstance(sharding, NamedSharding) and self.spec.is_key:
            # Keys are placed as their words, in one more dim, which is not sharded.
            rank = len(self.spec.shape)
            spec = [*sharding.spec, *[None] * (rank + 1 - len(sharding.spec))]
            kind = sharding.memory_kind
            return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=kind)
        return sharding

    def check(self, source: str) -> None:
        """Raises if there will be no value, or none that fits the layout and dtype.

        Args:
            source: The file or directory of the saved arrays, for messages.

        Raises:
            CheckpointError: Names the leaf.
        """
        if self.saved is None:
            if isinstance(self.value, jax.Array) and self.value.is_deleted():
                msg = (
                    f"{self.spec.path}: not restored from {source}, and the array in "
                    "like= is deleted: it was donated to a step or a relayout. Give "
                    "the state that the step returned."
                )
                raise CheckpointError(msg)
            return
        if self.on_host:
            return
        why = _why_not_divided(self.sharding, self.spec.host_shape)
        if why:
            msg = f"{self.saved} does not fit its layout: {why}"
            raise CheckpointError(msg)
        narrow = _jax.canonical_dtype(self.dtype)
        if narrow != self.dtype:
            msg = (
                f"{self.saved}: JAX would turn {self.dtype} into {narrow}. Ask for "
                f"that with dtype='{narrow}', or set jax_enable_x64."
            )
            raise CheckpointError(msg)

    def slices(self) -> list[tuple[Index, list[Any]]]:
        """Returns the slices that this process needs, each with its devices."""
        shape, sharding = self.spec.host_shape, self.sharding
        if sharding is None:
            return [(tuple(slice(0, size) for size in shape), [])]
        devices: dict[Bounds, list[Any]] = {}
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            devices.setdefault(bounds_of(index, shape), []).append(device)
        return [
            (tuple(slice(*bound) for bound in bounds), group)
            for bounds, group in devices.items()
        ]

    def saved_slices(self) -> Iterator[tuple[ArraySpec, Index]]:
        """Yields the slices to read, their dims in the order of the file."""
        if self.saved is None:
            return
        dims = self.saved.dims or range(len(self.spec.host_shape))
        order = np.argsort(dims)
        for index, _ in self.slices():
            yield self.saved, tuple(index[dim] for dim in order)

    def place(self, parts: Iterator[HostArray]) -> Any:
        """Returns the leaf's new value.

        Args:
            parts: The values of `saved_slices`.

        Raises:
            CheckpointError: If the requested dtype cannot hold a value.
        """
        if self.saved is None:
            return self._kept()
        sharding = self.sharding
        if sharding is None:
            part = self._converted(next(parts), self.saved)
            if self.on_host:
                return self._on_host(part)
            return self._finished(jax.device_put(part))
        arrays: list[jax.Array] = []
        kind = sharding.memory_kind
        for _, devices in self.slices():
            part = self._converted(next(parts), self.saved)
            # A CPU device may alias the memory of a NumPy array, and the state may be
            # donated later: each device gets its own copy.
            copies = [part, *(part.copy() for _ in devices[1:])]
            shardings = [SingleDeviceSharding(d, memory_kind=kind) for d in devices]
            # Waiting here bounds what the host holds while devices are being filled.
            arrays.extend(jax.block_until_ready(jax.device_put(copies, shardings)))
        return self._finished(
            jax.make_array_from_single_device_arrays(
                self.spec.host_shape, sharding, arrays, dtype=self.dtype
            )
        )

    def _kept(self) -> Any:
        if not self.moves or is_number(self.spec.dtype):
            return self.value
        layout = Layout.of(self.destination, np.ndim(self.value))
        return copy_to_mesh(self.value, layout)

    def _converted(self, part: HostArray, saved: ArraySpec) -> HostArray:
        part = part if saved.dims is None else part.transpose(saved.dims).copy()
        return part if is_number(self.spec.dtype) else _cast(part, self.dtype, saved)

    def _on_host(self, part: HostArray) -> Any:
        if is_number(self.spec.dtype):
            return self.spec.dtype(part.item())
        return part[()] if isinstance(self.value, np.generic) else part

    def _finished(self, value: jax.Array) -> jax.Array:
        """Returns an array as in the target: as PRNG keys, or weakly typed."""
        if self.spec.is_key:
            impl = _jax.key_impl(self.spec.dtype)
            keys = jax.random.wrap_key_data(value, impl=impl)
            sharding = self.destination
            is_there = sharding is None or keys.sharding == sharding
            return keys if is_there else _jax.put(keys, sharding)
        is_weak = bool(getattr(self.value, "weak_type", False))
        return _jax.with_weak_type(value, weak_type=True) if is_weak else value


def _cast(values: HostArray, dtype: np.dtype[Any], saved: ArraySpec) -> HostArray:
    """Returns values in another dtype of the same kind, if that can hold them."""
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        if values.dtype == object:  # a Python integer of more than 64 bits
            result, lost = values, np.True_
        elif jax.numpy.issubdtype(values.dtype, np.integer):
            result = values.astype(dtype)
            lost = result.astype(values.dtype) != values
            # A cast between signed and unsigned preserves bits but not values.
            lost |= (result < 0) != (values < 0)
        else:
            # Precision may be lost, which is what a narrower dtype means; range not.
            result = values.astype(dtype)
            lost = np.isfinite(values) & ~np.isfinite(result)
    if lost.any():
        msg = (
            f"{saved} holds {values[lost].flat[0]}, which {dtype} cannot represent. "
            "Ask for another dtype, or leave this array out of dtype={pattern: dtype}."
        )
        raise CheckpointError(msg)
    return result


def _why_not_divided(sharding: Sharding | None, shape: tuple[int, ...]) -> str:
    """Returns why an array does not divide into the shards; empty if it does."""
    try:
        if sharding is not None:
            sharding.shard_shape(shape)
    except ValueError as error:
        if isinstance(sharding, NamedSharding):
            # Our layout says the same with the names of axes and sizes that would fit.
            try:
                Layout.of(sharding, len(shape)).shard_shape(shape)
            except LayoutError as layout_error:
                return str(layout_error)
        return str(error)
    return ""


# The state to build.


def target_of(
    like: PyTree, layouts: LayoutMap | None, *, whole: bool = False
) -> tuple[list[LeafRestore], Rebuild]:
    """Returns the arrays and numbers of a state to restore, and how to rebuild it.

    Args:
        like: Arrays or abstract arrays in any tree, or a `StateDescription`.
        layouts: The layouts of its arrays, if not those of `like`.
        whole: Whether paths keep the `params` at the root of Linen variables.

    Raises:
        CheckpointError: If `like` has nothing to restore, or `layouts` is not a layout
            map.
    """
    if layouts is not None and not isinstance(layouts, LayoutMap):
        msg = (
            f"layouts= must be a LayoutMap, got {layouts!r} of type "
            f"{type(layouts).__name__}. Without it, arrays get the layouts of like=."
        )
        raise CheckpointError(msg)
    tree = like.abstract if isinstance(like, StateDescription) else like
    graphdef = None
    if _paths.holds_modules(tree):
        with eager_sharding_off():
            graphdef, tree = nnx.split(tree)
    values, treedef = jax.tree.flatten(tree)
    named = _paths.flatten(tree, whole=whole).leaves
    # By position among all leaves: those that are not arrays are kept.
    leaves: dict[int, LeafRestore] = {}
    for position, (leaf, value) in enumerate(zip(named, values, strict=True)):
        spec = _spec(leaf.path, value)
        if spec is not None:
            leaves[position] = LeafRestore(spec, value, _own_sharding(value))
    if not leaves:
        msg = (
            f"like= holds no arrays: {like!r} of type {type(like).__name__}. Give the "
            "state to restore, or its shapes from ml.describe or jax.eval_shape."
        )
        raise CheckpointError(msg)
    if layouts is not None:
        resolved = layouts.resolve(tree)
        layouts._check_used(resolved)
        pairs = zip(leaves.items(), jax.tree.leaves(resolved.layouts), strict=True)
        leaves = {
            position: replace(leaf, destination=layout.sharding, moves=True)
            for (position, leaf), layout in pairs
        }

    def rebuild(new_values: Sequence[Any]) -> PyTree:
        rebuilt = list(values)
        for position, value in zip(leaves, new_values, strict=True):
            rebuilt[position] = value
        if graphdef is None:
            return treedef.unflatten(rebuilt)
        with eager_sharding_off():
            return nnx.merge(graphdef, treedef.unflatten(rebuilt))

    return list(leaves.values()), rebuild


def _spec(path: str, value: Leaf) -> ArraySpec | None:
    """Returns the spec of an array or number; None for other leaves, which stay."""
    if isinstance(value, Tracer):
        msg = (
            f"{path}: like= is inside jit or another transformation, where arrays have "
            "no devices. Restore outside of it, or give shapes."
        )
        raise CheckpointError(msg)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        dtype = value.dtype
        if not _jax.is_extended(dtype):
            dtype = np.dtype(dtype).newbyteorder("=")
        return ArraySpec(path, (), tuple(value.shape), dtype)
    for kind in (bool, int, float, complex):
        if isinstance(value, kind):
            return ArraySpec(path, (), (), kind)
    return None


def _own_sharding(value: Leaf) -> Sharding | None:
    # An array that is not committed to its device must not become so: JAX would then
    # refuse to combine it with arrays on other devices.
    if isinstance(value, jax.Array) and not _jax.is_committed(value):
        return None
    return getattr(value, "sharding", None)
