"""What a step holds of a state: arrays by path, and JSON that says what each one was.

JSON knows arrays of JAX and NumPy, PRNG keys and Python numbers apart. So a restore
compares everything with the leaves of `like` before any array is read.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshlayout import _checks, _jax, _paths
from meshlayout._annotations import Leaf, PyTree
from meshlayout.checkpoint.difference import ArraySpec, key_dtype
from meshlayout.errors import CheckpointError, MeshLayoutError
from meshlayout.layout import Layout


_NUMBERS = {"bool": bool, "int": int, "float": float, "complex": complex}


def saved_leaves(state: PyTree) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns what JSON holds of each leaf, and the arrays to write by path.

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
    leaves: list[dict[str, Any]] = []
    arrays: dict[str, Any] = {}
    for path, value, _ in flat:
        leaf, array = _saved(path or "the state", value)
        leaves.append({"path": path, **leaf})
        if array is not None and array.size:  # Orbax refuses arrays without elements
            arrays[path] = array
    return leaves, arrays


def _saved(path: str, value: Leaf) -> tuple[dict[str, Any], Any]:
    """Returns what JSON holds of a leaf, and the array to write."""
    kind = type(value).__name__
    # By exact type: a subclass, such as an IntEnum, would come back as another type.
    if _NUMBERS.get(kind) is type(value):
        plain = [value.real, value.imag] if isinstance(value, complex) else value
        leaf = {"kind": "python", "shape": (), "dtype": kind, "value": plain}
        array = np.asarray(value)  # for who loads without us; JSON has all of it
        return leaf, None if array.dtype == object else array
    problem = ""
    is_array = isinstance(value, (jax.Array, np.ndarray, np.generic))
    if isinstance(value, jax.ShapeDtypeStruct):
        problem = "a shape without values cannot be saved. Save the state itself."
    elif not is_array or not _jax.is_array_dtype(value.dtype):
        problem = (
            f"{_checks.shown(value)} cannot be saved. A state holds arrays and "
            "numbers; keep anything else in metadata=, or outside the tree."
        )
    elif isinstance(value, np.ma.MaskedArray):
        problem = (
            "the mask of a masked array would be lost. Save it as a separate array."
        )
    elif isinstance(value, jax.Array) and value.is_deleted():
        problem = "the array was donated, and is deleted. Save what the step returned."
    if problem:
        raise CheckpointError(f"{path}: {problem}")
    if not isinstance(value, jax.Array):
        array = np.array(
            value, value.dtype.newbyteorder("=")
        )  # the caller's may change
        return {"kind": "numpy", "shape": array.shape, "dtype": str(array.dtype)}, array
    leaf = {"kind": "array", "shape": value.shape, "dtype": str(value.dtype)}
    if isinstance(value.sharding, NamedSharding):
        layout = Layout.of(value)
        leaf |= {"layout": str(layout), "mesh": repr(layout.mesh)}
    if _jax.is_extended(value.dtype):
        leaf["impl"] = _jax.key_impl(value.dtype)
        value = jax.random.key_data(value)
    if jax.process_count() > 1 and value.is_fully_addressable:
        # Each process has an array of its own: that of process 0 is saved, as of NumPy.
        return leaf, np.array(value)
    return leaf, _jax.with_shards(value)


def specs_of(leaves: Iterable[Mapping[str, Any]]) -> list[ArraySpec]:
    """Returns the saved arrays and numbers, from what JSON holds of them."""
    specs: list[ArraySpec] = []
    for leaf in leaves:
        kind, dtype = leaf["kind"], leaf["dtype"]
        if kind == "python":
            dtype = _NUMBERS[dtype]
        else:
            dtype = key_dtype(leaf["impl"]) if "impl" in leaf else np.dtype(dtype)
        shape = tuple(leaf["shape"])
        specs.append(ArraySpec(leaf["path"], shape, dtype, kind == "numpy"))
    return specs


def spec_of(path: str, value: Any) -> ArraySpec | None:
    """Returns the spec of an array or a Python number; None for anything else."""
    if not hasattr(value, "dtype"):
        kinds = (kind for kind in _NUMBERS.values() if isinstance(value, kind))
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
