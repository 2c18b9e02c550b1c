"""A train step's numbers are those of the same step written by hand on one device."""

import collections
import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

import meshlayout as ml
from meshlayout import losses
from tests.same_bits import assert_same_bits


RATE = 0.1
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype("float32")
Y = RNG.normal(size=(16, 4)).astype("float32")
# The last rows are padding: on 8 devices, two shards of nothing else.
WEIGHTS = np.array([1, 0.5, 2, 1, 1, 0, 3, 1, 1, 1, 0.25, 0, 0, 0, 0, 0], "float32")

MESHES = {
    "one device": ({"batch": 1}, {}),
    "batch=8": ({"batch": 8}, {}),
    "batch=2, model=4": ({"batch": 2, "model": 4}, {"kernel$": (None, "model")}),
}


def mesh_of(name="batch=8"):
    sizes, _ = MESHES[name]
    return ml.create_mesh(sizes, devices=jax.devices()[: np.prod([*sizes.values()])])


def on(mesh, batch):
    return ml.relayout(batch, mesh.layout("batch", ...))


def create(build, mesh=None, tx=None, module=None, rules=None):
    layouts = ml.LayoutMap(mesh or mesh_of(), rules or {})
    return ml.TrainState.create(build, tx or optax.sgd(RATE), layouts, module=module)


def linear():
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


def linear_state(mesh=None, tx=None):
    return create(linear, mesh, tx)


def of_linen(module, *args, mesh=None, tx=None, rules=None):
    def build():
        return module.init(jax.random.key(0), jnp.ones((1, 4)), *args)

    return create(build, mesh, tx, module, rules)


