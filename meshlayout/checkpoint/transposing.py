"""Arrays whose dims stand in another order in a file."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from meshlayout.checkpoint.difference import Leaf
from meshlayout.checkpoint.patterns import by_pattern
from meshlayout.errors import CheckpointError


def permutations(
    transpose: Mapping[str, Sequence[int]] | None, paths: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """Returns the permutation of the dims of each array that has one, by its path.

    Args:
        transpose: `{pattern: permutation}`, or None.
        paths: The paths of the arrays.

    Raises:
        CheckpointError: If one is no permutation, or a pattern matches nothing.
    """
    if not transpose:
        return {}
    return by_pattern(_checked(transpose), paths, "transpose")


def permuted(leaf: Leaf, dims: tuple[int, ...] | None) -> Leaf:
    """Returns an array with its dims in another order.

    Args:
        leaf: The array.
        dims: The permutation; None for none.

    Raises:
        CheckpointError: If it is for another number of dims.
    """
    if dims is None:
        return leaf
    if len(dims) != len(leaf.shape):
        msg = (
            f"{leaf}: transpose= gives it the dims {dims}, which are for arrays of "
            f"{len(dims)} dims. Make the pattern narrower."
        )
        raise CheckpointError(msg)
    return dataclasses.replace(leaf, shape=tuple(leaf.shape[dim] for dim in dims))


def _checked(transpose: Any) -> dict[str, tuple[int, ...]]:
    if not isinstance(transpose, Mapping):
        msg = (
            "transpose= maps patterns of paths to permutations of dims, and got "
            f"{transpose!r}. Write transpose={{r'kernel$': (1, 0)}}."
        )
        raise CheckpointError(msg)
    for pattern, dims in transpose.items():
        numbers = list(dims) if isinstance(dims, (list, tuple)) else [None]
        if set(numbers) != set(range(len(numbers))):
            msg = (
                f"transpose= gives {pattern!r} the dims {dims!r}, which are no "
                "permutation. Write (1, 0) to swap the dims of a matrix."
            )
            raise CheckpointError(msg)
    return {pattern: tuple(dims) for pattern, dims in transpose.items()}
