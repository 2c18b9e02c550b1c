"""Trees in Orbax's files: our own steps, and trees that other programs wrote.

Steps are written by Orbax's v1 API, which is public but called experimental. Trees are
read by a handler of its first API, which knows the trees of both, and has no barrier at
which processes would wait for one that has raised. JSON of ours says what the leaves of
a step are: a restore compares them with `like` before any array is read.
"""

import contextlib
import datetime
import functools
import logging
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshlayout import _checks, _jax, _paths, _render
from meshlayout._annotations import Leaf, PyTree
from meshlayout._checks import require
from meshlayout.checkpoint import directory as steps
from meshlayout.checkpoint.load import ArraySpec, Request, Source, Wanted, load, nested
from meshlayout.errors import CheckpointError, DamagedCheckpointError, MeshLayoutError
from meshlayout.layout import Layout


_NUMBERS = {"bool": bool, "int": int, "float": float, "complex": complex}

# The largest chunk of an array: to read a slice of a shard, chunks are read whole.
_CHUNK_BYTES = 64 * 2**20

# Orbax numbers the saves of a process by one counter: they begin one at a time.
_one_at_a_time = threading.Lock()


def saved_leaves(state: PyTree) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the JSON description of each leaf, and the arrays to write by path."""
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
        if _is_written(array):
            arrays[path] = array
    return leaves, arrays


def _saved(path: str, value: Leaf) -> tuple[dict[str, Any], Any]:
    """Returns the description of a leaf for JSON, and the array to write."""
    kind = type(value).__name__
    # By exact type: a subclass, such as an IntEnum, would come back as another type.
    if _NUMBERS.get(kind) is type(value):
        plain = [value.real, value.imag] if isinstance(value, complex) else value
        leaf = {"kind": "python", "shape": (), "dtype": kind, "value": plain}
        return leaf, np.asarray(value)  # for who loads without us
    problem = ""
    is_array = isinstance(value, (jax.Array, np.ndarray, np.generic))
    if isinstance(value, jax.ShapeDtypeStruct):
        problem = "a shape without values cannot be saved. Save the state itself."
    elif not is_array or not _jax.is_array_dtype(value.dtype):
        where = "keep anything else in metadata=, or outside the tree"
        where = "write trainer.state" if kind == "Trainer" else where
        problem = f"{_checks.shown(value)} is neither an array nor a number: {where}."
    elif isinstance(value, np.ma.MaskedArray):
        problem = "the mask of a masked array would be lost. Save it as an array."
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
        value = _jax.key_words(value)
    if jax.process_count() > 1 and value.is_fully_addressable:
        # Each process has an array of its own: process 0 saves its copy, as for NumPy.
        return leaf, np.array(value)
    return leaf, _jax.with_shards(value)


def _is_written(array: Any) -> bool:
    """Returns whether Orbax can hold an array: it has elements, of a plain dtype."""
    return bool(array.size) and array.dtype != object  # that of very large integers


def start_writing(
    path: Path, trees: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any]
) -> Any:
    """Starts to write arrays, and returns Orbax's response when they may be donated.

    All processes call this with the same arrays, and each writes its own shards.
    """
    items = {
        name: nested((_name(path), array) for path, array in arrays.items())
        for name, arrays in trees.items()
        if arrays
    } or {"state": {"%": np.zeros(1)}}  # Orbax refuses to write nothing
    ocp = quiet("orbax.checkpoint.experimental.v1")
    context = ocp.Context()
    saving = context.array.saving
    saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    # With both off, Orbax writes JAX's host copies of shards. By default it copies to
    # pinned memory on GPUs, and each replica writes a slice, which takes a program per
    # shape (`test_a_save_compiles_no_program`) and pays only on several hosts.
    saving.enable_pinned_host_transfer = False
    saving.use_replica_parallel = jax.process_count() > 1
    with _one_at_a_time, undisturbed(), context:
        return ocp.save_checkpointables_async(str(path), items, custom_metadata=facts)


def _name(path: str) -> str:
    """Returns a path as a name in Orbax's files, where dots separate keys."""
    escapes = str.maketrans({"%": "%25", ".": "%2E"})
    return "/".join(key.translate(escapes) or "%" for key in path.split("/"))


