"""Trees as named arrays: a state flattened for a save, and the leaves of one to build.

A saved leaf is named by the keys of its path. JSON holds them with what it was: an
array of JAX or NumPy, PRNG keys, a Python number. So a restore compares everything with
the leaves of `like` before any array is read.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from meshlayout import _checks, _jax, _paths
from meshlayout._annotations import Leaf, PyTree
from meshlayout._optional import require
from meshlayout.checkpoint.difference import ArraySpec, is_number, key_dtype
from meshlayout.errors import CheckpointError, MeshLayoutError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap
from meshlayout.state.create import StateDescription, eager_sharding_off


Keys: TypeAlias = tuple[str, ...]
Rebuild: TypeAlias = Callable[[Sequence[Any]], PyTree]

_NUMBERS = {"bool": bool, "int": int, "float": float, "complex": complex}

# Deeper trees make JAX exceed Python's recursion limit, from which the process does
# not recover. `test_restore_bad_inputs` has a name of 1,500 keys.
_MOST_KEYS = 100


# Saving.


def saved_leaves(state: PyTree) -> tuple[list[dict[str, Any]], dict[Keys, Any]]:
    """Returns what JSON holds of each leaf, and the arrays to write by their keys.

    PRNG keys are written as their words, and NumPy arrays are copies.
    """
    if _jax.is_tracing():
        msg = "save was called inside a function that JAX transforms. Call it outside."
        raise CheckpointError(msg)
    try:
        flat = _paths.flatten(state, whole=True).leaves
    except MeshLayoutError as error:
        raise CheckpointError(f"the state cannot be saved: {error}") from None
    if not flat:
        _checks.has_arrays("state", state, where="save", error=CheckpointError)
    tree = nnx.state(state) if _paths.holds_modules(state) else state
    entries = jax.tree_util.tree_leaves_with_path(tree)
    # Paths take a box as one leaf, and JAX goes into it where it holds a tree.
    named = [names for names, _ in entries] if len(entries) == len(flat) else None
    leaves: list[dict[str, Any]] = []
    arrays: dict[Keys, Any] = {}
    for number, (path, value, _) in enumerate(flat):
        leaf, array = _saved(path or "the state", value)
        keys = _keys(path, named[number] if named else ())
        leaves.append({"keys": keys, **leaf})
        if array is not None and array.size:  # Orbax refuses arrays without elements
            arrays[keys] = array
    return leaves, arrays


def specs_of(leaves: Iterable[Mapping[str, Any]]) -> list[ArraySpec]:
    """Returns the saved arrays and numbers, from what JSON holds of them."""
    specs: list[ArraySpec] = []
    for leaf in leaves:
        kind, dtype = leaf["kind"], leaf["dtype"]
        if kind == "python":
            dtype = _NUMBERS[dtype]
        else:
            dtype = key_dtype(leaf["impl"]) if "impl" in leaf else np.dtype(dtype)
        keys, shape = tuple(leaf["keys"]), tuple(leaf["shape"])
        is_numpy = kind == "numpy"
        specs.append(ArraySpec(_path(keys), shape, dtype, is_numpy, None, keys))
    return specs


def _path(keys: Iterable[str]) -> str:
    return "/".join(key for key in keys if key)


def _keys(path: str, names: Sequence[Any]) -> Keys:
    """Returns the keys of a path, where a slash may be part of a key."""
    keys = tuple(map(_paths.key_name, names))
    # JAX's key of a box, such as `.value`, is not part of a path.
    fitting = (some for some in (keys, keys[:-1]) if _path(some) == path)
    return next(fitting, tuple(path.split("/")))


def _saved(path: str, value: Leaf) -> tuple[dict[str, Any], Any]:
    """Returns what JSON holds of a leaf, and the array to write."""
    kind = type(value).__name__
    # By exact type: a subclass, such as an IntEnum, would come back as another type.
    if _NUMBERS.get(kind) is type(value):
        plain = [value.real, value.imag] if isinstance(value, complex) else value
        leaf = {"kind": "python", "shape": (), "dtype": kind, "value": plain}
        array = np.asarray(value)  # for who loads without us; JSON has all of it
        return leaf, None if array.dtype == object else array
    problem = _problem(value)
    if problem:
        raise CheckpointError(f"{path}: {problem}")
    leaf = {"kind": "numpy", "shape": value.shape, "dtype": str(value.dtype)}
    if not isinstance(value, jax.Array):
        return leaf, np.array(value)  # the caller may write to the original
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


def _problem(value: Leaf) -> str:
    """Returns why a leaf cannot be saved, and the way out; empty if it can."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return "a shape without values cannot be saved. Save the state itself."
    is_array = isinstance(value, (jax.Array, np.ndarray, np.generic))
    if not is_array or not _jax.is_array_dtype(value.dtype):
        return (
            f"{_checks.shown(value)} cannot be saved. A state holds arrays and "
            "numbers; keep anything else in metadata=, or outside the tree."
        )
    if isinstance(value, np.ma.MaskedArray):
        return "the mask of a masked array would be lost. Save it as a separate array."
    if isinstance(value, jax.Array) and value.is_deleted():
        return "the array was donated, and is deleted. Save what the step returned."
    dtype = value.dtype
    if not _jax.is_extended(dtype):
        library = require("tensorstore", extra="checkpoint", purpose="Checkpointing")
        # JAX 0.7 scrambles the bits of int2 on devices.
        is_int2 = dtype.name == "int2" and jax.__version_info__ < (0, 8)
        is_known = dtype.char not in "gG" and hasattr(library, dtype.name)
        if not dtype.isnative or not is_known or is_int2:
            return f"files cannot hold {dtype.str}. Cast it, for example to float32."
    return ""


