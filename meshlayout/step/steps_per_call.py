"""Several steps in one dispatch.

A scan over batches saves the host's time for each step, which small steps wait for. But
XLA compiles the body of a loop less well on CPUs, and stacking copies the batches: try
it.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _jax
from meshlayout._annotations import Batch, Leaf
from meshlayout.errors import StepError
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.step.update import in_device_memory


# The next state, and metrics with a batch added; for None, those of the batch alone.
StepFunction: TypeAlias = Callable[
    [TrainState, Batch, Metrics | None], tuple[TrainState, Metrics]
]


def steps_of(step: StepFunction) -> StepFunction:
    """Returns a function that runs a step for each of stacked batches, in a loop."""

    def train_steps(
        state: TrainState, batch: Batch, metrics: Metrics | None
    ) -> tuple[TrainState, Metrics]:
        # A loop wants its state in one memory throughout.
        state = in_device_memory(state)
        if metrics is None:  # to be traced, for the shapes of its metrics
            return step(state, jax.tree.map(lambda x: x[0], batch), None)

        def body(carry: Any, batch: Batch) -> tuple[Any, None]:
            # A loop refuses a carry whose leaves become weakly typed, or strongly.
            return jax.tree.map(
                _as_weak_as, carry, step(carry[0], batch, carry[1])
            ), None

        return jax.lax.scan(body, (state, metrics), batch)[0]

    return train_steps


def _as_weak_as(before: Leaf, after: Leaf) -> Any:
    return _jax.with_weak_type(after, weak_type=jax.typeof(before).weak_type)


def stacked(batches: Batch, count: int) -> Batch:
    """Returns the batches of one call, stacked in a dim before the rows.

    Args:
        batches: A list of batches, or arrays with a first dim of `count`.
        count: How many there must be.

    Raises:
        StepError: If there are more or fewer.
    """
    sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves(batches)}
    number = len(batches) if isinstance(batches, list) else None
    if number not in (None, count) or (number is None and sizes != {(count,)}):
        got = sorted(size[0] if size else 0 for size in sizes)
        msg = (
            f"steps_per_call={count} takes a list of {count} batches, or arrays with a "
            f"first dim of {count}; this call was given "
            f"{got if number is None else f'a list of {number}'}."
        )
        raise StepError(msg)
    if number is None:
        return batches
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(batches)):
        return jax.tree.map(_stacked_shape, *batches)
    return _stack(batches)


def _stacked_shape(*leaves: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    shape, sharding = (len(leaves), *leaves[0].shape), leaves[0].sharding
    if isinstance(sharding, NamedSharding):
        spec = PartitionSpec(None, *sharding.spec)
        sharding = NamedSharding(sharding.mesh, spec)
    return jax.ShapeDtypeStruct(shape, leaves[0].dtype, sharding=sharding)


@jax.jit
def _stack(batches: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
