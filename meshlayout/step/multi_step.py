"""Several steps in one call: in one dispatch, or one by one where that is faster.

A scan over batches saves the host's time for each step, which small steps wait for. But
XLA compiles the body of a loop less well on CPUs, and stacking copies the batches. Only
a measurement tells which wins, so `"auto"` makes one, with the calls that are due
anyway.
"""

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _jax
from meshlayout._annotations import Batch, Leaf, PyTree
from meshlayout.cluster.channel import Channel
from meshlayout.errors import StepError
from meshlayout.state import TrainState
from meshlayout.step.placement import layout_of
from meshlayout.step.updates import in_device_memory


_log = logging.getLogger("meshlayout")

# A state, a batch and the arrays of the metrics, to the next state, and the metrics'
# arrays with a report: `StepProgram.train_step`.
StepFunction: TypeAlias = Callable[..., tuple[TrainState, tuple[tuple[Leaf, ...], Any]]]


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


def scan_steps(
    step: StepFunction,
    state: TrainState,
    metrics: tuple[Leaf, ...],
    xs: PyTree,
    batch_of: Callable[[PyTree], Batch],
) -> tuple[TrainState, tuple[tuple[Leaf, ...], Any]]:
    """Runs one step after the other, in a loop on the device; stacks the reports.

    Args:
        step: As `StepProgram.train_step`.
        state: The state.
        metrics: The arrays of the metrics.
        xs: What each batch is made of, stacked in a leading dim.
        batch_of: Makes a batch of one entry of it.
    """

    def body(carry: tuple[TrainState, tuple[Leaf, ...]], x: PyTree) -> Any:
        new, (metrics, report) = step(carry[0], batch_of(x), carry[1])
        # A loop refuses a carry whose leaves become weakly typed, or cease to be.
        new = jax.tree.map(
            lambda a, b: _jax.with_weak_type(b, weak_type=jax.typeof(a).weak_type),
            carry[0],
            new,
        )
        return (new, metrics), report

    # A loop wants its state in one memory throughout.
    start = (in_device_memory(state), metrics)
    (state, metrics), reports = jax.lax.scan(body, start, xs)
    return state, (metrics, reports)


def steps_of(step: StepFunction) -> StepFunction:
    """Returns a function that runs one step for each of `Stacked` batches."""

    def train_steps(
        state: TrainState, batches: Stacked, metrics: tuple[Leaf, ...]
    ) -> tuple[TrainState, tuple[tuple[Leaf, ...], Any]]:
        return scan_steps(step, state, metrics, batches.batches, lambda batch: batch)

    return train_steps


@dataclass
class FixedCalls:
    """A given number of batches in one dispatch; `choice` is as for `TimedCalls`."""

    count: int
    choice: str = ""

    def stacked(self, batches: Any) -> Stacked:
        """Returns the batches of one call, stacked.

        Raises:
            StepError: If there are too many or too few.
        """
        if isinstance(batches, Stacked):
            return batches
        stacked = stack(batches) if isinstance(batches, list) else Stacked(batches)
        sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves(stacked.batches)}
        if sizes != {(self.count,)}:
            msg = (
                f"steps_per_call={self.count} takes a list of {self.count} batches, or "
                f"arrays with a first dim of {self.count}; this call was given "
                f"{sorted(size[0] if size else 0 for size in sizes)}."
            )
            raise StepError(msg)
        return stacked

    def run(self, step: Any, state: PyTree, batches: Any, metrics: Any) -> Any:
        """Runs a step on each batch."""
        return step._run(state, self.stacked(batches), metrics)


# How often each way is timed, after a first run, which compiles.
_TRIALS = 3

# Numbers the choices that processes make together.
_choices = itertools.count()


@dataclass
class TimedCalls:
    """Tries both ways on the first calls, then keeps the faster one.

    Each call does its own work, in one way or the other; none is made for the timing.
    Processes that train one state go by the times of the first: if each chose for
    itself, they could run different programs, and wait for each other for ever.

    Attributes:
        choice: What was chosen and why; empty until then.
        seconds: Seconds per batch, for each way.
    """

    choice: str = ""
    seconds: dict[bool, list[float]] = field(
        default_factory=lambda: {True: [], False: []}
    )
    _is_scanned: bool | None = None

    def stacked(self, batches: Any) -> Stacked:
        """Returns the batches of one call, stacked."""
        return batches if isinstance(batches, Stacked) else stack(batches)

    def run(self, step: Any, state: PyTree, batches: Any, metrics: Any) -> Any:
        """Runs a step on each batch.

        Raises:
            StepError: If they are not a list, or an empty one.
        """
        if not isinstance(batches, list):
            msg = (
                'steps_per_call="auto" takes a list of batches, and this call was '
                f"given a {type(batches).__name__}."
            )
            raise StepError(msg)
        _check_any(batches)
        is_known = self._is_scanned is not None
        is_scanned = self._is_scanned
        if not is_known:
            is_scanned = len(self.seconds[True]) < len(self.seconds[False])
            jax.block_until_ready((state, batches))  # not part of this call's work
        start = time.perf_counter()
        if is_scanned:
            state, metrics = step._run(state, stack(batches), metrics)
        else:
            for batch in batches:
                state, metrics = step._run(state, batch, metrics)
        if not is_known:
            jax.block_until_ready((state, metrics))
            seconds = (time.perf_counter() - start) / len(batches)
            self.seconds[bool(is_scanned)].append(seconds)
            if min(map(len, self.seconds.values())) > _TRIALS:
                self._choose(state)
        return state, metrics

    def _choose(self, state: PyTree) -> None:
        seconds = [min(self.seconds[way][1:]) for way in (True, False)]
        if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(state)):
            channel = Channel(
                f"steps_per_call/{next(_choices)}",
                what='the choice of steps_per_call="auto"',
                hint="All processes must run the same steps.",
            )
            seconds = channel.from_first(seconds)
        looped, one_by_one = seconds
        self._is_scanned = looped < one_by_one
        how = "in one dispatch" if self._is_scanned else "one by one"
        self.choice = (
            f"batches of a call run {how}: {1e3 * one_by_one:.3g} ms each one by one, "
            f"{1e3 * looped:.3g} ms in one dispatch"
        )
        _log.info("%s", self.choice)


def calls_for(steps_per_call: int | Literal["auto"]) -> FixedCalls | TimedCalls:
    """Returns how the batches of a call are run."""
    return TimedCalls() if steps_per_call == "auto" else FixedCalls(steps_per_call)
