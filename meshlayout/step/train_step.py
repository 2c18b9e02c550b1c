"""`make_train_step`: the step that an expert would have written for the mesh.

`_one_step` is all of it, from top to bottom; `objective` and `update` are its parts.
"""

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _checks, _jax, losses
from meshlayout._annotations import Batch
from meshlayout._batches import marked_weights
from meshlayout.errors import StepError
from meshlayout.layout_map import LayoutMap
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.state.creation import T
from meshlayout.state.precision import Precision
from meshlayout.step.compiled_step import CompiledStep, OnRecompile, as_weak_as
from meshlayout.step.interception import Remat
from meshlayout.step.objective import Loss, make_loss, merged, metrics_of_batch
from meshlayout.step.state_step import StateStep, check_batch, place_batch, row_sharding
from meshlayout.step.update import (
    Microbatches,
    OnNonfinite,
    Update,
    gradients_of,
    in_device_memory,
    select,
)


@_checks.user_call
def make_train_step(
    loss_fn: Callable[..., Any],
    *,
    metrics: Mapping[str, Any] | None = None,
    regularizers: Mapping[str, losses.Regularizer] | None = None,
    weights: str | int = "weight",
    denominator: losses.Denominator = "real",
    accumulate: int = 1,
    clip_norm: float | None = None,
    on_nonfinite: OnNonfinite = "ignore",
    ema: float | None = None,
    precision: Precision = "float32",
    remat: Remat = "none",
    steps_per_call: int = 1,
    layouts: LayoutMap | None = None,
    on_recompile: OnRecompile = "warn",
) -> "TrainStep":
    """Makes a compiled train step from a loss function written for one device.

    The step's numbers are those of one device: sums over the real examples of the
    global batch are divided once, whatever the layouts, the padding and the
    microbatches. What the model records (`losses.record`, values sown in NNX under a
    name that ends in `loss`, Linen's `losses` collection) is added to the loss.

    Args:
        loss_fn: A function of the model and a batch that returns losses of shape
            (batch,) or (batch, ...), averaged per example; or those and a dict of
            outputs for the metrics; or a scalar, where batches carry no weights. The
            model is an NNX module in training mode, but for layers that were built in
            evaluation mode, or a bound Linen module. Parameters named `rngs` and
            `train` receive an `nnx.Rngs` of this step and True.
        metrics: What is measured besides the loss, by name.
        regularizers: Penalties by name, functions of the parameters that return a
            scalar: `{"l2": losses.l2(1e-5, where="kernel")}`.
        weights: Where a batch carries its weights, (batch,) or the losses' own shape:
            a key of a mapping, or an index of a tuple. A batch without an entry there
            has none. One whose weights are all 0 has no loss and gradients of 0, and
            is still a step, by which momentum and weight decay move the parameters.
        denominator: What the weighted sum of losses is divided by: `"real"`, the sum
            of weights; or `"global_batch_size"`, padding included.
        accumulate: The number of microbatches in a global batch, whose gradients are
            added. Microbatch i of k holds the rows i, i + k, i + 2k, ... of the global
            batch, so the same on every mesh, and so are random draws. Operations that
            mix examples see one microbatch at a time: batch statistics move the running
            averages k times, and scalar losses are averaged over the microbatches.
        clip_norm: The largest global norm of the gradients.
        on_nonfinite: What to do if the loss or a gradient is not finite: `"ignore"`,
            or `"skip"`, leave the state as it was and count it in `state.extra`.
        ema: The decay of a moving average of the parameters, `state.extra["ema"]`.
        precision: `"float32"`, `"bfloat16"`, `"float16"` (with a dynamic loss scale),
            or a `PrecisionPolicy`. A layer that names its own `dtype` keeps it.
        remat: What the backward pass recomputes: `"none"`, `"blocks"` (numbered
            submodules with insides), `"full"`, or a policy of
            `jax.checkpoint_policies` for the blocks.
        steps_per_call: How many batches a call takes, up to a whole epoch's, as a list
            or stacked in a dim before the batch dim, to run in one dispatch; the
            metrics are those of all. It saves host time, but XLA compiles the body of a
            loop less well on CPUs: try it.
        layouts: The layout map that `constrain` follows in the model.
        on_recompile: As for `compile_step`.

    Raises:
        MeshLayoutError: If an option is wrong.

    Examples:
        >>> import optax
        >>> from flax import nnx
        >>> build = lambda: nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> state = TrainState.create(build, optax.sgd(0.1))
        >>> def loss_fn(model, batch):
        ...     return jnp.square(model(batch["x"]) - batch["y"])
        >>> train_step = make_train_step(loss_fn)
        >>> batch = {"x": jnp.ones((8, 2)), "y": jnp.zeros((8, 1))}
        >>> state, metrics = train_step(state, batch)
        >>> int(state.step), list(metrics)
        (1, ['loss'])
    """
    where: dict[str, Any] = {"where": "make_train_step", "error": StepError}
    accumulate = _checks.count("accumulate", accumulate, **where)
    if clip_norm is not None:
        clip_norm = _checks.number("clip_norm", clip_norm, above=0, **where)
    _checks.choice("on_nonfinite", on_nonfinite, get_args(OnNonfinite), **where)
    if ema is not None:
        ema = _checks.number("ema", ema, at_least=0, below=1, **where)
    steps_per_call = _checks.count("steps_per_call", steps_per_call, **where)
    loss = make_loss(
        "make_train_step",
        *(loss_fn, metrics, regularizers, weights, denominator, precision, remat),
        train=True,
    )
    has_loss_scale = loss.policy.compute == jnp.float16
    update = Update(clip_norm, on_nonfinite, ema, has_loss_scale)
    plan = Plan(loss, update, accumulate, steps_per_call)
    return TrainStep(plan, layouts, on_recompile)


