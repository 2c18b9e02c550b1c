"""Optimizer states: every slot takes the layout of the parameter it belongs to.

This is decided by structure, not by names, which mislead (`mu` may be a layer). Two
questions: which leaf of an optimizer state belongs to which parameter (`find_slots`),
and, where one tree holds both, which subtrees are optimizer states and which part of
the rest are their parameters (`find_optimizer_states`).
"""

import bisect
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from meshlayout import _paths
from meshlayout._annotations import Leaf, PyTree
from meshlayout.layout import DimSpec, Layout


# Which leaf belongs to which parameter.


@dataclass(frozen=True, slots=True)
class OptimizerSlot:
    """A leaf of an optimizer state that belongs to a parameter.

    Attributes:
        param: The parameter's index in the flat list of parameters.
        dims: For each dim of the leaf, the parameter's dim that it is, or None if
            the parameter has no such dim; None altogether if this cannot be inferred.
    """

    param: int
    dims: tuple[int | None, ...] | None

    def layout(self, rank: int, param: Layout) -> Layout:
        """Returns the parameter's layout, on the dims that a slot of `rank` has."""
        specs: list[DimSpec] = [
            None if dim is None else param.specs[dim] for dim in self.dims or ()
        ]
        specs += [None] * (rank - len(specs))
        return Layout(specs, param.mesh, memory_kind=param.memory_kind)


def find_slots(opt_state: PyTree, params: PyTree) -> list[OptimizerSlot | None]:
    """Returns, for each leaf of an optimizer state, the parameter it belongs to.

    Decided by structure: a subtree of the state that has the structure of the
    parameters holds one leaf per parameter. `optax.MaskedNode` may replace any part of
    it, as in the states of `optax.masked` and `multi_transform`.

    Args:
        opt_state: An Optax state, or a tree with states in it; abstract or not.
        params: The parameters that it was made for.

    Returns:
        One entry per leaf, in the order of `_paths.flatten`; None for counters,
        schedules and whatever else belongs to no parameter.
    """
    leaves = [leaf.value for leaf in _paths.flatten(params).leaves]
    numbered = _plain(params, range(len(leaves)))
    return list(_slots(_plain(opt_state), numbered, leaves, type(None)))


def _plain(tree: PyTree, leaves: Sequence[Leaf] | None = None) -> PyTree:
    """Returns the tree, optionally with other leaves, without Flax's containers."""
    flat = _paths.flatten(tree)
    plain = flat.unflatten(leaves or [leaf.value for leaf in flat.leaves])
    return jax.tree.map(
        lambda node: nnx.to_pure_dict(node) if isinstance(node, nnx.State) else node,
        plain,
        is_leaf=lambda node: isinstance(node, nnx.State),
    )


def _slots(
    node: PyTree, numbered: PyTree, params: Sequence[Leaf], owner: type
) -> Iterator[OptimizerSlot | None]:
    numbers = _matching(node, numbered)
    if numbers is not None:
        for leaf, number in numbers:
            yield OptimizerSlot(number, _dims_of(leaf, params[number], owner))
        return
    parts = _paths.children(node)
    if parts is None:
        yield None
        return
    for name, child in parts:
        yield from _slots(child, numbered, params, _owner(node, name, owner))


# Which factored slot a subtree is: the two differ in the dim they dropped.
class _Row:
    pass


class _Column:
    pass


def _owner(node: PyTree, name: str, owner: type) -> type:
    # In an NNX state, a dict takes its place.
    if isinstance(node, optax.FactoredState) or (
        isinstance(node, dict) and node.keys() == {*optax.FactoredState._fields}
    ):
        return {"v_row": _Row, "v_col": _Column}.get(name, type(None))
    return owner


def _matching(node: PyTree, numbered: PyTree) -> list[tuple[Leaf, int]] | None:
    """Returns (leaf, number of its parameter), if the node mirrors the parameters."""
    leaves, treedef = jax.tree.flatten(node, is_leaf=_is_masked)
    if not leaves or all(_is_masked(leaf) for leaf in leaves):
        return None
    try:
        matched = treedef.flatten_up_to(numbered)
    except (ValueError, TypeError, KeyError):
        return None
    pairs: list[tuple[Leaf, int]] = []
    for leaf, numbers in zip(leaves, matched, strict=True):
        if _is_masked(leaf):
            continue
        if not isinstance(numbers, int):
            return None
        pairs.append((leaf, numbers))
    return pairs


