"""Prepares image datasets for TFDS: `python -m models.prepare_data`.

TFDS downloads a dataset once and keeps it prepared in a directory. Its own builders of
the MNIST family need TensorFlow for that; here the same builders (name, version,
features, checksums) read their files with NumPy. Where the internet cannot be reached,
Fashion-MNIST is prepared from Debian's package of the same files.
"""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from meshlayout.data.mnist_family import without_tensorflow
from meshlayout.data.preparation import unreachable
from meshlayout.errors import did_you_mean


IMAGE_SHAPE = (28, 28, 1)
DEBIAN_PACKAGE = "dataset-fashion-mnist"
INSTALLED_FILES = Path("/usr/share/datasets/fashion-mnist")

# Debian's package drops the name and the time from the gzip headers of the original
# files; these times put them back, and TFDS's checksums hold again.
FASHION_MNIST_TIMES = {
    "train-images-idx3-ubyte": 1504176606,
    "train-labels-idx1-ubyte": 1504176606,
    "t10k-images-idx3-ubyte": 1504176627,
    "t10k-labels-idx1-ubyte": 1504176627,
}


class DataError(Exception):
    """A dataset is unknown, unusable, damaged or unavailable; says what to do."""


def default_data_dir() -> Path:
    """Returns the directory in which TFDS keeps prepared datasets."""
    return Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()


def find_builder(name: str, data_dir: Path) -> tfds.core.DatasetBuilder:
    """Returns TFDS's builder of a dataset of labeled 28x28 gray images.

    Nothing is downloaded; a dataset that does not fit the models is refused here.

    Args:
        name: A TFDS name, such as `mnist` or `emnist/letters`.
        data_dir: The directory in which TFDS keeps prepared datasets.

    Returns:
        The builder, which knows whether the dataset is prepared in `data_dir`.

    Raises:
        DataError: If TFDS has no such dataset, its prepared directory is damaged, or
            its examples are not labeled 28x28 images.
    """
    match = re.fullmatch(r"(\w+)(/[\w.-]+)?(:\d+\.\d+\.\d+)?", name)
    if match is None:
        raise DataError(
            f"{name!r} is not a TFDS name, such as mnist, emnist/letters or "
            "mnist:3.0.1."
        )
    try:
        configs = tfds.builder_cls(match[1]).builder_configs
        if match[2] and match[2][1:] not in configs:
            raise DataError(
                f"{match[1]} has no config {match[2][1:]!r}."
                f"{did_you_mean(match[2][1:], configs)} "
                f"Its configs: {', '.join(configs) or 'none'}."
            )
        builder = tfds.builder(name, data_dir=data_dir)
        features: Any = builder.info.features
    except DataError:
        raise
    except tfds.core.DatasetNotFoundError:
        known = tfds.list_builders(with_community_datasets=False)
        raise DataError(
            f"TFDS has no dataset {name!r}.{did_you_mean(name, known)}"
        ) from None
    except ImportError as error:
        raise DataError(f"dataset {name!r} cannot be loaded: {error}.") from error
    except Exception as error:
        directory = data_dir / f"{match[1]}{match[2] or ''}"
        if directory.is_dir():
            raise DataError(damaged(directory, error)) from error
        raise DataError(f"dataset {name!r}: {first_line(error)}.") from error
    is_dict = isinstance(features, tfds.features.FeaturesDict)
    features_by_name = dict(features) if is_dict else {}
    image, label = features_by_name.get("image"), features_by_name.get("label")
    if image is None or image.shape != IMAGE_SHAPE:
        shape = "no images" if image is None else f"images of shape {image.shape}"
        raise DataError(
            f"dataset {name!r} holds {shape}; these models take {IMAGE_SHAPE}, "
            "as mnist, fashion_mnist, kmnist and emnist have."
        )
    if not isinstance(label, tfds.features.ClassLabel):
        raise DataError(f"dataset {name!r} has no class labels to learn.")
    return builder


def num_classes(builder: tfds.core.DatasetBuilder) -> int:
    """Returns the number of labels in the dataset."""
    features: Any = builder.info.features
    return features["label"].num_classes


