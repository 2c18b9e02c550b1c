"""Several steps in one call: in one dispatch, or one by one where that is faster."""

import logging
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp

from meshlayout import _jax
from meshlayout._annotations import PyTree
from meshlayout.errors import StepError


_log = logging.getLogger("meshlayout")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stacked:
    """Batches stacked in a dim before the batch dim.

    Attributes:
        batches: The batches, as one tree.
    """

    batches: Any


@jax.jit
def _stack(batches: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)


def stack(batches: list[Any]) -> Stacked:
    """Stacks batches on their devices.

    Args:
        batches: Batches of one structure and shape.

    Raises:
        StepError: If they are not, or there is none.
    """
    _check_any(batches)
    shapes = [jax.tree.map(lambda x: (jnp.shape(x), x.dtype), one) for one in batches]
    for at, shape in enumerate(shapes):
        if shape != shapes[0]:
            msg = (
                f"the batches of one call have to be alike; batch {at} has {shape}, "
                f"and the first one {shapes[0]}."
            )
            raise StepError(msg)
    return Stacked(_stack(batches))


def _check_any(batches: list[Any]) -> None:
    if not batches:
        msg = "steps_per_call= takes a list of batches, and this call was given none."
        raise StepError(msg)


def like(old: PyTree, new: PyTree) -> Any:
    """Returns a state whose leaves are as weakly typed as before, as a loop wants."""
    return jax.tree.map(
        lambda a, b: _jax.with_weak_type(b, weak_type=jax.typeof(a).weak_type), old, new
    )


@dataclass
class FixedCalls:
    """A given number of batches in one dispatch.

    Attributes:
        count: How many.
        choice: What is done, in words.
    """

    count: int
    choice: str = ""

    def stacked(self, batches: Any) -> Stacked:
        """Returns the batches of one call, stacked.

        Raises:
            StepError: If there are too many or too few.
        """
        if isinstance(batches, Stacked):
            return batches
        found = stack(batches) if isinstance(batches, list) else Stacked(batches)
        sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves(found.batches)}
        if sizes != {(self.count,)}:
            msg = (
                f"steps_per_call={self.count} takes a list of {self.count} batches, or "
                f"arrays with a first dim of {self.count}; this call was given "
                f"{sorted(size[0] if size else 0 for size in sizes)}."
            )
            raise StepError(msg)
        return found

    def run(self, step: Any, state: PyTree, batches: Any, metrics: Any) -> Any:
        """Runs a step on each batch."""
        return step._run(state, self.stacked(batches), metrics)


# How often each way is timed; the first run of a way compiles and does not count.
_TRIALS = 3


@dataclass
class TimedCalls:
    """Tries both ways on the first calls, then keeps the faster one.

    All calls do the work they are asked for; only their order of trying is fixed.

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
        if self._is_scanned is not None:
            return _run(step, state, batches, metrics, is_scanned=self._is_scanned)
        way = len(self.seconds[True]) < len(self.seconds[False])
        jax.block_until_ready((state, batches))
        start = time.perf_counter()
        result = _run(step, state, batches, metrics, is_scanned=way)
        jax.block_until_ready(result)
        self.seconds[way].append((time.perf_counter() - start) / len(batches))
        if min(map(len, self.seconds.values())) > _TRIALS:
            self._choose()
        return result

    def _choose(self) -> None:
        looped, one_by_one = (min(self.seconds[way][1:]) for way in (True, False))
        self._is_scanned = looped < one_by_one
        how = "in one dispatch" if self._is_scanned else "one by one"
        self.choice = (
            f"batches of a call run {how}: {1e3 * one_by_one:.3g} ms each one by one, "
            f"{1e3 * looped:.3g} ms in one dispatch"
        )
        _log.info("%s", self.choice)


def _run(
    step: Any, state: PyTree, batches: list[Any], metrics: Any, *, is_scanned: bool
) -> Any:
    if is_scanned:
        return step._run(state, stack(batches), metrics)
    for batch in batches:
        state, metrics = step._run(state, batch, metrics)
    return state, metrics


def calls_for(steps_per_call: int | Literal["auto"]) -> FixedCalls | TimedCalls:
    """Returns how the batches of a call are run."""
    return TimedCalls() if steps_per_call == "auto" else FixedCalls(steps_per_call)
