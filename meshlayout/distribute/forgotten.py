"""States that come in the same on all replicas, and would go out different.

NNX objects are changed in place, where that is an error. A state of Linen is returned,
and a forgotten all-reduce would give each replica a state of its own, without a word.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.core import FrozenDict

from meshlayout.distribute.arguments import Arguments, is_leaf
from meshlayout.distribute.values import PerReplica
from meshlayout.errors import StrategyError


# Containers that hold gradients as well as parameters, and may differ.
_CONTAINERS = (dict, list, tuple, FrozenDict, nnx.State)


def find_forgotten(
    name: str,
    arguments: Arguments,
    leaves: list[Any],
    result: Any,
    differs: Callable[[Any], bool],
) -> dict[int, str]:
    """Returns the results that differ and look like an argument that did not.

    Args:
        name: The function's name.
        arguments: Its arguments.
        leaves: Their arrays.
        result: What it returned.
        differs: Returns whether an array differs between replicas.

    Returns:
        The paths of the leaves, by their indices.

    Raises:
        StrategyError: If that argument is a state of training, and not a plain tree,
            as gradients are, too.
    """
    args, kwargs = arguments.unflatten(list(range(len(leaves))))
    parts = [result]
    if type(result) in (dict, list, tuple):
        parts += result.values() if isinstance(result, dict) else result
    position = {id(x): i for i, x in enumerate(jax.tree.leaves(result))}
    found: dict[int, str] = {}
    for argument in (*args, *kwargs.values()):
        indices, treedef = jax.tree.flatten(argument, is_leaf=is_leaf)
        if jax.tree_util.treedef_is_leaf(treedef) or any(
            type(i) is not int or leaves[i] is None or isinstance(leaves[i], PerReplica)
            for i in indices
        ):
            continue
        shapes = [np.shape(leaves[i]) for i in indices]
        for part in parts:
            after, structure = jax.tree.flatten_with_path(part)
            if structure != treedef or [np.shape(x) for _, x in after] != shapes:
                continue
            paths = {
                position[id(x)]: jax.tree_util.keystr(path, simple=True, separator="/")
                for path, x in after
                if differs(x)
            }
            nodes = jax.tree.leaves(argument, is_leaf=_is_no_container)
            if paths and not all(type(node) is int for node in nodes):
                _refuse(name, list(paths.values()))
            found |= paths
    return found


def _is_no_container(x: object) -> bool:
    return type(x) not in _CONTAINERS


def check_forgotten(name: str, key: Any, arguments: Arguments) -> None:
    """Refuses what the same function returned in place of a value for all replicas."""
    for leaf in arguments.leaves:
        known, path = getattr(leaf, "forgotten", None) or (None, "")
        if path and known == key:
            _refuse(name, [path])


def _refuse(name: str, paths: list[str]) -> None:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    msg = (
        f"{name} returns a state that came in the same on all replicas, and would "
        f"leave different values of {', '.join(paths[:3])}{more} on them. Combine "
        "gradients and losses first: get_replica_context().all_reduce('SUM', grads)."
    )
    raise StrategyError(msg)
