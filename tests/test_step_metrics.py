"""Metrics in train and eval steps: where they start, what is taken, what is refused."""

from typing import Any

import flax.struct
import jax
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml


pytestmark = pytest.mark.filterwarnings("error::meshlayout.errors.RecompileWarning")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype("float32")
LABELS = RNG.integers(0, 3, 16).astype("int32")


@pytest.fixture(params=[8, 1], ids=["8 devices", "1 device"])
def mesh(request) -> ml.Mesh:
    return ml.create_mesh(
        {"batch": request.param}, devices=jax.devices()[: request.param]
    )


def on(mesh, **more):
    return ml.relayout({"x": X, "label": LABELS, **more}, mesh.layout("batch", ...))


def create(mesh):
    # A rate of 0: every step measures the same.
    return ml.TrainState.create(
        lambda: nnx.Linear(4, 3, rngs=nnx.Rngs(0)),
        optax.sgd(0.0),
        ml.LayoutMap(mesh, {}),
    )


def loss_fn(model, batch):
    logits = model(batch["x"])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    right = logits.argmax(1) == batch["label"]
    return each, {"logits": logits, "each": each, "values": each, "right": right}


def by_hand(state):
    """The losses, and which predictions are right, in NumPy."""
    logits = X @ np.asarray(state.params["kernel"]) + np.asarray(state.params["bias"])
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    losses = -np.log(chances[np.arange(16), LABELS])
    return losses, logits.argmax(1) == LABELS


@flax.struct.dataclass
class MeanEach:
    """A user's own metric, that starts with Python's numbers."""

    total: Any = 0.0
    count: Any = 0

    @classmethod
    def empty(cls):
        return cls()

    @classmethod
    def from_model_output(cls, each, weights=None):
        if weights is None:
            return MeanEach(each.sum(), each.shape[0])
        return MeanEach((each * weights).sum(), weights.sum())

    def merge(self, other):
        return MeanEach(self.total + other.total, self.count + other.count)

    def compute(self):
        return self.total / self.count


def every_metric():
    return {
        "own": MeanEach(),
        "accuracy": ml.metrics.Accuracy(),
        "nnx": nnx.metrics.Average("each"),
    }


# What is measured.


@pytest.mark.parametrize(
    "weights",
    [pytest.param(None, marks=pytest.mark.slow), np.float32([0.5, 0, 1, 1] * 4)],
)
def test_metrics_continue_and_start_again_without_another_program(mesh, weights):
    batch = on(mesh) if weights is None else on(mesh, weight=weights)
    state = create(mesh)
    losses, right = by_hand(state)
    weights = np.ones(16) if weights is None else weights
    own = (losses * weights).sum() / weights.sum()
    accuracy = (right * weights).sum() / weights.sum()
    train_step = ml.make_train_step(loss_fn, metrics=every_metric())
    eval_step = ml.make_eval_step(loss_fn, metrics=every_metric())
    state, trained = train_step(state, batch)
    evaluated = eval_step(state, batch)
    for _ in range(2):
        state, trained = train_step(state, batch, trained)
        evaluated = eval_step(state, batch, evaluated)
        for found in (trained.to_host(), evaluated.to_host()):
            np.testing.assert_allclose(found["own"], own, rtol=1e-5)
            np.testing.assert_allclose(found["loss"], own, rtol=1e-5)
            np.testing.assert_allclose(found["accuracy"], accuracy, rtol=1e-5)
            np.testing.assert_allclose(found["nnx"], own, rtol=1e-5)
        trained, evaluated = trained.empty(), evaluated.empty()


@pytest.mark.parametrize("options", [{"steps_per_call": 2}, {"accumulate": 2}])
def test_an_own_metric_of_whole_numbers_is_carried_through_several_steps(options):
    mesh = ml.create_mesh({"batch": 8})
    batch = on(mesh, weight=np.full(16, 0.5, "float32"))
    batch = [batch, batch] if "steps_per_call" in options else batch
    train_step = ml.make_train_step(loss_fn, metrics={"own": MeanEach()}, **options)
    state, metrics = train_step(create(mesh), batch)
    state, metrics = train_step(state, batch, metrics.empty())
    state, metrics = train_step(state, batch, metrics)
    np.testing.assert_allclose(metrics["own"], by_hand(state)[0].mean(), rtol=1e-5)


@pytest.mark.parametrize("make", [ml.make_train_step, ml.make_eval_step])
@pytest.mark.parametrize("metric", [ml.metrics.Accuracy, nnx.metrics.Average])
def test_a_class_of_metrics_is_refused_when_the_step_is_made(metric, make):
    message = f"the class {metric.__name__} is no metric; an instance of it is"
    with pytest.raises(ml.errors.MetricError, match=f"^metrics: 'a': {message}"):
        make(loss_fn, metrics={"a": metric})
