"""A TFDS dataset that is prepared on disk: found, or downloaded and prepared.

TFDS reports what is missing in many ways, most of them long, and tries a server that
cannot be reached for minutes. Here each becomes one sentence with the fix, and nothing
is downloaded before a server has answered.
"""

import importlib
import logging
import queue
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from meshlayout import _checks
from meshlayout.data.mnist_family import Builder, new_builder, without_tensorflow
from meshlayout.errors import DataError, did_you_mean


# How long servers have to answer, in seconds. What they then send may take hours.
_ANSWER_S = 4.0


def find_split(
    name: Any, split: Any, data_dir: str | Path | None, decoders: Any
) -> tuple[Builder, Any]:
    """Returns the builder and the data source of a split, prepared if necessary.

    Args:
        name: TFDS's name, such as `mnist` or `emnist/letters`, or a builder.
        split: The split, as `train` or `train[:10%]`.
        data_dir: Where TFDS keeps prepared datasets; None for its default.
        decoders: TFDS's decoders by feature; None for its defaults.

    Raises:
        DataError: If there is no such dataset or split, it is not available, or it
            cannot be read without TensorFlow.
    """
    if not isinstance(split, str):
        given = _checks.shown(split)
        msg = f"split must be a name, as 'train' or 'train[:10%]', got {given}."
        raise DataError(msg)
    if data_dir is not None and not isinstance(data_dir, (str, Path)):
        msg = f"data_dir must be a directory or None, got {_checks.shown(data_dir)}."
        raise DataError(msg)
    builder: Builder = _builder(name, data_dir) if isinstance(name, str) else name
    if not hasattr(builder, "as_data_source") or isinstance(builder, type):
        given = _checks.shown(name)
        msg = f"from_tfds takes the name of a TFDS dataset or a builder, got {given}."
        raise DataError(msg)
    # TFDS knows the splits only of prepared datasets.
    if not builder.info.splits:
        builder = _prepare(builder)
    file_format = builder.info.file_format
    if file_format is not None and file_format.value != "array_record":
        msg = (
            f"{builder.info.full_name} is prepared as {file_format.value} in "
            f"{builder.data_path}, which only TensorFlow reads. Prepare it in another "
            f"directory with `tfds build {builder.name} --file_format=array_record "
            "--data_dir=DIR`, or give distribute_dataset what tfds.load returns."
        )
        raise DataError(msg)
    _check_split(builder, split)
    try:
        # A file that is missing or damaged is noticed now, not after hours of training.
        for path in builder.info.splits[split].filepaths:
            if not Path(path).exists():
                missing = f"{Path(path).name} is missing"
                raise FileNotFoundError(missing)
        source = builder.as_data_source(split=split)
        source.data_source.__getitems__([0, len(source) - 1])
    except Exception as error:
        msg = (
            f"the prepared dataset in {builder.data_path} cannot be read "
            f"({_first_line(error)}). Remove that directory and prepare it again "
            f"with `tfds build {builder.name} --file_format=array_record`."
        )
        raise DataError(msg) from error
    if decoders is None:
        return builder, source
    source = builder.as_data_source(split=split, decoders=decoders)
    try:
        source[0]
    except Exception as error:
        msg = (
            f"TFDS cannot decode an example with these decoders: {_first_line(error)}."
        )
        raise DataError(msg) from error
    return builder, source


def _builder(name: str, data_dir: str | Path | None) -> Builder:
    tfds = importlib.import_module("tensorflow_datasets")
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
        msg = f"TFDS cannot open the dataset {name!r}: {_first_line(error)}."
        raise DataError(msg) from error


def _prepare(builder: Builder) -> Builder:
    """Downloads and prepares a dataset in the format that needs no TensorFlow.

    Returns:
        A new builder, which reads what was prepared.
    """
    tfds = importlib.import_module("tensorflow_datasets")
    # Google's bucket has prepared datasets, in a format that only TensorFlow reads.
    config = tfds.download.DownloadConfig(try_download_gcs=False)
    reason = unreachable(builder)
    cause: Exception | None = None
    if not reason:
        try:
            without_tensorflow(builder).download_and_prepare(
                download_config=config, file_format="array_record"
            )
        except ImportError as error:
            # The builders of many datasets import TensorFlow to parse their raw files.
            msg = (
                f"{builder.info.full_name} is not prepared in {builder.data_path}, and "
                f"TFDS's code that prepares it needs {error.name or 'another package'}"
                ", which is not installed. Where it is, prepare the dataset once with "
                f"`tfds build {builder.name} --file_format=array_record`; reading it "
                "afterwards needs no TensorFlow."
            )
            raise DataError(msg) from error
        except Exception as error:
            reason, cause = _first_line(error), error
        else:
            return new_builder(builder)
    msg = (
        f"{builder.info.full_name} is not prepared in {builder.data_path} and cannot be "
        f"downloaded ({reason}): copy a directory that was prepared elsewhere and name "
        "it with data_dir=, or run `make data` in a checkout, which has Fashion-MNIST "
        "also without internet."
    )
    raise DataError(msg) from cause


def unreachable(builder: Builder, timeout_s: float = _ANSWER_S) -> str:
    """Returns why no server of a dataset's files answers; empty if one does.

    The first file of each server is asked for, through the proxies that the environment
    names, and not read. The answer comes within the given time, whatever the network
    does: looking up a host name has no time-out of its own.

    Args:
        builder: The dataset's builder.
        timeout_s: The longest time to wait, in seconds.
    """
    requests = importlib.import_module("requests")  # TFDS downloads with it
    urls = [url for url in builder.url_infos or {} if url.startswith("http")]
    by_host = {urlsplit(url).hostname: url for url in reversed(urls)}
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask(host: str | None, url: str) -> None:
        try:
            with requests.get(url, timeout=timeout_s, stream=True) as response:
                is_refused = response.status_code >= 400
                status = f"{host} answers with HTTP {response.status_code}"
            answers.put(status if is_refused else "")
        except requests.RequestException as error:
            answers.put(f"{host} cannot be reached ({type(error).__name__})")

    for item in by_host.items():
        threading.Thread(target=ask, args=item, daemon=True).start()
    deadline = time.monotonic() + timeout_s
    reason = ""
    for _ in by_host:
        try:
            reason = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return f"{next(iter(by_host))} does not answer within {timeout_s:g} s"
        if not reason:
            break
    return reason


def _check_split(builder: Builder, split: str) -> None:
    splits = builder.info.splits
    try:
        info = splits[split]
    except Exception as error:
        base = split.partition("[")[0]
        why = f" ({_first_line(error)})." if base in splits else "."
        hint = "" if base in splits else did_you_mean(base, splits)
        msg = (
            f"{builder.info.full_name} has no split {split!r}{why}{hint} It has "
            f"{', '.join(map(repr, splits))}, and parts of them, as 'train[:10%]'."
        )
        raise DataError(msg) from None
    if not info.num_examples:
        sizes = ", ".join(f"{n!r} with {splits[n].num_examples:,}" for n in splits)
        msg = (
            f"split {split!r} of {builder.info.full_name} has no examples. Name a "
            f"larger part; the dataset has {sizes}."
        )
        raise DataError(msg)


def _without_advice(record: logging.LogRecord) -> bool:
    """Keeps TFDS from recommending OpenCV to everyone who decodes images with Pillow.

    If TFDS rewords it, it appears again; tests/test_notebooks.py notices.
    """
    return "OpenCV is not installed" not in str(record.msg)


def _first_line(error: object) -> str:
    line = str(error).strip().partition("\n")[0].rstrip(".")
    return line or type(error).__name__
