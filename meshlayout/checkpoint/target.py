"""The target of a restore: the state to build, and how each leaf of it is filled.

Only this module casts, slices and places the arrays of a restore, whatever their
format. It works on NumPy slices: parts that no device of this process needs are never
read, and 64-bit values and PRNG keys need no special handling in JAX.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from meshlayout import _jax, _paths
from meshlayout._annotations import Leaf as AnyLeaf, PyTree
from meshlayout.arrays import copy_to_mesh
from meshlayout.checkpoint.difference import ArraySpec, is_number
from meshlayout.checkpoint.pairs import Pair, key_words
from meshlayout.errors import CheckpointError, LayoutError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap
from meshlayout.state.build import eager_sharding_off
from meshlayout.state.create import StateDescription


Index: TypeAlias = tuple[slice, ...]
"""One slice per dim, each with a start and a stop."""

Bounds: TypeAlias = tuple[tuple[int, int], ...]
"""The start and the stop of a slice in every dim: an index that can be compared."""

HostArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class TargetLeaf:
    """A leaf of the target.

    Attributes:
        leaf: Its name, shape and dtype.
        value: The leaf itself, abstract or not.
        sharding: Where it goes; None for JAX's default device.
        moves: Whether `sharding` differs from the value's current one.
    """

    leaf: ArraySpec
    value: Any
    sharding: jax.sharding.Sharding | None
    moves: bool

    @property
    def on_host(self) -> bool:
        """Whether it is NumPy's or a Python number, not a `jax.Array`."""
        if is_number(self.leaf.dtype):
            return True
        return isinstance(self.value, (np.ndarray, np.generic)) and not self.moves

    def keep(self) -> Any:
        """Returns the current value, moved to where it goes."""
        if not self.moves or self.sharding is None:
            return self.value
        return copy_to_mesh(self.value, Layout.of(self.sharding, np.ndim(self.value)))


@dataclass(frozen=True)
class Target:
    """The state to build.

    Attributes:
        leaves: Its arrays and numbers.
        rebuild: Makes the state from new values, one per leaf.
    """

    leaves: list[TargetLeaf]
    rebuild: Callable[[Sequence[Any]], PyTree]

    @classmethod
    def of(
        cls, like: PyTree, layouts: LayoutMap | None = None, *, whole: bool = False
    ) -> "Target":
        """Flattens a state.

        Args:
            like: Arrays or abstract arrays in any tree, or a `StateDescription`.
            layouts: Where its arrays go, if not where they are.
            whole: Whether paths keep the `params` at the root of Linen variables.

        Raises:
            CheckpointError: If it has no leaf to restore, or `layouts`
                is not a layout map.
        """
        if layouts is not None and not isinstance(layouts, LayoutMap):
            msg = (
                f"layouts= must be a LayoutMap, got {layouts!r} of type "
                f"{type(layouts).__name__}. Without it, arrays go where those of like= "
                "are."
            )
            raise CheckpointError(msg)
        like = like.abstract if isinstance(like, StateDescription) else like
        graphdef, tree = None, like
        if _paths.holds_modules(like):
            with eager_sharding_off():
                graphdef, tree = nnx.split(like)
        named = _paths.flatten(tree, whole=whole).leaves
        values, treedef = jax.tree.flatten(tree)
        shardings = _shardings(tree if graphdef is not None else like, values, layouts)
        # By position, as leaves that are not arrays stay as they are.
        leaves = {
            position: _target_leaf(
                leaf.path, value, sharding, moves=layouts is not None
            )
            for position, (leaf, value, sharding) in enumerate(
                zip(named, values, shardings, strict=True)
            )
            if _is_value(value)
        }
        if not leaves:
            msg = (
                f"like= holds no arrays: {like!r} of type {type(like).__name__}. Give "
                "the state to restore, or its shapes, as ml.describe or jax.eval_shape "
                "return them."
            )
            raise CheckpointError(msg)

        def rebuild(new_values: Sequence[Any]) -> PyTree:
            rebuilt = list(values)
            for position, value in zip(leaves, new_values, strict=True):
                rebuilt[position] = value
            if graphdef is None:
                return treedef.unflatten(rebuilt)
            with eager_sharding_off():
                return nnx.merge(graphdef, treedef.unflatten(rebuilt))

        return cls(list(leaves.values()), rebuild)


