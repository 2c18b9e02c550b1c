"""The function of a train step that is compiled, for one place and one plan."""

import weakref
from collections.abc import Callable, Hashable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax

from meshlayout._annotations import Batch, PyTree
from meshlayout._batches import num_examples
from meshlayout.layout_map import LayoutMap
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.step.compiled_step import (
    CompiledStep,
    OnRecompile,
    check_options,
    compile_step,
)
from meshlayout.step.gradients import Backward, Gradients, Trainable, select
from meshlayout.step.multi_step import Stacked, like
from meshlayout.step.objective import Loss
from meshlayout.step.placement import StepMesh
from meshlayout.step.step_metrics import (
    FlatMetrics,
    MetricsStart,
    StepValues,
    empty_metrics,
    total_weight,
)
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
    # What a report's numbers stand for, by the code of the state.
    leaf_names: MutableMapping[Any, list[str]] = field(
        default_factory=weakref.WeakKeyDictionary, compare=False
    )

    @property
    def needs_rows(self) -> bool:
        """Whether the program depends on how the batch is sharded."""
        return self.accumulate > 1 or self.zero


class Program:
    """The function that is compiled for one place.

    Args:
        plan: What the step does.
        mesh: Where.
        shardings: Those of the parameters, if the update is sharded otherwise.
    """

    def __init__(
        self, plan: Plan, mesh: StepMesh, shardings: tuple[Any, ...] | None = None
    ) -> None:
        self._plan, self._mesh = plan, mesh
        self.shardings = shardings

    def empty_metrics(self, state: TrainState, batch: Batch) -> Metrics:
        """Returns metrics that have counted nothing, from a trace of the step."""
        names: list[str] = []

        def trace(state: TrainState, batch: Batch) -> Metrics:
            values, _, users, _ = self._step(state, batch, Metrics(self._plan.metrics))
            names.extend(values.values)
            return users

        updated = jax.eval_shape(trace, state, batch)
        return empty_metrics(names, self._plan.metrics, updated)

    def train_step(
        self, state: TrainState, batch: Batch, metrics: FlatMetrics
    ) -> tuple[TrainState, tuple[FlatMetrics, Report]]:
        """Runs one step.

        Args:
            state: The state.
            batch: The global batch.
            metrics: The metrics to add to.

        Returns:
            The next state; the metrics, and what `Update.apply` reports.
        """
        before = metrics.metrics()
        users = Metrics({name: before.metric(name) for name in self._plan.metrics})
        values, new, users, report = self._step(state, batch, users)
        after = values.added_to(before, users)
        return new, (FlatMetrics.of(self._mesh.everywhere(after)), report)

    def train_steps(
        self, state: TrainState, batches: Stacked, metrics: FlatMetrics
    ) -> tuple[TrainState, tuple[FlatMetrics, Report]]:
        """Runs one step after the other in a loop on the device.

        Args:
            state: The state.
            batches: The batches, stacked.
            metrics: The metrics to add to.

        Returns:
            As `train_step`, with the reports of all steps, stacked.
        """

        def body(carry: tuple[TrainState, FlatMetrics], batch: Batch) -> Any:
            state, (metrics, report) = self.train_step(carry[0], batch, carry[1])
            return (like(carry[0], state), metrics), report

        (state, metrics), reports = jax.lax.scan(
            body, (state, metrics), batches.batches
        )
        return state, (metrics, reports)

    def train_epoch(
        self, batch_at: Callable[..., Any], order_of: Callable[..., Any], size: int
    ) -> Callable[..., tuple[TrainState, tuple[FlatMetrics, Report]]]:
        """Returns a function that runs one step after the other over a dataset."""

        def train_epoch(
            state: TrainState,
            data: PyTree,
            shuffle: jax.Array | None,
            metrics: FlatMetrics,
        ) -> tuple[TrainState, tuple[FlatMetrics, Report]]:
            order = order_of(shuffle)

            def body(carry: tuple[TrainState, FlatMetrics], start: jax.Array) -> Any:
                batch = batch_at(data, order, start)
                state, (metrics, report) = self.train_step(carry[0], batch, carry[1])
                return (like(carry[0], state), metrics), report

            starts = jnp.arange(0, order.size, size)
            (state, metrics), reports = jax.lax.scan(body, (state, metrics), starts)
            return state, (metrics, reports)

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
        plan.leaf_names[state.program] = [*parts, *gradients]
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
        if self.shardings is not None:
            pairs = zip(self.shardings, trainable.mask, strict=True)
            shardings = [pair for pair, is_trained in pairs if is_trained]
        return backward.microbatches(
            batch, key, users, plan.accumulate, self._mesh, shardings
        )

    def _learning_rate(self, state: TrainState, new: TrainState) -> Any:
        if self._plan.learning_rate is not None:
            return jnp.asarray(self._plan.learning_rate(state.step), "float32")
        return learning_rate(new.opt_state)


class ProgramCache:
    """The compiled programs of a train or eval step, and where their metrics start.

    Args:
        layouts: The layout map that `constrain` follows.
        on_recompile: As for `compile_step`.
    """

    def __init__(self, layouts: LayoutMap | None, on_recompile: OnRecompile) -> None:
        check_options(on_recompile, layouts)
        self._layouts = layouts
        self._on_recompile: OnRecompile = on_recompile
        self._compiled: dict[Any, CompiledStep[..., Any]] = {}
        self._starts: dict[Any, MetricsStart] = {}

    def __len__(self) -> int:
        return len(self._compiled)

    def find(
        self,
        key: Hashable,
        mesh: StepMesh,
        code: Hashable,
        step: Callable[..., Any],
        empty: Callable[[], Metrics],
    ) -> tuple[CompiledStep[..., Any], MetricsStart]:
        """Returns a compiled step and its metrics, made at most once.

        Args:
            key: What the compiled function depends on, besides its arguments.
            mesh: The mesh of the state.
            code: The code of the state: its model and optimizer.
            step: The function to compile.
            empty: Returns metrics that have counted nothing; traces the step.
        """
        if (mesh, key) not in self._compiled:
            self._compiled[mesh, key] = compile_step(
                step, layouts=self._layouts, on_recompile=self._on_recompile
            )
        if (mesh, code) not in self._starts:
            self._starts[mesh, code] = MetricsStart(empty(), mesh)
        return self._compiled[mesh, key], self._starts[mesh, code]
