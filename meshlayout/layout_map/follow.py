"""Optimiser states: every slot takes the layout of the parameter it belongs to."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from meshlayout import _paths
from meshlayout.layout import DimSpec, Layout


@dataclass(frozen=True, slots=True)
class Slot:
    """A leaf of an optimiser state that belongs to a parameter.

    Attributes:
        param: The parameter's place in the flat list of parameters.
        kept: Which dims of the parameter the leaf has, in order; None if they
            cannot be told apart.
    """

    param: int
    kept: tuple[int, ...] | None


def find_slots(opt_state: Any, params: Any) -> list[Slot | None]:
    """Returns, for each leaf of an optimiser state, the parameter it belongs to.

    Decided by structure: a subtree of the state that has the structure of the
    parameters holds one leaf per parameter. `optax.MaskedNode` may stand for any
    part of it, as `optax.masked` and `multi_transform` leave it.

    Args:
        opt_state: An Optax state, or a tree with states in it; abstract or not.
        params: The parameters that it was made for.

    Returns:
        One entry per leaf, in the order of `_paths.flatten`; None for counters,
        schedules and whatever else belongs to no parameter.
    """
    leaves = [leaf.value for leaf in _paths.flatten(params).leaves]
    numbered = _plain(params, range(len(leaves)))
    return list(_walk(_plain(opt_state), numbered, leaves, type(None)))


def _plain(tree: Any, leaves: Sequence[Any] | None = None) -> Any:
    """Returns the tree, or one like it of other leaves, without Flax's containers."""
    flat = _paths.flatten(tree)
    plain = flat.unflatten(leaves or [leaf.value for leaf in flat.leaves])
    return jax.tree.map(
        lambda node: nnx.to_pure_dict(node) if isinstance(node, nnx.State) else node,
        plain,
        is_leaf=lambda node: isinstance(node, nnx.State),
    )


def _walk(
    node: Any, numbered: Any, params: list[Any], owner: type
) -> Iterator[Slot | None]:
    numbers = _matching(node, numbered)
    if numbers is not None:
        for leaf, number in numbers:
            yield Slot(number, _kept_dims(leaf, params[number], owner))
        return
    parts = children(node)
    if parts is None:
        yield None
        return
    for name, child in parts:
        yield from _walk(child, numbered, params, _owner(node, name, owner))


# Which factored slot a subtree is: the two differ in the dim they dropped.
class _Row:
    pass


class _Column:
    pass


def _owner(node: Any, name: str, owner: type) -> type:
    # In an NNX state, a dict stands for it.
    if isinstance(node, optax.FactoredState) or (
        isinstance(node, dict) and node.keys() == {*optax.FactoredState._fields}
    ):
        return {"v_row": _Row, "v_col": _Column}.get(name, type(None))
    return owner


def _matching(node: Any, numbered: Any) -> list[tuple[Any, int]] | None:
    """Returns (leaf, number of its parameter), if the node mirrors the parameters."""
    leaves, treedef = jax.tree.flatten(node, is_leaf=_is_masked)
    if not leaves or all(_is_masked(leaf) for leaf in leaves):
        return None
    try:
        matched = treedef.flatten_up_to(numbered)
    except (ValueError, TypeError, KeyError):
        return None
    pairs: list[tuple[Any, int]] = []
    for leaf, numbers in zip(leaves, matched, strict=True):
        if _is_masked(leaf):
            continue
        if not isinstance(numbers, int):
            return None
        pairs.append((leaf, numbers))
    return pairs


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def children(node: Any) -> list[tuple[str, Any]] | None:
    """Returns the named children of one node, or None for a leaf.

    Args:
        node: Any pytree.
    """
    one_level = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda other: other is not node
    )[0]
    if len(one_level) == 1 and one_level[0][1] is node:
        return None
    return [
        (_paths.key_name(keys[0]) if keys else "", child) for keys, child in one_level
    ]


def _kept_dims(leaf: Any, param: Any, owner: type) -> tuple[int, ...] | None:
    shape, whole = np.shape(leaf), np.shape(param)
    if shape == whole:
        return tuple(range(len(whole)))
    if not shape or math.prod(shape) == 1:
        return ()
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
    """Returns the only way in which `shape` is some dims of `whole`, or None."""
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


def slot_layout(slot: Slot, rank: int, param: Layout) -> Layout:
    """Returns the layout of a slot: the parameter's, on the dims that the slot has."""
    kept = slot.kept or ()
    specs: list[DimSpec] = [param.specs[dim] for dim in kept]
    specs += [None] * (rank - len(specs))
    return Layout(specs, param.mesh, memory_kind=param.memory_kind)
