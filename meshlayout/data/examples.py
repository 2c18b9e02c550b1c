"""Examples on the host: their leaves as arrays, and what all of them have in common.

A step is compiled for one structure, and one shape and dtype per leaf. So the first
example decides them, and every later one is checked against it; an error names the leaf
that differs. Leaves keep the dtype of the source until a batch is complete, and are
then narrowed to JAX's dtypes in one pass, which checks that no integer changes.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from meshlayout import _jax
from meshlayout._annotations import Batch, Leaf, PyTree
from meshlayout._checks import type_text
from meshlayout._host_arrays import plain_array
from meshlayout._render.tables import array_text
from meshlayout.errors import DataError


# In bytes: JAX uses a host array's memory on a CPU device without a copy if the memory
# starts at a multiple of this.
_ALIGNMENT = 64

_NUMBERS = (bool, int, float, complex, np.generic)


@dataclass(frozen=True)
class LeafSpec:
    """One leaf of the examples.

    Attributes:
        path: The path of the leaf; empty if the example is a single array.
        dtype: The dtype in the source.
        shape: The shape in one example, without a dim for the rows.
        to: The dtype on the devices; None for strings, which stay on the host.
    """

    path: str
    dtype: np.dtype
    shape: tuple[int, ...]
    to: np.dtype | None

    def converted(self, values: np.ndarray) -> np.ndarray:
        """Returns rows in the dtype of the devices."""
        if self.to is None or values.dtype == self.to:
            return values
        out = empty(values.shape, self.to)
        self.copy(values, out)
        return out

    def copy(self, values: np.ndarray, out: np.ndarray) -> None:
        """Copies rows into an array of the devices' dtype, if all integers fit."""
        if (
            values.dtype != out.dtype
            and values.size
            and jnp.issubdtype(values.dtype, np.integer)
        ):
            bounds: Any = np.iinfo(out.dtype)
            for extreme in (values.min(), values.max()):
                if not bounds.min <= extreme <= bounds.max:
                    msg = (
                        f"{leaf_text(self.path)} has the value {extreme}, which does "
                        f"not fit into {out.dtype}: without jax_enable_x64, "
                        f"{self.dtype} becomes {out.dtype}. Set "
                        "jax.config.update('jax_enable_x64', True), or give smaller "
                        "numbers."
                    )
                    raise DataError(msg)
        with np.errstate(over="ignore"):  # to infinity, as JAX does
            out[...] = values

    def check(self, shape: tuple[int, ...], leaf: np.ndarray) -> None:
        """Raises DataError if a leaf, whose examples have a shape, is not like this."""
        if shape != self.shape:
            msg = (
                f"{leaf_text(self.path)} is ragged: an example has shape {shape}, and "
                f"the first one has {self.shape}. Pad the examples to one shape."
            )
            raise DataError(msg)
        if leaf.dtype == self.dtype or (self.to is None and is_string(leaf)):
            return  # NumPy's dtypes of strings differ with their lengths
        msg = (
            f"{leaf_text(self.path)} changes its dtype: an example is "
            f"{array_text(leaf.dtype, shape)}, and the first one is "
            f"{array_text(self.dtype, self.shape)}. Give all examples one dtype."
        )
        raise DataError(msg)


@dataclass(frozen=True)
class ExampleSpec:
    """The structure of one example, and its leaves in JAX's order."""

    treedef: Any
    leaves: tuple[LeafSpec, ...]

    def checked(self, rows: PyTree, count: int | None = None) -> list[np.ndarray]:
        """Returns the leaves of some rows, which must be like the first example.

        Args:
            rows: A tree of arrays with a dim for the rows.
            count: How many rows there must be; None for arrays known to agree.
        """
        leaves, treedef = jax.tree.flatten(rows)
        if treedef != self.treedef:
            raise structure_error(rows, [leaf.path for leaf in self.leaves])
        for number, (spec, leaf) in enumerate(zip(self.leaves, leaves, strict=True)):
            if count is not None:
                leaves[number] = leaf = row_array(spec.path, leaf, count)
            # Compared here first: for every batch, a call per leaf would add up.
            if leaf.shape[1:] != spec.shape or leaf.dtype != spec.dtype:
                spec.check(leaf.shape[1:], leaf)
        return leaves


