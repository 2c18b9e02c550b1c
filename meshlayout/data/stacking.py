"""Examples stacked to blocks of rows, and blocks joined, leaf by leaf."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from meshlayout.data.leaves import as_array, empty, leaf_text, named_leaves
from meshlayout.errors import DataError


Array = np.ndarray[Any, Any]


def stack(examples: Sequence[Any], dtypes: Mapping[str, Any] | None = None) -> Any:
    """Stacks examples of one structure.

    Args:
        examples: At least one tree of arrays, numbers, strings or images.
        dtypes: By path, the dtypes of numbers that carry none of their own.

    Returns:
        A tree of arrays whose first dim counts the examples. Strings become an array
        of objects.

    Raises:
        DataError: If examples differ in their structure, or in the shape or dtype of
            a leaf.

    Example:
        >>> stack([{"x": np.ones(2), "y": 1}, {"x": np.zeros(2), "y": 2}])["y"]
        array([1, 2])
    """
    named, treedef = named_leaves(examples[0])
    columns = _columns(examples, treedef)
    return treedef.unflatten(
        _stacked(path, column, (dtypes or {}).get(path))
        for (path, _), column in zip(named, columns, strict=True)
    )


def concatenate(blocks: Sequence[Any]) -> Any:
    """Joins blocks of one structure, one after another.

    Args:
        blocks: At least one tree of arrays.

    Raises:
        DataError: If a leaf's rows differ between blocks in shape or dtype.
    """
    if len(blocks) == 1:
        return blocks[0]
    named, treedef = named_leaves(blocks[0])
    columns = zip(*_flat(blocks, treedef), strict=True)
    leaves = []
    for (path, _), column in zip(named, columns, strict=True):
        _check_like_first(path, column, 1)
        leaves.append(np.concatenate(column))
    return treedef.unflatten(leaves)


def examples_of(rows: Any, count: int) -> Iterator[Any]:
    """Yields the single examples of a block, as views of it.

    Args:
        rows: A tree of arrays.
        count: How many examples there are.
    """
    leaves, treedef = jax.tree.flatten(rows)
    for row in range(count):
        yield treedef.unflatten([leaf[row] for leaf in leaves])


def host_leaf(path: str, leaf: Any) -> Array:
    """Returns a leaf as NumPy holds it: PyTorch's tensors, too.

    Args:
        path: Its name.
        leaf: A tensor, or what `as_array` takes.
    """
    if type(leaf).__module__.partition(".")[0] == "torch":
        return tensor_to_numpy(leaf)
    return as_array(path, leaf)


def tensor_to_numpy(tensor: Any) -> Array:
    """Returns a PyTorch tensor as an array, of the same memory if it is on the host.

    Args:
        tensor: A dense tensor.

    Raises:
        DataError: If it is sparse, nested or quantized.
    """
    if str(tensor.layout) != "torch.strided" or tensor.is_quantized:
        msg = (
            f"a PyTorch tensor of shape {tuple(tensor.shape)} and {tensor.dtype} is "
            "not dense. Make it dense with its method to_dense() or dequantize()."
        )
        raise DataError(msg)
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    name = str(tensor.dtype).removeprefix("torch.")
    if name != "bfloat16" and not name.startswith("float8"):
        return tensor.numpy()
    # NumPy has no such dtype of its own: the bits are taken as they lie.
    torch: Any = sys.modules["torch"]
    bits = torch.int16 if tensor.element_size() == 2 else torch.uint8
    return tensor.contiguous().view(bits).numpy().view(np.dtype(name))


def _columns(examples: Sequence[Any], treedef: Any) -> Iterator[tuple[Any, ...]]:
    """Returns the leaves of examples, those of one place together."""
    try:
        flat = [treedef.flatten_up_to(example) for example in examples]
    except ValueError:  # the slower way says which leaves
        flat = _flat(examples, treedef)
    return zip(*flat, strict=True)


def _flat(trees: Sequence[Any], treedef: Any) -> list[list[Any]]:
    flat = []
    for tree in trees:
        leaves, other = jax.tree.flatten(tree)
        if other != treedef:
            first, found = (
                ", ".join(repr(path) for path, _ in named_leaves(one)[0]) or "none"
                for one in (trees[0], tree)
            )
            msg = (
                "an example has another structure than the first one: leaves "
                f"{found} instead of {first}. Give every example the same ones."
            )
            raise DataError(msg)
        flat.append(leaves)
    return flat


def _stacked(path: str, column: Sequence[Any], dtype: Any) -> Array:
    first = column[0]
    if isinstance(first, (str, bytes)):
        strings = np.empty(len(column), object)
        strings[:] = column
        return strings
    kinds = set(map(type, column))
    if len(kinds) == 1 or dtype is not None:
        if isinstance(first, (bool, int, float, complex)):
            numbers = np.asarray(column, dtype)
            own: Any = getattr(first, "dtype", numbers.dtype)
            return numbers.astype(own, copy=False)
        if isinstance(first, np.generic) and _have_one_dtype(column):
            return np.array(column, first.dtype)
    if kinds == {np.ndarray} and first.ndim and _have_one_dtype(column):
        shapes = {leaf.shape for leaf in column}
        if len(shapes) == 1:
            shape: Any = first.shape
            found = empty((len(column), *shape), first.dtype)
            joined = (len(column) * shape[0], *shape[1:])
            np.concatenate(column, out=found.reshape(joined))
            return found
    arrays = [_leaf_array(path, leaf) for leaf in column]
    _check_like_first(path, arrays, 0)
    return np.stack(arrays)


def _leaf_array(path: str, leaf: Any) -> Any:
    if not jax.tree_util.all_leaves([leaf]):
        msg = (
            f"{leaf_text(path)} is a {type(leaf).__name__}, and no tree in the first "
            "example. Give every example the same leaves."
        )
        raise DataError(msg)
    return leaf if isinstance(leaf, np.generic) else host_leaf(path, leaf)


def _have_one_dtype(column: Sequence[Any]) -> bool:
    return len({leaf.dtype for leaf in column}) == 1


def _check_like_first(path: str, arrays: Sequence[Any], dim: int) -> None:
    shape, dtype = arrays[0].shape[dim:], arrays[0].dtype
    for array in arrays:
        if array.shape[dim:] != shape:
            msg = (
                f"{leaf_text(path)} is ragged: an example has shape "
                f"{array.shape[dim:]}, and the first one has {shape}. Pad the examples "
                "to one shape."
            )
            raise DataError(msg)
        if array.dtype != dtype:
            msg = (
                f"{leaf_text(path)} changes its dtype: an example is {array.dtype}, "
                f"and the first one is {dtype}. Give all examples one dtype."
            )
            raise DataError(msg)
