"""The steps that a trainer makes from a loss function, and their options."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypedDict

import jax
from flax import nnx

from meshlayout import _checks, losses
from meshlayout._annotations import Batch, PyTree
from meshlayout._batches import WeightsKey, num_examples
from meshlayout.errors import LossError, MeshLayoutError, MetricError, did_you_mean
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


PredictFn: TypeAlias = Callable[[Any, Batch], PyTree]


class TrainerSteps:
    """A trainer's train, eval and predict steps; each compiles at its first call.

    A call of the train step takes `group_size` batches, whose weights are at `weights`.
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
            check_function("predict_fn", "Trainer", predict_fn)
        _check_options(options, metrics, is_used=loss_fn is not None)
        self.loss_fn, self._predict_fn = loss_fn, predict_fn
        self.weights = options.get("weights", "weight")
        if not isinstance(self.weights, (str, int)) or isinstance(self.weights, bool):
            msg = (
                "Trainer: weights must be a key of a batch, as 'weight', or an index, "
                f"as 2, got {_checks.shown(self.weights)}."
            )
            raise MeshLayoutError(msg)
        count = options.get("steps_per_call", 1)
        self.group_size = _checks.count("steps_per_call", count, where="Trainer")
        # The structure of the batches that the loss function got, without weights.
        self._structure: Any = None
        # Evaluating with a different batch size is legitimate, so it does not warn.
        quiet: StepOptions = {"on_recompile": "ignore", **options}
        shared: dict[str, Any] = {"metrics": metrics, "layouts": layouts}
        if loss_fn is not None:
            # Fewer batches than a call takes run one by one.
            single: StepOptions = {**options, "steps_per_call": 1}
            self._one = make_train_step(loss_fn, **shared, **single)
            self._many = make_train_step(loss_fn, **shared, **options)
            quiet_eval = _options_of(make_eval_step, quiet)
            self._eval = make_eval_step(loss_fn, **shared, **quiet_eval)

        @functools.lru_cache(maxsize=4)  # the last function may be a new one
        def predict_step(function: PredictFn | None, structure: Any) -> Any:
            function = function or functools.partial(self._predict, structure)
            quiet_predict = _options_of(make_predict_step, quiet)
            return make_predict_step(function, layouts=layouts, **quiet_predict)

        self._predict_step = predict_step

    def train(
        self, state: PyTree, batch: Batch, metrics: Metrics | None
    ) -> tuple[PyTree, Metrics]:
        """Runs a train step, or those of a list of batches."""
        # A batch may itself be a list, of arrays.
        batches = batch if self.group_size > 1 and isinstance(batch, list) else [batch]
        self._see("train_step", *batches[:1])
        sizes = {num_examples(one) for one in batches}
        if len(batches) == self.group_size > 1 and len(sizes) == 1:
            return self._many(state, batches, metrics)
        result: Any = state, metrics
        for one in batches:
            result = self._one(result[0], one, result[1])
        return result

    def evaluate(self, state: PyTree, batch: Batch, metrics: Metrics | None) -> Metrics:
        """Measures a batch."""
        self._see("eval_step", batch)
        return self._eval(state, batch, metrics)

    def predict(
        self, state: PyTree, batch: Batch, predict_fn: PredictFn | None = None
    ) -> PyTree:
        """Returns predictions for a batch."""
        function = predict_fn or self._predict_fn
        if function is None:
            self._see("predict_step")
        structure = self._structure if function is None else None
        return self._predict_step(function, structure)(state, batch)

    def take_weights(self, state: PyTree, batch: Batch, *, train: bool) -> bool:
        """Returns whether the loss can leave out examples by a batch's weights.

        A loss function that returns a mean cannot, nor can some metrics of others. This
        traces the step, as its first call would, and runs nothing.
        """
        try:
            (self._one if train else self._eval).trace(state, batch)
        except (LossError, MetricError):
            return False
        return True

    def _see(self, step: str, *batches: Batch) -> None:
        """Checks that there is a loss function, and remembers what its batches are."""
        if self.loss_fn is None:
            msg = (
                f"the trainer has no loss function to make {step} from: give loss_fn, "
                f"or override {step} in a subclass."
            )
            raise MeshLayoutError(msg)
        if self._structure is None and batches:
            self._structure = jax.tree.structure(_without(batches[0], self.weights))

    def _predict(self, structure: Any, model: Any, batch: Batch) -> PyTree:
        """Returns the loss function's outputs; the model's for data without labels."""
        inputs = _without(batch, self.weights)
        leaves = jax.tree.leaves(inputs)
        if structure is not None and len(leaves) < structure.num_leaves:
            note = (
                "predict calls the model itself, as its data has fewer arrays than the "
                "batches of the loss function. Call it in another way by predict_fn=, "
                "a function of the model and a batch."
            )
            with _checks.noted(note):
                return model(leaves[0] if len(leaves) == 1 else inputs)
        # A single array where a tuple or a dict of one was trained on.
        if structure is not None and len(leaves) == 1:
            batch = structure.unflatten(leaves)
        loss_fn: Any = self.loss_fn
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        names = inspect.signature(loss_fn).parameters
        # Random numbers are never drawn in evaluation mode, but may be passed on.
        extras = {"train": False, "rngs": nnx.Rngs(0)}
        note = (
            f"predict calls {name} for its outputs, and what it reads of a batch has "
            "to be there. Without labels, give predict_fn=, a function of the model "
            "and a batch."
        )
        with _checks.noted(note):
            taken = {key: value for key, value in extras.items() if key in names}
            result = loss_fn(model, batch, **taken)
        if not isinstance(result, tuple) or not result[1]:
            msg = (
                f"predict: {name} returns losses but no outputs. Return a pair of "
                "losses and a dict of outputs, or give the trainer a "
                "predict_fn(model, batch)."
            )
            raise MeshLayoutError(msg)
        return result[1]


def _check_options(options: Mapping[str, Any], metrics: Any, *, is_used: bool) -> None:
    known = [*StepOptions.__annotations__]
    own = ["loss_fn", "metrics", "layouts", "predict_fn", "data_layout", "pad"]
    for name in options:
        if name not in known:
            near = did_you_mean(name, [*known, *own])
            msg = f"Trainer has no option {name!r}.{near} The options of its steps"
            raise MeshLayoutError(f"{msg} are {', '.join(known)}.")
    needless = [x for x in options if x not in ("weights", "steps_per_call")]
    needless += [] if metrics is None else ["metrics"]
    if needless and not is_used:
        msg = (
            f"Trainer got no loss function, but {', '.join(needless)} for the steps "
            "that are made from one. Give loss_fn, or leave these to your own steps."
        )
        raise MeshLayoutError(msg)


def _without(batch: Batch, key: WeightsKey) -> Any:
    """Returns the entries of a batch other than its weights."""
    if isinstance(batch, Mapping):
        return {name: leaf for name, leaf in batch.items() if name != key}
    has_weights = isinstance(batch, (tuple, list)) and key in (-1, len(batch) - 1)
    return batch[:-1] if has_weights else batch


def _options_of(make: Callable[..., Any], options: StepOptions) -> dict[str, Any]:
    """Returns the options that a `make_*_step` function takes."""
    parameters = inspect.signature(make).parameters
    return {name: value for name, value in options.items() if name in parameters}
