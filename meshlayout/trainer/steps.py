"""The steps that a trainer makes from a loss function, and their options."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict

import jax
from flax import nnx

from meshlayout import _checks, losses
from meshlayout._annotations import Batch, PyTree
from meshlayout._batches import WeightsKey, get_weights
from meshlayout.errors import LossError, MeshLayoutError, did_you_mean
from meshlayout.layout_map import LayoutMap
from meshlayout.metrics import Metrics
from meshlayout.state.precision import Precision
from meshlayout.step import make_eval_step, make_predict_step, make_train_step
from meshlayout.step.compiled_step import OnRecompile
from meshlayout.step.objective import check_loss_fn, check_weights
from meshlayout.step.remat import Remat
from meshlayout.step.updates import OnNonfinite


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
    zero: Literal[0, 1]
    steps_per_call: int
    on_recompile: OnRecompile


PredictFn = Callable[[Any, Batch], PyTree]


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

    Raises:
        MeshLayoutError: If an option does not exist, or needs a loss function.
        StepError: If an option of the steps is wrong.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any] | None,
        predict_fn: PredictFn | None,
        metrics: Mapping[str, Any] | None,
        layouts: LayoutMap | None,
        options: StepOptions,
    ) -> None:
        if predict_fn is not None:
            check_loss_fn("predict_fn", "Trainer", predict_fn)
        if loss_fn is not None:
            check_loss_fn("loss_fn", "Trainer", loss_fn)
        else:
            _refuse_needless(metrics, options)
        self._loss_fn, self._predict_fn = loss_fn, predict_fn
        self.has_loss = loss_fn is not None
        self.weights = options.get("weights", "weight")
        check_weights(self.weights)
        self.group_size = _checks.count(
            "steps_per_call", options.get("steps_per_call", 1), where="Trainer"
        )
        # Evaluating with a different batch size is legitimate, so it does not warn.
        quiet: StepOptions = {"on_recompile": "ignore", **options}
        shared: dict[str, Any] = {"metrics": metrics, "layouts": layouts}
        if loss_fn is not None:
            # Batches left over at the end of an epoch are too few for `_many`.
            single: StepOptions = {**options, "steps_per_call": 1}
            self._one = make_train_step(loss_fn, **shared, **single)
            if self.group_size > 1:
                self._many = make_train_step(loss_fn, **shared, **options)
            eval_options = _options_for(make_eval_step, quiet)
            self._eval = make_eval_step(loss_fn, **shared, **eval_options)
        # The structure of the batches that the loss function got, without weights.
        self._structure: Any = None
        predict_options = _options_for(make_predict_step, quiet)

        @functools.lru_cache(maxsize=4)
        def predict_step(function: PredictFn | None, structure: Any) -> Any:
            function = function or functools.partial(self._predict, structure)
            return make_predict_step(function, layouts=layouts, **predict_options)

        self._predict_step = predict_step

    def train(
        self, state: PyTree, batch: Batch, metrics: Metrics | None
    ) -> tuple[PyTree, Metrics]:
        """Runs a train step."""
        self._check_loss("train_step")
        # A batch may itself be a list, of arrays.
        if self.group_size == 1 or not isinstance(batch, list):
            self._see(batch)
            return self._one(state, batch, metrics)
        self._see(batch[0] if batch else {})
        if len(batch) == 1:
            return self._one(state, batch[0], metrics)
        return self._many(state, batch, metrics)

    def evaluate(self, state: PyTree, batch: Batch, metrics: Metrics | None) -> Metrics:
        """Measures a batch."""
        self._check_loss("eval_step")
        self._see(batch)
        return self._eval(state, batch, metrics)

    def predict(
        self, state: PyTree, batch: Batch, predict_fn: PredictFn | None = None
    ) -> PyTree:
        """Returns predictions for a batch, of `predict_fn` if it is given."""
        function = predict_fn or self._predict_fn
        if function is None:
            self._check_loss("predict_step")
        structure = None if function is not None else self._structure
        return self._predict_step(function, structure)(state, batch)

    def take_weights(self, state: PyTree, batch: Batch, *, train: bool) -> bool:
        """Returns whether the loss can leave out examples by a batch's weights.

        A loss function that returns a mean cannot. This traces the step, as its first
        call would, and runs nothing.
        """
        step = self._one if train else self._eval
        try:
            step.trace(state, batch)
        except LossError:
            return False
        return True

    def _check_loss(self, step: str) -> None:
        if self._loss_fn is None:
            msg = (
                f"the trainer has no loss function to make {step} from: give loss_fn, "
                f"or override {step} in a subclass."
            )
            raise MeshLayoutError(msg)

    def _see(self, batch: Batch) -> None:
        if self._structure is None:
            self._structure = jax.tree.structure(_without(batch, self.weights))

    def _predict(self, structure: Any, model: Any, batch: Batch) -> PyTree:
        """Returns the loss function's outputs, or the model's for data without labels.

        Args:
            structure: That of the loss function's batches; None if it had none yet.
            model: The model.
            batch: A batch like those, or with fewer arrays.
        """
        inputs = _without(batch, self.weights)
        leaves = jax.tree.leaves(inputs)
        if structure is None or len(leaves) > structure.num_leaves:
            return self._outputs(model, batch)
        if len(leaves) == structure.num_leaves:
            # A single array where a tuple or a dict of one was trained on.
            is_one = len(leaves) == 1
            return self._outputs(
                model, structure.unflatten(leaves) if is_one else batch
            )
        note = (
            "predict calls the model itself, as its data has fewer arrays than the "
            "batches of the loss function. Call it in another way by predict_fn=, a "
            "function of the model and a batch."
        )
        with _checks.noted(note):
            return model(leaves[0] if len(leaves) == 1 else inputs)

    def _outputs(self, model: Any, batch: Batch) -> PyTree:
        """Returns the outputs of the loss function."""
        loss_fn: Any = self._loss_fn
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        parameters = inspect.signature(loss_fn).parameters
        extras: dict[str, Any] = {"train": False} if "train" in parameters else {}
        if "rngs" in parameters:
            # Never drawn from in evaluation mode, but the function may pass it on.
            extras["rngs"] = nnx.Rngs(0)
        note = (
            f"predict calls {name} for its outputs, and what it reads of a batch has "
            "to be there. Without labels, give predict_fn=, a function of the model and "
            "a batch."
        )
        with _checks.noted(note):
            result = loss_fn(model, batch, **extras)
        if not isinstance(result, tuple) or not result[1]:
            msg = (
                f"predict: {name} returns losses but no outputs. Return a pair of "
                "losses and a dict of outputs, or give the trainer a "
                "predict_fn(model, batch)."
            )
            raise MeshLayoutError(msg)
        return result[1]


def _without(batch: Batch, key: WeightsKey) -> Any:
    """Returns the entries of a batch other than its weights."""
    if get_weights(batch, key) is None:
        return batch
    if isinstance(batch, Mapping):
        return {name: leaf for name, leaf in batch.items() if name != key}
    if isinstance(batch, (tuple, list)) and key in (-1, len(batch) - 1):
        return batch[:-1]
    return batch


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
