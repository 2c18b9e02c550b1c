"""The functions of a train step that are compiled, for one mesh and one plan."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax

from meshlayout._annotations import Batch, Leaf, PyTree
from meshlayout._batches import num_examples
from meshlayout.layout_map import LayoutMap
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.state.precision import check_params
from meshlayout.step.compiled_step import CompiledStep, OnRecompile, compile_step
from meshlayout.step.gradients import Backward, Gradients, Trainable, select
from meshlayout.step.multi_step import Stacked, like
from meshlayout.step.objective import Loss
from meshlayout.step.placement import StepMesh
from meshlayout.step.step_metrics import StepMetrics, StepValues, total_weight
from meshlayout.step.updates import Update, learning_rate


# What `Update.apply` reports, or None.
Report: TypeAlias = jax.Array | None


@dataclass(frozen=True)
class Plan:
    """What a train step does, all options checked."""

    loss: Loss
    update: Update
    metrics: Mapping[str, Any]
    accumulate: int
    zero: bool
    learning_rate: optax.Schedule | None
    steps_per_call: int | Literal["auto"]

    @property
    def needs_rows(self) -> bool:
        """Whether the program depends on how the batch is sharded."""
        return self.accumulate > 1 or self.zero


class Program:
    """The functions of a train step that are compiled for one mesh.

    Args:
        plan: What the step does.
        mesh: Where.
        shardings: Those of the parameters, if the update is sharded otherwise.
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
        # What a report's numbers stand for, by the code of the state.
        self.leaf_names: dict[Hashable, list[str]] = {}

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
        check_params(state.params, plan.loss.policies)
        names = {
            "learning_rate": self._learning_rate(state, state) is not None,
            "loss_scale": update.has_loss_scale,
            "grad_norm": update.clip_norm is not None,
            "skipped": update.may_skip,
            "nonfinite_loss": update.has_loss_scale and update.on_nonfinite == "error",
        }
        notes = [name for name, is_expected in names.items() if is_expected]
        return [*plan.loss.expected_metrics(), *notes]

    def train_step(
        self, state: TrainState, batch: Batch, metrics: tuple[Leaf, ...]
    ) -> tuple[TrainState, tuple[tuple[Leaf, ...], Report]]:
        """Runs one step.

        Returns the next state; the metrics' arrays, and what `Update.apply` reports.
        """

        def measure(users: Metrics) -> tuple[StepValues, Metrics, Any]:
            values, new, users, report = self._step(state, batch, users)
            return values, users, (new, report)

        (new, report), metrics = self.metrics.add(state.program, metrics, measure)
        return new, (metrics, report)

    def train_steps(
        self, state: TrainState, batches: Stacked, metrics: tuple[Leaf, ...]
    ) -> tuple[TrainState, tuple[tuple[Leaf, ...], Report]]:
        """Runs one step for each batch, in a loop on the device; stacks the reports."""
        return self._scanned(state, metrics, batches.batches, lambda batch: batch)

    def _scanned(
        self,
        state: TrainState,
        metrics: tuple[Leaf, ...],
        xs: PyTree,
        batch_of: Callable[[PyTree], Batch],
    ) -> tuple[TrainState, tuple[tuple[Leaf, ...], Report]]:
        def body(carry: tuple[TrainState, tuple[Leaf, ...]], x: PyTree) -> Any:
            new, (metrics, report) = self.train_step(carry[0], batch_of(x), carry[1])
            return (like(carry[0], new), metrics), report

        (state, metrics), reports = jax.lax.scan(body, (state, metrics), xs)
        return state, (metrics, reports)

    def train_epoch(
        self, batch_at: Callable[..., Any], order_of: Callable[..., Any], size: int
    ) -> Callable[..., tuple[TrainState, tuple[tuple[Leaf, ...], Report]]]:
        """Returns a function that runs one step after the other over a dataset."""

        def train_epoch(
            state: TrainState,
            data: PyTree,
            shuffle: jax.Array | None,
            metrics: tuple[Leaf, ...],
        ) -> tuple[TrainState, tuple[tuple[Leaf, ...], Report]]:
            order = order_of(shuffle)
            starts = jnp.arange(0, order.size, size)
            return self._scanned(
                state, metrics, starts, lambda start: batch_at(data, order, start)
            )

        return train_epoch

    def _step(
        self, state: TrainState, batch: Batch, users: Metrics
    ) -> tuple[StepValues, TrainState, Metrics, Report]:
        """Returns a step's values, the next state, the user's metrics and a report."""
        plan = self._plan
        trainable = plan.update.trainable_in(state.params)
        found = self._gradients(state, trainable, batch, users)
        gradients = [f"the gradient of {path}" for path in trainable.paths]
        parts = map(repr, found.parts) if len(found.parts) > 1 else ["the loss"]
        self.leaf_names[state.program] = [*parts, *gradients]
        new, notes, report = plan.update.apply(state, trainable, found)
        rate = self._learning_rate(state, new)
        if rate is not None:
            notes = {"learning_rate": rate, **notes}
        weight = total_weight(plan.loss.weights_of(batch), num_examples(batch))
        after = found.metrics
        if "skipped" in notes:
            done = notes["skipped"] == 0
            weight = jnp.where(done, weight, 0)
            after = select(done, after, users)
        return StepValues(found.parts, notes, weight), new, after, report

    def _gradients(
        self, state: TrainState, trainable: Trainable, batch: Batch, users: Metrics
    ) -> Gradients:
        plan = self._plan
        key = jax.random.fold_in(state.rng, state.step)
        scale = plan.update.scale(state)
        backward = Backward(plan.loss, state, trainable, scale)
        if plan.accumulate == 1:
            return backward.whole_batch(batch, key, users)
        shardings = None
        if self._shardings is not None:
            pairs = zip(self._shardings, trainable.mask, strict=True)
            shardings = [pair for pair, is_trained in pairs if is_trained]
        return backward.microbatches(
            batch, key, users, plan.accumulate, self._mesh, shardings
        )

    def _learning_rate(self, state: TrainState, new: TrainState) -> Any:
        if self._plan.learning_rate is not None:
            return jnp.asarray(self._plan.learning_rate(state.step), "float32")
        return learning_rate(new.opt_state)
