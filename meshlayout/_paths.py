"""The path grammar: the name of a leaf, the same for NNX, Linen, Optax and pytrees.

A path is the keys that a user wrote, joined by `/`, such as `encoder/layers/0/kernel`.
The `value` inside a Flax variable or box is not part of it, and neither is the `params`
collection at the root of Linen variables, unless the whole path is requested.

JAX flattens trees with an object per key of every path, and its garbage collector
walks all of them: for 100,000 leaves that is four fifths of the time. Here only leaves
come from JAX; paths are strings that grow on the way down, through the containers that
JAX itself would open, in its order.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from flax import nnx
from flax.core import meta
from jax.tree_util import keystr, tree_flatten_with_path

from meshlayout._annotations import Box, PyTree
from meshlayout.errors import MeshLayoutError


class Leaf(NamedTuple):
    """One leaf of a tree.

    Attributes:
        path: Its name.
        value: The array, abstract array or other object there.
        box: The Flax variable or metadata box around it, or None.
    """

    path: str
    value: Any
    box: Box = None


@dataclass(frozen=True)
class Flat:
    """A flattened tree.

    Attributes:
        leaves: Its leaves, in JAX's order.
        unflatten: Builds a tree of the same structure from other leaves. It has the
            contents of Flax variables and boxes in their place, so that it is a pytree
            prefix of the original.
        node_types: The types of the containers.
    """

    leaves: list[Leaf]
    unflatten: Callable[[Sequence[Any]], PyTree]
    node_types: frozenset[type]


def flatten(tree: PyTree, *, whole: bool = False) -> Flat:
    """Flattens a tree into named leaves.

    Args:
        tree: An NNX module or anything that holds modules, an NNX state, Linen
            variables, an Optax state, or any other pytree. A module becomes its
            `nnx.State`, in which a shared variable occurs once.
        whole: Whether paths keep a `params` at the root.

    Raises:
        MeshLayoutError: If two leaves have the same path.
    """
    try:
        jax.tree.structure(tree)  # only for its errors
    except ValueError as error:  # keys of a dict that have no order
        first = str(error).partition("\n")[0]
        msg = f"JAX cannot flatten the tree: {first} Use keys of one type."
        raise MeshLayoutError(msg) from None
    parts = _Parts.of(tree, _is_box_or_module_type)
    if any(map(_is_module_type, parts.leaf_types)):
        tree = nnx.state(tree)
        parts = _Parts.of(tree, _is_box_type)
    paths = parts.paths if whole else _without_params(tree, parts.paths)
    node_types = frozenset(parts.node_types)
    if not any(map(_is_box_type, parts.leaf_types)):
        leaves = list(map(Leaf, paths, parts.leaves))
        _check_unique(leaves)
        return Flat(leaves, jax.tree.structure(tree).unflatten, node_types)
    leaves: list[Leaf] = []
    boxes: list[tuple[int, Any, int]] = []  # index, structure, number of leaves
    for index, (path, value) in enumerate(zip(paths, parts.leaves, strict=True)):
        if not _is_box(value):
            leaves.append(Leaf(path, value))
            continue
        inner = _Parts.of(box_value(value), _is_box_type, path)
        inner_leaves, inner_def = jax.tree.flatten(box_value(value))
        leaves += [
            Leaf(name, part, value)
            for name, part in zip(inner.paths, inner_leaves, strict=True)
        ]
        boxes.append((index, inner_def, len(inner_leaves)))
    _check_unique(leaves)
    treedef = jax.tree.structure(tree, is_leaf=_is_box)

    def unflatten(values: Sequence[Any]) -> PyTree:
        rest = iter(values)
        filled: list[Any] = []
        for index, inner_def, count in boxes:
            filled += [next(rest) for _ in range(index - len(filled))]
            filled.append(inner_def.unflatten([next(rest) for _ in range(count)]))
        return treedef.unflatten([*filled, *rest])

    return Flat(leaves, unflatten, node_types)


def leaf_names(
    tree: PyTree, is_leaf: Callable[[Any], bool] | None = None
) -> Iterator[str]:
    """Yields the path of every leaf in a tree.

    Unlike for `flatten`, a variable that modules share has several paths, and two
    leaves may have the same path.
    """
    parts = _Parts.of(tree, _is_box_type, is_leaf=is_leaf)
    paths = _without_params(tree, parts.paths)
    for path, node in zip(paths, parts.leaves, strict=True):
        if not _is_box(node):
            yield path
            continue
        # A box may add a key of its own, such as `value`, which paths leave out.
        count = len(jax.tree.leaves(node, is_leaf=is_leaf))
        names = _Parts.of(box_value(node), _is_box_type, path, is_leaf).paths
        yield from names if len(names) == count else [path] * count


def shared_paths(tree: PyTree) -> dict[str, str]:
    """Returns the other paths of variables that NNX modules share.

    `flatten` names a shared variable once, by the first of its paths.

    Returns:
        The first path by each other path: `{"out/kernel": "embed/embedding"}`.
    """
    if not holds_modules(tree):
        return {}
    first: dict[int, str] = {}
    others: dict[str, str] = {}

    def visit(node: PyTree, path: str, seen: tuple[int, ...]) -> None:
        if isinstance(node, nnx.Variable):
            if first.setdefault(id(node), path) != path:
                others[path] = first[id(node)]
            return
        if id(node) in seen:  # a module that holds its parent
            return
        if _is_module(node) and not isinstance(node, (Mapping, Sequence)):
            items = sorted(vars(node).items())
        elif isinstance(node, Mapping):
            items = sorted(node.items(), key=lambda item: str(item[0]))
        elif isinstance(node, Sequence) and not isinstance(node, (str, bytes)):
            items = list(enumerate(node))
        else:
            return
        for key, child in items:
            visit(child, f"{path}/{key}" if path else str(key), (*seen, id(node)))

    visit(tree, "", ())
    return others


def holds_modules(tree: PyTree) -> bool:
    """Returns whether a tree is, or holds, NNX modules or other NNX objects."""
    if isinstance(tree, nnx.State):
        return False
    return any(map(_is_module, jax.tree.leaves(tree, is_leaf=_is_module)))


def is_nnx_object(node: PyTree) -> bool:
    """Returns whether this is an NNX module, variable, Rngs or other object.

    They are pytrees to JAX: `jax.tree.map` returns a copy, whose random streams and
    variables are not those of the original.
    """
    return isinstance(node, (nnx.Pytree, nnx.Variable)) and not isinstance(
        node, nnx.State
    )


def key_name(key: Any) -> str:
    """Returns one key of a JAX key path, as in paths."""
    return keystr((key,), simple=True)


def children(node: PyTree) -> list[tuple[str, Any]] | None:
    """Returns the named children of one node of a pytree, or None for a leaf."""
    one_level = tree_flatten_with_path(node, is_leaf=lambda other: other is not node)[0]
    if len(one_level) == 1 and one_level[0][1] is node:
        return None
    return [(key_name(keys[0]) if keys else "", child) for keys, child in one_level]


def box_value(box: Box) -> Any:
    """Returns the raw value of a Flax variable or box."""
    if isinstance(box, nnx.Variable):
        # get_raw_value is new in flax 0.12. `.value` and `[...]` would run hooks.
        return box.get_raw_value() if hasattr(box, "get_raw_value") else box.raw_value
    # Boxes may be nested: the innermost value.
    inner = box.value if hasattr(box, "value") else box.unbox()
    return box_value(inner) if _is_box(inner) else inner


@dataclass
class _Parts:
    """The leaves of a tree with their paths, in JAX's order, and their types."""

    paths: list[str]
    leaves: list[Any]
    leaf_types: set[type]
    node_types: set[type]

    @classmethod
    def of(
        cls,
        tree: PyTree,
        is_end: Callable[[type], bool],
        prefix: str = "",
        is_leaf: Callable[[Any], bool] | None = None,
    ) -> "_Parts":
        """Flattens a tree.

        Args:
            tree: The tree.
            is_end: Which types are leaves although JAX would open them.
            prefix: The beginning of all paths.
            is_leaf: As for `jax.tree.flatten`.
        """
        paths: list[str] = []
        leaves: list[Any] = []
        leaf_types: set[type] = set()
        node_types: set[type] = set()

        def visit(node: PyTree, path: str) -> None:
            kind = type(node)
            if is_leaf is not None and is_leaf(node):
                paths.append(path)
                leaves.append(node)
                return
            if node is None:
                return
            # The usual containers without asking JAX, which makes objects for keys.
            if kind is dict:
                items = [(key, node[key]) for key in sorted(node)]
            elif kind is list or kind is tuple:
                items = list(enumerate(node))
            elif kind not in leaf_types and not is_end(kind):
                items = children(node)
            else:
                items = None
            if items is None:
                leaf_types.add(kind)
                paths.append(path)
                leaves.append(node)
                return
            node_types.add(kind)
            start = f"{path}/" if path else ""
            for key, child in items:
                if type(child) in leaf_types:
                    paths.append(f"{start}{key}")
                    leaves.append(child)
                else:
                    visit(child, path if key == "" else f"{start}{key}")

        visit(tree, prefix)
        return cls(paths, leaves, leaf_types, node_types)


