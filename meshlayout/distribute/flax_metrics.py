"""Flax's metrics, which count only the real rows of a replica's padded batch.

A function written for one device calls `accuracy.update(logits=..., labels=...)` and
knows nothing of padding. Flax's own `mask` would have to be passed at every call, and
flax 0.11 ignores it without a word. So while a replica's function is traced,
`nnx.metrics.Average.update`, to which `Accuracy` and `MultiMetric` lead as well, looks
at the replica's mask by itself. Metrics of `meshlayout.metrics` do the same.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from meshlayout._patches import SharedPatches
from meshlayout.collectives import get_replica_context
from meshlayout.errors import StrategyError


def _counting_real_rows(update: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(update)
    def replacement(self: Any, mask: ArrayLike | None = None, **kwargs: Any) -> None:
        context = get_replica_context()
        rows = None if context is None else context.read_mask()
        if rows is None or self.argname not in kwargs:  # Flax says what is missing
            given = {} if mask is None else {"mask": mask}
            update(self, **given, **kwargs)
            return
        values = jnp.asarray(kwargs[self.argname])
        if not values.ndim:
            weights = rows.max()  # one number counts once, if any row is real
        elif values.shape[0] == rows.shape[0]:
            weights = rows.reshape(-1, *[1] * (values.ndim - 1))
        else:
            msg = (
                f"{type(self).__name__}.update: values of shape {values.shape} are not "
                f"one per row of this replica's batch of {rows.shape[0]} rows, some of "
                "which may be padding. Give one value, or one array, per row."
            )
            raise StrategyError(msg)
        weights = jnp.broadcast_to(weights, values.shape)
        if mask is not None:
            weights = weights * mask
        counted = jnp.where(weights != 0, values * weights, 0)  # not NaN of padding
        self.total[...] = self.total[...] + counted.sum()
        self.count[...] = self.count[...] + weights.sum().astype(self.count.dtype)

    return replacement


# If Flax renames the method or its attributes, short batches are counted with their
# padding; tests/test_custom_training.py notices.
counting_real_rows = SharedPatches((nnx.metrics.Average, "update", _counting_real_rows))
