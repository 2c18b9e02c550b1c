"""`reduce` and `gather`: values of all replicas become one array, as in tf.distribute.

The work is done on the devices, in one small program per shape; the result is whole on
each of them. Padded rows never count.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from meshlayout import _checks
from meshlayout.arrays import to_numpy
from meshlayout.collectives import (
    LOCAL_REDUCTIONS,
    MergedValue,
    ReduceOp,
    check_axis,
)
from meshlayout.distribute.values import PerReplica
from meshlayout.errors import StrategyError
from meshlayout.mesh import Mesh


def reduce(op: ReduceOp, value: Any, axis: int | None, mesh: Mesh) -> jax.Array:
    """Combines one value of all replicas; see `Strategy.reduce`."""
    if isinstance(value, MergedValue):
        if axis is not None:
            axis = check_axis(axis, value.value.shape, "reduce")
        return value.reduce(op, axis)
    if not isinstance(value, PerReplica):
        return _reduce_plain(op, value, axis, mesh)
    _check_replicas(value, mesh, "reduce")
    if axis is not None:
        axis = check_axis(axis, value.shape, "reduce")
    if value.mask is not None and axis != 0:
        _refuse_uneven(value, "reduce", "give axis=0 to reduce over rows")
    return _finished(_reduce(value, op=op, axis=axis), mesh)


def gather(value: Any, axis: int, mesh: Mesh) -> jax.Array:
    """Concatenates one value of all replicas; see `Strategy.gather`."""
    if isinstance(value, MergedValue):
        dim = check_axis(axis, value.value.shape, "gather")
        return value.context.all_gather(value.value, dim)
    if not isinstance(value, PerReplica):
        x = _plain(value, mesh, "gather")
        check_axis(axis, x.shape, "gather")
        return x
    _check_replicas(value, mesh, "gather")
    axis = check_axis(axis, value.shape, "gather")
    if value.mask is not None:
        if axis != 0 or isinstance(value.array, Tracer):
            _refuse_uneven(value, "gather", "gather along axis=0, outside of jit")
        is_real = np.flatnonzero(to_numpy(value.mask))
        return _finished(jnp.take(value.array, jnp.asarray(is_real), axis=0), mesh)
    return _finished(_gather(value, axis=axis), mesh)


@functools.partial(jax.jit, static_argnames=("op", "axis"))
def _reduce(value: PerReplica, *, op: ReduceOp, axis: int | None) -> jax.Array:
    x, mask = value.array, value.mask
    if x.dtype == jnp.bool_ and op in (ReduceOp.SUM, ReduceOp.MEAN):
        x = x.astype("int32")
    if mask is not None:
        return _reduce_real(x, mask, op)
    if value.is_scalar or axis == 0:
        return LOCAL_REDUCTIONS[op](x, axis=0)
    stacked = x.reshape(value.num_replicas, *value.shape)
    axes = 0 if axis is None else (0, axis + 1)
    return LOCAL_REDUCTIONS[op](stacked, axis=axes)


def _reduce_real(x: jax.Array, mask: jax.Array, op: ReduceOp) -> jax.Array:
    """Reduces over the real rows of all replicas."""
    is_real = mask.reshape(-1, *[1] * (x.ndim - 1)) > 0
    if op in (ReduceOp.MAX, ReduceOp.MIN):
        info = jnp.finfo if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.iinfo
        least = info(x.dtype).min if op is ReduceOp.MAX else info(x.dtype).max
        return LOCAL_REDUCTIONS[op](jnp.where(is_real, x, least), axis=0)
    total = jnp.where(is_real, x, 0).sum(axis=0)
    if op is ReduceOp.SUM:
        return total
    # Without any real row, the mean is 0 and not NaN.
    return total / jnp.maximum(mask.sum(), 1).astype(jnp.result_type(x, "float32"))


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


def _reduce_plain(
    op: ReduceOp, value: object, axis: int | None, mesh: Mesh
) -> jax.Array:
    x = _plain(value, mesh, "reduce")
    if axis is None:
        return x
    return LOCAL_REDUCTIONS[op](x, axis=check_axis(axis, x.shape, "reduce"))


def _plain(value: object, mesh: Mesh, where: str) -> jax.Array:
    """Returns a plain array, which a strategy of one replica takes as its value."""
    if mesh.size > 1:
        msg = (
            f"{where} takes a value of each replica, as run returns, got "
            f"{_checks.shown(value)}. A plain array is the same on all "
            f"{mesh.size} replicas: there is nothing to combine."
        )
        raise StrategyError(msg)
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        msg = f"{where} takes arrays, got {_checks.shown(value)}."
        raise StrategyError(msg) from None


def _check_replicas(value: PerReplica, mesh: Mesh, where: str) -> None:
    if value.num_replicas != mesh.size:
        msg = (
            f"{where}: the value is of {value.num_replicas} replicas, and this "
            f"strategy has {mesh.size}: it is another strategy's."
        )
        raise StrategyError(msg)


def _refuse_uneven(value: PerReplica, where: str, fix: str) -> None:
    """Raises StrategyError for values whose shapes differ between replicas."""
    rows = ""
    is_traced = isinstance(value.array, Tracer)
    if not is_traced and value.array.is_fully_addressable:
        counts = [part.shape[0] for part in value.values]
        rows = f" ({', '.join(map(str, counts))} rows)"
    msg = (
        f"{where}: the replicas' values have different shapes{rows}, as in a short "
        f"last batch: {fix}."
    )
    raise StrategyError(msg)
