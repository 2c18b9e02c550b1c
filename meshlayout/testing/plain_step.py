"""A forward pass as hand-written Flax on one device, for `verify`.

A step compared with itself on one device agrees with itself even if it is wrong on
both. So the options of `make_train_step`, `make_eval_step` and `make_predict_step` are
implemented a second time, here and in `plain_train_step.py`, sharing no code with those
steps: no call of a layer is intercepted, padding is cut off instead of masked, losses
are averaged here, microbatches are a Python loop, and everything is computed in the
parameters' dtype.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn, nnx

from meshlayout import _paths
from meshlayout._annotations import Batch, DType, Leaf, PyTree
from meshlayout._batches import get_weights, num_examples
from meshlayout.losses import ModelLoss
from meshlayout.losses.penalties import COLLECTION
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.state.precision import cast
from meshlayout.step.eval_step import EvalStep, PredictStep
from meshlayout.step.objective import Loss


Losses: TypeAlias = dict[str, jax.Array]
"""The parts of the loss by name, divided by the whole batch's denominator."""

Forward: TypeAlias = tuple[Losses, PyTree, Metrics]
"""Parts of the loss, the model's other arrays after, and the user's metrics after."""

_UNBOUND_AXIS = re.compile(r"unbound axis name: (\w+)")


