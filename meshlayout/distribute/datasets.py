"""A strategy's datasets and values: `PerReplica` leaves, from sources and functions.

The pipeline is that of `meshlayout.data`, but a batch has exactly the structure of the
source, as in tf.distribute: padding is marked in the leaves, not by an extra weight.
Only a batch with padding carries a mask, and then on all processes, since the mask is
part of the program that takes the batch.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshlayout._annotations import Batch, Leaf, PyTree
from meshlayout.arrays.placement import host_array
from meshlayout.data import DistributedDataset
from meshlayout.data.plan import DataPlan
from meshlayout.distribute.values import (
    REPLICA_AXIS,
    PerReplica,
    per_replica,
    replica_layout,
    sorted_shards,
)
from meshlayout.errors import StrategyError
from meshlayout.mesh import Mesh


def distributed(
    plan: Callable[..., DataPlan],
    source: Callable[..., Any],
    mesh: Mesh,
    options: dict[str, Any],
    **how: Any,
) -> DistributedDataset:
    """Returns a dataset of the replicas, with a plan for what a function makes."""
    how["batched"] = options.pop("batched", None)
    how["assemble"] = functools.partial(_assembled, mesh)
    options = dict(weights=None, **options)  # which a user cannot give
    layout = mesh.layout(REPLICA_AXIS, ...)
    return DistributedDataset(plan(source, layout, options, **how))


def distribute_dataset(
    source: object, mesh: Mesh, options: dict[str, Any]
) -> DistributedDataset:
    """Distributes a source over replicas; see `Strategy.distribute_dataset`."""
    if isinstance(source, DistributedDataset) and source.weights is not None:
        msg = "the source is a dataset whose batches are padded and carry weights "
        msg += f"already ({source.weights!r}), so that padding would count as examples"
        raise StrategyError(f"{msg}. Give the original source.")
    size = functools.partial(_batch_size, mesh.size, options.get("per_process"))
    return distributed(DataPlan, lambda: source, mesh, options, batch_size_of=size)


def _batch_size(replicas: int, is_own: object, rows: int | None) -> int:
    """Returns the rows of a global batch, for a source whose first one has `rows`."""
    if not rows or is_own or rows % replicas:
        what = "is of single examples" if rows is None else f"has {rows} rows"
        raise StrategyError(
            f"the first element of the source {what}, which does not say how many rows "
            f"a batch of all {replicas} replicas has. Give global_batch_size=, such as "
            f"{-(-(rows or 1) // replicas) * replicas}: batches are then cut anew, and "
            "a short last one is padded."
        )
    return rows


def _assembled(mesh: Mesh, tree: PyTree, mask: jax.Array | None) -> Batch:
    """Returns a batch with its arrays as values of replicas."""

    def as_value(leaf: Leaf) -> Any:
        if not isinstance(leaf, jax.Array):  # strings, which stay on the host
            parts = [] if mask is None else [x.data for x in sorted_shards(mask)]
            return leaf[np.concatenate(parts) > 0] if parts else leaf
        # A source may yield batches on devices in another layout.
        own = jax.device_put(leaf, replica_layout(mesh, leaf.ndim).sharding)
        return own if mesh.size == 1 else PerReplica(own, mask, num_replicas=mesh.size)

    return jax.tree.map(as_value, tree)


class ValueContext(NamedTuple):
    """The replica that a value is for."""

    replica_id_in_sync_group: int = 0  # from 0
    num_replicas_in_sync: int = 1


def values_from_function(
    value_fn: Callable[[ValueContext], PyTree], mesh: Mesh
) -> PyTree:
    """Makes a value of each replica; see `Strategy.distribute_values_from_function`."""

    def array(leaf: Leaf) -> jax.Array:
        is_ours = isinstance(leaf, jax.Array)
        return jnp.asarray(leaf if is_ours else host_array(leaf, "a value of value_fn"))

    trees = [
        jax.tree.map(array, value_fn(ValueContext(replica, mesh.size)))
        for replica, device in enumerate(mesh.devices.flat)
        if device.process_index == jax.process_index()
    ]
    if mesh.size == 1:
        return jax.device_put(trees[0], mesh.layout(...).sharding)
    return jax.tree.map(lambda *values: per_replica(values, mesh), *trees)
