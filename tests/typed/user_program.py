"""A user's program, as a type checker sees it; tests/test_types.py runs pyright on it.

Nothing here is run. `assert_type` fails the check if a type has been lost on the way.
"""

from typing import Any, assert_type

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import meshlayout as ml


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(4, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(x)


def build() -> Net:
    return Net(nnx.Rngs(0))


dense = nn.Dense(8)


def variables() -> dict[str, Any]:
    return dict(dense.init(jax.random.key(0), jnp.ones((1, 4))))


def program() -> None:
    """Everything that a program does; never called."""
    mesh = ml.create_mesh({"batch": 2, "model": 4})
    layouts = ml.LayoutMap(mesh, {"kernel": (None, "model")})
    optimizer = optax.adam(1e-3)

    # Creation keeps the type of what the builder returns.
    assert_type(ml.create(build, layouts), Net)
    description = ml.describe(build, layouts)
    assert_type(description.abstract, Net)
    assert_type(description.create(), Net)
    assert_type(ml.create(lambda: {"w": jnp.ones(3)}, layouts), dict[str, jax.Array])

    # A train state knows its model.
    state = ml.TrainState.create(build, optimizer, layouts)
    assert_type(state, ml.TrainState[Net])
    assert_type(state.model, Net)
    assert_type(state.model(jnp.ones((2, 4))), jax.Array)
    assert_type(state.replace(step=state.step).model, Net)
    assert_type(state.apply_gradients(state.params), ml.TrainState[Net])
    assert_type(
        ml.TrainState.describe(build, optimizer, layouts).create(), ml.TrainState[Net]
    )

    linen_state = ml.TrainState.create(variables, optimizer, layouts, module=dense)
    assert_type(linen_state.model, nn.Dense)

    # Metrics keep their class.
    accuracy = ml.metrics.Accuracy(top_k=2)
    assert_type(
        accuracy.update(jnp.ones((2, 4)), jnp.zeros(2, int)), ml.metrics.Accuracy
    )
    assert_type(accuracy.merge(accuracy).empty(), ml.metrics.Accuracy)
    assert_type(accuracy.compute(), jax.Array)
    assert_type(ml.losses.l2(0.1), ml.losses.Regularizer)
    assert_type(ml.losses.per_example(jnp.ones((2, 3))), jax.Array)
