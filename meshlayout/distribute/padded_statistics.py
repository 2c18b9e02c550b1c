"""Flax's batch statistics and metrics, over all replicas and without padding.

A replica's function sees rows that are padding. Losses ask the replica context which;
BatchNorm and the metrics of NNX know of no context, and would count padding without a
word, also in a function that has asked for its loss. So they are given the mask, while
a function is traced for a padded batch. (A BatchNorm with an `axis_name` takes the mean
of the replicas' means: with unequally many rows, that is close to the mean of all.)
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx

from meshlayout._patches import Patch, SharedPatches
from meshlayout.collectives import ReduceOp, get_replica_context
from meshlayout.errors import StrategyError
from meshlayout.step.model_call import ModuleCall, intercepting
from meshlayout.step.objective import WeightMask


def _padding_mask() -> jax.Array | None:
    context = get_replica_context()
    return None if context is None else context.mask


@contextlib.contextmanager
def padding_left_out() -> Iterator[None]:
    """Leaves padding out of what is updated inside, in a context of a replica."""
    mask = _padding_mask()
    # Linen calls back for any module's calls; NNX has nothing of the kind.
    masks = () if mask is None else (WeightMask(mask),)
    with _patches, intercepting(nn.Module(), masks):
        yield


def _normalized(call: Any, norm: nnx.BatchNorm, *args: Any, **kwargs: Any) -> Any:
    mask = _padding_mask()
    if mask is None:
        return call(norm, *args, **kwargs)
    args = args or (kwargs.pop("x"),)
    module_call = ModuleCall("", norm, functools.partial(call, norm))
    return WeightMask(mask).call(module_call, args, kwargs)


def _update_average(
    update: Any, metric: nnx.metrics.Average, mask: Any = None, **kwargs: Any
) -> None:
    # Accuracy and MultiMetric come here as well. Flax's own mask would do, but 0.11 has
    # none and ignores what it is given.
    if _padding_mask() is None or metric.argname not in kwargs:
        update(metric, **({} if mask is None else {"mask": mask}), **kwargs)
        return
    values = jnp.asarray(kwargs[metric.argname])
    weights = _weights(metric, values, mask)
    counted = jnp.where(weights != 0, values * weights, 0)  # not NaN of padding
    metric.total[...] += counted.sum()
    metric.count[...] += weights.sum().astype(metric.count[...].dtype)


def _update_welford(update: Any, metric: nnx.metrics.Welford, **kwargs: Any) -> None:
    context = get_replica_context()
    if context is None or metric.argname not in kwargs:
        update(metric, **kwargs)
        return
    values = jnp.asarray(kwargs[metric.argname])
    weights = _weights(metric, values)

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


def _weights(metric: Any, values: jax.Array, mask: Any = None) -> jax.Array:
    """Returns 1 for each value that is real, and 0 for padding."""
    padding, weights = _padding_mask(), jnp.float32(1)
    if padding is not None and not values.ndim:
        weights = padding.max()  # one number counts once, if any row is real
    elif padding is not None and len(values) == len(padding):
        weights = padding.reshape(-1, *[1] * (values.ndim - 1))
    elif padding is not None and mask is None:
        msg = (
            f"{type(metric).__name__}.update: values of shape {values.shape} are not "
            f"one per row of this replica's batch of {len(padding)} rows, some of "
            "which may be padding. Give one value, or one array, per row."
        )
        raise StrategyError(msg)
    return jnp.broadcast_to(weights * (1 if mask is None else mask), values.shape)


def _patch(owner: type, name: str, replacement: Callable[..., Any]) -> Patch:
    def make(original: Any) -> Any:
        call = lambda *args, **kwargs: replacement(original, *args, **kwargs)  # noqa: E731
        return functools.wraps(original)(call)

    return owner, name, make


# If Flax renames one of these, padding counts, and tests/test_distribute_padding.py
# notices.
_patches = SharedPatches(
    _patch(nnx.BatchNorm, "__call__", _normalized),
    _patch(nnx.metrics.Average, "update", _update_average),
    _patch(nnx.metrics.Welford, "update", _update_welford),
)
