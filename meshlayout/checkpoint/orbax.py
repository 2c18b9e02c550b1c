"""The only module that writes with Orbax: flat dicts of arrays, with its v1 API.

The names of arrays are numbers, in the order of the manifest, so that Orbax never
interprets a path of a state. The API is public but called experimental: pyproject
names the versions that the tests ran with.
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

# Arrays are stored in chunks of at most this size. A chunk is read whole: this bounds
# the cost of reading a slice of a large shard.
_CHUNK_BYTES = 64 * 2**20

# Orbax numbers the operations of a process with a single counter: start one at a time.
_one_at_a_time = threading.Lock()


def stored_dtype(dtype: DType) -> np.dtype[Any]:
    """Returns the dtype of an array in the files: its own if they support it."""
    dtype = np.dtype(dtype)
    return dtype if _can_store(dtype.name) else np.dtype("uint8")


@functools.cache
def _can_store(name: str) -> bool:
    tensorstore = require("tensorstore", extra="checkpoint", purpose="Checkpointing")
    return hasattr(tensorstore, name)


def start_writing(directory: AnyPath, arrays: Mapping[str, Any]) -> Callable[[], None]:
    """Starts to write arrays, and returns when they may be donated.

    All processes call this with the same arrays; each writes its own shards.

    Args:
        directory: A directory that does not exist yet.
        arrays: JAX or NumPy arrays, by name.

    Returns:
        A function that waits for the files of all processes, and raises their errors.
    """
    ocp = _orbax()
    if files.is_remote(directory):
        # Orbax's own client caches listings, and other machines write, too. etils has
        # no public way to reach it; without this, `test_checkpoint_store` finds a step
        # that another machine deleted and Orbax still sees.
        backend = require("etils.epath.backend", extra="checkpoint", purpose="Orbax")
        backend.fsspec_backend.fs(store.SCHEME).invalidate_cache()
    with _one_at_a_time, _context(ocp):
        response = ocp.save_checkpointables_async(str(directory), {ITEM: dict(arrays)})
    return response.result


def reason(error: BaseException) -> str:
    """Returns the first cause of an Orbax error in one line.

    TensorStore writes its whole state into a message, including names of hidden files.
    If the system refused an operation, the system's message is enough. The full text
    stays in the error's chain of causes.
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
    logging.getLogger("absl").addFilter(_without_traces)  # adding it again does nothing
    name = "orbax.checkpoint.experimental.v1"
    return require(name, extra="checkpoint", purpose="Checkpointing")


def _without_traces(record: logging.LogRecord) -> bool:
    """Keeps Orbax from logging the errors of its threads, which we raise.

    Its class `_SignalingThread` is private; if it is renamed, tracebacks appear in the
    log next to our errors.
    """
    return "_SignalingThread" not in str(record.msg)


def _context(ocp: ModuleType) -> Any:
    context = ocp.Context()
    saving = context.array.saving
    saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    # With both off, Orbax uses the host copies of shards that JAX keeps, and the
    # fingerprints are taken of the same copies. By default it copies to pinned memory
    # on GPUs, and has each replica write a slice, which needs a program for each shape
    # and only pays if several hosts write. `test_a_save_compiles_no_program` notices
    # the second.
    saving.enable_pinned_host_transfer = False
    saving.use_replica_parallel = jax.process_count() > 1
    return context
