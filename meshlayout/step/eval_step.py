"""`make_eval_step` and `make_predict_step`: how good a model is, and what it predicts.

Nothing is donated, and of the state they take only what a forward pass needs: a change
of optimizer recompiles nothing, and its arrays are not transferred.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax

from meshlayout import _jax, losses
from meshlayout._annotations import Batch, PyTree
from meshlayout._batches import num_examples
from meshlayout.layout_map import LayoutMap
from meshlayout.losses.reduction import check_denominator
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.state.precision import (
    Policies,
    Precision,
    check_params,
    parse_precision,
)
from meshlayout.step.batch_metrics import (
    MetricsStep,
    merged,
    metrics_of_batch,
    total_weight,
    user_metrics,
)
from meshlayout.step.compiled_step import CompiledStep, OnRecompile
from meshlayout.step.inspection import StepInspection
from meshlayout.step.model_call import call_model
from meshlayout.step.objective import (
    Loss,
    check_loss_fn,
    check_regularizers,
    check_weights_name,
)
from meshlayout.step.placement import check_divided, check_state, place_batch


def make_eval_step(
    loss_fn: Callable[..., Any],
    *,
    metrics: Mapping[str, Any] | None = None,
    regularizers: Mapping[str, Callable[[PyTree], Any]] | None = None,
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
    check_weights_name(weights)
    policies, penalties = parse_precision(precision), check_regularizers(regularizers)
    loss = Loss(loss_fn, policies, weights, denominator, penalties)
    return EvalStep(loss, user_metrics(metrics, penalties), layouts, on_recompile)


class EvalStep(MetricsStep):
    """A compiled eval step; made by `make_eval_step`.

    `metrics = eval_step(state, batch)` measures one batch, and
    `eval_step(state, batch, metrics)` adds it to earlier metrics. The state is not
    donated.
    """

    def __init__(
        self,
        loss: Loss,
        users: Metrics,
        layouts: LayoutMap | None,
        on_recompile: OnRecompile,
    ) -> None:
        super().__init__("eval_step", loss, layouts, on_recompile)
        self._users = users

    def __reduce__(self) -> tuple[Any, ...]:
        # Compiled programs belong to this process; a copy compiles its own.
        how = (self._loss, self._users, self._layouts, self._on_recompile)
        return EvalStep, how

    def without_layouts(self) -> "EvalStep":
        """Returns the same step for states on any mesh, which follows no layout map."""
        return EvalStep(self._loss, self._users, None, "ignore")

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
        compiled, args = self._call_of(state, batch, metrics)
        return compiled(*args)

    def __repr__(self) -> str:
        return f"EvalStep({getattr(self._loss.loss_fn, '__name__', 'loss')})"

    def _placed(self, state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
        state, batch = super()._placed(state, batch)
        return without_optimizer(state), batch

    def _key(self, state: TrainState, batch: Batch) -> Hashable:
        # Measuring several models is no recompilation to warn of.
        return _jax.sharding_of(state.step), state.program

    def _new_compiled(self, key: Any) -> CompiledStep[..., Any]:
        measure = jax.jit(self._measured, inline=True)

        def eval_step(
            state: TrainState, batch: Batch, metrics: Metrics | None
        ) -> Metrics:
            measured = measure(state, batch)
            return measured if metrics is None else merged(metrics, measured)

        return CompiledStep(
            eval_step,
            on_recompile=self._on_recompile,
            layouts=self._layouts,
            donate=False,
        )

    def _measured(self, state: TrainState, batch: Batch) -> Metrics:
        """Returns the metrics of one batch, inside jit."""
        loss, share = self._loss, self._loss.share(batch)
        check_params(state.params, loss.policies)
        parts, outcome = loss.forward(
            state, state.params, state.model_state, batch, state.rng, share
        )
        parts = {name: x.sum() for name, x in parts.items()}
        users = outcome.measured(self._users, batch, share.weights)
        weight = total_weight(share.weights, num_examples(batch))
        return metrics_of_batch(
            {**parts, **loss.penalties(state.params)}, {}, weight, users
        )


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
    """

    def __init__(
        self,
        predict_fn: Callable[[Any, Any], Any],
        policies: Policies,
        layouts: LayoutMap | None,
        on_recompile: OnRecompile,
    ) -> None:
        self._predict_fn, self._policies = predict_fn, policies
        self._options = (layouts, on_recompile)
        self._meshes: set[Any] = set()  # those whose devices divide the work

        def predict(state: TrainState, batch: Batch) -> Any:
            check_params(state.params, policies)
            _, predictions = call_model(
                lambda model: predict_fn(model, batch),
                *(policies, state, state.params, state.model_state, state.rng),
                train=False,
            )
            return predictions

        self._compiled: CompiledStep[..., Any] = CompiledStep(
            predict, layouts=layouts, on_recompile=on_recompile, donate=False
        )
        self.__name__ = "predict_step"

    def __reduce__(self) -> tuple[Any, ...]:
        return PredictStep, (self._predict_fn, self._policies, *self._options)

    def without_layouts(self) -> "PredictStep":
        """Returns the same step for states on any mesh, which follows no layout map."""
        return PredictStep(self._predict_fn, self._policies, None, "ignore")

    def __call__(self, state: TrainState, batch: Batch) -> Any:
        """Returns the model's predictions for a global batch.

        Raises:
            StepError: If the state or the batch does not fit, or if several devices
                would all compute the same.
        """
        return self._compiled(*self._placed(state, batch))

    def trace(self, state: TrainState, batch: Batch) -> jax.stages.Traced:
        """Traces the step for these arguments, as `jax.jit(...).trace` does.

        Args:
            state: A state; arrays may be `jax.ShapeDtypeStruct` with shardings.
            batch: The global batch.
        """
        return self._compiled.trace(*self._placed(state, batch))

    def _placed(self, state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
        check_state(self.__name__, state)
        args = without_optimizer(state), place_batch(state, batch)
        mesh = _jax.sharding_of(state.step)
        if mesh not in self._meshes:
            check_divided(*args, lambda: self._compiled.trace(*args).lower().as_text())
            self._meshes.add(mesh)
        return args

    def __repr__(self) -> str:
        return f"PredictStep({getattr(self._predict_fn, '__name__', 'predict')})"


def without_optimizer(state: TrainState) -> TrainState:
    """Returns a state with only what a model's forward pass needs."""
    return state.replace(opt_state=(), extra={})
