"""Flax's MNIST example for Linen and Optax, on one device and on a mesh.

    python examples/port_linen_mnist.py

Written after `examples/mnist` of Flax (Apache License 2.0): a convolutional network,
Flax's own `TrainState`, and one jitted function for the gradients and one for the
update. Images are made up, so that nothing is downloaded.

`on_a_mesh` is `one_device` and the lines marked `# mesh`: a ready-made rule shards
every large array, the optimizer's momentum with it, over the axis that also splits the
batch, as FSDP and ZeRO do. The model, the state and both functions are not touched.
"""

from collections.abc import Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import meshlayout as ml


NUM_STEPS, GLOBAL_BATCH_SIZE = 20, 64


class CNN(nn.Module):
    """Two convolutions with pooling, and two dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits."""
        x = nn.relu(nn.Conv(8, (3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(256)(x))
        return nn.Dense(10)(x)


@jax.jit
def apply_model(
    state: TrainState, images: jax.Array, labels: jax.Array
) -> tuple[optax.Params, jax.Array, jax.Array]:
    """Returns the gradients, the loss and the accuracy of a batch."""

    def loss_fn(params: optax.Params) -> tuple[jax.Array, jax.Array]:
        logits = state.apply_fn({"params": params}, images)
        one_hot = jax.nn.one_hot(labels, 10)
        loss = optax.softmax_cross_entropy(logits=logits, labels=one_hot).mean()
        return loss, logits

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = grad_fn(state.params)
    accuracy = jnp.mean(jnp.argmax(logits, -1) == labels)
    return grads, loss, accuracy


@jax.jit
def update_model(state: TrainState, grads: optax.Updates) -> TrainState:
    """Returns the state after an update."""
    return state.apply_gradients(grads=grads)


def create_train_state() -> TrainState:
    """Returns the initial state."""
    cnn = CNN()
    params = cnn.init(jax.random.key(0), jnp.ones([1, 16, 16, 1]))["params"]
    tx = optax.sgd(0.05, momentum=0.9)
    return TrainState.create(apply_fn=cnn.apply, params=params, tx=tx)


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields images of ten patterns under noise, and their labels."""
    rng = np.random.default_rng(0)
    patterns = rng.normal(size=(10, 16, 16, 1))
    for _ in range(NUM_STEPS):
        labels = rng.integers(10, size=GLOBAL_BATCH_SIZE)
        noise = rng.normal(size=(GLOBAL_BATCH_SIZE, 16, 16, 1))
        images = (patterns[labels] + noise).astype("float32")
        yield images, labels.astype("int32")


def one_device() -> list[float]:
    """Trains; returns the loss of each step, and the accuracy of the last."""
    state = create_train_state()
    losses, accuracy = [], jnp.zeros(())
    for images, labels in batches():
        grads, loss, accuracy = apply_model(state, images, labels)
        state = update_model(state, grads)
        losses.append(float(loss))
    return [*losses, float(accuracy)]


def on_a_mesh() -> list[float]:
    """Trains; returns the loss of each step, and the accuracy of the last."""
    mesh = ml.create_mesh({"fsdp": 8})  # mesh
    layouts = ml.parallel.fsdp(mesh)  # mesh
    state = ml.create(create_train_state, layouts)  # mesh
    losses, accuracy = [], jnp.zeros(())
    for images, labels in batches():
        images, labels = ml.relayout((images, labels), mesh.layout("fsdp", ...))  # mesh
        grads, loss, accuracy = apply_model(state, images, labels)
        state = update_model(state, grads)
        losses.append(float(loss))
    return [*losses, float(accuracy)]


def main() -> None:
    """Trains both ways and prints how far the results are apart."""
    ml.virtual_devices(8)
    before, after = one_device(), on_a_mesh()
    print(f"loss {before[-2]:.4f} and {after[-2]:.4f} after {NUM_STEPS} steps")
    print(f"accuracy of the last step {before[-1]:.1%} and {after[-1]:.1%}")


if __name__ == "__main__":
    main()
