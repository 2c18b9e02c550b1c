"""A strategy's datasets and values: `PerReplica` leaves, from sources and functions.

The pipeline is `meshlayout.data`'s. What differs is what a batch is: a tree of exactly
the source's structure, as in tf.distribute, so that padding is marked in the leaves
and not by a weight beside them. Only a batch that has padding carries a mask; then it
does on all processes, since a mask is part of the program that takes the batch.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshlayout import _checks, _jax
from meshlayout._annotations import Batch, Leaf, PyTree
from meshlayout._host_arrays import host_array
from meshlayout._render import array_text
from meshlayout.data import DistributedDataset, InputContext
from meshlayout.data.dataset import make_plan
from meshlayout.data.per_replica import make_plan_from_function
from meshlayout.data.plan import DataPlan
from meshlayout.distribute.values import (
    REPLICA_AXIS,
    PerReplica,
    per_replica,
    replica_layout,
)
from meshlayout.errors import LayoutError, StrategyError
from meshlayout.mesh import Mesh


class ReplicaDataset(DistributedDataset):
    """Batches for a strategy's `run`; made by its `distribute_dataset`.

    Iterating yields trees of the source's structure. Each leaf is a `PerReplica`, or a
    plain array on a strategy of one replica. Like any `DistributedDataset`, it can be
    iterated over again, and its iterators save and restore their position.
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
        count = self._num_replicas
        return f"ReplicaDataset({count} replica{'s' * (count > 1)}, each {specs})"


def distribute_dataset(
    source: object, mesh: Mesh, size: int | None, options: dict[str, Any]
) -> ReplicaDataset:
    """Distributes a source over replicas; see `Strategy.distribute_dataset`."""
    _refuse_tracing("distribute_dataset")
    if isinstance(source, DistributedDataset) and source.weights is not None:
        msg = (
            "the source is a dataset whose batches are padded and carry weights "
            f"already ({source.weights!r}), so that padding would count as examples. "
            "Give the source that it was made of."
        )
        raise StrategyError(msg)
    batched = options.pop("batched", None)
    is_own = bool(options.get("per_process"))
    plan = make_plan(
        source,
        mesh.layout(REPLICA_AXIS, ...),
        {"weights": None, "global_batch_size": size, **options},
        batched=batched,
        batch_size_of=functools.partial(_batch_size, mesh.size, is_own=is_own),
        assemble=functools.partial(_assembled, mesh, divides=not is_own),
    )
    return ReplicaDataset(plan, mesh.size)


def distribute_datasets_from_function(
    dataset_fn: Callable[[InputContext], Any],
    mesh: Mesh,
    size: int | None,
    options: dict[str, Any],
) -> ReplicaDataset:
    """See `Strategy.distribute_datasets_from_function`."""
    _refuse_tracing("distribute_datasets_from_function")
    batched = options.pop("batched", None)
    plan = make_plan_from_function(
        dataset_fn,
        mesh.layout(REPLICA_AXIS, ...),
        {"weights": None, "global_batch_size": size, **options},
        name="dataset_fn",
        batched=batched,
        assemble=functools.partial(_assembled, mesh, divides=False),
    )
    return ReplicaDataset(plan, mesh.size)


def _refuse_tracing(where: str) -> None:
    if _jax.is_tracing():
        msg = (
            f"{where} was called in a compiled function, which would see the examples "
            "as constants. Make them before, and pass them."
        )
        raise StrategyError(msg)


