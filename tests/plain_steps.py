"""The options of `make_train_step` a second time, in plain Flax and Optax.

As a user would write them out on one device, in a loop of plain Python: nothing is
masked or intercepted, padding is cut off, and nothing is shared with the library's step.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshlayout as ml
from meshlayout import _paths


class PlainTrainStep:
    """Trains an NNX model on one device, with a loss that returns losses and outputs.

    Attributes:
        params: The parameters, by path.
        average: Their moving average.
        state: The model's other arrays.
    """

    def __init__(
        self,
        state: ml.TrainState,
        loss_fn: Callable[..., Any],
        *,
        clip_norm: float | None = None,
        ema: float | None = None,
        accumulate: int = 1,
        denominator: float | None = None,
        l2: float = 0.0,
    ) -> None:
        graphdef, params, rest = nnx.split(state.model, nnx.Param, ...)
        self._graphdef, self._loss_fn = graphdef, loss_fn
        self.params = _on_one_device(nnx.to_pure_dict(params))
        self.state = _on_one_device(nnx.to_pure_dict(rest))
        self.average = self.params
        self._clip = optax.clip_by_global_norm(clip_norm) if clip_norm else None
        self._ema, self._accumulate = ema, accumulate
        self._denominator, self._l2 = denominator, l2
        self._tx = state.tx
        self._opt_state = _on_one_device(state.opt_state)

    def __call__(self, batch: dict[str, np.ndarray]) -> float:
        """Trains on one batch with weights, and returns its loss."""
        total = self._denominator or float(batch["weight"].sum())
        sums, grads = 0.0, jax.tree.map(jnp.zeros_like, self.params)
        for index in range(self._accumulate):
            rows = {name: x[index :: self._accumulate] for name, x in batch.items()}
            rows = {name: x[rows["weight"] != 0] for name, x in rows.items()}
            (loss, self.state), slopes = jax.value_and_grad(self._loss, has_aux=True)(
                self.params, rows, total
            )
            grads = jax.tree.map(jnp.add, grads, slopes)
            sums += float(loss)
        penalty, slopes = jax.value_and_grad(self._penalty)(self.params)
        grads = jax.tree.map(jnp.add, grads, slopes)
        if self._clip is not None:
            grads, _ = self._clip.update(grads, self._clip.init(self.params))
        updates, self._opt_state = self._tx.update(grads, self._opt_state, self.params)
        self.params = optax.apply_updates(self.params, updates)
        if self._ema is not None:
            self.average = optax.incremental_update(
                self.params, self.average, 1 - self._ema
            )
        return sums + float(penalty)

    def _loss(self, params: Any, rows: Any, total: float) -> tuple[jax.Array, Any]:
        model = nnx.merge(self._graphdef, params, self.state)
        model.train()
        losses, _ = self._loss_fn(model, rows)
        recorded = nnx.to_pure_dict(nnx.pop(model, ml.losses.ModelLoss))
        for sown in jax.tree.leaves(recorded):
            losses = losses + sown.reshape(len(losses), -1).mean(1)
        rest = nnx.state(model, nnx.Not(nnx.Param))
        return losses.sum() / total, nnx.to_pure_dict(rest)

    def _penalty(self, params: Any) -> jax.Array:
        leaves = _paths.flatten(params).leaves
        kernels = [leaf.value for leaf in leaves if "kernel" in leaf.path]
        return self._l2 * sum((jnp.square(x).sum() for x in kernels), jnp.float32(0))


def _on_one_device(tree: Any) -> Any:
    def copied(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(np.array(jax.random.key_data(leaf)))
        return jnp.array(np.asarray(leaf))

    return jax.tree.map(copied, tree)
