"""A pytree of arrays taken apart: its leaves, how messages name them, its layouts."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from meshlayout import _jax
from meshlayout.errors import LayoutError
from meshlayout.layout import MATCH, Layout


LayoutLike: TypeAlias = Layout | NamedSharding | Any
"""A layout, or a tree of layouts that is a prefix of the tree of arrays."""


class Name:
    """What a message names a leaf by: its text is made when a message is."""

    __slots__ = ("_keys", "_leaf", "_root")

    def __init__(self, root: str, keys: tuple[Any, ...], leaf: Any) -> None:
        self._root, self._keys, self._leaf = root, keys, leaf

    def __str__(self) -> str:
        path = "/".join(filter(None, [self._root, _path(self._keys)]))
        return array_text(path, self._leaf)


Where: TypeAlias = str | Name


class Tree:
    """A pytree taken apart into named leaves."""

    def __init__(self, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> None:
        self._entries, self.treedef = tree_flatten_with_path(tree, is_leaf=is_leaf)
        self.leaves = [leaf for _, leaf in self._entries]

    @property
    def paths(self) -> list[str]:
        """The path of each leaf."""
        return [_path(keys) for keys, _ in self._entries]

    def items(self) -> list[tuple[str, Any]]:
        """Returns the leaves with their paths."""
        return list(zip(self.paths, self.leaves, strict=True))

    def named(self, root: str = "") -> list[tuple[Name, Any]]:
        """Returns the leaves with what a message names each by."""
        return [(Name(root, keys, leaf), leaf) for keys, leaf in self._entries]

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """Returns a tree of the same structure."""
        return self.treedef.unflatten(leaves)

    def spread(self, layout: LayoutLike) -> list[Any]:
        """Returns one layout per leaf, from one for all or a prefix tree."""
        if _is_layout(layout) or _is_spec(layout):
            return [layout] * len(self.leaves)
        numbered = self.unflatten(range(len(self.leaves)))
        given, prefix = jax.tree.flatten(layout, is_leaf=_is_layout)
        try:
            parts = prefix.flatten_up_to(numbered)
        except (ValueError, TypeError) as error:
            msg = (
                f"the layouts {prefix} do not have the structure of the arrays "
                f"{self.treedef}: {first_line(error)} Give one layout for all, or a "
                "tree of layouts that is a prefix of the arrays' tree."
            )
            raise LayoutError(msg) from None
        return [
            one
            for one, part in zip(given, parts, strict=True)
            for _ in jax.tree.leaves(part)
        ]


def _path(keys: tuple[Any, ...]) -> str:
    return keystr(keys, simple=True, separator="/")


def _is_layout(node: Any) -> bool:
    return isinstance(node, (Layout, NamedSharding))


def _is_spec(node: Any) -> bool:
    """Tells whether a node is a spec without a mesh, which no function here takes."""
    if isinstance(node, PartitionSpec):
        return True
    return isinstance(node, (list, tuple)) and any(
        isinstance(entry, str) or entry is ... or entry is MATCH for entry in node
    )


def is_number_list(node: Any) -> bool:
    """Tells whether a node is a list, or lists in a list, of numbers only."""
    return (
        isinstance(node, list)
        and bool(node)
        and all(
            isinstance(item, (bool, int, float, complex, np.generic))
            or is_number_list(item)
            for item in node
        )
    )


def array_text(path: str, x: Any) -> str:
    """Returns how a message names an array: `encoder/kernel f32[512, 10]`."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        kind = kind_text(x.shape, x.dtype)
    else:
        kind = "" if path else describe(x)
    return " ".join(filter(None, [path, kind]))


def kind_text(shape: Sequence[int], dtype: Any) -> str:
    """Returns `f32[512, 10]`."""
    name = "array" if dtype is None else str(dtype)
    for long, short in (("bfloat", "bf"), ("float", "f"), ("complex", "c")):
        if name.startswith(long):
            name = short + name.removeprefix(long)
    name = name.replace("uint", "u") if name.startswith("uint") else name
    name = name.replace("int", "i") if name.startswith("int") else name
    return f"{name}[{', '.join(map(str, shape))}]"


def describe(x: Any) -> str:
    """Returns what a value is, for a message about what it is not."""
    if isinstance(x, (np.ndarray, np.generic)):
        return f"a NumPy array {kind_text(x.shape, x.dtype)}"
    if isinstance(x, jax.Array):
        return f"an array {kind_text(x.shape, x.dtype)}"
    return f"{x!r} of type {type(x).__name__}"


def device_ids(devices: Iterable[_jax.Device]) -> str:
    """Returns `0, 1, 4`."""
    return ", ".join(str(device.id) for device in sorted(devices, key=lambda d: d.id))


def first_line(error: Exception) -> str:
    """Returns what JAX says, without its dumps."""
    line = str(error).strip().split("\n", 1)[0]
    return line if line.endswith((".", "!", "?")) else f"{line}."
