"""`make_eval_step` and `make_predict_step`: how good a model is, and what it predicts.

Both are compiled steps whose state is empty: nothing is donated. The train state is an
argument, without what only training needs, so that a change of optimizer recompiles
nothing and its arrays are not transferred.
"""

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax

from meshlayout import losses
from meshlayout._annotations import Batch
from meshlayout._batches import num_examples
from meshlayout.layout_map import LayoutMap
from meshlayout.losses.reduction import check_denominator
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.state.precision import (
    Precision,
    PrecisionPolicy,
    parse_precision,
)
from meshlayout.step.compiled_step import (
    CompiledStep,
    OnRecompile,
    compile_step,
)
from meshlayout.step.inspection import StepInspection
from meshlayout.step.model_call import call_model
from meshlayout.step.objective import Loss, check_loss_fn, check_weights
from meshlayout.step.placement import (
    StepMesh,
    check_batch,
    check_divided,
    check_state,
    in_own_mesh,
    noted_call,
    place_host_batch,
    step_mesh_of,
)
from meshlayout.step.step_metrics import (
    MetricsStart,
    StepMetrics,
    StepValues,
    as_regularizers,
    total_weight,
    user_metrics,
)


def make_eval_step(
    loss_fn: Callable[..., Any],
    *,
    metrics: Mapping[str, Any] | None = None,
    regularizers: Mapping[str, losses.Regularizer] | None = None,
    weights: str | int = "weight",
    denominator: losses.Denominator = "real",
    precision: Precision = "float32",
    layouts: LayoutMap | None = None,
    on_recompile: OnRecompile = "warn",
) -> "EvalStep":
    """Makes a compiled step that measures a model and changes nothing.

    The model is in evaluation mode: no dropout, running averages for batch statistics.

    Args:
        loss_fn: As for `make_train_step`; `train` is False.
        metrics: What is measured besides the loss, by name.
        regularizers: As for `make_train_step`; they count in the loss.
        weights: As for `make_train_step`.
        denominator: As for `make_train_step`.
        precision: As for `make_train_step`.
        layouts: The layout map that `constrain` follows in the model.
        on_recompile: As for `compile_step`.

    Raises:
        StepError: If an option is wrong.
        LossError: If the denominator is.
        StateError: If the precision is.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from flax import nnx
        >>> import meshlayout as ml
        >>> layouts = ml.LayoutMap(ml.create_mesh({"batch": 8}), {})
        >>> state = ml.TrainState.create(
        ...     lambda: nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), layouts
        ... )
        >>> def loss_fn(model, batch):
        ...     return jnp.square(model(batch["x"]) - batch["y"])
        >>> eval_step = make_eval_step(loss_fn)
        >>> batch = {"x": jnp.zeros((8, 2)), "y": jnp.full((8, 1), 3.0)}
        >>> metrics = eval_step(state, batch)
        >>> float(metrics["loss"])
        9.0
    """
    check_loss_fn("loss_fn", "make_eval_step", loss_fn)
    check_denominator(denominator)
    check_weights(weights)
    loss = Loss(
        loss_fn,
        parse_precision(precision),
        weights,
        denominator,
        as_regularizers(regularizers),
        has_metrics=bool(metrics),
    )
    return EvalStep(loss, user_metrics(metrics), layouts, on_recompile)


