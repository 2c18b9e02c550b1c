"""A model may look at itself: options change no class, and leave nothing behind."""

import pickle
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


REGISTRY = {}


class Registered(nnx.Module):
    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        REGISTRY[cls.__name__] = cls


class Half(Registered):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.up(x))


class Block(Half):
    """Asks for its own type, and for its parent's call."""

    def __call__(self, x):
        assert pickle.loads(pickle.dumps(type(self))) is type(self)
        made = super().__call__(x)
        return made if type(self) in (Block, Inherited) else 0 * made


class Inherited(Block):
    """Has no call of its own, before and afterwards."""


class Curious(nnx.Module):
    """Computes something else if a class is not what it was."""

    def __init__(self, rngs):
        self.layers = module_list(
            [nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)]
        )
        self.blocks = module_list([Block(rngs), Block(rngs), Inherited(rngs)])

    def __call__(self, x):
        after = {nnx.Linear: "relu", nnx.BatchNorm: "none"}
        for layer in self.layers:
            x = layer(x)
            if after[type(layer)] == "relu":
                x = nnx.relu(x)
        for block in self.blocks:
            assert REGISTRY[type(block).__name__] is type(block)
            x = x + block(x)
        # Blocks that are alike stay so, for models that stack them.
        first, second = (nnx.split(block)[0] for block in self.blocks[:2])
        assert first == second
        return x.sum(-1)


def square(model, batch):
    return jnp.square(model(batch["x"]))


def first_loss(build, loss_fn, weights=True, batch=X, **options):
    mesh = mesh_of(batch=8)
    batch = {"x": batch}
    if weights:
        batch["weight"] = np.ones(len(batch["x"]), "float32")
    step = ml.make_train_step(loss_fn, **options)
    state, metrics = step(create(mesh, build), on(mesh, batch))
    return state, float(metrics["loss"])


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, True),
        ({"remat": "full"}, False),
        ({"remat": "blocks"}, True),
        ({"precision": ml.PrecisionPolicy("float32", "float32")}, True),
    ],
)
def test_a_model_that_looks_at_types_computes_what_flax_computes(options, weights):
    kinds = (Block, Half, nnx.BatchNorm, Inherited)
    calls = [vars(kind).get("__call__") for kind in kinds]
    _, loss = first_loss(lambda: Curious(nnx.Rngs(0)), square, weights, **options)
    model = Curious(nnx.Rngs(0))
    model.train()
    expected = float(square(model, {"x": X}).mean())
    # float32, through four normalizations
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    assert REGISTRY["Block"] is Block
    assert [vars(kind).get("__call__") for kind in kinds] == calls


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

    first_loss(lambda: nnx.BatchNorm(4, rngs=nnx.Rngs(0)), loss_fn)
    assert results
    for result in results:
        np.testing.assert_array_equal(result, expected)


# Padding in BatchNorm, wherever the layer is called.


class Lifted(nnx.Module):
    """Calls its normalization through a transform of Flax's, on a copy of it."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return nnx.remat(lambda norm, x: norm(x))(self.norm, x)


def test_padding_does_not_count_in_a_lifted_batch_norm():
    weights = np.float32(np.arange(16) < 5)
    x = np.where(weights[:, None] == 0, np.float32(50), X)
    batch = on(mesh_of(batch=8), {"x": x, "weight": weights})
    state = create(mesh_of(batch=8), lambda: Lifted(nnx.Rngs(0)))
    state, _ = ml.make_train_step(square)(state, batch)
    assert_close(state.model_state["norm"]["mean"], 0.01 * X[:5].mean(axis=0), 1e-4)


# NNX objects among the arguments of what is recomputed.


class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, rngs, *, scale=1.0):
        return scale * self.dropout(self.linear(x), rngs=rngs)


class Stack(nnx.Module):
    """Returns the share of mask elements that two blocks have in common."""

    def __init__(self, rngs):
        self.blocks = module_list([Dropped(rngs) for _ in range(2)])

    def __call__(self, x, rngs):
        first, second = (block(x, rngs, scale=2.0) for block in self.blocks)
        return ((first == 0) == (second == 0)).astype("float32").mean(axis=-1)


@pytest.mark.parametrize(
    ("options", "accumulate"),
    [
        ({"remat": "blocks"}, 2),
        ({"remat": jax.checkpoint_policies.dots_saveable}, 2),
        ({"precision": ml.PrecisionPolicy("float32")}, 1),
    ],
)
def test_streams_that_blocks_are_handed_draw_as_without_the_option(options, accumulate):
    def loss_fn(model, batch, rngs):
        once = model(batch["x"], rngs)
        return once + 2 * model(batch["x"], rngs)

    x = np.ones((64, 4), "f")
    more = {"weights": False, "batch": x, "accumulate": accumulate}
    losses = [
        first_loss(lambda: Stack(nnx.Rngs(0)), loss_fn, **more, **added)[1]
        for added in ({}, options)
    ]
    assert losses[0] == losses[1]
    assert losses[0] < 2.4  # of 3, if both blocks drew the same: about half agree


class LinenDropped(nn.Module):
    @nn.compact
    def __call__(self, x, rngs):
        x = nn.Dense(4, name="linear")(x)
        return jnp.where(jax.random.bernoulli(rngs(), 0.5, x.shape), x, 0)


def test_a_stream_of_nnx_is_not_copied_into_a_recomputed_linen_block():
    mesh = mesh_of(batch=8)
    state = create_linen(mesh, LinenDropped(), lambda: jax.random.key(0))
    step = ml.make_train_step(
        lambda model, batch, rngs: model(batch["x"], rngs), remat="full"
    )
    with pytest.raises(flax.errors.TraceContextError, match="Cannot mutate Rng"):
        step(state, on(mesh, {"x": X}))


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
    state, _ = first_loss(lambda: Counting(nnx.Rngs(0)), square, remat="blocks")
    assert (state.model_state["counter"]["mean"] == 3).all()


# Layers written for pmap.


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
        ("nnx", {"precision": "bfloat16"}),
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
