"""The trees of a step: what JSON says of each leaf, and the arrays that Orbax holds.

JSON knows arrays of JAX and NumPy, PRNG keys and Python numbers apart. So a restore
compares everything with the leaves of `like` before any array is read.

This is the only module that writes and reads steps with Orbax, by its v1 API. The API
is public but called experimental; pyproject names the versions that the tests ran with.
"""

import concurrent.futures.thread
import contextlib
import functools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshlayout import _checks, _jax, _paths
from meshlayout._annotations import Leaf, PyTree
from meshlayout._optional import require
from meshlayout.checkpoint.difference import ArraySpec, key_dtype
from meshlayout.checkpoint.load import Source, Wanted, nested
from meshlayout.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MeshLayoutError,
)
from meshlayout.layout import Layout


logger = logging.getLogger("meshlayout.checkpoint")

_NUMBERS = {"bool": bool, "int": int, "float": float, "complex": complex}

# Arrays are stored in chunks of at most this size. A chunk is read whole: this bounds
# the cost of reading a slice of a large shard.
_CHUNK_BYTES = 64 * 2**20

# Orbax numbers the operations of a process by one counter: they begin one at a time.
_one_at_a_time = threading.Lock()


def saved_leaves(state: PyTree) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the description of each leaf for JSON, and the arrays to write by path.

    PRNG keys are written as their words, and NumPy arrays are copies.
    """
    if _jax.is_tracing():
        msg = "save was called inside a function that JAX transforms. Call it outside."
        raise CheckpointError(msg)
    try:
        flat = _paths.flatten(state, whole=True).leaves
    except MeshLayoutError as error:
        raise CheckpointError(f"the state cannot be saved: {error}") from None
    if not flat:
        _checks.has_arrays("state", state, where="save", error=CheckpointError)
    leaves: list[dict[str, Any]] = []
    arrays: dict[str, Any] = {}
    for path, value, _ in flat:
        leaf, array = _saved(path or "the state", value)
        leaves.append({"path": path, **leaf})
        if array is not None and array.size:  # Orbax refuses arrays without elements
            arrays[path] = array
    return leaves, arrays


def _saved(path: str, value: Leaf) -> tuple[dict[str, Any], Any]:
    """Returns the description of a leaf for JSON, and the array to write."""
    kind = type(value).__name__
    # By exact type: a subclass, such as an IntEnum, would come back as another type.
    if _NUMBERS.get(kind) is type(value):
        plain = [value.real, value.imag] if isinstance(value, complex) else value
        leaf = {"kind": "python", "shape": (), "dtype": kind, "value": plain}
        array = np.asarray(value)  # for who loads without us; JSON has all of it
        return leaf, None if array.dtype == object else array
    problem = ""
    is_array = isinstance(value, (jax.Array, np.ndarray, np.generic))
    if isinstance(value, jax.ShapeDtypeStruct):
        problem = "a shape without values cannot be saved. Save the state itself."
    elif not is_array or not _jax.is_array_dtype(value.dtype):
        problem = (
            f"{_checks.shown(value)} cannot be saved. A state holds arrays and "
            "numbers; keep anything else in metadata=, or outside the tree."
        )
    elif isinstance(value, np.ma.MaskedArray):
        problem = (
            "the mask of a masked array would be lost. Save it as a separate array."
        )
    elif isinstance(value, jax.Array) and value.is_deleted():
        problem = "the array was donated, and is deleted. Save what the step returned."
    if problem:
        raise CheckpointError(f"{path}: {problem}")
    if not isinstance(value, jax.Array):
        # A copy, as the caller may change the original.
        array = np.array(value, value.dtype.newbyteorder("="))
        return {"kind": "numpy", "shape": array.shape, "dtype": str(array.dtype)}, array
    leaf = {"kind": "array", "shape": value.shape, "dtype": str(value.dtype)}
    if isinstance(value.sharding, NamedSharding):
        layout = Layout.of(value)
        leaf |= {"layout": str(layout), "mesh": repr(layout.mesh)}
    if _jax.is_extended(value.dtype):
        leaf["impl"] = _jax.key_impl(value.dtype)
        value = jax.random.key_data(value)
    if jax.process_count() > 1 and value.is_fully_addressable:
        # Each process has an array of its own: that of process 0 is saved, as of NumPy.
        return leaf, np.array(value)
    return leaf, _jax.with_shards(value)


def specs_of(leaves: Iterable[Mapping[str, Any]]) -> list[ArraySpec]:
    """Returns the saved arrays and numbers, from what JSON holds of them."""
    specs: list[ArraySpec] = []
    for leaf in leaves:
        kind, dtype = leaf["kind"], leaf["dtype"]
        if kind == "python":
            dtype = _NUMBERS[dtype]
        else:
            dtype = key_dtype(leaf["impl"]) if "impl" in leaf else np.dtype(dtype)
        shape = tuple(leaf["shape"])
        specs.append(ArraySpec(leaf["path"], shape, dtype, kind == "numpy"))
    return specs


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


def saved_tree(
    path: Path,
    item: str,
    leaves: Sequence[Mapping[str, Any]],
    name: str,
    confirm: Callable[[], Any],
) -> Source:
    """Returns a tree of the step in a directory, of which JSON holds the leaves.

    `name` is the step, for messages; `confirm` is called before Orbax reads, which
    waits for the other processes.
    """
    specs = specs_of(leaves)
    # What is not in Orbax's files.
    others = {
        x.path: np.zeros(x.host_shape, x.host_dtype) for x in specs if 0 in x.shape
    }
    others |= {x["path"]: x["value"] for x in leaves if x["kind"] == "python"}

    def read(wanted: Wanted) -> Iterator[Any]:
        abstract: dict[str, Any] = {}
        for spec, sharding in wanted:
            shape, dtype = spec.host_shape, spec.host_dtype
            if sharding is not None:
                array = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            else:
                array = np.broadcast_to(np.zeros((), dtype), shape)
            if spec.path not in others:
                abstract[_name(spec.path)] = array
        confirm()
        tree: Any = {}
        if abstract:
            ocp, items = quiet(), {item: nested(abstract.items())}
            with damage_told(path), _one_at_a_time, undisturbed(), _context(ocp):
                tree = ocp.load_checkpointables(str(path), items)[item]
        for spec, _ in wanted:
            if spec.path in others:
                value = others[spec.path]
                yield complex(*value) if spec.dtype is complex else value
            else:
                keys = _name(spec.path).split("/")
                yield functools.reduce(lambda node, key: node[key], keys, tree)

    return Source(name, specs, read)


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
