"""Calls of layers: what options, padding and axes of pmap change in them.

That models may look at themselves is in test_same_numbers.
"""

import threading

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

import meshlayout as ml
from tests.flax_versions import module_list
from tests.small_states import X, assert_close, create, create_linen, mesh_of, on


def square(model, batch):
    return jnp.square(model(batch["x"]))


def trained(build, loss_fn, batch=None, **options):
    """The state after one step, and the metrics."""
    mesh = mesh_of(batch=8)
    step = ml.make_train_step(loss_fn, **options)
    ones = np.ones(len(X), "float32")
    return step(create(mesh, build), on(mesh, batch or {"x": X, "weight": ones}))


def test_models_outside_of_a_step_are_left_alone_while_one_is_traced():
    """Another thread calls the same classes in the middle of a trace."""
    norm = nnx.BatchNorm(4, use_running_average=False, rngs=nnx.Rngs(0))
    expected = np.asarray(norm(X))
    results = []

    def loss_fn(model, batch):
        made = jnp.square(model(batch["x"]))
        thread = threading.Thread(target=lambda: results.append(np.asarray(norm(X))))
        thread.start()
        thread.join()
        return made

    trained(lambda: nnx.BatchNorm(4, rngs=nnx.Rngs(0)), loss_fn)
    assert results
    for result in results:
        np.testing.assert_array_equal(result, expected)


class Lifted(nnx.Module):
    """Calls its normalization through a transform of Flax's, on a copy of it."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return nnx.remat(lambda norm, x: norm(x))(self.norm, x)


def test_padding_does_not_count_in_a_lifted_batch_norm():
    weights = np.float32(np.arange(16) < 5)
    x = np.where(weights[:, None] == 0, np.float32(50), X)
    batch = {"x": x, "weight": weights}
    state, _ = trained(lambda: Lifted(nnx.Rngs(0)), square, batch)
    assert_close(state.model_state["norm"]["mean"], 0.01 * X[:5].mean(axis=0), 1e-4)


class Counted(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x, counter):
        counter.mean[...] = counter.mean[...] + 1
        return self.linear(x)


class Counting(nnx.Module):
    def __init__(self, rngs):
        self.counter = nnx.BatchNorm(4, rngs=rngs)
        self.blocks = module_list([Counted(rngs) for _ in range(3)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x, self.counter)
        return x


def test_objects_that_blocks_are_handed_are_changed_and_not_their_copies():
    state, _ = trained(lambda: Counting(nnx.Rngs(0)), square, remat="blocks")
    assert (state.model_state["counter"]["mean"] == 3).all()


class LinenDropped(nn.Module):
    @nn.compact
    def __call__(self, x, rngs):
        return jnp.where(jax.random.bernoulli(rngs(), 0.5, x.shape), nn.Dense(4)(x), 0)


def test_a_stream_of_nnx_is_not_copied_into_a_recomputed_linen_block():
    mesh = mesh_of(batch=8)
    state = create_linen(mesh, LinenDropped(), lambda: jax.random.key(0))
    loss_fn = lambda model, batch, rngs: model(batch["x"], rngs)
    step = ml.make_train_step(loss_fn, remat="full")
    with pytest.raises(flax.errors.TraceContextError, match="Cannot mutate Rng"):
        step(state, on(mesh, {"x": X}))


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x, *streams):
        return nn.Dense(4)(x), [jax.random.bits(self.make_rng(x)) for x in streams]


def test_evaluation_binds_all_random_streams_of_linen_but_dropout():
    state = create_linen(mesh_of(batch=8), Noisy())
    predict = lambda *streams: ml.make_predict_step(lambda m, x: m(x, *streams)[1])
    a, b = predict("a", "b")(state, X)
    assert [a] == predict("a")(state, X) != [b]
    with pytest.raises(flax.errors.InvalidRngError, match="dropout"):
        predict("a", "dropout")(state, X)


class Norms(nnx.Module):
    def __init__(self, axis_name, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, axis_name=axis_name, rngs=rngs)
        self.layer_norm = nnx.LayerNorm(4, axis_name=axis_name, rngs=rngs)

    def __call__(self, x):
        return self.layer_norm(self.norm(self.linear(x)))


class LinenNorms(nn.Module):
    axis_name: str | None

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(4)(x)
        return nn.BatchNorm(use_running_average=not train, axis_name=self.axis_name)(x)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("nnx", {"accumulate": 2, "remat": "full"}),
        pytest.param("nnx", {"precision": "bfloat16"}, marks=pytest.mark.slow),
        ("linen", {"precision": "bfloat16"}),
    ],
)
def test_a_batch_norm_with_a_pmap_axis_takes_statistics_of_all_rows(kind, options):
    def linen_square(model, batch, train):
        return jnp.square(model(batch["x"], train))

    mesh, results = mesh_of(batch=8), []
    loss_fn = square if kind == "nnx" else linen_square
    for name in (None, "batch"):
        if kind == "nnx":
            state = create(mesh, lambda: Norms(name, nnx.Rngs(0)))  # noqa: B023
        else:
            state = create_linen(mesh, LinenNorms(name), False)
        batch = on(mesh, {"x": X})
        state, metrics = ml.make_train_step(loss_fn, **options)(state, batch)
        evaluated = ml.make_eval_step(loss_fn)(state, batch)
        arrays = metrics["loss"], evaluated["loss"], state.params, state.model_state
        results.append(arrays)
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize("make", [ml.make_train_step, ml.make_eval_step])
def test_a_mean_over_axes_of_pmap_is_that_of_the_whole_batch(make):
    def loss_fn(model, batch):
        count = jax.lax.psum(1, "hosts")
        return jax.lax.pmean(square(model, batch), ("devices", "hosts")) / count

    mesh, losses = mesh_of(batch=8), []
    for function in (square, loss_fn):
        state = create(mesh, lambda: Norms("batch", nnx.Rngs(0)))
        result = make(function)(state, on(mesh, {"x": X}))
        metrics = result[1] if isinstance(result, tuple) else result
        losses.append(float(metrics["loss"]))
    assert losses[0] == losses[1]
