"""A strategy's datasets and values: `PerReplica` leaves, from sources and functions.

The pipeline is `meshlayout.data`'s. What differs is what a batch is: a tree of exactly
the source's structure, as in tf.distribute, so that padding is marked in the leaves
and not by a weight beside them. Only a batch that has padding carries a mask; then it
does on all processes, since a mask is part of the program that takes the batch.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from meshlayout import _jax
from meshlayout._annotations import Batch, PyTree
from meshlayout._render import array_text
from meshlayout.data import DistributedDataset, InputContext
from meshlayout.data.dataset import make_plan
from meshlayout.data.per_replica import make_plan_from_function
from meshlayout.data.plan import DataPlan
from meshlayout.distribute.values import REPLICA_AXIS, PerReplica, replica_layout
from meshlayout.errors import StrategyError
from meshlayout.mesh import Mesh


class ReplicaDataset(DistributedDataset):
    """Batches for a strategy's `run`; made by its `distribute_dataset`.

    Iterating yields trees of the source's structure. Each leaf is a `PerReplica`, or a
    plain array on a strategy of one replica. Like any `DistributedDataset`, it can be
    iterated over again, and its iterators save and restore their position.

    Args:
        plan: The plan of the dataset.
        num_replicas: The number of replicas.
    """

    def __init__(self, plan: DataPlan, num_replicas: int) -> None:
        super().__init__(plan)
        self._num_replicas = num_replicas

    @property
    def element_spec(self) -> PyTree:
        """The shape and dtype of every leaf of one replica's part of a full batch."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                (leaf.shape[0] // self._num_replicas, *leaf.shape[1:]), leaf.dtype
            ),
            super().element_spec,
        )

    def __repr__(self) -> str:
        specs = jax.tree.map(
            lambda leaf: array_text(leaf.dtype, leaf.shape), self.element_spec
        )
        replicas = (
            "1 replica"
            if self._num_replicas == 1
            else (f"{self._num_replicas} replicas")
        )
        return f"ReplicaDataset({replicas}, each {specs})"


def distribute_dataset(source: object, mesh: Mesh, **options: Any) -> ReplicaDataset:
    """Distributes a source over replicas; see `Strategy.distribute_dataset`."""
    _refuse_tracing("distribute_dataset")
    if isinstance(source, DistributedDataset) and source.weights is not None:
        msg = (
            "the source is a dataset whose batches are padded and carry weights "
            f"already ({source.weights!r}), so that padding would count as examples. "
            "Give the source that it was made of."
        )
        raise StrategyError(msg)

    def batch_size_of(rows: int | None, is_only: Callable[[], bool]) -> int:
        is_own = bool(options.get("per_process"))
        return _global_batch_size(rows, is_only, mesh.size, per_process=is_own)

    batched = options.pop("batched", None)
    plan = make_plan(
        source,
        mesh.layout(REPLICA_AXIS, ...),
        {**options, "weights": None},
        batched=batched,
        batch_size_of=batch_size_of,
        assemble=_assemble_for(mesh),
    )
    return ReplicaDataset(plan, mesh.size)


def distribute_datasets_from_function(
    dataset_fn: Callable[[InputContext], Any], mesh: Mesh, **options: Any
) -> ReplicaDataset:
    """See `Strategy.distribute_datasets_from_function`."""
    _refuse_tracing("distribute_datasets_from_function")
    batched = options.pop("batched", None)
    plan = make_plan_from_function(
        dataset_fn,
        mesh.layout(REPLICA_AXIS, ...),
        {**options, "weights": None},
        name="dataset_fn",
        batched=batched,
        assemble=_assemble_for(mesh),
    )
    return ReplicaDataset(plan, mesh.size)


def _refuse_tracing(where: str) -> None:
    if _jax.is_tracing():
        msg = (
            f"{where} was called in a compiled function, which would see the examples "
            "as constants. Make the dataset before, and pass its batches."
        )
        raise StrategyError(msg)


def _global_batch_size(
    rows: int | None,
    is_only: Callable[[], bool],
    replicas: int,
    *,
    per_process: bool,
) -> int:
    """Returns the size of a source's batches.

    Raises:
        StrategyError: If the source is not one of batches, or they do not divide.
    """
    if rows is None:
        msg = (
            "the source yields single examples. Give global_batch_size=, the rows of a "
            "batch on all replicas together; or a source of batches of that size."
        )
        raise StrategyError(msg)
    if per_process:
        msg = (
            "with per_process=True, the source's batches are this process's own. Give "
            "global_batch_size=, the rows of a batch on all replicas together."
        )
        raise StrategyError(msg)
    up = -(-rows // replicas) * replicas
    if rows % replicas and not is_only():
        msg = (
            f"the source's first batch has {rows} rows, which do not divide into "
            f"{replicas} replicas. Give global_batch_size=, the rows of a batch on all "
            f"replicas together, such as {up}: batches are then cut anew, and a last "
            "one that is too short is padded."
        )
        raise StrategyError(msg)
    return up


def _assemble_for(mesh: Mesh) -> Callable[[PyTree, jax.Array | None], Batch]:
    return _only_rows if mesh.size == 1 else functools.partial(_per_replica, mesh)


def _per_replica(mesh: Mesh, tree: PyTree, mask: jax.Array | None) -> Batch:
    """Returns a batch with its arrays as values of replicas."""

    def as_value(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):  # strings, which stay on the host
            return leaf if mask is None else leaf[_local_mask(mask)]
        # A source that yields batches on devices may have laid them out differently.
        expected = replica_layout(mesh, leaf.ndim).sharding
        if not leaf.sharding.is_equivalent_to(expected, leaf.ndim):
            msg = (
                f"the source yields arrays on devices, laid out as {leaf.sharding}. "
                "Yield NumPy arrays, or shard the first dim over the replicas."
            )
            raise StrategyError(msg)
        return PerReplica(leaf, mask, num_replicas=mesh.size)

    return jax.tree.map(as_value, tree)


def _only_rows(tree: PyTree, mask: jax.Array | None) -> Batch:
    """Returns the batch of a single replica, without padding: it may be shorter."""
    if mask is None:
        return tree
    rows = int(np.sum(mask))
    return jax.tree.map(lambda leaf: leaf[:rows], tree)


def _local_mask(mask: jax.Array) -> np.ndarray:
    """Returns which of this process's rows are real."""
    shards = sorted(
        mask.addressable_shards, key=lambda shard: shard.index[0].start or 0
    )
    return np.concatenate([np.asarray(shard.data) for shard in shards]) > 0