class EvalStep(StepInspection):
    """A compiled eval step; made by `make_eval_step`.

    `metrics = eval_step(state, batch)` measures one batch, and
    `eval_step(state, batch, metrics)` adds it to earlier metrics. The state is not
    donated.
    """

    def __init__(
        self,
        loss: Loss,
        metrics: Mapping[str, Any],
        layouts: LayoutMap | None,
        on_recompile: OnRecompile,
    ) -> None:
        self._loss, self._metrics = loss, metrics
        self._layouts = layouts
        self._on_recompile: OnRecompile = on_recompile
        compile_step(lambda state: None, on_recompile=on_recompile, layouts=layouts)
        self._programs: dict[Hashable, tuple[CompiledStep[..., Any], StepMetrics]] = {}
        self.__name__ = "eval_step"

    def __reduce__(self) -> tuple[Any, ...]:
        # Compiled programs belong to this process; a copy compiles its own.
        how = (self._loss, self._metrics, self._layouts, self._on_recompile)
        return EvalStep, how

    def without_layouts(self) -> "EvalStep":
        """Returns the same step for states on any mesh, which follows no layout map."""
        return EvalStep(self._loss, self._metrics, None, "ignore")

    def __call__(
        self, state: TrainState, batch: Batch, metrics: Metrics | None = None
    ) -> Metrics:
        """Measures one batch.

        Args:
            state: The state.
            batch: The global batch, as for a train step.
            metrics: Metrics to add to; None starts with empty ones.

        Raises:
            StepError: If the state, the batch or the metrics do not fit, or if several
                devices would all compute the same.
            LossError: If what the loss function returns does not fit the batch.
        """
        with noted_call(self.__name__, state):
            return self._dispatch(state, batch, metrics, is_traced=False)[0]

    def trace(
        self, state: TrainState, batch: Batch, metrics: Metrics | None = None
    ) -> jax.stages.Traced:
        """Traces the step for these arguments, as `jax.jit(...).trace` does.

        Args:
            state: A state; arrays may be `jax.ShapeDtypeStruct` with shardings.
            batch: The global batch.
            metrics: As for a call.
        """
        return self._dispatch(state, batch, metrics, is_traced=True)[0]

    def _dispatch(
        self,
        state: TrainState,
        batch: Batch,
        metrics: Metrics | None,
        *,
        is_traced: bool,
    ) -> tuple[Any, MetricsStart]:
        """Calls or traces the compiled step; also returns where its metrics start."""
        check_state(self.__name__, state)
        with in_own_mesh(state):
            check_batch(batch, self._loss.weights)
            batch = place_host_batch(state, batch)
            mesh = step_mesh_of(state)
            # Measuring several models is no recompilation to warn of.
            key = (mesh, state.program)
            is_new = key not in self._programs
            program = self._compiled(mesh) if is_new else self._programs[key]
            compiled, step_metrics = program
            args = (without_optimizer(state), batch)

            def expected(state: TrainState) -> list[str]:
                return self._loss.expected_metrics()

            run = functools.partial(
                step_metrics.run, compiled, args, state, metrics, expected
            )
            if is_new:
                if not is_traced:
                    check_divided(
                        *args, lambda: run(is_traced=True)[0].lower().as_text()
                    )
                self._programs[key] = program
            return run(is_traced=is_traced)

    def _compiled(self, mesh: StepMesh) -> tuple[CompiledStep[..., Any], StepMetrics]:
        step_metrics = StepMetrics(self.__name__, self._metrics, mesh)

        def eval_step(state: TrainState, batch: Batch, metrics: Metrics) -> Metrics:
            def measure(users: Metrics) -> tuple[StepValues, Metrics, None]:
                return *self._values(state, batch, users), None

            return step_metrics.add(state.program, metrics, measure)[1]

        options: Any = {"layouts": self._layouts, "on_recompile": self._on_recompile}
        return CompiledStep(eval_step, donate=False, **options), step_metrics

    def _values(
        self, state: TrainState, batch: Batch, users: Metrics
    ) -> tuple[StepValues, Metrics]:
        """Returns a step's own values, and the user's metrics with the batch added."""
        loss, share = self._loss, self._loss.share(batch)
        parts, outcome = loss.forward(
            state, state.params, state.model_state, batch, state.rng, share
        )
        parts = {name: x.sum() for name, x in parts.items()}
        parts = loss.with_penalties(parts, loss.penalties(state.params))
        weight = total_weight(share.weights, num_examples(batch))
        users = outcome.added_to(users, batch, share.weights)
        return StepValues(parts, {}, weight), users

    def __repr__(self) -> str:
        name = getattr(self._loss.loss_fn, "__name__", "loss")
        return f"EvalStep({name}, {len(self._programs)} models seen)"


