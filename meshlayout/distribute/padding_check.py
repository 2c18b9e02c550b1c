"""Whether what pads a short batch counts in what a replica's function computes.

A function may ask which rows are real for its loss, and forget padding elsewhere, as in
the mean of something else. Nobody would notice: the numbers are only somewhat wrong. So
a program for padded batches is run twice at its first call, with different padding, and
must give the same bits. That needs no knowledge of what the function does.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshlayout import _jax
from meshlayout._annotations import PyTree
from meshlayout.distribute.values import PerReplica
from meshlayout.errors import StrategyError


def check_padding(
    name: str,
    run: Callable[[list[Any]], tuple[dict[str, Any], list[Any]]],
    leaves: list[Any],
    aligned: Sequence[int],
) -> None:
    """Runs a program with other padding, and compares with what it gives as it is.

    Args:
        name: The function's name.
        run: Returns the new values of variables by path, and the results.
        leaves: The arguments.
        aligned: The results that have one row for each row of the batch, by index.

    Raises:
        StrategyError: If a variable or a result differs.
    """
    mask = next(
        leaf.mask
        for leaf in leaves
        if isinstance(leaf, PerReplica) and leaf.mask is not None
    )
    new, results = run(leaves)
    other_new, other_results = run(_repadded(leaves))
    masks = [mask if index in aligned else None for index in range(len(results))]
    same_values, same_results = jax.device_get(
        (
            {path: _are_same(new[path], other_new[path], None) for path in new},
            list(map(_are_same, results, other_results, masks)),
        )
    )
    wrong = [f"the variable {path}" for path, same in same_values.items() if not same]
    wrong += [
        f"result {index}" if len(results) > 1 else "its result"
        for index, same in enumerate(same_results)
        if not same
    ]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        msg = (
            f"{name} got a short batch, which is padded to the shape of the others, "
            f"and {wrong[0]}{more} would be another one with other padding: padding "
            "counts there. Multiply by get_replica_context().example_mask what is "
            "added up over rows, and divide by its num_examples; "
            "losses.compute_average_loss and metrics do so by themselves."
        )
        raise StrategyError(msg)


@jax.jit
def _repadded(leaves: list[Any]) -> list[Any]:
    """Returns the arguments with other rows in place of padding.

    The first row, which is real, or half of it for numbers of floating point: values
    that a model can compute with, and that differ from the repeated last row.
    """

    def repadded(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica) or leaf.mask is None:
            return leaf
        x = leaf.array
        row = x[:1]
        if jnp.issubdtype(x.dtype, jnp.inexact):
            row = row / 2
        is_real = leaf.mask.reshape(-1, *[1] * (x.ndim - 1)) > 0
        other = jnp.where(is_real, x, row)
        return PerReplica(other, leaf.mask, num_replicas=leaf.num_replicas)

    return jax.tree.map(repadded, leaves, is_leaf=lambda x: isinstance(x, PerReplica))


@jax.jit
def _are_same(value: PyTree, other: PyTree, mask: jax.Array | None) -> jax.Array:
    """Returns whether two values have the same bits; of rows, the real ones."""

    def same(a: jax.Array, b: jax.Array) -> jax.Array:
        if _jax.is_key(a):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        is_same = a == b
        if jnp.issubdtype(a.dtype, jnp.inexact):
            is_same |= jnp.isnan(a) & jnp.isnan(b)
        if mask is not None:
            is_same |= mask.reshape(-1, *[1] * (a.ndim - 1)) == 0
        return is_same.all()

    leaves = jax.tree.leaves(jax.tree.map(same, value, other))
    return jnp.stack([jnp.bool_(True), *leaves]).all()  # noqa: FBT003
