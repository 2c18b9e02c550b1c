"""Flax's MNIST tutorial for NNX, on one device and on a mesh.

    python examples/port_nnx_mnist.py

Written after "MNIST tutorial" in the documentation of Flax (Apache License 2.0): a
convolutional network with batch normalization and dropout, an `nnx.Optimizer`, an
`nnx.MultiMetric` and a step under `nnx.jit`. Images are made up, so that nothing is
downloaded.

`on_a_mesh` is `one_device` and the lines marked `# mesh`: the batch is spread over two
groups of devices, and the dense layers over the four devices of each. The model and the
step are not touched, and the numbers are the same: dropout draws what it drew, and
batch normalization takes its statistics from the whole batch.
"""

from collections.abc import Iterator
from functools import partial

import jax
import numpy as np
import optax
from flax import nnx

import meshlayout as ml


NUM_STEPS, GLOBAL_BATCH_SIZE = 20, 64

Batch = dict[str, np.ndarray]


class CNN(nnx.Module):
    """Two convolutions with pooling, and two dense layers."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.batch_norm1 = nnx.BatchNorm(8, rngs=rngs)
        self.dropout1 = nnx.Dropout(0.025, rngs=rngs)
        self.conv2 = nnx.Conv(8, 16, (3, 3), rngs=rngs)
        self.batch_norm2 = nnx.BatchNorm(16, rngs=rngs)
        self.avg_pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1 = nnx.Linear(4 * 4 * 16, 64, rngs=rngs)
        self.dropout2 = nnx.Dropout(0.025, rngs=rngs)
        self.linear2 = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits."""
        x = self.dropout1(self.batch_norm1(self.conv1(x)))
        x = self.avg_pool(nnx.relu(x))
        x = self.avg_pool(nnx.relu(self.batch_norm2(self.conv2(x))))
        x = x.reshape(x.shape[0], -1)
        x = nnx.relu(self.dropout2(self.linear1(x)))
        return self.linear2(x)


def loss_fn(model: CNN, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns the mean loss, and the logits."""
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), logits


@nnx.jit
def train_step(
    model: CNN, optimizer: nnx.Optimizer, metrics: nnx.MultiMetric, batch: Batch
) -> None:
    """Updates the model, the optimizer and the metrics in place."""
    grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = grad_fn(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)


def batches() -> Iterator[Batch]:
    """Yields images of ten patterns under noise."""
    rng = np.random.default_rng(0)
    patterns = rng.normal(size=(10, 16, 16, 1))
    for _ in range(NUM_STEPS):
        label = rng.integers(10, size=GLOBAL_BATCH_SIZE)
        noise = rng.normal(size=(GLOBAL_BATCH_SIZE, 16, 16, 1))
        image = (patterns[label] + noise).astype("float32")
        yield {"image": image, "label": label.astype("int32")}


def one_device() -> list[float]:
    """Trains; returns the mean loss up to each step, and the accuracy of all."""
    model = CNN(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(0.005, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(
        accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
    )
    losses = []
    for batch in batches():
        train_step(model, optimizer, metrics, batch)
        losses.append(float(metrics.compute()["loss"]))
    return [*losses, float(metrics.compute()["accuracy"])]


def on_a_mesh() -> list[float]:
    """Trains; returns the mean loss up to each step, and the accuracy of all."""
    mesh = ml.create_mesh({"batch": 2, "model": 4})  # mesh
    rules = {"linear1/kernel": (None, "model"), "linear1/bias": ("model",)}  # mesh
    rules["linear2/kernel"] = ("model", None)  # mesh
    with ml.scope(ml.LayoutMap(mesh, rules)):  # mesh
        model = CNN(rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(0.005, 0.9), wrt=nnx.Param)
        metrics = nnx.MultiMetric(
            accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
        )
    losses = []
    for batch in batches():
        batch = ml.relayout(batch, mesh.layout("batch", ...))  # mesh
        train_step(model, optimizer, metrics, batch)
        losses.append(float(metrics.compute()["loss"]))
    return [*losses, float(metrics.compute()["accuracy"])]


def main() -> None:
    """Trains both ways and prints how far the results are apart."""
    ml.virtual_devices(8)
    before, after = one_device(), on_a_mesh()
    print(f"loss {before[-2]:.4f} and {after[-2]:.4f} after {NUM_STEPS} steps")
    print(f"accuracy of all steps {before[-1]:.1%} and {after[-1]:.1%}")


if __name__ == "__main__":
    main()
