"""A flattened pytree of arrays: its leaves, their names in messages, their layouts.

Every step of a loop may relayout a batch, so paths are computed only if there is a
message to show them.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from meshlayout import _checks, _jax, _paths, _render
from meshlayout._annotations import Leaf, PyTree
from meshlayout.errors import LayoutError
from meshlayout.layout import MATCH, Layout


LayoutLike: TypeAlias = Layout | NamedSharding | PyTree
"""A layout, or a tree of layouts that is a prefix of the tree of arrays."""


class Name:
    """The name of a leaf for messages; its text is made only if it is shown."""

    __slots__ = ("_index", "_root", "_tree")

    def __init__(self, tree: "Tree", index: int, root: str) -> None:
        self._tree, self._index, self._root = tree, index, root

    def __str__(self) -> str:
        path = "/".join(filter(None, [self._root, self._tree.paths[self._index]]))
        return array_text(path, self._tree.leaves[self._index])


Where: TypeAlias = str | Name


class Tree:
    """A pytree, flattened into named leaves."""

    def __init__(
        self, tree: PyTree, is_leaf: Callable[[Any], bool] | None = None
    ) -> None:
        self._tree, self._is_leaf = tree, is_leaf
        self.leaves, self.treedef = jax.tree.flatten(tree, is_leaf=is_leaf)

    @functools.cached_property
    def paths(self) -> list[str]:
        """The path of each leaf."""
        return list(_paths.leaf_names(self._tree, self._is_leaf))

    def items(self) -> list[tuple[str, Leaf]]:
        """Returns the leaves with their paths."""
        return list(zip(self.paths, self.leaves, strict=True))

    def named(self, root: str = "") -> list[tuple[Name, Leaf]]:
        """Returns the leaves with their names for messages."""
        return [(Name(self, i, root), leaf) for i, leaf in enumerate(self.leaves)]

    def unflatten(self, leaves: Iterable[Leaf]) -> PyTree:
        """Returns a tree of the same structure."""
        return self.treedef.unflatten(leaves)

    def listed(self) -> str:
        """Returns the paths of the first leaves, for messages."""
        shown = ", ".join(map(repr, self.paths[:4]))
        return shown + f" and {len(self.paths) - 4} more" * (len(self.paths) > 4)

    def broadcast(self, layout: LayoutLike) -> list[Any]:
        """Returns one layout per leaf, from a single one or a prefix tree."""
        # A spec without a mesh is refused later, by leaf: as a tree of strings, the
        # message would be about structures.
        if _is_layout(layout) or _is_spec(layout):
            return [layout] * len(self.leaves)
        # Numbers stand for the leaves, which may be lists.
        leaves = self.unflatten(range(len(self.leaves)))
        try:
            whole = jax.tree.broadcast(layout, leaves, is_leaf=_is_layout)
        except (ValueError, TypeError):
            others = Tree(layout, _is_layout).listed()
            msg = (
                "the layouts do not have the structure of the arrays: there are "
                f"layouts for {others}, and arrays at {self.listed()}. "
                "Give one layout for all, or a tree of layouts that is a prefix of the "
                "tree of arrays."
            )
            raise LayoutError(msg) from None
        return jax.tree.leaves(whole, is_leaf=_is_layout)


def _is_layout(node: PyTree) -> bool:
    return isinstance(node, (Layout, NamedSharding))


def _is_spec(node: PyTree) -> bool:
    """Returns whether a node is a spec without a mesh, which no function here takes."""
    if isinstance(node, PartitionSpec):
        return True
    return isinstance(node, (list, tuple)) and any(
        isinstance(entry, str) or entry is ... or entry is MATCH for entry in node
    )


def is_number_list(node: PyTree) -> bool:
    """Returns whether a node is a list, possibly nested, of numbers only."""
    return (
        isinstance(node, list)
        and bool(node)
        and all(
            isinstance(item, (bool, int, float, complex, np.generic))
            or is_number_list(item)
            for item in node
        )
    )


def array_text(path: str, x: Leaf) -> str:
    """Returns the name of an array in messages: `encoder/kernel f32[512, 10]`."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        kind = type_text(x.shape, x.dtype)
    else:
        kind = "" if path else describe(x)
    return " ".join(filter(None, [path, kind]))


def type_text(shape: Sequence[int], dtype: DTypeLike | None) -> str:
    """Returns `f32[512, 10]`, or `array[512, 10]` if the dtype is unknown."""
    return _render.array_text("array" if dtype is None else dtype, shape)


def describe(x: Leaf) -> str:
    """Describes a value for an error message about its type."""
    if isinstance(x, (np.ndarray, np.generic)):
        return f"a NumPy array {type_text(x.shape, x.dtype)}"
    if isinstance(x, jax.Array):
        return f"an array {type_text(x.shape, x.dtype)}"
    return _checks.shown(x)


def device_ids(devices: Iterable[_jax.Device]) -> str:
    """Returns `0, 1, 4`."""
    return ", ".join(str(device.id) for device in sorted(devices, key=lambda d: d.id))


def first_line(error: Exception) -> str:
    """Returns the first line of a JAX error, without the dumps below it."""
    line = str(error).strip().split("\n", 1)[0]
    return line if line.endswith((".", "!", "?")) else f"{line}."
