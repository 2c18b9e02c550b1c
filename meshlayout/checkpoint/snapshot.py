"""A state flattened for saving: its manifest entries and its arrays.

The arrays stay on their devices here; `StepWriter` copies them. What files could not
give back is refused by name: tracers, masked arrays, foreign byte orders, long doubles.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding

from meshlayout import _checks, _jax, _paths
from meshlayout._annotations import DType, Leaf, PyTree
from meshlayout.checkpoint.manifest import SavedLeaf
from meshlayout.checkpoint.orbax import stored_dtype
from meshlayout.checkpoint.target import bounds_of
from meshlayout.errors import CheckpointError, MeshLayoutError
from meshlayout.layout import Layout
from meshlayout.state.create import StateDescription


# The index of a shard's first element in the whole array, and the values of the shard.
Shard = tuple[tuple[int, ...], np.ndarray[Any, Any]]


def snapshot(state: PyTree) -> tuple[list[SavedLeaf], dict[str, Any]]:
    """Flattens a state for saving.

    Returns:
        The manifest's entries, without fingerprints, and the arrays to store, by their
        names in the files.

    Raises:
        CheckpointError: If it holds no array or number, or anything that is neither.
    """
    if _jax.is_tracing():
        msg = (
            "save was called inside a function that JAX transforms, where arrays have "
            "no values. Call it outside, with what the function returned."
        )
        raise CheckpointError(msg)
    leaves: list[SavedLeaf] = []
    arrays: dict[str, Any] = {}
    for path, parts, value in named_leaves(state):
        leaf, array = _saved(path, parts, value)
        # Orbax writes no files for arrays without elements, nor are any needed.
        if array is not None and array.size:
            name = f"{len(arrays):06d}"
            stored = stored_dtype(array.dtype)
            leaf = replace(leaf, array=name, stored=stored.name)
            arrays[name] = array if stored == array.dtype else _as_bytes(array)
        leaves.append(leaf)
    if not leaves:
        _checks.has_arrays("state", state, where="save", error=CheckpointError)
    return leaves, arrays


def host_shards(array: np.ndarray | jax.Array) -> list[Shard]:
    """Returns this process's shards of an array, on the host.

    Among all processes each element comes once: of shards that several devices
    hold, from the first of them, and of a NumPy array, from process 0. After
    `orbax.start_writing` this copies nothing: JAX keeps the host copies of shards, and
    on a CPU they are views.
    """
    if not isinstance(array, jax.Array):
        return [((0,) * array.ndim, array)] if jax.process_index() == 0 else []
    return [
        (tuple(dim.start or 0 for dim in shard.index), np.asarray(shard.data))
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]


def host_bytes(state: PyTree) -> int:
    """Returns the bytes of this process's shards of a state, each counted once.

    Args:
        state: As for `snapshot`; may be abstract, or a `StateDescription`.
    """
    num_bytes = 0
    state = state.abstract if isinstance(state, StateDescription) else state
    for _, _, value in named_leaves(state):
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape is None or dtype is None:
            continue
        sharding = _jax.sharding_of(value)
        on_host = isinstance(value, (np.ndarray, np.generic))
        num_elements = math.prod(shape)
        if sharding is not None:
            indices = sharding.addressable_devices_indices_map(tuple(shape)).values()
            num_shards = len({bounds_of(index, tuple(shape)) for index in indices})
            num_elements = num_shards * math.prod(sharding.shard_shape(tuple(shape)))
        itemsize = value.dtype.itemsize if on_host else _jax.itemsize(dtype)
        num_bytes += num_elements * itemsize
    return num_bytes


def named_leaves(tree: PyTree) -> list[tuple[str, tuple[str, ...], Any]]:
    """Returns the path, the keys and the value of every leaf.

    Raises:
        CheckpointError: If two leaves have one path, or keys cannot be told apart.
    """
    try:
        flat = _paths.flatten(tree, whole=True).leaves
    except MeshLayoutError as error:
        raise CheckpointError(f"the state cannot be saved: {error}") from None
    if _paths.holds_modules(tree):
        tree = nnx.state(tree)
    entries, _ = jax.tree_util.tree_flatten_with_path(tree)
    if len(entries) != len(flat):
        # Paths take a box as one leaf, and JAX goes into it where it holds a tree.
        return [(leaf.path, tuple(leaf.path.split("/")), leaf.value) for leaf in flat]
    return [
        (leaf.path, _parts(leaf.path, keys), leaf.value)
        for leaf, (keys, _) in zip(flat, entries, strict=True)
    ]


def _parts(path: str, keys: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns the keys of a path, where a slash may be part of a key.

    JAX's key of a box, such as `.value`, is not part of a path: with or without it, one
    of the two spellings is the path.
    """
    names = tuple(map(_paths.key_name, keys))
    for stop in (len(names), len(names) - 1):
        if "/".join(names[:stop]) == path:
            return names[:stop]
    return tuple(path.split("/"))


