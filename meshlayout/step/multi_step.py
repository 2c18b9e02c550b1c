"""Several steps in one dispatch.

A scan over batches saves the host's time for each step, which small steps wait for. But
XLA compiles the body of a loop less well on CPUs, and stacking copies the batches: try
it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _jax
from meshlayout._annotations import Batch, Leaf
from meshlayout.errors import StepError
from meshlayout.state import TrainState
from meshlayout.step.placement import layout_of
from meshlayout.step.updates import in_device_memory


# A state, a batch and the arrays of the metrics, to the next state and metrics:
# `StepProgram.train_step`.
StepFunction: TypeAlias = Callable[..., tuple[TrainState, Any]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stacked:
    """Batches stacked in a dim before the batch dim.

    Attributes:
        batches: The batches, as one tree.
    """

    batches: Any


@jax.jit
def _stacked(batches: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)


def stack(batches: list[Any]) -> Stacked:
    """Stacks batches of one structure and shape on their devices.

    Raises:
        StepError: If they differ, or there is none.
    """
    _check_any(batches)
    shapes = [jax.tree.map(lambda x: (jnp.shape(x), x.dtype), x) for x in batches]
    for index, shape in enumerate(shapes):
        if shape != shapes[0]:
            msg = (
                f"the batches of one call must be alike; batch {index} has {shape}, "
                f"and the first one {shapes[0]}."
            )
            raise StepError(msg)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(batches)):
        return Stacked(jax.tree.map(_stacked_shape, *batches))
    return Stacked(_stacked(batches))


def _stacked_shape(*leaves: Leaf) -> jax.ShapeDtypeStruct:
    """Returns what stacking arrays would give, in the layout it would have."""
    first, layout = leaves[0], layout_of(leaves[0])
    if isinstance(layout, NamedSharding):
        layout = NamedSharding(layout.mesh, PartitionSpec(None, *layout.spec))
    shape = (len(leaves), *jnp.shape(first))
    return jax.ShapeDtypeStruct(shape, first.dtype, sharding=layout)


def _check_any(batches: list[Any]) -> None:
    if not batches:
        msg = "steps_per_call= takes a list of batches, and this call was given none."
        raise StepError(msg)


def steps_of(step: StepFunction) -> StepFunction:
    """Returns a function that runs a step for each of `Stacked` batches, in a loop."""

    def train_steps(
        state: TrainState, batches: Stacked, metrics: Any
    ) -> tuple[TrainState, Any]:
        def body(carry: tuple[TrainState, Any], batch: Batch) -> Any:
            new, metrics = step(carry[0], batch, carry[1])
            # A loop refuses a carry whose leaves become weakly typed, or cease to be.
            new = jax.tree.map(
                lambda a, b: _jax.with_weak_type(b, weak_type=jax.typeof(a).weak_type),
                carry[0],
                new,
            )
            return (new, metrics), None

        # A loop wants its state in one memory throughout.
        start = (in_device_memory(state), metrics)
        return jax.lax.scan(body, start, batches.batches)[0]

    return train_steps


def stacked_batches(batches: Any, count: int) -> Stacked:
    """Returns the batches of one call, stacked.

    Args:
        batches: A list of batches, or arrays with a first dim of `count`.
        count: How many there must be.

    Raises:
        StepError: If there are too many or too few.
    """
    if isinstance(batches, Stacked):
        return batches
    stacked = stack(batches) if isinstance(batches, list) else Stacked(batches)
    sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves(stacked.batches)}
    if sizes != {(count,)}:
        msg = (
            f"steps_per_call={count} takes a list of {count} batches, or arrays with a "
            f"first dim of {count}; this call was given "
            f"{sorted(size[0] if size else 0 for size in sizes)}."
        )
        raise StepError(msg)
    return stacked
