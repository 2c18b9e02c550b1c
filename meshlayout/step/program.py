"""The program of a train step on one mesh: gradients, update, metrics."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshlayout import _paths, _render
from meshlayout._annotations import Batch, PyTree
from meshlayout._batches import num_examples, without_nan_padding
from meshlayout.errors import StepError
from meshlayout.layout_map import LayoutMap
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.step.compiled_step import CompiledStep, OnRecompile, compile_step
from meshlayout.step.microbatches import microbatch_gradients
from meshlayout.step.objective import Loss, LossShare
from meshlayout.step.placement import StepMesh
from meshlayout.step.step_metrics import StepMetrics, StepValues, total_weight
from meshlayout.step.updates import (
    Gradients,
    Update,
    is_float,
    learning_rate,
    select,
)


@dataclass(frozen=True)
class Plan:
    """What a train step does: the options of `make_train_step`, checked."""

    loss: Loss
    update: Update
    metrics: Mapping[str, Any]
    accumulate: int
    zero: bool
    steps_per_call: int

    @property
    def needs_rows(self) -> bool:
        """Whether the program depends on the axes that shard the rows."""
        return self.accumulate > 1 or self.zero


class StepProgram:
    """The functions of a train step that are compiled for one mesh.

    Args:
        plan: What the step does.
        mesh: The mesh of the state.
        shardings: Those of each parameter and of its update, if they differ.
        layouts: The layout map that `constrain` follows.
        on_recompile: As for `compile_step`.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: StepMesh,
        shardings: tuple[Any, ...] | None,
        layouts: LayoutMap | None,
        on_recompile: OnRecompile,
    ) -> None:
        self._plan, self._mesh, self._shardings = plan, mesh, shardings
        self._layouts = layouts
        self._on_recompile: OnRecompile = on_recompile
        self._compiled: dict[Hashable, CompiledStep[..., Any]] = {}
        self.metrics = StepMetrics("train_step", plan.metrics, mesh)

    def compiled(
        self, kind: Hashable, step: Callable[..., Any]
    ) -> CompiledStep[..., Any]:
        """Returns a compiled function, made at most once for each kind of call."""
        if kind not in self._compiled:
            self._compiled[kind] = compile_step(
                step, layouts=self._layouts, on_recompile=self._on_recompile
            )
        return self._compiled[kind]

    def expected_metrics(self, state: TrainState) -> list[str]:
        """Returns the step's own metrics, if the model records no losses."""
        plan, update = self._plan, self._plan.update
        names = {
            "learning_rate": learning_rate(state.opt_state) is not None,
            "loss_scale": update.has_loss_scale,
            "grad_norm": update.clip_norm is not None,
            "skipped": update.may_skip,
        }
        notes = [name for name, is_expected in names.items() if is_expected]
        return [*plan.loss.expected_metrics(), *notes]

    def train_step(
        self, state: TrainState, batch: Batch, metrics: Metrics
    ) -> tuple[TrainState, Metrics]:
        """Runs one step, inside jit.

        Args:
            state: The state.
            batch: The global batch.
            metrics: The metrics before.

        Returns:
            The next state, and the metrics after.
        """

        def measure(users: Metrics) -> tuple[StepValues, Metrics, TrainState]:
            values, new, users = self._step(state, batch, users)
            return values, users, new

        return self.metrics.add(state.program, metrics, measure)

    def _step(
        self, state: TrainState, batch: Batch, users: Metrics
    ) -> tuple[StepValues, TrainState, Metrics]:
        """Returns a step's values, the next state and the user's metrics."""
        plan = self._plan
        gradients = self._gradients(state, batch, users)
        new, notes = plan.update.apply(state, gradients)
        rate = learning_rate(new.opt_state)
        if rate is not None:
            notes = {"learning_rate": rate, **notes}
        weight = total_weight(plan.loss.weights_of(batch), num_examples(batch))
        after = gradients.metrics
        if "skipped" in notes:  # a step that was skipped is not measured either
            is_done = notes["skipped"] == 0
            weight = jnp.where(is_done, weight, 0)
            after = select(is_done, after, users)
        return StepValues(gradients.parts, notes, weight), new, after

    def _gradients(self, state: TrainState, batch: Batch, users: Metrics) -> Gradients:
        plan = self._plan
        key = jax.random.fold_in(state.rng, state.step)
        backward = Backward(plan.loss, state, plan.update.scale(state))
        if plan.accumulate == 1:
            return backward.whole_batch(batch, key, users)
        return microbatch_gradients(
            backward, batch, key, users, plan.accumulate, self._mesh, self._shardings
        )


