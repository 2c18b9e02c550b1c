"""`reduce` and `gather`: values of all replicas become one array, as in tf.distribute.

The work is done on the devices, in one small program per shape; the result is whole on
each of them. Padded rows never count. A plain array that is whole on every device
stands for one equal value per replica.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from numpy.lib.array_utils import normalize_axis_index

from meshlayout import _checks
from meshlayout._annotations import Leaf, PyTree
from meshlayout.arrays import to_numpy
from meshlayout.collectives import ReduceOp
from meshlayout.distribute.arguments import is_on
from meshlayout.distribute.values import PerReplica, check_replicas
from meshlayout.distribute.variables import raw_value
from meshlayout.errors import StrategyError
from meshlayout.mesh import Mesh


def reduce_tree(op: ReduceOp, value: PyTree, axis: int | None, mesh: Mesh) -> PyTree:
    """Combines each value of a tree; see `Strategy.reduce`."""

    def reduce(value: PerReplica) -> jax.Array:
        dim = None if axis is None else normalize_axis_index(axis, len(value.shape))
        if value.mask is not None and dim != 0:
            msg = f"reduce: {_UNEVEN}: give axis=0 to reduce over rows."
            raise StrategyError(msg)
        return _reduce(value, op=op, axis=dim)

    return _each("reduce", reduce, value, mesh)


def gather_tree(value: PyTree, axis: int, mesh: Mesh) -> PyTree:
    """Concatenates each value of a tree; see `Strategy.gather`."""

    def gather(value: PerReplica) -> jax.Array:
        dim = normalize_axis_index(axis, len(value.shape))
        if value.mask is None:
            return _gather(value, axis=dim)
        if dim != 0 or isinstance(value.array, Tracer):
            msg = f"gather: {_UNEVEN}: gather along axis=0, outside of jit."
            raise StrategyError(msg)
        is_real = jnp.asarray(np.flatnonzero(to_numpy(value.mask)))
        return jnp.take(value.array, is_real, axis=0)

    return _each("gather", gather, value, mesh)


_UNEVEN = "the replicas' values have different shapes, as in a short last batch"


def _each(
    where: str, function: Callable[[PerReplica], jax.Array], value: PyTree, mesh: Mesh
) -> PyTree:
    """Calls a function with each value; the results are whole on every device."""

    def call(leaf: Leaf) -> jax.Array:
        x = function(_per_replica(leaf, mesh, where))
        if isinstance(x, Tracer):
            return x
        x = jax.device_put(x, mesh.layout(...).with_rank(x.ndim).sharding)
        # Virtual CPU devices share threads: collectives that queue up can block each
        # other.
        return jax.block_until_ready(x) if mesh.platform == "cpu" else x

    return jax.tree.map(call, _plain(value), is_leaf=_is_per_replica)


def local_results(value: PyTree, mesh: Mesh) -> tuple[PyTree, ...]:
    """Returns the values of this process's replicas; see `Strategy.local_results`."""
    leaves, treedef = jax.tree.flatten(_plain(value), is_leaf=_is_per_replica)
    columns = [_local_parts(leaf, mesh) for leaf in leaves]
    if not any(columns):
        return (value,)
    count = len(mesh.local_devices)
    columns = [c or [x] * count for x, c in zip(leaves, columns, strict=True)]
    return tuple(treedef.unflatten(row) for row in zip(*columns, strict=True))


def _local_parts(leaf: Leaf, mesh: Mesh) -> Any:
    """Returns the values of this process's replicas; () for what is no value."""
    if isinstance(leaf, PerReplica):
        check_replicas(leaf, mesh, "local_results")
        return leaf.values
    if mesh.size == 1 or not _is_whole(leaf, mesh):
        return ()
    if isinstance(leaf, Tracer):
        return [leaf] * len(mesh.local_devices)
    shards = {shard.device: shard.data for shard in leaf.addressable_shards}
    return [shards[device] for device in mesh.local_devices]


def _per_replica(leaf: Leaf, mesh: Mesh, where: str) -> PerReplica:
    """Returns a value of replicas: of a plain array, one equal value for each."""
    if isinstance(leaf, PerReplica):
        check_replicas(leaf, mesh, where)
        return leaf
    if mesh.size > 1 and not _is_whole(leaf, mesh):
        msg = (
            f"{where} takes what run returns, got {_checks.shown(leaf)}, which is not "
            f"on the devices of {mesh.size} replicas: there is nothing to combine."
        )
        raise StrategyError(msg)
    x = jnp.asarray(leaf)
    copies = jnp.concatenate([x if x.ndim else x[None]] * mesh.size)
    return PerReplica(copies, num_replicas=mesh.size, is_scalar=not x.ndim)


def _is_whole(leaf: Leaf, mesh: Mesh) -> bool:
    return isinstance(leaf, jax.Array) and is_on(leaf, mesh.jax_mesh) is True


def _plain(value: PyTree) -> PyTree:
    return raw_value(value) if isinstance(value, nnx.Variable) else value


def _is_per_replica(leaf: object) -> bool:
    return isinstance(leaf, PerReplica)


@functools.partial(jax.jit, static_argnames=("op", "axis"))
def _reduce(value: PerReplica, *, op: ReduceOp, axis: int | None) -> jax.Array:
    x, mask, axes = value.array, value.mask, axis
    if axis != 0:
        x = x.reshape(value.num_replicas, *value.shape)
        axes = 0 if axis is None else (0, axis + 1)
    # Chosen, not multiplied by the mask: a padded row may hold NaN.
    is_real = None if mask is None else mask.reshape(-1, *[1] * (x.ndim - 1)) > 0
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        return (jnp.sum if op is ReduceOp.SUM else jnp.mean)(x, axes, where=is_real)
    if is_real is not None:  # a copy of a real row changes nothing
        x = jnp.where(is_real, x, x[jnp.argmax(is_real)])
    extreme = (jnp.max if op is ReduceOp.MAX else jnp.min)(x, axes)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        # An all-reduce between devices may drop a NaN, which jnp.max does not.
        extreme = jnp.where(jnp.isnan(x).any(axes), jnp.nan, extreme)
    return extreme


@functools.partial(jax.jit, static_argnames="axis")
def _gather(value: PerReplica, *, axis: int) -> jax.Array:
    parts = jnp.split(value.array, value.num_replicas)
    return value.array if axis == 0 else jnp.concatenate(parts, axis=axis)
