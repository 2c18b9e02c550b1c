"""What the examples of a source are: the first one tells, and all others keep to it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshlayout import _jax
from meshlayout._render.tables import array_text
from meshlayout.data.leaves import empty, leaf_text, named_leaves
from meshlayout.errors import DataError


@dataclass(frozen=True)
class LeafSpec:
    """One leaf of the examples.

    Attributes:
        path: Its name.
        dtype: Its dtype in the source.
        shape: Its shape in one example.
        to: Its dtype on the devices, or None for strings, which stay on the host.
    """

    path: str
    dtype: Any
    shape: tuple[int, ...]
    to: Any

    @property
    def text(self) -> str:
        """How it is called in a sentence."""
        return leaf_text(self.path)

    @property
    def narrows(self) -> bool:
        """Whether there are values in the source that do not fit on the devices."""
        if self.to is None or self.dtype == self.to:
            return False
        return jnp.issubdtype(self.dtype, np.integer)

    def converted(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns values in the dtype that they have on the devices.

        Args:
            values: Rows of this leaf.

        Raises:
            DataError: If an integer does not fit.
        """
        if self.to is None or values.dtype == self.to:
            return values
        self.check_fits(values)
        with np.errstate(over="ignore"):  # to infinity, as JAX does
            found = empty(values.shape, self.to)
            found[...] = values
            return found

    def check_fits(self, values: np.ndarray[Any, Any]) -> None:
        """Raises DataError if an integer does not fit on the devices.

        Args:
            values: Rows of this leaf.
        """
        if not self.narrows or not values.size:
            return
        bounds = np.iinfo(self.to)
        for found in (values.min(), values.max()):
            if not bounds.min <= found <= bounds.max:
                msg = (
                    f"{self.text} has the value {found}, which does not fit into "
                    f"{self.to}: without jax_enable_x64, {self.dtype} becomes "
                    f"{self.to}. Set jax.config.update('jax_enable_x64', True), or "
                    "give smaller numbers."
                )
                raise DataError(msg)


@dataclass(frozen=True)
class Element:
    """What one example is.

    Attributes:
        treedef: The structure.
        leaves: Its leaves, in JAX's order.
    """

    treedef: Any
    leaves: tuple[LeafSpec, ...]

    def with_objects(self) -> "Element":
        """Returns it with strings as objects: their lengths differ between blocks."""
        leaves = tuple(
            replace(spec, dtype=np.dtype(object)) if spec.to is None else spec
            for spec in self.leaves
        )
        return replace(self, leaves=leaves)

    def checked(self, rows: Any) -> list[np.ndarray[Any, Any]]:
        """Returns the leaves of some rows.

        Args:
            rows: A tree of arrays with a dim for the examples.

        Raises:
            DataError: If they are of other structure, dtype or shape than the first.
        """
        found, treedef = jax.tree.flatten(rows)
        if treedef != self.treedef:
            self._raise_structure(rows)
        for spec, leaf in zip(self.leaves, found, strict=True):
            if leaf.shape[1:] != spec.shape or leaf.dtype != spec.dtype:
                _check_like(spec, leaf)
        return found

    def _raise_structure(self, rows: Any) -> None:
        names = [path for path, _ in named_leaves(rows)[0]]
        first = [spec.path for spec in self.leaves]
        msg = (
            "an example has another structure than the first one: leaves "
            f"{_listed(names)} instead of {_listed(first)}. Lists of numbers count as "
            "structure: make them arrays with np.asarray."
        )
        raise DataError(msg)


def describe(rows: Any, strings: str, note: Callable[[str], None]) -> Element:
    """Returns what the examples are, from the first ones.

    Args:
        rows: A tree of arrays with a dim for the examples.
        strings: `"error"` or `"host"`.
        note: Called with a sentence about every leaf that is converted.

    Raises:
        DataError: If a leaf cannot be placed: objects, strings unless they stay on the
            host, dtypes that JAX does not have; or if there is none.
    """
    named, treedef = named_leaves(rows)
    if not named:
        msg = "an example has no leaves: there is no array in it."
        raise DataError(msg)
    specs = tuple(
        LeafSpec(path, leaf.dtype, leaf.shape[1:], _target(path, leaf, strings))
        for path, leaf in named
    )
    for spec in specs:
        if spec.to is not None and spec.to != spec.dtype.newbyteorder("="):
            name = spec.path or "the array"
            note(
                f"{name}: {spec.dtype} becomes {spec.to}, as JAX does without "
                "jax_enable_x64."
            )
    return Element(treedef, specs)


def is_string(array: np.ndarray[Any, Any]) -> bool:
    """Tells whether an array holds strings, or objects that all are.

    Args:
        array: The array.
    """
    if array.dtype.kind == "O":
        return all(isinstance(value, (str, bytes)) for value in array.flat)
    return array.dtype.kind in "UST"


def _target(path: str, leaf: np.ndarray[Any, Any], strings: str) -> Any:
    """Returns a leaf's dtype on the devices, or None if it stays on the host."""
    dtype = leaf.dtype
    if is_string(leaf) and leaf.size:
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
    too_wide = dtype.kind in "fc" and dtype.itemsize > 8 * (1 + (dtype.kind == "c"))
    if too_wide or not _jax.is_array_dtype(dtype):
        msg = (
            f"{leaf_text(path)} has dtype {dtype}, which JAX does not have. Convert "
            "it, for instance with array.astype('float32')."
        )
        raise DataError(msg)
    return np.dtype(_jax.canonical_dtype(dtype.newbyteorder("=")))


def _check_like(spec: LeafSpec, leaf: np.ndarray[Any, Any]) -> None:
    if leaf.shape[1:] != spec.shape:
        msg = (
            f"{spec.text} is ragged: an example has shape {leaf.shape[1:]}, and the "
            f"first one has {spec.shape}. Pad the examples to one shape."
        )
        raise DataError(msg)
    if spec.to is None and is_string(leaf):
        return  # strings of another length
    msg = (
        f"{spec.text} changes its dtype: an example is "
        f"{array_text(leaf.dtype, leaf.shape[1:])}, and the first one is "
        f"{array_text(spec.dtype, spec.shape)}. Give all examples one dtype."
    )
    raise DataError(msg)


def _listed(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names) if names else "none"