class Backward:
    """The backward pass of a step.

    Args:
        loss: What is minimized.
        state: The state.
        scale: A factor for the loss, which the gradients keep; None for 1.
    """

    def __init__(self, loss: Loss, state: TrainState, scale: jax.Array | None) -> None:
        self.loss, self.state, self._scale = loss, state, scale
        for leaf in _paths.flatten(state.params).leaves:
            if not is_float(leaf.value):
                text = _render.array_text(leaf.value.dtype, leaf.value.shape)
                msg = (
                    f"the parameter {leaf.path} {text} cannot be trained: there is no "
                    "gradient for integers. Make it another kind of variable than "
                    "nnx.Param."
                )
                raise StepError(msg)

    def whole_batch(self, batch: Batch, key: jax.Array, metrics: Metrics) -> Gradients:
        """Returns the gradients of a batch that goes through the model at once.

        Args:
            batch: The global batch.
            key: For this step's random numbers.
            metrics: The metrics so far.
        """
        share, factor = self.loss.provisional_share(batch)
        batch = without_nan_padding(batch, share.weights)
        before = self.state.model_state
        grads, parts, after, metrics = self.part(share, batch, key, before, metrics)
        if share.weights is not None:  # a batch of padding alone teaches nothing
            after = select((share.weights != 0).any(), after, before)
        return self.finished(grads, parts, factor, after, metrics)

    def part(
        self,
        share: LossShare,
        batch: Batch,
        key: jax.Array,
        model_state: PyTree,
        metrics: Metrics,
    ) -> tuple[PyTree, dict[str, jax.Array], PyTree, Metrics]:
        """Returns gradients, parts of the loss, the model's state and the metrics.

        Args:
            share: How much the rows count.
            batch: The batch, or a part of its rows.
            key: For random numbers.
            model_state: The model's other arrays.
            metrics: The metrics so far.
        """

        def objective(params: PyTree) -> tuple[jax.Array, Any]:
            parts, outcome = self.loss.forward(
                self.state, params, model_state, batch, key, share
            )
            total = sum(part.sum() for part in parts.values())
            # JAX would sort the keys of a plain dict; metrics keep the parts' order.
            return self._scaled(total), (OrderedDict(parts), outcome)

        grads, (parts, outcome) = jax.grad(objective, has_aux=True)(self.state.params)
        metrics = outcome.added_to(metrics, batch, share.weights)
        return grads, parts, outcome.model_state, metrics

    def finished(
        self,
        grads: PyTree,
        parts: dict[str, jax.Array],
        factor: jax.Array | None,
        model_state: PyTree,
        metrics: Metrics,
    ) -> Gradients:
        """Corrects what a provisional share gave, and adds the regularizers.

        Args:
            grads: The gradients of the whole batch.
            parts: The parts of the loss, each to be summed.
            factor: What corrects them, if anything.
            model_state: The model's other arrays, after.
            metrics: The metrics, after.
        """
        parts = {name: part.sum() for name, part in parts.items()}
        params = self.state.params
        if factor is not None:
            grads = jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)
            parts = {name: part * factor for name, part in parts.items()}
        grads = jax.tree.map(lambda g, x: g.astype(x.dtype), grads, params)
        if self.loss.regularizers:

            def penalty(params: PyTree) -> tuple[Any, dict[str, jax.Array]]:
                penalties = self.loss.penalties(params)
                return self._scaled(sum(penalties.values())), penalties

            slopes, penalties = jax.grad(penalty, has_aux=True)(params)
            grads = jax.tree.map(jnp.add, grads, slopes)
            parts = self.loss.with_penalties(parts, penalties)
        return Gradients(grads, parts, model_state, metrics)

    def _scaled(self, loss: Any) -> Any:
        return loss if self._scale is None else loss * self._scale
