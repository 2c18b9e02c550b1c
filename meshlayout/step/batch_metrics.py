"""The metrics of one batch: the loss and its parts, the update's notes, the user's own.

Which there are, and in which dtypes, is known when a step has been traced: a model may
record losses. So a step measures its batch alone and merges that into the metrics of
earlier batches, and what it is first given are empty metrics of the same shapes.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _jax
from meshlayout._annotations import Leaf
from meshlayout.errors import MetricError, StepError
from meshlayout.metrics import Last, Mean, Metrics, Sum


# Notes of an update that are not averaged over the examples.
_KINDS: dict[str, Any] = {"learning_rate": Last, "loss_scale": Last, "skipped": Sum}


def metrics_of_batch(
    parts: Mapping[str, jax.Array],
    notes: Mapping[str, jax.Array],
    weight: Any,
    users: Metrics,
) -> Metrics:
    """Returns all metrics of one batch.

    Args:
        parts: The parts of the loss, by name.
        notes: Other numbers: the learning rate, the gradients' norm.
        weight: The weight of the batch's examples.
        users: The user's metrics of the batch.

    Raises:
        StepError: If a user's metric has the name of a part.
    """
    total = sum(parts.values(), jnp.float32(0))
    values = {"loss": total, **(parts if len(parts) > 1 else {}), **notes}
    # As a batch of one: a value without dims counts 1, whatever its weight.
    weight = jnp.asarray(weight, "float32").reshape(1)
    metrics: dict[str, Any] = {}
    for name, value in values.items():
        if name in users:
            msg = f"metrics=: {name!r} is also a part of the loss; take another name."
            raise StepError(msg)
        if name in _KINDS:
            metrics[name] = _KINDS[name]().update(value)
        else:
            metrics[name] = Mean().update(jnp.reshape(value, 1), weight)
    return Metrics({**metrics, **{name: users.metric(name) for name in users}})


def merged(metrics: Metrics, measured: Metrics) -> Metrics:
    """Returns the metrics of earlier batches and of one more, inside jit.

    Raises:
        StepError: If the earlier ones are not metrics of this step.
    """
    try:
        metrics = metrics.merge(measured)
    except MetricError as error:
        msg = f"{error} Start with None, and pass on what the step returned."
        raise StepError(msg) from None
    mesh = jax.sharding.get_abstract_mesh()

    def settled(leaf: Leaf) -> Any:
        # Weak types, or a sum that the compiler shards, would recompile the next call.
        leaf = _jax.with_weak_type(leaf, weak_type=False)
        if mesh.empty:
            return leaf
        return _jax.constrain(leaf, NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(settled, metrics)


def total_weight(batch_weights: jax.Array | None, num_examples: int) -> Any:
    """Returns the weight of a batch's examples; 0 for a batch of padding alone."""
    if batch_weights is None:
        return jnp.float32(num_examples)
    return jnp.asarray(batch_weights).astype("float32").sum()
