"""MNIST and the datasets in its format, prepared for TFDS without TensorFlow.

TFDS's own builders need TensorFlow to open gzipped files. Here the same builders (name,
version, features, URLs, checksums) read their files with NumPy, and write TFDS's own
dataset. `tests/test_data_sources.py` notices if TFDS changes what is overridden here.
"""

import gzip
import importlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urljoin

import numpy as np


Builder: TypeAlias = Any
"""A `tfds.core.DatasetBuilder`; TFDS is imported when it is first used."""

# The files of a split, by the ends of their names.
_KINDS = ("images-idx3-ubyte", "labels-idx1-ubyte")

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]


def without_tensorflow(builder: Builder) -> Builder:
    """Returns a builder of MNIST's family that reads with NumPy; others as they are."""
    tfds = importlib.import_module("tensorflow_datasets")
    if not isinstance(builder, tfds.image_classification.MNIST):
        return builder
    base: Any = type(builder)
    with tfds.core.registered.skip_registration():

        class NumpyBuilder(base):
            name = base.name

            def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
                files = mnist_files(self, dl_manager)
                return {
                    split: self._generate_examples(*pair)
                    for split, pair in files.items()
                }

            def _generate_examples(
                self, images: bytes, labels: bytes
            ) -> Iterator[tuple[int, dict[str, Any]]]:
                rows = zip(read_idx(images), read_idx(labels), strict=True)
                for row, (image, label) in enumerate(rows):
                    yield row, {"image": png(image), "label": int(label)}

    return new_builder(builder, NumpyBuilder, file_format="array_record")


def new_builder(builder: Builder, builder_class: Any = None, **options: Any) -> Builder:
    """Returns a builder of the same dataset that rereads its directory."""
    return (builder_class or type(builder))(
        data_dir=builder.data_dir_root,
        config=builder.builder_config.name if builder.builder_config else None,
        version=str(builder.version),
        **options,
    )


def mnist_files(
    builder: Builder, download_manager: Any
) -> dict[str, tuple[bytes, ...]]:
    """Returns the gzipped files of images and labels of both splits, downloaded."""
    if builder.name == "emnist":
        archive = zipfile.ZipFile(download_manager.download(builder.URL))
        prefix = f"gzip/emnist-{builder.builder_config.name}"
        return {
            split: tuple(archive.read(f"{prefix}-{split}-{kind}.gz") for kind in _KINDS)
            for split in ("train", "test")
        }
    urls = {
        split: [urljoin(builder.URL, f"{prefix}-{kind}.gz") for kind in _KINDS]
        for split, prefix in (("train", "train"), ("test", "t10k"))
    }
    return {
        split: tuple(Path(file).read_bytes() for file in files)
        for split, files in download_manager.download(urls).items()
    }


def read_idx(data: bytes) -> Bytes:
    """Returns the uint8 array in a gzipped file of MNIST's IDX format."""
    raw = gzip.decompress(data)
    rank = raw[3]
    shape = np.frombuffer(raw, ">i4", count=rank, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape(shape)


def png(image: Bytes) -> io.BytesIO:
    """Returns a PNG file, whose bytes TFDS stores unchanged."""
    pillow = importlib.import_module("PIL.Image")
    file = io.BytesIO()
    pillow.fromarray(image).save(file, "PNG")
    file.seek(0)
    return file
