"""The only module that writes with Orbax: flat dicts of arrays, by its v1 API.

Names are numbers in the order of the manifest, so that Orbax never interprets a path of
a state.
"""

import functools
import logging
import re
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
import numpy as np

from meshlayout._annotations import DType
from meshlayout._optional import require
from meshlayout.checkpoint import files, store
from meshlayout.checkpoint.store import AnyPath


# Orbax's name for the one tree in a directory that we write.
ITEM = "arrays"

# Arrays are stored in chunks of at most so many bytes, which are read whole: that
# bounds the cost of reading a slice of a large shard.
_CHUNK_BYTES = 64 * 2**20


# Orbax numbers the operations of a process with one counter: start one at a time.
_one_at_a_time = threading.Lock()


def stored_dtype(dtype: DType) -> np.dtype[Any]:
    """Returns the dtype in which the files hold an array: its own if they can."""
    dtype = np.dtype(dtype)
    return dtype if _can_store(dtype.name) else np.dtype("uint8")


@functools.cache
def _can_store(name: str) -> bool:
    tensorstore = require("tensorstore", extra="checkpoint", purpose="Checkpointing")
    return hasattr(tensorstore, name)


def start_writing(directory: AnyPath, arrays: Mapping[str, Any]) -> Callable[[], None]:
    """Starts to write arrays, and returns when they may be donated.

    On several processes all of them call this with the same arrays; each of them
    writes its own shards.

    Args:
        directory: A directory that does not exist.
        arrays: JAX or NumPy arrays, by name.

    Returns:
        A function that waits for the files on all processes, and raises their errors.
    """
    ocp = _orbax()
    if files.is_remote(directory):
        # Orbax's own client caches listings, and other machines write, too.
        backend = require("etils.epath.backend", extra="checkpoint", purpose="Orbax")
        backend.fsspec_backend.fs(store.SCHEME).invalidate_cache()
    with _one_at_a_time, _context(ocp):
        response = ocp.save_checkpointables_async(str(directory), {ITEM: dict(arrays)})
    return response.result


def reason(error: BaseException) -> str:
    """Returns the first cause of an Orbax error in one line.

    TensorStore writes its whole state into a message, with the names of hidden files:
    if the system refused something, its message is enough. All of it is in
    the error's chain of causes.
    """
    while (inner := error.__cause__ or error.__context__) is not None:
        if isinstance(error, store.StoreError):
            return error.fact
        error = inner
    of_system = re.search(r"([^:\[\]]+) \[os_error_code='(\d+)'", str(error))
    if of_system is not None:
        return f"[Errno {of_system[2]}] {of_system[1].strip()}"
    text = re.split(r"\n| \[(?:tensorstore_spec|http_response)", str(error).strip())[0]
    text = re.sub(r'Error \w+ "[^"]*" in OCDBT database at [^:]*: ', "", text)
    text = text.rstrip(".")
    if isinstance(error, OSError):
        return text
    return text if " " in text else f"{type(error).__name__} {text}".strip()


def _orbax() -> ModuleType:
    logging.getLogger("absl").addFilter(_without_traces)  # each message only once
    name = "orbax.checkpoint.experimental.v1"
    return require(name, extra="checkpoint", purpose="Checkpointing")


def _without_traces(record: logging.LogRecord) -> bool:
    """Keeps Orbax from logging the errors of its threads: we raise them."""
    return "_SignalingThread" not in str(record.msg)


def _context(ocp: ModuleType) -> Any:
    context = ocp.Context()
    saving = context.array.saving
    saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    # The host copies of shards that JAX keeps, of which fingerprints are taken. By
    # default Orbax copies to other memory on GPUs, and cuts slices of replicas, each
    # kind by a program of its own; that only pays where several hosts write.
    # `test_a_save_compiles_no_program` notices the second.
    saving.enable_pinned_host_transfer = False
    saving.use_replica_parallel = jax.process_count() > 1
    return context
