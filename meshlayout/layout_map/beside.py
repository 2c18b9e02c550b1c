"""Finds optimiser states inside a tree, and the parameters that lie beside them."""

import bisect
import functools
from collections.abc import Iterator, Mapping, Sequence
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
        name: What it is called, for messages.
        places: The places of its leaves.
        slots: One entry per leaf of it, as `find_slots` gives them.
        owners: For each tree of parameters that it may belong to, their name and
            places. More than one where nothing tells them apart.
    """

    name: str
    places: range
    slots: list[Slot | None]
    owners: list[tuple[str, list[int]]]


def find_beside(tree: Any, leaves: Sequence[_paths.Leaf]) -> Iterator[Beside]:
    """Yields every optimiser state whose parameters are in the same tree.

    That is an Optax state, or a subtree named `opt_state` (in an NNX state, dicts
    stand for Optax's types), with parameters of its structure beside it or beside
    what it is part of. The nearest are taken; of several, those named `params` or
    `model`, or those whose name is in the state's own, as `gen` in `gen_opt`.

    Args:
        tree: What a layout map resolves.
        leaves: Its leaves, as `_paths.flatten` gives them.
    """
    is_named = any(OPT_STATE in leaf.path for leaf in leaves)
    if not is_named and not any(
        map(_is_optax, jax.tree.leaves(tree, is_leaf=_is_optax))
    ):
        return
    if _paths.holds_modules(tree):
        tree = nnx.state(tree)
    states = _state_places(tree)
    if states:
        yield from _walk(_Part.of("", tree, 0), [], states)


def _state_places(tree: Any) -> list[int]:
    """Returns, in order, places of leaves in optimiser states, at least one of each."""
    places: list[int] = []
    at = 0
    entries = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_optax)
    for keys, node in entries:
        size = len(jax.tree.leaves(node)) if _is_optax(node) else 1
        if size and (_is_optax(node) or any(map(_is_named, keys))):
            places.append(at)
        at += size
    return places


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
    """A subtree, its name, and the places of its leaves."""

    name: str
    node: Any
    start: int

    end: int

    @classmethod
    def of(cls, name: str, node: Any, start: int) -> "_Part":
        return cls(name, node, start, start + len(jax.tree.leaves(node)))

    def parts(self) -> list["_Part"]:
        parts: list[_Part] = []
        for name, node in children(self.node) or ():
            start = parts[-1].end if parts else self.start
            parts.append(_Part.of(name, node, start))
        return parts

    def holds_any(self, places: list[int]) -> bool:
        first = bisect.bisect_left(places, self.start)
        return first < len(places) and places[first] < self.end

    def is_state(self) -> bool:
        return self.name == OPT_STATE or _is_optax(self.node)


@dataclass(frozen=True)
class _Level:
    """One step on the way down to a state: the neighbours, and where it went on."""

    branch: str
    neighbours: list[_Part]


def _walk(part: _Part, above: list[_Level], states: list[int]) -> Iterator[Beside]:
    """Walks down to the states; `above` are the levels on the way, nearest first."""
    parts = part.parts()
    for one in parts:
        if not one.holds_any(states):
            continue
        neighbours = [other for other in parts if other is not one]
        levels = [_Level(one.name, neighbours), *above]
        if one.is_state():
            yield from _owned(one, levels, states)
        else:
            yield from _walk(one, levels, states)


def _owned(state: _Part, levels: list[_Level], states: list[int]) -> Iterator[Beside]:
    names = [level.branch for level in levels]
    for level in levels:
        free = [one for one in level.neighbours if not one.holds_any(states)]
        found = _fitting(state, free)
        if not found:  # or parts of the neighbours, as params["gen"] is
            inner = [part for one in level.neighbours for part in one.parts()]
            found = _fitting(state, [p for p in inner if not p.holds_any(states)])
        if found:
            best = max(_rank(part, names) for part, _, _ in found)
            owners = [one for one in found if _rank(one[0], names) == best]
            slots = owners[0][1]
            places = range(state.start, state.start + len(slots))
            named = [(part.name, at) for part, _, at in owners]
            yield Beside("/".join(reversed(names)), places, slots, named)
            return


def _rank(part: _Part, names: list[str]) -> int:
    """Returns how surely a part holds the parameters of a state, by its name."""
    if part.name in names:
        return 3
    if part.name in ("params", "model"):
        return 2
    return int(any(part.name in name for name in names))


def _fitting(
    state: _Part, candidates: list[_Part]
) -> list[tuple[_Part, list[Slot | None], list[int]]]:
    """Returns the parts that have the state's structure, with slots and places."""
    found = []
    for part in candidates:
        for kind in (None, *_variable_types(part.node)):
            params = part.node if kind is None else _only(part.node, kind)
            slots = find_slots(state.node, params)
            if _fits(slots):
                found.append((part, slots, _places(part, kind)))
                break
    return found


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
