"""What a step takes: host batches, weights in their place, states that fit."""

import copy
import functools
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from tests.bad_values import BAD, refusal
from tests.error_messages import message_of


RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype("float32")
Y = RNG.normal(size=(16, 4)).astype("float32")


@pytest.fixture
def mesh():
    return ml.create_mesh({"batch": 4, "model": 2})


def create(mesh, tx=None, build=lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0))):
    return ml.TrainState.create(build, tx or optax.sgd(0.1), ml.LayoutMap(mesh, {}))


def on(mesh, batch):
    return ml.relayout(batch, mesh.layout("batch", ...))


def squares(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"])


# Batches from the host.


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}])
def test_a_batch_from_the_host_is_sharded_over_the_batch_axes(mesh, options):
    host = {"x": X, "y": Y}
    shards = []

    def loss_fn(model, batch):
        jax.debug.inspect_array_sharding(
            batch["x"], callback=lambda s: shards.append(s.shard_shape((16, 4)))
        )
        return squares(model, batch)

    states = []
    for batch in (host, on(mesh, host)):
        train_step = ml.make_train_step(squares, **options)
        state, _ = train_step(create(mesh, optax.adam(0.1)), batch)
        states.append(state.params)
    jax.tree.map(np.testing.assert_array_equal, *states)
    if not options:
        ml.make_train_step(loss_fn)(create(mesh), host)
        assert set(shards) == {(4, 4)}


def test_batches_of_a_call_of_several_steps_come_from_the_host_too(mesh):
    host = {"x": X, "y": Y}
    states = []
    for batches in ([host, host], [on(mesh, host), on(mesh, host)]):
        train_step = ml.make_train_step(squares, steps_per_call=2)
        states.append(train_step(create(mesh), batches)[0].params)
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_what_starts_on_no_mesh_and_comes_back_on_one_is_a_recompilation(mesh):
    @ml.compile_step
    def step(state, batch, metrics):
        return state, metrics.update_from(
            outputs={}, batch=batch, losses=batch["x"][:, 0]
        )

    def call(results, _):
        return step(results[0], on(mesh, {"x": X}), results[1])

    start = create(mesh), ml.metrics.Metrics({"d": ml.metrics.Mean()})
    with pytest.warns(ml.errors.RecompileWarning) as caught:
        _, metrics = functools.reduce(call, range(3), start)
    # JAX's spec of an array that is replicated is either.
    assert [str(one.message).replace("(None,)", "()") for one in caught] == [
        "step recompiles: the layout of metrics/metrics/d/sums changed from no layout of "
        "its own to () on (batch=4, model=2)."
    ]
    np.testing.assert_allclose(metrics["d"], X[:, 0].mean(), rtol=1e-5)


# Weights.


def test_a_batch_with_its_weights_elsewhere_is_refused(mesh):
    data = {"x": X[:13], "y": Y[:13]}
    batches = ml.distribute_dataset(data, mesh, global_batch_size=16, weights="mask")
    batch = next(iter(batches))
    for make in (ml.make_train_step, ml.make_eval_step):
        assert message_of(lambda make=make: make(squares)(create(mesh), batch)) == (
            "the batch's weights are at 'mask', but the step looks for them at "
            "'weight', so that padding would count as examples. Give weights='mask' to the step, or weights='weight' to the dataset."
        )


@pytest.mark.parametrize("value", [np.nan, -1.0, np.inf])
@pytest.mark.parametrize("stacked", [(), (2,)])
def test_weights_that_make_no_sense_are_refused_on_the_host(mesh, value, stacked):
    batch = {"x": X, "y": Y, "weight": np.full(16, value, "float32")}
    batch = {
        name: np.broadcast_to(x, (*stacked, *x.shape)) for name, x in batch.items()
    }
    step = ml.make_train_step(squares, steps_per_call=len(stacked) + 1)
    assert message_of(lambda: step(create(mesh), batch)) == (
        "the weights of a batch must be finite and not negative; 'weight' has values "
        f"from {np.float32(value)} to {np.float32(value)}."
    )


@pytest.mark.parametrize(
    ("denominator", "accumulate"), [("real", 2), ("global_batch_size", 1)]
)
def test_a_negative_weight_on_devices_shows_in_the_loss(mesh, denominator, accumulate):
    weights = np.tile(np.array([1, -1], "float32"), 8)
    batch = on(mesh, {"x": X, "y": Y, "weight": weights})
    step = ml.make_train_step(squares, denominator=denominator, accumulate=accumulate)
    _, metrics = step(create(mesh), batch)
    assert np.isnan(metrics["loss"])


