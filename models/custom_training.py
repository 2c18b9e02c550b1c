"""Custom training with a strategy, as in TensorFlow's tutorial of that name.

`CustomTraining.train_step` and `test_step` are written for one replica and its rows of
a batch, as if there were no others; a strategy runs them on each. `python -m
models.custom_training` trains the convolutional classifier of Fashion-MNIST on all
devices, saves it after each epoch, and measures the last checkpoint on a single device.
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshlayout as ml
from models.convnet import ConvNet
from models.data import load_dataset
from models.prepare_data import DataError, default_data_dir


LEARNING_RATE = 1e-3
PENALTY = ml.losses.l2(1e-5, where="kernel")

# Images and labels: of one replica in its steps, of all replicas outside of them.
Inputs = tuple[Any, Any]


def classify(
    model: Callable[[jax.Array], jax.Array], images: jax.Array | np.ndarray
) -> jax.Array:
    """Returns the logits of images of bytes."""
    return model(jnp.asarray(images, "float32") / 255)


class CustomTraining:
    """A model with its optimizer and metrics on all replicas, and their two steps.

    Args:
        strategy: The strategy that runs the steps.
        build: Returns the model.
    """

    def __init__(
        self,
        strategy: ml.distribute.Strategy,
        build: Callable[[], Any] = lambda: ConvNet(rngs=nnx.Rngs(0)),
    ) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.model = build()
            self.optimizer = nnx.Optimizer(
                self.model, optax.adam(LEARNING_RATE), wrt=nnx.Param
            )
            self.train_accuracy = nnx.metrics.Accuracy()
            self.test_loss = nnx.metrics.Average()
            self.test_accuracy = nnx.metrics.Accuracy()

    @property
    def state(self) -> dict[str, Any]:
        """The state to save."""
        return {"model": self.model, "optimizer": self.optimizer}

    # On each replica.

    def train_step(self, inputs: Inputs) -> jax.Array:
        """Updates the model, and returns this replica's share of the loss.

        The gradients of all replicas are added up, so each divides its losses by the
        examples of all, and the penalty by the number of replicas.
        """
        images, labels = inputs

        def loss_fn(model: Any) -> tuple[jax.Array, jax.Array]:
            logits = classify(model, images)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            penalty = PENALTY(nnx.state(model, nnx.Param))
            loss = ml.losses.compute_average_loss(losses)
            return loss + ml.losses.scale_regularization_loss(penalty), logits

        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(self.model)
        self.optimizer.update(self.model, grads)
        self.train_accuracy.update(logits=logits, labels=labels)
        return loss

    def test_step(self, inputs: Inputs) -> None:
        """Adds a batch to the metrics of the test."""
        images, labels = inputs
        logits = classify(self.model, images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        self.test_loss.update(values=losses)
        self.test_accuracy.update(logits=logits, labels=labels)

    # For all replicas.

    def distributed_train_step(self, inputs: Inputs) -> jax.Array:
        """Runs a step on each replica, and returns the loss of the whole batch."""
        losses = self.strategy.run(self.train_step, args=(inputs,))
        return self.strategy.reduce("SUM", losses, axis=None)

    def train(self, batches: Iterable[Inputs]) -> float:
        """Trains on batches: those of an epoch, or of an iterator.

        Returns:
            The mean of the batches' losses.
        """
        self.train_accuracy.reset()
        losses = [self.distributed_train_step(inputs) for inputs in batches]
        return float(sum(losses) / len(losses))

    def test(self, batches: Iterable[Inputs]) -> tuple[float, float]:
        """Returns the mean loss and the accuracy of batches."""
        self.test_loss.reset()
        self.test_accuracy.reset()
        for inputs in batches:
            self.strategy.run(self.test_step, args=(inputs,))
        return float(self.test_loss.compute()), float(self.test_accuracy.compute())


def accuracy_on_one_device(
    model: Any, images: np.ndarray, labels: np.ndarray, rows: int = 1000
) -> float:
    """Returns the accuracy of a model, in batches of some rows, without a strategy."""
    accuracy = nnx.metrics.Accuracy()
    for start in range(0, len(labels), rows):
        part = slice(start, start + rows)
        logits = nnx.jit(classify)(model, images[part])
        accuracy.update(logits=logits, labels=jnp.asarray(labels[part]))
    return float(accuracy.compute())


def command_line() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m models.custom_training",
        description="Trains a classifier of images by steps that run on each replica.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--epochs", type=int, default=2, help="passes over the training images")
    add("--rows", type=int, default=64, help="rows of a batch for each replica")
    add("--limit-train", type=int, help="number of training images; by default all")
    add("--limit-test", type=int, help="number of test images; by default all")
    add(
        "--checkpoint-dir", help="directory for checkpoints; by default a temporary one"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, saves, and tests the checkpoint; returns the exit status."""
    options = command_line().parse_args(arguments)
    ml.virtual_devices(8)
    strategy = ml.distribute.MirroredStrategy()
    print(f"Number of replicas: {strategy.num_replicas_in_sync}")
    try:
        dataset = load_dataset("fashion_mnist", default_data_dir())
    except DataError as error:
        print(error, file=sys.stderr)
        return 1
    dataset = dataset.limited(options.limit_train, options.limit_test)
    print(dataset)
    train, test = (
        strategy.distribute_dataset(
            (split.arrays["image"], split.arrays["label"]),
            global_batch_size=options.rows * strategy.num_replicas_in_sync,
            shuffle=shuffle,
        )
        for split, shuffle in ((dataset.train, 0), (dataset.test, None))
    )

    training = CustomTraining(strategy)
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.checkpoint_dir or temporary
        with ml.Checkpointer(directory) as ck:
            for epoch in range(1, options.epochs + 1):
                loss = training.train(train)
                test_loss, test_accuracy = training.test(test)
                ck.save(epoch, training.state)
                print(
                    f"epoch {epoch}/{options.epochs}  loss {loss:.4f}  "
                    f"accuracy {float(training.train_accuracy.compute()):.2%}  "
                    f"test loss {test_loss:.4f}  test accuracy {test_accuracy:.2%}"
                )
        # An iterator gives as many batches as one takes.
        loss = training.train(itertools.islice(iter(train), 10))
        print(f"loss of the first 10 batches of another epoch {loss:.4f}")

        with ml.Checkpointer(directory) as ck:
            restored = ck.restore(CustomTraining(ml.distribute.get_strategy()).state)
    accuracy = accuracy_on_one_device(
        restored["model"], dataset.test.arrays["image"], dataset.test.arrays["label"]
    )
    print(f"test accuracy of the checkpoint on one device {accuracy:.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
