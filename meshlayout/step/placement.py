"""Where the batch of a step is: a host batch is sharded over the state's mesh.

Every device would otherwise compute all of its rows, and nothing would say so.
"""

import logging
import math
import re
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _checks, _jax
from meshlayout._annotations import Batch, Leaf
from meshlayout._batches import BATCH_AXES, batch_axes, check_weights_key, get_weights
from meshlayout.arrays import relayout
from meshlayout.errors import StepError
from meshlayout.mesh import Mesh
from meshlayout.state import TrainState


_log = logging.getLogger("meshlayout")


def check_state(name: str, state: TrainState) -> None:
    """Raises StepError unless a step called `name` was given a train state."""
    if type(state) is not TrainState:
        article = "an" if name[0] in "aeiou" else "a"
        words = name.replace("_", " ")
        msg = f"{article} {words} takes a TrainState, and got {_checks.shown(state)}."
        raise StepError(msg)


def check_batch(batch: Batch, key: str | int | None) -> None:
    """Raises StepError if the weights of a batch are elsewhere, or not weights."""
    if key is None:
        return
    check_weights_key(batch, key)
    weights = get_weights(batch, key)
    # On devices, reading them would mean waiting. There, the loss becomes NaN instead.
    on_host = isinstance(weights, np.ndarray) and weights.dtype.kind in "fiu"
    if on_host and not ((weights >= 0) & np.isfinite(weights)).all():
        msg = (
            f"the weights of a batch must be finite and not negative; {key!r} has "
            f"values from {weights.min()} to {weights.max()}."
        )
        raise StepError(msg)


# Loss functions whose weighted batches were noted, by a train or an eval step.
_noted: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def note_weights(
    loss_fn: Callable[..., Any], batch: Batch, key: str | int | None
) -> None:
    """Logs once that a loss is weighted by weights that a batch on the host carries."""
    first = batch[0] if isinstance(batch, list) and batch else batch
    weights = None if key is None else get_weights(first, key)
    if isinstance(weights, np.ndarray) and loss_fn not in _noted:
        _noted.add(loss_fn)
        _log.warning("examples are weighted by %r of each batch.", key)


def place_batch(state: TrainState, batch: Batch, dim: int = 0) -> Batch:
    """Shards a batch from the host over the batch axes of the state's mesh.

    A batch with any array on a mesh is left as its owner has placed it.

    Args:
        state: A train state.
        batch: A batch, or batches stacked in a dim before the rows.
        dim: The dim of the rows.

    Raises:
        StepError: If the rows do not divide.
    """
    leaves, treedef = jax.tree.flatten(batch)
    if any(isinstance(leaf, Tracer) or layout_of(leaf) for leaf in leaves):
        return batch
    sharding = _jax.sharding_of(state.step)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return batch
    mesh: Any = sharding.mesh
    axes = batch_axes(mesh)
    with_rows = [leaf for leaf in leaves if np.ndim(leaf) > dim]
    if not axes or not with_rows:
        return batch
    _check_rows(mesh, axes, {np.shape(leaf)[dim] for leaf in with_rows})
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        sharding = NamedSharding(mesh, PartitionSpec(*[None] * dim, axes))
        placed = [leaf.update(sharding=sharding) for leaf in with_rows]
    else:  # in one call, as processes compare what they place
        layout = Mesh(mesh).layout(*[None] * dim, axes, ...)
        placed = relayout(with_rows, layout)
    each = iter(placed)
    return treedef.unflatten([next(each) if np.ndim(x) > dim else x for x in leaves])


def _check_rows(mesh: Any, axes: tuple[str, ...], sizes: set[int]) -> None:
    shards = math.prod(mesh.shape[axis] for axis in axes)
    for size in sorted(sizes):
        if size % shards:
            near = sorted(
                {max(shards, size // shards * shards), -(-size // shards) * shards}
            )
            msg = (
                f"the batch has {size} rows, which do not divide into {shards} shards "
                f"over {', '.join(map(repr, axes))} of Mesh({mesh_text(mesh)}): every "
                "device would compute all of them. Pad or drop rows (sizes that "
                f"divide: {' and '.join(map(str, near))}), or take "
                "ml.distribute_dataset(source, mesh), which pads the last batch and "
                "gives the padding weight 0."
            )
            raise StepError(msg)


def row_sharding(batch: Batch, dim: int = 0) -> NamedSharding | None:
    """Returns the sharding of a batch's rows alone, in a dim; None if on no axis."""
    for leaf in jax.tree.leaves(batch):
        sharding = _jax.sharding_of(leaf)
        if isinstance(sharding, NamedSharding) and any(sharding.spec[dim : dim + 1]):
            return NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[dim]))
    return None


def check_divided(
    state: TrainState, batch: Batch, text: Callable[[], str], dim: int = 0
) -> None:
    """Checks, before the first call on a mesh, that its devices divide the work.

    Args:
        state: The state.
        batch: The batch, placed.
        text: Returns the program's text, which shows what is sharded inside it alone.
        dim: The dim of the rows.

    Raises:
        StepError: If every device would compute the same.
    """
    sharding = _jax.sharding_of(state.step)
    leaves = jax.tree.leaves(batch)
    is_traced = any(isinstance(leaf, Tracer) for leaf in leaves)
    if is_traced or not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return
    mesh: Any = sharding.mesh
    if not any(map(_is_sharded, [*leaves, *jax.tree.leaves(state)])):
        shards = math.prod(mesh.shape[axis] for axis in batch_axes(mesh))
        rows = next((leaf.shape[dim] for leaf in leaves if np.ndim(leaf) > dim), 0)
        if re.search(r'\{"\w|devices=\[', text()):
            return
        if rows % shards:  # a short last batch that cannot be padded
            _log.warning(
                "the batch has %d rows, which do not divide into %d shards, so that "
                "all %d devices compute all of it.",
                *(rows, shards, mesh.size),
            )
            return
        msg = (
            f"all {mesh.size} devices of Mesh({mesh_text(mesh)}) would compute the "
            "same: no array of the batch, and none of the state, is sharded over an "
            f"axis. Shard the rows: ml.distribute_dataset(source, mesh) does over axes "
            f"called {', '.join(map(repr, BATCH_AXES))}, or ml.relayout(batch, "
            f"mesh.layout({mesh.axis_names[0]!r}, ...)) over any. Or shard the state, "
            "with a LayoutMap's rules; or make a mesh of one device."
        )
        raise StepError(msg)
    axes = [axis for axis in BATCH_AXES if mesh.shape.get(axis, 1) > 1]
    if axes and row_sharding(batch, dim) is None:
        _log.warning(
            "the batch is sharded over no axis, so that all %d devices compute all of "
            "it. Place it with ml.relayout(batch, mesh.layout(%r, ...)), or take "
            "ml.distribute_dataset.",
            mesh.size,
            axes[0],
        )


def _is_sharded(leaf: Leaf) -> bool:
    sharding = _jax.sharding_of(leaf)
    return sharding is not None and not sharding.is_fully_replicated


def layout_of(leaf: Leaf) -> Any:
    """Returns the sharding of a leaf that is bound to one, else None."""
    if isinstance(leaf, Tracer):  # the step is called inside another jit
        return None
    if isinstance(leaf, jax.Array):
        return leaf.sharding if leaf.committed else None
    return leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None


def mesh_text(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> str:
    """Returns the axes of a mesh as `"batch=2, model=4"`."""
    return ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
