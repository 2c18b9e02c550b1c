"""`make_train_step`: the step that an expert would have written for the mesh.

`_one_step` is all of it, from top to bottom; `objective` and `update` are its parts.
How it is called is `StateStep`, which eval and predict steps share. A batch from the
host is sharded over the batch axes of the state's mesh: every device would otherwise
compute all of its rows, and nothing would say so. Then the function that is compiled
for that mesh is called. The first call on a mesh traces it, for its empty metrics, and
JAX keeps that trace for the call itself.
"""

import copy
import functools
import logging
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from meshlayout import _checks, _jax, losses
from meshlayout._annotations import Batch
from meshlayout._batches import get_weights, marked_weights
from meshlayout.errors import StepError
from meshlayout.layout_map import LayoutMap
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.state.creation import T
from meshlayout.step import compiled_step, model_call, objective, update
from meshlayout.step.compiled_step import CompiledStep, OnRecompile
from meshlayout.step.inspection import StepInspection
from meshlayout.step.placement import check_divided, sharded, stacked


R = TypeVar("R")

_log = logging.getLogger("meshlayout")
# Loss functions whose weighted batches were told of, by a train or an eval step.
_told: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
# What a forward pass needs of a state; a step that trains takes all.
_parts: weakref.WeakKeyDictionary[TrainState, TrainState] = weakref.WeakKeyDictionary()


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
    on_nonfinite: update.OnNonfinite = "ignore",
    ema: float | None = None,
    precision: model_call.Precision = "float32",
    remat: model_call.Remat = "none",
    steps_per_call: int = 1,
    layouts: LayoutMap | None = None,
    on_recompile: OnRecompile = "warn",
) -> "TrainStep":
    """Makes a compiled train step from a loss function written for one device.

    The step's numbers are those of one device: sums over the real examples of the
    global batch are divided once, whatever the layouts, padding and microbatches.
    Losses that the model records (by `losses.record`, by sowing in NNX under a name
    that ends in `loss`, or in Linen's `losses` collection) are added.

    Args:
        loss_fn: A function of the model and a batch that returns losses of shape
            (batch,) or (batch, ...), which the step averages; or a pair of those and a
            dict of outputs for the metrics; or a scalar, if batches have no weights.
            The model is an NNX module in training mode, except for layers built in
            evaluation mode, or a bound Linen module. Parameters named `rngs` and
            `train` receive an `nnx.Rngs` of this step and True.
        metrics: Metrics besides the loss, by name.
        regularizers: Penalties by name, functions of the parameters that return a
            scalar: `{"l2": losses.l2(1e-5, where="kernel")}`.
        weights: Where a batch carries its weights, (batch,) or the losses' shape: a key
            of a mapping, or an index of a tuple. A batch without that entry has no
            weights. If all weights are 0, gradients are 0, but it is still a step, in
            which momentum and weight decay move the parameters.
        denominator: The divisor of the weighted sum of losses: `"real"`, the sum of
            weights; or `"global_batch_size"`, which includes padding.
        accumulate: The number of microbatches in a global batch, whose gradients are
            added. Microbatch i of k holds the rows i, i + k, i + 2k, ... of the global
            batch on every mesh, and random draws are the same, too. Operations that mix
            examples see one microbatch at a time: batch statistics update the running
            averages k times, and scalar losses are averaged over the microbatches.
        clip_norm: The largest global norm of the gradients.
        on_nonfinite: What to do if the loss or a gradient is not finite: `"ignore"`, or
            `"skip"` to keep the state unchanged and count the step in `state.extra`.
        ema: The decay of a moving average of the parameters, `state.extra["ema"]`.
        precision: `"float32"`, `"bfloat16"`, `"float16"` (with a dynamic loss scale),
            or a `PrecisionPolicy`. A layer that names its own `dtype` keeps it; of
            an `nnx.Embed`, only one that its table does not have counts.
        remat: What the backward pass recomputes: `"none"`, `"blocks"` (numbered
            submodules that have submodules), `"full"`, or a policy of
            `jax.checkpoint_policies` for the blocks.
        steps_per_call: The number of batches per call, up to a whole epoch, as a list
            or stacked along a new first dim; they run in one dispatch, and the metrics
            cover all. On CPUs, XLA compiles loops less well.
        layouts: The layout map that `constrain` applies in the model.
        on_recompile: As for `compile_step`.

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
    _checks.choice("on_nonfinite", on_nonfinite, get_args(update.OnNonfinite), **where)
    if ema is not None:
        ema = _checks.number("ema", ema, at_least=0, below=1, **where)
    steps_per_call = _checks.count("steps_per_call", steps_per_call, **where)
    options = loss_fn, metrics, regularizers, weights, denominator, precision, remat
    loss = objective.make_loss("make_train_step", *options, train=True)
    has_loss_scale = loss.policy.compute == jnp.float16
    may_skip = has_loss_scale or on_nonfinite == "skip"
    rule = update.Update(clip_norm, may_skip, ema, has_loss_scale)
    plan = Plan(loss, rule, accumulate, steps_per_call)
    return TrainStep(loss.loss_fn, loss.weights, layouts, on_recompile, plan)


@dataclass(frozen=True)
class Plan:
    """What a train step does: the options of `make_train_step`, checked."""

    loss: objective.Loss
    update: update.Update
    accumulate: int
    steps_per_call: int


def _one_step(
    plan: Plan, microbatches: update.Microbatches, state: TrainState, batch: Batch
) -> tuple[TrainState, Metrics]:
    """Returns the next state and the metrics of one global batch, inside jit."""
    loss = plan.loss
    key = jax.random.fold_in(state.rng, state.step)
    scale = plan.update.scale(state)
    gradients = update.gradients_of(loss, state, batch, key, scale, microbatches)
    new, notes = plan.update.apply(state, gradients)
    measured = gradients.measured
    weight = loss.total_weight(batch)
    if "skipped" in notes:  # a step that was skipped is not measured either
        is_done = notes["skipped"] == 0
        weight = jnp.where(is_done, weight, 0)
        measured = update.select(is_done, measured, loss.metrics)
    return new, objective.metrics_of_batch(gradients.parts, notes, weight, measured)


class StateStep(StepInspection, Generic[R]):
    """A step of a train state and a batch, compiled at its first call."""

    __name__: str
    _trains = False
    warns_of_rows = True  # of those that all devices compute; a trainer warns itself
    # What runs calls like the last one, its empty metrics, and whether it had weights.
    _last: tuple[Callable[..., Any], Metrics | None, bool] | None = None

    def __init__(
        self,
        function: Callable[..., Any],
        weights: str | int | None,  # None if it measures nothing
        layouts: LayoutMap | None,
        on_recompile: OnRecompile,
        plan: Any,  # what the kind of step needs besides
    ) -> None:
        self._function, self.weights, self._plan = function, weights, plan
        self._row_dim = int(getattr(plan, "steps_per_call", 1) != 1)
        self._options = {"layouts": layouts, "on_recompile": on_recompile}
        CompiledStep(function, **self._options)  # checks them
        self._compiled: dict[Hashable, CompiledStep[..., Any]] = {}
        # Metrics are not donated: all calls that begin without any share these.
        self._starts: dict[Hashable, Metrics | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Compiled programs belong to this process; a copy compiles its own.
        return {**vars(self), "_compiled": {}, "_starts": {}, "_last": None}

    def __call__(
        self, state: TrainState, batch: Batch, metrics: Metrics | None = None
    ) -> R:
        """Runs the step on a batch, and shards it if it comes from the host.

        If several devices would all compute the same, this raises a StepError.
        """
        error = None
        try:  # to look all up again would take Python longer than a small step
            if self._last is not None and not _jax.is_tracing():
                again, start, has_weights = self._last
                if has_weights or marked_weights.data:
                    objective.check_batch(batch, self.weights)
                part = state if self._trains else _parts[state]
                return again(part, batch, start if metrics is None else metrics)
        except (compiled_step.OtherProgramError, KeyError):
            pass
        except Exception as problem:
            error = problem
        try:
            return self._run((state, batch, metrics), error)
        except Exception as problem:
            _checks.show_user_frames(problem)
            raise

    def _run(self, args: tuple[Any, ...], error: Exception | None) -> Any:
        """Runs a call that is not like the last one, or has failed as if it was."""
        compiled, placed, start = self._call_of(*args)
        result = compiled.call(placed, {}, error) if error else compiled(*placed)
        if not _jax.is_tracing():
            self._last = None
            if compiled.again and placed[1] is args[1]:
                has_weights = self._weights(args[1]) is not None
                self._last = compiled.again, start, has_weights
        return result

    def without_layouts(self) -> Self:
        """Returns the same step for states on any mesh, which follows no layout map."""
        step = copy.copy(self)
        step._options = {"layouts": None, "on_recompile": "ignore"}
        return step

    @_checks.user_call
    def trace(
        self, state: TrainState, batch: Batch, metrics: Metrics | None = None
    ) -> jax.stages.Traced:
        """Traces the step for these arguments, as `jax.jit(...).trace` does."""
        compiled, args, _ = self._call_of(state, batch, metrics)
        return compiled.trace(*args)

    def _weights(self, batch: Batch) -> Any:
        return None if self.weights is None else get_weights(batch, self.weights)

    def _call_of(
        self, state: TrainState, batch: Batch, metrics: Metrics | None
    ) -> tuple[CompiledStep[..., Any], tuple[Any, ...], Metrics | None]:
        """Returns what to call, with what, and the empty metrics."""
        check_state(self.__name__, state)
        if not isinstance(metrics, Metrics | None):
            msg = f"{self.__name__}: the third argument is for earlier metrics, got"
            hint = "Labels go into the batch, as {'x': x, 'y': y}."
            raise StepError(f"{msg} {_checks.shown(metrics)}. {hint}")
        if _jax.is_tracing():  # where JAX would speak of any of its arrays
            state._refuse_used_up()
        parts = batch if self._row_dim and isinstance(batch, list) else [batch]
        for part in parts:
            objective.check_batch(part, self.weights)
        state, placed = self._placed(state, batch)
        key = self._key(state, placed)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self._compile_for(key)
            compiled.executable = self.executable
            weights = self._weights(parts[0])
            if isinstance(weights, np.ndarray) and self._function not in _told:
                _told.add(self._function)
                _log.warning("examples are weighted by %r of each batch.", self.weights)
        program = key, state.program
        start = self._starts.get(program)
        if program not in self._starts:
            start = self._started(compiled, state, placed)
            if not isinstance(state.step, (jax.ShapeDtypeStruct, Tracer)):
                self._starts[program] = start
        return compiled, (state, placed, start if metrics is None else metrics), start

    def _started(
        self, compiled: CompiledStep[..., Any], state: TrainState, batch: Batch
    ) -> Metrics | None:
        """Traces the step on a new mesh, and returns its empty metrics there."""
        traced = compiled.trace(state, batch, None)
        rows = update.row_sharding(batch, self._row_dim)
        if rows is None or rows.is_fully_replicated:
            check_divided(state, batch, traced, self._row_dim, warns=self.warns_of_rows)
        if self.weights is None:
            return None
        out: Any = traced.out_info
        measured = out[1] if isinstance(out, tuple) else out
        sharding: Any = _jax.sharding_of(state.step)
        if isinstance(state.step, jax.ShapeDtypeStruct):
            return jax.tree.map(lambda x: x.update(sharding=sharding), measured)
        # Inside another jit, there is no sharding yet.
        return jax.tree.map(lambda x: _jax.put(x, sharding), measured.empty())

    def _placed(self, state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
        """Returns the state and the batch as the compiled function takes them."""
        if state not in _parts:
            _parts[state] = replace(state, opt_state=(), extra={})
        return _parts[state], _placed(state, batch)

    def _key(self, state: TrainState, batch: Batch) -> Hashable:
        """Returns what needs a compiled function of its own."""
        # To measure several models is no recompilation to warn of.
        return _jax.sharding_of(state.step), state.program

    def _compile_for(self, key: Any) -> CompiledStep[..., Any]:
        """Returns a compiled function, which takes None for the metrics, too."""
        raise NotImplementedError


class TrainStep(StateStep[tuple[TrainState, Metrics]]):
    """A compiled train step; made by `make_train_step`.

    `state, metrics = train_step(state, batch)` returns the metrics of that step, and
    `train_step(state, batch, metrics)` adds them to earlier ones, on the device. The
    state is donated, as by `compile_step`.
    """

    __name__ = "train_step"
    _trains = True

    def prepare(self, state: TrainState[T]) -> TrainState[T]:
        """Returns the state with the arrays that options keep in `state.extra`.

        Calls do this automatically. To restore: `ck.resume(train_step.prepare(state))`.
        """
        return self._plan.update.prepared(state)

    def _placed(self, state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
        state = self.prepare(state)
        if self._row_dim and isinstance(batch, list):
            batch = [_placed(state, part) for part in batch]
        if self._row_dim:
            batch = stacked(batch, self._plan.steps_per_call)
        return state, _placed(state, batch, self._row_dim)

    def _key(self, state: TrainState, batch: Batch) -> Hashable:
        mesh, count = _jax.sharding_of(state.step), self._plan.accumulate
        if count == 1:
            return mesh, update.Microbatches(1)
        rows = update.row_sharding(batch, self._row_dim)
        trees = map(jax.tree.leaves, (state.params, state.opt_state))
        shardings = (tuple(map(_jax.sharding_of, leaves)) for leaves in trees)
        return mesh, update.Microbatches(count, rows, *shardings)

    def _compile_for(self, key: Any) -> CompiledStep[..., Any]:
        one_step = jax.jit(functools.partial(_one_step, self._plan, key[1]))

        def train_step(
            state: TrainState, batch: Batch, metrics: Metrics | None
        ) -> tuple[TrainState, Metrics]:
            new, measured = one_step(state, batch)
            return new, objective.merged(metrics, measured)

        def train_steps(
            state: TrainState, batch: Batch, metrics: Metrics | None
        ) -> tuple[TrainState, Metrics]:
            state = update.in_device_memory(state)  # a loop wants one memory throughout
            if metrics is None:  # to be traced, for the shapes of its metrics
                return train_step(state, jax.tree.map(lambda x: x[0], batch), None)

            def body(carry: Any, batch: Batch) -> tuple[Any, None]:
                after = train_step(carry[0], batch, carry[1])
                # A loop refuses a carry whose leaves become weakly typed, or strongly.
                return jax.tree.map(compiled_step.as_weak_as, carry, after), None

            return jax.lax.scan(body, (state, metrics), batch)[0]

        function = train_steps if self._row_dim else train_step
        return CompiledStep(function, **self._options)


def check_state(where: str, state: object) -> None:
    """Raises StepError, with the way to make one, if it is not a TrainState."""
    if type(state) is not TrainState:
        how = "build, optimizer"
        if hasattr(state, "apply_fn"):  # Flax's own
            stats = ', "batch_stats": state.batch_stats' * hasattr(state, "batch_stats")
            how = f'lambda: {{"params": state.params{stats}}}, state.tx, layouts, '
            how += "module=module).replace(opt_state=state.opt_state, step=state.step"
        elif callable(state):  # a model, perhaps to predict with
            how = "lambda: nnx.clone(model), optimizer (to predict, optax.identity())"
        elif isinstance(state, tuple):
            how = "lambda: nnx.clone(model), optimizer.tx"
        msg = f"{where} takes a TrainState, got {_checks.shown(state)}. Write"
        raise StepError(f"{msg} ml.TrainState.create({how}), or ml.compile_step(step).")


def _placed(state: TrainState, batch: Batch, dim: int = 0) -> Batch:
    """Returns a batch as its owner has placed it, or sharded over the batch axes."""
    leaves = jax.tree.leaves(batch)
    is_placed = any(isinstance(x, Tracer) or compiled_step.layout_of(x) for x in leaves)
    return batch if is_placed else sharded(state, batch, dim)
