"""Restores: from saved arrays of any kind to a state on devices.

A kind of files is a `Source`: names, shapes, dtypes, and how to read. Everything else
is the same for our steps, plain Orbax, safetensors and msgpack: names are matched,
differences are shown before anything is read, and each process casts and places the
slices that its devices hold, in NumPy, where 64-bit values and PRNG keys need no
special handling.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from meshlayout import _jax
from meshlayout._annotations import Leaf, PyTree
from meshlayout.arrays import copy_to_mesh
from meshlayout.checkpoint.difference import ArraySpec, is_number
from meshlayout.checkpoint.match import Request, match, permutations, renamed
from meshlayout.checkpoint.tree import Rebuild, Target, nested, targets_of
from meshlayout.errors import CheckpointError, LayoutError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap


logger = logging.getLogger("meshlayout.checkpoint")

HostArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Bounds: TypeAlias = tuple[tuple[int, int], ...]


class Source(Protocol):
    """Saved arrays: their place, for messages, and what they are; see also `match`."""

    name: str
    leaves: list[ArraySpec]
    is_foreign: bool

    def read(
        self, wanted: Sequence[tuple[ArraySpec, Sharding | None]]
    ) -> Iterable[Any]:
        """Returns arrays as they were saved, PRNG keys as their words.

        For each a `jax.Array` with the given sharding (None for NumPy), or anything
        whose slices NumPy can convert, of which only the needed ones are then taken.
        """
        ...


def load(source: Source, request: Request) -> PyTree:
    """Restores a state from saved arrays; raises CheckpointError if they do not fit."""
    names = [leaf.path for leaf in source.leaves]
    names = renamed(names, request.rename, request.separator, "/")
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
    arrays = iter([*source.read(wanted)])
    values = [
        _kept(target)
        if target.saved is None
        else _placed(target, target.saved, next(arrays))
        for target in targets
    ]
    if diff:
        logger.info("%s differs: %s", source.name, diff)
    return rebuild(values)


def to_numpy(source: Source) -> PyTree:
    """Returns all arrays as nested dicts of NumPy arrays, PRNG keys as their words."""
    values = source.read([(leaf, None) for leaf in source.leaves])
    return nested(
        (leaf.parts, leaf.dtype(value) if is_number(leaf.dtype) else value)
        for leaf, value in zip(source.leaves, values, strict=True)
    )


def _targets(
    source: Source, saved: Mapping[str, ArraySpec], request: Request
) -> tuple[list[Target], Rebuild]:
    """Returns the targets for `like=`, or for nested dicts of all saved leaves."""
    like, layouts = request.like, request.layouts
    if isinstance(like, LayoutMap) and layouts is None:
        like, layouts = None, like
    elif like is not None or source.is_foreign:
        return targets_of(like, layouts, whole=not source.is_foreign)
    is_own = not source.is_foreign
    tree = nested(
        (leaf.parts if is_own and leaf.path == name else name.split("/"), _empty(leaf))
        for name, leaf in saved.items()
    )
    if source.is_foreign or not saved:
        return targets_of(tree, layouts) if saved else ([], lambda values: tree)
    # Under an empty key, which paths leave out, so that rules see whole paths. At the
    # root, a tree with the key `params` would be taken for Linen variables, and
    # `params` left out of paths; but it may be a `TrainState`, whose type is not saved.
    targets, rebuild = targets_of({"": tree}, layouts)
    return targets, lambda values: rebuild(values)[""]


def _empty(leaf: ArraySpec) -> Any:
    """Returns the placeholder of a saved leaf in the state to build."""
    if is_number(leaf.dtype):
        return leaf.dtype()
    if leaf.is_numpy:
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _check(target: Target, source: str) -> None:
    """Raises if a leaf will have no value, or none that fits its layout and dtype."""
    value, saved, sharding = target.value, target.saved, target.words_sharding
    problem = ""
    if saved is None:
        kept = f"{target.spec.path}: not restored from {source}, and"
        if isinstance(value, jax.ShapeDtypeStruct):
            problem = f"{kept} like= holds only its shape. Give a created state."
        elif isinstance(value, jax.Array) and value.is_deleted():
            problem = f"{kept} deleted in like=. Give the state that the step returned."
    elif not target.on_host:
        narrow = _jax.canonical_dtype(target.dtype)
        if narrow != target.dtype:
            problem = (
                f"{saved}: JAX would turn {target.dtype} into {narrow}. Ask for that "
                f"with dtype='{narrow}', or set jax_enable_x64."
            )
        elif isinstance(sharding, NamedSharding):
            shape = target.spec.host_shape
            try:
                Layout.of(sharding, len(shape)).shard_shape(shape)
            except LayoutError as error:
                problem = f"{saved} does not fit its layout: {error}"
    if problem:
        raise CheckpointError(problem)


def _sharding_in_file(target: Target) -> Sharding | None:
    """Returns the sharding of a target's array as it was saved; None for NumPy."""
    saved, sharding = target.saved, target.words_sharding
    if saved is None or sharding is None or is_number(saved.dtype):
        return None
    if _jax.canonical_dtype(saved.host_dtype) != saved.host_dtype:
        return None  # on a device, JAX would narrow it before its range is checked
    if saved.dims is None or not isinstance(sharding, NamedSharding):
        return sharding if saved.dims is None else None
    axes = [*sharding.spec, *[None] * (len(saved.dims) - len(sharding.spec))]
    spec = PartitionSpec(*(axes[dim] for dim in np.argsort(saved.dims)))
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _kept(target: Target) -> Any:
    if not target.moves or is_number(target.spec.dtype):
        return target.value
    return copy_to_mesh(target.value, Layout.of(target.sharding, np.ndim(target.value)))