def _is_masked(node: PyTree) -> bool:
    return isinstance(node, optax.MaskedNode)


def _dims_of(leaf: Leaf, param: Leaf, owner: type) -> tuple[int | None, ...] | None:
    """Returns the parameter's dim for each dim of a slot, if it can be inferred."""
    shape, whole = np.shape(leaf), np.shape(param)
    if shape == whole:
        return tuple(range(len(whole)))
    if not shape or math.prod(shape) == 1:
        return ()
    extra = len(shape) - len(whole)
    if (
        extra > 0 and whole and shape[extra:] == whole
    ):  # a history of it, as L-BFGS keeps
        return (*[None] * extra, *range(len(whole)))
    if owner in (_Row, _Column) and len(shape) == len(whole) - 1:
        # Optax's rule (scale_by_factored_rms): of the two largest dims, the rows
        # drop the largest and the columns the second.
        second, largest = (int(dim) for dim in np.argsort(whole)[-2:])
        dropped = largest if owner is _Row else second
        return tuple(dim for dim in range(len(whole)) if dim != dropped)
    return _subsequence(shape, whole)


def _subsequence(
    shape: tuple[int, ...], whole: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Returns the only way to get `shape` by dropping dims of `whole`, or None."""
    if len(shape) > len(whole):
        return None
    found: list[tuple[int, ...]] = []

    def extend(kept: tuple[int, ...], start: int) -> None:
        if len(found) > 1:
            return
        if len(kept) == len(shape):
            found.append(kept)
            return
        for dim in range(start, len(whole)):
            if whole[dim] == shape[len(kept)]:
                extend((*kept, dim), dim + 1)

    extend((), 0)
    return found[0] if len(found) == 1 else None


# Which subtrees are optimizer states, and whose.


# The name it has in Flax and in most training loops.
OPT_STATE = "opt_state"


@dataclass(frozen=True)
class OptimizerStateIn:
    """An optimizer state in a tree. Indices count the leaves of the whole tree.

    Attributes:
        name: What it is called, for messages.
        indices: The indices of its leaves.
        slots: One entry per leaf of it, as returned by `find_slots`.
        owners: For each tree of parameters that it may belong to, their name and
            indices. More than one if nothing distinguishes them.
    """

    name: str
    indices: range
    slots: list[OptimizerSlot | None]
    owners: list[tuple[str, list[int]]]


def find_optimizer_states(
    tree: PyTree, flat: _paths.Flat
) -> Iterator[OptimizerStateIn]:
    """Yields every optimizer state whose parameters are in the same tree.

    That is an Optax state, or a subtree named `opt_state` (in an NNX state, dicts
    replace Optax's types), with parameters of its structure next to it or next to
    something it is part of. The nearest are used; of several, those named `params` or
    `model`, or those whose name is in the state's own, as `gen` in `gen_opt`.

    Args:
        tree: What a layout map resolves.
        flat: The same tree, flattened.
    """
    paths = [leaf.path for leaf in flat.leaves]
    is_named = OPT_STATE in "\n".join(paths)
    if not is_named and not any(map(_is_optax_type, flat.node_types)):
        return
    if _paths.holds_modules(tree):
        tree = nnx.state(tree)
    states = _state_indices(tree)
    if states:
        yield from _walk(_Subtree.of("", tree, 0), [], states)


def _state_indices(tree: PyTree) -> list[int]:
    """Returns indices of leaves in optimizer states, at least one per state."""
    indices: list[int] = []
    index = 0
    entries = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_optax)
    for keys, node in entries:
        size = len(jax.tree.leaves(node)) if _is_optax(node) else 1
        if size and (_is_optax(node) or any(map(_is_named, keys))):
            indices.append(index)
        index += size
    return indices


def _is_named(key: Any) -> bool:
    return OPT_STATE in (getattr(key, "key", None), getattr(key, "name", None))


def _is_optax(node: PyTree) -> bool:
    """Returns whether a node is the state of one of Optax's transformations."""
    return _is_optax_type(type(node))


@functools.cache
def _is_optax_type(kind: type) -> bool:
    return hasattr(kind, "_fields") and kind.__module__.partition(".")[0] == "optax"


@dataclass(frozen=True)
class _Subtree:
    """A part of a tree, its name, and where its leaves start and end."""

    name: str
    node: PyTree
    start: int
    end: int

    @classmethod
    def of(cls, name: str, node: PyTree, start: int) -> "_Subtree":
        return cls(name, node, start, start + len(jax.tree.leaves(node)))

    def parts(self) -> list["_Subtree"]:
        parts: list[_Subtree] = []
        for name, node in _paths.children(self.node) or ():
            start = parts[-1].end if parts else self.start
            parts.append(_Subtree.of(name, node, start))
        return parts

    def holds_any(self, indices: list[int]) -> bool:
        first = bisect.bisect_left(indices, self.start)
        return first < len(indices) and indices[first] < self.end

    def is_state(self) -> bool:
        return self.name == OPT_STATE or _is_optax(self.node)


@dataclass(frozen=True)
class _Level:
    """One level on the way down to a state: the siblings, and which one holds it."""

    branch: str
    neighbors: list[_Subtree]


def _walk(
    part: _Subtree, above: list[_Level], states: list[int]
) -> Iterator[OptimizerStateIn]:
    """Walks down to the states; `above` are the levels passed, nearest first."""
    parts = part.parts()
    for branch in parts:
        if not branch.holds_any(states):
            continue
        neighbors = [other for other in parts if other is not branch]
        levels = [_Level(branch.name, neighbors), *above]
        if branch.is_state():
            yield from _owned(branch, levels, states)
        else:
            yield from _walk(branch, levels, states)


def _owned(
    state: _Subtree, levels: list[_Level], states: list[int]
) -> Iterator[OptimizerStateIn]:
    names = [level.branch for level in levels]
    for level in levels:
        free = [part for part in level.neighbors if not part.holds_any(states)]
        fitting = _fitting(state, free)
        if not fitting:  # or parts of the siblings, such as params["gen"]
            inner = [part for near in level.neighbors for part in near.parts()]
            fitting = _fitting(state, [p for p in inner if not p.holds_any(states)])
        if fitting:
            best = max(_rank(part, names) for part, _, _ in fitting)
            owners = [owner for owner in fitting if _rank(owner[0], names) == best]
            slots = owners[0][1]
            indices = range(state.start, state.start + len(slots))
            named = [(part.name, owned) for part, _, owned in owners]
            yield OptimizerStateIn("/".join(reversed(names)), indices, slots, named)
            return


def _rank(part: _Subtree, names: list[str]) -> int:
    """Returns how likely a part holds a state's parameters, judging by its name."""
    if part.name in names:
        return 3
    if part.name in ("params", "model"):
        return 2
    return int(any(part.name in name for name in names))


def _fitting(
    state: _Subtree, candidates: list[_Subtree]
) -> list[tuple[_Subtree, list[OptimizerSlot | None], list[int]]]:
    """Returns the parts that have the state's structure, with slots and indices."""
    fitting = []
    for part in candidates:
        for kind in (None, *_variable_types(part.node)):
            params = part.node if kind is None else _only(part.node, kind)
            slots = find_slots(state.node, params)
            if _fits(slots):
                fitting.append((part, slots, _indices(part, kind)))
                break
    return fitting


def _fits(slots: list[OptimizerSlot | None]) -> bool:
    """Returns whether slots belong to parameters, rather than being a counter, say."""
    owned = [slot for slot in slots if slot is not None]
    return any(slot.dims for slot in owned) and all(
        slot.dims is not None for slot in owned
    )


def _variable_types(node: PyTree) -> list[type]:
    """Returns types that can be optimized alone: `nnx.Param`, then those that occur."""
    leaves = jax.tree.leaves(node, is_leaf=_is_variable)
    types = [type(leaf) for leaf in leaves if _is_variable(leaf)]
    return list(dict.fromkeys([nnx.Param, *types])) if types else []


def _is_variable(node: PyTree) -> bool:
    return isinstance(node, nnx.Variable)


def _only(node: PyTree, kind: type) -> Any:
    """Returns nested dicts of the variables of one type."""
    if _is_variable(node):
        return node if isinstance(node, kind) else None
    items = node.items() if isinstance(node, Mapping) else _paths.children(node) or ()
    below = {key: _only(child, kind) for key, child in items}
    return {key: child for key, child in below.items() if child is not None} or None


def _indices(part: _Subtree, kind: type | None) -> list[int]:
    """Returns the indices of the leaves that `_only` keeps."""
    indices = []
    index = part.start
    for leaf in jax.tree.leaves(part.node, is_leaf=_is_variable):
        count = len(jax.tree.leaves(leaf))
        if kind is None or isinstance(leaf, kind):
            indices.extend(range(index, index + count))
        index += count
    return indices