def check_kept(leaves: Sequence[TargetLeaf], source: str) -> None:
    """Raises if a leaf that is not restored has no value to keep.

    Args:
        leaves: The leaves that are not restored.
        source: The file or directory of the saved arrays, for messages.

    Raises:
        CheckpointError: Names the leaves.
    """
    for target in leaves:
        if isinstance(target.value, jax.Array) and target.value.is_deleted():
            msg = (
                f"{target.leaf.path}: not restored from {source}, and the array in "
                "like= is deleted: it was donated to a step or a relayout. Give a "
                "state that is alive."
            )
            raise CheckpointError(msg)
    abstract = [
        target.leaf.path
        for target in leaves
        if isinstance(target.value, jax.ShapeDtypeStruct)
    ]
    if abstract:
        more = f" and {len(abstract) - 5:,} more" if len(abstract) > 5 else ""
        msg = (
            f"{', '.join(abstract[:5])}{more}: not restored from {source}, and like= "
            "holds only shapes there, so there is no value to keep. Give a state that "
            "was created."
        )
        raise CheckpointError(msg)


def _shardings(
    tree: PyTree, values: Sequence[AnyLeaf], layouts: LayoutMap | None
) -> list[Sharding | None]:
    if layouts is None:
        return [_own_sharding(value) for value in values]
    resolved = layouts.resolve(tree)
    layouts._check_used(resolved)
    resolved_layouts = iter(jax.tree.leaves(resolved.layouts))
    return [
        next(resolved_layouts).sharding if _is_value(value) else None
        for value in values
    ]


def _is_value(value: AnyLeaf) -> bool:
    """Returns whether a leaf is an array or a number; others stay as they are."""
    is_array = hasattr(value, "shape") and hasattr(value, "dtype")
    return is_array or isinstance(value, (bool, int, float, complex))


def _own_sharding(value: AnyLeaf) -> Sharding | None:
    # An array that was not committed to its device is not committed afterwards either.
    if isinstance(value, jax.Array) and not _jax.is_committed(value):
        return None
    return getattr(value, "sharding", None)


def _target_leaf(
    path: str, value: AnyLeaf, sharding: Sharding | None, *, moves: bool
) -> TargetLeaf:
    parts = tuple(path.split("/"))
    if not hasattr(value, "dtype"):
        # A Python number is not on a device.
        leaf = ArraySpec(path, parts, (), type(value))
        return TargetLeaf(leaf, value, sharding, moves=False)
    is_key = _jax.is_extended(value.dtype)
    dtype = value.dtype if is_key else np.dtype(value.dtype)
    leaf = ArraySpec(path, parts, tuple(value.shape), dtype)
    return TargetLeaf(leaf, value, sharding, moves)


# Filling a leaf.


