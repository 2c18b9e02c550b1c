"""Flax's batch statistics and metrics, without the padding of short batches.

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
from meshlayout.collectives import get_replica_context, padding_mask
from meshlayout.errors import StrategyError
from meshlayout.step.model_call import ModuleCall, intercepting
from meshlayout.step.objective import WeightMask


@contextlib.contextmanager
def padding_left_out() -> Iterator[None]:
    """Leaves padding out of what is updated inside, in a context of a replica."""
    mask = padding_mask.get()
    if mask is None:
        yield
        return
    # Linen calls back for any module's calls; NNX has nothing of the kind.
    with _patches, intercepting(nn.Module(), (_ReplicaMask(mask),)):
        yield


class _ReplicaMask(WeightMask):
    """Leaves padding out of batch statistics, also out of those of all replicas.

    With an `axis_name`, Flax takes the mean of the replicas' means, which is not the
    mean of their rows if these are not equally many. So such a norm gets the rows of
    all replicas, and what it takes the mean of is then the same everywhere.
    """

    def call(
        self, call: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a BatchNorm with a mask, unless it has one."""
        norm, context = call.module, get_replica_context()
        if not args:
            args = (kwargs.pop("x"),)
        x, *others = args
        flag = others[0] if others else kwargs.get("use_running_average")
        is_local = norm.axis_name is None or norm.axis_index_groups is not None
        uses_average = bool(norm.use_running_average if flag is None else flag)
        is_masked = kwargs.get("mask") is not None
        if is_local or uses_average or is_masked or context is None:
            return super().call(call, args, kwargs)
        mask = WeightMask(context.all_gather(padding_mask.get(), 0))
        rows = mask.call(call, (context.all_gather(x, 0), *others), kwargs)
        start = context.replica_id_in_sync_group * x.shape[0]
        return jax.lax.dynamic_slice_in_dim(rows, start, x.shape[0])


def _masked_norm(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def replacement(self: nnx.BatchNorm, *args: Any, **kwargs: Any) -> Any:
        mask = padding_mask.get()
        if mask is None:
            return call(self, *args, **kwargs)
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
        padding = padding_mask.get()
        if padding is None or self.argname not in kwargs:  # Flax says what is missing
            update(self, **({} if mask is None else {"mask": mask}), **kwargs)
            return
        values = jnp.asarray(kwargs[self.argname])
        if not values.ndim:
            weights = padding.max()  # one number counts once, if any row is real
        elif values.shape[0] == padding.shape[0]:
            weights = padding.reshape(-1, *[1] * (values.ndim - 1))
        else:
            context = get_replica_context()
            if mask is None or context is None or not context.mask_was_taken:
                raise StrategyError(_other_rows(self, values, padding))
            weights = jnp.float32(1)
        weights = jnp.broadcast_to(weights, values.shape)
        if mask is not None:
            weights = weights * mask
        counted = jnp.where(weights != 0, values * weights, 0)  # not NaN of padding
        self.total[...] = self.total[...] + counted.sum()
        self.count[...] = self.count[...] + weights.sum().astype(self.count.dtype)

    return replacement


def _other_rows(metric: object, values: jax.Array, padding: jax.Array) -> str:
    return (
        f"{type(metric).__name__}.update: values of shape {values.shape} are not one "
        f"per row of this replica's batch of {padding.shape[0]} rows, some of which "
        "may be padding. Give one value, or one array, per row."
    )


# If Flax renames one of these, padding counts, and tests/test_distribute_padding.py
# notices.
_patches = SharedPatches(
    (nnx.BatchNorm, "__call__", _masked_norm),
    (nnx.metrics.Average, "update", _masked_average),
)
