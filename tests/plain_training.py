"""Training with the options of `make_train_step`, in plain Flax and Optax.

As a user would write it out on one device, in a loop of Python: nothing is masked or
intercepted, padding is cut off, and nothing is shared with the library's step.
"""

import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from meshlayout import losses


class Trained(NamedTuple):
    """What came of training."""

    losses: list[float]
    params: Any
    state: Any  # the model's other arrays
    average: Any  # the moving average of the parameters


def trained_by_hand(
    build,
    loss_fn,
    batches,
    tx,
    *,
    clip_norm=np.inf,
    ema=0.0,
    accumulate=1,
    denominator=None,
    l2=0.0,
    frozen=(),
):
    """Trains an NNX model; losses are per example, or a scalar."""
    graphdef, *states = nnx.split(build(), nnx.Param, ...)
    params, state = map(nnx.to_pure_dict, states)
    average, opt_state, values = params, tx.init(params), []
    takes_rngs = "rngs" in inspect.signature(loss_fn).parameters
    clip = optax.clip_by_global_norm(clip_norm)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def objective(params, state, rows, key, total):
        model = nnx.merge(graphdef, params, state)
        model.train()
        each = loss_fn(model, rows, **({"rngs": nnx.Rngs(key)} if takes_rngs else {}))
        recorded = nnx.to_pure_dict(nnx.pop(model, losses.ModelLoss))
        for value in jax.tree.leaves(recorded):
            each = each + value.astype("float32").mean(1)
        state = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))
        if not each.ndim:
            return each / accumulate, state
        return (each * rows.get("weight", 1)).sum() / total, state

    def penalty(params):
        return l2 * sum(
            jnp.square(x).sum() for x in jax.tree.leaves(params) if x.ndim > 1
        )

    for number, batch in enumerate(batches):
        size = sum(batch["weight"]) if "weight" in batch else len(batch["x"])
        key = jax.random.fold_in(jax.random.key(0), number)
        value, grads = jax.value_and_grad(penalty)(params)
        for index in range(accumulate):
            rows = {name: x[index::accumulate] for name, x in batch.items()}
            is_real = rows.get("weight", np.ones(len(rows["x"]))) > 0
            rows = {name: x[is_real] for name, x in rows.items()}
            part_key = key if accumulate == 1 else jax.random.fold_in(key, index)
            (part, state), slopes = objective(
                params, state, rows, part_key, denominator or size
            )
            value, grads = value + part, jax.tree.map(jnp.add, grads, slopes)
        grads, _ = clip.update(grads, clip.init(params))
        updates, opt_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates)
        params = {**new, **{name: params[name] for name in frozen}}
        average = jax.tree.map(lambda a, x: ema * a + (1 - ema) * x, average, params)
        values.append(float(value))
    return Trained(values, params, state, average)
