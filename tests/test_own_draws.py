"""A replica draws its rows of what is drawn for all, and nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from hypothesis import given, settings, strategies as st

import meshlayout as ml
from meshlayout import _jax
from meshlayout.step.own_draws import OwnDraws, draws_like
from tests.same_bits import assert_same_bits
from tests.test_train_step import reduced_in_loops


IMPLS = ["threefry2x32", "rbg", "unsafe_rbg"]
DRAWS = {
    "bits of 8": lambda key, shape: jax.random.bits(key, shape, "uint8"),
    "bits of 16": lambda key, shape: jax.random.bits(key, shape, "uint16"),
    "bits of 32": jax.random.bits,
    "uniform": jax.random.uniform,
    "normal": jax.random.normal,
    "bernoulli": lambda key, shape: jax.random.bernoulli(key, 0.3, shape),
    "keys": lambda key, shape: jax.random.key_data(jax.random.split(key, shape)),
}


def cut(whole, dim, replicas, at):
    return np.split(np.asarray(whole), replicas, axis=dim)[at]


@settings(max_examples=15, deadline=None)
@given(
    impl=st.sampled_from(IMPLS),
    name=st.sampled_from(sorted(DRAWS)),
    own=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    place=st.integers(0, 2),
    replicas=st.integers(2, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_replica_draws_its_part_of_the_whole(impl, name, own, place, replicas, seed):
    dim = place % len(own)
    whole = tuple(n * (replicas if at == dim else 1) for at, n in enumerate(own))
    draw, key = DRAWS[name], jax.random.key(seed, impl=impl)
    key = jax.random.fold_in(key, 7)
    expected = draw(key, whole)
    draws = OwnDraws(frozenset({(tuple(own), whole)}))
    for at in range(replicas):
        found = draw(draws.keys(key, at), tuple(own))
        if name == "keys":  # a replica's keys keep its number
            found = found[..., :-1]
        part = cut(expected, dim, replicas, at)
        if name == "normal":  # XLA's erf_inv rounds the ends of other shapes otherwise
            np.testing.assert_array_max_ulp(np.asarray(found), part, 8)
        else:
            assert_same_bits(np.asarray(found), part)


def test_keys_that_do_not_draw_alone_are_left_alone():
    """JAX draws for a batch of rbg keys with the first of them."""

    def function(key, x):
        return jax.vmap(drop)(jax.random.split(key, len(x)), x)

    def trace(rows, key):
        x = jax.ShapeDtypeStruct((rows, 4), "float32")
        return _jax.draws(jax.make_jaxpr(function)(key, x).jaxpr)

    key = jax.random.key(0, impl="rbg")
    assert draws_like(trace(6, key), trace(2, OwnDraws().keys(key, 0)), 2) is None


def test_what_has_no_row_per_example_is_the_same_everywhere():
    key = jax.random.key(3)
    draws = OwnDraws(frozenset({((2, 4), (6, 4))}))
    for at in range(3):
        assert_same_bits(
            np.asarray(jax.random.normal(draws.keys(key, at), (4,))),
            np.asarray(jax.random.normal(key, (4,))),
        )


def test_keys_come_back_as_they_were():
    tree = {"key": jax.random.split(jax.random.key(0, impl="rbg"), 3), "x": jnp.ones(2)}
    again = OwnDraws().common(OwnDraws().keys(tree, 1), tree)
    assert again["key"].dtype == tree["key"].dtype
    assert_same_bits(
        *(np.asarray(jax.random.key_data(one["key"])) for one in (again, tree))
    )
    assert again["x"] is tree["x"]


def trace(function, rows, *, own):
    key = jax.random.key(0)
    if own:
        key = OwnDraws().keys(key, 0)
    x = jax.ShapeDtypeStruct((rows, 4), "float32")
    return _jax.draws(jax.make_jaxpr(function)(key, x).jaxpr)


def told(function):
    """Returns what is found out about a function with 2 of 6 rows."""
    return draws_like(trace(function, 6, own=False), trace(function, 2, own=True), 2)


def drop(key, x):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)


def test_draws_with_rows_and_draws_without_are_told_apart():
    def function(key, x):
        return jax.checkpoint(drop)(key, x) + jax.random.normal(key, (1, 4))

    assert told(function) == OwnDraws(frozenset({((2, 4), (6, 4))}))


def test_rows_may_be_in_any_dim():
    def function(key, x):
        return drop(key, x) + drop(key, x.T).T

    shapes = {((2, 4), (6, 4)), ((4, 2), (4, 6))}
    assert told(function) == OwnDraws(frozenset(shapes))


def test_keys_per_example_are_told():
    def function(key, x):
        return jax.vmap(drop)(jax.random.split(key, len(x)), x)

    assert told(function) == OwnDraws(frozenset({((2,), (6,))}))


def by_place(key, x):
    return jax.vmap(lambda at, x: drop(jax.random.fold_in(key, at), x))(
        jnp.arange(len(x)), x
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda key, x: drop(jax.random.PRNGKey(0), x),
        lambda key, x: drop(jax.random.key(0), x),
        by_place,
        lambda key, x: jax.random.normal(key, (x.size,)),
        lambda key, x: jax.random.normal(key, (2, 4)) + drop(key, x).sum(),
    ],
    ids=["raw key", "own key", "by place", "rows merged", "shape twice"],
)
def test_what_cannot_be_told_is_left_alone(function):
    assert told(function) is None


# In a train step.


class Blocks(nnx.Module):
    """Dropout, inside what is recomputed too, and one key per example."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(32, 64, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x, key):
        keys = jax.random.split(key, len(x))
        x = self.dropout(nnx.relu(self.linear(x)))
        x = x + 0.1 * jax.vmap(lambda key: jax.random.normal(key, (64,)))(keys)
        return self.last(x)


