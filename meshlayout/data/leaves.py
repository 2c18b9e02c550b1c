"""Trees of examples: the names of their leaves, and leaves as NumPy arrays."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from meshlayout import _paths
from meshlayout.errors import DataError


def named_leaves(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Takes a tree apart into leaves with names, and its structure.

    Args:
        tree: Any tree.

    Raises:
        DataError: If JAX cannot take it apart.
    """
    try:
        entries, treedef = jax.tree_util.tree_flatten_with_path(tree)
    except ValueError as error:  # keys of a dict that cannot be put in order
        first = str(error).partition("\n")[0]
        msg = f"JAX cannot take an example apart: {first} Use keys of one type."
        raise DataError(msg) from None
    named = [("/".join(map(_paths.key_name, keys)), leaf) for keys, leaf in entries]
    return named, treedef


def map_named(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """Applies a function of a leaf's name and value to a tree.

    Args:
        function: Called with name and leaf.
        tree: Any tree.
    """
    named, treedef = named_leaves(tree)
    return treedef.unflatten([function(path, leaf) for path, leaf in named])


def leaf_text(path: str) -> str:
    """Returns how a leaf is called in a sentence.

    Args:
        path: Its name; empty for a tree that is one leaf.
    """
    return f"leaf {path!r}" if path else "the array"


def as_array(path: str, leaf: Any) -> np.ndarray[Any, Any]:
    """Returns a leaf as a NumPy array, without a copy where there is one already.

    Args:
        path: Its name.
        leaf: An array, a number, or a string, which becomes an object in an array.

    Raises:
        DataError: If it is none of them.
    """
    if type(leaf) is np.ndarray:
        return leaf
    if isinstance(leaf, (str, bytes)):
        return np.array(leaf, dtype=object)  # NumPy's own strings lose trailing nulls
    if isinstance(leaf, np.ma.MaskedArray):
        msg = (
            f"{leaf_text(path)} is a masked array, whose mask would be lost. Fill it "
            "with array.filled(value), and give the mask as a leaf of its own."
        )
        raise DataError(msg)
    try:
        array = np.asarray(leaf)
    except (TypeError, ValueError, RuntimeError) as error:
        first = str(error).partition("\n")[0]
        msg = (
            f"{leaf_text(path)} is of type {type(leaf).__name__}, which NumPy cannot "
            f"make an array of: {first}"
        )
        raise DataError(msg) from error
    if array.dtype == object and not isinstance(leaf, np.ndarray):
        msg = (
            f"{leaf_text(path)} is of type {type(leaf).__name__}, which is no array, "
            "number or string. Leave it out of the examples, or make it an array."
        )
        raise DataError(msg)
    return array


# Where JAX takes an array's memory on a CPU device as it is, without a copy.
_ALIGNMENT = 64


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Returns an array to be filled, that is placed on CPU devices without a copy.

    Args:
        shape: Its shape.
        dtype: Its dtype.

    Example:
        >>> empty((3, 2), "float32").shape
        (3, 2)
    """
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        return np.empty(shape, dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    address, _ = memory.__array_interface__["data"]
    start = -address % _ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)