def _is_box(node: PyTree) -> bool:
    return _is_box_type(type(node))


def _is_module(node: PyTree) -> bool:
    return _is_module_type(type(node))


@functools.cache
def _is_box_type(kind: type) -> bool:
    # Called for every node of a tree, and `issubclass` of nnx.Variable is slow.
    return issubclass(kind, (nnx.Variable, meta.AxisMetadata))


@functools.cache
def _is_module_type(kind: type) -> bool:
    return issubclass(kind, nnx.Pytree) and not issubclass(kind, nnx.State)


@functools.cache
def _is_box_or_module_type(kind: type) -> bool:
    return _is_box_type(kind) or _is_module_type(kind)


def _without_params(tree: PyTree, paths: list[str]) -> list[str]:
    """Drops Linen's `params` collection from paths, unless two would become one."""
    if not isinstance(tree, Mapping) or not isinstance(tree.get("params"), Mapping):
        return paths
    start = "params/"
    inside = {path.removeprefix(start) for path in paths if path.startswith(start)}
    if any(path in inside for path in paths if not path.startswith(start)):
        return paths
    return [path.removeprefix(start) for path in paths]


def _check_unique(leaves: list[Leaf]) -> None:
    if len({leaf.path for leaf in leaves}) == len(leaves):
        return
    seen: set[str] = set()
    for leaf in leaves:
        if leaf.path in seen:
            msg = (
                f"two leaves have the path {leaf.path!r}: a key that contains '/' "
                "reads like two keys, and 1 like '1'. Rename one of them."
            )
            raise MeshLayoutError(msg)
        seen.add(leaf.path)