class LinenBlocks(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dropout(0.5, deterministic=not train)(nn.relu(nn.Dense(64)(x)))
        return nn.Dense(8)(x)


def losses_of(model, batch, rngs):
    return jnp.square(model(batch["x"], rngs.noise()) - batch["y"])


def losses_of_linen(model, batch, train):
    return jnp.square(model(batch["x"], train) - batch["y"])


def create_state(kind, mesh, impl):
    layouts = ml.LayoutMap(mesh, {})
    rng = jax.random.key(5, impl=impl)
    if kind == "nnx":
        return ml.TrainState.create(
            lambda: Blocks(nnx.Rngs(jax.random.key(0, impl=impl))),
            optax.sgd(0.1),
            layouts,
            rng=rng,
        )
    module = LinenBlocks()
    build = functools.partial(
        module.init, jax.random.key(0), jnp.ones((1, 32)), train=False
    )
    return ml.TrainState.create(build, optax.sgd(0.1), layouts, module=module, rng=rng)


def test_a_model_that_takes_keys_apart_runs_all_the_same():
    def loss_fn(model, batch, rngs):
        key = jax.random.wrap_key_data(jax.random.key_data(rngs.noise()))
        return jnp.square(model(drop(key, batch["x"])))

    losses = []
    for count in (1, 4):
        mesh = ml.create_mesh({"batch": count}, devices=jax.devices()[:count])
        state = ml.TrainState.create(
            lambda: nnx.Linear(4, 1, rngs=nnx.Rngs(0)),
            optax.sgd(0.1),
            ml.LayoutMap(mesh, {}),
        )
        batch = ml.relayout({"x": np.ones((8, 4), "f")}, mesh.layout("batch", ...))
        _, metrics = ml.make_train_step(loss_fn, accumulate=2)(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_gradients_are_added_once_and_the_same_is_dropped_on_any_mesh(kind, impl):
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(64, 32)).astype("float32"),
        "y": rng.normal(size=(64, 8)).astype("float32"),
        "weight": (rng.random(64) < 0.8).astype("float32"),
    }
    loss_fn = losses_of if kind == "nnx" else losses_of_linen
    found = []
    for count in (1, 8):
        mesh = ml.create_mesh({"batch": count}, devices=jax.devices()[:count])
        train_step = ml.make_train_step(loss_fn, accumulate=4)
        state = create_state(kind, mesh, impl)
        placed = ml.relayout(batch, mesh.layout("batch", ...))
        if (kind, impl) != ("nnx", "rbg"):  # its keys do not draw alone under vmap
            compiled = train_step.lower(state, placed).compile()
            assert not [one for one in reduced_in_loops(compiled) if "," in one]
        for _ in range(2):
            state, metrics = train_step(state, placed)
        found.append((float(metrics["loss"]), ml.to_numpy(state.params)))
    (one_loss, one), (loss, params) = found
    np.testing.assert_allclose(loss, one_loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
