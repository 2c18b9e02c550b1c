"""What the options of a train step do, and which values of them are refused."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

import meshlayout as ml
from meshlayout import losses
from tests.error_messages import message_of
from tests.flax_versions import module_list
from tests.raw_steps import train
from tests.same_bits import assert_same_bits
from tests.small_states import (
    DATA,
    RATE,
    Convolutions,
    X,
    Y,
    assert_close,
    create,
    create_linen,
    image_batch,
    linear_by_hand,
    mesh_of,
    on,
    on_host,
    squares,
)


@pytest.fixture
def mesh() -> ml.Mesh:
    return mesh_of(batch=8)


@pytest.fixture
def batch(mesh):
    return on(mesh, DATA)


SGD = optax.sgd(RATE, momentum=0.9)
# Options of a step, and those of training by hand.
BY_HAND = {
    "plain": ({}, {}),
    "clipped, averaged and regularized": (
        {
            "clip_norm": 0.1,
            "ema": 0.9,
            "regularizers": {"l2": losses.l2(0.1, where="kernel")},
        },
        {"clip_norm": 0.1, "ema": 0.9, "penalties": {"l2": (0.1, jnp.square)}},
    ),
    "not skipped": ({"on_nonfinite": "skip"}, {}),
    "recomputed": (
        {"denominator": "global_batch_size", "remat": "full"},
        {"denominator": 16},
    ),
    "microbatches, regularized": (
        {"accumulate": 2, "regularizers": {"l1": losses.l1(0.1, "kernel")}},
        {"accumulate": 2, "penalties": {"l1": (0.1, jnp.abs)}},
    ),
    "bfloat16": ({"precision": "bfloat16"}, {"dtype": jnp.bfloat16}),
    "several steps": ({"steps_per_call": 3, "ema": 0.5}, {"ema": 0.5}),
    "frozen": ({"tx": {"conv": None, "": SGD}}, {"frozen": ("conv",)}),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_options_do_what_plain_flax_and_optax_do(name):
    options, by_hand = map(dict, BY_HAND[name])
    mesh, dtype = mesh_of(batch=2, model=4), by_hand.pop("dtype", None)

    def loss_fn(model, batch):
        return jnp.square(model(batch["x"]) - batch["y"])

    def plain_loss_fn(model, batch):
        made = model(batch["x"].astype(dtype)).astype("float32")
        return jnp.square(made - batch["y"])

    batches = [image_batch(seed) for seed in range(3)]
    plain = train(Convolutions(dtype), plain_loss_fn, batches, SGD, **by_hand)
    values, found = list(plain.metrics), []
    tx = ml.optimizer_by_path(options.pop("tx", {"": SGD}))
    state = create(mesh, Convolutions, tx, {"conv/kernel": (..., "model")})
    step = ml.make_train_step(loss_fn, **options)
    if "steps_per_call" in options:
        state, metrics = step(state, [on(mesh, batch) for batch in batches])
        weights = [batch["weight"].sum() for batch in batches]
        mean = lambda *numbers: np.average(numbers, weights=weights)
        values, found = [jax.tree.map(mean, *values)], [metrics.to_host()]
    else:
        for batch in batches:
            state, metrics = step(state, on(mesh, batch))
            found.append(metrics.to_host())
    names = {"data_loss", "activity", *options.get("regularizers", {})}
    names |= {"grad_norm"} if "clip_norm" in options else set()
    assert {*found[0]} - {"skipped"} == {"loss", *names}
    assert all(leaf.dtype == "float32" for leaf in jax.tree.leaves(state.params))
    # At the first step, before rounding to the 8 bits of bfloat16 adds up.
    np.testing.assert_allclose(found[0]["loss"], values[0]["loss"], rtol=1e-4)
    of_losses, rtol, atol = 1e-4, 1e-3, 1e-5
    if dtype is not None:
        of_losses, rtol, atol = 5e-3, 1e-2, 2e-3
    for name in ("loss", *names):
        pair = ([one[name] for one in numbers] for numbers in (found, values))
        np.testing.assert_allclose(*pair, rtol=of_losses)
    if "frozen" in by_hand:  # and has no slots
        slots = jax.tree.leaves(state.opt_state)
        assert jax.typeof(state.params["conv"]["kernel"]).shape not in map(
            np.shape, slots
        )
    average = state.extra["ema"] if "ema" in options else state.params
    after = state.params, average, state.model_state["norm"]
    expected = plain.params, plain.average, plain.state["norm"]
    assert_close(after, expected, rtol=rtol, atol=atol)


def norm_of(tree):
    return np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(tree)))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_is_not_finite_is_skipped_and_counted(mesh, batch, accumulate):
    options = {"on_nonfinite": "skip", "ema": 0.9, "accumulate": accumulate}
    train_step = ml.make_train_step(squares, **options)
    state, metrics = train_step(create(mesh, tx=optax.adam(0.1)), batch)
    before = on_host((state.params, state.opt_state, state.extra["ema"], state.step))
    loss = float(metrics["loss"])
    bad = on(mesh, {"x": np.where(X[3] == X, np.inf, X).astype("float32"), "y": Y})
    for count in (1, 2):
        state, metrics = train_step(state, bad, metrics)
        after = state.params, state.opt_state, state.extra["ema"], state.step
        assert_same_bits(on_host(after), before)
        assert int(state.extra["skipped"]) == count
        assert metrics.to_host() == {"loss": loss, "skipped": count}
    state, metrics = train_step(state, batch)
    assert metrics["skipped"] == 0
    assert int(state.step) == 2


def test_the_moving_average_of_bfloat16_parameters_moves(mesh):
    def build():
        rngs = nnx.Rngs(0)
        ones = nnx.initializers.ones
        return nnx.Linear(4, 4, kernel_init=ones, param_dtype=jnp.bfloat16, rngs=rngs)

    # A loss whose gradient is 1 for every entry of the kernel.
    def loss_fn(model, batch):
        return batch["x"][:, 0] * 0 + model.kernel[...].astype("float32").sum()

    state = create(mesh, build, optax.sgd(0.5))
    train_step = ml.make_train_step(loss_fn, ema=0.999)
    for _ in range(2):
        state, _ = train_step(state, on(mesh, DATA))
    expected = 0.999 * (0.999 * 1 + 0.001 * 0.5) + 0.001 * 0
    average = np.asarray(state.extra["ema"]["kernel"], "float32")
    np.testing.assert_allclose(average, expected, rtol=1e-4)


def test_the_metrics_show_the_rate_that_the_update_used_where_it_is_known(mesh, batch):
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)
    train_step = ml.make_train_step(squares)
    state, shown, used = create(mesh, tx=tx), [], []
    for _ in range(3):
        before = on_host(state.params)
        grads, _ = linear_by_hand(before)
        state, metrics = train_step(state, batch)
        shown.append(float(metrics["learning_rate"]))
        moved = before["kernel"] - on_host(state.params)["kernel"]
        used.append((moved * grads["kernel"]).sum() / np.square(grads["kernel"]).sum())
    np.testing.assert_allclose(shown, used, rtol=1e-4)
    np.testing.assert_allclose(shown, [1.0, 0.9, 0.8], rtol=1e-6)
    slower = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    two = ml.optimizer_by_path({"bias$": slower, "": tx})
    for unknown in (optax.sgd(schedule), two):
        _, metrics = ml.make_train_step(squares)(create(mesh, tx=unknown), batch)
        assert list(metrics) == ["loss"]


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_a_layer_that_names_its_dtype_computes_in_it(mesh, kind):
    """Its parameters are not rounded on their way, either."""
    if kind == "nnx":
        state = create(
            mesh, lambda: nnx.Linear(4, 4, dtype="float32", rngs=nnx.Rngs(0))
        )
    else:
        state = create_linen(mesh, nn.Dense(4, dtype=jnp.float32))
    x = np.ones((16, 4), "float32")  # exact in bfloat16
    _, expected = linear_by_hand(on_host(state.params), x=x)
    train_step = ml.make_train_step(squares, precision="bfloat16")
    _, metrics = train_step(state, on(mesh, {"x": x, "y": Y}))
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_an_embedding_computes_in_the_dtype_of_the_policy(kind):
    seen, tokens = [], np.zeros((8, 4), "int32")

    def loss_fn(model, batch):
        seen.append(model(batch).dtype)
        return model(batch).mean(axis=(1, 2))

    tx, module = optax.sgd(0.1), nn.Embed(6, 4)
    state = ml.TrainState.create(lambda: nnx.Embed(6, 4, rngs=nnx.Rngs(0)), tx)
    if kind == "linen":
        build = lambda: module.init(jax.random.key(0), tokens)
        state = ml.TrainState.create(build, tx, module=module)
    policy = ml.PrecisionPolicy(compute="bfloat16", output=None)
    state, _ = ml.make_train_step(loss_fn, precision=policy)(state, tokens)
    assert seen[-1] == "bfloat16"
    assert jax.tree.leaves(state.params)[0].dtype == "float32"


@pytest.mark.parametrize(
    ("precision", "output"),
    [("bfloat16", "float32"), (ml.PrecisionPolicy(output="bfloat16"), "bfloat16")],
)
def test_the_model_returns_the_output_dtype(mesh, batch, precision, output):
    seen = []

    def loss_fn(model, batch):
        seen.append(model(batch["x"]).dtype)
        return squares(model, batch)

    _, metrics = ml.make_train_step(loss_fn, precision=precision)(create(mesh), batch)
    assert set(seen) == {jnp.dtype(output)}
    assert metrics["loss"].dtype == "float32"


def test_a_module_applied_inside_of_a_model_returns_the_compute_dtype(mesh, batch):
    seen = []

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            inner = nn.Dense(4, parent=None)
            params = self.param("inner", lambda key: inner.init(key, x))
            y = inner.apply(params, x)
            seen.append(y.dtype)
            return y

    state = create_linen(mesh, Model())
    ml.make_train_step(squares, precision="bfloat16")(state, batch)
    assert seen[-1] == "bfloat16"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_float16_finds_a_scale_without_overflow_and_then_trains(mesh, accumulate):
    y = 2000 * Y  # gradients of some hundreds, times a scale of 32768
    batch, state = on(mesh, {"x": X, "y": y}), create(mesh)
    params = on_host(state.params)
    train_step = ml.make_train_step(squares, precision="float16", accumulate=accumulate)
    scales = []
    while int(state.step) == 0:
        assert_same_bits(on_host(state.params), params)
        state, metrics = train_step(state, batch)
        scales.append(float(metrics["loss_scale"]))
    assert 2 <= len(scales) <= 12
    np.testing.assert_array_equal(scales, 2.0**15 / 2.0 ** np.arange(len(scales)))
    assert int(state.extra["skipped"]) == len(scales) - 1
    moved = jax.tree.map(lambda p, q: (p - q) / RATE, params, on_host(state.params))
    assert_close(moved, linear_by_hand(params, y=y)[0], rtol=0.02, atol=1)


def test_float16_does_not_lose_small_gradients(mesh, batch):
    def loss_fn(model, batch):
        return 1e-6 * squares(model, batch)

    state = create(mesh, tx=optax.sgd(1e6))
    params = on_host(state.params)
    train_step = ml.make_train_step(loss_fn, precision="float16", clip_norm=1.0)
    state, metrics = train_step(state, batch)
    grads, _ = linear_by_hand(params)
    moved = jax.tree.map(np.subtract, params, on_host(state.params))
    assert_close(moved, grads, rtol=0.03, atol=0.003)
    np.testing.assert_allclose(metrics["grad_norm"], 1e-6 * norm_of(grads), rtol=0.01)


def test_norms_of_gradients_count_the_same_whatever_steps_weigh(mesh):
    train_step = ml.make_train_step(squares, clip_norm=1.0)
    weights = np.ones(16, "float32"), np.eye(16, dtype="float32")[3]
    heavy, light = (on(mesh, {**DATA, "weight": x}) for x in weights)
    tx = optax.sgd(0.1)
    each = [train_step(create(mesh, tx=tx), x)[1]["grad_norm"] for x in (heavy, light)]
    metrics = train_step(create(mesh, tx=tx), heavy)[1]
    both = train_step(create(mesh, tx=tx), light, metrics)[1]["grad_norm"]
    np.testing.assert_allclose(both, np.mean(each), rtol=1e-6)


class Blocks(nnx.Module):
    def __init__(self, rngs):
        self.blocks = module_list([Block(rngs) for _ in range(4)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 32, rngs=rngs)
        self.down = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(nnx.gelu(self.up(x))))


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(4)(nn.gelu(nn.gelu(nn.Dense(32)(x))))


class LinenBlocks(nn.Module):
    @nn.compact
    def __call__(self, x):
        for n in range(4):
            x = LinenBlock(name=f"block{n}")(x)
        return x


@pytest.mark.parametrize(
    ("kind", "remat"),
    [
        ("nnx", "blocks"),
        ("nnx", jax.checkpoint_policies.dots_saveable),
        ("nnx", "full"),  # what is inside of it is not done twice
        ("linen", "blocks"),
    ],
)
def test_recomputing_changes_no_number(mesh, batch, kind, remat):
    results = []
    for name in ("none", remat):
        if kind == "linen":
            state = create_linen(mesh, LinenBlocks())
        else:
            state = create(mesh, lambda: Blocks(nnx.Rngs(0)))
        step = ml.make_train_step(squares, remat=name)
        text = step.lower(state, batch).as_text()
        counts = [text.count(f"stablehlo.{x} ") for x in ("tanh", "dot_general")]
        results.append((counts, step(state, batch)[0].params))
    (plain, recomputed), params = zip(*results, strict=True)
    assert (plain[0], recomputed[0]) == (8, 16)  # each of eight gelus has one
    assert (recomputed[1] == plain[1]) == callable(remat)  # which saves products
    assert_close(*params)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("plain", {}),
        ("by path", {"accumulate": 2}),
        ("several steps", {"precision": "float16"}),
    ],
)
def test_an_optimizer_that_takes_the_loss_gets_all_of_it(mesh, batch, kind, options):
    def update(updates, state, params=None, *, value, **extra):
        return jax.tree.map(jnp.zeros_like, updates), value.astype("float32")

    keeper = optax.GradientTransformationExtraArgs(lambda _: jnp.float32(0), update)
    tx = {
        "plain": keeper,
        "by path": ml.optimizer_by_path({"": optax.chain(optax.sgd(RATE), keeper)}),
        "several steps": optax.MultiSteps(keeper, 1),
    }[kind]
    penalties = {"l2": losses.l2(0.1)}
    train_step = ml.make_train_step(squares, regularizers=penalties, **options)
    state, metrics = train_step(create(mesh, tx=tx), batch)
    scalars = [x for x in jax.tree.leaves(state.opt_state) if x.shape == ()]
    seen = [float(x) for x in scalars if x.dtype == jnp.float32]
    np.testing.assert_allclose(seen, float(metrics["loss"]), rtol=1e-6)
    assert float(metrics["loss"]) > float(metrics["l2"]) > 0


def test_stacked_batches_of_one_call_give_what_they_give_one_by_one(mesh):
    x, y = np.random.default_rng(1).normal(size=(2, 4, 16, 4)).astype("float32")
    single, adam = ml.make_train_step(squares), optax.adam(0.1)
    state, metrics = create(mesh, tx=adam), None
    for rows in zip(x, y, strict=True):
        state, metrics = single(state, dict(zip("xy", rows, strict=True)), metrics)
    many = ml.make_train_step(squares, steps_per_call=2)
    other, found = create(mesh, tx=adam), None
    for pair in (slice(2), slice(2, 4)):
        layout = mesh.layout(None, "batch", None)
        stacked = ml.relayout({"x": x[pair], "y": y[pair]}, layout)
        other, found = many(other, stacked, found)
    assert_close(other.params, state.params)
    assert int(other.step) == 4
    assert_close(found.to_host(), metrics.to_host())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_zero_rule_shards_the_optimizer_and_not_the_parameters(accumulate):
    def build():
        rngs = nnx.Rngs(0)
        up, down = nnx.Linear(4, 258, rngs=rngs), nnx.Linear(258, 4, rngs=rngs)
        return nnx.Sequential(up, down)

    mesh, found = mesh_of(batch=4), []
    for rules in ({}, {"^opt_state/": ml.zero_rule(mesh)}):
        train_step = ml.make_train_step(squares, accumulate=accumulate, ema=0.5)
        state = create(mesh, build, optax.adam(0.1), rules)
        for _ in range(2):
            state, metrics = train_step(state, on(mesh, DATA))
        found.append((state.params, state.opt_state, metrics.to_host()))
    assert_close(*found)
    slots = state.opt_state[0].mu["layers"]
    assert str(ml.Layout.of(slots[0]["kernel"])) == "[batch, unsharded]"
    assert str(ml.Layout.of(slots[1]["kernel"])) == "[unsharded, batch]"
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(state.params))


RETURNS = (
    "a loss function returns losses, floats of shape (batch, ...), or those and a dict "
    'of outputs for the metrics: return losses, {"logits": logits}.'
)
# What is said: of a loss function, options, and more of the batch.
CALLS = {
    "the loss function returned a scalar, and the batch has weights, 0 for padding. "
    "Return a loss per example, (batch,); for a scalar, "
    "distribute_dataset(remainder='drop').": (
        *(lambda model, batch: squares(model, batch).mean(), {}),
        {"weight": np.ones(16, "float32")},
    ),
    f"<lambda> returned a float; {RETURNS}": (lambda model, batch: 1.0, {}, {}),
    "the loss function returned losses of shape (4, 4) in a batch of 16 examples: the "
    "first dim has to be the batch dim.": (
        *(lambda model, batch: squares(model, batch)[:4], {}, {}),
    ),
    "the loss function returned losses that do not fit: weights of shape (16, 2) do not "
    "fit losses of shape (16, 4); give one weight per example, (16,), or one per loss.": (
        *(squares, {}, {"weight": np.ones((16, 2), "float32")}),
    ),
    "the first dim is the batch dim, and 'x' has 16 rows where 'z' has 8. Pass values "
    "that are not part of the batch to the loss function in another way, such as a "
    "closure or a scalar.": (squares, {}, {"z": np.ones((8, 1), "float32")}),
    "a global batch of 16 examples does not divide into 3 microbatches over 8 shards. "
    "Take a multiple of 24.": (squares, {"accumulate": 3}, {}),
    "remat: the model has no blocks (numbered submodules, as 'layers/0', that hold "
    "submodules with parameters). Take remat='full'.": (
        *(squares, {"remat": "blocks"}, {}),
    ),
    "steps_per_call=2 takes a list of 2 batches, or arrays with a first dim of 2; this "
    "call was given [16].": (squares, {"steps_per_call": 2}, {}),
}


@pytest.mark.parametrize("message", CALLS)
def test_calls_that_do_not_fit_are_refused_in_words(mesh, message):
    loss_fn, options, more = CALLS[message]
    train_step = ml.make_train_step(loss_fn, **options)
    batch = on(mesh, {**DATA, **more})
    assert message_of(train_step, create(mesh), batch) == message


class _Normalized(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.BatchNorm(use_running_average=not train)(x)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda model, batch: model(batch).mean(axis=-1),
        lambda model, batch, train: model(batch, train=train).mean(axis=-1),
    ],
    ids=["without train", "with train"],
)
def test_batch_statistics_that_a_train_step_leaves_are_warned_of(loss_fn):
    module, x = _Normalized(), np.arange(16, dtype="float32").reshape(8, 2)
    build = lambda: module.init(jax.random.key(0), x)
    state = ml.TrainState.create(build, optax.sgd(0.1), module=module)
    with warnings.catch_warnings(record=True, action="always") as caught:
        new, _ = ml.make_train_step(loss_fn)(state, x)
    mean = new.model_state["batch_stats"]["BatchNorm_0"]["mean"]
    assert bool(caught) == (not np.any(mean))
    assert all("def loss_fn(model, batch, train)" in str(x.message) for x in caught)


class _Partly(nnx.Module):
    """Batch statistics and dropout, whose modes are given; attention has none."""

    def __init__(self, frozen=(), *, is_evaluated=False):
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(2, use_running_average="norm" in frozen, rngs=rngs)
        self.dropout = nnx.Dropout(0.9, deterministic="dropout" in frozen, rngs=rngs)
        options = {"dropout_rate": 0.5, "decode": False, "rngs": rngs}
        self.attention = nnx.MultiHeadAttention(1, 2, **options)
        if is_evaluated:
            self.eval()

    def __call__(self, x):
        return self.dropout(self.norm(self.attention(x[:, None])[:, 0]))


@pytest.mark.parametrize(
    ("frozen", "is_evaluated"), [((), 0), (("norm",), 0), (("dropout",), 0), ((), 1)]
)
def test_layers_built_in_evaluation_mode_stay_in_it(frozen, is_evaluated):
    state = ml.TrainState.create(
        lambda: _Partly(frozen, is_evaluated=is_evaluated), optax.sgd(0.1)
    )
    loss_fn = lambda model, x: (model(x), {"zeros": (model(x) == 0).any(axis=-1)})
    metrics = {"zeros": ml.metrics.Mean(values="zeros")}
    x = np.random.default_rng(0).normal(size=(64, 2)).astype("float32")
    with warnings.catch_warnings(record=True, action="always") as caught:
        new, measured = ml.make_train_step(loss_fn, metrics=metrics)(state, x)
    is_normed = is_evaluated or "norm" in frozen
    assert np.any(new.model_state["norm"]["mean"]) == (not is_normed)
    is_dropping = not is_evaluated and "dropout" not in frozen
    assert (measured["zeros"] > 0) == is_dropping
    assert bool(caught) == bool(is_evaluated)
    assert all("Call model.train() in its builder" in str(x.message) for x in caught)


def test_a_new_optimizer_or_rate_is_named_alone_when_it_recompiles(mesh, batch):
    tx = optax.inject_hyperparams(optax.sgd)
    train_step = ml.make_train_step(squares, on_recompile="error")
    state, _ = train_step(create(mesh, tx=tx(0.1)), batch)
    with pytest.raises(ml.errors.StepError, match="the optimizer changed to a new one"):
        train_step(state.replace(tx=tx(0.2)), batch)
    state.opt_state.hyperparams["learning_rate"] = 0.2
    said = r"changed from f32\[\] to f32\[\] of a Python number, not of np.float32"
    with pytest.raises(ml.errors.StepError, match=said):
        train_step(state, batch)