def _placed(target: Target, saved: ArraySpec, value: Leaf) -> Any:
    """Returns the value of a leaf as in the target, from its array as saved."""
    spec, sharding = target.spec, target.words_sharding
    if is_number(spec.dtype):
        return spec.dtype(np.asarray(value).item())
    read = _reader(target, saved, value)
    if target.on_host:
        return read()[()] if isinstance(target.value, np.generic) else read()
    is_placed = isinstance(value, jax.Array) and saved.dims is None
    if sharding is None:
        array = jax.device_put(read())
    elif is_placed and saved.host_dtype == target.dtype:
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


def _reader(target: Target, saved: ArraySpec, value: Leaf) -> Callable[..., HostArray]:
    """Returns a function that reads, transposes and casts a slice of a saved array.

    Every slice is read once. Devices with copies of one may share its memory, which
    JAX then never gives away to a donated argument.
    """
    shape, dims = target.spec.host_shape, saved.dims or range(len(saved.host_shape))
    shards: dict[Bounds, jax.Array] = {}
    if isinstance(value, jax.Array):
        pieces = value.addressable_shards
        shards = {_bounds(piece.index, value.shape): piece.data for piece in pieces}
    elif is_number(saved.dtype):
        value = np.asarray(value)
    parts: dict[Bounds, HostArray] = {}

    def read(index: tuple[slice, ...] = (slice(None),) * len(shape)) -> HostArray:
        bounds = _bounds(index, shape)
        if bounds not in parts:
            in_file = tuple(bounds[dim] for dim in np.argsort(dims))
            part = shards.get(in_file)
            if part is None:
                part = value[tuple(slice(*bound) for bound in in_file)]
            part = np.array(part).transpose(dims)
            parts[bounds] = _cast(part, target.dtype, saved)
        return parts[bounds]

    return read


def _bounds(index: Iterable[slice], shape: Sequence[int]) -> Bounds:
    """Returns the start and the stop of a slice in every dim."""
    pairs = zip(index, shape, strict=True)
    return tuple(part.indices(size)[:2] for part, size in pairs)


def _cast(values: HostArray, dtype: np.dtype[Any], saved: ArraySpec) -> HostArray:
    """Returns values in another dtype of the same kind, if that can hold them."""
    if values.dtype == dtype:
        return values
    if values.dtype == object:  # a Python integer of more than 64 bits
        result, lost = values, np.True_
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            result = values.astype(dtype)
        if jax.numpy.issubdtype(values.dtype, np.integer):
            # A cast between signed and unsigned preserves bits but not values.
            lost = (result.astype(values.dtype) != values) | (
                (result < 0) != (values < 0)
            )
        else:
            # Precision may be lost, which is what a narrower dtype means; range not.
            lost = np.isfinite(values) & ~np.isfinite(result)
    if lost.any():
        msg = f"{saved} holds {values[lost].flat[0]}, which {dtype} cannot represent."
        raise CheckpointError(msg)
    return result
