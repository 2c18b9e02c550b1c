"""A TFDS data set as it lies prepared on disk, and how it gets there."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from meshlayout import _optional, _paths
from meshlayout.errors import DataError, did_you_mean


@dataclass(frozen=True)
class Prepared:
    """A split of a prepared data set.

    Attributes:
        builder: TFDS's builder of it.
        split: The split, as `train` or `train[:10%]`.
        source: TFDS's data source, which reads and decodes any example.
    """

    builder: Any
    split: str
    source: Any

    @property
    def name(self) -> str:
        """Name, config and version, as `mnist/3.0.1`."""
        return self.builder.info.full_name

    @property
    def file_bytes(self) -> int:
        """Bytes of the files that the split lies in."""
        return sum(
            Path(instruction.filename).stat().st_size
            for instruction in self.builder.info.splits[self.split].file_instructions
        )

    def shards(self) -> list[range]:
        """Returns the rows of the split that lie in each file, in order."""
        split_info = self.builder.info.splits[self.split]
        found, start = [], 0
        for instruction in split_info.file_instructions:
            found.append(range(start, start + instruction.examples_in_shard))
            start += instruction.examples_in_shard
        return found


def find_prepared(
    name: Any, split: Any, data_dir: str | Path | None, decoders: Any
) -> Prepared:
    """Returns a split of a data set, which is downloaded and prepared if need be.

    Args:
        name: TFDS's name, as `mnist` or `emnist/letters`, or a builder.
        split: The split.
        data_dir: Where TFDS keeps prepared data sets; None for its own choice.
        decoders: What TFDS decodes how; None for all of it as usual.

    Raises:
        DataError: If there is no such data set or split, or it cannot be had or read
            without TensorFlow.
    """
    if not isinstance(split, str):
        msg = f"split= is a name as 'train' or 'train[:10%]', and got {split!r}."
        raise DataError(msg)
    builder = _builder(name, data_dir) if isinstance(name, str) else name
    if not hasattr(builder, "as_data_source"):
        msg = (
            "from_tfds takes the name of a TFDS data set or a builder, and got "
            f"{type(name).__name__} {name!r}."
        )
        raise DataError(msg)
    if not builder.info.splits:
        _prepare(builder)
    _check_format(builder)
    _check_split(builder, split)
    try:
        _check_files(builder, split)
        source = builder.as_data_source(split=split, decoders=decoders)
        num_rows = len(source)
        if num_rows:  # files are opened when they are first read
            source.data_source.__getitems__([0, num_rows - 1])
    except Exception as error:
        raise DataError(_unreadable(builder, error)) from error
    if not num_rows:
        msg = f"split {split!r} of {builder.info.full_name} has no examples."
        raise DataError(msg)
    return Prepared(builder, split, source)


def supervised_keys(builder: Any) -> Any:
    """Returns which features are input and target, as TFDS's builder says.

    Raises:
        DataError: If it does not say.
    """
    keys = builder.info.supervised_keys
    if keys is None:
        names = [
            "/".join(map(_paths.key_name, path))
            for path, _ in jax.tree_util.tree_flatten_with_path(
                builder.info.features.get_tensor_info()
            )[0]
        ]
        msg = (
            f"{builder.info.full_name} does not say which of its features are input "
            f"and target, so that supervised=True has no meaning. It has "
            f"{', '.join(map(repr, names))}: choose with map=."
        )
        raise DataError(msg)
    return keys


def _builder(name: str, data_dir: str | Path | None) -> Any:
    tfds = _optional.require(
        "tensorflow_datasets", extra="data", purpose="Reading a TFDS data set"
    )
    try:
        return tfds.builder(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError:
        known = tfds.list_builders(with_community_datasets=False)
        where = f" and none is prepared in {data_dir}" if data_dir else ""
        msg = f"TFDS has no data set {name!r}{where}.{did_you_mean(name, known)}"
        raise DataError(msg) from None
    except Exception as error:
        msg = f"TFDS cannot open the data set {name!r}: {_first_line(error)}"
        raise DataError(msg) from error


def _prepare(builder: Any) -> None:
    """Downloads and prepares a data set in the format that needs no TensorFlow."""
    try:
        builder.download_and_prepare(file_format="array_record")
    except ImportError as error:
        msg = (
            f"{builder.info.full_name} is not prepared in {builder.data_path}, and "
            f"TFDS's code that prepares it needs {error.name or 'another package'}, "
            "which is not installed. Where it is, prepare the data set once with `tfds "
            f"build {builder.name} --file_format=array_record`; to read it "
            "afterwards needs no TensorFlow."
        )
        raise DataError(msg) from error
    except Exception as error:
        msg = (
            f"{builder.info.full_name} is not prepared in {builder.data_path} and "
            f"cannot be: {_first_line(error)} With internet, `tfds build "
            f"{builder.name} --file_format=array_record` prepares it; or copy a "
            "prepared directory and name it with data_dir=."
        )
        raise DataError(msg) from error


def _check_format(builder: Any) -> None:
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


def _check_split(builder: Any, split: str) -> None:
    splits = builder.info.splits
    try:
        _ = splits[split]
    except Exception as error:
        base = split.partition("[")[0]
        why = f" ({_first_line(error)[:-1]})." if base in splits else "."
        hint = "" if base in splits else did_you_mean(base, splits)
        msg = (
            f"{builder.info.full_name} has no split {split!r}{why}{hint} It has "
            f"{', '.join(map(repr, splits))}, and parts of them, as 'train[:10%]'."
        )
        raise DataError(msg) from None


def _check_files(builder: Any, split: str) -> None:
    for instruction in builder.info.splits[split].file_instructions:
        path = Path(instruction.filename)
        if not path.exists():
            msg = f"{path.name} is missing"
            raise FileNotFoundError(msg)


def _unreadable(builder: Any, error: Exception) -> str:
    return (
        f"the prepared data set in {builder.data_path} cannot be read "
        f"({_first_line(error)[:-1]}). Remove that directory and prepare it again with "
        f"`tfds build {builder.name} --file_format=array_record`."
    )


def _first_line(error: object) -> str:
    line = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{line}." if line else f"{type(error).__name__}."
