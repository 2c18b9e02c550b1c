"""Train and eval steps as hand-written Flax and Optax on one device, for `verify`.

A step compared with itself on one device agrees with itself even if it is wrong on
both. So the options of `make_train_step` and `make_eval_step` are implemented here a
second time, sharing no code with those steps: no call of a layer is intercepted,
padding is cut off instead of masked, losses are averaged here, microbatches are a
Python loop, and everything is computed in the parameters' dtype.
"""

import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn, nnx

from meshlayout import _paths
from meshlayout._annotations import Batch, DType, Leaf, PyTree
from meshlayout._batches import get_weights, num_examples
from meshlayout.losses import ModelLoss
from meshlayout.losses.penalties import COLLECTION
from meshlayout.metrics import Metrics, Throughput
from meshlayout.state import TrainState
from meshlayout.state.precision import LossScale, cast
from meshlayout.step.eval_step import EvalStep
from meshlayout.step.objective import Loss
from meshlayout.step.program import Plan
from meshlayout.step.train_step import TrainStep


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
        if count in (0, len(is_real)):
            return batch
        is_cut = bool(is_real[:count].all()) or _has_batch_norm(state)

        def rows(leaf: Leaf) -> Any:
            if np.shape(leaf)[:1] != is_real.shape:
                return leaf
            if is_cut:
                return leaf[is_real]
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
        return state, {**_means([parts], [1.0]), **computed(metrics)}


class PlainTrainStep(PlainStep):
    """A train step in plain Flax and Optax.

    Args:
        step: What `make_train_step` returned.
    """

    def __init__(self, step: TrainStep) -> None:
        self._plan: Plan = vars(step)["_plan"]
        super().__init__(self._plan.loss, self._plan.metrics)
        self._update = jax.jit(self._updated)

    def __call__(
        self, dtype: DType | None, state: TrainState, batch: Batch, skipped: int
    ) -> tuple[TrainState, dict[str, Any]]:
        """Runs a step, or all of a call.

        Args:
            dtype: What to compute in; None for the parameters' dtypes.
            state: The state, on one device.
            batch: A global batch on the host, or a list of them.
            skipped: How many steps float16 has skipped on the mesh: here, where
                nothing overflows, as many are left out.
        """
        batches = [batch] if self._plan.steps_per_call == 1 else batch
        state, metrics = self.prepared(state), Metrics(self._metrics)
        parts, weights, num_skipped = [], [], 0
        for rows in batches:
            state, losses, after, is_finite = self._step(
                dtype, state, rows, metrics, skipped
            )
            parts.append(losses)
            weights.append((self._count(rows) or 1e-30) if is_finite else 0.0)
            metrics = after if is_finite else metrics
            num_skipped += not is_finite
        values = {**_means(parts, weights), **computed(metrics)}
        if "skipped" in state.extra:
            values["skipped"] = num_skipped
        if self._plan.learning_rate is not None:
            values["learning_rate"] = self._plan.learning_rate(state.step - 1)
        return state, values

    def num_terms(self, batch: Batch) -> int:
        """Returns how many losses of a batch, or of the batches of a call, count."""
        batches = [batch] if self._plan.steps_per_call == 1 else batch
        return sum(map(super().num_terms, batches))

    def prepared(self, state: TrainState) -> TrainState:
        """Returns the initial state with the extra arrays that the step keeps."""
        update = self._plan.update
        extra = dict(state.extra)
        if update.ema is not None and "ema" not in extra:
            extra["ema"] = jax.tree.map(_as_average, state.params)
        if update.may_skip:
            extra.setdefault("skipped", jnp.int32(0))
        if update.has_loss_scale:
            extra.setdefault("loss_scale", LossScale.create())
        return state.replace(extra=extra)

    def _step(
        self,
        dtype: DType | None,
        state: TrainState,
        batch: Batch,
        metrics: Metrics,
        skipped: int,
    ) -> tuple[TrainState, Losses, Metrics, bool]:
        """Returns the next state, the loss, the metrics, and if all was finite."""
        count = self._plan.accumulate
        key = jax.random.fold_in(state.rng, state.step)
        total, model_state = self._total(batch), state.model_state
        grads: list[jax.Array] = []
        parts: Losses = {}
        for index in range(count):
            rows = _microbatch(batch, index, count)
            slopes, (losses, after, metrics) = self._run(
                dtype,
                state.replace(model_state=model_state),
                self._real_rows(rows, state),
                key if count == 1 else jax.random.fold_in(key, index),
                total,
                jnp.float32(1 / count),
                metrics,
            )
            if self._has_real_rows(rows):
                model_state = after
            else:
                model_state = jax.tree.map(_with_old_floats, after, model_state)
            grads = list(map(jnp.add, grads, slopes)) if grads else slopes
            parts = {name: parts.get(name, 0) + x for name, x in losses.items()}
        if not self._has_real_rows(batch):
            model_state = state.model_state
        parts |= self._penalties(state.params)
        new, is_finite = self._update(state, grads, parts, model_state, skipped)
        return new, parts, metrics, bool(is_finite)

    def _mask(self, params: PyTree) -> list[bool]:
        """Returns which parameters are trained."""
        pattern = re.compile(self._plan.update.trainable or "")
        leaves = _paths.flatten(params).leaves
        return [bool(pattern.search(leaf.path)) for leaf in leaves]

    def _computed(self, *args: Any) -> tuple[list[jax.Array], Forward]:
        """Returns the gradients of the trained parameters, and the forward pass."""
        dtype, state, *others = args
        leaves, treedef = jax.tree.flatten(state.params)
        mask = self._mask(state.params)

        def objective(trained: list[jax.Array]) -> tuple[jax.Array, Forward]:
            params = treedef.unflatten(_filled(mask, trained, leaves))
            forward = self._forward(dtype, state.replace(params=params), *others)
            return sum(forward[0].values(), jnp.float32(0)), forward

        return jax.grad(objective, has_aux=True)(list(itertools.compress(leaves, mask)))

    def _updated(
        self,
        state: TrainState,
        grads: list[jax.Array],
        parts: Losses,
        model_state: PyTree,
        skipped: int,
    ) -> tuple[TrainState, jax.Array]:
        """Returns the next state, and whether the loss and all gradients are finite."""
        update = self._plan.update
        leaves, treedef = jax.tree.flatten(state.params)
        mask = self._mask(state.params)
        for regularizer in self._loss.regularizers:
            slopes = jax.tree.leaves(jax.grad(regularizer)(state.params))
            grads = list(map(jnp.add, grads, itertools.compress(slopes, mask)))
        full = treedef.unflatten(_filled(mask, grads, map(jnp.zeros_like, leaves)))
        full = jax.tree.map(lambda g, x: g.astype(x.dtype), full, state.params)
        value = sum(parts.values(), jnp.float32(0))
        finite = [jnp.isfinite(x).all() for x in (value, *jax.tree.leaves(full))]
        if update.clip_norm is not None:
            clip = optax.clip_by_global_norm(update.clip_norm)
            full, _ = clip.update(full, clip.init(state.params))
        tx = optax.with_extra_args_support(state.tx)
        updates, opt_state = tx.update(full, state.opt_state, state.params, value=value)
        params = jax.tree.leaves(optax.apply_updates(state.params, updates))
        params = _filled(mask, itertools.compress(params, mask), leaves)
        after = state.replace(
            params=treedef.unflatten(params),
            opt_state=opt_state,
            step=state.step + 1,
            model_state=model_state,
        )
        if (decay := update.ema) is not None:
            average = jax.tree.map(
                lambda old, x: (decay * old + (1 - decay) * x).astype(old.dtype),
                state.extra["ema"],
                after.params,
            )
            after = after.replace(extra={**state.extra, "ema": average})
        if not update.may_skip:
            return after, jnp.ones((), bool)
        is_finite = jnp.stack(finite).all()
        if update.has_loss_scale:
            is_finite = jnp.asarray(skipped == 0)
        kept = jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), after, state)
        extra = dict(kept.extra)
        extra["skipped"] = state.extra["skipped"] + 1 - is_finite.astype("int32")
        if update.has_loss_scale:
            extra["loss_scale"] = state.extra["loss_scale"].after(is_finite)
        return kept.replace(extra=extra), is_finite


