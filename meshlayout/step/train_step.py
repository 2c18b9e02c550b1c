"""`make_train_step`: the step that an expert would have written for the mesh."""

import logging
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from meshlayout import _batches, _checks, _jax, losses
from meshlayout._annotations import Batch
from meshlayout._batches import check_weights_key, get_weights
from meshlayout.errors import MeshLayoutError, StepError
from meshlayout.layout_map import LayoutMap
from meshlayout.losses.reduction import check_denominator
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.state.precision import Precision, parse_precision
from meshlayout.step.compiled_step import (
    CompiledStep,
    OnRecompile,
    check_options,
    gives_memory_twice,
)
from meshlayout.step.inspection import Inspection
from meshlayout.step.multi_step import Stacked, calls_for
from meshlayout.step.objective import (
    Loss,
    check_batch,
    check_loss_fn,
    check_state,
    check_weights,
)
from meshlayout.step.placement import (
    StepMesh,
    in_own_mesh,
    layout_of,
    note_if_replicated,
    place_host_batch,
    row_axes,
    step_mesh_of,
    zero_layouts,
)
from meshlayout.step.program import Plan, Program
from meshlayout.step.remat import Remat, parse_remat
from meshlayout.step.step_metrics import MetricsStart, as_regularizers, user_metrics
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
        metrics: What is measured besides the loss, by name.
        regularizers: Penalties on parameters, as `losses.l2(1e-5, where="kernel")`.
        weights: Where a batch carries its weights, (batch,) or the losses' own shape:
            a key of a mapping, or a place in a tuple. A batch without has none. One
            whose weights are all 0 has gradients of 0 and is a step all the same:
            `step` counts it, and momentum and weight decay move the parameters. Leave
            such batches out of a loop of your own, as `Trainer` does.
        denominator: What the weighted sum of losses is divided by: `"real"`, the sum
            of weights; `"global_batch_size"`, padding included; or a number.
        accumulate: The number of microbatches in a global batch; they go through the
            model one after another, and their gradients are added. Microbatch i
            of k holds the rows i, i + k, i + 2k, ... of the global batch, so the same
            on every mesh, and so are random draws. Losses are divided by the whole
            batch's denominator. Where examples meet, they are those of one
            microbatch: batch statistics are of each microbatch over all devices, and
            move the running averages k times; scalars that the loss function returns
            or the model records are averaged over the microbatches. Compilers for
            TPU and GPU add up the devices' gradients once, after the last.
        clip_norm: The largest global norm of the gradients.
        on_nonfinite: What to do if the loss or a gradient is not finite: `"ignore"`;
            `"skip"`, leave the state as it was and count it in `state.extra`; or
            `"error"`, skip, and raise at one of the next calls, or at `check`.
        ema: The decay of a moving average of the parameters, `state.extra["ema"]`.
        trainable: A regular expression for the paths of what is trained; the rest
            stays as it is.
        learning_rate: The optimizer's schedule, to show its value in the metrics. A
            rate that `optax.inject_hyperparams` keeps is shown anyway.
        precision: `"float32"`, `"bfloat16"`, `"float16"` (with a dynamic loss scale),
            a `PrecisionPolicy`, or a dict from patterns of paths to those.
        remat: What the backward pass recomputes: `"none"`, `"blocks"` (numbered
            submodules with insides), `"full"`, a policy of `jax.checkpoint_policies`
            for the blocks, or a dict from patterns of paths to policies.
        zero: 1 shards the optimizer's state and the update over the axes that shard
            the batch (Rajbhandari et al., "ZeRO", 2020, stage 1).
        steps_per_call: How many batches a call takes, as a list or stacked in a dim
            before the batch dim, to run in one dispatch; with metrics as if run one by
            one. `"auto"` takes a list of any length, tries both ways on the first
            calls, continues with the faster one, and says so in `train_step.choice`.
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
    check_loss_fn("loss_fn", "make_train_step", loss_fn)
    check_denominator(denominator)
    check_weights(weights)
    where: dict[str, Any] = {"where": "make_train_step", "error": StepError}
    if learning_rate is not None:
        _checks.function("learning_rate", learning_rate, "step", **where)
    accumulate = _checks.count("accumulate", accumulate, **where)
    if clip_norm is not None:
        clip_norm = _checks.number("clip_norm", clip_norm, above=0, **where)
    _checks.choice("on_nonfinite", on_nonfinite, get_args(OnNonfinite), **where)
    if ema is not None:
        ema = _checks.number("ema", ema, at_least=0, below=1, **where)
    if trainable is not None:
        trainable = _checks.pattern("trainable", trainable, **where).pattern
    _checks.choice("zero", zero, (0, 1), **where)
    if steps_per_call != "auto":
        hint = 'It may also be "auto".'
        steps_per_call = _checks.count(
            "steps_per_call", steps_per_call, hint=hint, **where
        )
    policies = parse_precision(precision)
    loss = Loss(
        loss_fn,
        policies,
        weights,
        denominator,
        as_regularizers(regularizers),
        () if remat == "none" else parse_remat(remat),
        train=True,
        has_metrics=bool(metrics),
    )
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


