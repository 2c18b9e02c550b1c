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
    with _patches, intercepting(nn.Module(), (WeightMask(mask),)):
        yield


def _masked_norm(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def replacement(self: nnx.BatchNorm, *args: Any, **kwargs: Any) -> Any:
        mask = padding_mask.get()
        if mask is None:
            return call(self, *args, **kwargs)
        if not args:
            args = (kwargs.pop("x"),)
        module_call = ModuleCall("", self, functools.partial(call, self))
        return WeightMask(mask).call(module_call, args, kwargs)

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