@dataclass(frozen=True)
class LeafRestore:
    """A leaf of the target, and the saved array that it is restored from.

    Attributes:
        target: The leaf.
        pair: How it was matched.
        saved: The array as it is in the files.
        dims: The permutation from the saved dims to the target's.
    """

    target: TargetLeaf
    pair: Pair
    saved: ArraySpec
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
        """Raises CheckpointError if JAX cannot hold the array in its new dtype."""
        if self.target.on_host:
            return
        if self.sharding is not None:
            _check_divides(self.sharding, self.shape, self.pair.saved)
        dtype = self._dtype
        if _jax.canonical_dtype(dtype) != dtype:
            narrow = _jax.canonical_dtype(dtype)
            msg = (
                f"{self.pair.saved}: JAX makes {narrow} of {dtype}. Ask for it with "
                f"dtype='{narrow}', or set jax_enable_x64."
            )
            raise CheckpointError(msg)

    def slices(self) -> list[tuple[Index, list[Any]]]:
        """Returns the slices that this process reads, each with its devices."""
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
        """Maps a slice of the target to a slice in the file."""
        if self.dims is None:
            return index
        order = [self.dims.index(dim) for dim in range(len(self.dims))]
        return tuple(index[dim] for dim in order)

    def place(self, parts: Iterator[HostArray]) -> Any:
        """Returns the leaf's new value.

        Args:
            parts: The slices' values, in the order of `slices`.

        Raises:
            CheckpointError: If the requested dtype cannot hold a value.
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
            # A CPU device may alias a NumPy array's memory: a separate one for each.
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
        # A Python number that becomes an array gets JAX's default precision.
        if is_number(self.pair.saved.dtype) and not is_number(self.pair.dtype):
            return _jax.canonical_dtype(self.pair.dtype)
        return self.pair.dtype

    def _converted(self, part: HostArray) -> HostArray:
        part = part if self.dims is None else part.transpose(self.dims).copy()
        if self.target.leaf.is_key or is_number(self.target.leaf.dtype):
            return part
        return _cast(part, self._dtype, self.pair.saved)

    def _on_host(self, part: HostArray) -> Any:
        if is_number(self.target.leaf.dtype):
            return self.target.leaf.dtype(part.item())
        return part[()] if isinstance(self.target.value, np.generic) else part

    def _finished(self, value: jax.Array) -> jax.Array:
        """Returns an array in the target's form: a PRNG key, or weakly typed."""
        target = self.target
        if target.leaf.is_key:
            impl = _jax.key_impl(target.leaf.dtype)
            keys = jax.random.wrap_key_data(value, impl=impl)
            sharding = target.sharding
            is_there = sharding is None or keys.sharding == sharding
            return keys if is_there else jax.device_put(keys, sharding)
        is_weak = bool(getattr(target.value, "weak_type", False))
        return _jax.with_weak_type(value, weak_type=True) if is_weak else value


def bounds_of(index: Index | None, shape: tuple[int, ...]) -> Bounds:
    """Returns the start and the stop of an index in every dim.

    Args:
        index: Slices, as returned by JAX; None for all of an array without dims.
        shape: The shape of the whole array.
    """
    pairs = zip(index or (), shape, strict=True)
    return tuple(part.indices(size)[:2] for part, size in pairs)


def _cast(values: HostArray, dtype: np.dtype[Any], saved: ArraySpec) -> HostArray:
    """Returns values in another dtype of the same kind, if that can hold them."""
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        result = values.astype(dtype)
        if jax.numpy.issubdtype(values.dtype, np.integer):
            lost = result.astype(values.dtype) != values
            # A cast between signed and unsigned preserves bits but not values.
            lost |= (result < 0) != (values < 0)
        else:
            lost = np.isfinite(values) & ~np.isfinite(result)
    if lost.any():
        msg = (
            f"{saved}: it holds {values[lost].flat[0]}, which {dtype} cannot hold. Ask "
            "for another dtype, or leave this array out of dtype={pattern: dtype}."
        )
        raise CheckpointError(msg)
    return result


def _check_divides(
    sharding: Sharding, shape: tuple[int, ...], saved: ArraySpec
) -> None:
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        why = str(error)
        if isinstance(sharding, NamedSharding):
            # The layout is equivalent, with the mesh's names and sizes that divide.
            try:
                Layout.of(sharding, len(shape)).shard_shape(shape)
            except LayoutError as layout_error:
                why = str(layout_error)
        msg = f"{saved} does not fit its layout: {why}"
        raise CheckpointError(msg) from None
