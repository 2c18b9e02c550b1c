"""The steps that a trainer makes from a loss function, and their options."""

import functools
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, TypeAlias

import jax
from flax import nnx

from meshlayout import _checks
from meshlayout._annotations import Batch, PyTree
from meshlayout._batches import num_examples
from meshlayout.errors import MeshLayoutError
from meshlayout.layout_map import LayoutMap
from meshlayout.metrics import Metrics
from meshlayout.step import make_eval_step, make_predict_step, make_train_step


PredictFn: TypeAlias = Callable[[Any, Batch], PyTree]


class TrainerSteps:
    """A trainer's steps, for `group_size` batches per call, with `weights` as key."""

    def __init__(
        self,
        loss_fn: Callable[..., Any] | None,
        predict_fn: PredictFn | None,
        metrics: Mapping[str, Any] | None,
        layouts: LayoutMap | None,
        options: Mapping[str, Any],
    ) -> None:
        known = [*signature(make_train_step).parameters][1:]
        for name in {*options} - {*known}:
            _checks.option("Trainer", name, [*known, "predict_fn", "pad"])
        for_steps = options.keys() - {"weights", "steps_per_call"}
        if loss_fn is None and (for_steps or metrics is not None):
            msg = "Trainer got no loss function to make steps from, but metrics or"
            hint = "Give loss_fn, or leave these to your own steps."
            raise MeshLayoutError(f"{msg} options for them. {hint}")
        self.loss_fn, self._predict_fn = loss_fn, predict_fn
        self.weights = options.get("weights", "weight")
        count = options.get("steps_per_call", 1)
        self.group_size = _checks.count("steps_per_call", count, where="Trainer")
        # The structure of the batches that the loss function got, without weights.
        self._structure: Any = None
        self.of_loss: tuple[Any, ...] = ()  # the steps that the loss function makes
        own: dict[str, Any] = {**options, "metrics": metrics, "layouts": layouts}
        # Evaluating with a different batch size is legitimate, so it does not warn.
        quiet = {"on_recompile": "ignore", **own}
        if loss_fn is not None:
            # Fewer batches than a call takes run one by one.
            self.single_step = make_train_step(loss_fn, **{**own, "steps_per_call": 1})
            self._train_step = make_train_step(loss_fn, **own)
            self.eval_step = _made(make_eval_step, loss_fn, quiet)
            self.of_loss = self.single_step, self._train_step, self.eval_step
        self._quiet_options = quiet
        # Of a few functions, as the last one may be a new one.
        self._predict_step = functools.lru_cache(4)(self._new_predict_step)

    def train(
        self, state: PyTree, batch: Batch, metrics: Metrics | None
    ) -> tuple[PyTree, Metrics]:
        """Runs a train step, or those of a list of batches."""
        # A batch may itself be a list, of arrays.
        group = batch if self.group_size > 1 and isinstance(batch, list) else [batch]
        self.check("train_step", group[0])
        if len(group) == self.group_size > 1 and len({*map(num_examples, group)}) == 1:
            return self._train_step(state, group, metrics)
        result: Any = state, metrics
        for item in group:
            result = self.single_step(result[0], item, result[1])
        return result

    def predict(
        self, state: PyTree, batch: Batch, predict_fn: PredictFn | None = None
    ) -> PyTree:
        """Returns predictions for a batch."""
        function = predict_fn or self._predict_fn
        structure = self._structure if function is None else None
        return self._predict_step(function, structure)(state, batch)

    def check(self, step: str, batch: Batch) -> None:
        """Checks that there is a loss function, and records its batches' structure."""
        if self.loss_fn is None:
            msg = f"the trainer has no loss function to make {step} from: give loss_fn,"
            raise MeshLayoutError(f"{msg} or override {step} in a subclass.")
        if self._structure is None:
            self._structure = jax.tree.structure(_without(batch, self.weights))

    def _new_predict_step(self, function: PredictFn | None, structure: Any) -> Any:
        function = function or functools.partial(self._predict, structure)
        return _made(make_predict_step, function, self._quiet_options)

    def _predict(self, structure: Any, model: Any, batch: Batch) -> PyTree:
        """Returns the loss function's outputs; the model's for data without labels."""
        loss_fn, inputs = self.loss_fn, _without(batch, self.weights)
        leaves, call = jax.tree.leaves(inputs), "predict_fn(model, batch)"
        # Data without labels; before a first `fit` or `evaluate`, a single array.
        num_trained = structure.num_leaves if structure else 1 + (inputs is leaves[0])
        if loss_fn is None or len(leaves) < num_trained:
            with _checks.noted(f"predict calls the model, or what you give as {call}"):
                keys = [*inputs] if isinstance(inputs, Mapping) else range(len(leaves))
                known = signature(model).parameters
                is_bare = inputs is leaves[0]
                names = [x for x in known if is_bare or x in keys] or keys
                arguments = ", ".join(f"b[{name!r}]" for name in names)
                form = "a dict, such as dict(frame), and " * is_bare
                hint = f"Give {form}predict_fn=lambda model, b: model({arguments})."
                if "train" in known:  # Linen modules have no mode of their own
                    model = functools.partial(model, train=False)
                _checks.function("model", model, "batch", hint=hint)
                return model(leaves[0] if len(leaves) == 1 else inputs)
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        note = f"predict calls {name}, or what you give as {call}; for inputs alone"
        with _checks.noted(f"{note} write predict(x, ...)"):
            # A single array where a tuple or a dict of one was trained on.
            if structure is not None and len(leaves) == 1:
                batch = structure.unflatten(leaves)
            # Random numbers are never drawn in evaluation mode, but may be passed on.
            extras, known = {"train": False, "rngs": nnx.Rngs(0)}, signature(loss_fn)
            taken = {key: extras[key] for key in extras if key in known.parameters}
            result = loss_fn(model, batch, **taken)
        if not isinstance(result, tuple) or not result[1]:
            fact = f"predict: {name} returns losses but no outputs."
            fix = f"Return a pair of losses and a dict of outputs, or give {call}."
            raise MeshLayoutError(f"{fact} {fix}")
        return result[1]


def _without(batch: Batch, key: str | int) -> Any:
    """Returns the entries of a batch other than its weights."""
    if isinstance(batch, Mapping):
        return {name: leaf for name, leaf in batch.items() if name != key}
    has_weights = isinstance(batch, (tuple, list)) and key in (-1, len(batch) - 1)
    return batch[:-1] if has_weights else batch


def _made(make: Callable[..., Any], function: Any, options: Mapping[str, Any]) -> Any:
    """Returns a step of a function, with those of the options that it takes."""
    names = signature(make).parameters
    return make(function, **{name: x for name, x in options.items() if name in names})


def checked_metrics(step: str, metrics: object) -> Metrics:
    """Returns the metrics of a step, which may be overridden."""
    if not isinstance(metrics, Metrics):
        what = "(state, metrics), with " * (step == "train_step")
        shown = f"metrics of type ml.metrics.Metrics, got {_checks.shown(metrics)}."
        raise MeshLayoutError(f"{step} must return {what}{shown}")
    return metrics
