"""Flax's batch statistics and metrics, without the padding of short batches.

A replica's function sees rows that are padding. Losses ask the replica context which;
BatchNorm and the metrics of NNX know of no context, and would count padding without a
word, also in a function that has asked for its loss. So they are given the mask, while
a function is traced for a padded batch.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx

from meshlayout._patches import SharedPatches
from meshlayout.collectives import get_replica_context
from meshlayout.errors import StrategyError
from meshlayout.metrics.adapters import add_statistics, batch_statistics
from meshlayout.step.model_call import ModuleCall, intercepting
from meshlayout.step.objective import WeightMask


_mask: ContextVar[jax.Array | None] = ContextVar("padding_mask", default=None)


@contextlib.contextmanager
def padding_left_out(mask: jax.Array | None) -> Iterator[None]:
    """Leaves padding out of batch statistics and metrics that are updated inside.

    Args:
        mask: 1 for real rows and 0 for padding, of shape (rows,); None if there is no
            padding.
    """
    if mask is None:
        yield
        return
    token = _mask.set(mask)
    try:
        # Linen calls back for any module's calls; NNX has nothing of the kind.
        with _patches, intercepting(nn.Module(), (WeightMask(mask),)):
            yield
    finally:
        _mask.reset(token)


def _masked_norm(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def replacement(self: nnx.BatchNorm, *args: Any, **kwargs: Any) -> Any:
        mask = _mask.get()
        if mask is None:
            return call(self, *args, **kwargs)
        if not args:
            args = (kwargs.pop("x"),)
        module_call = ModuleCall("", self, functools.partial(call, self))
        return WeightMask(mask).call(module_call, args, kwargs)

    return replacement


def _masked_average(update: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(update)
    def replacement(self: nnx.metrics.Average, *args: Any, **kwargs: Any) -> None:
        padding, values = _mask.get(), kwargs.get(self.argname)
        if padding is None or values is None or not jnp.ndim(values):
            # Without padding; or a number that stands for the replica as a whole.
            update(self, *args, **kwargs)
            return
        # Accuracy passes one on; Flax 0.11 has none.
        mask = args[0] if args else kwargs.pop("mask", None)
        if jnp.shape(values)[0] != padding.shape[0]:
            context = get_replica_context()
            if mask is None or context is None or not context.mask_was_taken:
                raise StrategyError(_other_rows(self, values, padding))
            update(self, mask, **kwargs)
            return
        values = jnp.asarray(values)
        if mask is None:
            statistics = batch_statistics(values.astype("float32"), padding, "update")
            add_statistics(self, *statistics)
            return
        is_real = jnp.expand_dims(padding > 0, tuple(range(1, values.ndim)))
        mask = jnp.where(is_real, jnp.broadcast_to(mask, values.shape), 0)
        update(self, mask, **{**kwargs, self.argname: jnp.where(is_real, values, 0)})

    return replacement


def _other_rows(metric: object, values: Any, padding: jax.Array) -> str:
    return (
        f"{type(metric).__name__}.update got values of shape {jnp.shape(values)}, and "
        f"this replica's batch has {padding.shape[0]} rows, some of which may be "
        "padding; which values are of padding is not known. Give it values of shape "
        f"({padding.shape[0]}, ...), one row for each of the batch."
    )


# If Flax renames one of these, padding counts, and tests/test_distribute_padding.py
# notices.
_patches = SharedPatches(
    (nnx.BatchNorm, "__call__", _masked_norm),
    (nnx.metrics.Average, "update", _masked_average),
)