@dataclass(frozen=True)
class SavedStep:
    """A step that is intact: its number, directory, and the facts saved with it."""

    number: int
    path: Path
    facts: Mapping[str, Any]

    @classmethod
    def open(cls, number: int, path: Path, *, verify: bool) -> "SavedStep":
        """Opens a step, and compares its files with what was saved."""
        facts = steps.read_facts(path)
        steps.check(path, verify=verify)
        return cls(number, path, facts)

    def load(self, request: Request, tree: str = "state") -> Any:
        """Returns one of the step's trees, restored into `request.like`."""
        with undisturbed():
            return load(self.source(tree), request)

    def source(self, tree: str = "state") -> Source:
        """Returns one of the step's trees as a source to load from."""
        leaves = self.facts["items"][tree]
        specs = specs_of(leaves)
        # What is not read from Orbax's files.
        others: dict[str, Any] = {
            x.path: np.zeros(x.host.shape, x.host.dtype) for x in specs if 0 in x.shape
        }
        for leaf in leaves:
            if leaf["kind"] == "python":
                pair = leaf["value"] if leaf["dtype"] == "complex" else None
                others[leaf["path"]] = complex(*pair) if pair else leaf["value"]
        written = (x for x in specs if _is_written(np.asarray(others.get(x.path, 0))))
        stored = nested((_name(x.path), x) for x in written)
        source = tree_source(self.path / tree, stored, others)
        return replace(source, name=str(self.path), leaves=specs)


def specs_of(leaves: Iterable[Mapping[str, Any]]) -> list[ArraySpec]:
    """Returns the saved arrays and numbers, from what JSON holds of them."""
    specs: list[ArraySpec] = []
    for leaf in leaves:
        kind, shape = leaf["kind"], tuple(leaf["shape"])
        as_dtype = _NUMBERS.get if kind == "python" else np.dtype
        dtype = _key_dtype(leaf["impl"]) if "impl" in leaf else as_dtype(leaf["dtype"])
        specs.append(ArraySpec(leaf["path"], shape, dtype, kind == "numpy"))
    return specs


@functools.lru_cache(maxsize=16)
def _key_dtype(impl: str) -> Any:
    """Returns the dtype of a generator's PRNG keys, without running a program."""
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


@dataclass(frozen=True)
class Inspection:
    """The contents of a checkpoint: a table if printed or displayed; times are UTC.

    `arrays` maps each path to the array's dtype, shape, layout and mesh, as text.
    """

    step: int
    saved_at: datetime.datetime
    num_processes: int
    arrays: Mapping[str, str]
    nbytes: int
    metadata: Any
    metrics: Mapping[str, float]

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Inspection":
        """Returns the inspection of a step, from the facts of its save."""
        leaves = facts["items"]["state"]
        arrays, specs = dict[str, str](), specs_of(leaves)
        for x, leaf in zip(specs, leaves, strict=True):
            place = f"{leaf.get('layout', '')} {leaf.get('mesh', '')}"
            arrays[x.path] = f"{_render.array_text(x.dtype, x.shape)} {place}".strip()
        return cls(
            step=facts["step"],
            saved_at=datetime.datetime.fromtimestamp(facts["time"], datetime.UTC),
            num_processes=facts["processes"],
            arrays=arrays,
            nbytes=sum(x.nbytes for x in specs),
            metadata=facts["metadata"],
            metrics=facts["metrics"],
        )

    def __repr__(self) -> str:
        return f"{self._title()}\n{_render.text_table(*self._table())}"

    def _repr_html_(self) -> str:
        return _render.html_table(*self._table(), caption=self._title())

    def _title(self) -> str:
        facts = (_render.bytes_text(self.nbytes), self.metrics, self.metadata)
        saved = f"saved {self.saved_at:%Y-%m-%d %H:%M:%S} UTC"
        return ", ".join([f"step {self.step}", saved, *(f"{x}" for x in facts if x)])

    def _table(self) -> tuple[list[str], list[tuple[str, str]]]:
        return ["path", "array"], list(self.arrays.items())


