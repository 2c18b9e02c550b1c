"""Elements of sources as rows: examples stacked, batches checked.

An element is whatever a user's source yields: an example, or a batch of them, on the
host or already on the mesh. Here it becomes a tree of NumPy arrays whose first dim
counts the rows, or is recognized as a batch that passes through unchanged.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from meshlayout import _jax
from meshlayout._annotations import Batch, Leaf, PyTree
from meshlayout.data.examples import (
    LeafSpec,
    as_array,
    empty,
    leaf_path,
    leaf_text,
    named_leaves,
    structure_error,
)
from meshlayout.errors import DataError
from meshlayout.layout import Layout


def looks_batched(element: PyTree) -> bool:
    """Returns whether an element could be a batch: all arrays share their first dim."""
    sizes = set()
    for leaf in jax.tree.leaves(element):
        is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        shape = np.shape(leaf) if is_array else ()
        sizes.add(shape[0] if shape else None)
    return len(sizes) == 1 and None not in sizes


def is_placed(batch: Batch) -> bool:
    """Returns whether a user has placed all arrays of a batch on devices.

    JAX calls such arrays committed; others, as `jnp.ones` returns them, are on the
    default device by chance, and are treated like NumPy arrays.
    """
    leaves = jax.tree.leaves(batch)
    return bool(leaves) and all(map(_jax.is_committed, leaves))


def check_on_mesh(
    batch: PyTree, num_rows: int, layout: Layout, global_batch_size: int
) -> None:
    """Raises DataError unless a batch of the source can pass through unchanged."""
    devices = set(layout.mesh.devices.flat)
    shardings = map(_jax.sharding_of, jax.tree.leaves(batch))
    if not all(s is not None and s.device_set == devices for s in shardings):
        msg = (
            f"the source yields arrays on devices other than those of {layout.mesh!r}. "
            "Place them on this mesh, or yield NumPy arrays."
        )
        raise DataError(msg)
    if num_rows != global_batch_size:
        msg = (
            f"the source yields batches of {num_rows} rows that are on the mesh "
            f"already, and global_batch_size={global_batch_size}. They pass through "
            f"unchanged: give global_batch_size={num_rows}."
        )
        raise DataError(msg)


def as_batch(batch: Batch) -> tuple[PyTree, int]:
    """Returns a user's batch as a tree of NumPy arrays, and the number of its rows.

    Raises:
        DataError: If its arrays have no batch dim, or differ in it.
    """
    entries, treedef = jax.tree_util.tree_flatten_with_path(batch, is_leaf=_is_strings)
    leaves = [
        stack(list(leaf)) if _is_strings(leaf) else as_array(leaf_path(keys), leaf)
        for keys, leaf in entries
    ]
    sizes = {leaf.shape[0] if leaf.ndim else -1 for leaf in leaves}
    if len(sizes) != 1 or -1 in sizes:
        shapes = ", ".join(str(leaf.shape) for leaf in leaves)
        msg = (
            f"the arrays of a batch have the shapes {shapes or 'of no array'}, which "
            "have no batch dim in common. If the source yields single examples, say "
            "batched=False."
        )
        raise DataError(msg)
    return treedef.unflatten(leaves), sizes.pop()


def _is_strings(node: PyTree) -> bool:
    """Returns whether a list is a column of strings rather than a list of arrays."""
    if type(node) not in (list, tuple) or not node:
        return False
    return all(isinstance(item, (str, bytes)) for item in node)


def stack(examples: Sequence[PyTree], dtypes: Mapping[str, Any] | None = None) -> Any:
    """Stacks examples of one structure.

    Args:
        examples: At least one tree of arrays, numbers, strings or images.
        dtypes: By path, the dtypes for leaves that are Python numbers.

    Returns:
        A tree of arrays whose first dim counts the examples. Strings become an array
        of objects.

    Raises:
        DataError: If examples differ in structure, or a leaf in shape or dtype.

    Example:
        >>> stack([{"x": np.ones(2), "y": 1}, {"x": np.zeros(2), "y": 2}])["y"]
        array([1, 2])
    """
    named, treedef = named_leaves(examples[0])
    paths = [path for path, _ in named]
    try:
        flat = [treedef.flatten_up_to(example) for example in examples]
    except ValueError:
        other = next(e for e in examples if jax.tree.structure(e) != treedef)
        raise structure_error(other, paths) from None
    return treedef.unflatten(
        _stacked(path, column, (dtypes or {}).get(path))
        for path, column in zip(paths, zip(*flat, strict=True), strict=True)
    )


def _stacked(
    path: str, column: Sequence[Leaf], dtype: npt.DTypeLike | None
) -> np.ndarray:
    """Returns one leaf of all examples, stacked; the common kinds take a fast way."""
    first = column[0]
    if isinstance(first, (str, bytes)):
        strings = np.empty(len(column), object)
        strings[:] = column
        return strings
    kinds = set(map(type, column))
    is_numbers = len(kinds) == 1 or dtype is not None
    if is_numbers and isinstance(first, (bool, int, float, complex)):
        numbers = np.asarray(column, dtype)
        # np.float64 is a Python float as well, but has a dtype of its own.
        own: Any = getattr(first, "dtype", numbers.dtype)
        return numbers.astype(own, copy=False)
    if len(kinds) == 1 and isinstance(first, np.generic):
        return np.array(column, first.dtype)
    if kinds == {np.ndarray} and first.ndim:
        shape: Any = first.shape
        if all(leaf.shape == shape and leaf.dtype == first.dtype for leaf in column):
            # np.stack would first make a view with one more dim of every example.
            out = empty((len(column), *shape), first.dtype)
            np.concatenate(column, out=out.reshape(len(column) * shape[0], *shape[1:]))
            return out
    arrays = [leaf_array(path, leaf) for leaf in column]
    spec = LeafSpec(path, arrays[0].dtype, arrays[0].shape, None)
    for array in arrays:
        spec.check(array.shape, array)
    return np.stack(arrays)


def leaf_array(path: str, leaf: Leaf) -> np.ndarray:
    """Returns a leaf of an example as an array.

    Raises:
        DataError: If it is a tree, while the first example has a leaf there.
    """
    if not jax.tree_util.all_leaves([leaf]):
        msg = (
            f"{leaf_text(path)} is a {type(leaf).__name__}, and not a tree in the "
            "first example. Give every example the same leaves."
        )
        raise DataError(msg)
    array: Any = leaf if isinstance(leaf, np.generic) else as_array(path, leaf)
    return array  # a NumPy number is stacked as an array without dims is
