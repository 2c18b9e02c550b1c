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
    """One leaf of the examples: its path, and its dtype and shape in the source.

    `to` is the dtype on the devices; None for strings, which stay on the host.
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
        is_cast = values.dtype != out.dtype and values.size
        if is_cast and jnp.issubdtype(values.dtype, np.integer):
            bounds: Any = np.iinfo(out.dtype)
            low, high = values.min(), values.max()
            if low < bounds.min or high > bounds.max:
                worst = high if high > bounds.max else low
                msg = (
                    f"{leaf_text(self.path)} has the value {worst}, which does not fit "
                    f"into {out.dtype}, JAX's {self.dtype} without jax_enable_x64."
                )
                raise DataError(msg)
        with np.errstate(over="ignore"):  # to infinity, as JAX does
            out[...] = values

    def check(self, shape: tuple[int, ...], leaf: np.ndarray) -> None:
        """Raises DataError if a leaf, whose examples have a shape, is not like this."""
        # NumPy's dtypes of strings differ with their lengths.
        is_same = leaf.dtype == self.dtype or (self.to is None and is_string(leaf))
        if is_same and shape == self.shape:
            return
        what = "is ragged" if shape != self.shape else "changes its dtype"
        now, first = array_text(leaf.dtype, shape), array_text(self.dtype, self.shape)
        msg = (
            f"{leaf_text(self.path)} {what}: an example is {now}, and the first one is "
            f"{first}. Give all examples one shape and dtype."
        )
        raise DataError(msg)


@dataclass(frozen=True)
class ExampleSpec:
    """The structure of one example, and its leaves in JAX's order."""

    treedef: Any
    leaves: tuple[LeafSpec, ...]

    def checked(self, rows: PyTree, count: int | None = None) -> list[np.ndarray]:
        """Returns the leaves of `count` rows, which must be like the first example."""
        leaves, treedef = jax.tree.flatten(rows)
        if treedef != self.treedef:
            raise _structure_error(rows, [leaf.path for leaf in self.leaves])
        for number, (spec, leaf) in enumerate(zip(self.leaves, leaves, strict=True)):
            if count is not None:
                leaves[number] = leaf = row_array(spec.path, leaf, count)
            # Compared here first: for every batch, a call per leaf would add up.
            if leaf.shape[1:] != spec.shape or leaf.dtype != spec.dtype:
                spec.check(leaf.shape[1:], leaf)
        return leaves


def describe(rows: PyTree, strings: str, warn: Callable[[str], None]) -> ExampleSpec:
    """Returns the spec of the examples, given the first; warns of lost precision."""
    named, treedef = named_leaves(rows)
    if not named:
        msg = "an example has no leaves: there is no array in it."
        raise DataError(msg)
    specs = []
    for path, leaf in named:
        to = _device_dtype(path, leaf, strings)
        # Integers are checked to fit, so that only floats are worth a warning.
        if to is not None and leaf.dtype.kind in "fc" and to.itemsize < leaf.itemsize:
            change = f"{path or 'the array'}: {leaf.dtype} becomes {to}"
            warn(f"{change}, as JAX does without jax_enable_x64.")
        specs.append(LeafSpec(path, leaf.dtype, leaf.shape[1:], to))
    return ExampleSpec(treedef, tuple(specs))


def _device_dtype(path: str, leaf: np.ndarray, strings: str) -> np.dtype | None:
    dtype = leaf.dtype
    # NumPy's long doubles, of which JAX would silently make float64 or complex128.
    too_wide = dtype.kind in "fc" and dtype.itemsize > 8 * (1 + (dtype.kind == "c"))
    if is_string(leaf) and leaf.size:  # an empty array of objects is not of strings
        if strings == "host":
            return None
        what = (
            "holds strings, which devices do not take. Leave it out, or keep it on the "
            "host with strings='host'."
        )
    elif dtype.kind == "O" or too_wide or not _jax.is_array_dtype(dtype):
        what = (
            f"has dtype {dtype}, which JAX does not have. Pad ragged rows to one "
            "shape, and convert numbers, as with array.astype('float32')."
        )
    else:
        return np.dtype(_jax.canonical_dtype(dtype.newbyteorder("=")))
    msg = f"{leaf_text(path)} {what}"
    raise DataError(msg)


def is_string(array: np.ndarray) -> bool:
    """Returns whether an array holds strings, or objects that are all strings."""
    if array.dtype.kind == "O":
        return all(isinstance(value, (str, bytes)) for value in array.flat)
    return array.dtype.kind in "UST"


# Trees of any kind as trees of arrays.


def named_leaves(tree: PyTree) -> tuple[list[tuple[str, Leaf]], Any]:
    """Returns the leaves of a tree with their paths, and its structure."""
    entries, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return [(leaf_path(keys), leaf) for keys, leaf in entries], treedef