class PlainStep:
    """What train and eval steps have in common: the model's forward pass.

    Args:
        loss: The options of the loss.
        metrics: The user's metrics, by name.

    Attributes:
        dtypes: What the step computes in.
        jaxpr: The program of the first call; None before.
    """

    def __init__(self, loss: Loss, metrics: Mapping[str, Any]) -> None:
        self._loss, self._metrics = loss, metrics
        self.dtypes = loss.policies.computes_in
        self.jaxpr: Any = None
        # Compiled: rounding is measured by running it eight more times.
        self._program = jax.jit(_with_axes(self._computed), static_argnums=0)

    def prepared(self, state: TrainState) -> TrainState:
        """Returns the initial state with the extra arrays that the step keeps."""
        return state

    def num_terms(self, batch: Batch) -> int:
        """Returns how many losses of a batch count."""
        weights = self._weights(batch)
        if weights is None:
            return num_examples(batch)
        return max(int(np.count_nonzero(weights)), 1)

    def _computed(self, *args: Any) -> Any:
        """Returns what is compiled; the arguments are those of `_forward`."""
        return self._forward(*args)

    def _run(self, *args: Any) -> Any:
        if self.jaxpr is None:
            self.jaxpr = self._program.trace(*args).jaxpr.jaxpr
        return self._program(*args)

    def _forward(
        self,
        dtype: DType | None,
        state: TrainState,
        batch: Batch,
        key: jax.Array,
        total: jax.Array,
        fraction: jax.Array,
        metrics: Metrics,
    ) -> Forward:
        """Calls the loss function.

        Args:
            dtype: What parameters and inputs are cast to; None leaves them unchanged.
            state: The state.
            batch: Real rows.
            key: For random numbers.
            total: The whole batch's denominator.
            fraction: The part of the whole batch that these rows are, for scalars.
            metrics: The user's metrics so far.
        """
        inputs, weights = batch, self._weights(batch)
        if dtype is not None:
            state = state.replace(params=cast(state.params, dtype))
            inputs = cast(batch, dtype)
        losses, outputs, recorded, model_state = self._called(state, inputs, key)
        named = {"data_loss": losses, **recorded}
        parts = {
            name: (
                value.astype("float32") * fraction
                if jnp.ndim(value) == 0
                else _weighted(value, weights) / total
            )
            for name, value in named.items()
        }
        metrics = metrics.update_from(
            outputs=outputs,
            batch=batch,
            losses=_averaged(losses, weights) if jnp.ndim(losses) else None,
            weights=weights,
        )
        return parts, model_state, metrics

    def _called(
        self, state: TrainState, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, Mapping[str, Any], Losses, PyTree]:
        """Returns losses, outputs, recorded losses, and the model's state after."""
        loss_fn, train = self._loss.loss_fn, self._loss.train
        asked = inspect.signature(loss_fn).parameters
        extras: dict[str, Any] = {"train": train} if "train" in asked else {}
        if "rngs" in asked:
            extras["rngs"] = nnx.Rngs(key)
        model = _model(state, key, train=train)
        result = loss_fn(model, batch, **extras)
        losses, outputs = result if isinstance(result, tuple) else (result, {})
        if isinstance(model, nn.Module):
            variables = dict(model.variables)
            recorded = _named(variables.pop(COLLECTION, {}))
            before = state.model_state
            after = {name: variables.get(name, x) for name, x in before.items()}
            return losses, outputs, recorded, after
        recorded = _named(nnx.to_pure_dict(nnx.pop(model, ModelLoss)))
        sown = _named(nnx.to_pure_dict(nnx.pop(model, nnx.Intermediate)))
        recorded |= {
            path: value
            for path, value in sown.items()
            if re.search("(^|_)loss(es)?$", path.rpartition("/")[2])
        }
        after = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))
        return losses, outputs, recorded, after

    def _penalties(self, params: PyTree) -> Losses:
        return {part.name: part(params) for part in self._loss.regularizers}

    def _weights(self, batch: Batch) -> Any:
        return get_weights(batch, self._loss.weights)

    def _count(self, batch: Batch) -> float:
        """Returns the sum of a batch's weights."""
        weights = self._weights(batch)
        if weights is None:
            return float(num_examples(batch))
        return float(np.sum(weights, dtype=np.float64))

    def _total(self, batch: Batch) -> jax.Array:
        """Returns the denominator for a whole batch, padding included."""
        denominator, weights = self._loss.denominator, self._weights(batch)
        if not isinstance(denominator, str):
            return jnp.float32(denominator)
        if denominator == "global_batch_size" and weights is not None:
            return jnp.float32(math.prod(np.shape(weights)))
        # Padding alone weighs 0, and 0 divided by 0 is NaN.
        return jnp.float32(self._count(batch) or 1.0)

    def _has_real_rows(self, batch: Batch) -> bool:
        weights = self._weights(batch)
        return weights is None or bool(np.any(np.asarray(weights) != 0))

    def _real_rows(self, batch: Batch, state: TrainState) -> Batch:
        """Returns a batch without padding, so that no statistics can count it.

        Rows of weight 0 between others stay where only their weights matter: without
        them, random numbers would be drawn for other rows.
        """
        weights = self._weights(batch)
        if weights is None:
            return batch
        weights = np.asarray(weights)
        is_real = (weights != 0).any(axis=tuple(range(1, weights.ndim)))
        count = int(is_real.sum())
        if count in (0, len(is_real)):  # without any row there would be no statistics
            return batch
        is_cut = bool(is_real[:count].all()) or _has_batch_norm(state)

        def rows(leaf: Leaf) -> Any:
            if np.shape(leaf)[:1] != is_real.shape:
                return leaf
            if is_cut:
                return leaf[is_real]
            # Whatever is in them, NaN too, must not matter: the step sees it, this not.
            mask = is_real.reshape(-1, *[1] * (np.ndim(leaf) - 1))
            return np.where(mask, leaf, np.zeros_like(leaf))

        return jax.tree.map(rows, batch)


