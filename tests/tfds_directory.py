"""A small TFDS dataset, prepared without network and without TensorFlow."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image
from tensorflow_datasets.core import registered


NUM_ROWS = 200
NUM_SHARDS = 4


def made_up_examples() -> np.ndarray[Any, Any]:
    """The images of the dataset, one per row."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (NUM_ROWS, 6, 6), np.uint8)


def tiny_directory(data_dir: Path, file_format: str = "array_record") -> Path:
    """Prepares the dataset `tiny` in several shards; returns the directory."""
    tfds.disable_progress_bar()
    config = tfds.download.DownloadConfig(num_shards=NUM_SHARDS)
    builder = _tiny()(data_dir=data_dir, file_format=file_format)
    builder.download_and_prepare(download_config=config)
    return data_dir


def _tiny() -> Any:
    with registered.skip_registration():

        class Tiny(tfds.core.GeneratorBasedBuilder):
            VERSION = tfds.core.Version("1.0.0")

            def _info(self) -> Any:
                features = tfds.features.FeaturesDict(
                    {
                        "image": tfds.features.Image(shape=(6, 6, 1)),
                        "number": np.int64,
                        "small": np.int16,
                        "name": tfds.features.Text(),
                    }
                )
                return tfds.core.DatasetInfo(
                    builder=self, features=features, supervised_keys=("image", "number")
                )

            def _split_generators(self, dl_manager: Any) -> Any:
                return {"train": self._generate_examples()}

            def _generate_examples(self) -> Any:
                for number, image in enumerate(made_up_examples()):
                    yield (
                        number,
                        {
                            "image": _png(image),
                            "number": number,
                            "small": number % 7,
                            "name": f"row {number}",
                        },
                    )

    return Tiny


def _png(image: np.ndarray[Any, Any]) -> io.BytesIO:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    file.seek(0)
    return file
