"""Train and eval steps as hand-written Flax and Optax on one device, for `verify`.

A step compared with itself on one device agrees with itself even if it is wrong on
both. So the options of `make_train_step` and `make_eval_step` are implemented here a
second time, sharing no code with those steps: no call of a layer is intercepted,
padding is cut off instead of masked, losses are averaged here, microbatches are a
Python loop, and everything is computed in the parameters' dtype.
"""

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn, nnx

from meshlayout import _paths
from meshlayout._annotations import Batch, Leaf, PyTree
from meshlayout._batches import get_weights, num_examples
from meshlayout.losses import ModelLoss
from meshlayout.losses.model_losses import COLLECTION
from meshlayout.metrics import Metrics, Throughput
from meshlayout.state import TrainState
from meshlayout.state.precision import LossScale, cast
from meshlayout.step.eval_step import EvalStep
from meshlayout.step.gradients import Loss
from meshlayout.step.program import Plan
from meshlayout.step.train_step import TrainStep
from meshlayout.testing.rounding_errors import coarsest


_UNBOUND_AXIS = re.compile(r"unbound axis name: (\w+)")


@dataclass(frozen=True)
class Forward:
    """The results of a loss function and a model for some rows.

    Attributes:
        parts: The parts of the loss by name, divided by the whole batch's denominator.
        model_state: The model's other arrays, after.
        metrics: The user's metrics, with these rows added.
    """

    parts: dict[str, jax.Array]
    model_state: PyTree
    metrics: Metrics


jax.tree_util.register_dataclass(Forward, ["parts", "model_state", "metrics"], [])


@dataclass(frozen=True)
class PlainLoss:
    """A loss function, and how its values become one number.

    Attributes:
        loss_fn: The user's function.
        key: Where a batch carries its weights.
        denominator: What the sum of losses is divided by.
        train: Whether the model trains.
        dtype: What parameters and inputs are cast to; None leaves them as they are.
    """

    loss_fn: Callable[..., Any]
    key: str | int
    denominator: str | float
    train: bool
    dtype: Any = None

    def total(self, batch: Batch) -> float:
        """Returns the denominator for a whole batch, padding included."""
        weights = get_weights(batch, self.key)
        if not isinstance(self.denominator, str):
            return float(self.denominator)
        if weights is None:
            return float(num_examples(batch))
        if self.denominator == "global_batch_size":
            return float(math.prod(np.shape(weights)))
        return float(np.sum(weights, dtype=np.float64)) or 1.0

    def weight(self, batch: Batch) -> float:
        """Returns how much a batch counts in a mean over several."""
        weights = get_weights(batch, self.key)
        if weights is None:
            return float(num_examples(batch))
        return float(np.sum(weights, dtype=np.float64)) or 1e-30

    def real_rows(self, batch: Batch, state: TrainState) -> Batch:
        """Returns a batch without padding, so that no statistics can count it.

        Rows of weight 0 between others stay where only their weights matter: without
        them, random numbers would be drawn for other rows.
        """
        weights = get_weights(batch, self.key)
        if weights is None:
            return batch
        weights = np.asarray(weights)
        is_real = (weights != 0).any(axis=tuple(range(1, weights.ndim)))
        count = int(is_real.sum())
        is_last = bool(is_real[:count].all())
        if count in (0, len(is_real)):
            return batch

        def rows(leaf: Leaf) -> Any:
            if np.shape(leaf)[:1] != is_real.shape:
                return leaf
            if is_last or _has_batch_norm(state):
                return leaf[is_real]
            mask = is_real.reshape(-1, *[1] * (np.ndim(leaf) - 1))
            return np.where(mask, leaf, np.zeros_like(leaf))

        return jax.tree.map(rows, batch)

    def __call__(
        self,
        state: TrainState,
        batch: Batch,
        key: jax.Array,
        total: jax.Array,
        fraction: jax.Array,
        metrics: Metrics,
    ) -> Forward:
        """Calls the loss function.

        Args:
            state: The state.
            batch: Real rows.
            key: For random numbers.
            total: The whole batch's denominator.
            fraction: The part of the whole batch that these rows are, for scalars.
            metrics: The user's metrics so far.
        """
        inputs, weights = batch, get_weights(batch, self.key)
        if self.dtype is not None:
            state = state.replace(params=cast(state.params, self.dtype))
            inputs = cast(batch, self.dtype)
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
        if jnp.ndim(losses):
            losses = _averaged(losses, weights)
        metrics = metrics.update_from(
            outputs=outputs,
            batch=batch,
            losses=losses if jnp.ndim(losses) else None,
            weights=weights,
        )
        return Forward(parts, model_state, metrics)

    def _called(
        self, state: TrainState, batch: Batch, key: jax.Array
    ) -> tuple[Any, Mapping[str, Any], dict[str, Any], PyTree]:
        asked = inspect.signature(self.loss_fn).parameters
        extras: dict[str, Any] = {"train": self.train} if "train" in asked else {}
        if "rngs" in asked:
            extras["rngs"] = nnx.Rngs(key)
        model = _model(state, key, train=self.train)
        result = self.loss_fn(model, batch, **extras)
        losses, outputs = result if isinstance(result, tuple) else (result, {})
        if isinstance(model, nn.Module):
            variables = dict(model.variables)
            recorded = _named(variables.get(COLLECTION, {}))
            after = {name: variables[name] for name in state.model_state}
            after |= (
                {COLLECTION: state.model_state[COLLECTION]}
                if (COLLECTION in state.model_state)
                else {}
            )
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


