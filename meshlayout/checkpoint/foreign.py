"""Weights of other libraries: safetensors in and out, msgpack, plain Orbax, mappings.

None of the formats has checksums of arrays: damage is found only where a file is cut
off or contradicts itself. Safetensors files are mapped into memory: a load copies the
slices that its devices hold, and in a save every process writes its own shards. The
library checks headers; the bytes are read here, as its NumPy interface lacks float8.
"""

import itertools
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import jax
import numpy as np
from flax import serialization
from jax.typing import DTypeLike

from meshlayout import _checks, _jax, _paths
from meshlayout._annotations import PyTree
from meshlayout._checks import require
from meshlayout.checkpoint import orbax
from meshlayout.checkpoint.load import (
    ArraySpec,
    Request,
    Source,
    load,
    renamed,
    spec_of,
)
from meshlayout.cluster.channel import Channel
from meshlayout.errors import CheckpointError
from meshlayout.layout_map import LayoutMap


_SUFFIX, _INDEX = ".safetensors", ".safetensors.index.json"

# Dtypes by their codes in the files.
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "C64": "complex64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
_CODES = {jax.numpy.dtype(name): code for code, name in _DTYPES.items()}

# Saves are started in the same order on all processes, so the numbers agree.
_numbers = itertools.count()


class LoadOptions(TypedDict, total=False):
    """The options of all functions that load, as `load_arrays` documents them."""

    layouts: LayoutMap | None
    rename: Mapping[str, str] | None
    transpose: Mapping[str, Sequence[int]] | None
    partial: bool | str | Sequence[str]
    dtype: DTypeLike | None


@_checks.user_call
def load_arrays(
    arrays: Mapping[str, Any], like: PyTree, **options: Unpack[LoadOptions]
) -> PyTree:
    """Returns a new state from arrays by name, each array in its layout.

    Use this for arrays in memory or in another format: memory maps, HDF5, an `.npz`
    file from `np.load`, `{name: x.numpy() for name, x in ...}` of a PyTorch
    `state_dict`. Every process takes only the slices that its devices hold.

    Args:
        arrays: Numbers by name, or anything with a shape, a dtype, and slices that
            NumPy can convert; nested dicts and lists are allowed. After renaming, dots
            and slashes in names separate keys.
        like: The state to restore: any tree of arrays, whose values are ignored, or of
            abstract arrays (from `ml.describe`); or a layout map, to get nested dicts
            of all arrays; or None, to get them on one device.
        **options: `layouts`, `rename`, `partial` and `dtype`, as for
            `Checkpointer.restore`; the first pattern of `rename` that matches a saved
            name changes it. Also `transpose`, `{pattern: permutation}` by path in the
            state, as for `np.transpose`: dense weights of PyTorch need `(1, 0)`,
            convolutions `(2, 3, 1, 0)`.

    Raises:
        RestoreDiffError: If the arrays differ in ways that are not allowed.
        CheckpointError: If an option does not fit.

    Examples:
        >>> import meshlayout as ml
        >>> layouts = ml.LayoutMap(ml.create_mesh({"batch": 8}), {"w": ("batch",)})
        >>> published = {"net.weight": np.arange(8, dtype="float32")}
        >>> loaded = load_arrays(published, layouts, rename={"net.weight": "w"})
        >>> str(ml.fetch_layout(loaded["w"]))
        '[batch]'
    """
    request = Request(like, separator=".", **options)
    return load(arrays_source("the mapping", arrays, "."), request)


