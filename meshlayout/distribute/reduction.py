"""`reduce` and `gather`: values of all replicas become one array, as in tf.distribute.

The work is done on the devices, in one small program per shape; the result is whole on
each of them. Padded rows never count, and a mean over no rows at all is 0. The same
rules hold inside of `merge_call`, where a replica has only its own part of a value.
"""

import functools
from collections.abc import Sequence
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
from meshlayout.collectives import DistributedValues, MergedValue, ReduceOp, check_axis
from meshlayout.distribute.values import PerReplica, check_replicas
from meshlayout.errors import LayoutError, StrategyError
from meshlayout.mesh import Mesh


def reduce(op: ReduceOp, value: Any, axis: int | None, mesh: Mesh) -> jax.Array:
    """Combines one value of all replicas; see `Strategy.reduce`."""
    if isinstance(value, MergedValue):
        x = value.value
        return _reduce_merged(op, value, _checked_axis(op, axis, x.shape, x.dtype))
    value = _per_replica(value, mesh, "reduce")
    axis = _checked_axis(op, axis, value.shape, value.dtype)
    if value.mask is not None and axis != 0:
        refuse_uneven(value, "reduce", "give axis=0 to reduce over rows")
    value.check_mask()
    return _finished(_reduce(value, op=op, axis=axis), mesh)


def gather(value: Any, axis: int, mesh: Mesh) -> jax.Array:
    """Concatenates one value of all replicas; see `Strategy.gather`."""
    if isinstance(value, MergedValue):
        dim = check_axis(axis, value.value.shape, "gather")
        if merged_mask(value) is not None:
            refuse_uneven(value, "gather", "gather along axis=0, outside of run")
        return value.context.all_gather(value.value, dim)
    value = _per_replica(value, mesh, "gather")
    axis = check_axis(axis, value.shape, "gather")
    if value.mask is not None:
        if axis != 0 or isinstance(value.array, Tracer):
            refuse_uneven(value, "gather", "gather along axis=0, outside of jit")
        value.check_mask()
        is_real = np.flatnonzero(to_numpy(value.mask))
        return _finished(jnp.take(value.array, jnp.asarray(is_real), axis=0), mesh)
    return _finished(_gather(value, axis=axis), mesh)


@functools.partial(jax.jit, static_argnames=("op", "axis"))
def _reduce(value: PerReplica, *, op: ReduceOp, axis: int | None) -> jax.Array:
    x, mask = value.array, value.mask
    if mask is not None or (axis == 0 and not value.is_scalar):
        return _combined(op, x, 0, mask)
    stacked = x.reshape(value.num_replicas, *value.shape)
    return _combined(op, stacked, 0 if axis is None else (0, axis + 1), None)


def _reduce_merged(op: ReduceOp, value: MergedValue, axis: int | None) -> jax.Array:
    """Combines the values of all replicas, on each of them."""
    x, context, mask = value.value, value.context, merged_mask(value)
    result = x.dtype if _is_inexact(x.dtype) else _wide_dtype(x.dtype, op)
    if mask is not None and axis != 0:
        refuse_uneven(value, "reduce", "give axis=0 to reduce over rows")
    if mask is not None:
        context.read_mask()
    if mask is not None and op is ReduceOp.MEAN:
        wide = x.astype(_wide_dtype(x.dtype, op))
        total = context.combine(ReduceOp.SUM, _combined(ReduceOp.SUM, wide, 0, mask))
        count = context.combine(ReduceOp.SUM, mask.sum())
        return (total / jnp.maximum(count, 1)).astype(result)
    if op in (ReduceOp.MAX, ReduceOp.MIN):
        return context.combine(op, x if axis is None else _combined(op, x, axis, mask))
    x = x.astype(result)
    return context.combine(op, x if axis is None else _combined(op, x, axis, mask))


def merged_mask(value: MergedValue) -> jax.Array | None:
    """Returns the mask of a value whose dim 0 is the rows of a padded batch."""
    mask, shape = value.context.mask, value.value.shape
    return mask if mask is not None and shape[:1] == mask.shape else None


def _combined(
    op: ReduceOp, x: jax.Array, axes: int | tuple[int, ...], mask: jax.Array | None
) -> jax.Array:
    """Reduces an array; along dim 0 alone if a mask says which of its rows are real."""
    dtype, is_inexact = x.dtype, _is_inexact(x.dtype)
    x = x.astype(_wide_dtype(dtype, op))
    # Chosen, not multiplied by the mask: a padded row may hold NaN.
    is_real = None if mask is None else mask.reshape(-1, *[1] * (x.ndim - 1)) > 0
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        total = jnp.sum(x, axis=axes, where=is_real)
        if op is ReduceOp.MEAN:
            rows = x.size // max(total.size, 1) if mask is None else mask.sum()
            total = total / jnp.maximum(rows, 1)
        return total.astype(dtype) if is_inexact else total
    limits = None if is_inexact else jnp.iinfo(x.dtype)
    sign = -1 if op is ReduceOp.MAX else 1
    worst = sign * jnp.inf if limits is None else (limits.min, limits.max)[sign > 0]
    reduction = jnp.max if op is ReduceOp.MAX else jnp.min
    initial = None if mask is None else worst
    extreme = reduction(x, axis=axes, where=is_real, initial=initial)
    if is_inexact:
        # An all-reduce between devices may drop a NaN, which jnp.max does not.
        is_nan = jnp.any(jnp.isnan(x), axis=axes, where=is_real)
        extreme = jnp.where(is_nan, jnp.nan, extreme)
    return extreme.astype(dtype)


