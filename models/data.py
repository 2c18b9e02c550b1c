"""Image datasets in memory, and their batches.

`load_dataset` looks in three places, in this order, and the dataset records which of
them it comes from: a prepared TFDS directory; TFDS's download; and for Fashion-MNIST a
small part in a file next to this one. No dataset is ever substituted for another.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from models.prepare_data import (
    IMAGE_SHAPE,
    DataError,
    damaged,
    find_builder,
    is_prepared,
    num_classes,
    prepare,
    unreachable,
)


CARRIED_PART = Path(__file__).with_name("fashion_mnist_5k.npz")

# Measured with `python -m models.train --seed 0` to `--seed 9`.
CARRIED_PART_ACCURACY = "81 to 83%"
FULL_ACCURACY = "86 to 88%"


@dataclass(frozen=True)
class Split:
    """Images and labels of one split, in memory.

    Attributes:
        images: uint8, of shape (examples, 28, 28, 1).
        labels: int32, of shape (examples,).
    """

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def pixel_statistics(self) -> tuple[float, float]:
        """Returns the mean and the standard deviation of the images' pixels."""
        counts = np.bincount(self.images.ravel(), minlength=256)
        values = np.arange(256)
        mean = np.average(values, weights=counts)
        variance = np.average((values - mean) ** 2, weights=counts)
        return float(mean), max(float(np.sqrt(variance)), 1.0)

    def first(self, num_examples: int | None) -> "Split":
        """Returns the first examples, or all of them for None."""
        return Split(self.images[:num_examples], self.labels[:num_examples])


@dataclass(frozen=True)
class Dataset:
    """A dataset of labeled 28x28 images.

    Attributes:
        name: The TFDS name.
        source: Where it came from.
        num_classes: The number of labels.
        train: The training examples.
        test: The test examples.
        remark: What else a user should know; empty or whole sentences.
    """

    name: str
    source: str
    num_classes: int
    train: Split
    test: Split
    remark: str = ""

    def __str__(self) -> str:
        """Returns one line: name, source, sizes and the remark."""
        sizes = f"{len(self.train):,} training and {len(self.test):,} test images"
        return f"{self.name} from {self.source}, {sizes}. {self.remark}".rstrip()

    def limited(self, num_train: int | None, num_test: int | None) -> "Dataset":
        """Returns the dataset with only its first examples; None keeps all."""
        return replace(
            self, train=self.train.first(num_train), test=self.test.first(num_test)
        )


def load_dataset(name: str, data_dir: Path) -> Dataset:
    """Returns a dataset from the first place that has it.

    Args:
        name: A TFDS name, such as `fashion_mnist`, `mnist` or `emnist/letters`.
        data_dir: The directory in which TFDS keeps prepared datasets; a download is
            prepared there.

    Returns:
        The dataset, decoded into memory.

    Raises:
        DataError: If the dataset is unknown, unavailable or damaged, or does not hold
            labeled 28x28 images.
    """
    builder = find_builder(name, data_dir)
    if is_prepared(builder):
        return read_prepared(name, builder, "the prepared TFDS directory")
    problem = unreachable(builder)
    if not problem:
        try:
            prepare(builder)
        except DataError as error:
            problem = str(error).rstrip(".")
        else:
            # A new builder, which reads what was prepared.
            return read_prepared(
                name, find_builder(name, data_dir), "TFDS's download, prepared in"
            )
    if name == "fashion_mnist":
        return read_carried_part(f"it is not prepared in {data_dir}, and {problem}")
    raise DataError(
        f"{name} is not prepared in {data_dir} and cannot be downloaded: {problem}. "
        "Run this once with internet, or copy a prepared TFDS directory here and "
        "name it with --data-dir."
    )


def read_prepared(name: str, builder: tfds.core.DatasetBuilder, origin: str) -> Dataset:
    """Decodes a prepared TFDS directory, once, into memory."""
    # TFDS advises OpenCV for decoding; Pillow does here.
    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        train, test = (decode(builder, split) for split in ("train", "test"))
    except Exception as error:
        raise DataError(damaged(Path(builder.data_path), error)) from error
    if not len(train) or not len(test):
        raise DataError(damaged(Path(builder.data_path), "a split has no examples"))
    source = f"{origin} {builder.data_path}"
    return Dataset(name, source, num_classes(builder), train, test)


def decode(builder: Any, split: str) -> Split:
    """Decodes one split of a builder's prepared directory."""
    source = builder.as_data_source(split=split)
    images = np.empty((len(source), *IMAGE_SHAPE), np.uint8)
    labels = np.empty(len(source), np.int32)
    for start in range(0, len(source), 1000):
        rows = range(start, min(start + 1000, len(source)))
        for row, example in zip(rows, source.__getitems__(rows), strict=True):
            images[row] = example["image"]
            labels[row] = example["label"]
    return Split(images, labels)


def read_carried_part(why: str) -> Dataset:
    """Reads the small part of Fashion-MNIST that is kept next to this file."""
    with np.load(CARRIED_PART) as arrays:
        train, test = (
            Split(
                arrays[f"{split}_image"].reshape(-1, *IMAGE_SHAPE),
                arrays[f"{split}_label"].astype(np.int32),
            )
            for split in ("train", "test")
        )
    return Dataset(
        "fashion_mnist",
        "the small part of it that is carried in models/",
        10,
        train,
        test,
        f"Expect {CARRIED_PART_ACCURACY} test accuracy after 3 epochs of the MLP. All "
        f"of Fashion-MNIST, which gives {FULL_ACCURACY}, is not used because {why}; "
        "`make data` prepares it.",
    )


def batches(
    split: Split, global_batch_size: int, *, order: np.random.Generator | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Yields every example of a split once, in batches of one shape.

    A last batch that is short is padded with black images of weight 0; a mean that is
    weighted by `weight` counts each example exactly once.

    Args:
        split: The examples.
        global_batch_size: Rows of each batch.
        order: Shuffles the examples; None keeps their order.

    Yields:
        `image` uint8 of shape (global_batch_size, 28, 28, 1), `label` int32 and
        `weight` float32 of shape (global_batch_size,).

    Example:
        >>> five = Split(
        ...     np.zeros((5, 28, 28, 1), np.uint8), np.arange(5, dtype="int32")
        ... )
        >>> [batch["label"].tolist() for batch in batches(five, 3)]
        [[0, 1, 2], [3, 4, 0]]
        >>> [batch["weight"].tolist() for batch in batches(five, 3)]
        [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]
    """
    rows = np.arange(len(split)) if order is None else order.permutation(len(split))
    for start in range(0, len(rows), global_batch_size):
        chosen = rows[start : start + global_batch_size]
        padding = global_batch_size - len(chosen)
        yield {
            "image": pad(split.images[chosen], padding),
            "label": pad(split.labels[chosen], padding),
            "weight": pad(np.ones(len(chosen), np.float32), padding),
        }


def pad(rows: np.ndarray, padding: int) -> np.ndarray:
    """Returns the rows followed by rows of zeros."""
    return np.pad(rows, [(0, padding)] + [(0, 0)] * (rows.ndim - 1))


def num_batches(split: Split, global_batch_size: int) -> int:
    """Returns how many batches `batches` yields."""
    return -(-len(split) // global_batch_size)