def is_prepared(builder: tfds.core.DatasetBuilder) -> bool:
    """Returns whether the dataset is prepared, and complete, in its directory.

    Raises:
        DataError: If the directory is damaged, or prepared in a format that only
            TensorFlow reads.
    """
    splits = builder.info.splits
    directory = Path(builder.data_path)
    if not splits:
        if directory.exists():
            raise DataError(damaged(directory, "it has no dataset_info.json"))
        return False
    file_format: Any = builder.info.file_format
    if file_format is not tfds.core.FileFormat.ARRAY_RECORD:
        raise DataError(
            f"the dataset in {directory} is prepared as "
            f"{file_format.value}, which only TensorFlow reads. Prepare "
            "it as array_record in another directory with `python -m "
            f"models.prepare_data --dataset {builder.name} --data-dir DIR`."
        )
    for name in ("train", "test"):
        if name not in splits:
            raise DataError(
                f"{builder.name} has no {name!r} split; it has {', '.join(splits)}."
            )
        for path in splits[name].filepaths:
            if not Path(path).exists():
                raise DataError(damaged(directory, f"{Path(path).name} is missing"))
    return True


def prepare(
    builder: tfds.core.DatasetBuilder, *, manual_dir: Path | None = None
) -> None:
    """Downloads and prepares a dataset in the builder's directory.

    The MNIST family needs no TensorFlow. TFDS checks every file against its registered
    checksum, wherever the file came from.

    Args:
        builder: A builder whose dataset is not prepared yet.
        manual_dir: A directory with files that need no download.

    Raises:
        DataError: If a file is unavailable or not the registered one, or the
            dataset's own code needs a package that is not installed.
    """
    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    config = tfds.download.DownloadConfig(manual_dir=manual_dir, try_download_gcs=False)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            without_tensorflow(builder).download_and_prepare(
                download_config=config, file_format="array_record"
            )
    except ImportError as error:
        raise DataError(
            f"TFDS's code for {builder.name} needs a package that is not installed "
            f"({first_line(error)}). Install it, for most datasets with `pip "
            "install tensorflow`, or prepare the dataset elsewhere with "
            f"`tfds.builder({builder.name!r}).download_and_prepare("
            "file_format='array_record')` and copy the directory here."
        ) from error
    except Exception as error:
        raise DataError(
            f"{builder.name} cannot be prepared in {builder.data_path}: "
            f"{first_line(error)}."
        ) from error


def write_debian_files(directory: Path) -> None:
    """Writes the original Fashion-MNIST files, from Debian's package, to a directory.

    The installed package is used if there is one; otherwise it is downloaded and
    unpacked there, which does not need root.

    Args:
        directory: An empty directory.

    Raises:
        DataError: If this is not Debian or Ubuntu, or the package is unavailable.
    """
    files = INSTALLED_FILES
    if not files.is_dir():
        download_debian_package(directory)
        files = directory / "unpacked" / files.relative_to("/")
    for name in FASHION_MNIST_TIMES:
        original = original_gzip(name, (files / f"{name}.gz").read_bytes())
        (directory / f"{name}.gz").write_bytes(original)


def download_debian_package(directory: Path) -> None:
    """Downloads and unpacks Debian's package into a directory."""
    apt = shutil.which("apt-get")
    if apt is None:
        raise DataError("there is no apt-get here to download Debian's package with")
    quick = ["-q", "-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=10"]
    # A separate package list, in case the machine's is empty or out of date.
    lists, cache = directory / "lists", directory / "cache"
    own = [f"Dir::State::lists={lists}", f"Dir::Cache={cache}", "Debug::NoLocking=1"]
    own = [word for option in own for word in ("-o", option)]
    download = ["download", DEBIAN_PACKAGE]
    try:
        if run([apt, *quick, *download], directory).returncode:
            (lists / "partial").mkdir(parents=True)
            (cache / "archives" / "partial").mkdir(parents=True)
            run([apt, *quick, *own, "update"], directory)
            done = run([apt, *quick, *own, *download], directory)
            if done.returncode:
                reason = (done.stderr.strip() or "apt-get failed").splitlines()[-1]
                raise DataError(f"apt-get cannot download {DEBIAN_PACKAGE} ({reason})")
        package = next(directory.glob("*.deb"))
        run(["dpkg-deb", "-x", str(package), "unpacked"], directory).check_returncode()
    except (OSError, subprocess.SubprocessError, StopIteration) as error:
        raise DataError(
            f"Debian's package {DEBIAN_PACKAGE} cannot be unpacked "
            f"({first_line(error)})"
        ) from error


