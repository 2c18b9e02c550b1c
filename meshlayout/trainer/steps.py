"""The steps that a trainer makes from a loss function, and their options."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from flax import nnx

from meshlayout import _checks, losses
from meshlayout._annotations import Batch, PyTree
from meshlayout.errors import MeshLayoutError, did_you_mean
from meshlayout.layout_map import LayoutMap
from meshlayout.metrics import Metrics
from meshlayout.state.precision import Precision
from meshlayout.step import make_eval_step, make_predict_step, make_train_step
from meshlayout.step.compiled_step import OnRecompile
from meshlayout.step.objective import check_function
from meshlayout.step.remat import Remat
from meshlayout.step.update import OnNonfinite


class StepOptions(TypedDict, total=False):
    """Options of `make_train_step`, which documents them."""

    regularizers: Mapping[str, losses.Regularizer] | None
    weights: str | int
    denominator: losses.Denominator
    accumulate: int
    clip_norm: float | None
    on_nonfinite: OnNonfinite
    ema: float | None
    precision: Precision
    remat: Remat
    steps_per_call: int
    on_recompile: OnRecompile


class TrainerSteps:
    """A trainer's train, eval and predict steps; each compiles at its first call.

    Args:
        loss_fn: As for `Trainer`.
        predict_fn: As for `Trainer`.
        metrics: As for `Trainer`.
        layouts: As for `Trainer`.
        options: The options of the steps.

    Attributes:
        group_size: How many batches a call of the train step takes.
        weights: Where a batch carries its weights.
        evaluate: The eval step; None without a loss function.
        predict: The predict step; None without a function to make it from.

    Raises:
        MeshLayoutError: If an option does not exist, or needs a loss function.
        StepError: If an option of the steps is wrong.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any] | None,
        predict_fn: Callable[[Any, Batch], PyTree] | None,
        metrics: Mapping[str, Any] | None,
        layouts: LayoutMap | None,
        options: StepOptions,
    ) -> None:
        if predict_fn is not None:
            check_function("predict_fn", "Trainer", predict_fn)
        if loss_fn is not None:
            check_function("loss_fn", "Trainer", loss_fn)
        else:
            _refuse_needless(metrics, options)
        self.weights = options.get("weights", "weight")
        self.group_size = _checks.count(
            "steps_per_call", options.get("steps_per_call", 1), where="Trainer"
        )
        self._many = self._one = self.evaluate = self.predict = None
        # Evaluating with a different batch size is legitimate, so it does not warn.
        quiet: StepOptions = {"on_recompile": "ignore", **options}
        if loss_fn is not None:
            shared = {"metrics": metrics, "layouts": layouts}
            self._many = make_train_step(loss_fn, **shared, **options)
            # Batches left over at the end of an epoch are too few for `_many`.
            single: StepOptions = {**options, "steps_per_call": 1}
            self._one = make_train_step(loss_fn, **shared, **single)
            eval_options = _options_for(make_eval_step, quiet)
            self.evaluate = make_eval_step(loss_fn, **shared, **eval_options)
        if predict_fn is None and loss_fn is not None:
            predict_fn = _outputs_of(loss_fn)
        if predict_fn is not None:
            predict_options = _options_for(make_predict_step, quiet)
            self.predict = make_predict_step(
                predict_fn, layouts=layouts, **predict_options
            )

    def train(
        self, state: PyTree, batch: Batch, metrics: Metrics | None
    ) -> tuple[PyTree, Metrics] | None:
        """Runs a train step; returns None without a loss function."""
        if self._many is None or self._one is None:
            return None
        # A batch may itself be a list, of arrays.
        if self.group_size == 1 or not isinstance(batch, list):
            return self._one(state, batch, metrics)
        if len(batch) == 1:
            return self._one(state, batch[0], metrics)
        return self._many(state, batch, metrics)


def check_options(names: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Raises MeshLayoutError for options that do not exist.

    Args:
        names: The options that were given.
        arguments: The parameters of `Trainer`, whose names a typo may mean.
    """
    known = [*StepOptions.__annotations__]
    for name in names:
        if name not in known:
            near = did_you_mean(name, [*arguments, *known])
            msg = (
                f"Trainer has no option {name!r}.{near} The options of its steps are "
                f"{', '.join(known)}."
            )
            raise MeshLayoutError(msg)


def _refuse_needless(
    metrics: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> None:
    """Raises MeshLayoutError for options that only steps made here would use."""
    names = [name for name in options if name not in ("weights", "steps_per_call")]
    names += [] if metrics is None else ["metrics"]
    if names:
        msg = (
            f"Trainer got no loss function, but {', '.join(names)} for the steps that "
            "are made from one. Give loss_fn, or leave these to your own steps."
        )
        raise MeshLayoutError(msg)


def _options_for(make: Callable[..., Any], options: StepOptions) -> dict[str, Any]:
    """Returns the options that a `make_*_step` function accepts."""
    parameters = inspect.signature(make).parameters
    return {name: value for name, value in options.items() if name in parameters}


def _outputs_of(loss_fn: Callable[..., Any]) -> Callable[[Any, Batch], PyTree]:
    """Returns a function of a model and a batch that returns the loss's outputs."""
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    parameters = inspect.signature(loss_fn).parameters

    def outputs(model: Any, batch: Batch) -> PyTree:
        extras: dict[str, Any] = {"train": False} if "train" in parameters else {}
        if "rngs" in parameters:
            # Never drawn from in evaluation mode, but the function may pass it on.
            extras["rngs"] = nnx.Rngs(0)
        try:
            result = loss_fn(model, batch, **extras)
        except KeyError as problem:
            # Labels, most likely: Keras predicts without.
            problem.add_note(
                f"predict calls {name} for its outputs, and what it reads of a batch "
                "has to be there. Without labels, use Trainer(state, predict_fn=...), "
                "a function of the model and a batch."
            )
            raise
        if not isinstance(result, tuple) or not result[1]:
            msg = (
                f"predict: {name} returns losses but no outputs. Return a pair of "
                "losses and a dict of outputs, or give the trainer a "
                "predict_fn(model, batch)."
            )
            raise MeshLayoutError(msg)
        return result[1]

    return outputs
