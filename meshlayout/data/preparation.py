"""A TFDS dataset that is prepared on disk: found, or downloaded and prepared.

TFDS reports missing data in many, mostly long ways, and retries an unreachable server
for minutes. Here each becomes one sentence with a fix, and nothing is downloaded before
a server has answered.
"""

import importlib
import logging
import re
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from meshlayout.data.mnist_family import Builder, new_builder, without_tensorflow
from meshlayout.errors import DataError


def find_dataset(name: Any, split: Any, data_dir: Any) -> Builder:
    """Returns TFDS's builder of a dataset, which is prepared if necessary.

    The arguments are those of `from_tfds`. Raises DataError if the dataset or the split
    does not exist, is not available, or cannot be read without TensorFlow.
    """
    builder: Builder = _builder(name, data_dir) if isinstance(name, str) else name
    # TFDS knows the splits only of prepared datasets.
    if not builder.info.splits:
        builder = _prepare(builder)
    full_name, file_format = builder.info.full_name, builder.info.file_format
    if file_format is not None and file_format.value != "array_record":
        raise DataError(
            f"{full_name} is prepared as {file_format.value} in {builder.data_path}, "
            "which only TensorFlow reads. Prepare it in another directory with `tfds "
            f"build {builder.name} --file_format=array_record --data_dir=DIR`, or give "
            "distribute_dataset what tfds.load returns."
        )
    splits = builder.info.splits
    try:
        # A file that is missing or damaged is noticed now, not after hours of training.
        files = splits[split].filepaths
        problems = [f"{path.name} is missing" for path in files if not path.exists()]
        if problems or not files:
            raise FileNotFoundError(*problems[:1] or ["it has no examples"])
        source = builder.as_data_source(split=split)
        source.data_source.__getitems__([0, len(source) - 1])
    except Exception as error:
        raise DataError(
            f"split {split!r} of {full_name} cannot be read ({_first_line(error)}). "
            f"It has {', '.join(map(repr, splits))}, and parts of them, as "
            f"'train[:10%]'. If {builder.data_path} is damaged, remove it and prepare "
            f"it again with `tfds build {builder.name} --file_format=array_record`."
        ) from error
    return builder


def _builder(name: str, data_dir: str | Path | None) -> Builder:
    tfds = importlib.import_module("tensorflow_datasets")
    logging.getLogger("absl").addFilter(_without_advice)  # adding it again does nothing
    try:
        return tfds.builder(name, data_dir=data_dir)
    except Exception as error:  # no such dataset, version or config
        near = re.search(r"\w+ -> (\w+)", str(error))
        nearest = f"; the nearest name is {near[1]}" if near else ""
        reason = f"TFDS knows no such dataset: {_first_line(error)}{nearest}"
        raise _unavailable(name, data_dir, reason) from None


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
    raise _unavailable(builder.info.full_name, builder.data_path, reason) from cause


def _unavailable(name: str, directory: Any, reason: str) -> DataError:
    where = "" if directory is None else f" in {directory}"
    return DataError(
        f"the dataset {name!r} is not prepared{where} and cannot be downloaded and "
        f"prepared here ({reason}): name a directory that has it with data_dir=, as "
        "`tfds build --file_format=array_record` makes elsewhere, or run `make data` "
        "in a checkout, which has Fashion-MNIST even without internet."
    )


def unreachable(builder: Builder, timeout_s: float = 4.0) -> str:
    """Returns why no server of a dataset's files answers; empty if one does.

    A file of each is requested, through the environment's proxies, but not read, which
    may take hours. In a thread, since looking up a host has no time-out.
    """
    requests = importlib.import_module("requests")  # TFDS downloads with it
    urls = [url for url in builder.url_infos or {} if url.startswith("http")]
    by_host = {urlsplit(url).hostname: url for url in reversed(urls)}
    answers: list[str] = []

    def ask() -> None:
        for host, url in by_host.items():
            try:
                with requests.get(url, timeout=timeout_s, stream=True) as response:
                    status = response.status_code
                answer = f"{host} answers with HTTP {status}" if status >= 400 else ""
            except requests.RequestException as error:
                answer = f"{host} cannot be reached ({type(error).__name__})"
            answers.append(answer)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if by_host and not answers:
        return f"{next(iter(by_host))} does not answer within {timeout_s:g} s"
    return "" if "" in answers or not answers else answers[-1]


def _without_advice(record: logging.LogRecord) -> bool:
    """Keeps TFDS from recommending OpenCV to users who decode with Pillow."""
    # If TFDS rewords it, it appears again; tests/test_notebooks.py notices.
    return "OpenCV is not installed" not in str(record.msg)


def _first_line(error: object) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".:") or type(error).__name__
