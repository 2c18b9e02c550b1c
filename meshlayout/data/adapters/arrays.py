"""Trees of arrays, and sequences of examples, as sources of rows."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from meshlayout import _paths
from meshlayout._annotations import Leaf, PyTree
from meshlayout.data.by_stream import ambiguous
from meshlayout.data.examples import (
    as_array,
    empty,
    is_placed,
    leaf_text,
    looks_batched,
    named_leaves,
    stack,
)
from meshlayout.data.protocols import RandomAccessSource
from meshlayout.errors import DataError


_SINGLE = (bool, int, float, complex, str, bytes, np.generic)


def adapt(obj: Any, *, batched: bool | None) -> RandomAccessSource | None:
    """Returns a tree of arrays or a sequence of examples as a source of rows.

    Args:
        obj: An array, a tree of arrays with a dim for the examples in common, or what
            has `__len__` and `__getitem__`, as a list of examples.
        batched: Whether the elements of a sequence are batches, which is not a source
            of rows; None infers it from the elements.

    Returns:
        None if it is something else.

    Raises:
        DataError: If it may be columns or examples, or its arrays do not fit together.
    """
    if _is_columns(obj):
        if batched is not None and not isinstance(obj, list):
            msg = (
                "a tree of arrays is a source of rows, one per example. Leave out "
                f"batched={batched}, or give a list of the batches."
            )
            raise DataError(msg)
        if batched is None and isinstance(obj, list):
            msg = (
                f"a list of {len(obj)} arrays may be the columns of one dataset, or as "
                "many examples or batches. Give columns as a tuple or dict; say "
                "batched=False for examples, or batched=True for batches."
            )
            raise DataError(msg)
        if batched is None:
            return ArrayRows(obj)
    if batched is True or not _is_sequence(obj):
        return None
    if batched is None and len(obj) and looks_batched(obj[0]):
        if is_placed(obj[0]):
            return None
        raise DataError(ambiguous("the source"))
    return ItemRows(obj)


class ArrayRows:
    """The rows of arrays in memory.

    Args:
        tree: A tree of arrays.

    Raises:
        DataError: If they have no dim for the examples, or differ in it.
    """

    def __init__(self, tree: PyTree) -> None:
        _refuse_lists(tree)
        named, treedef = named_leaves(tree)
        columns = {path: as_array(path, leaf) for path, leaf in named}
        self._tree = treedef.unflatten(columns.values())
        sizes: dict[int, str] = {}
        for path, column in columns.items():
            if not column.ndim:
                msg = (
                    f"{leaf_text(path)} is a single {column.dtype}, without a dim for "
                    "the examples. Give it one row per example, with np.full, or "
                    "leave it out."
                )
                raise DataError(msg)
            sizes.setdefault(column.shape[0], path)
        if len(sizes) > 1:
            (rows, name), (other_rows, other_name), *_ = sizes.items()
            msg = (
                f"{leaf_text(name)} has {rows} rows and {leaf_text(other_name)} "
                f"{other_rows}: the first dim of every array counts the examples."
            )
            raise DataError(msg)
        self._num_rows = next(iter(sizes))

    def __len__(self) -> int:
        return self._num_rows

    def read_rows(self, indices: np.ndarray, epoch: int) -> PyTree:
        """Returns rows, in the order asked for."""
        del epoch
        return jax.tree.map(lambda column: _taken(column, indices), self._tree)


class ItemRows:
    """The examples of an indexable object.

    Args:
        items: What has `__len__` and `__getitem__`.
    """

    def __init__(self, items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def read_rows(self, indices: np.ndarray, epoch: int) -> PyTree:
        """Returns examples, in the order asked for, stacked."""
        del epoch
        return stack([self._items[i] for i in indices.tolist()])


def refuse_batched(what: str, *, batched: bool | None) -> None:
    """Raises DataError for `batched=True` with a source of single examples.

    Args:
        what: Which source.
        batched: What the user said.
    """
    if batched:
        msg = (
            f"{what} gives single examples. Leave out batched=True, or give an "
            "iterable of the batches."
        )
        raise DataError(msg)


def is_table(obj: object) -> bool:
    """Returns whether an object holds columns by name, as a data frame does."""
    return isinstance(obj, Mapping) or callable(getattr(obj, "keys", None))


def _refuse_lists(tree: PyTree) -> None:
    """Raises DataError for a column that is a list of numbers."""
    entries, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, list)
    )
    for keys, leaf in entries:
        if isinstance(leaf, list) and any(isinstance(item, _SINGLE) for item in leaf):
            path = "/".join(map(_paths.key_name, keys))
            msg = (
                f"{leaf_text(path)} is a list of {len(leaf)} items, and lists count as "
                "structure. Make it an array with np.asarray."
            )
            raise DataError(msg)


def _taken(column: np.ndarray, indices: np.ndarray) -> np.ndarray:
    out = empty((len(indices), *column.shape[1:]), column.dtype)
    # With mode="raise", NumPy would gather into a temporary buffer first.
    return np.take(column, indices, axis=0, out=out, mode="clip")


def _is_columns(obj: PyTree) -> bool:
    """Returns whether an object is an array or a tree of arrays, all with dims."""
    if hasattr(obj, "__next__") or callable(obj):
        return False
    if _is_array(obj):
        return True
    if isinstance(obj, (str, bytes)):
        return False
    try:
        leaves, treedef = jax.tree.flatten(obj)
    except ValueError:  # the slower way explains why
        leaves, treedef = named_leaves(obj)
    if jax.tree.structure(0) == treedef or not leaves:
        return False  # not a tree
    if isinstance(obj, Mapping) or not isinstance(obj, list):
        return True
    return all(_is_array(leaf) and leaf.ndim for leaf in obj)


def _is_array(leaf: Leaf) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _is_sequence(obj: object) -> bool:
    is_other = isinstance(obj, (str, bytes)) or is_table(obj)
    if is_other or not hasattr(obj, "__getitem__"):
        return False
    is_random = isinstance(obj, Sequence) or not isinstance(obj, Iterable)
    return hasattr(obj, "__len__") and (is_random or not hasattr(obj, "__next__"))
