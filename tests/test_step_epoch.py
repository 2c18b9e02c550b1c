"""`scan_epoch` does what a loop in Python over the same batches does."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml


RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 4)).astype("float32")
Y = RNG.normal(size=(20, 3)).astype("float32")
W = RNG.integers(0, 3, 20).astype("float32")


def create(mesh):
    return ml.TrainState.create(
        lambda: nnx.Linear(4, 3, rngs=nnx.Rngs(0)),
        optax.sgd(0.1),
        ml.LayoutMap(mesh, {}),
    )


def squares(model, batch):
    x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch[:2]
    return jnp.square(model(x) - y)


class Pair(NamedTuple):
    x: Any
    y: Any
    weight: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fields:
    x: Any
    y: Any
    weight: Any = None

    def __getitem__(self, part):
        return (self.x, self.y)[part]


# A dataset of 20 rows, its weights, and where they are.
DATASETS = {
    "a dict": ({"x": X, "y": Y}, None, "weight"),
    "a dict with weights": ({"x": X, "y": Y, "weight": W}, W, "weight"),
    "a tuple": ((X, Y), None, 2),
    "a tuple with weights": ((X, Y, W), W, 2),
    "a list": ([X, Y], None, 2),
    "a named tuple": (Pair(X, Y), None, "weight"),
    "a named tuple with weights": (Pair(X, Y, W), W, 2),
    "a dataclass": (Fields(X, Y), None, "weight"),
}


@pytest.mark.parametrize("name", DATASETS)
def test_an_epoch_with_a_short_last_batch_is_that_of_numpy(name):
    data, weights, where = DATASETS[name]
    mesh = ml.create_mesh({"batch": 8})
    train_step = ml.make_train_step(squares, weights=where)
    state = create(mesh)
    kernel, bias = np.asarray(state.params["kernel"]), np.asarray(state.params["bias"])
    weights = np.ones(20, "float32") if weights is None else weights
    losses = []
    for at in range(0, 20, 8):
        x, y, w = X[at : at + 8], Y[at : at + 8], weights[at : at + 8]
        error = (x @ kernel + bias - y) * w[:, None] / w.sum()
        losses.append((np.square(x @ kernel + bias - y).mean(1) * w).sum())
        kernel = kernel - 0.1 * 2 / 3 * x.T @ error
        bias = bias - 0.1 * 2 / 3 * error.sum(0)
    state, metrics = ml.scan_epoch(train_step, state, data, global_batch_size=8)
    np.testing.assert_allclose(state.params["kernel"], kernel, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.params["bias"], bias, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["loss"], sum(losses) / weights.sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("axes", "entry"),
    [
        ({"batch": 8}, "batch"),
        ({"fsdp": 8}, "fsdp"),
        ({"data": 2, "fsdp": 2, "model": 2}, ("data", "fsdp")),
        ({"model": 8}, None),
    ],
)
def test_rows_are_sharded_over_the_axes_for_batches(axes, entry):
    mesh = ml.create_mesh(axes)
    seen = []

    def loss_fn(model, batch):
        jax.debug.inspect_array_sharding(batch["x"], callback=seen.append)
        return squares(model, batch)

    train_step = ml.make_train_step(loss_fn)
    data = {"x": X[:16], "y": Y[:16]}
    ml.scan_epoch(train_step, create(mesh), data, global_batch_size=8)
    wanted = mesh.layout(entry, None).sharding
    assert seen
    assert all(one.is_equivalent_to(wanted, 2) for one in seen)


def test_each_key_is_another_order_of_the_same_rows():
    mesh = ml.create_mesh({"batch": 8})
    data = {"x": X[:16], "y": Y[:16]}
    kernels = []
    for key in (jax.random.key(0), jax.random.key(0), jax.random.PRNGKey(1)):
        state, _ = ml.scan_epoch(
            ml.make_train_step(squares),
            create(mesh),
            data,
            global_batch_size=8,
            shuffle=key,
        )
        kernels.append(np.asarray(state.params["kernel"]))
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert not np.array_equal(kernels[0], kernels[2])


SHUFFLE = (
    "shuffle= takes a PRNG key, a new one for each epoch, as jax.random.key(epoch), "
    "and got {}."
)
REFUSED = {
    "a size that is no whole number": (
        {"global_batch_size": 16.0},
        "scan_epoch: global_batch_size must be a positive integer, got 16.0.",
    ),
    "no size": (
        {"global_batch_size": 0},
        "scan_epoch: global_batch_size must be a positive integer, got 0.",
    ),
    "a yes to shuffle": ({"shuffle": True}, SHUFFLE.format(True)),
    "a seed to shuffle": ({"shuffle": 7}, SHUFFLE.format(7)),
    "no examples": (
        {"data": {"x": X[:0], "y": Y[:0]}},
        "scan_epoch was given a dataset of no examples.",
    ),
    "no place for weights": (
        {"data": (X, Y)},
        "20 examples in batches of 8 leave a short last batch, and a tuple has no "
        "place for weights='weight'. Give a dict of arrays; or a tuple, with weights= its length. Or give a global batch size that divides.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_an_epoch_is_refused_in_words(name):
    given, message = REFUSED[name]
    options: dict[str, Any] = {
        "data": {"x": X, "y": Y},
        "global_batch_size": 8,
        **given,
    }
    state = create(ml.create_mesh({"batch": 8}))
    with pytest.raises(ml.errors.StepError) as caught:
        ml.scan_epoch(ml.make_train_step(squares), state, **options)
    assert str(caught.value) == message


def test_an_epoch_is_lowered_for_its_arguments_and_nothing_is_used_up():
    state = create(ml.create_mesh({"batch": 8}))
    train_step = ml.make_train_step(squares)
    data = {"x": X, "y": Y}
    lowered = ml.scan_epoch.lower(train_step, state, data, global_batch_size=8)
    assert "while" in lowered.as_text()
    assert lowered.compile().memory_analysis() is not None
    state, _ = ml.scan_epoch(train_step, state, data, global_batch_size=8)
    assert int(state.step) == 3


def test_epochs_of_the_same_shapes_trace_the_loss_function_once(monkeypatch):
    abstract_calls, traces = [], []
    eval_shape = jax.eval_shape

    def counted(function, *args, **kwargs):
        abstract_calls.append(function)
        return eval_shape(function, *args, **kwargs)

    def loss_fn(model, batch):
        traces.append(batch)
        return squares(model, batch)

    state = create(ml.create_mesh({"batch": 8}))
    train_step = ml.make_train_step(loss_fn)
    counts = []
    for epoch in range(3):
        monkeypatch.setattr(jax, "eval_shape", counted)
        state, _ = ml.scan_epoch(
            train_step,
            state,
            {"x": X + epoch, "y": Y},
            global_batch_size=8,
            shuffle=jax.random.key(epoch),
        )
        monkeypatch.undo()
        counts.append((len(abstract_calls), len(traces)))
    assert counts == [counts[0]] * 3
    assert len(traces) == 1