class TrainStep(Inspection):
    """A compiled train step; made by `make_train_step`.

    `state, metrics = train_step(state, batch)` returns the metrics of that step, and
    `train_step(state, batch, metrics)` adds them to earlier ones, on the device. The
    state is donated, as by `compile_step`.
    """

    def __init__(
        self, plan: Plan, layouts: LayoutMap | None, on_recompile: OnRecompile
    ) -> None:
        check_options(on_recompile, layouts)
        self._plan = plan
        self._layouts = layouts
        self._on_recompile: OnRecompile = on_recompile
        self._programs: dict[Hashable, Program] = {}
        self._repeat: _Repeat | None = None
        self._reports: deque[_CallReport] = deque()
        self._num_steps = 0  # those that are reported
        has_many = plan.steps_per_call != 1
        self._calls = calls_for(plan.steps_per_call) if has_many else None
        self._wants_extra = frozenset(plan.update.names())
        self._zero_shardings: list[Any] | None = None
        # Which leaves of the optimizer's state zero=1 left as they were, and why.
        self.zero_exceptions: tuple[str, ...] = ()
        self.__name__ = "train_step"

    def __reduce__(self) -> tuple[Any, ...]:
        # What was compiled belongs to this process.
        return TrainStep, (self._plan, self._layouts, self._on_recompile)

    def __call__(
        self, state: TrainState, batch: Batch, metrics: Metrics | None = None
    ) -> tuple[TrainState, Metrics]:
        """Runs one step.

        Args:
            state: The state; it is used up.
            batch: The global batch. One on the host is sharded over the
                batch axes of the state's mesh, if its rows divide.
            metrics: Metrics to add to; None starts with empty ones.

        Returns:
            The next state, and the metrics.

        Raises:
            StepError: If the state, the batch or the metrics do not fit, and with
                `on_nonfinite="error"` if an earlier step was not finite.
            LossError: If what the loss function returns does not fit the batch.
        """
        if self._repeat is not None:
            result = self._repeat(state, batch, metrics)
            if result is not None:
                return result
        try:
            if self._calls is None:
                return self._run(state, batch, metrics)
            for part in batch if isinstance(batch, list) else ():
                check_batch(part, self.weights)
            return self._calls.run(self, state, batch, metrics)
        except (MeshLayoutError, Warning):
            raise
        except Exception as error:
            error.add_note(f"in {self.__name__}, at {_step_text(state)}")
            raise

    def _run(
        self, state: TrainState, batch: Batch | Stacked, metrics: Metrics | None
    ) -> tuple[TrainState, Metrics]:
        """Runs one step, or those of all batches of a call in one dispatch."""
        if self._reports:
            self._look_at_reports(wait=False)
        with in_own_mesh(state):
            placed = self._placed(state, batch)
            is_new = placed is not batch or self._calls is not None
            if is_new and self._repeat is not None:
                result = self._repeat(state, placed, metrics)
                if result is not None:
                    return result
            state = self._prepare(state, placed)
            program, compiled = self._program(state, placed)
            return self._dispatch(program, compiled, (state, placed), metrics)

    def _dispatch(
        self,
        program: Program,
        compiled: CompiledStep[..., Any],
        args: tuple[Any, ...],
        metrics: Metrics | None,
        *,
        is_lowered: bool = False,
    ) -> Any:
        """Calls a function of a program, and remembers how; or lowers it.

        `args` are the state, and the other arguments but the metrics.
        """
        expected, given = program.expected_metrics, args[0]
        result, start = program.metrics.run(
            compiled, args, given, metrics, expected, is_lowered=is_lowered
        )
        if is_lowered:
            return result
        state, (flat, report) = result
        names = program.leaf_names[given.program]
        if report is not None and not isinstance(report, Tracer):
            self._report(report, names)
        self._repeat = _repeat(self, compiled, args[1:], start, names)
        return state, Metrics.from_flat(flat, start.treedef)

    def _report(self, report: jax.Array, names: list[str]) -> None:
        self._num_steps += 1 if report.ndim == 1 else report.shape[0]
        self._reports.append(_CallReport(report, self._num_steps, names))

    def _placed(self, state: TrainState, batch: Batch | Stacked) -> Batch | Stacked:
        """Returns a batch on the mesh of the state."""
        check_state(self.__name__, state)
        is_many = isinstance(batch, Stacked)
        if not is_many:
            check_batch(batch, self.weights)
        return place_host_batch(state, batch, int(is_many))

    def _prepare(self, state: TrainState, batch: Batch | Stacked) -> TrainState:
        return self._prepared(state, self._step_mesh(state, batch))

    def _prepared(self, state: TrainState, mesh: StepMesh) -> TrainState:
        """Returns the state with the extra arrays that this step keeps in it."""
        missing = self._wants_extra - state.extra.keys()
        if missing:
            new = self._extra(state)
            extra = {name: mesh.put(new[name]) for name in sorted(missing)}
            state = state.replace(extra={**state.extra, **extra})
        return self._with_zero(state, mesh) if self._plan.zero else state

    def _extra(self, state: TrainState) -> dict[str, Any]:
        """Builds the extra arrays (EMA, loss scale, ...); abstract if the state is."""
        if not isinstance(state.step, jax.ShapeDtypeStruct):
            return self._plan.update.extra(state)
        extra = jax.eval_shape(self._plan.update.extra, state)
        if EMA in extra:
            extra[EMA] = jax.tree.map(
                lambda average, param: average.update(sharding=param.sharding),
                extra[EMA],
                state.params,
            )
        return extra

    def lower(
        self, state: TrainState, batch: Batch, metrics: Metrics | None = None
    ) -> jax.stages.Lowered:
        """Lowers the step for these arguments, as `jax.jit(...).lower` does.

        Args:
            state: A state; arrays may be `jax.ShapeDtypeStruct` with shardings, here
                and in the batch.
            batch: The global batch.
            metrics: As for a call.
        """
        with in_own_mesh(state):
            if self._calls is not None:
                batch = self._calls.stacked(batch)
            batch = self._placed(state, batch)
            state = self._prepare(state, batch)
            program, compiled = self._program(state, batch)
            args = (state, batch)
            return self._dispatch(program, compiled, args, metrics, is_lowered=True)

    def memory(self, state: TrainState, batch: Batch) -> StepMemory:
        """Returns the bytes that the compiled step takes on each device.

        Args:
            state: A state; nothing is run, and it is not used up.
            batch: The global batch.
        """
        analysis: Any = self.lower(state, batch).compile().memory_analysis()
        saved = 0
        if self._plan.loss.remat:
            plan = replace(self._plan, loss=replace(self._plan.loss, remat=()))
            without = TrainStep(plan, self._layouts, self._on_recompile)
            other: Any = without.lower(state, batch).compile().memory_analysis()
            saved = other.temp_size_in_bytes - analysis.temp_size_in_bytes
        return StepMemory(
            analysis.argument_size_in_bytes,
            analysis.output_size_in_bytes,
            analysis.temp_size_in_bytes,
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
        self._look_at_reports(wait=True)

    def __repr__(self) -> str:
        name = getattr(self._plan.loss.loss_fn, "__name__", "loss")
        return f"TrainStep({name}, {len(self._programs)} meshes seen)"

    # Programs.

    def _program(
        self, state: TrainState, batch: Batch | Stacked
    ) -> tuple[Program, CompiledStep[..., Any]]:
        """Returns the program for these arguments, and its function for one call."""
        num_programs = len(self._programs)
        program = self._program_on(self._step_mesh(state, batch), state)
        if isinstance(batch, Stacked):
            return program, program.compiled("steps", program.train_steps)
        if len(self._programs) > num_programs:
            note_if_replicated(state, batch)
        return program, program.compiled("step", program.train_step)

    def _program_on(self, mesh: StepMesh, state: TrainState) -> Program:
        shardings = None
        if self._plan.zero and self._plan.accumulate > 1:
            now = map(_jax.sharding_of, jax.tree.leaves(state.params))
            sharded = (one.sharding for one in zero_layouts(state.params, mesh))
            shardings = tuple(zip(now, sharded, strict=True))
        key = (mesh, shardings)
        if key not in self._programs:
            self._programs[key] = Program(
                self._plan, mesh, shardings, self._layouts, self._on_recompile
            )
        return self._programs[key]

    def _step_mesh(self, state: TrainState, batch: Batch | Stacked) -> StepMesh:
        """Returns what a program depends on: the rows' axes matter to some plans."""
        if not self._plan.needs_rows:
            return step_mesh_of(state)
        return step_mesh_of(state, row_axes(batch, int(isinstance(batch, Stacked))))

    @property
    def weights(self) -> str | int:
        """Where a batch carries its weights."""
        return self._plan.loss.weights

    def _with_zero(self, state: TrainState, mesh: StepMesh) -> TrainState:
        """Returns the state with the optimizer's part sharded over the batch axes."""
        leaves, treedef = jax.tree.flatten(state.opt_state)
        if [leaf.sharding for leaf in leaves] == self._zero_shardings:
            return state
        layouts = zero_layouts({"opt_state": state.opt_state}, mesh)
        if not layouts:
            return state
        self.zero_exceptions = tuple(
            f"{one.path} {one.reason}" for one in layouts if one.reason
        )
        for line in self.zero_exceptions:
            _log.info("zero=1 leaves %s", line)
        self._zero_shardings = [one.sharding for one in layouts]
        placed = [
            leaf.update(sharding=one.sharding)
            if isinstance(leaf, jax.ShapeDtypeStruct)
            else jax.device_put(leaf, one.sharding)
            for leaf, one in zip(leaves, layouts, strict=True)
        ]
        return state.replace(opt_state=treedef.unflatten(placed))

    def _look_at_reports(self, *, wait: bool) -> None:
        """Raises for a step that was not finite, as far as that is known."""
        while self._reports and (wait or self._reports[0].is_ready()):
            report = self._reports.popleft()
            problem = report.problem(self._num_steps)
            if problem is not None:
                raise StepError(problem)


_Repeat: TypeAlias = Callable[
    [TrainState, Batch, Metrics | None], tuple[TrainState, Metrics] | None
]


def _repeat(
    train_step: TrainStep,
    compiled: CompiledStep[..., Any],
    arguments: tuple[Any, ...],
    start: MetricsStart,
    names: list[str],
) -> _Repeat | None:
    """Returns a function that makes a call like one that was just made, if it can.

    A small step takes as long as Python does. So this looks only at what `jax.jit`
    would not notice, or would end the process for; whatever else is new makes JAX
    raise, before anything has run, or trace, which the compiled step refuses.

    `arguments` are those between the state and the metrics. The function returns None
    for a call that is not like that one.
    """
    jitted_step, key = compiled.program, train_step.weights
    if len(arguments) != 1 or jitted_step is None:
        return None  # an epoch
    structure = jitted_step.signature.structure
    take_apart = jax.tree_util.default_registry.flatten
    leaves, like = take_apart(arguments[0])
    layouts = [layout_of(leaf) for leaf in leaves]
    if structure is None or None in layouts:
        return None
    weights = get_weights(arguments[0], key)
    places = [index for index, leaf in enumerate(leaves) if leaf is weights]
    jitted, treedef = jitted_step.jitted, start.treedef
    is_spread, is_bounded = jitted_step.is_spread, jitted_step.is_bounded
    marked, reports = _batches.marked_weights, train_step._reports
    has_clock, empty = start.has_clock, start.leaves

    def repeat(
        state: TrainState, batch: Batch, metrics: Metrics | None
    ) -> tuple[TrainState, Metrics] | None:
        if reports:
            train_step._look_at_reports(wait=False)
        rows, batch_def = take_apart(batch)
        try:
            if batch_def != like or [x.sharding for x in rows] != layouts:
                return None
            flat = state._flat
        except AttributeError:  # not arrays, or not a state
            return None
        if metrics is None and not has_clock:
            counted = empty
        elif type(metrics) is Metrics and metrics._flat is not None:
            counted, metrics_def = metrics._flat
            if metrics_def is not treedef:
                return None
        else:
            return None
        if flat is None or flat[1] is not structure:
            arrays = structure.flatten(state)
            rest = (rows, counted)
            if arrays is None or (is_spread and gives_memory_twice(arrays, rest)):
                return None
        elif flat[2]:
            arrays = flat[0]
            # Nobody has seen the state's arrays: none of them can be in the batch.
            if is_spread and True in [x.is_deleted() for x in (*rows, *counted)]:
                return None
        else:
            return None
        if marked and (not places or id(rows[places[0]]) not in marked):
            check_weights_key(batch, key)
        try:
            result = jitted((), arrays, ((batch, counted), {}))
        except Exception as error:
            # It failed while it ran, and took the state with it; a state that was used
            # up before is refused by JAX with a text of its own, and nothing behind it.
            was_used_up = "deleted" in str(error) and error.__context__ is None
            if not was_used_up and any(x.is_deleted() for x in arrays):
                raise
            return None  # before it ran; the call that follows says why
        if flat is not None:
            flat[2] = False
        arrays, (counted, report) = result
        if is_bounded:
            compiled.wait_if_many(result)
        if report is not None:
            train_step._report(report, names)
        return structure.lazy(arrays), Metrics.from_flat(counted, treedef)

    return repeat


@dataclass(frozen=True)
class _CallReport:
    """What `Update.apply` reported of the steps of one call.

    Attributes:
        report: int32, of shape (3,), or (steps, 3).
        num_steps: How many steps there were up to the end of that call.
        names: What its second number stands for.
    """

    report: jax.Array
    num_steps: int
    names: list[str]

    def is_ready(self) -> bool:
        """Returns whether looking at it means no waiting."""
        array: Any = self.report
        return array.is_ready()

    def problem(self, num_steps: int) -> str | None:
        """Returns what to say of the first step that was not finite, if there is one.

        Args:
            num_steps: How many steps there are by now.
        """
        steps = np.asarray(self.report).reshape(-1, 3)
        if not steps[:, 2].any():
            return None
        index = int(np.argmax(steps[:, 2]))
        number, leaf, _ = steps[index]
        followed = num_steps - self.num_steps + len(steps) - 1 - index
        later = {0: "", 1: ", and one step followed"}.get(
            followed, f", and {followed} steps followed"
        )
        return (
            f"the loss or a gradient was not finite in step {number}: "
            f"{self.names[leaf]} first. The state is as it was before that "
            f"step{later}. Lower the learning rate, clip with clip_norm=, or use "
            'on_nonfinite="skip".'
        )


def _step_text(state: TrainState) -> str:
    is_known = isinstance(state.step, jax.Array) and not isinstance(state.step, Tracer)
    if is_known and not state.step.is_deleted():
        return f"step {int(state.step)}"
    return "a step whose number is not known"
