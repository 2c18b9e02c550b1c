"""Trees as named arrays: a state flattened for a save, and the leaves of one to build.

A saved leaf is named by its keys, which JSON holds beside the arrays: what it was (an
array of JAX or NumPy, PRNG keys, a Python number), its shape, dtype and layout. A
restore compares these with the leaves of `like` before any array is read. Orbax sees
nested dicts of the keys, so that anyone can load a step without this package.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from meshlayout import _checks, _jax, _paths
from meshlayout._annotations import DType, Leaf, PyTree
from meshlayout._optional import require
from meshlayout.checkpoint.difference import ArraySpec, is_number, key_dtype
from meshlayout.errors import CheckpointError, MeshLayoutError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap
from meshlayout.state.create import StateDescription, eager_sharding_off


Keys: TypeAlias = tuple[str, ...]
"""The keys of a leaf; they may be empty strings or contain slashes."""

Rebuild: TypeAlias = Callable[[Sequence[Any]], PyTree]
"""Builds a state from the new values of its arrays and numbers."""

_NUMBERS = {"bool": bool, "int": int, "float": float, "complex": complex}

# Deeper trees make JAX exceed Python's recursion limit, from which the process does
# not recover. `test_restore_bad_inputs` has a name of 1,500 keys.
MOST_KEYS = 100


# Saving.


def saved_leaves(state: PyTree) -> tuple[list[dict[str, Any]], dict[Keys, Any]]:
    """Flattens a state for a save.

    Returns:
        For each leaf what JSON holds, and the arrays to write by their keys: PRNG keys
        as their words, NumPy arrays as copies. Arrays without elements are not written.

    Raises:
        CheckpointError: If it holds no array or number, or anything that is neither.
    """
    if _jax.is_tracing():
        msg = (
            "save was called inside a function that JAX transforms, where arrays have "
            "no values. Call it outside, with what the function returned."
        )
        raise CheckpointError(msg)
    leaves: list[dict[str, Any]] = []
    arrays: dict[Keys, Any] = {}
    for path, keys, value in _named_leaves(state):
        leaf, array = _saved(path, value)
        leaves.append({"keys": keys, **leaf})
        if array is not None and array.size:
            arrays[keys] = array
    if not leaves:
        _checks.has_arrays("state", state, where="save", error=CheckpointError)
    return leaves, arrays


def path_of(keys: Iterable[str]) -> str:
    """Returns the path of a leaf, as in layout maps, which leave out empty keys."""
    return "/".join(key for key in keys if key)


def specs_of(leaves: Iterable[Mapping[str, Any]]) -> list[ArraySpec]:
    """Returns the saved arrays and numbers, from what JSON holds of them."""
    specs: list[ArraySpec] = []
    for leaf in leaves:
        keys, kind = tuple(leaf["keys"]), leaf["kind"]
        if kind == "python":
            dtype = _NUMBERS[leaf["dtype"]]
        elif "impl" in leaf:
            dtype = key_dtype(leaf["impl"])
        else:
            dtype = np.dtype(leaf["dtype"])
        shape = tuple(leaf["shape"])
        specs.append(ArraySpec(path_of(keys), keys, shape, dtype, kind == "numpy"))
    return specs


def number_of(leaf: Mapping[str, Any]) -> Any:
    """Returns a saved Python number, from what JSON holds of it."""
    value = leaf["value"]
    return complex(*value) if leaf["dtype"] == "complex" else value


def _named_leaves(tree: PyTree) -> list[tuple[str, Keys, Any]]:
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
        (leaf.path, _keys(leaf.path, names), leaf.value)
        for leaf, (names, _) in zip(flat, entries, strict=True)
    ]


def _keys(path: str, names: tuple[Any, ...]) -> Keys:
    """Returns the keys of a path, where a slash may be part of a key.

    JAX's key of a box, such as `.value`, is not part of a path: with or without it, one
    of the two spellings is the path.
    """
    keys = tuple(map(_paths.key_name, names))
    for stop in (len(keys), len(keys) - 1):
        if path_of(keys[:stop]) == path:
            return keys[:stop]
    return tuple(path.split("/"))


def _saved(path: str, value: Leaf) -> tuple[dict[str, Any], Any]:
    """Returns what JSON holds of a leaf, and the array to write."""
    kind = type(value).__name__
    # By exact type: a subclass, such as an IntEnum, would come back as another type.
    if _NUMBERS.get(kind) is type(value):
        plain = [value.real, value.imag] if isinstance(value, complex) else value
        leaf = {"kind": "python", "shape": (), "dtype": kind, "value": plain}
        array = np.asarray(value)  # for who loads without us; JSON has all of it
        return leaf, None if array.dtype == object else array
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
    leaf = {"kind": "numpy", "shape": value.shape, "dtype": str(value.dtype)}
    if not isinstance(value, jax.Array):
        return leaf, np.array(value)  # the caller may write to the original
    if value.is_deleted():
        msg = (
            f"{path}: the array is deleted; it was donated, to a step or a relayout. "
            "Save what the step returned."
        )
        raise CheckpointError(msg)
    leaf["kind"] = "array"
    if isinstance(value.sharding, NamedSharding):
        layout = Layout.of(value)
        leaf |= {"layout": str(layout), "mesh": repr(layout.mesh)}
    if _jax.is_extended(value.dtype):
        leaf["impl"] = _jax.key_impl(value.dtype)
        value = jax.random.key_data(value)
    value = _jax.with_shards(value)
    if jax.process_count() > 1 and value.is_fully_addressable:
        # Each process has an array of its own: that of process 0 is saved, as of NumPy.
        value = np.array(value)
    return leaf, value


def _check_dtype(path: str, dtype: DType) -> None:
    """Raises if files cannot hold a dtype."""
    if _jax.is_extended(dtype):
        return
    if not dtype.isnative:
        msg = (
            f"{path}: its byte order is that of another machine ({dtype.str}). Save "
            "x.astype(x.dtype.newbyteorder('='))."
        )
        raise CheckpointError(msg)
    tensorstore = require("tensorstore", extra="checkpoint", purpose="Checkpointing")
    if dtype.char in "gG" or not hasattr(tensorstore, dtype.name):
        msg = (
            f"{path}: Orbax's files cannot hold {dtype}. Cast it to a dtype that they "
            "hold, such as int8, uint8, float32 or float64."
        )
        raise CheckpointError(msg)
    if dtype.name == "int2" and jax.__version_info__ < (0, 8):
        msg = (
            f"{path}: jax {jax.__version__} scrambles the bits of {dtype} on devices; "
            "jax 0.8 does not. Cast it to int8."
        )
        raise CheckpointError(msg)


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


def nested(items: Iterable[tuple[Sequence[str], Any]]) -> PyTree:
    """Returns nested dicts of values by their keys; a value without keys itself.

    Raises:
        CheckpointError: If one name contains another, or has too many keys.
    """
    tree: dict[str, Any] = {}
    for keys, value in items:
        if not keys:
            return value
        if len(keys) > MOST_KEYS:
            msg = (
                f"{'/'.join(keys)[:40]}...: the name has {len(keys):,} keys, and dicts "
                f"may be nested {MOST_KEYS} deep. Shorten the name with rename=, or "
                "give another separator=."
            )
            raise CheckpointError(msg)
        *parents, last = keys
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or last in node:
            msg = (
                f"the name {'/'.join(keys)!r} and that of another array contain each "
                "other. Change rename= so that no name is the beginning of another."
            )
            raise CheckpointError(msg)
        node[last] = value
    return tree


# What the processes must have alike.


def replica_sums(trees: Mapping[str, Mapping[Keys, Any]]) -> str:
    """Returns a text that tells apart states whose replicated leaves differ.

    Each process takes one copy of every array that all devices hold, or of its own; one
    program sums their bits, and nothing but the sum comes to the host.

    Args:
        trees: The arrays to write.
    """
    if jax.process_count() == 1:
        return ""
    on_host, copies = 0, {}
    for array in (x for arrays in trees.values() for x in arrays.values()):
        if not isinstance(array, jax.Array):
            on_host = zlib.crc32(array.tobytes(), on_host)
        elif array.sharding.is_fully_replicated:
            copy = array.addressable_data(0)
            copies.setdefault(copy.device, []).append(copy)
    sums = [on_host, *(int(_sum_of_bits(group)) for group in copies.values())]
    return "-".join(f"{number:x}" for number in sums)


def _num_bits(dtype: DType) -> int:
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    return int((jnp.iinfo if is_integer else jnp.finfo)(dtype).bits)


@jax.jit
def _sum_of_bits(arrays: Sequence[jax.Array]) -> jax.Array:
    total = jnp.uint32(0)
    parts = [
        part
        for x in arrays
        for part in ((x.real, x.imag) if jnp.iscomplexobj(x) else (x,))
    ]
    for index, x in enumerate(parts):
        if x.dtype != bool:
            width = min(32, _num_bits(x.dtype))
            x = jax.lax.bitcast_convert_type(x, f"uint{width}")
        words = x.astype(jnp.uint32).ravel()
        # Odd factors and a shift: a change of any one word changes the sum.
        words = (words + jax.lax.iota(jnp.uint32, words.size)) * jnp.uint32(2654435761)
        total += jnp.uint32(2 * index + 1) * jnp.sum(words ^ (words >> 15))
    return total


# Restoring.


@dataclass(frozen=True)
class Target:
    """A leaf of the state to build, and the saved array that it is restored from.

    Attributes:
        spec: Its path, shape and dtype.
        value: The leaf in the state to restore, concrete or abstract.
        sharding: The sharding of the result; None for JAX's default device.
        moves: Whether a layout map set it, so that `value` may be elsewhere.
        saved: The saved array, its dims in the order of the target; None to keep
            `value`.
        dtype: The dtype of the result on the host.
    """

    spec: ArraySpec
    value: Any = None
    sharding: Sharding | None = None
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
    def words_sharding(self) -> Sharding | None:
        """The sharding of what is placed; None for the host and the default device."""
        sharding = None if self.on_host else self.sharding
        if isinstance(sharding, NamedSharding) and self.spec.is_key:
            # Keys are placed as their words, in one more dim, which is not sharded.
            rank = len(self.spec.shape)
            spec = [*sharding.spec, *[None] * (rank + 1 - len(sharding.spec))]
            kind = sharding.memory_kind
            return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=kind)
        return sharding


def targets_of(
    like: PyTree, layouts: LayoutMap | None, *, whole: bool = False
) -> tuple[list[Target], Rebuild]:
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
    targets: dict[int, Target] = {}
    for position, (leaf, value) in enumerate(zip(named, values, strict=True)):
        spec = _spec(leaf.path, value)
        if spec is not None:
            targets[position] = Target(spec, value, _own_sharding(value))
    if not targets:
        msg = (
            f"like= holds no arrays: {like!r} of type {type(like).__name__}. Give the "
            "state to restore, or its shapes from ml.describe or jax.eval_shape."
        )
        raise CheckpointError(msg)
    if layouts is not None:
        resolved = layouts.resolve(tree)
        layouts._check_used(resolved)
        pairs = zip(targets.items(), jax.tree.leaves(resolved.layouts), strict=True)
        targets = {
            position: replace(target, sharding=layout.sharding, moves=True)
            for (position, target), layout in pairs
        }

    def rebuild(new_values: Sequence[Any]) -> PyTree:
        rebuilt = list(values)
        for position, value in zip(targets, new_values, strict=True):
            rebuilt[position] = value
        if graphdef is None:
            return treedef.unflatten(rebuilt)
        with eager_sharding_off():
            return nnx.merge(graphdef, treedef.unflatten(rebuilt))

    return list(targets.values()), rebuild


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
    for kind in _NUMBERS.values():
        if isinstance(value, kind):
            return ArraySpec(path, (), (), kind)
    return None


def _own_sharding(value: Leaf) -> Sharding | None:
    # An array that is not committed to its device must not become so: JAX would then
    # refuse to combine it with arrays on other devices.
    if isinstance(value, jax.Array) and not _jax.is_committed(value):
        return None
    return getattr(value, "sharding", None)