def _saved(path: str, parts: tuple[str, ...], value: Leaf) -> tuple[SavedLeaf, Any]:
    """Returns the manifest's entry of a leaf, and the array to store."""
    kind = type(value).__name__
    # By exact type: a subclass, such as an IntEnum, would come back as another type.
    if PYTHON_TYPES.get(kind) is type(value):
        plain = [value.real, value.imag] if isinstance(value, complex) else value
        leaf = SavedLeaf(
            path=path, parts=parts, kind="python", shape=(), dtype=kind, value=plain
        )
        return leaf, None
    if (
        not isinstance(value, (jax.Array, np.ndarray, np.generic))
        or isinstance(value, Tracer)
        or not _jax.is_array_dtype(value.dtype)
    ):
        raise CheckpointError(_unknown(path, value))
    if isinstance(value, np.ma.MaskedArray):
        msg = (
            f"{path}: the mask of a masked array would be lost. Save x.filled(value), "
            "and the mask as a separate array."
        )
        raise CheckpointError(msg)
    _check_dtype(path, value.dtype)
    is_key = _jax.is_extended(value.dtype)
    itemsize = _jax.itemsize(value.dtype) if is_key else np.dtype(value.dtype).itemsize
    leaf = SavedLeaf(
        path=path,
        parts=parts,
        kind="array" if isinstance(value, jax.Array) else "numpy",
        shape=tuple(value.shape),
        dtype=str(value.dtype),
        nbytes=value.size * itemsize,
    )
    if not isinstance(value, jax.Array):
        return leaf, np.array(value)  # the caller may write to the original
    if value.is_deleted():
        msg = (
            f"{path}: the array is deleted; it was donated, to a step or a relayout. "
            "Save what the step returned."
        )
        raise CheckpointError(msg)
    if isinstance(value.sharding, NamedSharding):
        layout = Layout.of(value)
        leaf = replace(leaf, layout=str(layout), mesh=repr(layout.mesh))
    if is_key:
        leaf = replace(leaf, kind="key", key_impl=_jax.key_impl(value.dtype))
        value = jax.random.key_data(value)
    value = _jax.with_shards(value)
    if jax.process_count() > 1 and value.is_fully_addressable:
        # Each process has an array of its own: that of process 0 is saved, as of NumPy.
        value = np.array(value)
    return leaf, value


def _check_dtype(path: str, dtype: DType) -> None:
    """Raises if files cannot hold a NumPy dtype."""
    if _jax.is_extended(dtype):
        return
    if dtype.name in ("int2", "uint2") and jax.__version_info__ < (0, 8):
        msg = (
            f"{path}: jax {jax.__version__} scrambles the bits of {dtype} on devices; "
            "jax 0.8 does not. Cast it to int8."
        )
        raise CheckpointError(msg)
    if not dtype.isnative:
        msg = (
            f"{path}: its byte order is that of another machine ({dtype.str}). Save "
            "x.astype(x.dtype.newbyteorder('='))."
        )
        raise CheckpointError(msg)
    if dtype in (np.dtype(np.longdouble), np.dtype(np.clongdouble)) and (
        dtype not in (np.dtype(np.float64), np.dtype(np.complex128))
    ):
        msg = (
            f"{path}: {dtype} differs between machines and cannot be saved. Cast it to "
            "float64 or complex128."
        )
        raise CheckpointError(msg)


PYTHON_TYPES = {"bool": bool, "int": int, "float": float, "complex": complex}


def _unknown(path: str, value: Leaf) -> str:
    where = path or "the state"
    if isinstance(value, jax.ShapeDtypeStruct):
        return (
            f"{where}: shapes without values, which ml.describe and jax.eval_shape "
            "return, cannot be saved. Save the state itself."
        )
    return (
        f"{where}: {_checks.shown(value)} cannot be saved. A state holds arrays and "
        "numbers; keep anything else in metadata=, or outside the tree."
    )


def _as_bytes(x: np.ndarray | jax.Array) -> Any:
    """Returns an array of a dtype that the files cannot hold, one byte per element."""
    if isinstance(x, np.ndarray):
        return x.view(np.uint8)
    # On the devices, shard by shard: the host would have to gather the array.
    return jax.jit(bits_to_bytes, out_shardings=x.sharding)(x)


def bits_to_bytes(x: jax.Array) -> jax.Array:
    """Returns the bits of every element as a byte, inside jit."""
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return x.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(x, jnp.uint8)
