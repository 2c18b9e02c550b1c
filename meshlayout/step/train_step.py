"""`make_train_step`: the step that an expert would have written for the mesh."""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from meshlayout import _jax, losses
from meshlayout.errors import StepError
from meshlayout.layout_map import LayoutMap
from meshlayout.losses.weighting import check_denominator
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.state.precision import Precision, check_params, parse_precision
from meshlayout.step.compiled import CompiledStep, OnRecompile, compile_step
from meshlayout.step.model_call import ModelCall
from meshlayout.step.multi_step import Stacked, calls_for
from meshlayout.step.objective import Loss
from meshlayout.step.options import (
    check_choice,
    check_ema,
    check_loss_fn,
    check_pattern,
    check_positive,
    check_schedule,
    check_weights,
    check_whole,
)
from meshlayout.step.placement import (
    StepMesh,
    note_if_replicated,
    step_mesh_of,
    zero_layouts,
)
from meshlayout.step.program import Plan, Program
from meshlayout.step.remat import Remat, parse_remat
from meshlayout.step.step_metrics import Start, as_regularizers, user_metrics
from meshlayout.step.updates import EMA, OnNonfinite, Update


_log = logging.getLogger("meshlayout")


@dataclass(frozen=True)
class StepMemory:
    """Bytes on each device while a step runs, read off the compiled program.

    Attributes:
        argument_bytes: State, batch and metrics.
        output_bytes: What comes out, the donated state's memory included.
        temporary_bytes: What is held in between, activations above all.
        saved_bytes: How much more would be held in between without `remat`; 0 where
            nothing is recomputed.
    """

    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    saved_bytes: int


