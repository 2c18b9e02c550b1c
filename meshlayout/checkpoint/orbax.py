"""The only module that writes and reads steps with Orbax, by its v1 API.

A leaf's keys are nested dicts to Orbax, which joins them with dots in its files: a key
that contains one is escaped. The API is public but called experimental; pyproject names
the versions that the tests ran with.
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
from meshlayout.checkpoint.tree import Keys, nested, number_of, specs_of
from meshlayout.errors import DamagedCheckpointError


logger = logging.getLogger("meshlayout.checkpoint")

# Arrays are stored in chunks of at most this size. A chunk is read whole: this bounds
# the cost of reading a slice of a large shard.
_CHUNK_BYTES = 64 * 2**20


def start_writing(
    path: Path, trees: Mapping[str, Mapping[Keys, Any]], facts: Mapping[str, Any]
) -> Any:
    """Starts to write arrays, and returns Orbax's response when they may be donated.

    All processes call this with the same arrays; each writes its own shards.

    Args:
        path: A directory that does not exist yet.
        trees: JAX or NumPy arrays by their keys, in trees by name.
        facts: What the step is, as JSON.
    """
    items = {
        name: nested((_escaped(keys), array) for keys, array in arrays.items())
        for name, arrays in trees.items()
        if arrays
    }
    ocp = quiet()
    with _context(ocp):
        return ocp.save_checkpointables_async(str(path), items, custom_metadata=facts)


class OrbaxTree:
    """One tree of a step as a source to restore from; see `load.Source`.

    Args:
        path: The directory of the step.
        item: The tree's name.
        leaves: What JSON holds of its leaves.
        name: The step, for messages.
        before_read: Called before Orbax reads, which does not go on alone.
    """

    is_foreign = False

    def __init__(
        self,
        path: Path,
        item: str,
        leaves: Sequence[Mapping[str, Any]],
        name: str,
        before_read: Callable[[], None],
    ) -> None:
        self.name, self.leaves = name, specs_of(leaves)
        self._path, self._item, self._before_read = path, item, before_read
        self._numbers = {
            tuple(leaf["keys"]): number_of(leaf)
            for leaf in leaves
            if leaf["kind"] == "python"
        }

    def read(
        self, wanted: Sequence[tuple[ArraySpec, Sharding | None]]
    ) -> Iterator[Any]:
        """Yields arrays as they were saved, in their new places.

        Args:
            wanted: Leaves with the shardings of the results; None for NumPy.
        """
        abstract = {
            _escaped(spec.parts): _abstract(spec.host_shape, spec.host_dtype, sharding)
            for spec, sharding in wanted
            if spec.parts not in self._numbers and 0 not in spec.shape
        }
        self._before_read()
        values: dict[Keys, Any] = {}
        if abstract:
            ocp = quiet()
            with _context(ocp):
                items = {self._item: nested(abstract.items())}
                try:
                    tree = ocp.load_checkpointables(str(self._path), items)
                except Exception as error:
                    msg = f"{self._path} cannot be read: {reason(error)}."
                    raise DamagedCheckpointError(msg) from error
            values = {keys: _value_at(tree[self._item], keys) for keys in abstract}
        for spec, sharding in wanted:
            if spec.parts in self._numbers:
                yield self._numbers[spec.parts]
            elif 0 in spec.shape:
                empty = np.zeros(spec.host_shape, spec.host_dtype)
                yield empty if sharding is None else _placed(empty, sharding)
            else:
                yield values.pop(_escaped(spec.parts))


def reason(error: BaseException) -> str:
    """Returns the first cause of an Orbax error in one line.

    TensorStore writes its whole state into a message, including names of hidden files.
    If the system refused an operation, the system's message is enough. The full text
    stays in the error's chain of causes.
    """
    while (inner := error.__cause__ or error.__context__) is not None:
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


def quiet() -> ModuleType:
    """Returns Orbax's v1 API, which keeps what goes well to itself.

    It logs every step of a save and restore as a warning or below, and the tracebacks
    of its threads, whose errors we raise. Its class `_SignalingThread` is private; if
    it is renamed, tracebacks appear in the log next to our errors.
    """
    logging.getLogger("absl").addFilter(_is_news)  # adding it again does nothing
    name = "orbax.checkpoint.experimental.v1"
    return require(name, extra="checkpoint", purpose="Checkpointing")


def _is_news(record: logging.LogRecord) -> bool:
    if "orbax" not in record.pathname:
        return True
    return record.levelno >= logging.ERROR and "_SignalingThread" not in str(record.msg)


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


def _escaped(keys: Keys) -> Keys:
    """Returns keys as names in Orbax's files, where dots separate them."""
    escapes = str.maketrans({"%": "%25", ".": "%2E", "/": "%2F"})
    return tuple(key.translate(escapes) or "%" for key in keys) or ("%",)


def _value_at(tree: Any, keys: Keys) -> Any:
    return functools.reduce(lambda node, key: node[key], keys, tree)


def _abstract(shape: tuple[int, ...], dtype: Any, sharding: Sharding | None) -> Any:
    if sharding is None:
        return np.broadcast_to(np.zeros((), dtype), shape)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _placed(x: np.ndarray[Any, Any], sharding: Sharding) -> jax.Array:
    return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)


# The end of the process.

# Saves that run, or whose error nobody has raised, each with what waits for its end.
unfinished: dict[object, Callable[[], None]] = {}


def finish_at_exit(save: object, finish: Callable[[], None]) -> None:
    """Has the interpreter finish a save before it shuts thread pools down.

    At exit Python first shuts down the pools that Orbax writes with, and only then
    waits for threads: a running save would hang for minutes, and be lost. Functions
    registered so run in reverse order, so ours, registered after that of
    `concurrent.futures`, runs before it. The API is private (in Python 3.9 to 3.14);
    without it running saves are lost at exit, and
    `test_a_process_that_ends_finishes_its_save` fails.
    """
    unfinished[save] = finish
    _register_at_exit()


@functools.cache
def _register_at_exit() -> None:
    assert concurrent.futures.thread  # its import registers its function first
    threading._register_atexit(_finish_all)  # type: ignore[attr-defined]


def _finish_all() -> None:
    for finish in list(unfinished.values()):
        try:
            finish()
        except KeyboardInterrupt:  # which would abort the process here
            logger.warning("a save is finished first; Ctrl-C again gives it up")
            finish()


if hasattr(os, "register_at_fork"):
    # A forked child has not the threads: a data loader's worker would never end.
    os.register_at_fork(after_in_child=unfinished.clear)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Suspends the caller's active mesh and transfer guards.

    Saving moves arrays to the host on purpose, and under `jax.set_mesh` of another mesh
    JAX would refuse programs on the arrays of the state.
    """
    with _jax.no_mesh(), jax.transfer_guard("allow"):
        yield
