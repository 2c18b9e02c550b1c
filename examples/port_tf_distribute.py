"""TensorFlow's "Custom training with tf.distribute", on one device and on replicas.

    python examples/port_tf_distribute.py

Written after the tutorial of that name (Apache License 2.0, The TensorFlow Authors): a
convolutional network with an L2 penalty and a loop of its own, in which the last batch
of an epoch is short. Images are made up, so that nothing is downloaded.

`on_a_mesh` is `one_device` and the lines marked `# mesh`, which are those that the
tutorial adds: a strategy, its scope, a distributed dataset, `run` and `reduce`. The
step is written for one replica: `compute_average_loss` divides by the examples of all
of them, `scale_regularization_loss` by their number, and the optimizer adds up their
gradients.
"""

from collections.abc import Iterator

import jax
import numpy as np
import optax
from flax import nnx

import meshlayout as ml


NUM_IMAGES, GLOBAL_BATCH_SIZE, EPOCHS = 300, 64, 4

Batch = tuple[jax.Array, jax.Array]


class Model(nnx.Module):
    """Two convolutions with pooling, and two dense layers."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.conv1 = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(8, 16, (3, 3), rngs=rngs)
        self.dense1 = nnx.Linear(4 * 4 * 16, 32, rngs=rngs)
        self.dense2 = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits."""
        x = nnx.max_pool(nnx.relu(self.conv1(x)), (2, 2), strides=(2, 2))
        x = nnx.max_pool(nnx.relu(self.conv2(x)), (2, 2), strides=(2, 2))
        x = nnx.relu(self.dense1(x.reshape(x.shape[0], -1)))
        return self.dense2(x)


def compute_loss(model: Model, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the loss of a batch, or a replica's part of it."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
    loss = ml.losses.compute_average_loss(losses)
    penalty = 1e-3 * (model.dense1.kernel[...] ** 2).sum()
    return loss + ml.losses.scale_regularization_loss(penalty)


def train_step(model: Model, optimizer: nnx.Optimizer, inputs: Batch) -> jax.Array:
    """Updates the model; returns the loss of the batch, or a replica's part of it."""
    loss, grads = nnx.value_and_grad(compute_loss)(model, *inputs)
    optimizer.update(model, grads)
    return loss


def examples() -> tuple[np.ndarray, np.ndarray]:
    """Returns images of ten patterns under noise, and their labels."""
    rng = np.random.default_rng(0)
    labels = rng.integers(10, size=NUM_IMAGES)
    patterns = rng.normal(size=(10, 16, 16, 1))
    images = patterns[labels] + rng.normal(size=(NUM_IMAGES, 16, 16, 1))
    return images.astype("float32"), labels.astype("int32")


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields all examples; the last batch is short."""
    images, labels = examples()
    for start in range(0, NUM_IMAGES, GLOBAL_BATCH_SIZE):
        rows = slice(start, start + GLOBAL_BATCH_SIZE)
        yield images[rows], labels[rows]


def one_device() -> list[float]:
    """Trains; returns the mean loss of each epoch."""
    model = Model()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    step = nnx.jit(train_step)
    train_losses = []
    for _ in range(EPOCHS):
        losses = []
        for inputs in batches():
            losses.append(float(step(model, optimizer, inputs)))
        train_losses.append(float(np.mean(losses)))
    return train_losses


def on_a_mesh() -> list[float]:
    """Trains; returns the mean loss of each epoch."""
    strategy = ml.distribute.MirroredStrategy()  # mesh
    with strategy.scope():  # mesh
        model = Model()
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    dataset = strategy.distribute_dataset(examples(), GLOBAL_BATCH_SIZE)  # mesh
    train_losses = []
    for _ in range(EPOCHS):
        losses = []
        for inputs in dataset:  # mesh
            args = (model, optimizer, inputs)  # mesh
            per_replica = strategy.run(train_step, args)  # mesh
            losses.append(float(strategy.reduce("SUM", per_replica, axis=None)))  # mesh
        train_losses.append(float(np.mean(losses)))
    return train_losses


def main() -> None:
    """Trains both ways and prints how far the results are apart."""
    ml.virtual_devices(8)
    before, after = one_device(), on_a_mesh()
    for epoch, (one, other) in enumerate(zip(before, after, strict=True), 1):
        print(f"epoch {epoch}: loss {one:.4f} and {other:.4f}")


if __name__ == "__main__":
    main()
