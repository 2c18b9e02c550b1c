"""A train step as hand-written Flax and Optax on one device, for `verify`.

The options of `make_train_step` a second time, as a user would write them out in a
loop of plain Python: nothing here is fast, and nothing is shared with the step.
"""

import itertools
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshlayout import _paths
from meshlayout._annotations import Batch, DType, PyTree
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.state.precision import LossScale
from meshlayout.step.program import Plan
from meshlayout.step.train_step import TrainStep
from meshlayout.testing.plain_step import Forward, Losses, PlainStep, means


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
            skipped: How many steps float16 has skipped on the mesh. Here nothing
                overflows, so as many are left out.
        """
        batches = [batch] if self._plan.steps_per_call == 1 else batch
        state, metrics = self.prepared(state), Metrics(self._metrics)
        parts, weights, num_skipped = [], [], 0
        for rows in batches:
            state, losses, after, is_finite = self._step(
                dtype, state, rows, metrics, skipped
            )
            parts.append(losses)
            # A batch of padding alone shows its loss, and counts next to no other.
            weights.append((self._count(rows) or 1e-30) if is_finite else 0.0)
            metrics = after if is_finite else metrics
            num_skipped += not is_finite
        values = {**means(parts, weights), **metrics.compute()}
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
            # A microbatch of padding draws random numbers, and moves no averages.
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
        # Optax clips and updates whole trees: what is not trained has gradients of 0.
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
        # Weight decay moves parameters without gradients, too.
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
        if update.has_loss_scale:  # what overflows in float16 does not in float32
            is_finite = jnp.asarray(skipped == 0)
        chosen = jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), after, state)
        extra = dict(chosen.extra)
        extra["skipped"] = state.extra["skipped"] + 1 - is_finite.astype("int32")
        if update.has_loss_scale:
            extra["loss_scale"] = state.extra["loss_scale"].after(is_finite)
        return chosen.replace(extra=extra), is_finite


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
