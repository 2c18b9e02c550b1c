"""Examples on the host: their leaves as arrays, and what all of them have in common.

A step is compiled for one structure, and one shape and dtype per leaf. So the first
example decides them, and every later one is checked against it; an error names the leaf
that differs. Leaves keep the dtype of the source until a batch is complete, and are
then narrowed to JAX's dtypes in one pass, which checks that no integer changes.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from meshlayout import _jax
from meshlayout._annotations import Leaf, PyTree
from meshlayout._host_arrays import plain_array
from meshlayout._render.tables import array_text
from meshlayout.errors import DataError


# In bytes: JAX uses a host array's memory on a CPU device without a copy if the memory
# starts at a multiple of this.
_ALIGNMENT = 64


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

    @property
    def text(self) -> str:
        """How a message names the leaf."""
        return leaf_text(self.path)

    def converted(self, values: np.ndarray) -> np.ndarray:
        """Returns rows in the dtype of the devices."""
        if self.to is None or values.dtype == self.to:
            return values
        out = empty(values.shape, self.to)
        self.copy(values, out)
        return out

    def copy(self, values: np.ndarray, out: np.ndarray) -> None:
        """Copies rows of this leaf into an array of the devices' dtype.

        Raises:
            DataError: If an integer does not fit.
        """
        if values.dtype == out.dtype:
            out[...] = values
            return
        if values.size and jnp.issubdtype(values.dtype, np.integer):
            self._check_fits(values)
        with np.errstate(over="ignore"):  # to infinity, as JAX does
            out[...] = values

    def _check_fits(self, values: np.ndarray) -> None:
        bounds: Any = np.iinfo(self.to)
        for extreme in (values.min(), values.max()):
            if not bounds.min <= extreme <= bounds.max:
                msg = (
                    f"{self.text} has the value {extreme}, which does not fit into "
                    f"{self.to}: without jax_enable_x64, {self.dtype} becomes "
                    f"{self.to}. Set jax.config.update('jax_enable_x64', True), or "
                    "give smaller numbers."
                )
                raise DataError(msg)

    def check(self, shape: tuple[int, ...], leaf: np.ndarray) -> None:
        """Raises DataError if a leaf differs from the first example's.

        Args:
            shape: The leaf's shape in one example.
            leaf: The leaf, of one example or of several.
        """
        if shape != self.shape:
            msg = (
                f"{self.text} is ragged: an example has shape {shape}, and the first "
                f"one has {self.shape}. Pad the examples to one shape."
            )
            raise DataError(msg)
        if leaf.dtype == self.dtype or (self.to is None and is_string(leaf)):
            return  # NumPy's dtypes of strings differ with their lengths
        msg = (
            f"{self.text} changes its dtype: an example is "
            f"{array_text(leaf.dtype, shape)}, and the first one is "
            f"{array_text(self.dtype, self.shape)}. Give all examples one dtype."
        )
        raise DataError(msg)


@dataclass(frozen=True)
class ExampleSpec:
    """The structure, dtypes and shapes of one example.

    Attributes:
        treedef: The structure.
        leaves: The leaves, in JAX's order.
    """

    treedef: Any
    leaves: tuple[LeafSpec, ...]

    @property
    def paths(self) -> list[str]:
        """The paths of the leaves."""
        return [leaf.path for leaf in self.leaves]

    def with_objects(self) -> "ExampleSpec":
        """Returns the spec with strings as objects, whose lengths may differ."""
        leaves = tuple(
            replace(spec, dtype=np.dtype(object)) if spec.to is None else spec
            for spec in self.leaves
        )
        return replace(self, leaves=leaves)

    def checked(self, rows: PyTree, count: int | None = None) -> list[np.ndarray]:
        """Returns the leaves of some rows, a tree of arrays with a dim for the rows.

        Args:
            rows: The rows.
            count: How many there must be; None for arrays that are known to agree.

        Raises:
            DataError: If they differ from the first example in structure, dtype or
                shape; or from `count` in their number.
        """
        leaves, treedef = jax.tree.flatten(rows)
        if treedef != self.treedef:
            raise structure_error(rows, self.paths)
        if count is not None:
            leaves = [
                _row_array(spec.path, leaf, count)
                for spec, leaf in zip(self.leaves, leaves, strict=True)
            ]
        for spec, leaf in zip(self.leaves, leaves, strict=True):
            # Compared here first: for every batch, a call per leaf would add up.
            if leaf.shape[1:] != spec.shape or leaf.dtype != spec.dtype:
                spec.check(leaf.shape[1:], leaf)
        return leaves


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


def describe(rows: PyTree, strings: str, warn: Callable[[str], None]) -> ExampleSpec:
    """Returns the spec of the examples, given the first of them.

    Args:
        rows: A tree of arrays with a dim for the examples.
        strings: `"error"` or `"host"`.
        warn: Called with a sentence about every leaf that is narrowed.

    Raises:
        DataError: If there is no leaf, or one that cannot be placed: objects, strings
            unless they stay on the host, dtypes that JAX does not have.
    """
    named, treedef = named_leaves(rows)
    if not named:
        msg = "an example has no leaves: there is no array in it."
        raise DataError(msg)
    specs = tuple(
        LeafSpec(path, leaf.dtype, leaf.shape[1:], _device_dtype(path, leaf, strings))
        for path, leaf in named
    )
    for spec in specs:
        # Another byte order holds the same values: only a narrower dtype is worth a
        # warning.
        if spec.to is not None and spec.to != spec.dtype.newbyteorder("="):
            name = spec.path or "the array"
            warn(
                f"{name}: {spec.dtype} becomes {spec.to}, as JAX does without "
                "jax_enable_x64."
            )
    return ExampleSpec(treedef, specs)


def _device_dtype(path: str, leaf: np.ndarray, strings: str) -> np.dtype | None:
    """Returns a leaf's dtype on the devices, or None if it stays on the host."""
    dtype = leaf.dtype
    if is_string(leaf) and leaf.size:  # an empty array of objects is not of strings
        if strings == "host":
            return None
        msg = (
            f"{leaf_text(path)} holds strings, which devices do not take. Leave it "
            "out, or keep it on the host with strings='host'."
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


def named_leaves(tree: PyTree) -> tuple[list[tuple[str, Leaf]], Any]:
    """Returns the leaves of a tree with their paths, and its structure.

    Raises:
        DataError: If JAX cannot take the tree apart.
    """
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
        leaf: An array, a PyTorch tensor, a number, or a string, which becomes an array
            of one object.

    Raises:
        DataError: If it is anything else.
    """
    if type(leaf) is np.ndarray:
        return leaf
    if isinstance(leaf, (str, bytes)):
        return np.array(leaf, dtype=object)  # NumPy's own strings lose trailing nulls
    if type(leaf).__module__.partition(".")[0] == "torch":
        return tensor_to_numpy(leaf)
    array = plain_array(leaf, leaf_text(path), error=DataError)
    if array.dtype == object and not isinstance(leaf, np.ndarray):
        msg = (
            f"{leaf_text(path)} is of type {type(leaf).__name__}, which is not an "
            "array, number or string. Leave it out of the examples, or make it an "
            "array."
        )
        raise DataError(msg)
    return array


def as_rows(rows: PyTree, count: int) -> PyTree:
    """Returns what a source's `read_rows` returned, as a tree of NumPy arrays.

    Raises:
        DataError: If a leaf is not an array of so many rows.
    """
    named, treedef = named_leaves(rows)
    return treedef.unflatten([_row_array(path, leaf, count) for path, leaf in named])


def _row_array(path: str, leaf: Leaf, count: int) -> np.ndarray:
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


def tensor_to_numpy(tensor: Any) -> np.ndarray:
    """Returns a PyTorch tensor as an array, without a copy if it is on the host.

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
    # `Tensor.numpy` refuses these dtypes, which NumPy has through ml_dtypes: the same
    # bits are viewed as integers on one side and as floats on the other.
    torch: Any = sys.modules["torch"]
    bits = torch.int16 if tensor.element_size() == 2 else torch.uint8
    return tensor.contiguous().view(bits).numpy().view(np.dtype(name))


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
    """Returns an uninitialized array that goes to CPU devices without a copy.

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
