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


def find_dataset(name: Any, split: Any, data_dir: Any) -> Builder:
    """Returns TFDS's builder of a dataset, which is prepared if necessary.

    Arguments are those of `from_tfds`. Raises DataError if there is no such dataset or
    split, it is not available, or it cannot be read without TensorFlow.
    """
    builder: Builder = _builder(name, data_dir) if isinstance(name, str) else name
    if not hasattr(builder, "as_data_source") or isinstance(builder, type):
        given = _checks.shown(name)
        msg = f"from_tfds takes the name of a TFDS dataset or a builder, got {given}."
        raise DataError(msg)
    # TFDS knows the splits only of prepared datasets.
    if not builder.info.splits:
        builder = _prepare(builder)
    full_name, file_format = builder.info.full_name, builder.info.file_format
    if file_format is not None and file_format.value != "array_record":
        msg = (
            f"{full_name} is prepared as {file_format.value} in {builder.data_path}, "
            "which only TensorFlow reads. Prepare it in another directory with `tfds "
            f"build {builder.name} --file_format=array_record --data_dir=DIR`, or give "
            "distribute_dataset what tfds.load returns."
        )
        raise DataError(msg)
    splits = builder.info.splits
    try:
        num_rows = splits[split].num_examples
    except Exception as error:
        msg = (
            f"{full_name} has no split {split!r} ({_first_line(error)}). It has "
            f"{', '.join(map(repr, splits))}, and parts of them, as 'train[:10%]'."
        )
        raise DataError(msg) from None
    if not num_rows:
        msg = f"split {split!r} of {full_name} has no examples. Name a larger part."
        raise DataError(msg)
    try:
        # A file that is missing or damaged is noticed now, not after hours of training.
        for path in splits[split].filepaths:
            if not path.exists():
                missing = f"{path.name} is missing"
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
    return builder


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
    """Downloads and prepares a dataset; returns a new builder, which reads that."""
    tfds = importlib.import_module("tensorflow_datasets")
    reason, cause = unreachable(builder), None
    if not reason:
        # Google's bucket has prepared datasets, in TensorFlow's format.
        config = tfds.download.DownloadConfig(try_download_gcs=False)
        try:
            without_tensorflow(builder).download_and_prepare(
                download_config=config, file_format="array_record"
            )
            return new_builder(builder)
        except Exception as error:  # an ImportError where its code needs TensorFlow
            reason, cause = _first_line(error), error
    msg = (
        f"{builder.info.full_name} is not prepared in {builder.data_path} and cannot "
        f"be downloaded and prepared here ({reason}): prepare it elsewhere with `tfds "
        f"build {builder.name} --file_format=array_record` and name that directory "
        "with data_dir=, or run `make data` in a checkout, which has Fashion-MNIST "
        "even without internet."
    )
    raise DataError(msg) from cause


def unreachable(builder: Builder, timeout_s: float = 4.0) -> str:
    """Returns why no server of a dataset's files answers; empty if one does.

    A file of each is asked for, through the proxies that the environment names, and not
    read: that may take hours. In threads, since to look up a host has no time-out.
    """
    requests = importlib.import_module("requests")  # TFDS downloads with it
    urls = [url for url in builder.url_infos or {} if url.startswith("http")]
    by_host = {urlsplit(url).hostname: url for url in reversed(urls)}
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask(host: str, url: str) -> None:
        try:
            with requests.get(url, timeout=timeout_s, stream=True) as response:
                status = response.status_code
            answers.put(f"{host} answers with HTTP {status}" if status >= 400 else "")
        except requests.RequestException as error:
            answers.put(f"{host} cannot be reached ({type(error).__name__})")

    for item in by_host.items():
        threading.Thread(target=ask, args=item, daemon=True).start()
    deadline = time.monotonic() + timeout_s
    reason = ""
    for host in by_host:
        try:
            reason = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return f"{host} does not answer within {timeout_s:g} s"
        if not reason:
            break
    return reason


def _without_advice(record: logging.LogRecord) -> bool:
    """Keeps TFDS from recommending OpenCV to everyone who decodes images with Pillow.

    If TFDS rewords it, it appears again; tests/test_notebooks.py notices.
    """
    return "OpenCV is not installed" not in str(record.msg)


def _first_line(error: object) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