def replica_sums(trees: Mapping[str, Mapping[Keys, Any]]) -> str:
    """Returns a text that tells apart states whose replicated leaves differ.

    Each process takes one copy of every array that all devices hold, or of its own; one
    program sums their bits, and nothing but the sum comes to the host.
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


@jax.jit
def _sum_of_bits(arrays: Sequence[jax.Array]) -> jax.Array:
    total = jnp.uint32(0)
    for index, array in enumerate(arrays):
        is_complex = jnp.iscomplexobj(array)
        for x in (array.real, array.imag) if is_complex else (array,):
            if x.dtype != bool:
                info = jnp.iinfo if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo
                bits = min(32, int(info(x.dtype).bits))
                x = jax.lax.bitcast_convert_type(x, f"uint{bits}")
            words = x.astype(jnp.uint32).ravel()
            # Odd factors and a shift: a change of any one word changes the sum.
            words += jax.lax.iota(jnp.uint32, words.size)
            words *= jnp.uint32(2654435761)
            total += jnp.uint32(2 * index + 1) * jnp.sum(words ^ (words >> 15))
    return total


def nested(items: Iterable[tuple[Sequence[str], Any]]) -> PyTree:
    """Returns nested dicts of values by their keys; a value without keys itself."""
    tree: dict[str, Any] = {}
    for keys, value in items:
        if not keys:
            return value
        *parents, last = keys
        node: Any = tree
        for key in parents[:_MOST_KEYS]:
            node = node.setdefault(key, {}) if isinstance(node, dict) else None
        if len(keys) > _MOST_KEYS or not isinstance(node, dict) or last in node:
            msg = (
                f"the name {'/'.join(keys)[:80]!r} has more than {_MOST_KEYS} keys, or "
                "is the beginning of another name. Change rename=."
            )
            raise CheckpointError(msg)
        node[last] = value
    return tree


# Restoring.


@dataclass(frozen=True)
class Target:
    """A leaf of the state to build, and the saved array that it is restored from.

    Attributes:
        spec: Its path, shape and dtype.
        value: The leaf in the state to restore, concrete or abstract.
        sharding: The sharding of the result; None for JAX's default device.
        moves: Whether a layout map set it, so that `value` may be elsewhere.
        saved: The saved array; None to keep `value`.
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
        is_numpy = isinstance(self.value, (np.ndarray, np.generic)) and not self.moves
        return is_numpy or is_number(self.spec.dtype)

    @property
    def words_sharding(self) -> Sharding | None:
        """The sharding of what is placed, keys as their words; None for the host."""
        sharding = None if self.on_host else self.sharding
        if isinstance(sharding, NamedSharding) and self.spec.is_key:
            missing = len(self.spec.shape) + 1 - len(sharding.spec)
            spec = PartitionSpec(*sharding.spec, *[None] * missing)
            kind = sharding.memory_kind
            return NamedSharding(sharding.mesh, spec, memory_kind=kind)
        return sharding


