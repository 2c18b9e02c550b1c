"""Batches that nobody has placed: sharded by rows, and stacked for several steps."""

import logging
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _jax
from meshlayout._annotations import Batch
from meshlayout._batches import BATCH_AXES, batch_axes
from meshlayout.arrays import relayout
from meshlayout.errors import StepError
from meshlayout.mesh import Mesh
from meshlayout.state import TrainState
from meshlayout.step.update import row_sharding


_log = logging.getLogger("meshlayout")


def sharded(state: TrainState, batch: Batch, dim: int) -> Batch:
    """Shards the rows, in a dim, of a host batch over the batch axes of the mesh."""
    leaves, treedef = jax.tree.flatten(batch)
    mesh, with_rows = _mesh_of(state), [x for x in leaves if np.ndim(x) > dim]
    axes = batch_axes(mesh) if mesh else ()
    if not axes or not with_rows:
        return batch
    shards = math.prod(mesh.shape[axis] for axis in axes)
    for size in (np.shape(leaf)[dim] for leaf in with_rows):
        if size % shards:
            raise StepError(
                f"the batch has {size} rows, which do not divide into {shards} shards "
                f"over {', '.join(map(repr, axes))} of {Mesh(mesh)!r}. Pad or drop "
                "rows: ml.distribute_dataset(source, mesh) pads with rows of weight 0. "
                "To predict, Trainer.predict pads and cuts."
            )
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        sharding = NamedSharding(mesh, PartitionSpec(*[None] * dim, axes))
        placed = [leaf.update(sharding=sharding) for leaf in with_rows]
    else:  # in one call, as processes compare what they place
        placed = relayout(with_rows, Mesh(mesh).layout(*[None] * dim, axes, ...))
    each = iter(placed)
    return treedef.unflatten([next(each) if np.ndim(x) > dim else x for x in leaves])


def _mesh_of(state: TrainState) -> Any:
    """Returns the mesh of a state, if it has several devices."""
    sharding: Any = _jax.sharding_of(state.step)
    is_on_several = isinstance(sharding, NamedSharding) and sharding.mesh.size > 1
    return sharding.mesh if is_on_several else None


def check_divided(
    state: TrainState, batch: Batch, traced: jax.stages.Traced, dim: int, *, warns: bool
) -> None:
    """Raises StepError before the first call if a mesh's devices would do the same."""
    mesh, leaves = _mesh_of(state), jax.tree.leaves(batch)
    if mesh is None or any(isinstance(leaf, Tracer) for leaf in leaves):
        return
    shards = math.prod(mesh.shape[axis] for axis in batch_axes(mesh))
    rows = next((leaf.shape[dim] for leaf in leaves if np.ndim(leaf) > dim), 0)
    shardings = map(_jax.sharding_of, [*leaves, *jax.tree.leaves(state)])
    is_divided = any(x and not x.is_fully_replicated for x in shardings)
    if is_divided or rows % shards:  # or a short last batch that cannot be padded
        if warns and shards > 1 and row_sharding(batch, dim) is None:
            _log.warning(
                "the batch is sharded over no axis, so that all %d devices compute all "
                "of its %d rows. Place it with ml.relayout(batch, mesh.layout(%r, "
                "...)), or take ml.distribute_dataset.",
                *(mesh.size, rows, batch_axes(mesh)[0]),
            )
        return
    # The program's text shows what is sharded inside it alone.
    if re.search(r'\{"\w|devices=\[', traced.lower().as_text()):
        return
    raise StepError(
        f"all {mesh.size} devices of {Mesh(mesh)!r} would compute the same: no array "
        "of the batch or the state is sharded. Shard rows, by ml.relayout(batch, "
        f"mesh.layout({mesh.axis_names[0]!r}, ...)) or by axes called "
        f"{', '.join(map(repr, BATCH_AXES))}; or the state, by a LayoutMap."
    )


def stacked(batches: Batch, count: int) -> Batch:
    """Returns the batches of one call, stacked in a dim before the rows."""
    is_list = isinstance(batches, list)
    dims = [(*jnp.shape(x), 0)[0] for x in jax.tree.leaves(batches)]
    sizes = {len(batches)} if is_list else {*dims}
    if sizes != {count}:
        got = f"a list of {len(batches)}" if is_list else sorted(sizes)
        raise StepError(
            f"steps_per_call={count} takes a list of {count} batches, or arrays with a "
            f"first dim of {count}; this call was given {got}."
        )
    if is_list and isinstance(jax.tree.leaves(batches)[0], jax.ShapeDtypeStruct):
        return jax.tree.map(lambda x: _stacked_spec(x, count), batches[0])
    return _stack(batches) if is_list else batches


def _stacked_spec(x: jax.ShapeDtypeStruct, count: int) -> jax.ShapeDtypeStruct:
    layout: Any = x.sharding
    if isinstance(layout, NamedSharding):
        layout = NamedSharding(layout.mesh, PartitionSpec(None, *layout.spec))
    return x.update(shape=(count, *x.shape), sharding=layout)


@jax.jit
def _stack(batches: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
