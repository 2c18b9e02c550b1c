"""What the options of a train step do, and which values of them are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax.sharding import AxisType

import meshlayout as ml
from meshlayout import losses
from tests.flax_versions import module_list
from tests.same_bits import assert_same_bits


RATE = 0.1
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 8)).astype("float32")
Y = RNG.normal(size=(16, 8)).astype("float32")


@pytest.fixture
def mesh() -> ml.Mesh:
    return ml.create_mesh({"batch": 8})


@pytest.fixture
def batch(mesh):
    return on(mesh, {"x": X, "y": Y})


def on(mesh, batch):
    return ml.relayout(batch, mesh.layout("batch", ...))


def linear(param_dtype=jnp.float32, dtype=None):
    rngs = nnx.Rngs(0)
    return nnx.Linear(8, 8, param_dtype=param_dtype, dtype=dtype, rngs=rngs)


def create(mesh, tx=None, build=linear, module=None):
    layouts = ml.LayoutMap(mesh, {})
    return ml.TrainState.create(build, tx or optax.sgd(RATE), layouts, module=module)


def squares(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"])


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


def assert_close(made, expected, rtol=2e-5, atol=2e-6):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol),
        made,
        expected,
    )


def grads_by_hand(params, x=X, y=Y):
    """The gradients of the mean square of a linear model, in NumPy."""
    error = x @ params["kernel"] + params["bias"] - y
    return {
        "kernel": 2 * x.T @ error / error.size,
        "bias": 2 * error.sum(0) / error.size,
    }


def norm_of(tree):
    return np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(tree)))


# Clipping, and what is not finite.


@pytest.mark.parametrize("clip_norm", [0.05, 100.0])
def test_gradients_are_clipped_by_their_global_norm(mesh, batch, clip_norm):
    state = create(mesh)
    params = on_host(state.params)
    grads = grads_by_hand(params)
    norm = norm_of(grads)
    state, metrics = ml.make_train_step(squares, clip_norm=clip_norm)(state, batch)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=2e-5)
    factor = min(1, clip_norm / norm)
    expected = {k: params[k] - RATE * factor * grads[k] for k in params}
    assert_close(on_host(state.params), expected)


def test_gradients_of_zero_are_clipped_to_zero(mesh, batch):
    def loss_fn(model, batch):
        return 0 * squares(model, batch)

    state = create(mesh)
    before = on_host(state.params)
    state, metrics = ml.make_train_step(loss_fn, clip_norm=1.0)(state, batch)
    assert metrics["grad_norm"] == 0
    assert_close(on_host(state.params), before, rtol=0, atol=0)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_is_not_finite_is_skipped_and_counted(mesh, batch, accumulate):
    train_step = ml.make_train_step(
        squares, on_nonfinite="skip", ema=0.9, accumulate=accumulate
    )
    state, metrics = train_step(create(mesh, optax.adam(0.1)), batch)
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


# Moving averages, schedules, frozen parameters.


def test_the_moving_average_of_the_parameters(mesh, batch):
    state = create(mesh)
    average = on_host(state.params)
    train_step = ml.make_train_step(squares, ema=0.75)
    for _ in range(3):
        state, _ = train_step(state, batch)
        new = on_host(state.params)
        average = jax.tree.map(lambda old, new: 0.75 * old + 0.25 * new, average, new)
    assert_close(on_host(state.extra["ema"]), average)


def test_the_moving_average_of_bfloat16_parameters_moves(mesh):
    def build():
        model = linear(jnp.bfloat16)
        model.kernel[...] = jnp.ones((8, 8), "bfloat16")
        return model

    # A loss whose gradient is 1 for every entry of the kernel.
    def loss_fn(model, batch):
        return batch["x"][:, 0] * 0 + model.kernel[...].astype("float32").sum()

    state = create(mesh, optax.sgd(0.5), build)
    train_step = ml.make_train_step(loss_fn, ema=0.999)
    for _ in range(2):
        state, _ = train_step(state, on(mesh, {"x": X}))
    expected = 0.999 * (0.999 * 1 + 0.001 * 0.5) + 0.001 * 0
    average = np.asarray(state.extra["ema"]["kernel"], "float32")
    np.testing.assert_allclose(average, expected, rtol=1e-4)


SCHEDULE = optax.linear_schedule(1.0, 0.0, 10)


def test_the_metrics_show_the_rate_that_the_update_used(mesh, batch):
    tx = optax.inject_hyperparams(optax.sgd)
    train_step = ml.make_train_step(squares)
    state, shown, used = create(mesh, tx(learning_rate=SCHEDULE)), [], []
    for _ in range(3):
        before = on_host(state.params)
        grads = grads_by_hand(before)
        state, metrics = train_step(state, batch)
        shown.append(float(metrics["learning_rate"]))
        moved = before["kernel"] - on_host(state.params)["kernel"]
        used.append((moved * grads["kernel"]).sum() / np.square(grads["kernel"]).sum())
    np.testing.assert_allclose(shown, used, rtol=1e-4)
    np.testing.assert_allclose(shown, [1.0, 0.9, 0.8], rtol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_only_what_an_optimizer_is_given_for_is_trained(mesh, batch, accumulate):
    tx = {"bias$": optax.adamw(0.1, weight_decay=0.5), "": None}
    state = create(mesh, ml.optimizer_by_path(tx))
    before = on_host(state.params)
    train_step = ml.make_train_step(squares, accumulate=accumulate)
    for _ in range(2):
        state, _ = train_step(state, batch)
    after = on_host(state.params)
    assert_same_bits(after["kernel"], before["kernel"])
    assert (after["bias"] != before["bias"]).all()
    slots = [leaf.shape for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert set(slots) == {(8,)}  # none for the kernel


# Precision.


def test_bfloat16_computes_in_bfloat16_and_keeps_the_rest(mesh, batch):
    state = create(mesh, optax.adam(0.1))
    params = state.params
    kernel, bias = (params[k].astype("bfloat16") for k in ("kernel", "bias"))
    made = jnp.asarray(X, "bfloat16") @ kernel + bias[None]
    expected = np.square(np.asarray(made, "float32") - Y).mean()
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, (state.params, state.opt_state))
    seen = []

    def loss_fn(model, batch):
        made = model(batch["x"])
        seen.append(made.dtype)
        return jnp.square(made - batch["y"])

    train_step = ml.make_train_step(loss_fn, precision="bfloat16")
    state, metrics = train_step(state, batch)
    assert all(dtype == "float32" for dtype in seen)
    assert metrics["loss"].dtype == "float32"
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-3)
    after = jax.tree.map(lambda leaf: leaf.dtype, (state.params, state.opt_state))
    assert after == dtypes


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_a_layer_that_names_its_dtype_computes_in_it(mesh, kind):
    """Its parameters are not rounded on their way, either."""
    if kind == "nnx":
        state = create(mesh, build=lambda: linear(dtype=jnp.float32))
    else:
        module = nn.Dense(8, dtype=jnp.float32)
        state = create(
            mesh,
            build=lambda: module.init(jax.random.key(0), jnp.ones((1, 8))),
            module=module,
        )
    params = on_host(state.params)
    x = np.ones((16, 8), "float32")  # exact in bfloat16
    expected = np.square(x @ params["kernel"] + params["bias"] - Y).mean()
    train_step = ml.make_train_step(squares, precision="bfloat16")
    _, metrics = train_step(state, on(mesh, {"x": x, "y": Y}))
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)


def test_the_output_dtype_counts_without_a_compute_dtype(mesh, batch):
    seen = []

    def loss_fn(model, batch):
        seen.append(model(batch["x"]).dtype)
        return squares(model, batch)

    policy = ml.PrecisionPolicy(output="bfloat16")
    ml.make_train_step(loss_fn, precision=policy)(create(mesh), batch)
    assert set(seen) == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_float16_finds_a_scale_without_overflow_and_then_trains(mesh, accumulate):
    y = 2000 * Y  # gradients of some hundreds, times a scale of 32768
    batch = on(mesh, {"x": X, "y": y})
    state = create(mesh)
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
    grads = grads_by_hand(params, y=y)
    assert_close(moved, grads, rtol=0.02, atol=1)


def test_float16_does_not_lose_small_gradients(mesh, batch):
    def loss_fn(model, batch):
        return 1e-6 * squares(model, batch)

    state = create(mesh, optax.sgd(1e6 * RATE))
    params = on_host(state.params)
    train_step = ml.make_train_step(loss_fn, precision="float16", clip_norm=1.0)
    state, metrics = train_step(state, batch)
    grads = grads_by_hand(params)
    moved = jax.tree.map(lambda p, q: (p - q) / RATE, params, on_host(state.params))
    assert_close(moved, grads, rtol=0.03, atol=0.003)
    np.testing.assert_allclose(metrics["grad_norm"], 1e-6 * norm_of(grads), rtol=0.01)


# Recomputation.


class Blocks(nnx.Module):
    def __init__(self, rngs):
        self.blocks = module_list([Block(rngs) for _ in range(4)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 32, rngs=rngs)
        self.down = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(nnx.gelu(self.up(x))))


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8)(nn.gelu(nn.gelu(nn.Dense(32)(x))))


class LinenBlocks(nn.Module):
    @nn.compact
    def __call__(self, x):
        for n in range(4):
            x = LinenBlock(name=f"block{n}")(x)
        return x


def of_blocks(mesh, kind):
    if kind == "nnx":
        return create(mesh, build=lambda: Blocks(nnx.Rngs(0)))
    module = LinenBlocks()

    def build():
        return module.init(jax.random.key(0), jnp.ones((1, 8)))

    return create(mesh, build=build, module=module)


@pytest.mark.parametrize(
    ("kind", "remat", "num_recomputed"),
    [
        ("nnx", "blocks", 4),
        ("nnx", jax.checkpoint_policies.dots_saveable, 4),
        ("nnx", "full", 4),  # what is inside of it is not done twice
        ("linen", "blocks", 4),
    ],
)
def test_recomputing_changes_no_number(mesh, batch, kind, remat, num_recomputed):
    plain_step = ml.make_train_step(squares)
    train_step = ml.make_train_step(squares, remat=remat)
    state = of_blocks(mesh, kind)
    texts = [step.lower(state, batch).as_text() for step in (plain_step, train_step)]
    counts = [text.count("stablehlo.tanh") for text in texts]
    assert counts == [8, 8 + 2 * num_recomputed]  # each gelu has one
    plain, _ = plain_step(of_blocks(mesh, kind), batch)
    state, _ = train_step(state, batch)
    assert_close(on_host(state.params), on_host(plain.params))


# Optimizers that want the loss.


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

    keeper = optax.GradientTransformationExtraArgs(
        lambda params: jnp.float32(0), update
    )
    tx = {
        "plain": keeper,
        "by path": ml.optimizer_by_path({"": optax.chain(optax.sgd(RATE), keeper)}),
        "several steps": optax.MultiSteps(keeper, 1),
    }[kind]
    regularized = {"regularizers": {"l2": losses.l2(0.1)}, **options}
    train_step = ml.make_train_step(squares, **regularized)
    state, metrics = train_step(create(mesh, tx), batch)
    seen = [
        float(leaf)
        for leaf in jax.tree.leaves(state.opt_state)
        if leaf.dtype == jnp.float32 and leaf.ndim == 0
    ]
    np.testing.assert_allclose(seen, float(metrics["loss"]), rtol=1e-6)
    assert float(metrics["loss"]) > float(metrics["l2"]) > 0


# Several steps in one call.


@pytest.mark.parametrize("form", ["list", "stacked"])
def test_batches_of_one_call_give_what_they_give_one_by_one(mesh, form):
    rows = [RNG.normal(size=(2, 16, 8)).astype("float32") for _ in range(4)]
    batches = [{"x": x, "y": y} for x, y in rows]
    state, metrics, single = (
        create(mesh, optax.adam(0.1)),
        None,
        ml.make_train_step(squares),
    )
    for batch in batches:
        state, metrics = single(state, on(mesh, batch), metrics)
    many = ml.make_train_step(squares, steps_per_call=2)
    other, found = create(mesh, optax.adam(0.1)), None
    for pair in (batches[:2], batches[2:]):
        given = [on(mesh, batch) for batch in pair]
        if form == "stacked":
            stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *pair)
            given = ml.relayout(stacked, mesh.layout(None, "batch", None))
        other, found = many(other, given, found)
    assert_close(on_host(other.params), on_host(state.params))
    assert int(other.step) == 4
    assert_close(found.to_host(), metrics.to_host())


# Optimizer states over replicas.


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_zero_rule_shards_the_optimizer_and_not_the_parameters(
    mesh, batch, accumulate
):
    def build():
        rngs = nnx.Rngs(0)
        up, down = nnx.Linear(8, 132, rngs=rngs), nnx.Linear(132, 8, rngs=rngs)
        return nnx.Sequential(up, down)

    train_step = ml.make_train_step(squares, accumulate=accumulate, ema=0.5)
    zero = ml.LayoutMap(mesh, {"^opt_state/": ml.zero_rule(mesh)})
    state = ml.TrainState.create(build, optax.adam(0.1), zero)
    plain, other = create(mesh, optax.adam(0.1), build), None
    for _ in range(2):
        state, metrics = train_step(state, batch)
    train_step = ml.make_train_step(squares, accumulate=accumulate, ema=0.5)
    for _ in range(2):
        plain, other = train_step(plain, batch)
    assert_close(on_host(state.params), on_host(plain.params))
    assert_close(on_host(state.opt_state), on_host(plain.opt_state))
    assert_close(metrics.to_host(), other.to_host())
    slots = state.opt_state[0].mu["layers"]
    assert str(ml.Layout.of(slots[0]["kernel"])) == "[batch, unsharded]"
    assert str(ml.Layout.of(slots[1]["kernel"])) == "[unsharded, batch]"
    for leaf in jax.tree.leaves(state.params):
        assert leaf.sharding.is_fully_replicated


# Meshes whose axes are Explicit.


@pytest.mark.parametrize(
    "option",
    [{}, {"accumulate": 2}],
)
def test_a_mesh_of_explicit_axes(option):
    mesh = ml.create_mesh({"batch": 8}, axis_types=AxisType.Explicit)
    state = create(mesh)
    params = on_host(state.params)
    grads = grads_by_hand(params)
    batch = on(mesh, {"x": X, "y": Y})
    state, _ = ml.make_train_step(squares, **option)(state, batch)
    expected = {k: params[k] - RATE * grads[k] for k in params}
    assert_close(on_host(state.params), expected)


# What is wrong.


def scalar(model, batch):
    return squares(model, batch).mean()


RETURNS = (
    "a loss function returns losses, floats of shape (batch, ...), or those and a dict "
    'of outputs for the metrics: return losses, {"logits": logits}.'
)
CALLS = {
    "a scalar for a batch with weights": (
        scalar,
        {},
        {"weight": np.ones(16, "float32")},
        "the loss function returned a scalar, and the batch has weights: it may hold "
        "padding, which a scalar has already averaged in. Return one loss per example, "
        "(batch,), or take the weights out of the batch.",
    ),
    "a number": (
        lambda model, batch: 1.0,
        {},
        {},
        f"<lambda> returned a float; {RETURNS}",
    ),
    "losses of other rows": (
        lambda model, batch: squares(model, batch)[:4],
        {},
        {},
        "the loss function returned losses of shape (4, 8) in a batch of 16 examples: the "
        "first dim has to be the batch dim.",
    ),
    "weights of other examples": (
        squares,
        {},
        {"weight": np.ones((16, 2), "float32")},
        "the loss function returned losses that do not fit: weights of shape (16, 2) do "
        "not fit losses of shape (16, 8); give one weight per example, (16,), or one "
        "per loss.",
    ),
    "rows of two lengths": (
        squares,
        {},
        {"z": np.ones((8, 1), "float32")},
        "the first dim is the batch dim, and 'x' has 16 rows where 'z' has 8. Pass values that are not part of the batch to the loss function in another way, such as a closure or a scalar.",
    ),
    "rows that do not divide": (
        squares,
        {"accumulate": 3},
        {},
        "a global batch of 16 examples does not divide into 3 microbatches over 8 "
        "shards. Take a multiple of 24.",
    ),
    "no blocks": (
        squares,
        {"remat": "blocks"},
        {},
        "remat: the model has no blocks (numbered submodules, as 'layers/0', that hold "
        "submodules with parameters). Take remat='full'.",
    ),
    "one batch of a call of two": (
        squares,
        {"steps_per_call": 2},
        {},
        "steps_per_call=2 takes a list of 2 batches, or arrays with a first dim of 2; "
        "this call was given [16].",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_do_not_fit_are_refused_in_words(mesh, name):
    loss_fn, options, more, message = CALLS[name]
    train_step = ml.make_train_step(loss_fn, **options)
    with pytest.raises(ml.MeshLayoutError) as caught:
        train_step(create(mesh), on(mesh, {"x": X, "y": Y, **more}))
    assert str(caught.value) == message


def test_a_batch_that_every_device_computes_is_logged_once(caplog):
    mesh, host = ml.create_mesh({"batch": 4, "model": 2}), {"x": X, "y": Y}
    layouts = ml.LayoutMap(mesh, {".*kernel": ("model", None)})
    train_step = ml.make_train_step(squares)
    everywhere = ml.relayout(host, mesh.layout(...))
    state = ml.TrainState.create(linear, optax.sgd(0.1), layouts)
    for _ in range(2):
        state, _ = train_step(state, everywhere)
    assert [one.getMessage() for one in caplog.records] == [
        f"the batch is sharded over no axis, so that all {mesh.size} devices compute "
        "all of its 16 rows. Place it with ml.relayout(batch, mesh.layout('batch', ...)), or "
        "take ml.distribute_dataset."
    ]


@pytest.mark.parametrize("make", [ml.make_train_step, ml.make_eval_step])
def test_a_step_wants_a_train_state(make, mesh, batch):
    state = create(mesh)
    kind = "train_step" if make is ml.make_train_step else "eval_step"
    with pytest.raises(ml.errors.StepError) as caught:
        make(squares)(state.params, batch)
    assert str(caught.value) == f"{kind} takes a TrainState, and got a dict."
