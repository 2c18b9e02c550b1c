"""Small states, batches and losses, which the tests of steps share."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshlayout as ml
from meshlayout import losses


RATE = 0.1
_rng = np.random.default_rng(0)
X = _rng.normal(size=(16, 4)).astype("float32")
Y = _rng.normal(size=(16, 4)).astype("float32")
DATA = {"x": X, "y": Y}


def mesh_of(devices=None, **axes):
    """A mesh of these axes, on the first devices or on those of these numbers."""
    numbers = range(np.prod([*axes.values()])) if devices is None else devices
    return ml.create_mesh(axes, devices=[jax.devices()[number] for number in numbers])


def on(mesh, batch):
    """A batch with its rows over the axis `batch`."""
    return ml.relayout(batch, mesh.layout("batch", ...))


def linear():
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


def create(mesh, build=linear, tx=None, rules=None, module=None, **options):
    """A train state: SGD, and whole on every device, if nothing else is said."""
    tx, layouts = tx or optax.sgd(RATE), ml.LayoutMap(mesh, rules or {})
    return ml.TrainState.create(build, tx, layouts, module=module, **options)


def create_linen(mesh, module, *args, **options):
    """A train state of a Linen module that is called with X and these arguments."""

    def build():
        return module.init(jax.random.key(0), jnp.asarray(X), *args)

    return create(mesh, build, module=module, **options)


@flax.struct.dataclass
class MeanEach:
    """A user's own metric, that starts with Python's numbers."""

    total: Any = 0.0
    count: Any = 0

    @classmethod
    def empty(cls):
        return cls()

    @classmethod
    def from_model_output(cls, each, weights, missing=3):
        assert missing == 3
        return cls((each * weights).sum(), weights.sum())

    def merge(self, other):
        return type(self)(self.total + other.total, self.count + other.count)

    def compute(self):
        return self.total / self.count


class Convolutions(nnx.Module):
    """Statistics, random numbers, a recorded loss; and a gradient that is rounding."""

    def __init__(self, dtype=None):
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(2, 4, (3, 3), dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(4, dtype=dtype, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(4, 1, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x))).mean((1, 2))
        losses.record(self, "activity", 0.1 * jnp.square(x))
        return self.out(self.drop(x))[:, 0]


def image_batch(seed=0, rows=16, real=11):
    """Images, of which the last ones are padding."""
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0.5, 2, rows).astype("float32") * (np.arange(rows) < real)
    images = rng.normal(size=(rows, 4, 4, 2)).astype("float32")
    images[real:] = 99
    return {"x": images, "y": images[:, 0, 0, 0], "weight": weights}


def alone(state):
    """The module of a state, or Linen's variables, on one device."""
    state = jax.tree.map(jnp.copy, jax.device_put(state, jax.devices()[0]))
    if state.program.module is None:
        return state.model
    return {"params": state.params, **state.model_state}


def squares(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"])


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


def assert_close(found, expected, rtol=2e-5, atol=2e-6):
    """Asserts that trees are equal but for the order of float32 sums."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol),
        on_host(found),
        on_host(expected),
    )


def linear_by_hand(params, shares=1 / 64, x=X, y=Y):
    """The gradients and the loss of a linear model, squares times shares, in NumPy."""
    error = x @ params["kernel"] + params["bias"] - y
    slopes = 2 * error * shares
    grads = {"kernel": x.T @ slopes, "bias": slopes.sum(0)}
    return grads, (np.square(error) * shares).sum()


def descended(params, grads, rate=RATE):
    """Parameters after one step of SGD."""
    return jax.tree.map(lambda x, g: x - rate * g, params, grads)
