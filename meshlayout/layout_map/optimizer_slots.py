"""Optimizer states: every slot takes the layout of the parameter it belongs to.

A slot's path ends with that of its parameter: `opt_state/0/mu/encoder/kernel` belongs
to `params/encoder/kernel`. The longest common end wins, if the shape fits.
"""

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
from meshlayout.layout import Layout


# The name of the optimizer state in Flax and most training loops.
OPT_STATE = "opt_state"


@dataclass(frozen=True, slots=True)
class OptimizerSlot:
    """A leaf of an optimizer state that belongs to a parameter."""

    param: int  # its index in the flat list of parameters
    dims: tuple[int | None, ...]  # for each dim of the leaf, the parameter's, if any

    def layout(self, param: Layout) -> Layout:
        """Returns the slot's layout, given its parameter's."""
        specs = [None if dim is None else param.specs[dim] for dim in self.dims]
        return param.with_specs(specs)


def find_slots(
    state: Sequence[_paths.Leaf], params: Sequence[_paths.Leaf]
) -> list[OptimizerSlot | None]:
    """Returns the parameter, if any, to which each leaf of an optimizer state belongs.

    Of several parameters with the same end, the one under `params` or `model` is taken,
    or the one whose name is part of the state's (`gen` of `gen_opt`), or the first.
    """
    by_end: dict[str, list[int]] = {}
    for index, param in enumerate(params):
        keys = param.path.split("/")
        for start in range(len(keys)):
            by_end.setdefault("/".join(keys[start:]), []).append(index)

    def slot(leaf: _paths.Leaf) -> OptimizerSlot | None:
        keys = leaf.path.split("/")
        for start in range(len(keys) + 1):  # the path of a single array is ""
            slots: dict[OptimizerSlot, tuple[bool, bool, int]] = {}
            for index in by_end.get("/".join(keys[start:]), ()):
                path, value, _ = params[index]
                dims = _dims_of(np.shape(leaf.value), np.shape(value), keys[:start])
                if dims is not None:
                    above = path.split("/")[: start - len(keys)]
                    is_params = not {"params", "model"}.isdisjoint(above)
                    named = sum(any(name in key for key in keys) for name in above)
                    slots[OptimizerSlot(index, dims)] = (not above, is_params, named)
            if slots:
                return max(slots, key=slots.__getitem__)
        return None

    return [slot(leaf) for leaf in state]


def _dims_of(
    shape: tuple[int, ...], whole: tuple[int, ...], above: list[str]
) -> tuple[int | None, ...] | None:
    """Returns the parameter's dim for each dim of a slot; None if it is none of its."""
    if not shape:  # a counter
        return None
    extra = len(shape) - len(whole)
    if extra >= 0 and whole and shape[extra:] == whole:  # L-BFGS keeps a history
        return (*[None] * extra, *range(len(whole)))
    if math.prod(shape) == 1:  # a placeholder, where a parameter is not factored
        return (None,) * len(shape)
    ways = [
        dims
        for dims in itertools.combinations(range(len(whole)), len(shape))
        if tuple(whole[dim] for dim in dims) == shape
    ]
    if not {"v_row", "v_col"}.isdisjoint(above) and extra == -1:
        # Optax (scale_by_factored_rms): rows drop the largest dim, columns the second.
        dropped = np.argsort(whole)[-1 if "v_row" in above else -2]
        ways = [dims for dims in ways if dropped not in dims]
    return ways[0] if len(ways) == 1 else None


def state_indices(tree: PyTree) -> set[int]:
    """Returns the indices of the leaves of a tree that are inside of optimizer states.

    They are found by Optax's types or the name `opt_state`, as NNX states have dicts.
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
    kind = type(node)
    return hasattr(kind, "_fields") and kind.__module__.partition(".")[0] == "optax"