def _is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def _wide_dtype(dtype: Any, op: ReduceOp) -> Any:
    """Returns the dtype to compute in, in which small numbers do not overflow."""
    size = np.dtype(dtype).itemsize
    if _is_inexact(dtype):
        return np.float32 if size < 4 else dtype
    if op is ReduceOp.MEAN:
        return np.float64 if size > 4 else np.float32
    if size >= 4:
        return dtype
    return np.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else np.int32


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
    """Returns a value of replicas; with one replica, also of a plain array."""
    if isinstance(value, PerReplica):
        check_replicas(value, mesh, where)
        return value
    if mesh.size > 1:
        msg = (
            f"{where} takes a value of each replica, as run returns, got "
            f"{_checks.shown(value)}. A plain array is the same on all "
            f"{mesh.size} replicas: there is nothing to combine."
        )
        raise StrategyError(msg)
    x: Any = value
    if not isinstance(value, jax.Array):
        try:
            x = jnp.asarray(host_array(value, f"{where}: the value"))
        except LayoutError as error:
            raise StrategyError(str(error)) from None
    return PerReplica(x if x.ndim else x[None], num_replicas=1, is_scalar=not x.ndim)


def _checked_axis(
    op: ReduceOp, axis: int | None, shape: tuple[int, ...], dtype: Any
) -> int | None:
    """Returns the dim to reduce along as a non-negative number.

    Raises:
        StrategyError: If there is no such dim, or nothing that can be reduced.
    """
    if axis is not None:
        axis = check_axis(axis, shape, "reduce")
    has_order = not jnp.issubdtype(dtype, jnp.complexfloating)
    is_extreme = op in (ReduceOp.MAX, ReduceOp.MIN)
    if _jax.is_extended(dtype) or (is_extreme and not has_order):
        msg = f"reduce: there is no {op.value} of values of dtype {dtype}."
        raise StrategyError(msg)
    if is_extreme and axis is not None and not shape[axis]:
        msg = f"reduce: there is no {op.value} of no rows, in a value of shape {shape}."
        raise StrategyError(msg)
    return axis


def refuse_uneven(value: PerReplica | MergedValue, where: str, fix: str) -> NoReturn:
    """Raises StrategyError for values whose shapes differ between replicas."""
    rows = ""
    if isinstance(value, PerReplica) and not isinstance(value.array, Tracer):
        counts = [part.shape[0] for part in value.values]
        if len(counts) == value.num_replicas:
            rows = f" ({', '.join(map(str, counts))} rows)"
    msg = (
        f"{where}: the replicas' values have different shapes{rows}, as in a short "
        f"last batch: {fix}."
    )
    raise StrategyError(msg)


# Trees of values.


def reduce_tree(op: ReduceOp, value: PyTree, axis: int | None, mesh: Mesh) -> PyTree:
    """Combines each value of a tree; see `Strategy.reduce`."""
    _check_values("reduce", value)
    return jax.tree.map(
        lambda leaf: reduce(op, leaf, axis, mesh), value, is_leaf=_is_value
    )


def gather_tree(value: PyTree, axis: int, mesh: Mesh) -> PyTree:
    """Concatenates each value of a tree; see `Strategy.gather`."""
    _check_values("gather", value)
    return jax.tree.map(lambda leaf: gather(leaf, axis, mesh), value, is_leaf=_is_value)


def local_results(value: PyTree, mesh: Mesh) -> tuple[PyTree, ...]:
    """Returns the values of this process's replicas; see `Strategy.local_results`."""
    if isinstance(value, nnx.Variable):
        value = value.get_value()
        if mesh.size > 1 and not isinstance(value, PerReplica):
            return _copies(value, mesh)
    leaves, treedef = jax.tree.flatten(value, is_leaf=_is_value)
    for leaf in leaves:
        if isinstance(leaf, PerReplica):
            check_replicas(leaf, mesh, "local_results")
    parts = [_parts(leaf) if _is_value(leaf) else None for leaf in leaves]
    counts = {len(part) for part in parts if part is not None}
    if not counts:
        return (value,)
    return tuple(
        treedef.unflatten(
            [
                leaf if part is None else part[i]
                for leaf, part in zip(leaves, parts, strict=True)
            ]
        )
        for i in range(min(counts))
    )


def _copies(value: PyTree, mesh: Mesh) -> tuple[PyTree, ...]:
    """Returns the copies of a mirrored variable's value on this process's replicas."""

    def on(device: Any) -> PyTree:
        return jax.tree.map(
            lambda x: next(s.data for s in x.addressable_shards if s.device == device),
            value,
        )

    return tuple(map(on, mesh.local_devices))


def _is_value(leaf: object) -> bool:
    return isinstance(leaf, DistributedValues)


def _check_values(where: str, value: PyTree) -> None:
    if not jax.tree.leaves(value, is_leaf=_is_value):
        msg = (
            f"{where}: value holds no arrays, got {_checks.shown(value)}. A function "
            "that ends without `return` gives None."
        )
        raise StrategyError(msg)


def _parts(leaf: Any) -> Sequence[Any]:
    if isinstance(leaf, PerReplica):
        return leaf.values
    if merged_mask(leaf) is not None:
        fix = "reduce along axis=0"
        refuse_uneven(leaf, "local_results", fix)
    context = leaf.context
    stacked = context.all_gather(leaf.value[None], 0)
    return [stacked[i] for i in range(context.num_replicas_in_sync)]
