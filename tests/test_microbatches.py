"""Microbatches mean the same on every mesh, also where examples meet."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml


RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 4)).astype("float32")
COUNTS = [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 4]


def contrastive(model, batch):
    z = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(len(z)))


def own_batch_norm(model, batch):
    h = model(batch["x"])
    h = (h - h.mean(0)[None]) / jnp.sqrt(h.var(0) + 1e-3)[None]
    return jnp.square(h - 1)


def mixup(model, batch):
    x = batch["x"]
    order = jax.random.permutation(jax.random.key(7), len(x))
    return jnp.square(model(0.7 * x + 0.3 * x[order]) - 1)


def rolled(model, batch):
    return jnp.square(model(batch["x"] + 0.5 * jnp.roll(batch["x"], 1, 0)))


def scalar(model, batch):
    """Away from zero: a mean that is nearly zero would make rounding large."""
    made = model(batch["x"])
    return jnp.square(made).mean() / (1 + jnp.square(made.mean()))


def linear():
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


def without_key(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def two_steps(loss_fn, devices, batch, build=linear, **options):
    """Returns the losses of two steps and the parameters after them."""
    mesh = ml.create_mesh({"batch": devices}, devices=jax.devices()[:devices])
    state = ml.TrainState.create(build, optax.sgd(0.1), ml.LayoutMap(mesh, {}))
    step = ml.make_train_step(loss_fn, **options)
    losses = []
    for _ in range(2):
        on_mesh = ml.relayout(batch, mesh.layout("batch", ...))
        state, metrics = step(state, on_mesh)
        losses.append(float(metrics["loss"]))
    arrays = (state.params, state.model_state)
    return losses, jax.tree.map(np.asarray, jax.tree.map(without_key, arrays))


def by_hand(loss_fn, count):
    """The same on one device, one microbatch after another, in plain JAX."""
    model = linear()
    losses = []
    for _ in range(2):
        graphdef, params = nnx.split(model)

        def loss(params, graphdef=graphdef):
            parts = [
                loss_fn(nnx.merge(graphdef, params), {"x": X[i::count]}).mean()
                for i in range(count)
            ]
            return sum(parts) / count

        value, grads = jax.value_and_grad(loss)(params)
        losses.append(float(value))
        model = nnx.merge(
            graphdef, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        )
    return losses, nnx.to_pure_dict(nnx.state(model))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    "loss_fn",
    [
        # Soon in test_same_numbers.
        pytest.param(contrastive, marks=pytest.mark.slow),
        own_batch_norm,
        mixup,
        pytest.param(rolled, marks=pytest.mark.slow),
        scalar,
    ],
)
def test_losses_in_which_examples_meet_are_the_same_on_every_mesh(loss_fn, count):
    losses, params = by_hand(loss_fn, count)
    for devices in (1, 8):
        found = two_steps(loss_fn, devices, {"x": X}, accumulate=count)
        # float32 sums in another order
        np.testing.assert_allclose(found[0], losses, rtol=1e-5)
        for name, value in params.items():
            np.testing.assert_allclose(found[1][0][name], value, rtol=1e-4, atol=1e-6)


class Looking(nnx.Module):
    """Keeps what it has seen, draws random numbers, and records a scalar."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        made = self.dropout(self.norm(self.linear(x)))
        ml.losses.record(self, "spread", jnp.square(made.mean(axis=0)).sum())
        return made


@pytest.mark.parametrize("count", COUNTS)
def test_draws_statistics_and_recorded_scalars_are_the_same_on_every_mesh(count):
    def loss_fn(model, batch, rngs):
        noise = jax.random.normal(rngs.noise(), batch["x"].shape)
        return jnp.square(model(batch["x"] + 0.1 * noise))

    options = {"build": lambda: Looking(nnx.Rngs(0)), "accumulate": count}
    alone, sharded = (two_steps(loss_fn, n, {"x": X}, **options) for n in (1, 8))
    assert float(alone[1][1]["calls"]) == 2 * count
    np.testing.assert_allclose(sharded[0], alone[0], rtol=1e-5)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, sharded[1], alone[1])


def test_a_microbatch_of_padding_leaves_statistics_alone():
    """Every second row is padding, and so is every second microbatch of two."""
    weights = np.tile(np.array([1, 0], "float32"), 16)
    found = two_steps(
        lambda model, batch: jnp.square(model(batch["x"])),
        8,
        {"x": np.where(weights[:, None] > 0, X, 50), "weight": weights},
        build=lambda: nnx.BatchNorm(4, momentum=0.5, rngs=nnx.Rngs(0)),
        accumulate=2,
    )
    mean = X[::2].mean(axis=0)
    np.testing.assert_allclose(found[1][1]["mean"], 0.75 * mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2])
def test_a_plain_jax_constraint_in_the_model_is_taken(count):
    def loss_fn(model, batch):
        rows = jax.sharding.NamedSharding(
            ml.create_mesh({"batch": 8}).jax_mesh, jax.sharding.PartitionSpec("batch")
        )
        return jax.lax.with_sharding_constraint(jnp.square(model(batch["x"])), rows)

    plain = by_hand(lambda model, batch: jnp.square(model(batch["x"])), 1)
    found = two_steps(loss_fn, 8, {"x": X}, accumulate=count)
    np.testing.assert_allclose(found[0], plain[0], rtol=1e-5)
