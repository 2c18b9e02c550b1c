"""Trees of arrays, and sequences of examples, as sources of rows."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from meshlayout import _jax, _paths
from meshlayout.data.clock import Clock
from meshlayout.data.leaves import empty, leaf_text, map_named, named_leaves
from meshlayout.data.source import Source
from meshlayout.data.stacking import host_leaf, stack
from meshlayout.errors import DataError


def adapt(obj: Any, clock: Clock, *, batched: bool | None) -> Source | None:
    """Returns a tree of arrays or a sequence of examples as a source of rows.

    Args:
        obj: An array, a tree of arrays with a dim for the examples in common, or what
            has `__len__` and `__getitem__`, as a list of examples.
        clock: Not needed here.
        batched: Whether the elements of a sequence are batches, which is no source of
            rows; None where the elements tell.

    Returns:
        None if it is something else.

    Raises:
        DataError: If it may be columns or examples, or its arrays do not fit together.
    """
    del clock
    if is_columns(obj):
        if batched is not None and not isinstance(obj, list):
            msg = (
                "a tree of arrays is a source of rows, one per example. Leave out "
                f"batched={batched}, or give a list of the batches."
            )
            raise DataError(msg)
        if batched is None and isinstance(obj, list):
            msg = (
                f"a list of {len(obj)} arrays may be the columns of one data set, or "
                "as many examples or batches. Give columns as a tuple or dict; say "
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

    def __init__(self, tree: Any) -> None:
        _refuse_lists(tree)
        self._tree = map_named(host_leaf, tree)
        sizes: dict[int, str] = {}
        for path, leaf in named_leaves(self._tree)[0]:
            if not leaf.ndim:
                msg = (
                    f"{leaf_text(path)} is a single {leaf.dtype}, without a dim for "
                    "the examples. Give it one row per example, with np.full, or "
                    "leave it out."
                )
                raise DataError(msg)
            sizes.setdefault(leaf.shape[0], path)
        if len(sizes) > 1:
            (first, one), (second, other), *_ = sizes.items()
            msg = (
                f"{leaf_text(one)} has {first} rows and {leaf_text(other)} {second}: "
                "the first dim of every array counts the examples."
            )
            raise DataError(msg)
        self._num_rows = next(iter(sizes))

    def __len__(self) -> int:
        return self._num_rows

    def rows(self, indices: np.ndarray[Any, Any]) -> Any:
        """Returns rows, in the order asked for."""
        return jax.tree.map(lambda leaf: _taken(leaf, indices), self._tree)


class ItemRows:
    """The examples of an object that gives each of them by number.

    Args:
        items: What has `__len__` and `__getitem__`.
    """

    def __init__(self, items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def rows(self, indices: np.ndarray[Any, Any]) -> Any:
        """Returns examples, in the order asked for, stacked."""
        return stack([self._items[i] for i in indices.tolist()])


_SINGLE = (bool, int, float, complex, str, bytes, np.generic)


def _refuse_lists(tree: Any) -> None:
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


def _taken(
    leaf: np.ndarray[Any, Any], indices: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    found = empty((len(indices), *leaf.shape[1:]), leaf.dtype)
    # With mode="raise", NumPy gathers into memory of its own first.
    return np.take(leaf, indices, axis=0, out=found, mode="clip")


def is_columns(obj: Any) -> bool:
    """Tells whether an object is an array or a tree of arrays, all with dims.

    Args:
        obj: What the user gave.
    """
    if hasattr(obj, "__next__") or callable(obj):
        return False
    if _is_array(obj):
        return True
    if isinstance(obj, (str, bytes)):
        return False
    try:
        leaves, treedef = jax.tree.flatten(obj)
    except ValueError:  # the slower way says why
        leaves, treedef = named_leaves(obj)
    if jax.tree.structure(0) == treedef or not leaves:
        return False  # no tree
    if isinstance(obj, Mapping) or not isinstance(obj, list):
        return True
    return all(_is_array(leaf) and leaf.ndim for leaf in obj)


def looks_batched(example: Any) -> bool:
    """Tells whether an element may be a batch as well as an example.

    Args:
        example: An element of an iterable.
    """
    sizes = set()
    for leaf in jax.tree.leaves(example):
        shape = np.shape(leaf) if _is_array(leaf) else ()
        sizes.add(shape[0] if shape else None)
    return len(sizes) == 1 and None not in sizes


def is_placed(element: Any) -> bool:
    """Tells whether all arrays of a batch are where their maker has placed them.

    Args:
        element: A batch.
    """
    leaves = jax.tree.leaves(element)
    return bool(leaves) and all(map(_jax.is_committed, leaves))


def ambiguous(what: str) -> str:
    """Returns the sentence that asks for `batched=`.

    Args:
        what: Whose elements they are.
    """
    return (
        f"the elements of {what} may be examples or batches: all their arrays have the "
        "same first dim. Say batched=False for examples, or batched=True for batches."
    )


def refuse_batches(what: str, batched: Any) -> None:
    """Raises DataError if a source of single rows is said to give batches.

    Args:
        what: Which source.
        batched: What was said.
    """
    if batched:
        msg = (
            f"{what} gives single examples. Leave out batched=True, or give an "
            "iterable of the batches."
        )
        raise DataError(msg)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def is_table(obj: Any) -> bool:
    """Tells whether an object gives columns by name, as a data frame does.

    Args:
        obj: What the user gave.
    """
    return isinstance(obj, Mapping) or callable(getattr(obj, "keys", None))


def _is_sequence(obj: Any) -> bool:
    is_other = isinstance(obj, (str, bytes)) or is_table(obj)
    if is_other or not hasattr(obj, "__getitem__"):
        return False
    is_random = isinstance(obj, Sequence) or not isinstance(obj, Iterable)
    return hasattr(obj, "__len__") and (is_random or not hasattr(obj, "__next__"))
