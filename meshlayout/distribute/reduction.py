"""`reduce` and `gather`: values of all replicas become one array, as in tf.distribute.

The work is done on the devices, in one small program per shape; the result is whole on
each of them. Padded rows never count, and a mean over no rows at all is 0. A plain
array that is whole on every device stands for one equal value per replica.
"""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from meshlayout import _checks, _jax
from meshlayout._annotations import PyTree
from meshlayout._host_arrays import host_array
from meshlayout.arrays import to_numpy
from meshlayout.collectives import ReduceOp, check_axis
from meshlayout.distribute.arguments import is_on
from meshlayout.distribute.values import PerReplica, check_replicas
from meshlayout.distribute.variables import raw_value
from meshlayout.errors import LayoutError, StrategyError
from meshlayout.mesh import Mesh


def reduce_tree(op: ReduceOp, value: PyTree, axis: int | None, mesh: Mesh) -> PyTree:
    """Combines each value of a tree; see `Strategy.reduce`."""

    def reduce(leaf: PyTree) -> jax.Array:
        value = _per_replica(leaf, mesh, "reduce")
        dim = None if axis is None else check_axis(axis, value.shape, "reduce")
        if value.mask is not None and dim != 0:
            _refuse_uneven("reduce", "give axis=0 to reduce over rows")
        is_extreme = op in (ReduceOp.MAX, ReduceOp.MIN)
        has_no_order = jnp.issubdtype(value.dtype, jnp.complexfloating) and is_extreme
        is_empty = is_extreme and dim is not None and not value.shape[dim]
        if _jax.is_extended(value.dtype) or has_no_order or is_empty:
            msg = (
                f"reduce: there is no {op.value} of values of dtype {value.dtype} and "
                f"shape {value.shape}."
            )
            raise StrategyError(msg)
        return _finished(_reduce(value, op=op, axis=dim), mesh)

    return _each("reduce", value, reduce)


def gather_tree(value: PyTree, axis: int, mesh: Mesh) -> PyTree:
    """Concatenates each value of a tree; see `Strategy.gather`."""

    def gather(leaf: PyTree) -> jax.Array:
        value = _per_replica(leaf, mesh, "gather")
        dim = check_axis(axis, value.shape, "gather")
        if value.mask is None:
            return _finished(_gather(value, axis=dim), mesh)
        if dim != 0 or isinstance(value.array, Tracer):
            _refuse_uneven("gather", "gather along axis=0, outside of jit")
        is_real = jnp.asarray(np.flatnonzero(to_numpy(value.mask)))
        return _finished(jnp.take(value.array, is_real, axis=0), mesh)

    return _each("gather", value, gather)


def _each(where: str, value: PyTree, function: Callable[[PyTree], jax.Array]) -> PyTree:
    if isinstance(value, nnx.Variable):
        value = raw_value(value)
    if not jax.tree.leaves(value, is_leaf=_is_value):
        msg = (
            f"{where}: value holds no arrays, got {_checks.shown(value)}. A function "
            "that ends without `return` gives None."
        )
        raise StrategyError(msg)
    return jax.tree.map(function, value, is_leaf=_is_value)


def local_results(value: PyTree, mesh: Mesh) -> tuple[PyTree, ...]:
    """Returns the values of this process's replicas; see `Strategy.local_results`."""
    if isinstance(value, nnx.Variable):
        value = raw_value(value)
    leaves, treedef = jax.tree.flatten(value, is_leaf=_is_value)
    parts = [_local_parts(leaf, mesh) for leaf in leaves]
    if not any(parts):
        return (value,)
    count = len(mesh.local_devices)
    columns = [part or [leaf] * count for leaf, part in zip(leaves, parts, strict=True)]
    return tuple(treedef.unflatten(row) for row in zip(*columns, strict=True))


def _local_parts(leaf: PyTree, mesh: Mesh) -> Any:
    """Returns the values of this process's replicas; () for what is no value."""
    if isinstance(leaf, PerReplica):
        check_replicas(leaf, mesh, "local_results")
        return leaf.values
    if mesh.size == 1 or not isinstance(leaf, jax.Array):
        return ()
    if isinstance(leaf, Tracer):
        return [leaf] * len(mesh.local_devices)
    if is_on(leaf, mesh.jax_mesh) is not True:
        return ()
    shards = {shard.device: shard.data for shard in leaf.addressable_shards}
    return [shards[device] for device in mesh.local_devices]