def _batch_size(
    replicas: int, rows: int | None, is_only: Callable[[], bool], *, is_own: bool
) -> int:
    """Returns the rows of a global batch, for a source whose first one has `rows`."""
    up = -(-(rows or 0) // replicas) * replicas
    if rows is None or is_own or (rows % replicas and not is_only()):
        what = "is of single examples" if rows is None else f"has {rows} rows"
        msg = (
            f"the first element of the source {what}, which does not say how many rows "
            f"a batch of all {replicas} replicas has. Give global_batch_size=, such as "
            f"{up or replicas}: batches are then cut anew, and a short last one is "
            "padded."
        )
        raise StrategyError(msg)
    return up


def _assembled(
    mesh: Mesh, tree: PyTree, mask: jax.Array | None, *, divides: bool
) -> Batch:
    """Returns a batch with its arrays as values of replicas.

    A short batch that divides among the replicas is divided, and then has no padding.
    Only a process that has all rows knows how many are real.
    """
    rows = None
    if mask is not None and mask.is_fully_addressable:
        rows = int(np.sum(mask))
        if mesh.size > 1 and (not divides or not rows or rows % mesh.size):
            rows = None

    def as_value(leaf: Leaf) -> Any:
        if not isinstance(leaf, jax.Array):  # strings, which stay on the host
            return leaf if mask is None else leaf[_local_mask(mask)]
        if mesh.size == 1:
            return leaf if rows is None else leaf[:rows]
        # A source that yields batches on devices may have laid them out differently.
        expected = replica_layout(mesh, leaf.ndim).sharding
        if not leaf.sharding.is_equivalent_to(expected, leaf.ndim):
            msg = (
                f"the source yields arrays on devices, laid out as {leaf.sharding}. "
                "Yield NumPy arrays, or shard the first dim over the replicas."
            )
            raise StrategyError(msg)
        if rows is None:
            return PerReplica(leaf, mask, num_replicas=mesh.size)
        return PerReplica(jax.device_put(leaf[:rows], expected), num_replicas=mesh.size)

    return jax.tree.map(as_value, tree)


def _local_mask(mask: jax.Array) -> np.ndarray:
    """Returns which of this process's rows are real."""
    shards = sorted(
        mask.addressable_shards, key=lambda shard: shard.index[0].start or 0
    )
    return np.concatenate([np.asarray(shard.data) for shard in shards]) > 0


# Values.


@dataclass(frozen=True)
class ValueContext:
    """For which replica a value is asked for.

    Attributes:
        replica_id_in_sync_group: The index of the replica, from 0.
        num_replicas_in_sync: The number of replicas.

    Example:
        >>> ValueContext(1, 2)
        ValueContext(replica_id_in_sync_group=1, num_replicas_in_sync=2)
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


def distribute_values_from_function(
    value_fn: Callable[[ValueContext], PyTree], mesh: Mesh
) -> PyTree:
    """Makes a value of each replica; see `Strategy.distribute_values_from_function`."""
    _refuse_tracing("distribute_values_from_function")
    _checks.function("value_fn", value_fn, "context", error=StrategyError)
    trees: list[PyTree] = []
    for replica, device in enumerate(mesh.devices.flat):
        if device.process_index == jax.process_index():
            context = ValueContext(replica, mesh.size)
            with _checks.noted(f"This was raised by value_fn, called with {context}."):
                tree = value_fn(context)
            where = f"value_fn's value for replica {replica}"
            array = functools.partial(_array, where)
            trees.append(jax.tree.map(array, tree, is_leaf=_is_value))
    shapes = [jax.tree.map(lambda x: (x.ndim, x.shape[1:], x.dtype), t) for t in trees]
    kinds = sorted({str(shape) for shape in shapes})
    if len(kinds) != 1 or not jax.tree.leaves(trees):
        msg = (
            "value_fn must return arrays, the same tree of them for all replicas, "
            "which may differ in their number of rows alone, got trees of (rank, dims, "
            f"dtype) {' and '.join(kinds)}."
        )
        raise StrategyError(msg)
    if mesh.size == 1:
        return jax.device_put(trees[0], mesh.layout(...).sharding)
    values = jax.tree.map(lambda *column: per_replica(column, mesh), *trees)
    masks: dict[bytes, Any] = {}  # leaves with the same numbers of rows share theirs
    for value in jax.tree.leaves(values, is_leaf=_is_value):
        if value.mask is not None:
            value.mask = masks.setdefault(_local_mask(value.mask).tobytes(), value.mask)
    return values


def _is_value(leaf: object) -> bool:
    return isinstance(leaf, PerReplica)


def _array(where: str, leaf: Leaf) -> jax.Array:
    if isinstance(leaf, jax.Array):
        return leaf
    if _is_value(leaf):
        msg = f"{where} must be a plain array, got a PerReplica."
        raise StrategyError(msg)
    try:
        return jnp.asarray(host_array(leaf, where))
    except LayoutError as error:
        raise StrategyError(str(error)) from None
