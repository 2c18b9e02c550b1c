"""The one path grammar: a leaf's name, the same for NNX, Linen, Optax and pytrees.

A path is the keys that a user wrote, joined by `/`, as `encoder/layers/0/kernel`.
The `value` inside a Flax variable or box is not part of it, and neither is the `params`
collection at the root of Linen variables, unless the whole path is asked for.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from flax.core import meta
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from meshlayout.errors import MeshLayoutError


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of a tree.

    Attributes:
        path: Its name.
        value: The array, abstract array or other object there.
        box: The Flax variable or metadata box around it, or None.
    """

    path: str
    value: Any
    box: Any = None


@dataclass(frozen=True)
class Flat:
    """A tree, taken apart.

    Attributes:
        leaves: Its leaves, in JAX's order.
        unflatten: Makes a tree of the same structure from other leaves; Flax
            variables and boxes are replaced by what they held, so that the tree is
            a pytree prefix of the original.
    """

    leaves: list[Leaf]
    unflatten: Callable[[Sequence[Any]], Any]


def flatten(tree: Any, *, whole: bool = False) -> Flat:
    """Takes a tree apart into named leaves.

    Args:
        tree: An NNX module or anything that holds some, an NNX state, Linen
            variables, an Optax state, or any other pytree. A module becomes its
            `nnx.State`, in which a shared variable occurs once.
        whole: Whether paths keep a `params` at the root.

    Raises:
        MeshLayoutError: If two leaves have the same path.
    """
    try:
        if holds_modules(tree):
            tree = nnx.state(tree)
        entries, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_box)
    except ValueError as error:  # keys of a dict that cannot be put in order
        first = str(error).partition("\n")[0]
        msg = f"JAX cannot take the tree apart: {first} Use keys of one type."
        raise MeshLayoutError(msg) from None
    skip = None if whole else _params_prefix(tree, entries)
    leaves: list[Leaf] = []
    inner: list[tuple[int, Any]] = []  # per entry: leaves, and the tree in its box
    for keys, value in entries:
        path = "/".join(map(key_name, keys[1:] if skip and keys[0] == skip else keys))
        if not _is_box(value):
            leaves.append(Leaf(path, value))
            inner.append((1, None))
            continue
        held = box_value(value)
        parts, held_def = jax.tree_util.tree_flatten_with_path(held)
        for sub_keys, part in parts:
            names = [path, *map(key_name, sub_keys)]
            leaves.append(Leaf("/".join(filter(None, names)), part, value))
        inner.append((len(parts), held_def))
    _check_unique(leaves)

    def unflatten(new: Sequence[Any]) -> Any:
        at = 0
        rebuilt = []
        for count, held_def in inner:
            part = new[at : at + count]
            at += count
            rebuilt.append(part[0] if held_def is None else held_def.unflatten(part))
        return treedef.unflatten(rebuilt)

    return Flat(leaves, unflatten)


def holds_modules(tree: Any) -> bool:
    """Tells whether a tree is, or holds, NNX modules or other NNX objects."""
    if isinstance(tree, nnx.State):
        return False
    found = jax.tree.leaves(tree, is_leaf=lambda node: _is_module_type(type(node)))
    return any(_is_module_type(type(node)) for node in found)


def is_nnx_object(node: Any) -> bool:
    """Returns whether this is an NNX module, variable, Rngs or other object.

    JAX takes them for pytrees: what `jax.tree.map` makes of one is a copy, whose random
    streams and variables are no longer those of the original.
    """
    return isinstance(node, (nnx.Pytree, nnx.Variable)) and not isinstance(
        node, nnx.State
    )


def key_name(key: Any) -> str:
    """Returns one key of a JAX key path as it is written in a path."""
    kind = type(key)
    if kind is DictKey or kind is FlattenedIndexKey:
        return str(key.key)
    if kind is GetAttrKey:
        return key.name
    return str(key.idx) if kind is SequenceKey else str(key)


def box_value(box: Any) -> Any:
    """Returns what a Flax variable or box holds, as it is."""
    if isinstance(box, nnx.Variable):
        return box.get_raw_value() if hasattr(box, "get_raw_value") else box.raw_value
    # Boxes of boxes: the innermost value.
    held = box.value if hasattr(box, "value") else box.unbox()
    return box_value(held) if _is_box(held) else held


def _is_box(node: Any) -> bool:
    return _is_box_type(type(node))


@functools.cache
def _is_box_type(kind: type) -> bool:
    # Asked for every node of a tree, and nnx.Variable answers slowly.
    return issubclass(kind, (nnx.Variable, meta.AxisMetadata))


@functools.cache
def _is_module_type(kind: type) -> bool:
    return issubclass(kind, nnx.Pytree)


def _params_prefix(tree: Any, entries: list[tuple[tuple[Any, ...], Any]]) -> Any:
    """Returns the key of Linen's `params` collection if it can be left out, or None."""
    if not isinstance(tree, Mapping) or not isinstance(tree.get("params"), Mapping):
        return None
    key = DictKey("params")
    inside = {keys[1:] for keys, _ in entries if keys[0] == key}
    clash = any(keys in inside for keys, _ in entries if keys[0] != key)
    return None if clash else key


def _check_unique(leaves: list[Leaf]) -> None:
    paths = {leaf.path for leaf in leaves}
    if len(paths) == len(leaves):
        return
    seen: set[str] = set()
    for leaf in leaves:
        if leaf.path in seen:
            msg = (
                f"two leaves have the path {leaf.path!r}: a key that holds '/' reads "
                "like two keys, and 1 like '1'. Rename one of them."
            )
            raise MeshLayoutError(msg)
        seen.add(leaf.path)
