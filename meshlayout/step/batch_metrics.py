"""The metrics of one batch: the loss and its parts, the update's notes, the user's own.

Which there are, and in which dtypes, is known when a step has been traced: a model may
record losses. So a step measures its batch alone and merges that into the metrics of
earlier batches, and what it is first given are empty metrics of the same shapes.
"""

from collections.abc import Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _checks, _jax
from meshlayout._annotations import Batch, Leaf
from meshlayout.errors import MetricError, StepError
from meshlayout.layout_map import LayoutMap
from meshlayout.metrics import Last, Mean, Metrics, Sum
from meshlayout.metrics.inputs import as_metric
from meshlayout.state import TrainState
from meshlayout.step.compiled_step import CompiledStep, OnRecompile, check_options
from meshlayout.step.inspection import StepInspection
from meshlayout.step.objective import RESERVED, Loss
from meshlayout.step.placement import (
    check_batch,
    check_divided,
    check_state,
    note_weights,
    place_batch,
)


# Notes of an update that are not averaged over the examples.
_KINDS: dict[str, Any] = {"learning_rate": Last, "loss_scale": Last, "skipped": Sum}


def user_metrics(
    metrics: Mapping[str, Any] | None, taken: Mapping[str, Any]
) -> Metrics:
    """Returns the user's metrics, empty.

    Args:
        metrics: What was given as `metrics=`.
        taken: The regularizers, whose names are in the metrics, too.

    Raises:
        StepError: If they are not a mapping from names, or have a name that is taken,
            or one is not a metric.
    """
    metrics = {} if metrics is None else metrics
    if not isinstance(metrics, Mapping):
        msg = (
            f"metrics= takes a dict from names to metrics, and got "
            f"{_checks.type_text(metrics)}."
        )
        raise StepError(msg)
    for name in [*metrics, *taken]:
        if name in RESERVED or (name in metrics and name in taken):
            kind = "metrics" if name in metrics else "regularizers"
            msg = f"{kind}=: {name!r} is reported by the step; take another name."
            raise StepError(msg)
    users = {}
    for name, metric in metrics.items():
        try:
            users[name] = as_metric(metric)
        except MetricError as error:
            msg = f"metrics=: {name!r}: {error}"
            raise StepError(msg) from None
    return Metrics(users).empty()


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
    """Returns the metrics of earlier batches and of one more, inside jit."""
    mesh = jax.sharding.get_abstract_mesh()

    def settled(leaf: Leaf) -> Any:
        # Weak types, or a sum that the compiler shards, would recompile the next call.
        leaf = _jax.with_weak_type(leaf, weak_type=False)
        if mesh.empty:
            return leaf
        return _jax.constrain(leaf, NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(settled, metrics.merge(measured))


def empty_like(measured: Metrics) -> Metrics:
    """Returns empty metrics in the dtypes of a batch's, which may be abstract."""
    return jax.tree.map(
        lambda empty, leaf: jnp.asarray(empty, leaf.dtype), measured.empty(), measured
    )


def total_weight(batch_weights: jax.Array | None, num_examples: int) -> Any:
    """Returns the weight of a batch's examples; 0 for a batch of padding alone."""
    if batch_weights is None:
        return jnp.float32(num_examples)
    return jnp.asarray(batch_weights).astype("float32").sum()


class MetricsStep(StepInspection):
    """A compiled function of a state, a batch and the metrics of earlier batches.

    Args:
        name: The step, for messages.
        loss: What it measures.
        layouts: The layout map that `constrain` follows.
        on_recompile: As for `compile_step`.
    """

    _row_dim = 0  # of what a call takes

    def __init__(
        self,
        name: str,
        loss: Loss,
        layouts: LayoutMap | None,
        on_recompile: OnRecompile,
    ) -> None:
        check_options(on_recompile, layouts)
        self.__name__, self._loss, self._layouts = name, loss, layouts
        self._on_recompile: OnRecompile = on_recompile
        self._compiled: dict[Hashable, CompiledStep[..., Any]] = {}
        # Metrics are not donated: all calls that begin without any share these.
        self._empty: dict[Hashable, Metrics] = {}

    @property
    def weights(self) -> str | int:
        """Where a batch carries its weights."""
        return self._loss.weights

    def _placed(self, state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
        """Returns the state and the batch as the compiled function takes them."""
        check_batch(batch, self._loss.weights)
        return state, place_batch(state, batch)

    def _key(self, state: TrainState, batch: Batch) -> Hashable:
        """Returns what needs a compiled function of its own."""
        raise NotImplementedError

    def _new_compiled(self, key: Any) -> CompiledStep[..., Any]:
        """Returns a compiled function, which takes None for the metrics, too."""
        raise NotImplementedError

    def trace(
        self, state: TrainState, batch: Batch, metrics: Metrics | None = None
    ) -> jax.stages.Traced:
        """Traces the step for these arguments, as `jax.jit(...).trace` does.

        Args:
            state: A state; arrays may be `jax.ShapeDtypeStruct` with shardings, here
                and in the batch.
            batch: The global batch.
            metrics: As for a call.
        """
        compiled, args = self._call_of(state, batch, metrics)
        return compiled.trace(*args)

    def _call_of(
        self, state: TrainState, batch: Batch, metrics: Metrics | None
    ) -> tuple[CompiledStep[..., Any], tuple[TrainState, Batch, Metrics]]:
        """Returns what to call, and with what."""
        check_state(self.__name__, state)
        state, placed = self._placed(state, batch)
        key = self._key(state, placed)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self._new_compiled(key)
            note_weights(self._loss.loss_fn, batch, self._loss.weights)
        empty = self._empty.get((key, state.program))
        if empty is None:
            empty = self._new_empty(compiled, state, placed)
            if isinstance(state.step, jax.Array) and not isinstance(state.step, Tracer):
                self._empty[key, state.program] = empty
        if metrics is None:
            metrics = empty
        elif not isinstance(metrics, Metrics):
            msg = (
                f"{self.__name__}: metrics to add to are what an earlier call "
                f"returned; got {_checks.type_text(metrics)}."
            )
            raise StepError(msg)
        return compiled, (state, placed, metrics)

    def _new_empty(
        self, compiled: CompiledStep[..., Any], state: TrainState, batch: Batch
    ) -> Metrics:
        """Traces the step, and returns empty metrics on the state's mesh."""
        # JAX keeps what it has traced of the user's function for the call that follows.
        traced = compiled.trace(state, batch, None)
        check_divided(state, batch, lambda: traced.lower().as_text(), self._row_dim)
        out: Any = traced.out_info
        measured = out[1] if isinstance(out, tuple) else out
        sharding = _jax.sharding_of(state.step)
        if isinstance(state.step, jax.ShapeDtypeStruct):
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                measured,
            )
        empty = empty_like(measured)
        if sharding is None:  # inside another jit
            return empty
        return jax.tree.map(lambda x: _jax.put(x, sharding), empty)
