"""Optimizer states: every slot takes the layout of the parameter it belongs to.

A slot's path ends with that of its parameter: `opt_state/0/mu/encoder/kernel` belongs
to `params/encoder/kernel`. The longest common end wins, among parameters from whose
shape that of the slot follows.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx
from jax.tree_util import tree_leaves_with_path

from meshlayout import _paths
from meshlayout._annotations import PyTree
from meshlayout.layout import DimSpec, Layout


@dataclass(frozen=True, slots=True)
class OptimizerSlot:
    """A leaf of an optimizer state that belongs to a parameter.

    Attributes:
        param: The index of the parameter in the flat list of parameters.
        dims: For each dim of the leaf, the corresponding dim of the parameter, or None
            for a dim that the parameter lacks.
    """

    param: int
    dims: tuple[int | None, ...]

    def layout(self, rank: int, param: Layout) -> Layout:
        """Returns the layout of the parameter on the dims of a slot of this rank."""
        specs: list[DimSpec] = [
            None if dim is None else param.specs[dim] for dim in self.dims
        ]
        specs += [None] * (rank - len(specs))
        return param.with_specs(specs)


def find_slots(
    state: Sequence[_paths.Leaf], params: Sequence[_paths.Leaf]
) -> list[OptimizerSlot | None]:
    """Returns, for each leaf of an optimizer state, the parameter it belongs to.

    Args:
        state: The leaves of the state.
        params: The leaves that may be its parameters. Of several with the same end,
            that of `params` or `model` is taken, or the one whose name is part of the
            state's, as `gen` is of `gen_opt`; else the first.

    Returns:
        A list with None for counters, schedules and anything else that belongs to no
        parameter.
    """
    by_end: dict[str, list[int]] = {}
    for index, param in enumerate(params):
        keys = param.path.split("/")
        for start in range(len(keys)):
            by_end.setdefault("/".join(keys[start:]), []).append(index)

    def slot(leaf: _paths.Leaf) -> OptimizerSlot | None:
        keys = leaf.path.split("/")
        for start in range(len(keys) + 1):  # the path of a single array is ""
            found = []
            for index in by_end.get("/".join(keys[start:]), ()):
                shape = np.shape(params[index].value)
                dims = _dims_of(np.shape(leaf.value), shape, keys[:start])
                if dims is not None:
                    found.append(OptimizerSlot(index, dims))
            if found:
                paths = {slot: params[slot.param].path for slot in found}
                return max(found, key=lambda s: _nearness(keys, start, paths[s]))
        return None

    return [slot(leaf) for leaf in state]


def _nearness(slot: list[str], start: int, path: str) -> tuple[bool, bool, int]:
    """Ranks how likely a parameter is meant, by the names above the common end."""
    above = path.split("/")[: start - len(slot)]
    named = sum(any(name in key for key in slot) for name in above)
    return not above, not {"params", "model"}.isdisjoint(above), named


def _dims_of(
    shape: tuple[int, ...], whole: tuple[int, ...], outer: list[str]
) -> tuple[int | None, ...] | None:
    """Returns the parameter's dim for each dim of a slot; None if it is not its slot.

    `outer` is the part of the slot's path above that of the parameter.
    """
    if not shape:  # a counter
        return None
    if shape == whole:
        return tuple(range(len(whole)))
    if math.prod(shape) == 1:  # a placeholder, where a parameter is not factored
        return ()
    extra = len(shape) - len(whole)
    if extra > 0 and whole and shape[extra:] == whole:  # a history, as L-BFGS keeps
        return (*[None] * extra, *range(len(whole)))
    ways = [
        dims
        for dims in itertools.combinations(range(len(whole)), len(shape))
        if tuple(whole[dim] for dim in dims) == shape
    ]
    if not {"v_row", "v_col"}.isdisjoint(outer) and len(shape) == len(whole) - 1:
        # Optax's rule (scale_by_factored_rms): of the two largest dims, the rows
        # drop the largest and the columns the second.
        dropped = np.argsort(whole)[-1 if "v_row" in outer else -2]
        ways = [dims for dims in ways if dropped not in dims]
    return ways[0] if len(ways) == 1 else None


# Which leaves of a tree are those of an optimizer state.


# The name of the optimizer state in Flax and most training loops.
OPT_STATE = "opt_state"


def state_indices(tree: PyTree) -> set[int]:
    """Returns the indices of the leaves inside of optimizer states.

    An optimizer state is an Optax state, or a subtree named `opt_state` (in an NNX
    state, dicts replace Optax's types).

    Args:
        tree: The tree that a layout map resolves.
    """
    if _paths.holds_modules(tree):
        tree = nnx.state(tree)
    indices: set[int] = set()
    index = 0
    for keys, node in tree_leaves_with_path(tree, is_leaf=_is_optax):
        size = len(jax.tree.leaves(node)) if _is_optax(node) else 1
        if _is_optax(node) or OPT_STATE in map(_paths.key_name, keys):
            indices |= {*range(index, index + size)}
        index += size
    return indices


def _is_optax(node: PyTree) -> bool:
    """Returns whether a node is the state of one of Optax's transformations."""
    return _is_optax_type(type(node))


@functools.cache
def _is_optax_type(kind: type) -> bool:
    return hasattr(kind, "_fields") and kind.__module__.partition(".")[0] == "optax"