def make_train_step(
    loss_fn: Callable[..., Any],
    *,
    metrics: Mapping[str, Any] | None = None,
    regularizers: Sequence[losses.Regularizer] | losses.Regularizer = (),
    weights: str | int = "weight",
    denominator: losses.Denominator = "real",
    accumulate: int = 1,
    clip_norm: float | None = None,
    on_nonfinite: OnNonfinite = "ignore",
    ema: float | None = None,
    trainable: str | None = None,
    learning_rate: optax.Schedule | None = None,
    precision: Precision = "float32",
    remat: Remat = "none",
    zero: Literal[0, 1] = 0,
    steps_per_call: int | Literal["auto"] = 1,
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
            model is an NNX module in training mode or a bound Linen module. Parameters
            named `rngs` and `train` are handed an `nnx.Rngs` of this step and True.
        metrics: What is measured beside the loss, by name.
        regularizers: Penalties on parameters, as `losses.l2(1e-5, where="kernel")`.
        weights: Where a batch carries its weights, (batch,) or the losses' own shape:
            a key of a mapping, or a place in a tuple. A batch without has none.
        denominator: What the weighted sum of losses is divided by: `"real"`, the sum
            of weights; `"global_batch_size"`, padding included; or a number.
        accumulate: Into how many microbatches a global batch is cut, for a loss
            function that treats examples one by one (but for BatchNorm, whose
            statistics are those of the whole batch: that takes as many more passes as
            the model has such layers). The gradient is that of the whole batch, and
            replicas add theirs once; in every microbatch, where the loss is a scalar,
            axes are Explicit, or it cannot be told which row of a random draw belongs
            to which example (with keys of the model's own, say).
        clip_norm: The largest global norm of the gradients.
        on_nonfinite: What to do if the loss or a gradient is not finite: `"ignore"`;
            `"skip"`, leave the state as it was and count it in `state.extra`; or
            `"error"`, skip, and raise at one of the next calls, or at `check`.
        ema: The decay of a moving average of the parameters, `state.extra["ema"]`.
        trainable: A regular expression for the paths of what is trained; the rest
            stays as it is.
        learning_rate: The optimiser's schedule, to show its value in the metrics. A
            rate that `optax.inject_hyperparams` keeps is shown without.
        precision: `"float32"`, `"bfloat16"`, `"float16"` (with a dynamic loss scale),
            a `PrecisionPolicy`, or a dict from patterns of paths to those.
        remat: What the backward pass recomputes: `"none"`, `"blocks"` (numbered
            submodules with insides), `"full"`, a policy of `jax.checkpoint_policies`
            for the blocks, or a dict from patterns of paths to policies.
        zero: 1 shards the optimiser's state and the update over the axes that shard
            the batch (Rajbhandari et al., "ZeRO", 2020, stage 1).
        steps_per_call: How many batches a call takes, as a list or stacked in a dim
            before the batch dim, to run in one dispatch; with metrics as if run one by
            one. `"auto"` takes a list of any length, tries both ways on the first
            calls, goes on with the faster one, and says so in `train_step.choice`.
        layouts: The layout map that `constrain` follows in the model.
        on_recompile: As for `compile_step`.

    Raises:
        StepError: If an option is wrong.
        LossError: If the denominator is.
        StateError: If the precision is.

    Example:
        >>> import optax
        >>> from flax import nnx
        >>> import meshlayout as ml
        >>> layouts = ml.LayoutMap(ml.create_mesh({"batch": 8}), {})
        >>> state = ml.TrainState.create(
        ...     lambda: nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), layouts
        ... )
        >>> def loss_fn(model, batch):
        ...     return jnp.square(model(batch["x"]) - batch["y"])
        >>> train_step = make_train_step(loss_fn)
        >>> batch = {"x": jnp.ones((8, 2)), "y": jnp.zeros((8, 1))}
        >>> state, metrics = train_step(state, batch)
        >>> int(state.step), list(metrics)
        (1, ['loss'])
    """
    check_loss_fn("make_train_step", loss_fn)
    check_denominator(denominator)
    check_weights(weights)
    check_schedule(learning_rate)
    check_whole("accumulate", accumulate)
    check_positive("clip_norm", clip_norm)
    check_choice("on_nonfinite", on_nonfinite, get_args(OnNonfinite))
    check_ema(ema)
    check_pattern("trainable", trainable)
    check_choice("zero", zero, (0, 1))
    if steps_per_call != "auto":
        check_whole("steps_per_call", steps_per_call)
    policies = parse_precision(precision)
    call = ModelCall(loss_fn, policies, parse_remat(remat), train=True)
    loss = Loss(call, weights, denominator, as_regularizers(regularizers))
    has_loss_scale = jnp.dtype("float16") in policies.computes_in
    update = Update(clip_norm, on_nonfinite, ema, has_loss_scale, trainable)
    plan = Plan(
        loss,
        update,
        user_metrics(metrics),
        accumulate,
        bool(zero),
        learning_rate,
        steps_per_call,
    )
    return TrainStep(plan, layouts, on_recompile)


class TrainStep:
    """A compiled train step; made by `make_train_step`.

    Calling it as `state, metrics = train_step(state, batch)` gives the metrics of that
    step; `train_step(state, batch, metrics)` adds them to those given, on the device.
    The state is donated, as by `compile_step`.
    """

    def __init__(
        self, plan: Plan, layouts: LayoutMap | None, on_recompile: OnRecompile
    ) -> None:
        self._plan = plan
        self._layouts = layouts
        self._on_recompile: OnRecompile = on_recompile
        self._steps: dict[tuple[StepMesh, tuple[Any, ...]], CompiledStep] = {}
        self._starts: dict[tuple[StepMesh, Any], Start] = {}
        self._last: tuple[Any, StepMesh, bool, tuple[CompiledStep, Start]] | None = None
        self._flags: deque[tuple[Any, bool]] = deque()
        self._num_nonfinite = 0.0
        self._calls = calls_for(plan.steps_per_call)
        self._wants_extra = frozenset(plan.update.names())
        self._zero_shardings: list[Any] | None = None
        # Which leaves of the optimiser's state zero=1 left as they were, and why.
        self.zero_exceptions: tuple[str, ...] = ()
        self.__name__ = "train_step"

    def __call__(
        self, state: TrainState, batch: Any, metrics: Metrics | None = None
    ) -> tuple[TrainState, Metrics]:
        """Runs one step.

        Args:
            state: The state; it is used up.
            batch: The global batch.
            metrics: Metrics to add to; None starts with empty ones.

        Returns:
            The next state, and the metrics.

        Raises:
            StepError: If the state, the batch or the metrics do not fit, and with
                `on_nonfinite="error"` if an earlier step was not finite.
            LossError: If what the loss function returns does not fit the batch.
        """
        if self._calls is not None:
            return self._calls.run(self, state, batch, metrics)
        return self.run(state, batch, metrics)

    def run(
        self, state: TrainState, batch: Any, metrics: Metrics | None = None
    ) -> tuple[TrainState, Metrics]:
        """Runs one step, or all batches of a call in one dispatch.

        Args:
            state: As for a call.
            batch: A batch, or `Stacked` ones.
            metrics: As for a call.
        """
        state = self.prepare(state, batch)
        if self._flags:
            self._look_at_flags(wait=False)
        compiled, start = self._program(state, batch)
        given = start.metrics(self.__name__, metrics)
        state, found = compiled(state, batch, given)
        start.remember(found)
        self._keep_flag(found, is_first=metrics is None)
        return state, found

    def prepare(self, state: TrainState, batch: Any) -> TrainState:
        """Returns the state with what this step keeps beside; a call does it, too.

        Args:
            state: A state, or a state that is prepared already, which comes back as
                it is.
            batch: A batch as the step will get it.

        Raises:
            StepError: If it is no `TrainState`.
        """
        if type(state) is not TrainState:
            msg = f"a train step takes a TrainState, and got a {type(state).__name__}."
            raise StepError(msg)
        if self._wants_extra <= state.extra.keys() and not self._plan.zero:
            return state
        return self._prepared(state, self._place(state, batch))

    def _prepared(self, state: TrainState, place: StepMesh) -> TrainState:
        missing = self._wants_extra - state.extra.keys()
        if missing:
            made = self._extra(state)
            extra = {name: place.put(made[name]) for name in sorted(missing)}
            state = state.replace(extra={**state.extra, **extra})
        return self._with_zero(state, place) if self._plan.zero else state

    def _extra(self, state: TrainState) -> dict[str, Any]:
        """Returns what is kept beside, for an abstract state abstract."""
        if not isinstance(state.step, jax.ShapeDtypeStruct):
            return self._plan.update.extra(state)
        made = jax.eval_shape(self._plan.update.extra, state)
        if EMA in made:
            made[EMA] = jax.tree.map(
                lambda average, param: average.update(sharding=param.sharding),
                made[EMA],
                state.params,
            )
        return made

    def lower(
        self, state: TrainState, batch: Any, metrics: Metrics | None = None
    ) -> jax.stages.Lowered:
        """Lowers the step for these arguments, as `jax.jit(...).lower` does.

        Args:
            state: A prepared state; arrays may be `jax.ShapeDtypeStruct` with
                shardings, here and in the batch.
            batch: The global batch.
            metrics: As for a call.
        """
        if self._calls is not None:
            batch = self._calls.stacked(batch)
        state = self.prepare(state, batch)
        compiled, start = self._program(state, batch)
        return compiled.lower(state, batch, start.metrics(self.__name__, metrics))

    def memory(self, state: TrainState, batch: Any) -> StepMemory:
        """Returns the bytes that the compiled step takes on each device.

        Args:
            state: A state; nothing is run, and it is not used up.
            batch: The global batch.
        """
        state = self.prepare(state, batch)
        found: Any = self.lower(state, batch).compile().memory_analysis()
        saved = 0
        if self._plan.loss.call.remat:
            call = replace(self._plan.loss.call, remat=())
            plan = replace(self._plan, loss=replace(self._plan.loss, call=call))
            without = TrainStep(plan, self._layouts, self._on_recompile)
            analysis: Any = without.lower(state, batch).compile().memory_analysis()
            saved = analysis.temp_size_in_bytes - found.temp_size_in_bytes
        return StepMemory(
            found.argument_size_in_bytes,
            found.output_size_in_bytes,
            found.temp_size_in_bytes,
            saved,
        )

    @property
    def choice(self) -> str:
        """How the batches of a call are run, and why; empty until that is known."""
        return "" if self._calls is None else self._calls.choice

    def check(self) -> None:
        """Waits for the steps so far, and raises if one of them was not finite.

        Raises:
            StepError: If so, with `on_nonfinite="error"`.
        """
        self._look_at_flags(wait=True)

    def __repr__(self) -> str:
        name = getattr(self._plan.loss.call.loss_fn, "__name__", "loss")
        return f"TrainStep({name}, {len(self._steps)} places seen)"

    # Programs.

    def _program(self, state: TrainState, batch: Any) -> tuple[CompiledStep, Start]:
        """Returns the program for the place of these arguments, and its metrics."""
        is_many = isinstance(batch, Stacked)
        place = self._place(state, batch)
        last = self._last
        if (
            last is not None
            and last[0] is state.program
            and last[1:3] == (place, is_many)
        ):
            return last[3]
        one = batch.abstract_first() if is_many else batch
        found = self._compiled(state, one, place, (is_many,))
        # Comparing two states' programs leaf by leaf takes time: remember the last.
        self._last = (state.program, place, is_many, found)
        return found

    def _compiled(
        self,
        state: TrainState,
        batch: Any,
        place: StepMesh,
        kind: tuple[Any, ...],
        made: Callable[[Program], Callable[..., Any]] | None = None,
    ) -> tuple[CompiledStep, Start]:
        """Returns the compiled step of a place, and where its metrics start."""
        shardings = None
        if self._plan.zero and self._plan.accumulate > 1:
            now = map(_jax.sharding_of, jax.tree.leaves(state.params))
            sharded = (one.sharding for one in zero_layouts(state.params, place))
            shardings = tuple(zip(now, sharded, strict=True))
        program = Program(self._plan, place, shardings)
        kind = (*kind, shardings)
        if (place, kind) not in self._steps:
            if kind[0] is False:
                note_if_replicated(state, batch)
            step = program.train_steps if kind[0] is True else program.train_step
            self._steps[place, kind] = compile_step(
                made(program) if made is not None else step,
                layouts=self._layouts,
                on_recompile=self._on_recompile,
            )
        key = (place, state.program)
        if key not in self._starts:
            check_params(state.params, self._plan.loss.call.policies)
            self._starts[key] = Start(program.empty_metrics(state, batch), place)
        return self._steps[place, kind], self._starts[key]

    def _place(self, state: TrainState, batch: Any) -> StepMesh:
        """Returns what a program depends on: rows matter to some plans only."""
        if not self._plan.needs_rows:
            return step_mesh_of(state, (), 0)
        if isinstance(batch, Stacked):
            return step_mesh_of(state, batch.batches, 1)
        return step_mesh_of(state, batch, 0)

    def run_epoch(
        self,
        sizes: tuple[Any, ...],
        place: StepMesh,
        given: tuple[TrainState, Any, Any, Metrics | None],
        batch_at: Callable[..., Any],
        order_of: Callable[..., Any],
    ) -> tuple[TrainState, Metrics]:
        """Runs a whole epoch; called by `scan_epoch`.

        Args:
            sizes: What the program depends on: first of all the global batch size.
            place: Where the batches of the epoch lie.
            given: State, dataset, key for the order, and metrics.
            batch_at: Picks a batch from the dataset, given an order and a first row.
            order_of: Makes the order of the rows from a key.
        """
        state, data, shuffle, metrics = given
        first = jax.eval_shape(lambda data: batch_at(data, order_of(shuffle), 0), data)
        state = self._prepared(state, place)
        compiled, start = self._compiled(
            state,
            first,
            place,
            sizes,
            lambda program: program.train_epoch(batch_at, order_of, sizes[0]),
        )
        given_metrics = start.metrics(self.__name__, metrics)
        state, found = compiled(state, data, shuffle, given_metrics)
        start.remember(found)
        self._keep_flag(found, is_first=metrics is None)
        return state, found

    @property
    def weights(self) -> str | int:
        """Where a batch carries its weights."""
        return self._plan.loss.weights

    def _keep_flag(self, metrics: Metrics, *, is_first: bool) -> None:
        """Keeps the count of steps that were not finite, to look at later."""
        if self._plan.update.on_nonfinite == "error":
            name = self._plan.update.flag
            self._flags.append((metrics.metric(name).compute(), is_first))

    def _with_zero(self, state: TrainState, place: StepMesh) -> TrainState:
        """Returns the state with the optimiser's part sharded over the replicas."""
        leaves, treedef = jax.tree.flatten(state.opt_state)
        if [leaf.sharding for leaf in leaves] == self._zero_shardings:
            return state
        found = zero_layouts({"opt_state": state.opt_state}, place)
        if not found:
            return state
        self.zero_exceptions = tuple(
            f"{one.path} {one.reason}" for one in found if one.reason
        )
        for line in self.zero_exceptions:
            _log.info("zero=1 leaves %s", line)
        self._zero_shardings = [one.sharding for one in found]
        placed = [
            leaf.update(sharding=one.sharding)
            if isinstance(leaf, jax.ShapeDtypeStruct)
            else jax.device_put(leaf, one.sharding)
            for leaf, one in zip(leaves, found, strict=True)
        ]
        return state.replace(opt_state=treedef.unflatten(placed))

    def _look_at_flags(self, *, wait: bool) -> None:
        """Raises for a step that was not finite, as far as that is known."""
        while self._flags and (wait or self._flags[0][0].is_ready()):
            count, is_first = self._flags.popleft()
            before = 0 if is_first else self._num_nonfinite
            self._num_nonfinite = float(count)
            if self._num_nonfinite > before:
                msg = (
                    "the loss or a gradient of an earlier step was not finite. The "
                    "state is as it was before that step. Lower the learning rate, "
                    'clip with clip_norm=, or use on_nonfinite="skip".'
                )
                raise StepError(msg)