def make_predict_step(
    predict_fn: Callable[[Any, Any], Any],
    *,
    precision: Precision = "float32",
    layouts: LayoutMap | None = None,
    on_recompile: OnRecompile = "warn",
) -> "PredictStep":
    """Makes a compiled step that returns a model's predictions for a batch.

    Args:
        predict_fn: A function of the model, in evaluation mode, and a batch.
        precision: As for `make_train_step`.
        layouts: The layout map that `constrain` follows in the model.
        on_recompile: As for `compile_step`.

    Raises:
        StepError: If `predict_fn` is not a function.
        StateError: If the precision is wrong.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from flax import nnx
        >>> import meshlayout as ml
        >>> layouts = ml.LayoutMap(ml.create_mesh({"batch": 8}), {})
        >>> state = ml.TrainState.create(
        ...     lambda: nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), layouts
        ... )
        >>> predict_step = make_predict_step(lambda model, x: model(x))
        >>> predict_step(state, jnp.zeros((8, 2))).shape
        (8, 1)
    """
    check_loss_fn("predict_fn", "make_predict_step", predict_fn)
    return PredictStep(predict_fn, parse_precision(precision), layouts, on_recompile)


class PredictStep(StepInspection):
    """A compiled predict step; made by `make_predict_step`.

    `predictions = predict_step(state, batch)`. The state is not donated.

    Attributes:
        predict_fn: The function of the model and a batch.
        policy: The dtypes it computes in.
    """

    def __init__(
        self,
        predict_fn: Callable[[Any, Any], Any],
        policy: PrecisionPolicy,
        layouts: LayoutMap | None,
        on_recompile: OnRecompile,
    ) -> None:
        self.predict_fn, self.policy = predict_fn, policy
        self._options = (layouts, on_recompile)
        self._meshes: set[StepMesh] = set()  # those that divide the work

        def predict(state: TrainState, batch: Batch) -> Any:
            return call_model(
                lambda model: predict_fn(model, batch),
                *(policy, state, state.params, state.model_state, state.rng),
                train=False,
            ).result

        self._compiled = CompiledStep(
            predict, layouts=layouts, on_recompile=on_recompile, donate=False
        )
        self.__name__ = "predict_step"

    def __reduce__(self) -> tuple[Any, ...]:
        return PredictStep, (self.predict_fn, self.policy, *self._options)

    def without_layouts(self) -> "PredictStep":
        """Returns the same step for states on any mesh, which follows no layout map."""
        return PredictStep(self.predict_fn, self.policy, None, "ignore")

    def __call__(self, state: TrainState, batch: Batch) -> Any:
        """Returns the model's predictions for a global batch.

        Raises:
            StepError: If the state does not fit, or if several devices would all
                compute the same.
        """
        check_state(self.__name__, state)
        with noted_call(self.__name__, state), in_own_mesh(state):
            args = (without_optimizer(state), place_host_batch(state, batch))
            mesh = step_mesh_of(state)
            if mesh not in self._meshes:
                check_divided(
                    *args, lambda: self._compiled.trace(*args).lower().as_text()
                )
                self._meshes.add(mesh)
            return self._compiled(*args)

    def trace(self, state: TrainState, batch: Batch) -> jax.stages.Traced:
        """Traces the step for these arguments, as `jax.jit(...).trace` does.

        Args:
            state: A state; arrays may be `jax.ShapeDtypeStruct` with shardings.
            batch: The global batch.
        """
        check_state(self.__name__, state)
        with in_own_mesh(state):
            batch = place_host_batch(state, batch)
            return self._compiled.trace(without_optimizer(state), batch)

    def __repr__(self) -> str:
        return f"PredictStep({getattr(self.predict_fn, '__name__', 'predict')})"


def without_optimizer(state: TrainState) -> TrainState:
    """Returns a state with only what a model's forward pass needs."""
    return state.replace(opt_state=(), extra={})
