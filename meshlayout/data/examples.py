"""Examples on the host: their leaves as arrays, and what all examples share.

A step is compiled for one structure, and one shape and dtype per leaf. So the first
example decides them, and every later one is checked against it; an error names the leaf
that differs. Leaves keep the dtype of the source until a batch is complete, and are
then narrowed to JAX's dtypes in one pass, which checks that no integer changes.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshlayout import _jax
from meshlayout._annotations import Batch, Leaf, PyTree
from meshlayout._checks import type_text
from meshlayout._render.tables import array_text
from meshlayout.arrays.placement import plain_array
from meshlayout.data.report import PipelineReport
from meshlayout.errors import DataError


NUMBERS = (bool, int, float, complex, np.generic)


@dataclass(frozen=True)
class LeafSpec:
    """One leaf of the examples, with the dtype and shape in the source."""

    path: str
    dtype: np.dtype
    shape: tuple[int, ...]
    to: np.dtype | None  # on the devices; None for strings, which stay on the host
    is_weight: bool = False

    def converted(self, values: np.ndarray) -> np.ndarray:
        """Returns rows in the dtype of the devices, if all integers fit."""
        if self.to is None or values.dtype == self.to:
            return values
        if values.size and values.dtype.kind in "iu":
            low, high = values.min(), values.max()
            bounds = np.iinfo(self.to)
            if low < bounds.min or high > bounds.max:
                worst = high if high > bounds.max else low
                raise DataError(
                    f"{leaf_text(self.path)} has the value {worst}, which does not fit "
                    f"into {self.to}, JAX's {self.dtype} without jax_enable_x64."
                )
        with np.errstate(over="ignore"):  # to infinity, as JAX does
            return values.astype(self.to)

    def check(self, leaf: np.ndarray, *rows: int) -> None:
        """Raises DataError if a leaf does not fit one example, or `rows` examples."""
        # NumPy's dtypes of strings differ with their lengths.
        is_same = leaf.dtype == self.dtype or (self.to is None and is_string(leaf))
        if is_same and leaf.shape == (*rows, *self.shape):
            if self.is_weight and not ((leaf >= 0) & np.isfinite(leaf)).all():
                msg = f"weights must be finite and not negative; {self.path!r} has"
                raise DataError(f"{msg} values from {leaf.min()} to {leaf.max()}.")
            return
        first = array_text(self.dtype, (*rows, *self.shape))
        raise DataError(
            f"{leaf_text(self.path)} is {array_text(leaf.dtype, leaf.shape)}, and must "
            f"be {first}: all examples have the shape and dtype of the first one."
        )


@dataclass(frozen=True)
class ExampleSpec:
    """The structure of one example, and its leaves in JAX's order."""

    treedef: Any
    leaves: tuple[LeafSpec, ...]

    def checked(self, rows: PyTree, count: int | None = None) -> list[np.ndarray]:
        """Returns the checked leaves of `count` rows, or of a batch."""
        leaves = self.treedef.flatten_up_to(rows)  # whose error names what differs
        for number, (spec, leaf) in enumerate(zip(self.leaves, leaves, strict=True)):
            leaves[number] = array = as_array(spec.path, leaf)
            count = len(array) if count is None and array.ndim else count
            spec.check(array, count or 0)
        return leaves


@dataclass(frozen=True)
class Division:
    """How a source is cut into batches of `size` rows, and which of them are kept.

    These are `rows(count)` of `count` rows, with the last row repeated as padding.
    """

    source: Any
    spec: ExampleSpec
    size: int
    rows: Callable[[int], np.ndarray]
    remainder: str
    clock: PipelineReport


def describe(rows: PyTree, strings: str, key: str | int | None = None) -> ExampleSpec:
    """Returns the spec of the examples, given the first one and the key of weights."""
    named, treedef = named_leaves(rows)
    if not named:
        raise DataError("an example has no leaves: there is no array in it.")
    specs: list[LeafSpec] = []
    for path, leaf in named:
        to = _device_dtype(path, leaf, strings)
        specs.append(LeafSpec(path, leaf.dtype, leaf.shape[1:], to, path == str(key)))
    return ExampleSpec(treedef, tuple(specs))


def _device_dtype(path: str, leaf: np.ndarray, strings: str) -> np.dtype | None:
    dtype = leaf.dtype
    if is_string(leaf) and leaf.size:  # an empty array of objects is not of strings
        if strings == "host":
            return None
        what = (
            "holds strings, which devices do not take. Of labels, after dropna, write "
            "codes, names = pd.factorize(labels), of features pd.get_dummies(frame); "
            "or leave it out, or give distribute_dataset strings='host'."
        )
    # JAX would silently convert long doubles ("g", "G") to float64.
    elif dtype.char in "OgG" or not _jax.is_array_dtype(dtype):
        what = (
            f"has dtype {dtype}, which JAX lacks. Drop missing values, pad rows, write "
            "(x - x.min()).dt.days of dates, pd.factorize(x) of text, or x.astype(...)."
        )
        if dtype.char == "O" and all(isinstance(x, NUMBERS) for x in leaf.flat):
            what = "has dtype object, though of numbers: write x.astype('float32')."
    else:
        return np.dtype(_jax.canonical_dtype(dtype.newbyteorder("=")))
    raise DataError(f"{leaf_text(path)} {what}")


