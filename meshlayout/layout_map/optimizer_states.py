"""Optimizer states: every slot takes the layout of the parameter it belongs to.

This is decided by structure, not by names, which mislead (`mu` may be a layer). There
are two questions: which leaf of an optimizer state belongs to which parameter
(`find_slots`); and, if one tree holds both, which subtrees are optimizer states, and
which part of the rest are their parameters (`find_optimizer_states`).
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
from meshlayout.errors import LayoutMapError
from meshlayout.layout import DimSpec, Layout
from meshlayout.layout_map.report import Resolution


# Which leaf belongs to which parameter.


@dataclass(frozen=True, slots=True)
class OptimizerSlot:
    """A leaf of an optimizer state that belongs to a parameter.

    Attributes:
        param: The index of the parameter in the flat list of parameters.
        dims: For each dim of the leaf, the corresponding dim of the parameter, or None
            for a dim that the parameter lacks. None altogether if it cannot be
            inferred.
    """

    param: int
    dims: tuple[int | None, ...] | None

    def layout(self, rank: int, param: Layout) -> Layout:
        """Returns the layout of the parameter on the dims of a slot of this rank."""
        specs: list[DimSpec] = [
            None if dim is None else param.specs[dim] for dim in self.dims or ()
        ]
        specs += [None] * (rank - len(specs))
        return param.with_specs(specs)


def find_slots(opt_state: PyTree, params: PyTree) -> list[OptimizerSlot | None]:
    """Returns, for each leaf of an optimizer state, the parameter it belongs to.

    A subtree of the state with the structure of the parameters has one leaf per
    parameter. `optax.MaskedNode` may replace any part of it, as in the states of
    `optax.masked` and `multi_transform`. The result is None for counters, schedules and
    anything else that belongs to no parameter.
    """
    leaves = [leaf.value for leaf in _paths.flatten(params).leaves]
    numbered = _plain(params, range(len(leaves)))
    return list(_slots(_plain(opt_state), numbered, leaves, None))


def _plain(tree: PyTree, leaves: Sequence[Leaf] | None = None) -> PyTree:
    """Returns the tree without Flax's containers, optionally with other leaves.

    Otherwise an NNX state and the dict that Optax makes of it would not match.
    """
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
    # The rows and columns of a factored slot drop different dims, so that the name
    # counts here. In an NNX state, a dict takes the place of Optax's type.
    is_factored = isinstance(node, optax.FactoredState) or (
        isinstance(node, dict) and node.keys() == {*optax.FactoredState._fields}
    )
    for name, child in parts:
        below = name if is_factored else factor
        yield from _slots(child, numbered, params, below)


def _matching(node: PyTree, numbered: PyTree) -> list[tuple[Leaf, int]] | None:
    """Returns each leaf with its parameter's index, if the node mirrors the parameters.

    Else None.
    """
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
    """Returns the parameter's dim for each dim of a slot, or None if not inferable."""
    shape, whole = np.shape(leaf), np.shape(param)
    if shape == whole:
        return tuple(range(len(whole)))
    if not shape or math.prod(shape) == 1:  # a counter per parameter, or a placeholder
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
    # Otherwise, if there is only one way to drop dims that gives this shape.
    ways = [
        dims
        for dims in itertools.combinations(range(len(whole)), len(shape))
        if tuple(whole[dim] for dim in dims) == shape
    ]
    return ways[0] if len(ways) == 1 else None


# Which subtrees are optimizer states, and whose.


# The name of the optimizer state in Flax and most training loops.
OPT_STATE = "opt_state"


@dataclass(frozen=True)
class OptimizerStateIn:
    """An optimizer state inside a tree; indices count the leaves of the whole tree.

    Attributes:
        name: Its path, for messages.
        indices: The indices of its leaves.
        slots: One entry per leaf, from `find_slots`.
        owners: The name and the indices of each tree of parameters that it may belong
            to; several if nothing distinguishes them.
    """

    name: str
    indices: range
    slots: list[OptimizerSlot | None]
    owners: list[tuple[str, list[int]]]


def find_optimizer_states(
    tree: PyTree, flat: _paths.Flat
) -> Iterator[OptimizerStateIn]:
    """Yields every optimizer state whose parameters are in the same tree.

    An optimizer state is an Optax state, or a subtree named `opt_state` (in an NNX
    state, dicts replace Optax's types). Its parameters have its structure, and are its
    siblings or those of a subtree that holds it. The nearest are used; of several,
    those named `params` or `model`, or those whose name is part of the state's name, as
    `gen` in `gen_opt`.

    Args:
        tree: The tree that a layout map resolves.
        flat: The same tree, flattened.
    """
    # Most trees have no optimizer state: a search of names and types is cheap.
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
    """Returns indices of leaves inside optimizer states, at least one per state."""
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
    """A part of a tree, its name, and the range of its leaves."""

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
    """Walks down to the states; `above` has the levels passed, nearest first."""
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
    """Ranks how likely a part holds a state's parameters, by its name."""
    if part.name in names:
        return 3
    if part.name in ("params", "model"):
        return 2
    return int(any(part.name in name for name in names))


def _fitting(
    state: _Subtree, candidates: list[_Subtree], states: list[int]
) -> list[tuple[_Subtree, list[OptimizerSlot | None], list[int]]]:
    """Returns the parts with the structure of a state, with slots and indices."""
    fitting = []
    for part in candidates:
        if part.holds_any(states):
            continue
        variables = jax.tree.leaves(part.node, is_leaf=_is_variable)
        types = [type(leaf) for leaf in variables if _is_variable(leaf)]
        # An optimizer may have been given all variables, or those of one type:
        # nnx.Param usually, else another one that occurs.
        for kind in dict.fromkeys([None, *([nnx.Param] if types else []), *types]):
            params = part.node if kind is None else _only(part.node, kind)
            slots = find_slots(state.node, params)
            owned = [slot for slot in slots if slot is not None]
            # A state of counters alone would match any tree of one leaf.
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


def check_rivals(state: OptimizerStateIn, resolutions: list[Resolution | None]) -> None:
    """Raises LayoutMapError if a state may belong to trees with different layouts."""
    layouts = [
        [leaf and leaf.layout for leaf in (resolutions[index] for index in indices)]
        for _, indices in state.owners
    ]
    if all(rival == layouts[0] for rival in layouts):
        return
    names = " or to ".join(repr(name) for name, _ in state.owners[:3])
    msg = (
        f"the optimizer state {state.name!r} may belong to {names}, whose layouts "
        "differ. Name its parameters 'params', or begin its own name with theirs, as "
        "in 'gen' and 'gen_opt'."
    )
    raise LayoutMapError(msg)


def check_has_slots(opt_state: _paths.Flat, params: PyTree) -> None:
    """Raises LayoutMapError if a state without slots holds arrays."""
    for leaf in opt_state.leaves:
        if np.shape(leaf.value):
            names = [owner.path for owner in _paths.flatten(params).leaves]
            msg = (
                f"no part of the optimizer state, such as {leaf.path!r}, has the "
                f"structure of params=, whose paths are {', '.join(names[:3])}"
                f"{', ...' * (len(names) > 3)}. Pass the argument of optimizer.init."
            )
            raise LayoutMapError(msg)
