"""`make_eval_step` and `make_predict_step`: measure a model, and predict with it.

Nothing is donated, and they take only the parts of the state that a forward pass needs:
a new optimizer recompiles nothing, and its arrays are not transferred.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from meshlayout import _checks, losses
from meshlayout._annotations import Batch
from meshlayout.errors import StepError
from meshlayout.layout_map import LayoutMap
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.step import model_call, objective
from meshlayout.step.compiled_step import CompiledStep, OnRecompile
from meshlayout.step.train_step import StateStep


@_checks.user_call
def make_eval_step(
    loss_fn: Callable[..., Any],
    *,
    metrics: Mapping[str, Any] | None = None,
    regularizers: Mapping[str, losses.Regularizer] | None = None,
    weights: str | int = "weight",
    denominator: losses.Denominator = "real",
    precision: model_call.Precision = "float32",
    layouts: LayoutMap | None = None,
    on_recompile: OnRecompile = "warn",
) -> "EvalStep":
    """Makes a compiled step that measures a model and changes nothing.

    The model is in evaluation mode: no dropout, running averages for batch statistics.
    All arguments are those of `make_train_step`; `loss_fn` receives `train=False`, and
    penalties count in the loss.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> from flax import nnx
        >>> build = lambda: nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> state = TrainState.create(build, optax.sgd(0.1))
        >>> step = make_eval_step(lambda model, batch: (model(batch["x"]) - 1) ** 2)
        >>> float(step(state, {"x": jnp.zeros((8, 2))})["loss"])
        1.0
    """
    options = loss_fn, metrics, regularizers, weights, denominator, precision
    loss = objective.make_loss("make_eval_step", *options)
    return EvalStep(loss.loss_fn, loss.weights, layouts, on_recompile, loss)


class EvalStep(StateStep[Metrics]):
    """A compiled eval step; made by `make_eval_step`.

    `eval_step(state, batch, metrics)` measures a batch, and adds the result to earlier
    metrics if given. The state is not donated.
    """

    __name__ = "eval_step"
    _plan: objective.Loss

    def _compile_for(self, key: Any) -> CompiledStep[..., Any]:
        loss = self._plan

        @jax.jit
        def measure(state: TrainState, batch: Batch) -> Metrics:
            _, total = loss.denominators(batch)
            parts, (_, values, outputs) = loss.parts(state, batch, state.rng, total)
            parts = {name: x.sum() for name, x in parts.items()}
            parts |= {k: f(state.params) for k, f in loss.regularizers.items()}
            weight = loss.total_weight(batch)
            measured = loss.measured(values, outputs, batch)
            return objective.metrics_of_batch(parts, {}, weight, measured)

        def eval_step(
            state: TrainState, batch: Batch, metrics: Metrics | None
        ) -> Metrics:
            return objective.merged(metrics, measure(state, batch))

        return CompiledStep(eval_step, donate=False, **self._options)


@_checks.user_call
def make_predict_step(
    predict_fn: Callable[[Any, Any], Any],
    *,
    precision: model_call.Precision = "float32",
    layouts: LayoutMap | None = None,
    on_recompile: OnRecompile = "warn",
) -> "PredictStep":
    """Makes a compiled step that returns a model's predictions for a batch.

    `predict_fn` takes the model, in evaluation mode, and a batch. The other arguments
    are those of `make_train_step`.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> from flax import nnx
        >>> build = lambda: nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> state = TrainState.create(build, optax.sgd(0.1))
        >>> predict_step = make_predict_step(lambda model, x: model(x))
        >>> predict_step(state, jnp.zeros((8, 2))).shape
        (8, 1)
    """
    context: Any = {"where": "make_predict_step", "error": StepError}
    _checks.function("predict_fn", predict_fn, "model", "batch", **context)
    policy = model_call.parse_precision(precision)
    return PredictStep(predict_fn, None, layouts, on_recompile, policy)


class PredictStep(StateStep[Any]):
    """A compiled predict step; made by `make_predict_step`.

    `predictions = predict_step(state, batch)`. The state is not donated.
    """

    __name__ = "predict_step"
    _plan: model_call.PrecisionPolicy

    @_checks.user_call
    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state: TrainState, batch: Batch
    ) -> Any:
        """Returns the model's predictions; raises StepError if arguments do not fit."""
        return super().__call__(state, batch)

    def _compile_for(self, key: Any) -> CompiledStep[..., Any]:
        function, policy = self._function, self._plan

        def predict_step(state: TrainState, batch: Batch, metrics: None) -> Any:
            call = (lambda model: function(model, batch)), policy, state, state.rng
            return model_call.call_model(*call, train=False)[0]

        return CompiledStep(predict_step, donate=False, **self._options)