def leaf_path(keys: tuple[Any, ...]) -> str:
    """Returns a JAX key path as a leaf's path."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def leaf_text(path: str) -> str:
    """Returns how a message names a leaf; the path of a single array is empty."""
    return f"leaf {path!r}" if path else "the array"


def as_array(path: str, leaf: Leaf) -> np.ndarray:
    """Returns anything like an array, a number or a string as an array, not copied."""
    if type(leaf) is np.ndarray:
        return leaf
    if isinstance(leaf, (str, bytes)):
        return np.array(leaf, dtype=object)  # NumPy's own strings lose trailing nulls
    if type(leaf).__module__.partition(".")[0] == "torch":
        leaf = leaf.detach().cpu().resolve_conj().resolve_neg()
        if str(leaf.dtype) == "torch.bfloat16":  # which NumPy has through ml_dtypes
            bits: Any = leaf.contiguous().view(sys.modules["torch"].int16)
            return bits.numpy().view(np.dtype("bfloat16"))
        return leaf.numpy()
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
    # Too few rows would be filled up like the last batch of an epoch.
    if array.shape[:1] != (count,):
        msg = (
            f"{leaf_text(path)} has shape {array.shape}, and read_rows was given "
            f"{count} row indices: the first dim of every leaf must count them."
        )
        raise DataError(msg)
    return array


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
    leaves = jax.tree.leaves(element)
    sizes = {getattr(x, "shape", ())[:1] if hasattr(x, "dtype") else () for x in leaves}
    return len(sizes) == 1 and sizes != {()}


def is_placed(batch: Batch) -> bool:
    """Returns whether a user has placed all arrays of a batch on devices."""
    # JAX calls them committed; others, as of `jnp.ones`, are on a device by chance.
    leaves = jax.tree.leaves(batch)
    return bool(leaves) and all(map(_jax.is_committed, leaves))


def copied(example: PyTree) -> PyTree:
    """Returns an example that shares no memory with what its source may refill."""
    if type(example) is np.ndarray:
        return example.copy()
    if type(example) is dict:  # several times as fast as by JAX
        return {key: copied(value) for key, value in example.items()}
    if example is None or isinstance(example, (*_NUMBERS, str, bytes)):
        return example
    is_leaf = jax.tree_util.all_leaves([example])
    return as_array("", example).copy() if is_leaf else jax.tree.map(copied, example)


def as_batch(batch: Batch) -> tuple[PyTree, int]:
    """Returns a user's batch as a tree of NumPy arrays, and the number of its rows."""
    named, treedef = named_leaves(batch)
    leaves = [as_array(path, leaf) for path, leaf in named]
    sizes = {leaf.shape[:1] for leaf in leaves}
    if len(sizes) != 1 or sizes == {()}:
        shapes = ", ".join(str(leaf.shape) for leaf in leaves)
        msg = (
            f"the arrays of a batch have no batch dim in common: {shapes or 'none'}. "
            "If the source yields single examples, say batched=False."
        )
        raise DataError(msg)
    return treedef.unflatten(leaves), sizes.pop()[0]


def stack(examples: Sequence[PyTree], dtypes: Mapping[str, Any] | None = None) -> Any:
    """Stacks examples of one structure, whose leaves agree in shape and dtype.

    Strings become an array of objects, and Python numbers have the `dtypes` by path.
    """
    named, treedef = named_leaves(examples[0])
    paths = [path for path, _ in named]
    try:
        flat = [treedef.flatten_up_to(example) for example in examples]
    except ValueError:
        other = next(e for e in examples if jax.tree.structure(e) != treedef)
        raise _structure_error(other, paths) from None
    columns = zip(paths, zip(*flat, strict=True), strict=True)
    dtypes = dtypes or {}
    return treedef.unflatten(_stacked(path, x, dtypes.get(path)) for path, x in columns)


def _stacked(path: str, column: Sequence[Leaf], dtype: Any) -> np.ndarray:
    first, kinds = column[0], set(map(type, column))
    if isinstance(first, (str, bytes)):
        strings = np.empty(len(column), object)
        strings[:] = column
        return strings
    if isinstance(first, _NUMBERS) and (len(kinds) == 1 or dtype is not None):
        return np.array(column, getattr(first, "dtype", dtype))
    arrays = [as_array(path, leaf) for leaf in column]
    spec = LeafSpec(path, arrays[0].dtype, arrays[0].shape, None)
    for array in arrays:
        if array.shape != spec.shape or array.dtype != spec.dtype:
            spec.check(array.shape, array)
    out = empty((len(arrays), *spec.shape), spec.dtype)
    if not spec.shape:
        return np.stack(arrays, out=out)
    # `np.stack` would first make a view with one more dim of every example.
    rows, *others = spec.shape
    np.concatenate(arrays, out=out.reshape(len(arrays) * rows, *others))
    return out


# Messages.


def _structure_error(example: PyTree, paths: Sequence[str]) -> DataError:
    names = ", ".join(repr(path) for path, _ in named_leaves(example)[0]) or "none"
    return DataError(
        f"an example has another structure than the first one: leaves {names} instead "
        f"of {', '.join(map(repr, paths)) or 'none'}. Lists of numbers count as "
        "structure: make them arrays with np.asarray."
    )


def ambiguous(what: str) -> str:
    """Returns the message that asks for `batched=`, since a guess could be wrong."""
    return (
        f"the elements of {what} may be examples or batches: all their arrays have the "
        "same first dim. Say batched=False for examples, or batched=True for batches."
    )


def no_rows(epoch: int) -> str:
    """Returns the message about an epoch, counted from 0, that has no examples."""
    if not epoch:
        return "the source is empty: it yielded no examples."
    return (
        f"the source yielded no examples in epoch {epoch + 1}, though it did before. A "
        "function that makes a generator must make a new one at every call."
    )


def rows_text(count: int) -> str:
    """Returns a number of rows in words."""
    return f"{count} row" if count == 1 else f"{count} rows"
