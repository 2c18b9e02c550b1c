"""Restores: from saved arrays of any kind to a state on devices.

A kind of files is a `Source`: names, shapes, dtypes, and how to read. Everything else
is the same for our steps, plain Orbax, safetensors and msgpack: names are matched,
differences are shown before anything is read, and each process casts and places the
slices that its devices hold, in NumPy, where 64-bit values and PRNG keys need no
special handling.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import jax
import msgpack
import numpy as np
from flax import serialization
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from meshlayout import _checks, _jax, _render
from meshlayout._annotations import HostArray, PyTree
from meshlayout.arrays import copy_to_mesh
from meshlayout.checkpoint import orbax
from meshlayout.checkpoint.difference import ArraySpec, RestoreDiff, is_number
from meshlayout.checkpoint.directory import path_text
from meshlayout.checkpoint.match import Request, match, permutations, renamed
from meshlayout.checkpoint.tree import Target, nested, targets_of
from meshlayout.errors import CheckpointError, DamagedCheckpointError, LayoutError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap


logger = logging.getLogger("meshlayout.checkpoint")

Index: TypeAlias = tuple[slice, ...]
Partial: TypeAlias = bool | str | Sequence[str]

# `msgpack_restore` and `msgpack` raise all of these for bytes of another kind.
_UNPACK_ERRORS = (
    *(ValueError, TypeError, KeyError, AssertionError, AttributeError, IndexError),
    *(RecursionError, MemoryError),
)


class Source(Protocol):
    """Saved arrays.

    Attributes:
        name: The file, directory or step, for messages.
        leaves: The saved leaves.
        is_foreign: Whether another library wrote them; see `match`.
    """

    name: str
    leaves: Sequence[ArraySpec]
    is_foreign: bool

    def read(
        self, wanted: Sequence[tuple[ArraySpec, Sharding | None]]
    ) -> Iterable[Any]:
        """Reads arrays as they were saved.

        Args:
            wanted: Arrays, and the sharding of each as saved; None for NumPy. PRNG keys
                are read as their words.

        Returns:
            For each a `jax.Array` with that sharding, or anything whose slices NumPy
            can convert, of which only the needed ones are then taken.
        """
        ...


@dataclass(frozen=True)
class Restored:
    """The result of a restore: the state, what differed, and what was read."""

    state: PyTree
    diff: RestoreDiff
    num_arrays: int
    num_bytes: int


def load(source: Source, request: Request) -> Restored:
    """Restores a state from saved arrays.

    Raises:
        CheckpointError: If the saved arrays do not fit.
    """
    names = renamed(
        [leaf.path for leaf in source.leaves], request.rename, request.separator
    )
    dims = permutations(request.transpose, names)
    saved = {
        name: leaf.transposed(dims.get(name))
        for name, leaf in zip(names, source.leaves, strict=True)
    }
    targets, rebuild = _targets(source, saved, request)
    targets, diff = match(
        saved, targets, request, is_foreign=source.is_foreign, source=source.name
    )
    # All leaves before the first read: an error after minutes of reading helps nobody.
    for target in targets:
        _check(target, source.name)
    wanted = [(t.saved, _sharding_in_file(t)) for t in targets if t.saved is not None]
    arrays = iter(source.read(wanted))
    values = [_kept(t) if t.saved is None else _placed(t, next(arrays)) for t in targets]
    sizes = [math.prod(spec.host_shape) * spec.host_dtype.itemsize for spec, _ in wanted]
    return Restored(rebuild(values), diff, len(wanted), sum(sizes))


def to_numpy(source: Source) -> PyTree:
    """Returns all arrays as nested dicts of NumPy arrays, PRNG keys as their words."""
    values = [
        leaf.dtype(np.asarray(value).item()) if is_number(leaf.dtype) else value
        for leaf, value in zip(
            source.leaves, source.read([(x, None) for x in source.leaves]), strict=True
        )
    ]
    return nested([leaf.parts for leaf in source.leaves], values)


# The target of a restore, and what it must be.


def _targets(
    source: Source, saved: Mapping[str, ArraySpec], request: Request
) -> tuple[list[Target], Callable[[Sequence[Any]], PyTree]]:
    """Returns the targets for `like=`, or for nested dicts of all saved leaves."""
    like, layouts = request.like, request.layouts
    if isinstance(like, LayoutMap):
        if layouts is not None:
            msg = (
                "like= and layouts= are both layout maps. Give one: like=layouts, or "
                "like=state and layouts=layouts."
            )
            raise CheckpointError(msg)
        like, layouts = None, like
    elif like is not None or source.is_foreign:
        return targets_of(like, layouts, whole=not source.is_foreign)
    parts = [
        leaf.parts
        if leaf.path == name and not source.is_foreign
        else tuple(name.split("/"))
        for name, leaf in saved.items()
    ]
    tree = nested(parts, [_template(leaf) for leaf in saved.values()])
    if not saved:
        return [], lambda values: tree
    if source.is_foreign:
        return targets_of(tree, layouts)
    # Under an empty key, which paths leave out, so that rules see whole paths. At the
    # root, a tree with the key `params` would be taken for Linen variables, and
    # `params` left out of paths; but it may be a `TrainState`, whose type is not saved.
    targets, rebuild = targets_of({"": tree}, layouts)
    return targets, lambda values: rebuild(values)[""]


def _template(leaf: ArraySpec) -> Any:
    """Returns the placeholder of a saved leaf in the state to build."""
    if is_number(leaf.dtype):
        return leaf.dtype()
    if leaf.is_numpy:
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _check(target: Target, source: str) -> None:
    """Raises if a leaf will have no value, or none that fits its layout and dtype."""
    path, value, saved = target.spec.path, target.value, target.saved
    if saved is None:
        msg = ""
        if isinstance(value, jax.ShapeDtypeStruct):
            msg = (
                f"{path}: not restored from {source}, and like= holds only shapes "
                "there, so that there is no value to keep. Give a created state."
            )
        elif isinstance(value, jax.Array) and value.is_deleted():
            msg = (
                f"{path}: not restored from {source}, and the array in like= is "
                "deleted: it was donated to a step or a relayout. Give the state that "
                "the step returned."
            )
        if msg:
            raise CheckpointError(msg)
        return
    if target.on_host:
        return
    why = _why_not_divided(target.words_sharding, target.spec.host_shape)
    if why:
        raise CheckpointError(f"{saved} does not fit its layout: {why}")
    narrow = _jax.canonical_dtype(target.dtype)
    if narrow != target.dtype:
        msg = (
            f"{saved}: JAX would turn {target.dtype} into {narrow}. Ask for that with "
            f"dtype='{narrow}', or set jax_enable_x64."
        )
        raise CheckpointError(msg)


def _why_not_divided(sharding: Sharding | None, shape: tuple[int, ...]) -> str:
    """Returns why an array does not divide into the shards; empty if it does."""
    try:
        if isinstance(sharding, NamedSharding):
            # JAX says this, too, but without the names of axes and sizes that fit.
            Layout.of(sharding, len(shape)).shard_shape(shape)
        elif sharding is not None:
            sharding.shard_shape(shape)
    except (LayoutError, ValueError) as error:
        return str(error)
    return ""


# Values.


def _sharding_in_file(target: Target) -> Sharding | None:
    """Returns the sharding of a target's array as it was saved; None for NumPy."""
    saved, sharding = target.saved, target.words_sharding
    if saved is None or target.on_host or sharding is None:
        return None
    if is_number(saved.dtype) or _jax.canonical_dtype(saved.host_dtype) != saved.host_dtype:
        return None  # on a device, JAX would narrow it before its range is checked
    if saved.dims is None or sharding.is_fully_replicated:
        return sharding
    if not isinstance(sharding, NamedSharding):
        return None
    axes = [*sharding.spec, *[None] * (len(saved.dims) - len(sharding.spec))]
    spec = PartitionSpec(*(axes[dim] for dim in np.argsort(saved.dims)))
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _kept(target: Target) -> Any:
    if not target.moves or is_number(target.spec.dtype):
        return target.value
    return copy_to_mesh(target.value, Layout.of(target.sharding, np.ndim(target.value)))


