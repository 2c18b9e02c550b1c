"""The custom-training program: a strategy's steps beside plain Flax on one device.

Also what the library's metrics count of a short batch in such steps.
"""

import functools
import itertools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from meshlayout.distribute import get_replica_context
from meshlayout.errors import MetricError
from models.convnet import ConvNet
from models.custom_training import LEARNING_RATE, CustomTraining, accuracy_on_one_device
from models.data import Split
from models.mlp import MLP
from tests.processes import ROOT
from tests.replicas import mirrored


SIZE = 16  # rows of a batch; 37 images make a last one of 5, which does not divide
NUM_IMAGES = 37


def small():
    return MLP(hidden_features=8, rngs=nnx.Rngs(0))


def convnet():
    return ConvNet(rngs=nnx.Rngs(0))


def some_images(rows=NUM_IMAGES, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(10, size=rows).astype("int32")
    pixels = rng.integers(0, 60, size=(rows, 28, 28, 1))
    pixels[np.arange(rows), 2 * labels] += 150  # so that there is something to learn
    return Split(pixels.astype("uint8"), labels)


def rows_of(split):
    for start in range(0, len(split), SIZE):
        part = slice(start, start + SIZE)
        yield split.images[part], split.labels[part]


def losses_of(model, images, labels):
    logits = model(images.astype("float32") / 255)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels), logits


@functools.cache
def trained_by_hand(build):
    """On one device: the losses, the parameters, and the training accuracy."""
    split = some_images()
    graph, params = nnx.split(build(), nnx.Param)
    optimizer = optax.adam(LEARNING_RATE)
    slots = optimizer.init(params)

    @jax.jit
    def gradients(params, images, labels):
        def mean_loss(params):
            losses, logits = losses_of(nnx.merge(graph, params), images, labels)
            kernels = [x for x in jax.tree.leaves(params) if x.ndim > 1]
            return losses.mean() + 1e-5 * sum(jnp.sum(x**2) for x in kernels), logits

        return jax.value_and_grad(mean_loss, has_aux=True)(params)

    losses, correct = [], 0
    for images, labels in rows_of(split):
        (loss, logits), grads = gradients(params, images, labels)
        updates, slots = optimizer.update(grads, slots, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
        correct += int((np.argmax(logits, axis=-1) == labels).sum())
    return losses, nnx.to_pure_dict(params), correct / len(split)


# Adam divides small gradients by themselves, and so also their rounding.
@pytest.mark.parametrize(
    ("build", "replicas", "atol"),
    [
        pytest.param(small, 1, 1e-6, marks=pytest.mark.slow),
        (small, 2, 1e-5),
        *(pytest.param(convnet, n, 1e-4, marks=pytest.mark.slow) for n in (1, 8)),
    ],
)
def test_it_computes_what_one_device_does(build, replicas, atol):
    split, strategy = some_images(), mirrored(replicas)
    training = CustomTraining(strategy, build)
    batches = strategy.distribute_dataset((split.images, split.labels), SIZE)
    losses = [float(training.distributed_train_step(inputs)) for inputs in batches]

    expected, params, accuracy = trained_by_hand(build)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    trained = nnx.to_pure_dict(nnx.state(training.model, nnx.Param))
    for x, y in zip(*map(jax.tree.leaves, (trained, params)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=atol)
    np.testing.assert_allclose(training.train_accuracy.compute(), accuracy, rtol=1e-6)

    loss, accuracy = training.test(batches)
    rows, logits = losses_of(training.model, split.images, split.labels)
    np.testing.assert_allclose(loss, rows.mean(), rtol=1e-5)
    correct = np.argmax(logits, axis=-1) == split.labels
    np.testing.assert_allclose(accuracy, correct.mean(), rtol=1e-6)


def test_what_was_saved_under_a_strategy_is_restored_without_one(tmp_path):
    split, strategy = some_images(), mirrored(2)
    batches = strategy.distribute_dataset((split.images, split.labels), SIZE)
    training = CustomTraining(strategy, small)
    loss = training.train(itertools.islice(iter(batches), 2))
    expected, _, _ = trained_by_hand(small)
    np.testing.assert_allclose(loss, np.mean(expected[:2]), rtol=1e-5)
    with ml.Checkpointer(tmp_path / "run") as ck:
        ck.save(1, training.state)
        plain = CustomTraining(ml.distribute.get_strategy(), small)
        plain_state = ck.restore(plain.state)
    model = plain_state["model"]
    assert len(model.hidden.kernel[...].sharding.device_set) == 1
    pair = map(nnx.state, (plain_state, training.state))
    jax.tree.map(np.testing.assert_array_equal, *pair)
    _, accuracy = training.test(batches)
    alone = accuracy_on_one_device(model, split.images, split.labels, SIZE)
    assert alone == pytest.approx(accuracy)


def short_batch(strategy):
    x = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")
    y = np.arange(5, dtype="int32") % 3
    (batch,) = strategy.distribute_dataset((x, y), 8)
    return batch, x, y


def test_metrics_of_the_library_count_the_rows_that_are_there():
    strategy = mirrored(4)
    batch, x, y = short_batch(strategy)

    def step(inputs):
        x, y = inputs
        weights = jnp.full(len(y), 2.0)
        accuracy = ml.metrics.Accuracy().update(x, y)
        return {
            "mean": ml.metrics.Mean().update(x),
            "weighted": ml.metrics.Sum().update(x[:, 0], weights),
            "accuracy": accuracy,
        }

    metrics = strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)
    values = {name: metric.compute() for name, metric in metrics.items()}
    np.testing.assert_allclose(values["mean"], x.mean(), rtol=1e-5)
    np.testing.assert_allclose(values["weighted"], 2 * x[:, 0].sum(), rtol=1e-5)
    accuracy = (x.argmax(-1) == y).mean()
    np.testing.assert_allclose(values["accuracy"], accuracy, rtol=1e-6)


def test_values_that_are_not_of_rows_are_refused_in_a_short_batch():
    strategy = mirrored(4)
    batch, _, _ = short_batch(strategy)
    with pytest.raises(MetricError) as refusal:
        strategy.run(lambda x: ml.metrics.Mean().update(x[0].ravel()), (batch,))
    start = "Mean: this replica's example_mask f32[4] does not fit elements f32[12]. "
    assert str(refusal.value).startswith(start)
    assert "with twice its rows" in "".join(refusal.value.__notes__)

    def with_weights(inputs):
        weights = jnp.repeat(get_replica_context().example_mask, 3)
        return ml.metrics.Sum().update(jnp.ones(weights.shape), weights)

    total = strategy.reduce("SUM", strategy.run(with_weights, (batch,)), axis=None)
    assert float(total.compute()) == 15


@pytest.mark.slow
def test_the_program_trains_saves_and_tests_on_one_device():
    limits = ["--limit-train", "1000", "--limit-test", "200", "--epochs", "2"]
    run = subprocess.run(
        [sys.executable, "-m", "models.custom_training", *limits],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    replicas, _, *epochs, more, last = run.stdout.splitlines()
    assert replicas == "Number of replicas: 8"
    shape = (
        r"epoch \d/2  loss [\d.]+  accuracy [\d.]+%  "
        r"test loss [\d.]+  test accuracy ([\d.]+%)"
    )
    assert len(epochs) == 2
    accuracies = [re.fullmatch(shape, line)[1] for line in epochs]
    assert re.fullmatch(r"loss of the first 10 batches of .* [\d.]+", more)
    assert last.endswith(f"on one device {accuracies[-1]}")
