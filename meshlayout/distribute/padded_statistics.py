"""Flax's batch statistics and metrics, over all replicas and without padding.

A replica's function sees rows that are padding. Losses ask the replica context which;
BatchNorm and the metrics of NNX know of no context, and would count padding without a
word, also in a function that has asked for its loss. So they are given the mask, while
a function is traced for a padded batch.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx
from jax.typing import ArrayLike

from meshlayout._patches import SharedPatches
from meshlayout.collectives import ReduceOp, get_replica_context
from meshlayout.errors import StrategyError
from meshlayout.step.model_call import ModuleCall, intercepting
from meshlayout.step.objective import WeightMask


def _mask() -> jax.Array | None:
    context = get_replica_context()
    return None if context is None else context.mask


@contextlib.contextmanager
def padding_left_out() -> Iterator[None]:
    """Leaves padding out of what is updated inside, in a context of a replica."""
    mask = _mask()
    if mask is None:
        with _welford:
            yield
        return
    # Linen calls back for any module's calls; NNX has nothing of the kind.
    with _welford, _patches, intercepting(nn.Module(), (_ReplicaMask(mask),)):
        yield


class _ReplicaMask(WeightMask):
    """Leaves padding out of batch statistics, also out of those of all replicas.

    With an `axis_name`, Flax takes the mean of the replicas' means, which is not the
    mean of their rows if these are not equally many. So such a norm gets all rows.
    """

    def call(
        self, call: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a BatchNorm with a mask, unless it has one."""
        norm, context, (x, *others) = call.module, get_replica_context(), args
        flag = others[0] if others else kwargs.get("use_running_average")
        uses_average = bool(norm.use_running_average if flag is None else flag)
        is_masked = uses_average or kwargs.get("mask") is not None
        if norm.axis_name is None or is_masked or context is None:
            return super().call(call, args, kwargs)
        mask = WeightMask(context.all_gather(_mask(), 0))
        rows = mask.call(call, (context.all_gather(x, 0), *others), kwargs)
        start = context.replica_id_in_sync_group * x.shape[0]
        return jax.lax.dynamic_slice_in_dim(rows, start, x.shape[0])


def _masked_norm(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def replacement(self: nnx.BatchNorm, *args: Any, **kwargs: Any) -> Any:
        mask = _mask()
        if mask is None:
            return call(self, *args, **kwargs)
        args = args or (kwargs.pop("x"),)
        module_call = ModuleCall("", self, functools.partial(call, self))
        return _ReplicaMask(mask).call(module_call, args, kwargs)

    return replacement


def _masked_average(update: Callable[..., None]) -> Callable[..., None]:
    # Accuracy and MultiMetric come here as well. Flax's own mask would do, but 0.11 has
    # none and ignores what it is given.
    @functools.wraps(update)
    def replacement(
        self: nnx.metrics.Average, mask: ArrayLike | None = None, **kwargs: Any
    ) -> None:
        if _mask() is None or self.argname not in kwargs:
            update(self, **({} if mask is None else {"mask": mask}), **kwargs)
            return
        values = jnp.asarray(kwargs[self.argname])
        weights = _weights(self, values, has_mask=mask is not None)
        if mask is not None:
            weights = weights * mask
        counted = jnp.where(weights != 0, values * weights, 0)  # not NaN of padding
        self.total[...] = self.total[...] + counted.sum()
        self.count[...] = self.count[...] + weights.sum().astype(self.count[...].dtype)

    return replacement


def _weights(metric: Any, values: jax.Array, *, has_mask: bool) -> jax.Array:
    """Returns 1 for each value that is real, and 0 for padding."""
    padding = _mask()
    if padding is None or (has_mask and values.shape[:1] != padding.shape):
        weights = jnp.float32(1)
    elif not values.ndim:
        weights = padding.max()  # one number counts once, if any row is real
    elif values.shape[0] == padding.shape[0]:
        weights = padding.reshape(-1, *[1] * (values.ndim - 1))
    else:
        msg = (
            f"{type(metric).__name__}.update: values of shape {values.shape} are not "
            f"one per row of this replica's batch of {padding.shape[0]} rows, some of "
            "which may be padding. Give one value, or one array, per row."
        )
        raise StrategyError(msg)
    return jnp.broadcast_to(weights, values.shape)


def _merged_welford(update: Callable[..., None]) -> Callable[..., None]:
    # A mean and a sum of squares cannot be added up: all replicas take the rows of all.
    @functools.wraps(update)
    def replacement(self: Any, **kwargs: Any) -> None:
        context = get_replica_context()
        is_alone = context is None or context.axis_name is None
        has_padding = _mask() is not None
        if (is_alone and not has_padding) or self.argname not in kwargs:
            update(self, **kwargs)
            return
        assert context is not None
        values = jnp.asarray(kwargs[self.argname])
        weights = _weights(self, values, has_mask=False)

        def total(x: jax.Array) -> jax.Array:
            return context.combine(ReduceOp.SUM, jnp.where(weights != 0, x, 0).sum())

        count = total(weights)
        mean = total(values) / jnp.maximum(count, 1)
        before = self.count[...]
        after = jnp.maximum(before + count, 1)
        delta = jnp.where(count > 0, mean - self.mean[...], 0)
        squares = total((values - mean) ** 2) + delta**2 * before * count / after
        self.mean[...] = self.mean[...] + delta * count / after
        self.m2[...] = self.m2[...] + squares
        self.count[...] = before + count.astype(before.dtype)

    return replacement


# If Flax renames one of these, padding counts, and tests/test_distribute_padding.py
# notices.
_patches = SharedPatches(
    (nnx.BatchNorm, "__call__", _masked_norm),
    (nnx.metrics.Average, "update", _masked_average),
)
_welford = SharedPatches((nnx.metrics.Welford, "update", _merged_welford))
