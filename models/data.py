"""Datasets in memory, and their batches: images, and text that comes with Python.

`load_dataset` looks in three places, in this order, and the dataset records which of
them it comes from: a prepared TFDS directory; TFDS's download; and for Fashion-MNIST a
small part in a file next to this one. No dataset is ever substituted for another.
"""

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core import registered

from meshlayout.data.mnist_family import png
from models.prepare_data import (
    IMAGE_SHAPE,
    DataError,
    damaged,
    default_data_dir,
    find_builder,
    is_prepared,
    num_classes,
    prepare,
    unreachable,
)
from models.text import ByteTokenizer, python_topics


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

    def __str__(self) -> str:
        """Returns what the examples are."""
        return "images"

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that batches take rows from, by name."""
        return {"image": self.images, "label": self.labels}

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
class Text:
    """Rows of text of one split, whole in memory.

    Attributes:
        tokens: int32, of shape (rows, length).
    """

    tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def __str__(self) -> str:
        """Returns what the examples are."""
        return f"rows of {self.tokens.shape[1]} bytes"

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that batches take rows from, by name."""
        return {"tokens": self.tokens}

    def first(self, num_examples: int | None) -> "Text":
        """Returns the first rows, or all of them for None."""
        return Text(self.tokens[:num_examples])


@dataclass(frozen=True)
class Dataset:
    """A dataset of labeled 28x28 images, or of text.

    Attributes:
        name: Its name; for images, the TFDS name.
        source: Where it came from.
        num_classes: The number of labels or tokens.
        train: The training examples.
        test: The test examples.
        remark: Other sentences for the user, or empty.
    """

    name: str
    source: str
    num_classes: int
    train: Split | Text
    test: Split | Text
    remark: str = ""

    def __str__(self) -> str:
        """Returns one line: name, source, sizes and the remark."""
        sizes = f"{len(self.train):,} training and {len(self.test):,} test {self.test}"
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
    advice = "OpenCV is not installed"
    logging.getLogger("absl").addFilter(lambda record: advice not in str(record.msg))
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
        "the subset of it in models/",
        10,
        train,
        test,
        f"Expect {CARRIED_PART_ACCURACY} test accuracy after 3 epochs of the MLP. All "
        f"of Fashion-MNIST, which gives {FULL_ACCURACY}, is not used because {why}; "
        "`make data` prepares it.",
    )


def tutorial_data_dir() -> Path:
    """Returns the directory from which notebooks read Fashion-MNIST in a checkout.

    That is TFDS's own if the dataset is there or can be downloaded. Without internet it
    is one with the carried part, which is prepared there the first time.
    """
    builder = find_builder("fashion_mnist", default_data_dir())
    if is_prepared(builder) or not unreachable(builder):
        return default_data_dir()
    data_dir = CARRIED_PART.parents[1] / ".cache" / "tfds"
    if not is_prepared(find_builder("fashion_mnist", data_dir)):
        prepare_carried_part(data_dir)
    return data_dir


def prepare_carried_part(data_dir: Path) -> None:
    """Prepares the carried part of Fashion-MNIST for TFDS, under the dataset's name."""
    carried = read_carried_part("")
    with registered.skip_registration():

        class CarriedPart(tfds.image_classification.FashionMNIST):
            name = "fashion_mnist"

            def _split_generators(self, dl_manager: Any) -> Any:
                return {
                    "train": tfds_examples(carried.train),
                    "test": tfds_examples(carried.test),
                }

    data_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=data_dir) as folder:
        tfds.disable_progress_bar()
        with contextlib.redirect_stdout(None):
            builder = CarriedPart(data_dir=folder, file_format="array_record")
            builder.download_and_prepare()
        # Whole or not at all. If it is there, another process has been faster.
        with contextlib.suppress(OSError):
            builder.data_path.parent.rename(data_dir / "fashion_mnist")


def tfds_examples(split: Split | Text) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields images as a TFDS builder stores them."""
    rows = zip(split.arrays["image"], split.arrays["label"], strict=True)
    for row, (image, label) in enumerate(rows):
        yield row, {"image": png(image[:, :, 0]), "label": int(label)}


def load_text(length: int) -> Dataset:
    """Returns the topics of Python's `help()` as rows of bytes.

    Every tenth topic is for testing.

    Args:
        length: Bytes in a row. The rest of the last row is left out.

    Examples:
        >>> text = load_text(128)
        >>> text.train.tokens.shape[1], len(text.train) > 5 * len(text.test) > 0
        (128, True)
    """
    encode = ByteTokenizer().encode
    topics = python_topics()
    splits = [
        np.concatenate([encode(topic + "\n") for topic in part])
        for part in (
            [topic for index, topic in enumerate(topics) if index % 10],
            topics[::10],
        )
    ]
    train, test = (
        Text(tokens[: len(tokens) // length * length].reshape(-1, length))
        for tokens in splits
    )
    source = "the reference manual that every Python carries"
    return Dataset("python_topics", source, ByteTokenizer.vocab_size, train, test)


def batches(
    split: Split | Text,
    global_batch_size: int,
    *,
    order: np.random.Generator | None = None,
) -> Iterator[dict[str, np.ndarray]]:
    """Yields every example of a split once, in batches of one shape.

    A last batch that is short is padded with zeros of weight 0; a mean that is weighted
    by `weight` counts each example exactly once.

    Args:
        split: The examples.
        global_batch_size: Rows of each batch.
        order: Shuffles the examples; None keeps their order.

    Yields:
        The split's arrays, `image` uint8 (global_batch_size, 28, 28, 1) and `label`
        int32 (global_batch_size,), or `tokens` int32 (global_batch_size, length); and
        `weight` float32 of shape (global_batch_size,).

    Examples:
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
            **{name: pad(x[chosen], padding) for name, x in split.arrays.items()},
            "weight": pad(np.ones(len(chosen), np.float32), padding),
        }


def pad(rows: np.ndarray, padding: int) -> np.ndarray:
    """Returns the rows followed by rows of zeros."""
    return np.pad(rows, [(0, padding)] + [(0, 0)] * (rows.ndim - 1))


def num_batches(split: Split | Text, global_batch_size: int) -> int:
    """Returns how many batches `batches` yields."""
    return -(-len(split) // global_batch_size)