def squares(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"])


def linen_squares(model, batch, train):
    return jnp.square(model(batch["x"], train) - batch["y"])


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


def assert_close(made, expected, rtol=2e-5, atol=2e-6):
    """Asserts that trees are equal but for the order of float32 sums."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol),
        made,
        expected,
    )


def linear_by_hand(params, weights, denominator, x=X, y=Y):
    """Returns the parameters after one step of SGD, and the loss, in float64 NumPy.

    `weights` has the losses' shape, (batch, out), and so says how much each counts.
    """
    error = x @ params["kernel"] + params["bias"] - y
    share = weights / denominator
    grads = {"kernel": x.T @ (2 * error * share), "bias": (2 * error * share).sum(0)}
    loss = (np.square(error) * share).sum()
    return {name: params[name] - RATE * grads[name] for name in params}, loss


def per_dim(weights):
    """Returns weights of the losses from those of examples, whose dims are averaged."""
    return np.repeat(weights[:, None], 4, axis=1) / 4


# The mean over real examples, on any mesh, in any number of parts.


# A whole batch is a single microbatch: such cases are left to test-all.
ONE_LATER = [pytest.param(1, marks=pytest.mark.slow), 2]
IN_TURN = [
    ("nnx", 2),
    ("linen", 1),
    pytest.param("nnx", 1, marks=pytest.mark.slow),
    pytest.param("linen", 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(
    ("kind", "mesh_name", "accumulate"),
    [
        ("nnx", "one device", 1),
        ("linen", "batch=8", 1),
        ("nnx", "batch=2, model=4", 2),
        ("linen", "batch=2, model=4", 2),
    ],
)
def test_three_steps_are_those_of_numpy(kind, mesh_name, accumulate):
    mesh, rules = mesh_of(mesh_name), MESHES[mesh_name][1]
    if kind == "nnx":
        state = create(linear, mesh, rules=rules)
    else:
        state = of_linen(nn.Dense(4), mesh=mesh, rules=rules)
    expected = on_host(state.params)
    train_step = ml.make_train_step(squares, accumulate=accumulate)
    for _ in range(3):
        batch = on(mesh, {"x": X, "y": Y, "weight": WEIGHTS})
        state, metrics = train_step(state, batch)
        expected, loss = linear_by_hand(expected, per_dim(WEIGHTS), WEIGHTS.sum())
        np.testing.assert_allclose(metrics["loss"], loss, rtol=2e-5)
    assert_close(on_host(state.params), expected)
    assert int(state.step) == 3


def without_padding(values):
    """Returns rows whose padding would show in any sum."""
    return np.where(WEIGHTS[:, None] == 0, np.nan, values)


BATCH = {"x": X, "y": Y, "weight": WEIGHTS}
TOKENS = RNG.integers(0, 3, size=(16, 4)).astype("float32")
TOKENS[-3:] = 0
# Options, the batch, how much each loss counts, and what they are divided by.
SUMS = {
    "real": ({}, BATCH, per_dim(WEIGHTS), WEIGHTS.sum()),
    "global_batch_size": (
        *({"denominator": "global_batch_size"}, BATCH, per_dim(WEIGHTS), 16),
    ),
    "a weight per token": ({}, {**BATCH, "weight": TOKENS}, TOKENS, TOKENS.sum()),
    "a tuple": ({"weights": 2}, (X, Y, WEIGHTS), per_dim(WEIGHTS), WEIGHTS.sum()),
    "NaN in padded inputs": (
        *({}, {**BATCH, "x": without_padding(X)}, per_dim(WEIGHTS), WEIGHTS.sum()),
    ),
    "NaN in padded labels": (
        *({}, {**BATCH, "y": without_padding(Y)}, per_dim(WEIGHTS), WEIGHTS.sum()),
    ),
}


@pytest.mark.parametrize("accumulate", ONE_LATER)
@pytest.mark.parametrize("name", SUMS)
def test_what_counts_how_much_and_what_sums_are_divided_by(name, accumulate):
    def loss_fn(model, batch):
        x, y = batch[:2] if isinstance(batch, tuple) else (batch["x"], batch["y"])
        return jnp.square(model(x) - y)

    options, batch, weights, denominator = SUMS[name]
    state = linear_state()
    expected, loss = linear_by_hand(on_host(state.params), weights, denominator)
    train_step = ml.make_train_step(loss_fn, accumulate=accumulate, **options)
    state, metrics = train_step(state, on(mesh_of(), batch))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=2e-5)
    assert_close(on_host(state.params), expected)


@pytest.mark.parametrize(
    ("mesh_name", "accumulate"), [("one device", 1), ("batch=8", 2)]
)
def test_a_scalar_loss_is_taken_as_it_is(mesh_name, accumulate):
    mesh = mesh_of(mesh_name)
    state = linear_state(mesh)
    expected, loss = linear_by_hand(on_host(state.params), np.full((16, 4), 1 / 64), 1)
    train_step = ml.make_train_step(
        lambda model, batch: squares(model, batch).mean(), accumulate=accumulate
    )
    state, metrics = train_step(state, on(mesh, {"x": X, "y": Y}))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=2e-5)
    assert_close(on_host(state.params), expected)


@pytest.mark.parametrize("accumulate", ONE_LATER)
def test_a_batch_of_nothing_but_padding_changes_no_parameter(accumulate):
    state = linear_state()
    before = on_host(state.params)
    train_step = ml.make_train_step(
        squares, accumulate=accumulate, on_recompile="ignore"
    )
    batch = on(mesh_of(), {"x": X, "y": Y, "weight": np.zeros(16, "float32")})
    state, metrics = train_step(state, batch)
    assert_close(on_host(state.params), before, rtol=0, atol=0)
    full = on(mesh_of(), {"x": X, "y": Y, "weight": WEIGHTS})
    _, alone = train_step(linear_state(), full)
    _, both = train_step(linear_state(), full, metrics)
    assert_same_bits(alone["loss"], both["loss"])


def test_a_batch_of_nothing_but_padding_has_no_loss():
    batch = on(mesh_of(), {"x": X, "y": Y, "weight": np.zeros(16, "float32")})
    _, metrics = ml.make_train_step(squares, clip_norm=1.0)(linear_state(), batch)
    assert np.isnan([*metrics.to_host().values()]).all()


def test_metrics_of_several_batches_are_means_over_all_their_examples():
    train_step = ml.make_train_step(
        lambda model, batch: (squares(model, batch), {"off": batch["y"][:, 0]}),
        metrics={"off": ml.metrics.Mean("off"), "mse": ml.metrics.Mean()},
    )
    state, metrics, sums = linear_state(), None, np.zeros(3)
    for scale in (1, 2, 0.5):
        params = on_host(state.params)
        weights = np.roll(WEIGHTS, scale > 1) * (np.arange(16) < 9 * scale)
        batch = {"x": X * scale, "y": Y, "weight": weights.astype("float32")}
        state, metrics = train_step(state, on(mesh_of(), batch), metrics)
        error = batch["x"] @ params["kernel"] + params["bias"] - Y
        each = np.square(error).mean(axis=1)
        sums += (weights * each).sum(), (weights * Y[:, 0]).sum(), weights.sum()
    found = metrics.to_host()
    assert list(found) == ["loss", "off", "mse"]
    np.testing.assert_allclose(found["loss"], sums[0] / sums[2], rtol=2e-5)
    np.testing.assert_allclose(found["mse"], sums[0] / sums[2], rtol=2e-5)
    np.testing.assert_allclose(found["off"], sums[1] / sums[2], rtol=2e-5)


# What the loss function is handed.


@pytest.mark.parametrize("is_training", [True, False])
def test_the_loss_function_gets_what_it_asks_for(is_training):
    def loss_fn(model, batch, *, train, rngs):
        assert train is is_training
        return jnp.square(model(batch["x"])) * 0 + jax.random.normal(
            rngs.noise(), (16, 1)
        )

    state, found = linear_state(), []
    batch = on(mesh_of(), {"x": X})
    step = (ml.make_train_step if is_training else ml.make_eval_step)(loss_fn)
    for _ in range(2):
        if is_training:
            state, metrics = step(state, batch)
        else:
            metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    assert (found[0] != found[1]) == is_training


class Mode(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.dropout(self.linear(x)))


def test_an_eval_step_measures_the_model_at_rest_and_changes_nothing():
    state = create(lambda: Mode(nnx.Rngs(0)))
    before = state.params, state.model_state["norm"]
    eval_step = ml.make_eval_step(squares, metrics={"mse": ml.metrics.Mean()})
    kept = on_host(before)
    metrics = None
    for weights in (WEIGHTS, WEIGHTS[::-1].copy()):
        batch = on(mesh_of(), {"x": X, "y": Y, "weight": weights})
        metrics = eval_step(state, batch, metrics)
    params = kept[0]["linear"]
    made = (X @ params["kernel"] + params["bias"]) / np.sqrt(1 + 1e-5)
    each = np.square(made - Y).mean(axis=1)
    total = ((WEIGHTS + WEIGHTS[::-1]) * each).sum() / WEIGHTS.sum() / 2
    np.testing.assert_allclose(metrics["loss"], total, rtol=2e-5)
    np.testing.assert_allclose(metrics["mse"], total, rtol=2e-5)
    assert_same_bits(on_host(before), kept)


def test_a_predict_step_returns_what_the_model_makes():
    state = create(lambda: Mode(nnx.Rngs(0)))
    params = on_host(state.params)["linear"]
    predict_step = ml.make_predict_step(lambda model, batch: model(batch["x"]))
    made = predict_step(state, on(mesh_of(), {"x": X}))
    expected = (X @ params["kernel"] + params["bias"]) / np.sqrt(1 + 1e-5)
    np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-6)


# What the model records.


class Recording(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        made = self.inner(x)
        losses.record(self, "activity", 0.5 * jnp.square(made))
        losses.record(self.inner, "first", jnp.square(made[:, 0]))
        self.sow(nnx.Intermediate, "aux_loss", jnp.abs(made))
        self.sow(nnx.Intermediate, "features", made)
        return made


class LinenRecording(nn.Module):
    @nn.compact
    def __call__(self, x):
        made = nn.Dense(4, name="inner")(x)
        losses.record(self, "activity", 0.5 * jnp.square(made))
        self.sow("losses", "aux_loss", jnp.abs(made))
        self.sow("intermediates", "features", made)
        return made


def recording_by_hand(params, batch, weights, *, is_linen):
    made = batch["x"] @ params["kernel"] + params["bias"][None]
    parts = {
        "data_loss": jnp.square(made - batch["y"]).mean(axis=1),
        "activity": 0.5 * jnp.square(made).mean(axis=1),
        "aux_loss": jnp.abs(made).mean(axis=1),
    }
    if not is_linen:
        parts["inner/first"] = jnp.square(made[:, 0])
    parts = {k: (v * weights).sum() / weights.sum() for k, v in parts.items()}
    return sum(parts.values()), parts


@pytest.mark.parametrize(("kind", "accumulate"), IN_TURN)
def test_recorded_losses_are_added_and_reported_one_by_one(kind, accumulate):
    if kind == "nnx":
        state = create(lambda: Recording(nnx.Rngs(0)))
    else:
        state = of_linen(LinenRecording())
    params = on_host(state.params)["inner"]
    (loss, parts), grads = jax.value_and_grad(recording_by_hand, has_aux=True)(
        params, {"x": X, "y": Y}, WEIGHTS, is_linen=kind == "linen"
    )
    expected = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
    train_step = ml.make_train_step(squares, accumulate=accumulate)
    batch = on(mesh_of(), {"x": X, "y": Y, "weight": WEIGHTS})
    for _ in range(2):
        new, metrics = train_step(jax.tree.map(jnp.copy, state), batch)
    assert_close(dict(metrics), {"loss": loss, **parts})
    assert_close(on_host(new.params)["inner"], expected)
    assert jax.tree.structure(new.model_state) == jax.tree.structure(state.model_state)


class RecordingAs(nnx.Module):
    def __init__(self, name, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.name = name

    def __call__(self, x):
        losses.record(self, self.name, jnp.full(x.shape[0], 7.0))
        return self.linear(x)


@pytest.mark.parametrize("name", ["activity", "l2", "data_loss", "loss", "grad_norm"])
def test_a_recorded_loss_counts_whatever_it_is_called(name):
    options = {"regularizers": {"l2": losses.l2(0.1)}, "clip_norm": 1e9}
    batch = on(mesh_of(), {"x": X, "y": Y})
    state = create(lambda: RecordingAs(name, nnx.Rngs(0)))
    plain = jax.tree.map(jnp.copy, state).replace()
    params = on_host(plain.params)["linear"]
    error = X @ params["kernel"] + params["bias"] - Y
    penalty = (
        0.1 * np.square(params["kernel"]).sum() + 0.1 * np.square(params["bias"]).sum()
    )
    expected = np.square(error).mean() + penalty + 7
    with contextlib.suppress(ml.MeshLayoutError):  # refusing the name is as good
        _, metrics = ml.make_train_step(squares, **options)(state, batch)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=2e-5)


@pytest.mark.parametrize("accumulate", ONE_LATER)
def test_regularizers_are_added_once(accumulate):
    state = linear_state()
    params = on_host(state.params)
    expected, loss = linear_by_hand(params, per_dim(WEIGHTS), WEIGHTS.sum())
    kernel = params["kernel"]
    expected["kernel"] -= RATE * (2 * 0.1 * kernel + 0.2 * np.sign(kernel))
    train_step = ml.make_train_step(
        squares,
        regularizers={"l2": losses.l2(0.1, "kernel"), "l1": losses.l1(0.2, "kernel")},
        accumulate=accumulate,
    )
    batch = on(mesh_of(), {"x": X, "y": Y, "weight": WEIGHTS})
    state, metrics = train_step(state, batch)
    parts = {
        "data_loss": loss,
        "l2": 0.1 * np.square(kernel).sum(),
        "l1": 0.2 * np.abs(kernel).sum(),
    }
    assert_close(dict(metrics), {"loss": sum(parts.values()), **parts})
    assert_close(on_host(state.params), expected)


# Batch statistics.


class Norms(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
        self.second = nnx.Linear(4, 4, rngs=rngs)
        self.last = nnx.BatchNorm(4, momentum=0.5, use_fast_variance=False, rngs=rngs)

    def __call__(self, x):
        x = nnx.tanh(self.norm(self.first(x)))
        return self.last(self.second(x))


class LinenNorms(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        options = {"use_running_average": not train, "momentum": 0.5}
        x = nn.Dense(4, name="first")(x)
        x = jnp.tanh(nn.BatchNorm(**options, name="norm")(x))
        x = nn.Dense(4, name="second")(x)
        return nn.BatchNorm(**options, use_fast_variance=False, name="last")(x)


def norms_by_hand(params, stats, x, y, weights, accumulate=1):
    """The loss of microbatches one after another, each with statistics of its own."""
    loss = 0
    for part in range(accumulate):
        rows = slice(part, None, accumulate)
        part_loss, stats = norms_of_part(
            params, stats, x[rows], y[rows], weights[rows], weights.sum()
        )
        loss += part_loss
    return loss, stats


def norms_of_part(params, stats, x, y, weights, denominator):
    """Statistics over the real rows alone, which are picked and not masked."""
    real = weights != 0
    if not real.any():
        return 0, stats
    x, y, weights = x[real], y[real], weights[real]

    def norm(name, x):
        mean, var = x.mean(axis=0), jnp.square(x - x.mean(axis=0)[None]).mean(axis=0)
        old = stats[name]
        after[name] = {
            "mean": 0.5 * old["mean"] + 0.5 * mean,
            "var": 0.5 * old["var"] + 0.5 * var,
        }
        x = (x - mean[None]) / jnp.sqrt(var + 1e-5)[None]
        return x * params[name]["scale"][None] + params[name]["bias"][None]

    def dense(name, x):
        return x @ params[name]["kernel"] + params[name]["bias"][None]

    after = {}
    made = norm("last", dense("second", jnp.tanh(norm("norm", dense("first", x)))))
    each = jnp.square(made - y).mean(axis=1)
    return (each * weights).sum() / denominator, after


@pytest.mark.parametrize(
    ("kind", "mesh_name", "options"),
    [
        pytest.param("nnx", "one device", {"accumulate": 4}, marks=pytest.mark.slow),
        pytest.param("nnx", "batch=8", {}, marks=pytest.mark.slow),
        pytest.param(
            "nnx", "batch=8", {"accumulate": 2, "remat": "full"}, marks=pytest.mark.slow
        ),
        ("nnx", "batch=2, model=4", {"accumulate": 2}),
        ("linen", "batch=8", {}),
        pytest.param(
            *("linen", "batch=8", {"accumulate": 2, "remat": "full"}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_batch_statistics_are_those_of_the_real_rows_of_each_microbatch(
    kind, mesh_name, options
):
    mesh, rules = mesh_of(mesh_name), MESHES[mesh_name][1]
    if kind == "nnx":
        state = create(lambda: Norms(nnx.Rngs(0)), mesh, rules=rules)
    else:
        state = of_linen(LinenNorms(), False, mesh=mesh, rules=rules)

    def stats(state):
        return state.model_state if kind == "nnx" else state.model_state["batch_stats"]

    loss_fn = squares if kind == "nnx" else linen_squares
    params, expected = on_host(state.params), on_host(stats(state))
    # Padding that would show; every other row, so that whole parts are padding.
    weights = WEIGHTS * (np.arange(16) % 4 != 3)
    x = np.where(weights[:, None] == 0, np.float32(50), X)
    train_step = ml.make_train_step(loss_fn, **options)
    by_hand = jax.value_and_grad(norms_by_hand, has_aux=True)
    for _ in range(2):
        batch = on(mesh, {"x": x, "y": Y, "weight": weights.astype("float32")})
        state, metrics = train_step(state, batch)
        (loss, expected), grads = by_hand(
            params, expected, x, Y, weights, options.get("accumulate", 1)
        )
        params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4)
    # float32 sums of 11 rows, through two normalizations
    assert_close(on_host(state.params), on_host(params), rtol=1e-3, atol=2e-5)
    assert_close(on_host(stats(state)), on_host(expected), rtol=1e-3, atol=2e-5)


def test_statistics_of_a_batch_of_nothing_but_padding_are_kept():
    state = create(lambda: Norms(nnx.Rngs(0)))
    before = on_host((state.params, state.model_state))
    batch = on(mesh_of(), {"x": X, "y": Y, "weight": np.zeros(16, "float32")})
    state, _ = ml.make_train_step(squares, accumulate=2)(state, batch)
    after = on_host((state.params, state.model_state))
    assert_close(after, before, rtol=0, atol=0)


# Random numbers.


class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x))


class LinenDropped(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(4)(x))


def dropped(kind, mesh, tx=None):
    if kind == "nnx":
        return create(lambda: Dropped(nnx.Rngs(0)), mesh, tx), squares
    return of_linen(LinenDropped(), False, mesh=mesh, tx=tx), linen_squares


@pytest.mark.parametrize(
    ("kind", "accumulate"),
    [("nnx", 2), pytest.param("linen", 1, marks=pytest.mark.slow)],
)
def test_the_same_is_dropped_on_any_mesh(kind, accumulate):
    found = []
    for name in ("one device", "batch=8"):
        mesh = mesh_of(name)
        state, loss_fn = dropped(kind, mesh)
        train_step = ml.make_train_step(loss_fn, accumulate=accumulate)
        of_steps = []
        for _ in range(2):
            state, metrics = train_step(state, on(mesh, {"x": X, "y": Y}))
            of_steps.append(float(metrics["loss"]))
        found.append((of_steps, on_host(state.params)))
    assert_close(found[0], found[1])


@pytest.mark.parametrize("kind", [pytest.param("nnx", marks=pytest.mark.slow), "linen"])
def test_every_step_and_every_microbatch_drops_something_else(kind):
    """All rows are alike, and so are the parameters: only what is dropped differs."""
    state, loss_fn = dropped(kind, mesh_of(), optax.sgd(0.0))
    train_step = ml.make_train_step(loss_fn, accumulate=2)
    found = set()
    for _ in range(2):
        for part in ([1, 0], [0, 1]):
            batch = {"x": np.repeat(X[:1], 16, 0), "y": np.repeat(Y[:1], 16, 0)}
            batch["weight"] = np.tile(np.array(part, "float32"), 8)
            _, metrics = train_step(jax.tree.map(jnp.copy, state), on(mesh_of(), batch))
            found.add(float(metrics["loss"]))
        state, _ = train_step(state, on(mesh_of(), batch))
    assert len(found) == 4


# The compiled program.


def collectives(text):
    """Counts collectives by kind and shapes."""
    return collections.Counter(
        (kind, tuple(sorted(re.findall(r"[a-z]+\d*\[[\d,]*\]", shapes))))
        for shapes, kind in re.findall(
            r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|"
            r"collective-permute)(?:-start)?\(",
            re.sub(r"\{[\d,]*\}", "", text),
        )
    )


def hidden():
    rngs = nnx.Rngs(0)
    return nnx.Sequential(
        nnx.Linear(32, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 8, rngs=rngs)
    )


def test_weights_are_added_in_the_same_round_as_the_gradients():
    """Not in one of their own, before the backward pass."""
    mesh = mesh_of()
    batch = {"x": np.ones((64, 32), "float32"), "y": np.ones((64, 8), "float32")}
    batch["weight"] = np.ones(64, "float32")
    state = create(hidden, mesh, optax.adam(1e-3))
    compiled = ml.make_train_step(squares).lower(state, on(mesh, batch)).compile()
    assert [kind for kind, _ in collectives(compiled.as_text()).elements()] == [
        "all-reduce"
    ]