def tree_source(
    path: Any, tree: PyTree = None, others: Mapping[str, Any] | None = None
) -> Source:
    """Returns the arrays of one tree that Orbax wrote.

    `tree` holds their specs; if None, Orbax is asked. `others` are not read.
    """
    api = quiet("orbax.checkpoint")
    path = require("etils.epath", extra="checkpoint", purpose="A path").Path(path)
    handler = api.PyTreeCheckpointHandler()
    if tree is None:
        with damage_told(path):
            tree = jax.tree.map_with_path(_spec, handler.metadata(path).tree)
    specs, treedef = jax.tree.flatten(tree)

    def read(wanted: Wanted) -> list[Any]:
        values = dict(others or {})
        shardings = {x.path: sharding for x, sharding in wanted if x.path not in values}
        if shardings:
            restored = zip(specs, restore(shardings), strict=True)
            values = {spec.path: value for spec, value in restored} | values
        return [_jax.key_words(values[spec.path]) for spec, _ in wanted]

    def restore(shardings: Mapping[str, Any]) -> list[Any]:
        def arguments(spec: ArraySpec) -> Any:
            sharding = shardings.get(spec.path)
            on_host = api.RestoreArgs(restore_type=np.ndarray)
            return api.ArrayRestoreArgs(sharding=sharding) if sharding else on_host

        items = [0 if x.path in shardings else api.PLACEHOLDER for x in specs]
        request = api.args.PyTreeRestore(
            item=treedef.unflatten(items), restore_args=jax.tree.map(arguments, tree)
        )
        with damage_told(path), undisturbed():
            return treedef.flatten_up_to(handler.restore(path, args=request))

    return Source(str(path), specs, read)


def _spec(keys: Any, entry: Any) -> ArraySpec:
    """Returns the spec of a leaf from Orbax's metadata, which may be a text."""
    path = "/".join(map(_paths.key_name, keys))
    dtype = np.dtype(getattr(entry, "dtype", object))
    if type(entry).__name__ == "ScalarMetadata":
        return ArraySpec(path, (), type(np.zeros((), dtype).item()))
    return ArraySpec(path, tuple(getattr(entry, "shape", ())), dtype)


@contextlib.contextmanager
def damage_told(path: object) -> Iterator[None]:
    """Raises errors while Orbax reads as damage to the files."""
    try:
        yield
    except Exception as error:
        msg = f"{path} cannot be read: {reason(error)}."
        raise DamagedCheckpointError(msg) from error


def reason(error: BaseException) -> str:
    """Returns the first cause of an Orbax error, with the system's text, in one line.

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


def quiet(name: str) -> ModuleType:
    """Returns a module of Orbax that logs only what goes wrong."""
    logging.getLogger("absl").addFilter(_is_news)  # adding it again does nothing
    return require(name, extra="checkpoint", purpose="Checkpointing")


def _is_news(record: logging.LogRecord) -> bool:
    # Orbax logs each part of a save and restore as a warning or below, and tracebacks
    # of its threads, whose errors we raise. Its class `_SignalingThread` is private; if
    # it is renamed, tracebacks appear in the log next to our errors.
    is_error = record.levelno >= logging.ERROR
    is_ours = is_error and "_SignalingThread" not in str(record.msg)
    return is_ours or "orbax" not in record.pathname


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Suspends the caller's transfer guards and current mesh."""
    with _jax.no_mesh(), jax.transfer_guard("allow"):
        yield
