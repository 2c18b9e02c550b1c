"""Objects of no framework: arrays, tables, examples by index, and iterables of any.

A tuple, dict or other tree of arrays holds columns, as a data frame does; a list holds
examples or batches. Where a list could be either, the user is asked: ten arrays of ten
rows would train on the wrong axis without an error. Objects by index hold examples.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshlayout._annotations import Leaf, PyTree
from meshlayout.data.adapters import iterables
from meshlayout.data.examples import (
    ambiguous,
    as_array,
    leaf_path,
    leaf_text,
    looks_batched,
    stack,
)
from meshlayout.data.protocols import Source
from meshlayout.errors import DataError


_log = logging.getLogger("meshlayout")

_SINGLE = (bool, int, float, complex, str, bytes, np.generic)


@dataclass(frozen=True)
class Rows:
    """A source of `num_rows` rows, which `read` returns by their indices and epoch."""

    num_rows: int
    read: Callable[[np.ndarray, int], PyTree]

    def __len__(self) -> int:
        return self.num_rows

    def read_rows(self, indices: np.ndarray, epoch: int) -> PyTree:
        """Returns rows, in the order of the indices."""
        return self.read(indices, epoch)


def adapt(obj: Any, *, batched: bool | None) -> Source:
    """Returns columns, a sequence of examples, or an iterable of any as a source."""
    if is_columns(obj) or _is_column_list(obj):
        return array_rows(obj)
    is_mapping = isinstance(obj, (str, bytes)) or hasattr(obj, "keys")
    is_indexed = hasattr(obj, "__getitem__") and hasattr(obj, "__len__")
    # An iterator may have a length as well (a progress bar, say), and is read once.
    if batched or is_mapping or not is_indexed or hasattr(obj, "__next__"):
        return iterables.adapt(obj, batched=batched)
    if batched is None and isinstance(obj, list) and obj and looks_batched(obj[0]):
        hint = " Columns of one dataset go into a tuple or a dict." * _is_array(obj[0])
        raise DataError(ambiguous("the source") + hint)
    return item_rows(obj)


def is_columns(obj: Any) -> bool:
    """Returns whether an object is an array, a data frame, or a tree of columns."""
    if hasattr(obj, "__next__") or isinstance(obj, (str, bytes, list)):
        return False
    if _is_array(obj) or _is_frame(obj):
        return True
    leaves = [] if callable(obj) else jax.tree.leaves(obj, is_leaf=_is_column_list)
    return bool(leaves) and not jax.tree_util.all_leaves([obj])


def array_rows(tree: PyTree) -> Rows:
    """Returns columns in memory as a source."""
    if _is_frame(tree):
        tree = {name: tree[name] for name in getattr(tree, "columns", tree)}
        if len({*map(type, tree)}) > 1:  # which JAX cannot sort
            msg = "the data frame's columns have names of several types: write"
            raise DataError(f"{msg} frame.columns = frame.columns.astype(str).")
    flatten = jax.tree_util.tree_flatten_with_path
    entries, treedef = flatten(tree, is_leaf=_is_column_list)
    columns = {leaf_path(keys): leaf for keys, leaf in entries}
    indexes = [x.index for x in columns.values() if hasattr(x, "iloc")]
    paired = [x for x in indexes if len(x) == len(indexes[0])]
    if any(not x.equals(indexes[0]) and x.isin(indexes[0]).all() for x in paired):
        msg = "rows are paired by position, not by index, and the index has one order"
        _log.warning(f"{msg} in x and another in y: perhaps write y.loc[x.index].")
    columns = {path: as_array(path, leaf) for path, leaf in columns.items()}
    for path, column in columns.items():
        is_code = column.dtype.kind == "i" and column.ndim == 1
        if is_code and column.min(initial=0) == -1 and not column.all():  # has a 0
            msg = f"{leaf_text(path)} has rows of -1, as pandas codes missing values."
            _log.warning(f"{msg} As a class or an index, it is the last one.")
    sizes = {column.shape[:1]: path for path, column in columns.items()}
    if len(sizes) > 1 or () in sizes:
        first = [(path, columns[path]) for path in sizes.values()][:3]
        shapes = [f"{leaf_text(p)} {x.dtype}{[*x.shape]}" for p, x in first]
        msg = "the first dim of every array counts the examples, and must be the same."
        hint = "Of a list, write np.stack(x)." * any("/" in path for path in columns)
        if () in sizes:
            hint = "One row is frame.iloc[[0]], or x[:1]."
        elif len(indexes) == len(columns):  # all of pandas
            many, few = "xy" if len(indexes[0]) > len(indexes[-1]) else "yx"
            hint = f"If their index pairs them, write {many}.loc[{few}.index]."
        raise DataError(f"{' and '.join(shapes)}: {msg} {hint}".rstrip())

    def read(indices: np.ndarray, epoch: int) -> PyTree:
        del epoch
        return treedef.unflatten([_taken(leaf, indices) for leaf in columns.values()])

    return Rows(next(iter(sizes))[0], read)


def item_rows(items: Any) -> Rows:
    """Returns an indexable object of examples as a source.

    PyTorch's datasets may have `__getitems__` for several indices at once.
    """

    def read(indices: np.ndarray, epoch: int) -> PyTree:
        del epoch
        numbers = indices.tolist()
        if hasattr(items, "__getitems__"):
            return stack(items.__getitems__(numbers))
        return stack([items[number] for number in numbers])

    return Rows(len(items), read)


def _taken(column: np.ndarray, indices: np.ndarray) -> np.ndarray:
    out = np.empty((len(indices), *column.shape[1:]), column.dtype)
    # With mode="raise", NumPy would gather into a temporary buffer first.
    return np.take(column, indices, axis=0, out=out, mode="clip")


def _is_array(leaf: Leaf) -> bool:
    is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return (is_array or hasattr(leaf, "__array__")) and not isinstance(leaf, _SINGLE)


def _is_frame(obj: Any) -> bool:
    """Returns whether an object has named columns: a data frame, an npz file."""
    if isinstance(obj, Mapping):
        return jax.tree_util.all_leaves([obj])  # to JAX, it is no tree
    return hasattr(obj, "__array__") and hasattr(obj, "columns")


def _is_column_list(node: Any) -> bool:
    """Returns whether a list holds numbers, or lists of them, and so is an array."""
    if not isinstance(node, list) or not node:
        return False
    single = (*_SINGLE, type(None))  # which is then named as a wrong entry
    return all(isinstance(item, single) or _is_column_list(item) for item in node)