def test_what_weights_a_host_batch_carries_is_said_once(mesh, caplog):
    def loss_fn(model, batch):
        return squares(model, batch)

    batch = {"x": X, "y": Y, "weight": np.ones(16, "float32")}
    step, eval_step = ml.make_train_step(loss_fn), ml.make_eval_step(loss_fn)
    state, _ = step(create(mesh), batch)
    eval_step(state, batch)
    step(state, batch)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["examples are weighted by 'weight' of each batch."]


# Losses.


def test_a_batch_without_examples_is_refused(mesh):
    batch = {"x": X[:0], "y": Y[:0]}
    for make in (ml.make_train_step, ml.make_eval_step):
        assert message_of(lambda make=make: make(squares)(create(mesh), batch)) == (
            "the batch has no examples, and there is nothing to learn from it."
        )


def test_the_arity_of_functions_is_looked_at_when_the_step_is_made():
    assert message_of(lambda: ml.make_train_step(lambda model: 1.0)) == (
        "make_train_step: loss_fn is called as loss_fn(model, batch), but takes "
        "(model)."
    )
    ml.make_train_step(lambda model, batch, rngs, *, train: 1.0)
    assert "predict_fn(model, batch)" in message_of(
        lambda: ml.make_predict_step(lambda model: 1.0)
    )


# States and optimizers that do not fit.


def test_a_state_that_was_used_up_is_refused_by_eval_steps(mesh):
    state, batch = create(mesh), on(mesh, {"x": X, "y": Y})
    eval_step = ml.make_eval_step(squares)
    eval_step(state, batch)
    ml.make_train_step(squares)(state, batch)
    assert message_of(lambda: eval_step(state, batch)) == (
        "eval_step: 'state/params/bias' was used up by an earlier call of a step. "
        "Continue with the state that the step returned."
    )


class Whole(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.count = nnx.Param(jnp.zeros(3, "int32"))

    def __call__(self, x):
        return self.linear(x)


def test_integers_are_not_trained(mesh):
    state = create(mesh, build=lambda: Whole(nnx.Rngs(0)))
    batch = on(mesh, {"x": X, "y": Y})
    assert message_of(lambda: ml.make_train_step(squares)(state, batch)) == (
        "the parameter count is no float: make it no nnx.Param."
    )


# Steps as objects.


def test_steps_are_copied_and_pickled_without_what_was_compiled(mesh):
    batch = on(mesh, {"x": X, "y": Y})
    doubled = ml.compile_step(lambda state, batch: (state, batch["x"].sum()))
    for step in (ml.make_train_step(squares), ml.make_eval_step(squares), doubled):
        state = create(mesh)
        step(jax.tree.map(jnp.copy, state), batch)
        for same in (copy.deepcopy(step), cloudpickle.loads(cloudpickle.dumps(step))):
            expected = step(jax.tree.map(jnp.copy, state), batch)
            found = same(jax.tree.map(jnp.copy, state), batch)
            if isinstance(found, tuple):
                expected, found = expected[1], found[1]
            assert str(found) == str(expected)


OPTIONS = [
    "accumulate",
    "clip_norm",
    "on_nonfinite",
    "ema",
    "precision",
    "remat",
    "steps_per_call",
    "weights",
    "denominator",
    "metrics",
    "regularizers",
    "layouts",
    "on_recompile",
]


# What works among the values of the table; everything else is refused.
WORKS: dict[str, list[Any]] = {
    "clip_norm": [None],
    "ema": [None, 0],
    "weights": [-1, 0, "x", ""],
    "metrics": [None, {}],
    "regularizers": [None, {}],
    "layouts": [None],
}


@pytest.mark.parametrize("name", [*OPTIONS, "loss_fn"])
def test_options_that_make_no_sense_are_refused_when_the_step_is_made(name):
    works = [(type(value), value) for value in WORKS.get(name, [])]
    for value in BAD:
        options: dict[str, Any] = {"loss_fn": squares, name: value}
        said = refusal(ml.MeshLayoutError, ml.make_train_step, **options)
        is_refused = all(type(value) is not kind or value != one for kind, one in works)
        assert (said is not None) == is_refused, (value, said)
