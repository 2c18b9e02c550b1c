"""Flax's batch statistics and metrics, over all replicas and without padding.

BatchNorm and the metrics of NNX know no replica context, and would silently count
padding. So they get the mask while a function is traced. With an `axis_name`, BatchNorm
averages the replicas' means, which must count by the replicas' numbers of rows.
"""

from functools import partial, partialmethod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.linen import normalization as linen_normalization
from flax.nnx.nn import normalization

from meshlayout._patches import SharedPatches
from meshlayout.collectives import ReduceOp, get_replica_context
from meshlayout.errors import StrategyError


def _mask() -> Any:
    return getattr(get_replica_context(), "mask", None)


def _is_real(what: str, x: jax.Array) -> jax.Array:
    """Returns which rows of an array are no padding, to broadcast over its dims."""
    mask = _mask()
    if x.shape[:1] != mask.shape:
        msg = f"{what}: values of shape {x.shape} are not one per row of this "
        msg += f"replica's batch of {len(mask)} rows, some of which may be padding. "
        raise StrategyError(f"{msg}Give one value or array per row, or mask=.")
    return mask.reshape(-1, *[1] * (x.ndim - 1)) > 0


def _masked(compute: Any) -> Any:
    """Leaves padding out of the mean and variance that a BatchNorm computes."""

    def replacement(
        x: Any, axes: Any, dtype: Any, axis_name: Any = None, *args: Any, **options: Any
    ) -> Any:
        context: Any = get_replica_context()
        if _mask() is None or 0 not in np.ravel(axes):  # such as a LayerNorm's
            return compute(x, axes, dtype, axis_name, *args, **options)
        if options.get("mask") is None:  # without any real row, all count: no NaN
            is_real = _is_real("BatchNorm", x)
            options["mask"] = is_real | ~is_real.any()
        if axis_name != context.axis_name:
            return compute(x, axes, dtype, axis_name, *args, **options)
        mean, var = compute(x, axes, dtype, None, *args, **options)
        count = jnp.broadcast_to(options["mask"], x.shape).sum(axes) * _mask().max()
        total = partial(context.combine, ReduceOp.SUM)
        share = count / jnp.maximum(total(count), 1)
        mean, squares = total(mean * share), total((var + jnp.abs(mean) ** 2) * share)
        return mean, jnp.maximum(squares - jnp.abs(mean) ** 2, 0)

    return replacement


def _averaged(metric: Any, update: Any, mask: Any = None, **kwargs: Any) -> None:
    # For Accuracy and MultiMetric as well. (Flax 0.11 ignores the mask it is given.)
    if _mask() is None or metric.argname not in kwargs:
        update(metric, **({} if mask is None else {"mask": mask}), **kwargs)
        return
    values, weights = _weighted(metric, kwargs, mask)
    counted = jnp.where(weights != 0, values * weights, 0)  # not NaN of padding
    metric.total[...] += counted.sum()
    metric.count[...] += weights.sum().astype(metric.count[...].dtype)


def _merged(metric: Any, update: Any, **kwargs: Any) -> None:
    context = get_replica_context()
    if context is None or metric.argname not in kwargs:
        update(metric, **kwargs)
        return
    values, weights = _weighted(metric, kwargs)

    def total(x: jax.Array) -> jax.Array:
        return context.combine(ReduceOp.SUM, jnp.where(weights != 0, x, 0).sum())

    # A mean and a sum of squares cannot be added up: each replica takes all rows.
    before, count = metric.count[...], total(weights)
    mean, after = total(values) / jnp.maximum(count, 1), jnp.maximum(before + count, 1)
    delta = jnp.where(count > 0, mean - metric.mean[...], 0)
    squares = total((values - mean) ** 2) + delta**2 * before * count / after
    metric.mean[...] += delta * count / after
    metric.m2[...] += squares
    metric.count[...] = before + count.astype(before.dtype)


def _weighted(metric: Any, kwargs: Any, mask: Any = None) -> tuple[Any, Any]:
    """Returns a metric's values, with 1 for each that is real and 0 for padding."""
    values, padding = jnp.asarray(kwargs[metric.argname]), _mask()
    weights: Any = jnp.float32(1 if mask is None else mask)
    if padding is not None and not values.ndim:
        weights *= padding.max()  # one number counts once, if any row is real
    elif padding is not None and (mask is None or len(values) == len(padding)):
        weights *= _is_real(f"{type(metric).__name__}.update", values)
    return values, jnp.broadcast_to(weights, values.shape)


# If Flax renames one, padding counts: tests/test_distribute_padding.py notices.
padding_left_out = SharedPatches(
    (normalization, "_compute_stats", _masked),
    (linen_normalization, "_compute_stats", _masked),
    (nnx.metrics.Average, "update", lambda call: partialmethod(_averaged, call)),
    (nnx.metrics.Welford, "update", lambda call: partialmethod(_merged, call)),
)