@_checks.user_call
def load_safetensors(
    path: str | os.PathLike[str], like: PyTree, **options: Unpack[LoadOptions]
) -> PyTree:
    """Loads a state from safetensors files, each array in its layout.

    Use this for published weights: a `.safetensors` file, an index of several
    (`.safetensors.index.json`), or a directory with one of them. All other arguments
    are those of `load_arrays`. Every device reads only the slices that it holds.

    Raises:
        DamagedCheckpointError: If a file is truncated or contradicts its header.
        CheckpointError: If a file does not exist; or as `load_arrays`.

    Examples:
        >>> import tempfile
        >>> import meshlayout as ml
        >>> layouts = ml.LayoutMap(ml.create_mesh({"model": 8}), {"w": (None, "model")})
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     file = save_safetensors(directory, {"w": np.ones((2, 8), "float32")})
        ...     loaded = load_safetensors(file, layouts)
        >>> loaded["w"].addressable_shards[0].data.shape
        (2, 1)
    """
    path = _local(path)
    files = [path]
    if path.is_dir():
        files = sorted(path.glob(f"*{_INDEX}")) or sorted(path.glob(f"*{_SUFFIX}"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files[:6]) or "none"
        msg = f"{path} must hold one safetensors file or index, and it holds: {names}."
        raise CheckpointError(msg)
    source = arrays_source(str(path), _mapped(files[0]), ".")
    return load(source, Request(like, separator=".", **options))


@_checks.user_call
def load_msgpack(
    path: str | os.PathLike[str], like: PyTree, **options: Unpack[LoadOptions]
) -> PyTree:
    """Loads a state that Flax wrote as msgpack, each array in its layout.

    Use this for a file written with `flax.serialization.to_bytes`. The arguments are
    those of `load_arrays`; `/` separates keys. The host holds all arrays during the
    call. The format has no checksums, so a changed bit goes unnoticed.

    Raises:
        DamagedCheckpointError: If the file is truncated or is not a state in msgpack.
        CheckpointError: If the file does not exist; or as `load_arrays`.
    """
    with orbax.damage_told(path):
        arrays = serialization.msgpack_restore(_local(path).read_bytes())
        source = arrays_source(str(path), arrays, "/")
    return load(source, Request(like, **options))


@_checks.user_call
def load_orbax(
    directory: str | os.PathLike[str], like: PyTree, **options: Unpack[LoadOptions]
) -> PyTree:
    """Loads a state that plain Orbax wrote, each array in its layout.

    Use this for one checkpoint or step of `StandardCheckpointer`, `PyTreeCheckpointer`,
    a `CheckpointManager` or Orbax's version 1, or for one of several trees in a step.
    The arguments are those of `load_arrays`; `/` separates keys. Every device reads
    only the slices that it holds, except of arrays that `transpose` names. A changed
    bit may go unnoticed.

    Raises:
        DamagedCheckpointError: If files are missing, or changed where that shows.
        CheckpointError: If Orbax wrote nothing there; or as `load_arrays`.
    """
    # A dependency of Orbax that also reads paths in cloud storage.
    epath = require("etils.epath", extra="checkpoint", purpose="Reading a path")
    is_remote = "://" in str(directory)
    path = epath.Path(directory if is_remote else _local(directory).absolute())
    # Orbax's file with the metadata of all leaves of a tree.
    files = [*path.glob("_METADATA"), *path.glob("*/_METADATA")]
    if len(files) != 1:
        names = ", ".join(sorted(file.parent.name for file in files)) or "none"
        msg = f"{path} must hold one tree that Orbax wrote, and it holds: {names}."
        raise CheckpointError(msg)
    return load(orbax.tree_source(files[0].parent), Request(like, **options))


@_checks.user_call
def save_safetensors(
    path: str | os.PathLike[str],
    state: PyTree,
    *,
    rename: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes the arrays of a state to a safetensors file, and returns its path.

    Use this to publish weights, or to pass them to another library. All processes call
    this with a shared path, and each writes its own shards, so no array is ever whole
    on a device or in memory. The file appears only once it is complete.

    Args:
        path: A file name that ends in `.safetensors`, or a directory, to write
            `model.safetensors` into.
        state: Any tree of arrays.
        rename: `{pattern: replacement}`, as for `load_arrays`, by path in the state. In
            the file, dots separate keys.
        metadata: Strings to write into the header, by name.
        overwrite: Whether an existing file may be replaced.

    Raises:
        CheckpointError: If a leaf cannot be written, a name is ambiguous, or the file
            cannot be written. An existing file is then unchanged.
    """
    arrays = _named_arrays(state, rename)
    header = _header(arrays, metadata)
    path = _local(path)
    path = path if path.suffix and not path.is_dir() else path / f"model{_SUFFIX}"
    temporary = path.with_name(f".{path.name}.incomplete")
    channel = Channel(
        f"safetensors/{next(_numbers)}",
        what="the same save_safetensors",
        hint="All processes must call it, since each writes its own shards.",
        error=CheckpointError,
    )

    def allocate() -> None:
        if path.exists() and not overwrite:
            msg = f"{path} exists. Give another name, or overwrite=True."
            raise CheckpointError(msg)
        path.parent.mkdir(parents=True, exist_ok=True)
        num_bytes = len(header) + sum(spec.nbytes for spec, _ in arrays)
        with temporary.open("wb") as file:
            # A full disk is an error here; in mapped memory it would be a fatal SIGBUS.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            file.truncate(num_bytes)
            file.write(header)

    def publish() -> None:
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        temporary.replace(path)

    try:
        channel.on_first(allocate)
        with channel.failure_told():
            _write(temporary, len(header), arrays)
        channel.exchange(None)
        channel.on_first(publish)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}.") from error
    finally:
        if jax.process_index() == 0 and temporary.exists():
            temporary.unlink()
    return path


def arrays_source(name: str, arrays: Any, separator: str) -> Source:
    """Returns arrays and numbers by name, in nested dicts and lists, too."""
    if not isinstance(arrays, Mapping) or not arrays:
        msg = f"{name} holds no arrays by name: it is {_checks.shown(arrays)}."
        raise CheckpointError(msg)
    by_path: dict[str, Any] = {}
    leaves: list[ArraySpec] = []
    for keys, value in jax.tree_util.tree_leaves_with_path(dict(arrays)):
        if isinstance(value, (str, bytes)):
            continue
        path = separator.join(map(_paths.key_name, keys))
        spec = spec_of(path, value)
        if spec is None:
            what = f"{path} is {_checks.shown(value)}"
            msg = f"{name}: {what}, which is neither an array nor a number."
            raise CheckpointError(msg)
        if path in by_path:  # keys 1 and "1", or one that holds the separator
            raise CheckpointError(f"{name}: two arrays have the path {path!r}.")
        by_path[path] = np.asarray(value) if isinstance(value, jax.Array) else value
        leaves.append(spec)
    return Source(name, leaves, lambda wanted: [by_path[x.path] for x, _ in wanted])


def _mapped(path: Path) -> dict[str, Any]:
    """Returns the arrays of a safetensors file or index by name, mapped into memory."""
    library = require("safetensors", extra="safetensors", purpose="Reading safetensors")
    with orbax.damage_told(path):
        if path.name.endswith(_INDEX):
            file_by_name = json.loads(path.read_bytes())["weight_map"]
            # Only files beside it.
            names = {Path(file).name for file in file_by_name.values()}
            files = {name: _mapped(path.parent / name) for name in names}
            return {name: files[file][name] for name, file in file_by_name.items()}
        # The library checks that arrays cover the file without gaps or overlaps.
        with library.safe_open(path, framework="np"):
            content = np.memmap(path, np.uint8, "r")
        (size,) = struct.unpack("<Q", content[:8].tobytes())
        header = json.loads(content[8 : 8 + size].tobytes())
        header.pop("__metadata__", None)

        def array(entry: Mapping[str, Any]) -> Any:
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            dtype = jax.numpy.dtype(_DTYPES[entry["dtype"]])
            return content[begin:end].view(dtype).reshape(entry["shape"])

        return {name: array(entry) for name, entry in header.items()}


def _local(path: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(path):
        msg = f"{path} is not on a disk of this machine. Give a local path."
        raise CheckpointError(msg)
    return Path(path).expanduser()


def _named_arrays(state: PyTree, rename: Any) -> list[tuple[ArraySpec, Any]]:
    """Returns all arrays of a state with their specs in the file, in their order."""
    leaves = _paths.flatten(state).leaves
    paths = [leaf.path for leaf in leaves]
    if not any(paths):
        msg = f"state must hold arrays by name, got {_checks.shown(state)}."
        raise CheckpointError(msg)
    arrays: list[tuple[ArraySpec, Any]] = []
    names = renamed(paths, rename, "/", ".")
    for (path, value, _), name in zip(leaves, names, strict=True):
        spec = spec_of(path, value)
        is_array = isinstance(value, (jax.Array, np.ndarray, np.generic))
        if not is_array or spec is None or spec.dtype not in _CODES:
            what = f"dtype {value.dtype}" if is_array else _checks.shown(value)
            msg = (
                f"{path}: safetensors files cannot hold {what}. Save parameters and "
                "batch statistics alone, as nnx.state(model, (nnx.Param, "
                "nnx.BatchStat)), and of PRNG keys jax.random.key_data."
            )
            raise CheckpointError(msg)
        arrays.append((replace(spec, path=name), value))
    # Largest elements first, to align arrays to their itemsize for readers that map.
    return sorted(arrays, key=lambda entry: (-entry[0].dtype.itemsize, entry[0].path))


def _header(
    arrays: Sequence[tuple[ArraySpec, Any]], metadata: Mapping[str, str] | None
) -> bytes:
    """Returns the bytes before the arrays, which follow one after the other."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for spec, _ in arrays:
        entries[spec.path] = {
            "dtype": _CODES[spec.dtype],
            "shape": spec.shape,
            "data_offsets": (begin, begin := begin + spec.nbytes),
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write(file: Path, begin: int, arrays: Sequence[tuple[ArraySpec, Any]]) -> None:
    """Writes this process's shards into a file."""
    content = np.memmap(file, np.uint8, "r+")
    for spec, value in arrays:
        part, begin = content[begin : begin + spec.nbytes], begin + spec.nbytes
        whole = part.view(spec.dtype).reshape(spec.shape)
        shards = [((), value)]
        if isinstance(value, jax.Array):
            pieces = _jax.with_shards(value).addressable_shards
            shards = [(x.index, x.data) for x in pieces if x.replica_id == 0]
        # Process 0 writes arrays of which every process has its own copy.
        is_own = getattr(value, "is_fully_addressable", True)
        for index, shard in () if is_own and jax.process_index() else shards:
            whole[index] = np.asarray(shard)
    content.flush()