def targets_of(
    like: PyTree, layouts: LayoutMap | None, *, whole: bool = False
) -> tuple[list[Target], Rebuild]:
    """Returns the arrays and numbers of a state to restore, and how to rebuild it.

    With `whole`, paths keep the `params` at the root of Linen variables.
    """
    if layouts is not None and not isinstance(layouts, LayoutMap):
        msg = f"layouts= must be a LayoutMap, got {_checks.shown(layouts)}."
        raise CheckpointError(msg)
    if _jax.is_tracing():
        raise CheckpointError("like= is inside jit. Restore outside of it.")
    tree = like.abstract if isinstance(like, StateDescription) else like
    graphdef = None
    if _paths.holds_modules(tree):
        with eager_sharding_off():
            graphdef, tree = nnx.split(tree)
    values, treedef = jax.tree.flatten(tree)
    named = _paths.flatten(tree, whole=whole).leaves
    # By position among all leaves: those that are not arrays are kept.
    specs = {i: _spec(leaf.path, leaf.value) for i, leaf in enumerate(named)}
    specs = {i: spec for i, spec in specs.items() if spec is not None}
    if not specs:
        msg = (
            f"like= holds no arrays: {_checks.shown(like)}. Give the state to restore, "
            "or its shapes from ml.describe or jax.eval_shape."
        )
        raise CheckpointError(msg)
    shardings = [_own_sharding(values[i]) for i in specs]
    if layouts is not None:
        resolved = layouts.resolve(tree)
        layouts._check_used(resolved)
        shardings = [x.sharding for x in jax.tree.leaves(resolved.layouts)]
    targets = {
        i: Target(spec, values[i], sharding, layouts is not None)
        for (i, spec), sharding in zip(specs.items(), shardings, strict=True)
    }

    def rebuild(new_values: Sequence[Any]) -> PyTree:
        filled = dict(enumerate(values)) | dict(zip(targets, new_values, strict=True))
        rebuilt = treedef.unflatten(filled.values())
        if graphdef is None:
            return rebuilt
        with eager_sharding_off():
            return nnx.merge(graphdef, rebuilt)

    return list(targets.values()), rebuild


def _spec(path: str, value: Leaf) -> ArraySpec | None:
    """Returns the spec of an array or number; None for other leaves, which stay."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        is_extended = _jax.is_extended(value.dtype)
        dtype = value.dtype if is_extended else np.dtype(value.dtype).newbyteorder("=")
        return ArraySpec(path, tuple(value.shape), dtype)
    kind = next((x for x in _NUMBERS.values() if isinstance(value, x)), None)
    return None if kind is None else ArraySpec(path, (), kind)


def _own_sharding(value: Leaf) -> Sharding | None:
    # An array that is not committed to its device must not become so: JAX would then
    # refuse to combine it with arrays on other devices.
    is_free = isinstance(value, jax.Array) and not _jax.is_committed(value)
    return None if is_free else getattr(value, "sharding", None)