def run(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command in a directory and returns its output."""
    return subprocess.run(
        command,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "LC_ALL": "C"},
    )


def original_gzip(name: str, data: bytes) -> bytes:
    """Returns a gzip file with its original header, byte for byte."""
    keeps_its_name = data[3] & 8
    if keeps_its_name:
        return data
    time = FASHION_MNIST_TIMES[name].to_bytes(4, "little")
    return b"\x1f\x8b\x08\x08" + time + b"\x00\x03" + name.encode() + b"\0" + data[10:]


def damaged(directory: Path, reason: object) -> str:
    """Returns the sentence about a prepared directory that cannot be read."""
    return (
        f"the prepared dataset in {directory} cannot be read ({first_line(reason)}). "
        "Remove that directory and prepare it again with "
        "`python -m models.prepare_data`."
    )


def first_line(reason: object) -> str:
    """Returns the first line of an error without its period, or its type."""
    # TFDS begins with the arguments that it was called with.
    text = str(reason).split('}": ')[-1]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0].rstrip(".:") if lines else type(reason).__name__


def main(arguments: list[str] | None = None) -> int:
    """Prepares one dataset; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m models.prepare_data",
        usage="python -m models.prepare_data [options]",
        description="Downloads an image dataset and prepares it for TFDS, without "
        "TensorFlow. Fashion-MNIST is taken from Debian's package where its server "
        "cannot be reached.",
    )
    parser.add_argument(
        "--dataset",
        default="fashion_mnist",
        metavar="NAME",
        help="a TFDS dataset of labeled 28x28 images: fashion_mnist, mnist, kmnist, "
        "emnist/letters ... (default: %(default)s)",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=default_data_dir(),
        metavar="DIR",
        help="where TFDS keeps prepared datasets (default: $TFDS_DATA_DIR, else "
        "~/tensorflow_datasets)",
    )
    options = parser.parse_args(arguments)
    data_dir = options.data_dir.expanduser()
    if data_dir.exists() and not data_dir.is_dir():
        parser.error(f"--data-dir {data_dir} is not a directory")
    try:
        builder = find_builder(options.dataset, data_dir)
        if is_prepared(builder):
            print(f"{options.dataset} is already prepared in {builder.data_path}.")
            return 0
        source = prepare_from_anywhere(builder)
    except DataError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print(f"{options.dataset} from {source} is prepared in {builder.data_path}.")
    return 0


def prepare_from_anywhere(builder: tfds.core.DatasetBuilder) -> str:
    """Prepares a dataset from TFDS's download or Debian's package; says which."""
    offline = unreachable(builder)
    if not offline:
        prepare(builder)
        return "TFDS's download"
    if builder.name != "fashion_mnist":
        raise DataError(
            f"{builder.name} cannot be downloaded: {offline}. Try again with internet, "
            "or copy a directory that was prepared elsewhere."
        )
    print(f"{offline}; taking Debian's package {DEBIAN_PACKAGE}.", file=sys.stderr)
    with tempfile.TemporaryDirectory() as name:
        try:
            write_debian_files(Path(name))
        except DataError as error:
            raise DataError(
                f"fashion_mnist cannot be prepared: {offline}, and {error}."
            ) from error
        prepare(builder, manual_dir=Path(name))
    return f"Debian's package {DEBIAN_PACKAGE}"


if __name__ == "__main__":
    sys.exit(main())