def describe(rows: PyTree, strings: str, warn: Callable[[str], None]) -> ExampleSpec:
    """Returns the spec of the examples, given the first of them.

    Args:
        rows: A tree of arrays with a dim for the examples.
        strings: `"error"` or `"host"`.
        warn: Called with a sentence about every leaf that loses precision.

    Raises:
        DataError: If there is no leaf, or one that cannot be placed: objects, strings
            unless they stay on the host, dtypes that JAX does not have.
    """
    named, treedef = named_leaves(rows)
    if not named:
        msg = "an example has no leaves: there is no array in it."
        raise DataError(msg)
    specs = []
    for path, leaf in named:
        to = _device_dtype(path, leaf, strings)
        # Integers are checked to fit, so that only floats are worth a warning.
        if to is not None and leaf.dtype.kind in "fc" and to.itemsize < leaf.itemsize:
            name = path or "the array"
            warn(f"{name}: {leaf.dtype} becomes {to}, as in JAX without jax_enable_x64.")
        specs.append(LeafSpec(path, leaf.dtype, leaf.shape[1:], to))
    return ExampleSpec(treedef, tuple(specs))


def _device_dtype(path: str, leaf: np.ndarray, strings: str) -> np.dtype | None:
    dtype = leaf.dtype
    if is_string(leaf) and leaf.size:  # an empty array of objects is not of strings
        if strings == "host":
            return None
        msg = (
            f"{leaf_text(path)} holds strings, which devices do not take. Leave it "
            "out, or keep it on the host with strings='host', if the source has random "
            "access."
        )
        raise DataError(msg)
    if dtype.kind == "O":
        msg = (
            f"{leaf_text(path)} is an array of objects, which devices do not take. "
            "Ragged rows have to be padded to one shape; numbers need a dtype, as "
            "array.astype('float32')."
        )
        raise DataError(msg)
    # NumPy's long doubles, of which JAX would silently make float64 or complex128.
    too_wide = dtype.kind in "fc" and dtype.itemsize > 8 * (1 + (dtype.kind == "c"))
    if too_wide or not _jax.is_array_dtype(dtype):
        msg = (
            f"{leaf_text(path)} has dtype {dtype}, which JAX does not have. Convert "
            "it, for instance with array.astype('float32')."
        )
        raise DataError(msg)
    return np.dtype(_jax.canonical_dtype(dtype.newbyteorder("=")))


def is_string(array: np.ndarray) -> bool:
    """Returns whether an array holds strings, or objects that are all strings."""
    if array.dtype.kind == "O":
        return all(isinstance(value, (str, bytes)) for value in array.flat)
    return array.dtype.kind in "UST"


# Trees of any kind as trees of arrays.


def named_leaves(tree: PyTree) -> tuple[list[tuple[str, Leaf]], Any]:
    """Returns the leaves of a tree with their paths, and its structure."""
    try:
        entries, treedef = jax.tree_util.tree_flatten_with_path(tree)
    except ValueError as error:  # keys of a dict that cannot be put in order
        reason = str(error).partition("\n")[0]
        msg = f"JAX cannot take an example apart: {reason} Use keys of one type."
        raise DataError(msg) from None
    return [(leaf_path(keys), leaf) for keys, leaf in entries], treedef


def leaf_path(keys: tuple[Any, ...]) -> str:
    """Returns a JAX key path as a leaf's path."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def leaf_text(path: str) -> str:
    """Returns how a message names a leaf; the path of a single array is empty."""
    return f"leaf {path!r}" if path else "the array"


def as_array(path: str, leaf: Leaf) -> np.ndarray:
    """Returns a leaf as a NumPy array, without a copy if it is one already.

    Args:
        path: The path of the leaf, for messages.
        leaf: An array or anything with `__array__`, a PyTorch tensor, a number, or a
            string, which becomes an array of one object.

    Raises:
        DataError: If it is anything else.
    """
    if type(leaf) is np.ndarray:
        return leaf
    if isinstance(leaf, (str, bytes)):
        return np.array(leaf, dtype=object)  # NumPy's own strings lose trailing nulls
    if type(leaf).__module__.partition(".")[0] == "torch":
        return _tensor_to_numpy(leaf)
    array = plain_array(leaf, leaf_text(path), error=DataError)
    if array.dtype == object and not hasattr(leaf, "__array__"):
        msg = (
            f"{leaf_text(path)} is {type_text(leaf)}, which is not an array, number or "
            "string. Leave it out of the examples, or make it an array."
        )
        raise DataError(msg)
    return array


def row_array(path: str, leaf: Leaf, count: int) -> np.ndarray:
    """Returns a leaf that a source's `read_rows` returned for some indices."""
    array = as_array(path, leaf)
    # Too few rows would be filled up like the last batch of an epoch, as if they were
    # examples.
    if not array.ndim or len(array) != count:
        indices = "1 index" if count == 1 else f"{count} indices"
        msg = (
            f"{leaf_text(path)} has shape {array.shape}, and read_rows was given "
            f"{indices}: the first dim of every leaf must count the rows."
        )
        raise DataError(msg)
    return array