def _with_axes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Binds the axis names that layers written for `pmap` ask for, with size 1."""

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
        kept = {k: v for k, v in state.model_state.items() if k != COLLECTION}
        return state.program.module.bind(
            {"params": state.params, **kept},
            rngs={"params": key} if train else {},
            mutable=[*kept, COLLECTION],
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


def _filled(
    mask: list[bool], trained: Iterable[Any], others: Iterable[Any]
) -> list[Any]:
    """Merges the trained leaves back into all of them, each in its place."""
    new = iter(trained)
    return [
        next(new) if is_trained else x
        for x, is_trained in zip(others, mask, strict=True)
    ]


def _microbatch(batch: Batch, index: int, count: int) -> Batch:
    """Returns the rows of a microbatch: every `count`-th of the batch."""
    return jax.tree.map(
        lambda leaf: leaf[index::count] if np.ndim(leaf) else leaf, batch
    )


def _with_old_floats(after: jax.Array, before: jax.Array) -> jax.Array:
    """Returns an array after a microbatch of padding, which changes no floats."""
    return before if jnp.issubdtype(before.dtype, jnp.floating) else after


def _as_average(param: jax.Array) -> jax.Array:
    if jnp.issubdtype(param.dtype, jnp.floating):
        return param.astype(jnp.promote_types(param.dtype, "float32"))
    return param


def _means(parts: list[Losses], weights: list[float]) -> dict[str, Any]:
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


def computed(metrics: Metrics) -> dict[str, Any]:
    """Returns the values of metrics by name, except those that read a clock."""
    names = [
        name for name in metrics if not isinstance(metrics.metric(name), Throughput)
    ]
    return Metrics({name: metrics.metric(name) for name in names}).compute()
