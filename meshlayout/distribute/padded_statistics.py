"""Flax's batch statistics and metrics, over all replicas and without padding.

BatchNorm and the metrics of NNX know no replica context, and would silently count
padding. So they get the mask while a function is traced. With an `axis_name`, BatchNorm
averages the replicas' means, which must count by the replicas' numbers of rows.
"""

import contextlib
from collections.abc import Iterator
from functools import partial, partialmethod
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx
from flax.linen import normalization as linen_normalization
from flax.nnx.nn import normalization

from meshlayout._patches import SharedPatches
from meshlayout.collectives import ReduceOp, get_replica_context
from meshlayout.errors import StrategyError
from meshlayout.step.model_call import ModuleCall, intercepting, weight_mask


@contextlib.contextmanager
def padding_left_out() -> Iterator[None]:
    """Excludes padding from statistics updated inside, in a replica context."""
    # Linen has interceptors for module calls; NNX does not.
    masks = () if _mask() is None else (weight_mask(_mask()),)
    with _patches, intercepting(nn.Module(), masks):
        yield


def _mask() -> Any:
    return getattr(get_replica_context(), "mask", None)


def _normalized(norm: nnx.BatchNorm, call: Any, *args: Any, **kwargs: Any) -> Any:
    if _mask() is None:
        return call(norm, *args, **kwargs)
    module_call = ModuleCall("", norm, partial(call, norm))
    masked = weight_mask(_mask())(module_call)
    return masked(*(args or (kwargs.pop("x"),)), **kwargs)


def _synchronized(compute: Any) -> Any:
    """Makes a mean and variance over all replicas those of their real rows."""

    def replacement(
        x: Any, axes: Any, dtype: Any, axis_name: Any = None, *args: Any, **options: Any
    ) -> Any:
        context, mask = get_replica_context(), options.get("mask")
        if mask is None or _mask() is None or axis_name != context.axis_name:
            return compute(x, axes, dtype, axis_name, *args, **options)
        mean, var = compute(x, axes, dtype, None, *args, **options)
        # A replica without any real row has a mask of ones.
        count = jnp.broadcast_to(mask, x.shape).sum(axes) * _mask().max()
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
    values = jnp.asarray(kwargs[metric.argname])
    padding, weights = _mask(), jnp.float32(1)
    if padding is not None and not values.ndim:
        weights = padding.max()  # one number counts once, if any row is real
    elif padding is not None and len(values) == len(padding):
        weights = padding.reshape(-1, *[1] * (values.ndim - 1))
    elif padding is not None and mask is None:
        msg = f"{type(metric).__name__}.update: values of shape {values.shape} are not "
        msg += f"one per row of this replica's batch of {len(padding)} rows, some of "
        msg += "which may be padding. Give one value, or one array, per row."
        raise StrategyError(msg)
    weights = weights * (1 if mask is None else mask)
    return values, jnp.broadcast_to(weights, values.shape)


# If Flax renames one, padding counts: tests/test_distribute_padding.py notices.
_patches = SharedPatches(
    (normalization, "_compute_stats", _synchronized),
    (linen_normalization, "_compute_stats", _synchronized),
    (nnx.BatchNorm, "__call__", lambda call: partialmethod(_normalized, call)),
    (nnx.metrics.Average, "update", lambda call: partialmethod(_averaged, call)),
    (nnx.metrics.Welford, "update", lambda call: partialmethod(_merged, call)),
)