@dataclass(frozen=True)
class Plan:
    """What a train step does: the options of `make_train_step`, checked."""

    loss: Loss
    update: Update
    accumulate: int
    steps_per_call: int


def _one_step(
    plan: Plan, microbatches: Microbatches, state: TrainState, batch: Batch
) -> tuple[TrainState, Metrics]:
    """Returns the next state and the metrics of one global batch, inside jit."""
    loss, update = plan.loss, plan.update
    key = jax.random.fold_in(state.rng, state.step)
    scale = update.scale(state)
    gradients = gradients_of(loss, state, batch, key, scale, microbatches)
    new, notes = update.apply(state, gradients)
    measured = gradients.measured
    weight = loss.total_weight(batch)
    if "skipped" in notes:  # a step that was skipped is not measured either
        is_done = notes["skipped"] == 0
        weight = jnp.where(is_done, weight, 0)
        measured = select(is_done, measured, loss.metrics)
    return new, metrics_of_batch(gradients.parts, notes, weight, measured)


class TrainStep(StateStep):
    """A compiled train step; made by `make_train_step`.

    `state, metrics = train_step(state, batch)` returns the metrics of that step, and
    `train_step(state, batch, metrics)` adds them to earlier ones, on the device. The
    state is donated, as by `compile_step`.
    """

    __name__ = "train_step"

    def __init__(
        self, plan: Plan, layouts: LayoutMap | None, on_recompile: OnRecompile
    ) -> None:
        loss = plan.loss
        super().__init__(loss.loss_fn, loss.weights, layouts, on_recompile, plan)
        self._row_dim = int(plan.steps_per_call != 1)

    @_checks.user_call
    def __call__(
        self, state: TrainState, batch: Batch, metrics: Metrics | None = None
    ) -> tuple[TrainState, Metrics]:
        """Runs one step, and returns the next state and the metrics.

        A batch on the host is sharded over the batch axes of the state's mesh.

        Raises:
            StepError: If the state, the batch or the metrics do not fit, or if several
                devices would all compute the same.
            LossError: If what the loss function returns does not fit the batch.
        """
        # To look all up again would take Python longer than a small step.
        if self._last is not None and not _jax.is_tracing():
            compiled, program, empty = self._last
            if program.goes_on(state, batch, metrics):
                if marked_weights.data:  # quicker to ask than itself
                    check_batch(batch, self.weights)
                args = state, batch, empty if metrics is None else metrics
                return compiled.run(program, args, {})
        return self._run(state, batch, metrics)

    def prepare(self, state: TrainState[T]) -> TrainState[T]:
        """Returns the state with what this step's options keep in `state.extra`.

        Calls do so themselves. To restore: `ck.resume(train_step.prepare(state))`.
        """
        return self._plan.update.prepared(state)

    def _placed(self, state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
        state = self.prepare(state)
        is_list = self._row_dim and isinstance(batch, list)
        for part in batch if is_list else [batch]:
            check_batch(part, self.weights)
        if is_list:
            batch = [place_batch(state, part) for part in batch]
        if self._row_dim:
            batch = _stacked(batch, self._plan.steps_per_call)
        return state, place_batch(state, batch, self._row_dim)

    def _key(self, state: TrainState, batch: Batch) -> Hashable:
        mesh, count = _jax.sharding_of(state.step), self._plan.accumulate
        if count == 1:
            return mesh, Microbatches(1)
        rows = row_sharding(batch, self._row_dim)
        params, slots = (
            tuple(map(_jax.sharding_of, jax.tree.leaves(tree)))
            for tree in (state.params, state.opt_state)
        )
        return mesh, Microbatches(count, rows, params, slots)

    def _compile_for(self, key: Any) -> CompiledStep[..., Any]:
        one_step = jax.jit(functools.partial(_one_step, self._plan, key[1]))

        def train_step(
            state: TrainState, batch: Batch, metrics: Metrics | None
        ) -> tuple[TrainState, Metrics]:
            new, measured = one_step(state, batch)
            return new, measured if metrics is None else merged(metrics, measured)

        def train_steps(
            state: TrainState, batch: Batch, metrics: Metrics | None
        ) -> tuple[TrainState, Metrics]:
            state = in_device_memory(state)  # a loop wants it in one memory throughout
            if metrics is None:  # to be traced, for the shapes of its metrics
                return train_step(state, jax.tree.map(lambda x: x[0], batch), None)

            def body(carry: Any, batch: Batch) -> tuple[Any, None]:
                after = train_step(carry[0], batch, carry[1])
                # A loop refuses a carry whose leaves become weakly typed, or strongly.
                return jax.tree.map(as_weak_as, carry, after), None

            return jax.lax.scan(body, (state, metrics), batch)[0]

        function = train_steps if self._row_dim else train_step
        return CompiledStep(function, **self._options)


def _stacked(batches: Batch, count: int) -> Batch:
    """Returns the batches of one call, stacked in a dim before the rows."""
    is_list = isinstance(batches, list)
    dims = [(*jnp.shape(x), 0)[0] for x in jax.tree.leaves(batches)]
    sizes = {len(batches)} if is_list else {*dims}
    if sizes != {count}:
        got = f"a list of {len(batches)}" if is_list else sorted(sizes)
        msg = (
            f"steps_per_call={count} takes a list of {count} batches, or arrays with a "
            f"first dim of {count}; this call was given {got}."
        )
        raise StepError(msg)
    if is_list and isinstance(jax.tree.leaves(batches)[0], jax.ShapeDtypeStruct):
        return jax.tree.map(lambda x: _stacked_spec(x, count), batches[0])
    return _stack(batches) if is_list else batches


def _stacked_spec(x: jax.ShapeDtypeStruct, count: int) -> jax.ShapeDtypeStruct:
    layout: Any = x.sharding
    if isinstance(layout, NamedSharding):
        layout = NamedSharding(layout.mesh, PartitionSpec(None, *layout.spec))
    return x.update(shape=(count, *x.shape), sharding=layout)


@jax.jit
def _stack(batches: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
