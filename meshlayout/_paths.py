"""The path grammar: the name of a leaf, the same for NNX, Linen, Optax and pytrees.

A path is the keys that a user wrote, joined by `/`, such as `encoder/layers/0/kernel`.
The `value` inside a Flax variable or box is not part of it, and neither is the `params`
collection at the root of Linen variables, unless the whole path is requested.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from flax import nnx
from flax.core import meta
from jax.tree_util import keystr, tree_flatten_with_path

from meshlayout._annotations import Box, PyTree
from meshlayout.errors import MeshLayoutError


class Leaf(NamedTuple):
    """One leaf of a tree: its path, its value and the Flax box around it, or None."""

    path: str
    value: Any
    box: Box = None


@dataclass(frozen=True)
class Flat:
    """A flattened tree: its leaves in JAX's order, and how to build one from others.

    The tree holds the contents of Flax variables and boxes in their place.
    """

    leaves: list[Leaf]
    unflatten: Callable[[Sequence[Any]], PyTree]


def flatten(tree: PyTree, *, whole: bool = False) -> Flat:
    """Flattens any pytree into named leaves, or raises MeshLayoutError.

    A module becomes its `nnx.State`. If `whole`, paths keep a `params` at the root.
    """
    if holds_modules(tree):
        tree = nnx.state(with_variables(tree))
    leaves, unflatten = _named(tree)
    paths = [leaf.path for leaf in leaves]
    paths = paths if whole else _without_params(tree, paths)
    for path, count in Counter(paths).items():
        if count > 1:
            raise MeshLayoutError(
                f"two leaves have the path {path!r}: a key that contains '/' reads "
                "like two keys, and 1 like '1'. Rename one of them."
            )
    leaves = [leaf._replace(path=x) for leaf, x in zip(leaves, paths, strict=True)]
    return Flat(leaves, unflatten)


def leaf_names(tree: PyTree) -> list[str]:
    """Returns the path of every leaf in a tree.

    Unlike in `flatten`, a shared variable has several paths, and paths may be equal.
    """
    return _without_params(tree, [leaf.path for leaf in _named(tree)[0]])


def _named(tree: PyTree) -> tuple[list[Leaf], Callable[[Sequence[Any]], PyTree]]:
    """Returns the leaves, and a function that builds a tree from others."""
    entries, treedef = tree_flatten_with_path(tree, is_leaf=is_box)
    leaves: list[Leaf] = []
    contents: list[Any] = []
    for keys, node in entries:
        box, content = (node, box_value(node)) if is_box(node) else (None, node)
        inside = [((), node)] if box is None else tree_flatten_with_path(content)[0]
        leaves += [Leaf(_path((*keys, *inner)), value, box) for inner, value in inside]
        contents.append(content)
    return leaves, jax.tree.structure(treedef.unflatten(contents)).unflatten


def _path(keys: tuple[Any, ...]) -> str:
    # An empty key at the root keeps a tree's own `params` in its paths.
    return keystr(keys, simple=True, separator="/").removeprefix("/")


def key_name(key: Any) -> str:
    """Returns one key of a JAX key path, as in paths."""
    return _path((key,))


def holds_modules(tree: PyTree) -> bool:
    """Returns whether a tree is, or holds, NNX modules or other NNX objects."""
    if isinstance(tree, nnx.State):
        return False
    return any(map(_is_module, jax.tree.leaves(tree, is_leaf=_is_module)))


def is_nnx_object(node: PyTree) -> bool:
    """Returns whether this is an NNX module, variable, Rngs or other object.

    JAX sees pytrees: `jax.tree.map` copies their variables and random streams.
    """
    return isinstance(node, nnx.Variable) or _is_module(node)


class _Beside(nnx.Variable[Any]):
    """A leaf beside NNX objects, as NNX takes numbers for a part of the structure."""


_map = functools.partial(jax.tree.map, is_leaf=is_nnx_object)


def with_variables(tree: PyTree) -> PyTree:
    """Returns a tree of NNX objects in which the other leaves are Variables."""
    return _map(lambda x: x if is_nnx_object(x) else _Beside(x), tree)


def without_variables(tree: PyTree) -> PyTree:
    """Returns the tree that `with_variables` was given."""
    return _map(lambda x: box_value(x) if isinstance(x, _Beside) else x, tree)


def box_value(box: Box) -> Any:
    """Returns the raw value of a Flax variable or box."""
    if isinstance(box, nnx.Variable):
        # get_raw_value is new in flax 0.12. `.value` and `[...]` would run hooks.
        return box.get_raw_value() if hasattr(box, "get_raw_value") else box.raw_value
    # Boxes may be nested: the innermost value.
    inner = box.value if hasattr(box, "value") else box.unbox()
    return box_value(inner) if is_box(inner) else inner


def is_box(node: PyTree) -> bool:
    return _is_kind(type(node), (nnx.Variable, meta.AxisMetadata))


def _is_module(node: PyTree) -> bool:
    return _is_kind(type(node), nnx.Pytree) and not isinstance(node, nnx.State)


# Called for every node of a tree, and `issubclass` of nnx.Variable is slow.
_is_kind = functools.cache(issubclass)


def _without_params(tree: PyTree, paths: list[str]) -> list[str]:
    """Drops Linen's `params` collection from paths, unless two would become one."""
    if not isinstance(tree, Mapping) or not isinstance(tree.get("params"), Mapping):
        return paths
    short = [path.removeprefix("params/") for path in paths]
    return short if len({*short}) == len({*paths}) else paths
