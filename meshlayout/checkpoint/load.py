"""Restores: from saved arrays of any kind to a state on devices.

A kind of files is a `Source`: names, shapes, dtypes, and how to read. Everything else
is the same for our steps, plain Orbax, safetensors and msgpack: names are matched,
differences are shown before anything is read, and each process casts and places the
slices that its devices hold, in NumPy, where 64-bit values and PRNG keys need no
special handling.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, Sharding

from meshlayout import _checks, _jax, _paths
from meshlayout._annotations import DType, Leaf, PyTree
from meshlayout.arrays import copy_to_mesh
from meshlayout.checkpoint.difference import ArraySpec, is_number
from meshlayout.checkpoint.match import Request, match, permutations, renamed
from meshlayout.errors import CheckpointError, LayoutError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap
from meshlayout.state.create import StateDescription, eager_sharding_off


logger = logging.getLogger("meshlayout.checkpoint")

HostArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Wanted: TypeAlias = Sequence[tuple[ArraySpec, Sharding | None]]


@dataclass(frozen=True)
class Source:
    """Saved arrays: their place, for messages, what they are, and how to read them.

    `read` returns for each wanted array a `jax.Array` with the given sharding (None for
    NumPy), or anything whose slices NumPy can convert, of which only the needed ones
    are then taken; PRNG keys as their words.
    """

    name: str
    leaves: Sequence[ArraySpec]
    read: Callable[[Wanted], Iterable[Any]]


@dataclass(frozen=True)
class Target:
    """A leaf of the state to build: its spec, and its value in `like`.

    `sharding` is that of the result, None for JAX's default device; `on_host` says
    that it is a NumPy array or a Python number.
    """

    spec: ArraySpec
    value: Any
    sharding: Sharding | None
    on_host: bool


def load(source: Source, request: Request) -> PyTree:
    """Restores a state from saved arrays; raises CheckpointError if they do not fit."""
    names = [leaf.path for leaf in source.leaves]
    names = renamed(names, request.rename, request.separator, "/")
    in_file = dict(zip(names, source.leaves, strict=True))
    dims = permutations(request.transpose, names)
    saved = in_file | {x: _transposed(in_file[x], dims[x]) for x in dims}
    targets, rebuild = _targets(saved, request)
    specs = [target.spec for target in targets]
    pairs, diff = match(saved, specs, request, source.name)
    # All leaves before the first read: an error after minutes of reading helps nobody.
    wanted: list[tuple[ArraySpec, Sharding | None]] = []
    for target, pair in zip(targets, pairs, strict=True):
        if pair is not None:
            sharding = _checked_sharding(target, saved[pair[0]], pair[1])
            wanted.append((in_file[pair[0]], None if pair[0] in dims else sharding))
        elif isinstance(target.value, jax.ShapeDtypeStruct):
            msg = (
                f"{target.spec.path}: not restored from {source.name}, and like= holds "
                "only its shape. Give a created state."
            )
            raise CheckpointError(msg)
    arrays = iter([*source.read(wanted)])
    values: list[Any] = []
    for target, pair in zip(targets, pairs, strict=True):
        if pair is None:
            values.append(_kept(target))
            continue
        (name, dtype), array = pair, next(arrays)
        array = np.transpose(array, dims[name]) if name in dims else array
        values.append(_placed(target, saved[name], dtype, array))
    if diff:
        logger.info("%s differs: %s", source.name, diff)
    return rebuild(values)


def to_numpy(source: Source) -> PyTree:
    """Returns all arrays as nested dicts of NumPy arrays, PRNG keys as their words."""
    values = source.read([(leaf, None) for leaf in source.leaves])
    paths = [leaf.path for leaf in source.leaves]
    return nested(zip(paths, values, strict=True))


def nested(items: Iterable[tuple[str, Any]]) -> PyTree:
    """Returns nested dicts of values by path; the one of an empty path itself."""
    tree: dict[str, Any] = {}
    for path, value in items:
        *parents, last = path.split("/")
        node: Any = tree
        for key in parents:
            node = node.setdefault(key, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict) or last in node:
            msg = f"{path!r}: one name is the beginning of another. Change rename=."
            raise CheckpointError(msg)
        node[last] = value
    return tree[""] if tree.keys() == {""} else tree


def spec_of(path: str, value: Any) -> ArraySpec | None:
    """Returns the spec of an array or a Python number; None for anything else."""
    if not hasattr(value, "dtype"):
        kinds = (
            kind for kind in (bool, int, float, complex) if isinstance(value, kind)
        )
        kind = next(kinds, None)
        return None if kind is None else ArraySpec(path, (), kind)
    try:
        is_array = _jax.is_array_dtype(value.dtype)
    except TypeError:  # a dtype of another library
        return None
    dtype = value.dtype
    if not _jax.is_extended(dtype):
        dtype = np.dtype(dtype).newbyteorder("=")
    return ArraySpec(path, tuple(value.shape), dtype) if is_array else None


def _transposed(spec: ArraySpec, dims: Sequence[int]) -> ArraySpec:
    try:
        shape = np.transpose(np.broadcast_to(0, spec.shape), dims).shape
    except (TypeError, ValueError) as error:
        msg = f"{spec}: transpose= gives it {_checks.shown(dims)}: {error}."
        raise CheckpointError(msg) from None
    return replace(spec, shape=shape)


def _targets(
    saved: Mapping[str, ArraySpec], request: Request
) -> tuple[list[Target], Callable[[Sequence[Any]], PyTree]]:
    """Returns the leaves to build, and what builds the state from their values."""
    tree, layouts = request.like, request.layouts
    if isinstance(tree, LayoutMap) and layouts is None:
        tree, layouts = None, tree
    if not isinstance(layouts, LayoutMap | None):
        msg = f"layouts= must be a LayoutMap, got {_checks.shown(layouts)}."
        raise CheckpointError(msg)
    if _jax.is_tracing():
        raise CheckpointError("like= is inside jit. Restore outside of it.")
    is_free, graphdef = tree is None, None
    if is_free:
        tree = nested((name, _placeholder(spec)) for name, spec in saved.items())
    elif isinstance(tree, StateDescription):
        tree = tree.abstract
    if _paths.holds_modules(tree):
        with eager_sharding_off():
            graphdef, tree = nnx.split(tree)
    values, treedef = jax.tree.flatten(tree)
    named = enumerate(_paths.flatten(tree, whole=True).leaves)
    # By position among all leaves: those that are not arrays are kept.
    specs = {i: spec_of(path, value) for i, (path, value, _) in named}
    specs = {i: spec for i, spec in specs.items() if spec is not None}
    if layouts is None:
        shardings = [_own_sharding(values[i]) for i in specs]
    else:
        # Under an empty key, which paths leave out, so that rules see whole paths. At
        # the root, a tree with the key `params` would be taken for Linen variables, and
        # `params` left out of paths; but it may be a `TrainState` that was saved.
        resolved = layouts.resolve({"": tree} if is_free else tree)
        layouts._check_used(resolved)
        shardings = [x.sharding for x in jax.tree.leaves(resolved.layouts)]
    targets: list[Target] = []
    for (i, spec), sharding in zip(specs.items(), shardings, strict=True):
        is_numpy = isinstance(values[i], (np.ndarray, np.generic)) and layouts is None
        on_host = is_numpy or is_number(spec.dtype)
        targets.append(Target(spec, values[i], sharding, on_host))

    def rebuild(new_values: Sequence[Any]) -> PyTree:
        filled = dict(enumerate(values)) | dict(zip(specs, new_values, strict=True))
        rebuilt = treedef.unflatten(filled.values())
        if graphdef is None:
            return rebuilt
        with eager_sharding_off():
            return nnx.merge(graphdef, rebuilt)

    return targets, rebuild


def _placeholder(spec: ArraySpec) -> Any:
    """Returns a leaf like the saved one, for a restore without `like`."""
    if is_number(spec.dtype):
        return spec.dtype()
    if spec.is_numpy:
        return np.broadcast_to(np.zeros((), spec.dtype), spec.shape)
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype)


def _own_sharding(value: Leaf) -> Sharding | None:
    # An array that is not committed to its device must not become so: JAX would then
    # refuse to combine it with arrays on other devices.
    is_free = isinstance(value, jax.Array) and not _jax.is_committed(value)
    return None if is_free else getattr(value, "sharding", None)


def _checked_sharding(target: Target, saved: ArraySpec, dtype: DType) -> Any:
    """Returns the sharding to read an array with; None for NumPy."""
    shape, sharding = target.spec.shape, target.sharding
    if target.on_host:
        return None
    narrow = _jax.canonical_dtype(dtype)
    if narrow != dtype:
        msg = (
            f"{saved}: JAX would turn {dtype} into {narrow}. Ask for that with "
            f"dtype='{narrow}', or set jax_enable_x64."
        )
        raise CheckpointError(msg)
    try:
        if isinstance(sharding, NamedSharding):
            Layout.of(sharding, len(shape)).shard_shape(shape)
    except LayoutError as error:
        raise CheckpointError(f"{saved} does not fit its layout: {error}") from None
    # Wider than JAX's, it would be narrowed on devices before its range is checked.
    is_wide = _jax.canonical_dtype(saved.host_dtype) != saved.host_dtype
    is_on_host = is_wide or is_number(saved.dtype) or target.spec.is_key
    return None if is_on_host else sharding


def _kept(target: Target) -> Any:
    if target.on_host or target.sharding in (None, _own_sharding(target.value)):
        return target.value
    return copy_to_mesh(target.value, Layout.of(target.sharding, np.ndim(target.value)))


def _placed(target: Target, saved: ArraySpec, dtype: DType, value: Leaf) -> Any:
    """Returns the value of a leaf as in the target, from its array as saved."""
    spec, sharding = target.spec, target.sharding
    parts: dict[str, Any] = {}

    def read(index: Any = ()) -> Any:
        """Returns a slice, read and cast once for all devices that hold it."""
        if repr(index) not in parts:
            # A copy: a device may use the memory as its own, and give it away.
            part: Any = _cast(np.array(value[index]), dtype, saved)
            if spec.is_key:
                part = jax.random.wrap_key_data(part, impl=_jax.key_impl(spec.dtype))
            parts[repr(index)] = part
        return parts[repr(index)]

    if is_number(spec.dtype):
        return spec.dtype(np.asarray(value).item())
    if is_number(saved.dtype):
        value = np.asarray(value)
    if target.on_host:
        return read()[()] if isinstance(target.value, np.generic) else read()
    if isinstance(value, jax.Array):  # the source has placed it
        array = value if value.dtype == dtype else _cast_shards(value, dtype, saved)
    elif sharding is None:
        array = jax.device_put(read())
    else:
        array = jax.make_array_from_callback(spec.shape, sharding, read)
    is_weak = bool(getattr(target.value, "weak_type", False))
    return _jax.with_weak_type(array, weak_type=True) if is_weak else array


def _cast_shards(array: jax.Array, dtype: DType, saved: ArraySpec) -> jax.Array:
    """Returns an array in another dtype, cast shard by shard on the host."""
    shards = [
        jax.device_put(_cast(np.array(x.data), dtype, saved), x.data.sharding)
        for x in array.addressable_shards
    ]
    shape, sharding = array.shape, array.sharding
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _cast(values: HostArray, dtype: DType, saved: ArraySpec) -> HostArray:
    """Returns values in another dtype of the same kind, if that can hold them."""
    if values.dtype == dtype:
        return values
    is_wide = values.dtype == object  # a Python integer of more than 64 bits
    with np.errstate(over="ignore", invalid="ignore"):
        result = values if is_wide else values.astype(dtype)
    if jax.numpy.issubdtype(dtype, np.inexact):
        # Precision may be lost, which is what a narrower dtype means; range not.
        lost = np.isfinite(values) & ~np.isfinite(result)
    else:
        lost = (result != values) | is_wide
    if lost.any():
        msg = f"{saved} holds {values[lost].flat[0]}, which {dtype} cannot represent."
        raise CheckpointError(msg)
    return result
