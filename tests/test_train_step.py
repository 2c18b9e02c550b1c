"""A train step's numbers are those of the same step written by hand on one device."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from flax.errors import ModifyScopeVariableError

import meshlayout as ml
from meshlayout import losses
from tests.raw_steps import train
from tests.same_bits import assert_same_bits
from tests.small_states import (
    DATA,
    RATE,
    MeanEach,
    X,
    Y,
    alone,
    assert_close,
    create,
    create_linen,
    descended,
    linear_by_hand,
    mesh_of,
    on,
    on_host,
    squares,
)


# The last rows are padding: on 8 devices, two shards of nothing else.
WEIGHTS = np.array([1, 0.5, 2, 1, 1, 0, 3, 1, 1, 1, 0.25, 0, 0, 0, 0, 0], "float32")
BATCH = {**DATA, "weight": WEIGHTS}


@pytest.fixture
def mesh():
    return mesh_of(batch=8)


def linen_squares(model, batch, train):
    return jnp.square(model(batch["x"], train) - batch["y"])


def trained_by_hand(state, loss_fn, batches, **options):
    """Trains the model of a state with plain SGD on one device."""
    options |= {"module": state.program.module}
    return train(alone(state), loss_fn, batches, optax.sgd(RATE), **options)


def shares(weights, denominator):
    """Returns by how much each loss counts, from a weight per example."""
    return np.repeat(weights[:, None], 4, axis=1) / 4 / denominator


def without_padding(values):
    """Returns rows whose padding would show in any sum."""
    return np.where(WEIGHTS[:, None] == 0, np.nan, values)


TOKENS = np.random.default_rng(1).integers(0, 3, size=(16, 4)).astype("float32")
TOKENS[-3:] = 0
REAL = shares(WEIGHTS, WEIGHTS.sum())
TWO = {"accumulate": 2}
EACH = np.full((16, 4), 1 / 64)
# Options, the batch, and by how much each loss counts.
SUMS = {
    "real": ({}, BATCH, REAL),
    "global_batch_size": (
        *({"denominator": "global_batch_size", **TWO}, BATCH),
        shares(WEIGHTS, 16),
    ),
    "a weight per token": (TWO, {**BATCH, "weight": TOKENS}, TOKENS / TOKENS.sum()),
    "a tuple": ({"weights": 2}, (X, Y, WEIGHTS), REAL),
    "NaN in padded inputs": ({}, {**BATCH, "x": without_padding(X)}, REAL),
    "NaN in padded labels": (TWO, {**BATCH, "y": without_padding(Y)}, REAL),
    "a scalar": ({}, DATA, EACH),
    "scalars": (TWO, DATA, EACH),
    "explicit axes": ({}, DATA, EACH),
    "explicit axes, microbatches": (TWO, BATCH, REAL),
}


@pytest.mark.parametrize("name", SUMS)
def test_what_counts_how_much_and_what_sums_are_divided_by(name):
    def loss_fn(model, batch):
        x, y = batch[:2] if isinstance(batch, tuple) else (batch["x"], batch["y"])
        each = jnp.square(model(x) - y)
        return each.mean() if "scalar" in name else each

    options, batch, counts = SUMS[name]
    types = "explicit" if name.startswith("explicit") else "auto"
    mesh = ml.create_mesh({"batch": 8}, axis_types=types)
    is_linen = "NaN" in name
    state = create_linen(mesh, nn.Dense(4)) if is_linen else create(mesh)
    expected = on_host(state.params)
    train_step = ml.make_train_step(loss_fn, **options)
    for _ in range(2):
        state, metrics = train_step(state, on(mesh, batch))
        grads, loss = linear_by_hand(expected, counts)
        expected = descended(expected, grads)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=2e-5)
    assert_close(state.params, expected)
    assert int(state.step) == 2


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_of_nothing_but_padding_changes_nothing_and_counts_nothing(
    mesh, accumulate
):
    state = create_linen(mesh, Norms(), False)
    before = on_host((state.params, state.model_state))
    other = jax.tree.map(jnp.copy, state)
    train_step = ml.make_train_step(linen_squares, accumulate=accumulate, clip_norm=1.0)
    padding = on(mesh, {**DATA, "weight": np.zeros(16, "float32")})
    state, metrics = train_step(state, padding)
    assert np.isnan([*metrics.to_host().values()]).all()
    assert_close((state.params, state.model_state), before, rtol=0, atol=0)
    _, alone = train_step(other, on(mesh, BATCH))
    _, both = train_step(state, on(mesh, BATCH), metrics)
    assert_same_bits(alone["loss"], both["loss"])


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2}, {"steps_per_call": 2}], ids=str
)
def test_metrics_are_means_over_all_examples_until_they_start_again(mesh, options):
    def loss_fn(model, batch):
        each = squares(model, batch)
        outputs = {"logits": model(batch["x"]), "off": batch["y"][:, 0]}
        return each, {**outputs, "each": each.mean(1), "values": each.mean(1)}

    users: dict[str, Any] = {
        "off": ml.metrics.Mean("off"),
        "mse": ml.metrics.Mean(),
        "own": MeanEach(),
        "nnx": nnx.metrics.Average("each"),
        "accuracy": ml.metrics.Accuracy(labels="label"),
    }
    labels = np.arange(16, dtype="int32") % 4
    train_step = ml.make_train_step(
        loss_fn, metrics=users, on_recompile="error", **options
    )
    eval_step = ml.make_eval_step(loss_fn, metrics=users, on_recompile="error")
    state = create(mesh, tx=optax.sgd(0.0))  # every step measures the same model
    params = on_host(state.params)
    made = X @ params["kernel"] + params["bias"]
    trained = evaluated = None
    for is_second in (False, True):
        sums, total = np.zeros(3), 0
        for number in range(3):
            weights = np.roll(WEIGHTS, number + is_second)
            batch = on(mesh, {**BATCH, "weight": weights, "label": labels})
            rows = [batch, batch] if "steps_per_call" in options else batch
            state, trained = train_step(state, rows, trained)
            evaluated = eval_step(state, batch, evaluated)
            values = np.square(made - Y).mean(1), Y[:, 0], made.argmax(1) == labels
            sums += [(weights * x).sum() for x in values]
            total += weights.sum()
        mse, off, right = sums / total
        expected = {"loss": mse, "off": off, "mse": mse, "own": mse, "nnx": mse}
        expected["accuracy"] = right
        for found in (trained.to_host(), evaluated.to_host()):
            assert list(found) == list(expected)
            assert found == pytest.approx(expected, rel=2e-5)
        trained, evaluated = trained.empty(), evaluated.empty()


@pytest.mark.parametrize("is_training", [True, False])
def test_the_loss_function_gets_what_it_asks_for(mesh, is_training):
    def loss_fn(model, batch, *, train, rngs):
        assert train is is_training
        noise = jax.random.normal(rngs.noise(), (16, 1))
        return jnp.square(model(batch["x"])) * 0 + noise

    state, found = create(mesh), []
    step = (ml.make_train_step if is_training else ml.make_eval_step)(loss_fn)
    for _ in range(2):
        result = step(state, on(mesh, DATA))
        state, metrics = result if is_training else (state, result)
        found.append(float(metrics["loss"]))
    assert (found[0] != found[1]) == is_training


def test_a_linen_module_at_rest_changes_no_statistics(mesh):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train=True):
            return nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))

    def errors_of(model, batch):
        return jnp.square(model(batch["x"]) - batch["y"]).sum(-1)

    state = create_linen(mesh, Net(), False)
    with pytest.raises(ModifyScopeVariableError) as caught:  # as plain Flax does
        ml.make_eval_step(errors_of)(state, on(mesh, DATA))
    assert "model(x, train=False)" in caught.value.__notes__[0]
    found = ml.Trainer(state, errors_of).predict(X, batch_size=16)
    variables = {"params": state.params, **state.model_state}
    assert_close(found, Net().apply(on_host(variables), X, train=False))


def test_eval_and_predict_steps_take_the_model_at_rest_and_change_nothing(mesh):
    def build():
        rngs = nnx.Rngs(0)
        linear, norm = nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        return nnx.Sequential(linear, nnx.Dropout(0.5, rngs=rngs), norm)

    state = create(mesh, build)
    before = state.params, state.model_state["layers"][2]
    kept = on_host(before)
    params = kept[0]["layers"][0]
    made = (X @ params["kernel"] + params["bias"]) / np.sqrt(1 + 1e-5)
    predict_step = ml.make_predict_step(lambda model, batch: model(batch["x"]))
    assert_close(predict_step(state, on(mesh, DATA)), made)
    metrics = ml.make_eval_step(squares)(state, on(mesh, BATCH))
    expected = (np.square(made - Y) * REAL).sum()
    np.testing.assert_allclose(metrics["loss"], expected, rtol=2e-5)
    assert_same_bits(on_host(before), kept)


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


@pytest.mark.filterwarnings("ignore:.*Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize(("kind", "accumulate"), [("nnx", 2), ("linen", 1)])
def test_recorded_losses_are_added_and_reported_one_by_one(mesh, kind, accumulate):
    if kind == "nnx":
        state = create(mesh, lambda: Recording(nnx.Rngs(0)))
    else:
        state = create_linen(mesh, LinenRecording())
    options, new = {"accumulate": accumulate, "clip_norm": 1e9}, state
    batches, step = [BATCH, BATCH], ml.make_train_step(squares, **options)
    plain = trained_by_hand(state, squares, batches, **options)
    for batch, expected in zip(batches, plain.metrics, strict=True):
        structure = jax.tree.structure(new.model_state)
        new, metrics = step(new, on(mesh, batch))
        assert metrics.to_host() == pytest.approx(expected, rel=2e-5)
        assert jax.tree.structure(new.model_state) == structure
    assert_close(new.params, plain.params)


class RecordingAs(nnx.Module):
    def __init__(self, name, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.name = name

    def __call__(self, x):
        losses.record(self, self.name, jnp.full(x.shape[0], 7.0))
        return self.linear(x)


@pytest.mark.parametrize("name", ["activity", "l2", "data_loss", "grad_norm"])
def test_a_recorded_loss_counts_whatever_it_is_called(mesh, name):
    options = {"regularizers": {"l2": losses.l2(0.1)}, "clip_norm": 1e9}
    state = create(mesh, lambda: RecordingAs(name, nnx.Rngs(0)))
    params = on_host(state.params)["linear"]
    _, loss = linear_by_hand(params)
    penalty = 0.1 * sum(np.square(x).sum() for x in params.values())
    with contextlib.suppress(ml.errors.LossError):  # refusing the name is as good
        _, metrics = ml.make_train_step(squares, **options)(state, on(mesh, DATA))
        np.testing.assert_allclose(metrics["loss"], loss + penalty + 7, rtol=2e-5)


class Norms(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        options = {"use_running_average": not train, "momentum": 0.5}
        x = nn.Dense(4, name="first")(x)
        x = jnp.tanh(nn.BatchNorm(**options, name="norm")(x))
        x = nn.Dense(4, name="second")(x)
        return nn.BatchNorm(**options, use_fast_variance=False, name="last")(x)


def test_batch_statistics_are_those_of_the_real_rows_of_each_microbatch():
    mesh = mesh_of(batch=2, model=4)
    state = create_linen(mesh, Norms(), False, rules={"kernel$": (None, "model")})
    # Padding that would show; every other row, so that whole parts are padding.
    weights = (WEIGHTS * (np.arange(16) % 4 != 3)).astype("float32")
    x = np.where(weights[:, None] == 0, np.float32(50), X)
    batches = [{"x": x, "y": Y, "weight": weights}] * 2
    plain = trained_by_hand(state, linen_squares, batches, accumulate=4)
    train_step = ml.make_train_step(linen_squares, accumulate=4)
    for batch, loss in zip(batches, plain.losses, strict=True):
        state, metrics = train_step(state, on(mesh, batch))
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4)
    # float32 sums of 11 rows, through two normalizations
    found, expected = (state.params, state.model_state), (plain.params, plain.state)
    assert_close(found, expected, rtol=1e-3, atol=2e-5)


class LinenDropped(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(4)(x))


def test_every_step_and_every_microbatch_drops_something_else(mesh):
    """All rows are alike, and so are the parameters: only what is dropped differs."""
    state = create_linen(mesh, LinenDropped(), False, tx=optax.sgd(0.0))
    train_step = ml.make_train_step(linen_squares, accumulate=2)
    found = set()
    for _ in range(2):
        for part in ([1, 0], [0, 1]):
            batch = {"x": np.repeat(X[:1], 16, 0), "y": np.repeat(Y[:1], 16, 0)}
            batch["weight"] = np.tile(np.array(part, "float32"), 8)
            _, metrics = train_step(jax.tree.map(jnp.copy, state), on(mesh, batch))
            found.add(float(metrics["loss"]))
        state, _ = train_step(state, on(mesh, batch))
    assert len(found) == 4