class PlainEvalStep(PlainStep):
    """An eval step in plain Flax.

    Args:
        step: What `make_eval_step` returned.
    """

    def __init__(self, step: EvalStep) -> None:
        super().__init__(vars(step)["_loss"], vars(step)["_metrics"])

    def __call__(
        self, dtype: DType | None, state: TrainState, batch: Batch, skipped: int
    ) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state as it came, and the metrics by name."""
        rows, users = self._real_rows(batch, state), Metrics(self._metrics)
        parts, _, metrics = self._run(
            dtype, state, rows, state.rng, self._total(batch), jnp.float32(1), users
        )
        parts |= self._penalties(state.params)
        return state, {**means([parts], [1.0]), **metrics.compute()}


class PlainPredictStep(PlainStep):
    """A predict step in plain Flax.

    Args:
        step: What `make_predict_step` returned.
    """

    def __init__(self, step: PredictStep) -> None:
        loss = Loss(step.predict_fn, step.policies, "weight", "real", ())
        super().__init__(loss, {})

    def __call__(
        self, dtype: DType | None, state: TrainState, batch: Batch, skipped: int
    ) -> tuple[TrainState, PyTree]:
        """Returns the state unchanged, and the predictions."""
        return state, self._run(dtype, state, batch)

    def _computed(self, *args: Any) -> Any:
        dtype, state, batch = args
        # All in one dtype, coarser than the step's, which keeps some layers in float32.
        state = state.replace(params=cast(state.params, dtype))
        model = _model(state, state.rng, train=False)
        predictions = self._loss.loss_fn(model, cast(batch, dtype))
        return cast(predictions, None if dtype is None else jnp.float32)


def _with_axes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Binds the axis names that layers written for `pmap` ask for, with size 1.

    JAX's errors name them, one per attempt.
    """

    def bound(*args: Any) -> Any:
        names: list[str] = []
        while True:
            call = function
            for name in names:
                call = jax.vmap(
                    call, in_axes=None, out_axes=None, axis_name=name, axis_size=1
                )
            try:
                return call(*args)
            except NameError as error:
                match = _UNBOUND_AXIS.search(str(error))
                if match is None or match[1] in names:
                    raise
                names.append(match[1])

    return bound


def _model(state: TrainState, key: jax.Array, *, train: bool) -> Any:
    if state.program.graphdef is None:
        others = {k: v for k, v in state.model_state.items() if k != COLLECTION}
        return state.program.module.bind(
            {"params": state.params, **others},
            rngs={"params": key} if train else {},
            mutable=[*others, COLLECTION],
        )
    model = state.model
    model.train() if train else model.eval()
    return model


def _has_batch_norm(state: TrainState) -> bool:
    if state.program.graphdef is None:
        return "batch_stats" in state.model_state
    return any(
        isinstance(part, nnx.BatchNorm) for _, part in state.model.iter_modules()
    )


def _named(sown: PyTree) -> Losses:
    """Returns recorded losses by path; the first of a name has no number."""
    leaves = _paths.flatten(sown).leaves
    return {re.sub("/0$", "", leaf.path): leaf.value for leaf in leaves}


def _averaged(values: jax.Array, weights: Any) -> jax.Array:
    """Returns one value per weight, or per row: the mean over the other dims."""
    dims = 1 if weights is None else np.ndim(weights)
    values = values.astype("float32")
    return values.reshape(*values.shape[:dims], -1).mean(-1)


def _weighted(values: jax.Array, weights: Any) -> jax.Array:
    values = _averaged(values, weights)
    if weights is None:
        return values.sum()
    is_real = jnp.asarray(weights) != 0
    return jnp.where(is_real, values * weights, 0).sum()


def means(parts: list[Losses], weights: list[float]) -> dict[str, Any]:
    """Returns the loss and its parts by name: weighted means over a call's batches."""
    rows = [
        {"loss": sum(losses.values()), **(losses if len(losses) > 1 else {})}
        for losses in parts
    ]
    if not any(weights):
        return dict.fromkeys(rows[0], np.nan)
    return {
        name: np.average(
            [float(row[name]) for row, w in zip(rows, weights, strict=True) if w],
            weights=[w for w in weights if w],
        )
        for name in rows[0]
    }


def coarsest(dtypes: Iterable[DType]) -> Any:
    """Returns the floating-point dtype that rounds most; None if there is none.

    Example:
        >>> coarsest(["float32", "bfloat16", "int32"])
        dtype(bfloat16)
    """
    floats = [jnp.dtype(x) for x in dtypes if jnp.issubdtype(x, jnp.inexact)]
    return max(floats, key=lambda dtype: jnp.finfo(dtype).eps, default=None)
