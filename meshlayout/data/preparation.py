"""A TFDS dataset that is prepared on disk: found, or downloaded and prepared; checked.

TFDS reports what is missing in many ways, most of them long. Here each becomes one
sentence with the fix, before anything is read.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshlayout import _checks, _optional
from meshlayout._annotations import PyTree
from meshlayout.data.examples import named_leaves
from meshlayout.data.mnist_family import Builder, new_builder, without_tensorflow
from meshlayout.errors import DataError, did_you_mean


@dataclass(frozen=True)
class Prepared:
    """A split of a prepared dataset.

    Attributes:
        builder: TFDS's builder of it.
        split: The split, as `train` or `train[:10%]`.
        source: TFDS's data source, which reads and decodes any example.
    """

    builder: Builder
    split: str
    source: Any

    @property
    def files(self) -> list[tuple[Path, int]]:
        """The files that hold the split, and the number of its rows in each."""
        instructions = self.builder.info.splits[self.split].file_instructions
        return [(Path(item.filename), item.examples_in_shard) for item in instructions]


def find_prepared(
    name: object, split: object, data_dir: str | Path | None, decoders: PyTree
) -> Prepared:
    """Returns a split of a dataset, which is downloaded and prepared if necessary.

    Args:
        name: TFDS's name, such as `mnist` or `emnist/letters`, or a builder.
        split: The split.
        data_dir: Where TFDS keeps prepared datasets; None for its default.
        decoders: TFDS's decoders by feature; None for its defaults.

    Raises:
        DataError: If there is no such dataset or split, it is not available, or it
            cannot be read without TensorFlow.
    """
    if not isinstance(split, str):
        msg = (
            "split must be a name, as 'train' or 'train[:10%]', got "
            f"{_checks.shown(split)}."
        )
        raise DataError(msg)
    if data_dir is not None and not isinstance(data_dir, (str, Path)):
        msg = f"data_dir must be a directory or None, got {_checks.shown(data_dir)}."
        raise DataError(msg)
    builder: Builder = _builder(name, data_dir) if isinstance(name, str) else name
    if not hasattr(builder, "as_data_source") or isinstance(builder, type):
        msg = (
            "from_tfds takes the name of a TFDS dataset or a builder, got "
            f"{_checks.shown(name)}."
        )
        raise DataError(msg)
    # TFDS knows the splits only of prepared datasets.
    if not builder.info.splits:
        builder = _prepare(builder)
    _check_format(builder)
    _check_split(builder, split)
    _check_decoders(builder.info.features, decoders)
    # Find a file that is missing or damaged now, not after hours of training.
    try:
        source = builder.as_data_source(split=split, decoders=decoders)
        prepared = Prepared(builder, split, source)
        for path, _ in prepared.files:
            if not path.exists():
                missing = f"{path.name} is missing"
                raise FileNotFoundError(missing)
        # Files are opened when they are first read.
        source.data_source.__getitems__([0, len(source) - 1])
    except Exception as error:
        msg = (
            f"the prepared dataset in {builder.data_path} cannot be read "
            f"({_first_line(error)[:-1]}). Remove that directory and prepare it again "
            f"with `tfds build {builder.name} --file_format=array_record`."
        )
        raise DataError(msg) from error
    return prepared


def supervised_keys(builder: Builder) -> PyTree:
    """Returns the features that are input and target, as TFDS's builder declares them.

    Raises:
        DataError: If the builder does not name them.
    """
    keys = builder.info.supervised_keys
    if keys is None:
        named, _ = named_leaves(builder.info.features.get_tensor_info())
        msg = (
            f"{builder.info.full_name} does not say which of its features are input "
            f"and target, so that supervised=True has no meaning. It has "
            f"{', '.join(repr(path) for path, _ in named)}: choose with map=."
        )
        raise DataError(msg)
    return keys


def _builder(name: str, data_dir: str | Path | None) -> Builder:
    tfds: Any = _optional.require(
        "tensorflow_datasets", extra="tfds", purpose="Reading a TFDS dataset"
    )
    logging.getLogger("absl").addFilter(_without_advice)  # adding it again does nothing
    try:
        return tfds.builder(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError:
        # Community datasets are left out: their list would be downloaded.
        names = tfds.list_builders(with_community_datasets=False)
        where = f" and none is prepared in {data_dir}" if data_dir else ""
        msg = f"TFDS has no dataset {name!r}{where}.{did_you_mean(name, names)}"
        raise DataError(msg) from None
    except Exception as error:
        msg = f"TFDS cannot open the dataset {name!r}: {_first_line(error)}"
        raise DataError(msg) from error


def _prepare(builder: Builder) -> Builder:
    """Downloads and prepares a dataset in the format that needs no TensorFlow.

    Returns:
        A new builder, which reads what was prepared.
    """
    try:
        without_tensorflow(builder).download_and_prepare(file_format="array_record")
    except ImportError as error:
        # The builders of many datasets import TensorFlow to parse their raw files.
        msg = (
            f"{builder.info.full_name} is not prepared in {builder.data_path}, and "
            f"TFDS's code that prepares it needs {error.name or 'another package'}, "
            "which is not installed. Where it is, prepare the dataset once with `tfds "
            f"build {builder.name} --file_format=array_record`; reading it afterwards "
            "needs no TensorFlow."
        )
        raise DataError(msg) from error
    except Exception as error:
        msg = (
            f"{builder.info.full_name} is not prepared in {builder.data_path} and "
            f"cannot be: {_first_line(error)} With internet access, `tfds build "
            f"{builder.name} --file_format=array_record` prepares it; or copy a "
            "prepared directory and name it with data_dir=."
        )
        raise DataError(msg) from error
    return new_builder(builder)


def _check_format(builder: Builder) -> None:
    file_format = builder.info.file_format
    if file_format is None or file_format.value == "array_record":
        return
    msg = (
        f"{builder.info.full_name} is prepared as {file_format.value} in "
        f"{builder.data_path}, which only TensorFlow reads. Prepare it in another "
        f"directory with `tfds build {builder.name} --file_format=array_record "
        "--data_dir=DIR`, or give distribute_dataset what tfds.load returns."
    )
    raise DataError(msg)


def _check_split(builder: Builder, split: str) -> None:
    splits = builder.info.splits
    listed = ", ".join(map(repr, splits))
    try:
        info = splits[split]
    except Exception as error:
        base = split.partition("[")[0]
        why = f" ({_first_line(error)[:-1]})." if base in splits else "."
        hint = "" if base in splits else did_you_mean(base, splits)
        msg = (
            f"{builder.info.full_name} has no split {split!r}{why}{hint} It has "
            f"{listed}, and parts of them, as 'train[:10%]'."
        )
        raise DataError(msg) from None
    if not info.num_examples:
        sizes = ", ".join(
            f"{name!r} with {splits[name].num_examples:,}" for name in splits
        )
        msg = (
            f"split {split!r} of {builder.info.full_name} has no examples. Name a "
            f"larger part; the dataset has {sizes}."
        )
        raise DataError(msg)


def _check_decoders(features: Any, decoders: PyTree, path: str = "") -> None:
    """Refuses decoders of unknown features, and objects that are not decoders."""
    where = f"decoders[{path!r}]" if path else "decoders"
    if isinstance(decoders, Mapping):
        # A sequence of dicts does not list its names; TFDS checks them.
        has_names = hasattr(features, "keys")
        names = sorted(features.keys()) if has_names else list(decoders)
        for name, decoder in decoders.items():
            if name not in names:
                listed = ", ".join(map(repr, names))
                hint = did_you_mean(name, names) if isinstance(name, str) else ""
                msg = (
                    f"{where} names {name!r}, which is not a feature.{hint} The "
                    f"features there are {listed}."
                )
                raise DataError(msg)
            inner = features[name] if has_names else None
            _check_decoders(inner, decoder, f"{path}/{name}".lstrip("/"))
    elif decoders is not None and not (path and hasattr(decoders, "decode_example")):
        msg = (
            f"{where} must be one of TFDS's decoders, or a dict of them as {{'image': "
            f"tfds.decode.SkipDecoding()}}, got {_checks.shown(decoders)}."
        )
        raise DataError(msg)


def _without_advice(record: logging.LogRecord) -> bool:
    """Keeps TFDS from recommending OpenCV to everyone who decodes images with Pillow.

    If TFDS rewords it, it appears again; tests/test_notebooks.py notices.
    """
    return "OpenCV is not installed" not in str(record.msg)


def _first_line(error: object) -> str:
    line = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{line}." if line else f"{type(error).__name__}."
