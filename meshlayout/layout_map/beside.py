"""Finds optimiser states inside a tree, and the parameters that lie beside them."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from meshlayout import _paths
from meshlayout.layout_map.follow import Slot, children, find_slots


# What Flax and most loops call it.
OPT_STATE = "opt_state"


@dataclass(frozen=True)
class Beside:
    """An optimiser state in a tree. Places count the leaves of the whole tree.

    Attributes:
        places: The places of its leaves.
        slots: One entry per leaf of it, as `find_slots` gives them.
        params: The places of its parameters.
    """

    places: range
    slots: list[Slot | None]
    params: list[int]


def find_beside(tree: Any) -> Iterator[Beside]:
    """Yields every optimiser state whose parameters are in the same tree.

    That is an Optax state, or a subtree named `opt_state` (in an NNX state, dicts
    stand for Optax's types), with parameters of its structure beside it or beside
    what it is part of, the nearest first.

    Args:
        tree: What a layout map resolves.
    """
    if _paths.holds_modules(tree):
        tree = nnx.state(tree)
    if _holds_optimizer(tree):
        yield from _walk(_Part("", tree, 0), [])


def _holds_optimizer(tree: Any) -> bool:
    """Tells, fast, whether there may be an optimiser state."""
    if any(map(_is_optax, jax.tree.leaves(tree, is_leaf=_is_optax))):
        return True
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return any(_is_named(key) for keys, _ in paths for key in keys)


def _is_named(key: Any) -> bool:
    return OPT_STATE in (getattr(key, "key", None), getattr(key, "name", None))


def _is_optax(node: Any) -> bool:
    """Tells whether a node is a state that one of Optax's transformations made."""
    return _is_optax_type(type(node))


@functools.cache
def _is_optax_type(kind: type) -> bool:
    return hasattr(kind, "_fields") and kind.__module__.partition(".")[0] == "optax"


@dataclass(frozen=True)
class _Part:
    """A subtree, its name, and the place of its first leaf."""

    name: str
    node: Any
    start: int

    def parts(self) -> list["_Part"]:
        parts = []
        at = self.start
        for name, node in children(self.node) or ():
            parts.append(_Part(name, node, at))
            at += len(jax.tree.leaves(node))
        return parts


def _walk(part: _Part, around: list[_Part]) -> Iterator[Beside]:
    """Walks down; `around` are the neighbours passed on the way, nearest first."""
    parts = part.parts()
    for one in parts:
        others = [other for other in parts if other is not one]
        nearest = [other for other in others if not _is_state(other)]
        # Others may have the same structure, such as an average of the parameters.
        nearest.sort(key=lambda other: other.name not in ("params", "model"))
        if _is_state(one):
            yield from _owned(one, nearest + around)
        else:
            yield from _walk(one, nearest + around)


def _is_state(part: _Part) -> bool:
    return part.name == OPT_STATE or _is_optax(part.node)


def _owned(opt_state: _Part, candidates: list[_Part]) -> Iterator[Beside]:
    for part in candidates:
        for kind in (None, *_variable_types(part.node)):
            params = part.node if kind is None else _only(part.node, kind)
            slots = find_slots(opt_state.node, params)
            if _fits(slots):
                start = opt_state.start
                places = range(start, start + len(slots))
                yield Beside(places, slots, _places(part, kind))
                return


def _fits(slots: list[Slot | None]) -> bool:
    """Tells parameters from what else has their structure, such as a counter."""
    found = [slot for slot in slots if slot is not None]
    return any(slot.kept for slot in found) and all(
        slot.kept is not None for slot in found
    )


def _variable_types(node: Any) -> list[type]:
    """Returns what can be optimised alone: `nnx.Param`, then the types there are."""
    leaves = jax.tree.leaves(node, is_leaf=_is_variable)
    found = [type(leaf) for leaf in leaves if _is_variable(leaf)]
    return list(dict.fromkeys([nnx.Param, *found])) if found else []


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _only(node: Any, kind: type) -> Any:
    """Returns nested dicts of the variables of one type."""
    if _is_variable(node):
        return node if isinstance(node, kind) else None
    items = node.items() if isinstance(node, Mapping) else children(node) or ()
    kept = {key: _only(child, kind) for key, child in items}
    return {key: child for key, child in kept.items() if child is not None} or None


def _places(part: _Part, kind: type | None) -> list[int]:
    """Returns the places of the leaves that `_only` keeps."""
    places = []
    at = part.start
    for leaf in jax.tree.leaves(part.node, is_leaf=_is_variable):
        count = len(jax.tree.leaves(leaf))
        if kind is None or isinstance(leaf, kind):
            places.extend(range(at, at + count))
        at += count
    return places
