"""The function of a train step that is compiled, for one place and one plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from meshlayout._batches import num_examples
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.step.gradients import Backward, Gradients, Trainable, select
from meshlayout.step.multi_step import Stacked, like
from meshlayout.step.objective import Loss
from meshlayout.step.placement import StepMesh
from meshlayout.step.step_metrics import Measured, empty_metrics, strong, total_weight
from meshlayout.step.updates import Update, learning_rate


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
    """The function that is compiled for one place.

    Args:
        plan: What the step does.
        place: Where.
        shardings: Those of the parameters, if the update is sharded otherwise.
    """

    def __init__(
        self, plan: Plan, place: StepMesh, shardings: tuple[Any, ...] | None = None
    ) -> None:
        self._plan, self._place = plan, place
        self._shardings = shardings
        self._names: tuple[str, ...] = ()

    def empty_metrics(self, state: TrainState, batch: Any) -> Metrics:
        """Returns metrics that have counted nothing, from a trace of the step."""

        def trace(state: TrainState, batch: Any) -> Metrics:
            users = Metrics(self._plan.metrics)
            measured, _, users = self._measured(state, batch, users)
            self._names = tuple(measured.values)
            return users

        updated = jax.eval_shape(trace, state, batch)
        return empty_metrics(self._names, self._plan.metrics, updated)

    def train_step(
        self, state: TrainState, batch: Any, metrics: Metrics
    ) -> tuple[TrainState, Metrics]:
        """Runs one step."""
        users = Metrics({name: metrics.metric(name) for name in self._plan.metrics})
        measured, new, users = self._measured(state, batch, users)
        found = {
            **measured.added_to(metrics),
            **{name: users.metric(name) for name in users},
        }
        made = strong(Metrics({name: found[name] for name in metrics}))
        return new, self._place.everywhere(made)

    def train_steps(
        self, state: TrainState, batches: Stacked, metrics: Metrics
    ) -> tuple[TrainState, Metrics]:
        """Runs one step after the other in a loop on the device."""

        def body(carry: tuple[TrainState, Metrics], batch: Any) -> tuple[Any, None]:
            state, metrics = self.train_step(carry[0], batch, carry[1])
            return (like(carry[0], state), metrics), None

        return jax.lax.scan(body, (state, metrics), batches.batches)[0]

    def train_epoch(
        self, batch_at: Callable[..., Any], order_of: Callable[..., Any], size: int
    ) -> Callable[..., tuple[TrainState, Metrics]]:
        """Returns a function that runs one step after the other over a dataset."""

        def train_epoch(
            state: TrainState, data: Any, shuffle: Any, metrics: Metrics
        ) -> tuple[TrainState, Metrics]:
            order = order_of(shuffle)

            def body(carry: tuple[TrainState, Metrics], at: Any) -> tuple[Any, None]:
                state, metrics = self.train_step(
                    carry[0], batch_at(data, order, at), carry[1]
                )
                return (like(carry[0], state), metrics), None

            starts = jnp.arange(0, order.size, size)
            return jax.lax.scan(body, (state, metrics), starts)[0]

        return train_epoch

    def _measured(
        self, state: TrainState, batch: Any, users: Metrics
    ) -> tuple[Measured, TrainState, Metrics]:
        """Returns a step's own numbers, the next state, and the user's metrics."""
        plan = self._plan
        trainable = plan.update.trainable_in(state.params)
        found = self._gradients(state, trainable, batch, users)
        new, notes = plan.update.apply(state, trainable, found)
        rate = self._learning_rate(state, new)
        if rate is not None:
            notes = {"learning_rate": rate, **notes}
        weight = total_weight(plan.loss.weights_of(batch), num_examples(batch))
        after = found.metrics
        if "skipped" in notes:
            done = notes["skipped"] == 0
            weight = jnp.where(done, weight, 0)
            after = select(done, after, users)
        return Measured(found.parts, notes, weight), new, after

    def _gradients(
        self, state: TrainState, trainable: Trainable, batch: Any, users: Metrics
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
            batch, key, users, plan.accumulate, self._place, shardings
        )

    def _learning_rate(self, state: TrainState, new: TrainState) -> Any:
        if self._plan.learning_rate is not None:
            return jnp.asarray(self._plan.learning_rate(state.step), "float32")
        return learning_rate(new.opt_state)
