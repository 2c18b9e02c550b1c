"""Optimizer states: every slot takes the layout of the parameter it belongs to.

This is decided by structure, not by names, which mislead (`mu` may be a layer). Two
questions: which leaf of an optimizer state belongs to which parameter (`find_slots`),
and, where one tree holds both, which subtrees are optimizer states and which part of
the rest are their parameters (`find_optimizer_states`).
"""

import bisect
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
import optax
from flax import nnx
from jax.tree_util import tree_leaves_with_path

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
        return param.with_specs(specs)


def find_slots(opt_state: PyTree, params: PyTree) -> list[OptimizerSlot | None]:
    """Returns, for each leaf of an optimizer state, the parameter it belongs to.

    Decided by structure: a subtree of the state that has the structure of the
    parameters holds one leaf per parameter. `optax.MaskedNode` may replace any part of
    it, as in the states of `optax.masked` and `multi_transform`. None for counters,
    schedules and whatever else belongs to no parameter.
    """
    leaves = [leaf.value for leaf in _paths.flatten(params).leaves]
    numbered = _plain(params, range(len(leaves)))
    return list(_slots(_plain(opt_state), numbered, leaves, None))


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
    node: PyTree, numbered: PyTree, params: Sequence[Leaf], factor: str | None
) -> Iterator[OptimizerSlot | None]:
    numbers = _matching(node, numbered)
    if numbers is not None:
        for leaf, number in numbers:
            yield OptimizerSlot(number, _dims_of(leaf, params[number], factor))
        return
    parts = _paths.children(node)
    if parts is None:
        yield None
        return
    # The rows and columns of a factored slot differ in the dim they dropped. In an NNX
    # state, a dict takes the place of Optax's type.
    is_factored = isinstance(node, optax.FactoredState) or (
        isinstance(node, dict) and node.keys() == {*optax.FactoredState._fields}
    )
    for name, child in parts:
        below = name if is_factored else factor
        yield from _slots(child, numbered, params, below)


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


def _dims_of(
    leaf: Leaf, param: Leaf, factor: str | None
) -> tuple[int | None, ...] | None:
    """Returns the parameter's dim for each dim of a slot, if it can be inferred."""
    shape, whole = np.shape(leaf), np.shape(param)
    if shape == whole:
        return tuple(range(len(whole)))
    if not shape or math.prod(shape) == 1:
        return ()
    extra = len(shape) - len(whole)
    if extra > 0 and whole and shape[extra:] == whole:  # a history, as L-BFGS keeps
        return (*[None] * extra, *range(len(whole)))
    if factor in ("v_row", "v_col") and len(shape) == len(whole) - 1:
        # Optax's rule (scale_by_factored_rms): of the two largest dims, the rows
        # drop the largest and the columns the second.
        second, largest = (int(dim) for dim in np.argsort(whole)[-2:])
        dropped = largest if factor == "v_row" else second
        return tuple(dim for dim in range(len(whole)) if dim != dropped)
    # Else the only way to drop dims of the parameter that gives this shape.
    ways = [
        dims
        for dims in itertools.combinations(range(len(whole)), len(shape))
        if tuple(whole[dim] for dim in dims) == shape
    ]
    return ways[0] if len(ways) == 1 else None


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
    for keys, node in tree_leaves_with_path(tree, is_leaf=_is_optax):
        size = len(jax.tree.leaves(node)) if _is_optax(node) else 1
        names = [getattr(key, "key", getattr(key, "name", None)) for key in keys]
        if size and (_is_optax(node) or OPT_STATE in names):
            indices.append(index)
        index += size
    return indices


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


# On the way down, one for each level: the name of the branch, and its siblings.
_Levels: TypeAlias = list[tuple[str, list[_Subtree]]]


def _walk(
    part: _Subtree, above: _Levels, states: list[int]
) -> Iterator[OptimizerStateIn]:
    """Walks down to the states; `above` are the levels passed, nearest first."""
    parts = part.parts()
    for branch in parts:
        if not branch.holds_any(states):
            continue
        neighbors = [other for other in parts if other is not branch]
        levels = [(branch.name, neighbors), *above]
        if branch.is_state():
            yield from _owned(branch, levels, states)
        else:
            yield from _walk(branch, levels, states)


def _owned(
    state: _Subtree, levels: _Levels, states: list[int]
) -> Iterator[OptimizerStateIn]:
    names = [name for name, _ in levels]
    for _, neighbors in levels:
        fitting = _fitting(state, neighbors, states)
        if not fitting:  # or parts of the siblings, such as params["gen"]
            inner = [part for near in neighbors for part in near.parts()]
            fitting = _fitting(state, inner, states)
        if fitting:
            best = max(_rank(part, names) for part, _, _ in fitting)
            owners = [owner for owner in fitting if _rank(owner[0], names) == best]
            slots = owners[0][1]
            indices = range(state.start, state.start + len(slots))
            named = [(part.name, indices) for part, _, indices in owners]
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
    state: _Subtree, candidates: list[_Subtree], states: list[int]
) -> list[tuple[_Subtree, list[OptimizerSlot | None], list[int]]]:
    """Returns the parts that have the state's structure, with slots and indices."""
    fitting = []
    for part in candidates:
        if part.holds_any(states):
            continue
        variables = jax.tree.leaves(part.node, is_leaf=_is_variable)
        types = [type(leaf) for leaf in variables if _is_variable(leaf)]
        # Types that can be optimized alone: nnx.Param first, then those that occur.
        for kind in dict.fromkeys([None, *([nnx.Param] if types else []), *types]):
            params = part.node if kind is None else _only(part.node, kind)
            slots = find_slots(state.node, params)
            owned = [slot for slot in slots if slot is not None]
            # Slots belong to parameters; a counter, say, does not make a match.
            if any(slot.dims for slot in owned) and all(
                slot.dims is not None for slot in owned
            ):
                fitting.append((part, slots, _indices(part, kind)))
                break
    return fitting


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