def _named(sown: PyTree) -> dict[str, Any]:
    """Returns recorded losses by path; the first of a name has no number."""
    leaves = _paths.flatten(sown).leaves
    return {re.sub("/0$", "", leaf.path): leaf.value for leaf in leaves}


def _has_batch_norm(state: TrainState) -> bool:
    if state.program.graphdef is None:
        return "batch_stats" in state.model_state
    return any(
        isinstance(part, nnx.BatchNorm) for _, part in state.model.iter_modules()
    )


class PlainEvalStep:
    """An eval step in plain Flax.

    Args:
        step: What `make_eval_step` returned.
    """

    def __init__(self, step: EvalStep) -> None:
        loss: Loss = vars(step)["_loss"]
        self._metrics: Mapping[str, Any] = vars(step)["_metrics"]
        self._regularizers = loss.regularizers
        self._loss = PlainLoss(
            loss.call.loss_fn, loss.weights, loss.denominator, train=False
        )
        self.dtypes = loss.call.policies.computes_in
        self._forward = jax.jit(_with_axes(self._loss))
        rounded = replace(self._loss, dtype=coarsest(self.dtypes))
        self._rounded_forward = jax.jit(_with_axes(rounded))

    def __call__(
        self, state: TrainState, batch: Batch, skipped: int, *, is_rounded: bool
    ) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state as it came, and the metrics by name."""
        rows = self._loss.real_rows(batch, state)
        total = jnp.float32(self._loss.total(batch))
        users = Metrics(self._metrics)
        call = self._rounded_forward if is_rounded else self._forward
        forward = call(state, rows, state.rng, total, jnp.float32(1), users)
        penalties = {part.name: part(state.params) for part in self._regularizers}
        return state, _values([{**forward.parts, **penalties}], [1.0], forward.metrics)

    def jaxpr(self, state: TrainState, batch: Batch) -> Any:
        """Returns the traced forward pass."""
        one = jnp.float32(1)
        rows = self._loss.real_rows(batch, state)
        users = Metrics(self._metrics)
        traced = self._forward.trace(state, rows, state.rng, one, one, users)
        return traced.jaxpr.jaxpr


class PlainTrainStep:
    """A train step in plain Flax and Optax.

    Args:
        step: What `make_train_step` returned.
    """

    def __init__(self, step: TrainStep) -> None:
        plan: Plan = vars(step)["_plan"]
        self._plan = plan
        loss = plan.loss
        self._loss = PlainLoss(
            loss.call.loss_fn, loss.weights, loss.denominator, train=True
        )
        self.dtypes = loss.call.policies.computes_in
        self._gradients = self._compiled(self._loss)
        rounded = replace(self._loss, dtype=coarsest(self.dtypes))
        self._rounded_gradients = self._compiled(rounded)
        self._update = jax.jit(self._updated)
        self._calls_take_lists = plan.steps_per_call != 1

    def _compiled(self, loss: PlainLoss) -> Any:
        return jax.jit(_with_axes(functools.partial(self._gradients_of, loss)))

    def __call__(
        self, state: TrainState, batch: Batch, skipped: int, *, is_rounded: bool
    ) -> tuple[TrainState, dict[str, Any]]:
        """Runs a step, or all of a call.

        Args:
            state: The state, on one device.
            batch: A global batch on the host, or a list of them.
            skipped: How many steps float16 has skipped on the mesh: here, where
                nothing overflows, as many are left out.
            is_rounded: Whether to compute in the step's dtype.
        """
        batches = batch if self._calls_take_lists else [batch]
        gradients = self._rounded_gradients if is_rounded else self._gradients
        state = self.prepared(state)
        users = Metrics(self._plan.metrics)
        parts, weights, notes = [], [], {}
        for one in batches:
            state, found, users, notes = self._step(
                gradients, state, one, users, skipped, notes
            )
            is_skipped = notes.get("is_skipped", False)
            parts.append(found)
            weights.append(0.0 if is_skipped else self._loss.weight(one))
        values = _values(parts, weights, users)
        if "skipped" in state.extra:
            values["skipped"] = notes["skipped"]
        if self._plan.learning_rate is not None:
            values["learning_rate"] = self._plan.learning_rate(state.step - 1)
        return state, values

    def jaxpr(self, state: TrainState, batch: Batch) -> Any:
        """Returns the traced gradient of a microbatch."""
        first = batch[0] if self._calls_take_lists else batch
        rows = self._loss.real_rows(_part(first, 0, self._plan.accumulate), state)
        one, users = jnp.float32(1), Metrics(self._plan.metrics)
        state = self.prepared(state)
        traced = self._gradients.trace(state, rows, state.rng, one, one, users)
        return traced.jaxpr.jaxpr

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
        gradients: Callable[..., tuple[list[jax.Array], Forward]],
        state: TrainState,
        batch: Batch,
        users: Metrics,
        skipped: int,
        notes: dict[str, Any],
    ) -> tuple[TrainState, dict[str, jax.Array], Metrics, dict[str, Any]]:
        count = self._plan.accumulate
        key = jax.random.fold_in(state.rng, state.step)
        total = jnp.float32(self._loss.total(batch))
        before, model_state, metrics = state, state.model_state, users
        grads: list[jax.Array] = []
        parts: dict[str, jax.Array] = {}
        for index in range(count):
            part = _part(batch, index, count)
            part_key = key if count == 1 else jax.random.fold_in(key, index)
            part_grads, forward = gradients(
                before.replace(model_state=model_state),
                self._loss.real_rows(part, state),
                part_key,
                total,
                jnp.float32(1 / count),
                metrics,
            )
            metrics = forward.metrics
            model_state = self._seen(part, model_state, forward.model_state)
            grads = _sum(grads, part_grads)
            parts = {
                name: parts.get(name, 0) + value
                for name, value in forward.parts.items()
            }
        if count == 1 and not self._is_any_real(batch):
            model_state = before.model_state
        penalties = {
            part.name: part(state.params) for part in self._plan.loss.regularizers
        }
        new, is_finite = self._update(
            before, grads, {**parts, **penalties}, model_state, skipped
        )
        lost = 0 if is_finite is None else 1 - int(is_finite)
        notes = {"skipped": notes.get("skipped", 0) + lost, "is_skipped": bool(lost)}
        return new, {**parts, **penalties}, users if lost else metrics, notes

    def _is_any_real(self, batch: Batch) -> bool:
        weights = get_weights(batch, self._loss.key)
        return weights is None or bool(np.any(np.asarray(weights) != 0))

    def _seen(self, batch: Batch, before: PyTree, after: PyTree) -> PyTree:
        """Returns the state after a microbatch; padding alone changes no floats."""
        if self._is_any_real(batch):
            return after
        return jax.tree.map(
            lambda a, b: b if jnp.issubdtype(b.dtype, jnp.floating) else a,
            after,
            before,
        )

    def _mask(self, params: PyTree) -> list[bool]:
        pattern = re.compile(self._plan.update.trainable or "")
        leaves = _paths.flatten(params).leaves
        return [bool(pattern.search(leaf.path)) for leaf in leaves]

    def _gradients_of(
        self, loss: PlainLoss, state: TrainState, *args: Any
    ) -> tuple[list[jax.Array], Forward]:
        leaves, treedef = jax.tree.flatten(state.params)
        mask = self._mask(state.params)

        def objective(trained: list[jax.Array]) -> tuple[jax.Array, Forward]:
            params = _filled(mask, trained, leaves)
            forward = loss(state.replace(params=treedef.unflatten(params)), *args)
            return sum(forward.parts.values(), jnp.float32(0)), forward

        trained = [x for x, is_in in zip(leaves, mask, strict=True) if is_in]
        return jax.grad(objective, has_aux=True)(trained)

    def _updated(
        self,
        state: TrainState,
        grads: list[jax.Array],
        parts: dict[str, jax.Array],
        model_state: PyTree,
        skipped: int,
    ) -> tuple[TrainState, jax.Array | None]:
        plan, update = self._plan, self._plan.update
        leaves, treedef = jax.tree.flatten(state.params)
        mask = self._mask(state.params)
        zeros = list(map(jnp.zeros_like, leaves))
        full = _filled(mask, grads, zeros)
        for regularizer in plan.loss.regularizers:
            slopes = jax.tree.leaves(jax.grad(regularizer)(state.params))
            full = [
                g + slope if is_in else g
                for g, slope, is_in in zip(full, slopes, mask, strict=True)
            ]
        full = treedef.unflatten(full)
        full = jax.tree.map(lambda g, x: g.astype(x.dtype), full, state.params)
        value = sum(parts.values(), jnp.float32(0))
        is_finite = jnp.isfinite(value)
        for leaf in jax.tree.leaves(full):
            is_finite &= jnp.isfinite(leaf).all()
        if update.clip_norm is not None:
            clip = optax.clip_by_global_norm(update.clip_norm)
            full, _ = clip.update(full, clip.init(state.params))
        tx = optax.with_extra_args_support(state.tx)
        updates, opt_state = tx.update(full, state.opt_state, state.params, value=value)
        params = optax.apply_updates(state.params, updates)
        trained = zip(jax.tree.leaves(params), mask, strict=True)
        chosen = [x for x, is_in in trained if is_in]
        params = treedef.unflatten(_filled(mask, chosen, leaves))
        extra = dict(state.extra)
        if (decay := update.ema) is not None:
            extra["ema"] = jax.tree.map(
                lambda old, x: (decay * old + (1 - decay) * x).astype(old.dtype),
                extra["ema"],
                params,
            )
        after = state.replace(
            params=params,
            opt_state=opt_state,
            step=state.step + 1,
            model_state=model_state,
            extra=extra,
        )
        if not update.may_skip:
            return after, None
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


def _filled(mask: list[bool], chosen: list[Any], rest: list[Any]) -> list[Any]:
    """Merges the chosen leaves back into the rest, each in its place."""
    new = iter(chosen)
    return [next(new) if is_in else x for x, is_in in zip(rest, mask, strict=True)]


def _part(batch: Batch, index: int, count: int) -> Batch:
    """Returns the rows of a microbatch: every `num_microbatches`-th of the batch."""
    return jax.tree.map(
        lambda leaf: leaf[index::count] if np.ndim(leaf) else leaf, batch
    )


def _as_average(param: jax.Array) -> jax.Array:
    if jnp.issubdtype(param.dtype, jnp.floating):
        return param.astype(jnp.promote_types(param.dtype, "float32"))
    return param


def _sum(sums: list[jax.Array], grads: list[jax.Array]) -> list[jax.Array]:
    return [a + b for a, b in zip(sums, grads, strict=True)] if sums else grads


def _values(
    parts: list[dict[str, jax.Array]], weights: list[float], users: Metrics
) -> dict[str, Any]:
    """Returns a step's metrics by name: means over a call's batches."""
    named = [
        {"loss": sum(one.values()), **(one if len(one) > 1 else {})} for one in parts
    ]
    total = sum(weights)
    means = {
        name: np.nan
        if not total
        else sum(
            float(one[name]) * w for one, w in zip(named, weights, strict=True) if w
        )
        / total
        for name in named[0]
    }
    return {**means, **computed(users)}


def computed(metrics: Metrics) -> dict[str, Any]:
    """Returns the values of metrics by name, but for those that read a clock."""
    names = [
        name for name in metrics if not isinstance(metrics.metric(name), Throughput)
    ]
    return Metrics({name: metrics.metric(name) for name in names}).compute()