def is_string(array: np.ndarray) -> bool:
    """Returns whether an array holds strings, or objects that are all strings."""
    if array.dtype.kind == "O":
        return all(isinstance(value, (str, bytes)) for value in array.flat)
    return array.dtype.kind in "UST"


def named_leaves(tree: PyTree) -> tuple[list[tuple[str, Leaf]], Any]:
    """Returns the leaves of a tree with their paths, and its structure."""
    entries, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return [(leaf_path(keys), leaf) for keys, leaf in entries], treedef


def leaf_path(keys: tuple[Any, ...]) -> str:
    """Returns a JAX key path as a leaf's path."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def leaf_text(path: str) -> str:
    """Returns the name of a leaf in messages; the path of a single array is empty."""
    return f"leaf {path!r}" if path else "the array"


def as_array(path: str, leaf: Leaf) -> np.ndarray:
    """Returns anything array-like, a number or a string as an array, without a copy."""
    if type(leaf) is np.ndarray:
        return leaf
    if isinstance(leaf, (str, bytes)):
        return np.array(leaf, dtype=object)  # NumPy's own strings lose trailing nulls
    if isinstance(leaf, NUMBERS):
        return np.asarray(leaf)
    if type(leaf).__module__.partition(".")[0] == "torch":
        leaf = leaf.detach().cpu()
        if str(leaf.dtype) == "torch.bfloat16":  # which NumPy has through ml_dtypes
            bits: Any = leaf.contiguous().view(sys.modules["torch"].int16)
            return bits.numpy().view(np.dtype("bfloat16"))
    array = plain_array(leaf, leaf_text(path), error=DataError)
    if array.dtype == object and not hasattr(leaf, "__array__"):
        raise DataError(
            f"{leaf_text(path)} is {type_text(leaf)}, which is not an array, number or "
            "string. Leave it out of the examples, or make it an array."
        )
    return array


def looks_batched(element: PyTree) -> bool:
    """Returns whether an element could be a batch: all arrays share their first dim."""
    leaves = jax.tree.leaves(element)
    sizes = {getattr(x, "shape", ())[:1] if hasattr(x, "dtype") else () for x in leaves}
    return len(sizes) == 1 and sizes != {()}


def as_batch(batch: Batch) -> tuple[PyTree, int]:
    """Returns a user's batch as a tree of NumPy arrays, and the number of its rows."""
    named, treedef = named_leaves(batch)
    leaves = [as_array(path, leaf) for path, leaf in named]
    sizes = {leaf.shape[:1] for leaf in leaves}
    if len(sizes) != 1 or sizes == {()}:
        shapes = ", ".join(str(leaf.shape) for leaf in leaves)
        raise DataError(
            f"the arrays of a batch have no batch dim in common: {shapes or 'none'}. "
            "If the source yields single examples, say batched=False."
        )
    return treedef.unflatten(leaves), sizes.pop()[0]


def stack(examples: Sequence[PyTree]) -> Any:
    """Stacks examples of one structure, whose leaves agree in shape and dtype.

    Strings become an array of objects.
    """
    named, treedef = named_leaves(examples[0])
    flat = [treedef.flatten_up_to(example) for example in examples]
    columns = zip([path for path, _ in named], zip(*flat, strict=True), strict=True)
    return treedef.unflatten(_stacked(path, column) for path, column in columns)


def _stacked(path: str, column: Sequence[Leaf]) -> np.ndarray:
    if isinstance(column[0], (str, bytes)):
        strings = np.empty(len(column), object)
        strings[:] = column
        return strings
    if isinstance(column[0], NUMBERS) and len(set(map(type, column))) == 1:
        return np.array(column)
    arrays = [as_array(path, leaf) for leaf in column]
    spec = LeafSpec(path, arrays[0].dtype, arrays[0].shape, None)
    for array in arrays:
        if array.shape != spec.shape or array.dtype != spec.dtype:
            spec.check(array)
    return np.stack(arrays, dtype=spec.dtype)


def ambiguous(what: str) -> str:
    """Returns the message that asks for `batched=`, since a guess could be wrong."""
    return (
        f"the elements of {what} may be examples or batches: all their arrays have the "
        "same first dim. Say batched=False for examples, or batched=True for batches."
    )


def no_rows(epoch: int, count: int = 0) -> str:
    """Returns the message about an epoch, from 0, with too few rows for a batch."""
    if count:
        return (
            f"the source has {rows_text(count)} in epoch {epoch + 1}, fewer than a "
            "batch: remainder='drop' drops all of them. Take a smaller "
            "global_batch_size, or another remainder=."
        )
    if not epoch:
        return "the source is empty: it yielded no examples."
    return (
        f"the source yielded no examples in epoch {epoch + 1}, though it did before. A "
        "function that makes a generator must make a new one at every call."
    )


def rows_text(count: int) -> str:
    """Returns a number of rows in words."""
    return f"{count} row" if count == 1 else f"{count} rows"