def _tensor_to_numpy(tensor: Any) -> np.ndarray:
    """Returns a PyTorch tensor as an array, without a copy if it is on the host."""
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
    # `Tensor.numpy` refuses these dtypes, which NumPy has through ml_dtypes: the same
    # bits are viewed as integers on one side and as floats on the other.
    torch: Any = sys.modules["torch"]
    bits = torch.int16 if tensor.element_size() == 2 else torch.uint8
    return tensor.contiguous().view(bits).numpy().view(np.dtype(name))


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
    """Returns an uninitialized array that goes to CPU devices without a copy."""
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        return np.empty(shape, dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)


# Elements of iterables: one example, or a batch of them.


def looks_batched(element: PyTree) -> bool:
    """Returns whether an element could be a batch: all arrays share their first dim."""
    sizes = set()
    for leaf in jax.tree.leaves(element):
        is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        sizes.add((np.shape(leaf)[:1] or (None,))[0] if is_array else None)
    return len(sizes) == 1 and None not in sizes


def is_placed(batch: Batch) -> bool:
    """Returns whether a user has placed all arrays of a batch on devices.

    JAX calls such arrays committed; others, as `jnp.ones` returns them, are on the
    default device by chance, and are treated like NumPy arrays.
    """
    leaves = jax.tree.leaves(batch)
    return bool(leaves) and all(map(_jax.is_committed, leaves))


def as_batch(batch: Batch) -> tuple[PyTree, int]:
    """Returns a user's batch as a tree of NumPy arrays, and the number of its rows."""
    entries, treedef = jax.tree_util.tree_flatten_with_path(batch)
    leaves = [as_array(leaf_path(keys), leaf) for keys, leaf in entries]
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
    first, kinds = column[0], set(map(type, column))
    if isinstance(first, (str, bytes)):
        strings = np.empty(len(column), object)
        strings[:] = column
        return strings
    if isinstance(first, _NUMBERS) and (len(kinds) == 1 or dtype is not None):
        return np.array(column, getattr(first, "dtype", dtype))
    arrays = [leaf_array(path, leaf) for leaf in column]
    spec = LeafSpec(path, arrays[0].dtype, arrays[0].shape, None)
    for array in arrays:
        if array.shape != spec.shape or array.dtype != spec.dtype:
            spec.check(array.shape, array)
    out = empty((len(arrays), *spec.shape), spec.dtype)
    if not spec.shape:
        out[...] = arrays
        return out
    # `np.stack` would first make a view with one more dim of every example.
    rows, *others = spec.shape
    np.concatenate(arrays, out=out.reshape(len(arrays) * rows, *others))
    return out


def leaf_array(path: str, leaf: Leaf) -> np.ndarray:
    """Returns a leaf of an example as an array; the first example has no tree there."""
    if not jax.tree_util.all_leaves([leaf]):
        msg = (
            f"{leaf_text(path)} is {type_text(leaf)}, and not a tree in the first "
            "example. Give every example the same leaves."
        )
        raise DataError(msg)
    return as_array(path, leaf)


# Messages.


def structure_error(example: PyTree, paths: Sequence[str]) -> DataError:
    """Returns the error about an example that does not have these leaves."""
    names, first_names = (
        ", ".join(map(repr, listed)) or "none"
        for listed in ([path for path, _ in named_leaves(example)[0]], paths)
    )
    msg = (
        "an example has another structure than the first one: leaves "
        f"{names} instead of {first_names}. Lists of numbers count as structure: make "
        "them arrays with np.asarray."
    )
    return DataError(msg)


def ambiguous(what: str) -> str:
    """Returns the message that asks for `batched=`.

    Nothing is guessed: a batch of 5 rows and an example of 5 vectors look alike, and a
    wrong guess would train on rows of the wrong rank.
    """
    return (
        f"the elements of {what} may be examples or batches: all their arrays have the "
        "same first dim. Say batched=False for examples, or batched=True for batches."
    )


def no_rows(epoch: int) -> str:
    """Returns the message about an epoch, counted from 0, that has no examples."""
    if not epoch:
        return "the source is empty: it yielded no examples."
    return (
        f"the source yielded no examples in epoch {epoch + 1}, though it did before: "
        "it can be read once. A function that makes the generator must make a new one "
        "at every call."
    )


def rows_text(count: int) -> str:
    """Returns a number of rows in words."""
    return f"{count} row" if count == 1 else f"{count} rows"
