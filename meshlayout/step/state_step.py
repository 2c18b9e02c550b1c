"""What train, eval and predict steps share: how they are called.

A call places the batch, looks up what is compiled for the state's mesh, and calls it.
The first one on a mesh traces the step, and JAX keeps that trace for the call itself.
"""

import copy
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Self

import jax
from jax.core import Tracer

from meshlayout import _jax
from meshlayout._annotations import Batch
from meshlayout._batches import marked_weights
from meshlayout._tracebacks import show_user_frames
from meshlayout.layout_map import LayoutMap
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.state.train_state import ModelCode
from meshlayout.step.compiled_step import CompiledStep, OnRecompile
from meshlayout.step.inspection import StepInspection
from meshlayout.step.placement import (
    check_batch,
    check_divided,
    check_state,
    note_weights,
    place_batch,
)


class _LastCall(NamedTuple):
    """A call that took its state and batch as they are, and returned a state."""

    compiled: CompiledStep[..., Any]
    empty: Metrics | None
    program: ModelCode
    mesh: Any  # the sharding of the returned state's step number
    extra: frozenset[str]  # the names of the state's extra arrays
    batch: list[Any]  # the shardings of the batch

    def is_like(self, state: TrainState, batch: Batch) -> bool:
        """Returns, fast, whether the next call is the same but for its values."""
        try:
            return (
                state.program is self.program
                and state.step.sharding is self.mesh
                and state.extra.keys() == self.extra
                and [x.sharding for x in jax.tree.leaves(batch)] == self.batch
            )
        except (AttributeError, TypeError):  # NumPy arrays, tracers, another state
            return False


class StateStep(StepInspection):
    """A step of a train state and a batch, compiled at its first call.

    Args:
        function: The user's function.
        weights: Where a batch carries its weights; None for a step that measures
            nothing.
        layouts: The layout map that `constrain` follows.
        on_recompile: As for `compile_step`.
    """

    __name__: str
    _row_dim = 0  # of what a call takes
    _repeats = False  # whether calls are alike if states and batches are
    _last: _LastCall | None = None

    def __init__(
        self,
        function: Callable[..., Any],
        weights: str | int | None,
        layouts: LayoutMap | None,
        on_recompile: OnRecompile,
    ) -> None:
        self._function, self.weights = function, weights
        self._options: dict[str, Any] = {
            "layouts": layouts,
            "on_recompile": on_recompile,
        }
        CompiledStep(function, **self._options)  # checks them
        self._compiled: dict[Hashable, CompiledStep[..., Any]] = {}
        # Metrics are not donated: all calls that begin without any share these.
        self._empty: dict[Hashable, Metrics | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Compiled programs belong to this process; a copy compiles its own.
        return {**vars(self), "_compiled": {}, "_empty": {}, "_last": None}

    def __repr__(self) -> str:
        name = getattr(self._function, "__name__", type(self._function).__name__)
        return f"{type(self).__name__}({name})"

    def without_layouts(self) -> Self:
        """Returns the same step for states on any mesh, which follows no layout map."""
        step = copy.copy(self)
        step._options = {"layouts": None, "on_recompile": "ignore"}
        return step

    def trace(
        self, state: TrainState, batch: Batch, metrics: Metrics | None = None
    ) -> jax.stages.Traced:
        """Traces the step for these arguments, as `jax.jit(...).trace` does.

        Args:
            state: A state; arrays may be `jax.ShapeDtypeStruct` with shardings, here
                and in the batch.
            batch: The global batch.
            metrics: As for a call; a step that predicts takes none.
        """
        compiled, args = self._call_of(state, batch, metrics)
        return compiled.trace(*args)

    def _run(self, state: TrainState, batch: Batch, metrics: Metrics | None) -> Any:
        last = self._last
        try:
            # To look all up again would take Python longer than a small step.
            if last is not None and last.is_like(state, batch):
                if marked_weights:
                    check_batch(batch, self.weights)
                metrics = last.empty if metrics is None else metrics
                return last.compiled(state, batch, metrics)
            compiled, args = self._call_of(state, batch, metrics)
            result = compiled(*args)
            if self._repeats and args[0] is state and args[1] is batch:
                self._last = self._repeatable(compiled, state, batch, result[0])
            return result
        except Exception as error:
            show_user_frames(error)
            raise

    def _repeatable(
        self,
        compiled: CompiledStep[..., Any],
        state: TrainState,
        batch: Batch,
        new: TrainState,
    ) -> _LastCall | None:
        empty = self._empty.get((self._key(state, batch), state.program))
        rows = [getattr(x, "sharding", None) for x in jax.tree.leaves(batch)]
        if empty is None or None in rows:  # inside another jit, or on the host
            return None
        extra = frozenset(state.extra)
        return _LastCall(compiled, empty, state.program, new.step.sharding, extra, rows)

    def _call_of(
        self, state: TrainState, batch: Batch, metrics: Metrics | None
    ) -> tuple[CompiledStep[..., Any], tuple[Any, ...]]:
        """Returns what to call, and with what."""
        check_state(self.__name__, state)
        state, placed = self._placed(state, batch)
        key = self._key(state, placed)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self._compile_for(key)
            note_weights(self._function, batch, self.weights)
        program = key, state.program
        if program in self._empty:
            empty = self._empty[program]
        else:
            empty = self._start(compiled, state, placed)
            if not isinstance(state.step, (jax.ShapeDtypeStruct, Tracer)):
                self._empty[program] = empty
        if self.weights is None:
            return compiled, (state, placed)
        return compiled, (state, placed, empty if metrics is None else metrics)

    def _start(
        self, compiled: CompiledStep[..., Any], state: TrainState, batch: Batch
    ) -> Metrics | None:
        """Traces the step on a new mesh, and returns its empty metrics there."""
        args = (state, batch) if self.weights is None else (state, batch, None)
        traced = compiled.trace(*args)
        check_divided(state, batch, lambda: traced.lower().as_text(), self._row_dim)
        if self.weights is None:
            return None
        out: Any = traced.out_info
        measured = out[1] if isinstance(out, tuple) else out
        sharding = _jax.sharding_of(state.step)
        if isinstance(state.step, jax.ShapeDtypeStruct):
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                measured,
            )
        empty = measured.empty()
        if sharding is None:  # inside another jit
            return empty
        return jax.tree.map(lambda x: _jax.put(x, sharding), empty)

    def _placed(self, state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
        """Returns the state and the batch as the compiled function takes them."""
        check_batch(batch, self.weights)
        return state, place_batch(state, batch)

    def _key(self, state: TrainState, batch: Batch) -> Hashable:
        """Returns what needs a compiled function of its own."""
        # To measure several models is no recompilation to warn of.
        return _jax.sharding_of(state.step), state.program

    def _compile_for(self, key: Any) -> CompiledStep[..., Any]:
        """Returns a compiled function, which takes None for the metrics, too."""
        raise NotImplementedError
