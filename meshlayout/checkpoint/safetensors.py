"""Safetensors: published weights in and out.

Files are mapped into memory. A load copies the slices that its devices hold; in a save
every process writes its own shards into a file on a shared disk, on which process 0 has
reserved the room: no host ever holds more than one shard. The library checks headers;
the bytes are read here, as its NumPy interface lacks float8.
"""

import itertools
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, Unpack

import jax
import numpy as np

from meshlayout import _checks, _jax, _paths
from meshlayout._annotations import PyTree
from meshlayout._optional import require
from meshlayout.checkpoint.difference import ArraySpec
from meshlayout.checkpoint.directory import path_text
from meshlayout.checkpoint.foreign import Arrays, LoadOptions
from meshlayout.checkpoint.load import HostArray, load, transposed
from meshlayout.checkpoint.match import Request, permutations, renamed
from meshlayout.checkpoint.tree import spec_of
from meshlayout.cluster.channel import Channel
from meshlayout.errors import CheckpointError, DamagedCheckpointError


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

# An array's spec in the file, its value, and the permutation of its dims, if any.
_Entry: TypeAlias = tuple[ArraySpec, Any, Sequence[int] | None]

# Saves are started in the same order on all processes, so the numbers agree.
_numbers = itertools.count()


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

    Example:
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
    try:
        arrays = _mapped(_chosen(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from None
    request = Request(like, separator=".", **options)
    return load(Arrays(str(path), arrays, "."), request)


def save_safetensors(
    path: str | os.PathLike[str],
    state: PyTree,
    *,
    rename: Mapping[str, str] | None = None,
    transpose: Mapping[str, Sequence[int]] | None = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes the arrays of a state to a safetensors file.

    Use this to publish weights, or to hand them to another library. All processes call
    this, with a path that they share, and each writes its own shards: no array is ever
    whole on a device or in memory. The file is complete before it takes its name.

    Args:
        path: A file name that ends in `.safetensors`, or a directory for a
            `model.safetensors`.
        state: Any tree of arrays.
        rename: `{pattern: replacement}`, as for `load_arrays`, by path in the state;
            then dots separate keys in the names.
        transpose: `{pattern: permutation}`, by path in the state: the saved array is
            `np.transpose(array, permutation)`.
        metadata: Strings to write into the header, by name.
        overwrite: Whether an existing file may be replaced.

    Returns:
        The path of the file.

    Raises:
        CheckpointError: If a leaf cannot be written, a name is ambiguous, or the file
            cannot be written. An existing file is then unchanged.
    """
    _checks.flag("overwrite", overwrite, error=CheckpointError)
    arrays = _named_arrays(state, rename, transpose)
    header = _header(arrays, metadata)
    path = _local(path)
    path = path if path.suffix and not path.is_dir() else path / f"model{_SUFFIX}"
    if path.suffix != _SUFFIX:
        raise CheckpointError(f"{path}: the file name must end in {_SUFFIX}.")
    temporary = path.with_name(f".{path.name}.incomplete")
    channel = Channel(
        f"safetensors/{next(_numbers)}",
        what="the same save_safetensors",
        hint="All processes have to call it, as each writes its own shards.",
        error=CheckpointError,
    )

    def allocate() -> None:
        if path.exists() and not overwrite:
            msg = f"{path} exists. Give another name, or overwrite=True."
            raise CheckpointError(msg)
        path.parent.mkdir(parents=True, exist_ok=True)
        num_bytes = sum(spec.nbytes for spec, _, _ in arrays)
        with temporary.open("wb") as file:
            file.write(header)
            file.flush()
            # A full disk is noticed here, as an error: a write to mapped memory would
            # kill the process with SIGBUS.
            if num_bytes and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), len(header), num_bytes)
            file.truncate(len(header) + num_bytes)

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


def _local(path: object) -> Path:
    text = path_text("path", path)
    if "://" in text:
        msg = f"{text}: safetensors files are mapped into memory: give a local path."
        raise CheckpointError(msg)
    return Path(text).expanduser()


# Reading.


def _chosen(path: Path) -> Path:
    """Returns the file or index of a path; in a directory, the only one."""
    if not path.is_dir():
        return path
    files = sorted(path.glob(f"*{_INDEX}")) or sorted(path.glob(f"*{_SUFFIX}"))
    if len(files) == 1:
        return files[0]
    names = ", ".join(file.name for file in files[:6]) or "none"
    msg = f"{path}: one safetensors file or index is needed, and these are: {names}."
    raise CheckpointError(msg)


def _mapped(path: Path) -> dict[str, HostArray]:
    """Returns the arrays of a file or index, mapped into memory, by name."""
    if not path.name.endswith(_INDEX):
        return _mapped_file(path)
    try:
        file_by_name = dict(json.loads(path.read_bytes())["weight_map"])
        names = {Path(file).name for file in file_by_name.values()}  # only beside it
        files = {name: _mapped_file(path.parent / name) for name in names}
        return {name: files[file][name] for name, file in file_by_name.items()}
    except (LookupError, TypeError, RecursionError, json.JSONDecodeError) as error:
        msg = f"{path} is not an index of the files beside it: {error}."
        raise DamagedCheckpointError(msg) from None


def _mapped_file(path: Path) -> dict[str, HostArray]:
    library = require("safetensors", extra="safetensors", purpose="Reading safetensors")
    try:
        # The library checks that arrays cover the file without gaps or overlaps.
        with library.safe_open(path, framework="np"):
            content = np.memmap(path, np.uint8, "r")
        (size,) = struct.unpack("<Q", content[:8].tobytes())
        header = json.loads(content[8 : 8 + size].tobytes())
        header.pop("__metadata__", None)
        arrays: dict[str, HostArray] = {}
        for name, entry in header.items():
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            dtype = jax.numpy.dtype(_DTYPES[entry["dtype"]])
            arrays[name] = content[begin:end].view(dtype).reshape(entry["shape"])
    except KeyError as error:
        msg = f"{path} holds arrays of the dtype {error}, which JAX lacks."
        raise CheckpointError(msg) from None
    except (library.SafetensorError, ValueError, RecursionError) as error:
        msg = f"{path} is truncated or is not a safetensors file: {error}."
        raise DamagedCheckpointError(msg) from None
    return arrays


# Writing.


def _named_arrays(state: PyTree, rename: Any, transpose: Any) -> list[_Entry]:
    """Returns all arrays of a state with their specs in the file, in their order."""
    leaves = _paths.flatten(state).leaves
    paths = [leaf.path for leaf in leaves]
    if not any(paths):
        msg = f"state must hold arrays by name, got {_checks.shown(state)}."
        raise CheckpointError(msg)
    dims = permutations(transpose, paths)
    arrays: list[_Entry] = []
    names = renamed(paths, rename, "/", ".")
    for (path, value, _), name in zip(leaves, names, strict=True):
        spec = spec_of(path, value)
        is_array = isinstance(value, (jax.Array, np.ndarray, np.generic))
        if not is_array or spec is None or spec.dtype not in _CODES:
            what = f"dtype {value.dtype}" if is_array else _checks.shown(value)
            msg = (
                f"{path}: safetensors files hold arrays of common dtypes, and this is "
                f"{what}. Save the parameters alone, as state.params or "
                "nnx.state(model, nnx.Param), and of PRNG keys jax.random.key_data."
            )
            raise CheckpointError(msg)
        spec = transposed(spec, dims[path]) if path in dims else spec
        arrays.append((replace(spec, path=name), value, dims.get(path)))
    # Large elements first: then each array begins at a multiple of its itemsize, which
    # readers that map files rely on.
    return sorted(arrays, key=lambda entry: (-entry[0].dtype.itemsize, entry[0].path))


def _header(arrays: Sequence[_Entry], metadata: Mapping[str, str] | None) -> bytes:
    """Returns the bytes before the arrays, which follow one after the other."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for spec, _, _ in arrays:
        entries[spec.path] = {
            "dtype": _CODES[spec.dtype],
            "shape": spec.shape,
            "data_offsets": (begin, begin := begin + spec.nbytes),
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write(file: Path, begin: int, arrays: Sequence[_Entry]) -> None:
    """Writes this process's shards into a file."""
    if not file.exists():
        msg = (
            f"process {jax.process_index()} does not see {file}, which process 0 has "
            "created. All processes need a directory that they share."
        )
        raise CheckpointError(msg)
    content = np.memmap(file, np.uint8, "r+")
    for spec, value, dims in arrays:
        part, begin = content[begin : begin + spec.nbytes], begin + spec.nbytes
        whole = part.view(spec.dtype).reshape(spec.shape)
        whole = whole if dims is None else whole.transpose(np.argsort(dims))
        shards = [((), value)]
        is_shared = False
        if isinstance(value, jax.Array):
            is_shared = not value.is_fully_addressable
            pieces = _jax.with_shards(value).addressable_shards
            shards = [(x.index, x.data) for x in pieces if x.replica_id == 0]
        # What is not shared, each process has: that of process 0 is written.
        for index, shard in shards if is_shared or jax.process_index() == 0 else ():
            whole[index] = np.asarray(shard)
    content.flush()