@functools.partial(jax.jit, static_argnames=("op", "axis"))
def _reduce(value: PerReplica, *, op: ReduceOp, axis: int | None) -> jax.Array:
    x, mask = value.array, value.mask
    if mask is not None or (axis == 0 and not value.is_scalar):
        return _combined(op, x, 0, mask)
    stacked = x.reshape(value.num_replicas, *value.shape)
    return _combined(op, stacked, 0 if axis is None else (0, axis + 1), None)


def _combined(op: ReduceOp, x: jax.Array, axes: Any, mask: Any) -> jax.Array:
    """Reduces an array; along dim 0 alone if a mask says which of its rows are real."""
    # Chosen, not multiplied by the mask: a padded row may hold NaN.
    is_real = None if mask is None else mask.reshape(-1, *[1] * (x.ndim - 1)) > 0
    is_inexact, dtype = jnp.issubdtype(x.dtype, jnp.inexact), x.dtype
    is_float = is_inexact or op is ReduceOp.MEAN
    if dtype.itemsize < 4 or (is_float and not is_inexact):  # they would wrap around
        is_signed = not jnp.issubdtype(dtype, jnp.unsignedinteger)
        x = x.astype("float32" if is_float else "int32" if is_signed else "uint32")
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        total = jnp.sum(x, axis=axes, where=is_real)
        if op is ReduceOp.MEAN:
            rows = x.size // max(total.size, 1) if mask is None else mask.sum()
            total = total / jnp.maximum(rows, 1)
        return total.astype(dtype) if is_inexact else total
    is_max = op is ReduceOp.MAX
    worst: Any = -jnp.inf if is_max else jnp.inf
    if not is_inexact:
        limits = jnp.iinfo(x.dtype)
        worst = limits.min if is_max else limits.max
    reduction = jnp.max if is_max else jnp.min
    initial = None if mask is None else worst
    extreme = reduction(x, axis=axes, where=is_real, initial=initial)
    if is_inexact:
        # An all-reduce between devices may drop a NaN, which jnp.max does not.
        is_nan = jnp.any(jnp.isnan(x), axis=axes, where=is_real)
        extreme = jnp.where(is_nan, jnp.nan, extreme)
    return extreme.astype(dtype)


@functools.partial(jax.jit, static_argnames="axis")
def _gather(value: PerReplica, *, axis: int) -> jax.Array:
    if axis == 0:
        return value.array
    return jnp.concatenate(jnp.split(value.array, value.num_replicas), axis=axis)


def _finished(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Returns a result whole on every device."""
    if isinstance(x, Tracer):
        return x
    x = jax.device_put(x, mesh.layout(...).with_rank(x.ndim).sharding)
    # Virtual CPU devices share threads: collectives that queue up can block each other.
    return jax.block_until_ready(x) if mesh.platform == "cpu" else x


def _per_replica(value: object, mesh: Mesh, where: str) -> PerReplica:
    """Returns a value of replicas: of a plain array, one equal value for each."""
    if isinstance(value, PerReplica):
        check_replicas(value, mesh, where)
        return value
    x: Any = value
    is_whole = isinstance(x, jax.Array) and is_on(x, mesh.jax_mesh) is True
    if mesh.size > 1 and not is_whole:
        msg = (
            f"{where} takes values of replicas, as run returns, got "
            f"{_checks.shown(value)}, which is not on the devices of {mesh.size} "
            "replicas: there is nothing to combine."
        )
        raise StrategyError(msg)
    if not isinstance(x, jax.Array):
        try:
            x = jnp.asarray(host_array(value, f"{where}: the value"))
        except LayoutError as error:
            raise StrategyError(str(error)) from None
    copies = jnp.concatenate([x if x.ndim else x[None]] * mesh.size)
    return PerReplica(copies, num_replicas=mesh.size, is_scalar=not x.ndim)


def _refuse_uneven(where: str, fix: str) -> NoReturn:
    """Raises StrategyError for values whose shapes differ between replicas."""
    msg = (
        f"{where}: the replicas' values have different shapes, as in a short last "
        f"batch: {fix}."
    )
    raise StrategyError(msg)


def _is_value(leaf: object) -> bool:
    return isinstance(leaf, PerReplica)
