"""Trees of arrays, and sequences of examples, as sources with random access.

A tuple, dict or other tree of arrays holds columns; a list holds examples. Where an
object could be either, the user is asked: a list of ten arrays of ten rows would train
on the wrong axis without an error.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshlayout import _paths
from meshlayout._annotations import Leaf, PyTree
from meshlayout.data.element_rows import is_placed, looks_batched, stack
from meshlayout.data.elements import ambiguous
from meshlayout.data.examples import as_array, empty, leaf_text, named_leaves
from meshlayout.errors import DataError


_SINGLE = (bool, int, float, complex, str, bytes, np.generic)


@dataclass(frozen=True)
class Rows:
    """A source with random access, whose rows a function reads.

    Attributes:
        num_rows: The number of rows.
        read: Returns rows, given their indices and the epoch.
    """

    num_rows: int
    read: Callable[[np.ndarray, int], PyTree]

    def __len__(self) -> int:
        return self.num_rows

    def read_rows(self, indices: np.ndarray, epoch: int) -> PyTree:
        """Returns rows, in the order of the indices."""
        return self.read(indices, epoch)


def adapt(obj: Any, *, batched: bool | None) -> Rows | None:
    """Returns a tree of arrays or a sequence of examples as a source.

    Args:
        obj: An array; a tree of arrays, all with one row per example; or an object with
            `__len__` and `__getitem__`, such as a list of examples.
        batched: As in the package's docstring.

    Returns:
        The source; None for batches, and for any other object.

    Raises:
        DataError: If it could be columns or examples, or its arrays do not fit
            together.
    """
    is_list = isinstance(obj, list)
    if _is_columns(obj) and not (is_list and batched is not None):
        if is_list:
            msg = (
                f"a list of {len(obj)} arrays may be the columns of one dataset, or as "
                "many examples or batches. Give columns as a tuple or dict; say "
                "batched=False for examples, or batched=True for batches."
            )
            raise DataError(msg)
        if batched is not None:
            msg = (
                "a tree of arrays is a source of rows, one per example. Leave out "
                f"batched={batched}, or give a list of the batches."
            )
            raise DataError(msg)
        return array_rows(obj)
    if batched is True or not _is_sequence(obj):
        return None
    if batched is None and len(obj) and looks_batched(obj[0]):
        if is_placed(obj[0]):  # nobody places single examples: a list of batches
            return None
        raise DataError(ambiguous("the source"))
    return item_rows(obj)


def array_rows(tree: PyTree) -> Rows:
    """Returns a tree of arrays in memory as a source.

    Raises:
        DataError: If an array has no dim for the examples, or two differ in it.
    """
    _refuse_lists(tree)
    named, treedef = named_leaves(tree)
    columns = {path: as_array(path, leaf) for path, leaf in named}
    sizes: dict[int, str] = {}  # the first array of each number of rows
    for path, column in columns.items():
        if not column.ndim:
            msg = (
                f"{leaf_text(path)} is a single {column.dtype}, without a dim for the "
                "examples. Give it one row per example, with np.full, or leave it out."
            )
            raise DataError(msg)
        sizes.setdefault(column.shape[0], path)
    if len(sizes) > 1:
        (num_rows, name), (other_rows, other_name), *_ = sizes.items()
        msg = (
            f"{leaf_text(name)} has {num_rows} rows and {leaf_text(other_name)} "
            f"{other_rows}: the first dim of every array counts the examples."
        )
        raise DataError(msg)
    arrays = treedef.unflatten(columns.values())

    def read(indices: np.ndarray, epoch: int) -> PyTree:
        del epoch
        return jax.tree.map(lambda column: _taken(column, indices), arrays)

    return Rows(next(iter(sizes)), read)


def item_rows(items: Any, dtypes: Mapping[str, Any] | None = None) -> Rows:
    """Returns an indexable object of examples as a source.

    Args:
        items: Has `__len__`, and either `__getitem__` or, like the datasets of PyTorch
            and TFDS, `__getitems__` for several indices at once.
        dtypes: By path, the dtypes for leaves that are Python numbers.
    """

    def read(indices: np.ndarray, epoch: int) -> PyTree:
        del epoch
        numbers = indices.tolist()
        if hasattr(items, "__getitems__"):
            return stack(items.__getitems__(numbers), dtypes)
        return stack([items[number] for number in numbers], dtypes)

    return Rows(len(items), read)


def refuse_batched(what: str, *, batched: bool | None) -> None:
    """Raises DataError for `batched=True` with a source of single examples."""
    if batched:
        msg = (
            f"{what} yields single examples. Leave out batched=True, or give an "
            "iterable of the batches."
        )
        raise DataError(msg)


def is_table(obj: object) -> bool:
    """Returns whether an object has columns by name, like a data frame."""
    return isinstance(obj, Mapping) or callable(getattr(obj, "keys", None))


def _refuse_lists(tree: PyTree) -> None:
    """Raises DataError for a column that is a list of numbers.

    JAX would take every number of it for a leaf without rows, and the message about
    that would not name the list.
    """
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
    if hasattr(obj, "__next__") or callable(obj) or isinstance(obj, (str, bytes)):
        return False
    if _is_array(obj):
        return True
    try:
        leaves, treedef = jax.tree.flatten(obj)
    except ValueError:  # `named_leaves` raises an error that explains it
        leaves, treedef = named_leaves(obj)
    if jax.tree.structure(0) == treedef or not leaves:
        return False  # a leaf, or empty
    if not isinstance(obj, list):
        return True
    return all(_is_array(leaf) and leaf.ndim for leaf in obj)


def _is_array(leaf: Leaf) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _is_sequence(obj: object) -> bool:
    is_other = isinstance(obj, (str, bytes)) or is_table(obj)
    if is_other or not hasattr(obj, "__getitem__") or not hasattr(obj, "__len__"):
        return False
    # An iterator may have a length as well (a progress bar, say), and is read once.
    is_random = isinstance(obj, Sequence) or not isinstance(obj, Iterable)
    return is_random or not hasattr(obj, "__next__")