def _placed(target: Target, value: Any) -> Any:
    """Returns the value of a leaf as in the target, from its array as saved."""
    spec, sharding = target.spec, target.words_sharding
    if is_number(spec.dtype):
        return spec.dtype(np.asarray(value).item())
    read = _converted_slices(target, value)
    if target.on_host:
        whole = read(())
        return whole[()] if isinstance(target.value, np.generic) else whole
    if sharding is None:
        array = jax.device_put(read(()))
    elif isinstance(value, jax.Array) and _is_as_saved(target):
        array = value
    else:
        array = jax.make_array_from_callback(
            spec.host_shape, sharding, read, dtype=target.dtype
        )
    if spec.is_key:
        keys = jax.random.wrap_key_data(array, impl=_jax.key_impl(spec.dtype))
        is_there = target.sharding is None or keys.sharding == target.sharding
        return keys if is_there else _jax.put(keys, target.sharding)
    is_weak = bool(getattr(target.value, "weak_type", False))
    return _jax.with_weak_type(array, weak_type=True) if is_weak else array


def _is_as_saved(target: Target) -> bool:
    saved = target.saved
    return saved is not None and (saved.dims, saved.host_dtype) == (None, target.dtype)


def _converted_slices(target: Target, value: Any) -> Callable[[Any], HostArray]:
    """Returns a function that reads, transposes and casts a slice of a saved array.

    Every slice is read once. Each call returns memory that nothing else uses: a CPU
    device may take it over, and the state may be donated later.
    """
    saved = target.saved
    assert saved is not None
    dims = saved.dims or range(len(saved.host_shape))
    shape = tuple(target.spec.host_shape)
    shards: dict[Any, Any] = {}
    if isinstance(value, jax.Array):
        shards = {_bounds(s.index, value.shape): s.data for s in value.addressable_shards}
    elif is_number(saved.dtype):
        value = np.asarray(value)
    parts: dict[Any, HostArray] = {}

    def read(index: Any) -> HostArray:
        bounds = _bounds(index or (slice(None),) * len(shape), shape)
        if bounds in parts:
            return parts[bounds].copy()
        in_file = tuple(bounds[dim] for dim in np.argsort(dims))
        part = (
            np.array(shards[in_file])
            if shards
            else np.array(value[tuple(slice(*bound) for bound in in_file)])
        )
        if saved.dims is not None:
            part = part.transpose(saved.dims).copy()
        parts[bounds] = _cast(part, target.dtype, saved)
        return parts[bounds]

    return read


def _bounds(index: Index, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Returns the start and the stop of a slice in every dim."""
    return tuple(
        part.indices(size)[:2] for part, size in zip(index, shape, strict=True)
    )


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
            "Ask for another dtype."
        )
        raise CheckpointError(msg)
    return result
