"""The only module that writes and reads steps with Orbax, by its v1 API.

The API is public but called experimental; pyproject names the versions that the tests
ran with.
"""

import concurrent.futures.thread
import contextlib
import functools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from meshlayout import _jax
from meshlayout._optional import require
from meshlayout.checkpoint.difference import ArraySpec
from meshlayout.checkpoint.tree import nested, specs_of
from meshlayout.errors import DamagedCheckpointError


logger = logging.getLogger("meshlayout.checkpoint")

# Arrays are stored in chunks of at most this size. A chunk is read whole: this bounds
# the cost of reading a slice of a large shard.
_CHUNK_BYTES = 64 * 2**20

# Orbax numbers the operations of a process by one counter: they begin one at a time.
_one_at_a_time = threading.Lock()


def start_writing(
    path: Path, trees: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any]
) -> Any:
    """Starts to write arrays, and returns Orbax's response when they may be donated.

    All processes call this with the same arrays, and each writes its own shards. The
    facts are JSON. The directory does not exist yet.
    """
    items = {
        name: nested((_name(path), array) for path, array in arrays.items())
        for name, arrays in trees.items()
        if arrays
    }
    ocp = quiet()
    with _one_at_a_time, _context(ocp):
        # Orbax refuses to write nothing.
        items = items or {"state": {"%": np.zeros(1)}}
        return ocp.save_checkpointables_async(str(path), items, custom_metadata=facts)


class OrbaxTree:
    """One tree of a step as a source to restore from; see `load.Source`.

    Args:
        path: The directory of the step.
        item: The tree's name.
        leaves: What JSON holds of its leaves.
        name: The step, for messages.
        confirm: Called before Orbax reads, which waits for the other processes.
    """

    is_foreign = False

    def __init__(
        self,
        path: Path,
        item: str,
        leaves: Sequence[Mapping[str, Any]],
        name: str,
        confirm: Callable[[], Any],
    ) -> None:
        self.name, self.leaves = name, specs_of(leaves)
        self._path, self._item, self._confirm = path, item, confirm
        numbers = (leaf for leaf in leaves if leaf["kind"] == "python")
        self._numbers = {leaf["path"]: leaf["value"] for leaf in numbers}

    def read(
        self, wanted: Sequence[tuple[ArraySpec, Sharding | None]]
    ) -> Iterator[Any]:
        """Yields arrays as they were saved, where they are wanted; None for NumPy."""
        abstract = {
            _name(spec.path): _abstract(spec, sharding)
            for spec, sharding in wanted
            if spec.path not in self._numbers and 0 not in spec.shape
        }
        self._confirm()
        tree: Any = {}
        if abstract:
            ocp, items = quiet(), {self._item: nested(abstract.items())}
            with damage_told(self._path), _one_at_a_time, undisturbed(), _context(ocp):
                tree = ocp.load_checkpointables(str(self._path), items)[self._item]
        for spec, sharding in wanted:
            if spec.path in self._numbers:
                number = self._numbers[spec.path]
                yield complex(*number) if spec.dtype is complex else number
            elif 0 in spec.shape:
                empty = np.zeros(spec.host_shape, spec.host_dtype)
                yield empty if sharding is None else jax.device_put(empty, sharding)
            else:
                keys = _name(spec.path).split("/")
                yield functools.reduce(lambda node, key: node[key], keys, tree)


def _abstract(spec: ArraySpec, sharding: Sharding | None) -> Any:
    shape, dtype = spec.host_shape, spec.host_dtype
    if sharding is None:
        return np.broadcast_to(np.zeros((), dtype), shape)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _name(path: str) -> str:
    """Returns a path as a name in Orbax's files, where dots separate keys."""
    escapes = str.maketrans({"%": "%25", ".": "%2E"})
    return "/".join(key.translate(escapes) or "%" for key in path.split("/"))


@contextlib.contextmanager
def damage_told(path: object) -> Iterator[None]:
    """Raises what fails inside, while Orbax reads, as damage of the files."""
    try:
        yield
    except Exception as error:
        msg = f"{path} cannot be read: {reason(error)}."
        raise DamagedCheckpointError(msg) from error


def reason(error: BaseException) -> str:
    """Returns the first cause of an Orbax error in one line, and the system's words.

    TensorStore writes its whole state into a message, including names of hidden files.
    """
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    of_system = re.search(r"([^:\[\]]+) \[os_error_code='(\d+)'", str(error))
    if of_system is not None:
        return f"[Errno {of_system[2]}] {of_system[1].strip()}"
    text = re.split(r"\n| \[(?:tensorstore_spec|http_response)", str(error).strip())[0]
    name = "" if isinstance(error, OSError) or " " in text else type(error).__name__
    return f"{name} {text.rstrip('.')}".strip()


def quiet() -> ModuleType:
    """Returns Orbax's v1 API, which keeps what goes well to itself."""
    logging.getLogger("absl").addFilter(_is_news)  # adding it again does nothing
    name = "orbax.checkpoint.experimental.v1"
    return require(name, extra="checkpoint", purpose="Checkpointing")


def _is_news(record: logging.LogRecord) -> bool:
    # Orbax logs each part of a save and restore as a warning or below, and tracebacks
    # of its threads, whose errors we raise. Its class `_SignalingThread` is private; if
    # it is renamed, tracebacks appear in the log next to our errors.
    is_error = record.levelno >= logging.ERROR
    is_ours = is_error and "_SignalingThread" not in str(record.msg)
    return is_ours or "orbax" not in record.pathname


def _context(ocp: ModuleType) -> Any:
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    saving = context.array.saving
    saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    # With both off, Orbax writes the host copies of shards that JAX keeps. By default
    # it copies to pinned memory on GPUs, and has each replica write a slice, which
    # needs a program for each shape and only pays if several hosts write.
    # `test_a_save_compiles_no_program` notices the second.
    saving.enable_pinned_host_transfer = False
    saving.use_replica_parallel = jax.process_count() > 1
    return context


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Suspends the caller's active mesh and transfer guards.

    Saving moves arrays to the host on purpose, and under `jax.set_mesh` of another mesh
    JAX would refuse programs on the arrays of the state.
    """
    with _jax.no_mesh(), jax.transfer_guard("allow"):
        yield


# The end of the process: saves that run, or whose error nobody has raised, each with
# what waits for its end. A forked child does not have their threads.
unfinished: dict[object, Callable[[], None]] = {}

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=unfinished.clear)


@functools.cache
def finish_at_exit() -> None:
    """Has the interpreter finish `unfinished` saves before it shuts thread pools down.

    At exit Python first shuts down the pools that Orbax writes with, and then waits for
    threads: a running save would hang for minutes, and be lost. Functions registered so
    run in reverse order, so ours runs before that of `concurrent.futures`. The API is
    private (in Python 3.9 to 3.14); without it
    `test_a_process_that_ends_finishes_its_save` fails.
    """
    assert concurrent.futures.thread  # its import registers its function first
    threading._register_atexit(_finish_all)  # type: ignore[attr-defined]


def _finish_all() -> None:
    for finish in list(unfinished.values()):
        try:
            finish()
        except KeyboardInterrupt:  # which would abort the process here
            logger.warning("a save is finished first; Ctrl-C again gives it up")
            finish()
