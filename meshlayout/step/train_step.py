"""`make_train_step`: the step that an expert would have written for the mesh.

A call goes three ways. One like the call before goes straight to `jax.jit`
(`program.repeat_of`), because a small step takes the device as long as Python takes to
call it. Any other is checked, its batch placed, and the program for its mesh looked up.
Several batches in one call are stacked and scanned over (`multi_step`).
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from meshlayout import _checks, losses
from meshlayout._annotations import Batch
from meshlayout.errors import StepError
from meshlayout.layout_map import LayoutMap
from meshlayout.losses.reduction import check_denominator
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.state.precision import Precision, parse_precision
from meshlayout.step.compiled_step import CompiledStep, OnRecompile, compile_step
from meshlayout.step.inspection import StepInspection, StepMemory, shard_bytes
from meshlayout.step.multi_step import Stacked, stacked_batches, steps_of
from meshlayout.step.objective import Loss, check_loss_fn, check_weights
from meshlayout.step.placement import (
    StepMesh,
    check_batch,
    check_divided,
    check_state,
    in_own_mesh,
    noted_call,
    place_host_batch,
    row_axes,
    step_mesh_of,
)
from meshlayout.step.program import Plan, StepProgram
from meshlayout.step.remat import Remat, check_remat
from meshlayout.step.step_metrics import as_regularizers, user_metrics
from meshlayout.step.updates import OnNonfinite, Update
from meshlayout.step.zero import ZeroPlacement, update_shardings


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
    zero: Literal[0, 1] = 0,
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
            model is an NNX module in training mode or a bound Linen module. Parameters
            named `rngs` and `train` receive an `nnx.Rngs` of this step and True.
        metrics: What is measured besides the loss, by name.
        regularizers: Functions of the parameters that return a penalty, by name, as
            `{"l2": losses.l2(1e-5, where="kernel")}`.
        weights: Where a batch carries its weights, (batch,) or the losses' own shape:
            a key of a mapping, or an index of a tuple. A batch without an entry there
            has none. One whose weights are all 0 has gradients of 0 and is still a
            step: `step` counts it, and momentum and weight decay move the parameters.
            Leave such batches out of your own loop, as `Trainer` does.
        denominator: What the weighted sum of losses is divided by: `"real"`, the sum
            of weights; or `"global_batch_size"`, padding included.
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
        on_nonfinite: What to do if the loss or a gradient is not finite: `"ignore"`,
            or `"skip"`, leave the state as it was and count it in `state.extra`.
        ema: The decay of a moving average of the parameters, `state.extra["ema"]`.
        precision: `"float32"`, `"bfloat16"`, `"float16"` (with a dynamic loss scale),
            or a `PrecisionPolicy`. A layer that names its own `dtype` keeps it.
        remat: What the backward pass recomputes: `"none"`, `"blocks"` (numbered
            submodules with insides), `"full"`, or a policy of
            `jax.checkpoint_policies` for the blocks.
        zero: 1 shards the optimizer's state and the update over the axes that shard
            the batch (Rajbhandari et al., "ZeRO", 2020, stage 1).
        steps_per_call: How many batches a call takes, as a list or stacked in a dim
            before the batch dim, to run in one dispatch; the metrics are those of
            one call each.
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
    accumulate = _checks.count("accumulate", accumulate, **where)
    if clip_norm is not None:
        clip_norm = _checks.number("clip_norm", clip_norm, above=0, **where)
    _checks.choice("on_nonfinite", on_nonfinite, get_args(OnNonfinite), **where)
    if ema is not None:
        ema = _checks.number("ema", ema, at_least=0, below=1, **where)
    _checks.choice("zero", zero, (0, 1), **where)
    steps_per_call = _checks.count("steps_per_call", steps_per_call, **where)
    policy = parse_precision(precision)
    check_remat(remat)
    loss = Loss(
        loss_fn,
        policy,
        weights,
        denominator,
        as_regularizers(regularizers),
        remat,
        train=True,
        has_metrics=bool(metrics),
    )
    has_loss_scale = policy.compute == jnp.float16
    update = Update(clip_norm, on_nonfinite, ema, has_loss_scale)
    plan = Plan(
        loss,
        update,
        user_metrics(metrics),
        accumulate,
        bool(zero),
        steps_per_call,
    )
    return TrainStep(plan, layouts, on_recompile)


class TrainStep(StepInspection):
    """A compiled train step; made by `make_train_step`.

    `state, metrics = train_step(state, batch)` returns the metrics of that step, and
    `train_step(state, batch, metrics)` adds them to earlier ones, on the device. The
    state is donated, as by `compile_step`.
    """

    def __init__(
        self, plan: Plan, layouts: LayoutMap | None, on_recompile: OnRecompile
    ) -> None:
        compile_step(lambda state: None, on_recompile=on_recompile, layouts=layouts)
        self._plan = plan
        self._layouts = layouts
        self._on_recompile: OnRecompile = on_recompile
        self._programs: dict[Hashable, StepProgram] = {}
        self._takes_several = plan.steps_per_call != 1
        self._wants_extra = frozenset(plan.update.names())
        self._zero = ZeroPlacement() if plan.zero else None
        self.__name__ = "train_step"

    def __reduce__(self) -> tuple[Any, ...]:
        # Compiled programs belong to this process; a copy compiles its own.
        return TrainStep, (self._plan, self._layouts, self._on_recompile)

    def without_layouts(self) -> "TrainStep":
        """Returns the same step for states on any mesh, which follows no layout map."""
        return TrainStep(self._plan, None, "ignore")

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
            StepError: If the state, the batch or the metrics do not fit.
            LossError: If what the loss function returns does not fit the batch.
        """
        with noted_call(self.__name__, state):
            if self._takes_several:
                # Before they are stacked: weights are marked by the identity of arrays.
                for part in batch if isinstance(batch, list) else ():
                    check_batch(part, self.weights)
                batch = stacked_batches(batch, self._plan.steps_per_call)
            return self._run(state, batch, metrics)

    def _run(
        self, state: TrainState, batch: Batch | Stacked, metrics: Metrics | None
    ) -> tuple[TrainState, Metrics]:
        """Runs one step, or those of all batches of a call in one dispatch."""
        with in_own_mesh(state):
            placed = self._placed(state, batch)
            return self._dispatch(*self._program_call(state, placed), metrics)

    def _dispatch(
        self,
        program: StepProgram,
        compiled: CompiledStep[..., Any],
        args: tuple[Any, ...],
        metrics: Metrics | None,
        *,
        is_traced: bool = False,
    ) -> Any:
        """Calls a function of a program, and remembers how; or traces it.

        Args:
            program: The program.
            compiled: Its function.
            args: The function's arguments before the metrics, the state first.
            metrics: The metrics to add to.
            is_traced: Whether to trace it.
        """
        result, _ = program.metrics.run(
            *(compiled, args, args[0], metrics, program.expected_metrics),
            is_traced=is_traced,
        )
        return result

    def _placed(self, state: TrainState, batch: Batch | Stacked) -> Batch | Stacked:
        """Returns a batch on the mesh of the state."""
        check_state(self.__name__, state)
        is_many = isinstance(batch, Stacked)
        if not is_many:
            check_batch(batch, self.weights)
        return place_host_batch(state, batch, int(is_many))

    def _prepared(self, state: TrainState, mesh: StepMesh) -> TrainState:
        """Returns the state with the extra arrays that this step keeps in it."""
        missing = self._wants_extra - state.extra.keys()
        if missing:
            new = self._plan.update.extra(state)
            extra = {name: mesh.put(new[name]) for name in sorted(missing)}
            state = state.replace(extra={**state.extra, **extra})
        return state if self._zero is None else self._zero.place(state, mesh)

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
        with in_own_mesh(state):
            if self._takes_several:
                batch = stacked_batches(batch, self._plan.steps_per_call)
            batch = self._placed(state, batch)
            call = self._program_call(state, batch)
            return self._dispatch(*call, metrics, is_traced=True)

    def memory(
        self, state: TrainState, batch: Batch, metrics: Metrics | None = None
    ) -> StepMemory:
        """Returns the bytes that the compiled step takes on each device.

        Args:
            state: A state; nothing is run, and it is not used up.
            batch: The global batch.
            metrics: As for a call.
        """
        memory = super().memory(state, batch, metrics)
        gradients = shard_bytes(jax.tree.leaves(state.params))
        memory = replace(memory, gradient_bytes=gradients)
        if self._plan.loss.remat == "none":
            return memory
        plan = replace(self._plan, loss=replace(self._plan.loss, remat="none"))
        without = TrainStep(plan, self._layouts, self._on_recompile)
        more = without.memory(state, batch, metrics).temporary_bytes
        return replace(memory, saved_bytes=more - memory.temporary_bytes)

    @property
    def zero_exceptions(self) -> tuple[str, ...]:
        """Which leaves of the optimizer's state zero=1 left as they were, and why."""
        return () if self._zero is None else self._zero.exceptions

    def __repr__(self) -> str:
        name = getattr(self._plan.loss.loss_fn, "__name__", "loss")
        return f"TrainStep({name}, {len(self._programs)} meshes seen)"

    # Programs.

    def _program_call(
        self, state: TrainState, batch: Batch | Stacked
    ) -> tuple[StepProgram, CompiledStep[..., Any], tuple[TrainState, Batch | Stacked]]:
        """Returns the program for a call, its function to call, and its arguments."""
        mesh = self._step_mesh(state, batch)
        state = self._prepared(state, mesh)
        num_programs = len(self._programs)
        program = self._program_on(mesh, state)
        is_stacked = isinstance(batch, Stacked)
        if is_stacked:
            compiled = program.compiled("steps", steps_of(program.train_step))
        else:
            compiled = program.compiled("step", program.train_step)
        if len(self._programs) > num_programs:
            try:
                check_divided(
                    *(state, batch),
                    lambda: (
                        self._dispatch(
                            *(program, compiled, (state, batch), None), is_traced=True
                        )
                        .lower()
                        .as_text()
                    ),
                    dim=int(is_stacked),
                )
            except StepError:
                self._programs.popitem()  # to be checked again
                raise
        return program, compiled, (state, batch)

    def _program_on(self, mesh: StepMesh, state: TrainState) -> StepProgram:
        shardings = None
        if self._plan.zero and self._plan.accumulate > 1:
            shardings = update_shardings(state.params, mesh)
        key = (mesh, shardings)
        if key not in self._programs:
            self._programs[key] = StepProgram(
                self._plan, mesh, shardings, self._layouts, self._on_recompile
            )
        return self._programs[key]

    def _step_mesh(self, state: TrainState, batch: Batch | Stacked) -> StepMesh:
        """Returns the mesh of a program, with the rows' axes if the plan needs them."""
        if not self._plan.needs_rows:  # else a batch in another layout is a new program
            return step_mesh_of(state)
        return step_mesh_of(state, row_axes(batch, int(isinstance(batch, Stacked))))

    @property
    def weights(self) -> str | int:
        """Where a batch carries its weights."""
        return self._plan.loss.weights
