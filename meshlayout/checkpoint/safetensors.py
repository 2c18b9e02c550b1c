"""Safetensors: published weights in and out, one file or several with an index.

Files are mapped into memory. A load copies the slices that its devices hold; in a save
every process writes its own shards into files on a shared disk, on which process 0 has
reserved the room: no host ever holds more than one shard. All files are complete under
temporary names before the first is renamed. The library checks headers; the bytes are
read here, as its NumPy interface lacks float8.
"""

import contextlib
import glob
import itertools
import json
import logging
import os
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, Unpack

import jax
import numpy as np

from meshlayout import _checks, _jax, _paths, _render
from meshlayout._annotations import PyTree
from meshlayout._optional import require
from meshlayout.checkpoint.difference import ArraySpec
from meshlayout.checkpoint.directory import path_text
from meshlayout.checkpoint.foreign import Arrays, LoadOptions
from meshlayout.checkpoint.load import HostArray, load
from meshlayout.checkpoint.match import Request, permutations, renamed
from meshlayout.cluster.channel import Channel
from meshlayout.errors import CheckpointError, DamagedCheckpointError


logger = logging.getLogger("meshlayout.checkpoint")

_SUFFIX, _INDEX = ".safetensors", ".index.json"

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

# An array to write, and its name, shape and dtype in the file.
_Named: TypeAlias = tuple[ArraySpec, Any]

# Saves are started in the same order on all processes, so the numbers agree.
_numbers = itertools.count()


def load_safetensors(
    path: str | os.PathLike[str],
    like: PyTree,
    *,
    separator: str = ".",
    **options: Unpack[LoadOptions],
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
        ...     _ = save_safetensors(directory, {"w": np.ones((2, 8), "float32")})
        ...     loaded = load_safetensors(directory, layouts)
        >>> loaded["w"].addressable_shards[0].data.shape
        (2, 1)
    """
    request = Request(like, separator=separator, **options)
    path = _local(path)
    try:
        arrays = _mapped(_resolved(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from None
    return load(Arrays(str(path), arrays, separator), request)


def save_safetensors(
    path: str | os.PathLike[str],
    state: PyTree,
    *,
    max_shard_bytes: int = 5 * 2**30,
    rename: Mapping[str, str] | None = None,
    transpose: Mapping[str, Sequence[int]] | None = None,
    separator: str = ".",
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Writes the arrays of a state to safetensors files.

    Use this to publish weights, or to hand them to another library. All processes call
    this, with a path that they share, and each writes its own shards: no array is ever
    whole on a device or in memory. All files are complete before one takes its name.

    Args:
        path: A file name that ends in `.safetensors`, or a directory for a
            `model.safetensors`.
        state: Any tree of arrays.
        max_shard_bytes: The most bytes of arrays in one file, unless one array is
            larger. A larger state is written as several files with an index.
        rename: `{pattern: replacement}`, as for `load_arrays`, applied to the paths in
            the state.
        transpose: `{pattern: permutation}`, by path in the state: the saved array is
            `np.transpose(array, permutation)`.
        separator: The separator between the keys in the names.
        metadata: Strings to write into the header, by name.
        overwrite: Whether existing files of that name may be replaced. If the process
            is killed while it replaces several, none of them can be loaded.

    Returns:
        The paths of the files, the index last.

    Raises:
        CheckpointError: If a leaf cannot be written, a name is ambiguous, or the files
            cannot be written. Existing files are then unchanged.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     files = save_safetensors(directory, {"w": np.ones((4, 4))})
        ...     [file.name for file in files]
        ['model.safetensors']
    """
    begin_s = time.perf_counter()
    _checks.flag("overwrite", overwrite, error=CheckpointError)
    _checks.choice("separator", separator, (".", "/"), error=CheckpointError)
    most = _checks.count("max_shard_bytes", max_shard_bytes, error=CheckpointError)
    arrays = _named_arrays(state, rename, transpose, separator)
    path = _local(path)
    path = path / f"model{_SUFFIX}" if path.is_dir() or not path.suffix else path
    if not path.name.endswith(_SUFFIX):
        raise CheckpointError(f"{path}: the file name must end in {_SUFFIX}.")
    files = _planned(path, arrays, most, metadata)
    channel = Channel(
        f"safetensors/{next(_numbers)}",
        what="the same save_safetensors",
        hint="All processes have to call it, as each writes its own shards.",
        error=CheckpointError,
    )
    try:
        channel.on_first(lambda: _allocate(path, files, overwrite=overwrite))
        with channel.failure_told():
            for file in files:
                file.write()
        channel.exchange(None)
        paths = channel.on_first(lambda: _publish(path, files))
    except OSError as error:
        msg = f"the safetensors files cannot be written: {error}."
        raise CheckpointError(msg) from error
    finally:
        for file in files if jax.process_index() == 0 else ():
            with contextlib.suppress(OSError):  # an error above is the one to raise
                file.temporary.unlink(missing_ok=True)
    size = _render.bytes_text(sum(spec.nbytes for spec, _ in arrays))
    took_s = time.perf_counter() - begin_s
    logger.info("saved %d arrays, %s, to %s in %.1f s", len(arrays), size, path, took_s)
    return paths


def _local(path: object) -> Path:
    text = path_text("path", path)
    if "://" in text:
        msg = f"{text}: safetensors files are mapped into memory: give a local path."
        raise CheckpointError(msg)
    return Path(text).expanduser()


# Reading.


def _resolved(path: Path) -> Path:
    """Returns the file or index of a path."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    if not path.is_dir():
        return path
    indices = sorted(path.glob(f"*{_SUFFIX}{_INDEX}"))
    files = sorted(path.glob(f"*{_SUFFIX}"))
    # Of `model.safetensors` beside its index, either may be the newer one.
    if len(indices) == 1 and path / indices[0].name.removesuffix(_INDEX) not in files:
        return indices[0]
    if not indices and len(files) == 1 and "-of-" not in files[0].name:
        return files[0]
    listed = ", ".join(file.name for file in [*indices, *files][:6]) or "none"
    msg = (
        f"{path}: it is unclear which safetensors file to read of these: {listed}. "
        "Give one file, or the index of shards, which says whether they are complete."
    )
    raise CheckpointError(msg)


def _mapped(path: Path) -> dict[str, HostArray]:
    """Returns the arrays of a file or index, mapped into memory, by name."""
    if not path.name.endswith(_INDEX):
        return _mapped_file(path)
    file_by_name: dict[str, str] = {}
    try:
        file_by_name = dict(json.loads(path.read_bytes())["weight_map"])
        strays = [file for file in file_by_name.values() if Path(file).name != file]
    except (ValueError, KeyError, TypeError, RecursionError):
        strays = [""]
    if strays:
        msg = (
            f"{path} is not an index of safetensors files: it has no 'weight_map' from "
            "the names of arrays to the names of files next to it."
        )
        raise DamagedCheckpointError(msg)
    files = {
        file: _mapped_file(path.parent / file) if (path.parent / file).is_file() else {}
        for file in {*file_by_name.values()}
    }
    for name, file in file_by_name.items():
        if name not in files[file]:
            msg = f"{path.parent / file} does not hold {name!r}, as {path.name} says."
            raise DamagedCheckpointError(msg)
    return {name: files[file][name] for name, file in file_by_name.items()}


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
            array = content[begin:end].view(jax.numpy.dtype(_DTYPES[entry["dtype"]]))
            arrays[name] = array.reshape(entry["shape"])
    except KeyError as error:
        msg = f"{path} holds arrays of the dtype {error}, which JAX lacks."
        raise CheckpointError(msg) from None
    except (library.SafetensorError, ValueError, RecursionError) as error:
        msg = f"{path} is truncated or is not a safetensors file: {error}."
        raise DamagedCheckpointError(msg) from None
    return arrays


# The plan of a save: which arrays go into which file, under which names.


@dataclass(frozen=True)
class _File:
    """One file: its header, and the arrays that follow one after the other.

    Each comes with its name, shape and dtype in the file.
    """

    path: Path
    arrays: Sequence[_Named]
    header: bytes

    @property
    def temporary(self) -> Path:
        """The name of the file until all files are complete."""
        return self.path.with_name(f".{self.path.name}.incomplete")

    @property
    def nbytes(self) -> int:
        """The bytes after the header."""
        return sum(spec.nbytes for spec, _ in self.arrays)

    def write(self) -> None:
        """Writes the shards of this process."""
        try:
            content = np.memmap(self.temporary, np.uint8, "r+")
        except FileNotFoundError:
            msg = (
                f"process {jax.process_index()} does not see {self.temporary}, which "
                "process 0 has created. All processes need a directory that they share."
            )
            raise CheckpointError(msg) from None
        begin = len(self.header)
        for spec, value in self.arrays:
            part, begin = content[begin : begin + spec.nbytes], begin + spec.nbytes
            whole = part.view(spec.dtype).reshape(spec.shape)
            dims = spec.dims or range(len(spec.shape))
            for index, shard in _own_shards(value):
                in_file = tuple(index[dim] for dim in dims)
                whole[in_file] = np.asarray(shard).transpose(dims)
        content.flush()


def _own_shards(value: Any) -> list[tuple[Any, Any]]:
    """Returns the shards that this process writes, with their indices."""
    is_shared = isinstance(value, jax.Array) and not value.is_fully_addressable
    if not is_shared and jax.process_index():
        return []  # each process has an array of its own: that of process 0 is written
    if not isinstance(value, jax.Array):
        return [((slice(None),) * np.ndim(value), value)]
    shards = _jax.with_shards(value).addressable_shards
    return [(shard.index, shard.data) for shard in shards if shard.replica_id == 0]


def _named_arrays(
    state: PyTree,
    rename: Mapping[str, str] | None,
    transpose: Mapping[str, Sequence[int]] | None,
    separator: str,
) -> list[_Named]:
    """Returns all arrays of a state by their names in the files, in their order."""
    leaves = _paths.flatten(state).leaves
    paths = [leaf.path for leaf in leaves]
    if not any(paths):
        msg = f"state must hold arrays by name, got {_checks.shown(state)}."
        raise CheckpointError(msg)
    dims = permutations(transpose, paths)
    arrays: list[_Named] = []
    names = renamed(paths, rename, "/", separator)
    for (path, value, _), name in zip(leaves, names, strict=True):
        dtype = getattr(value, "dtype", None)
        is_array = isinstance(value, (jax.Array, np.ndarray, np.generic))
        if not is_array or _jax.is_extended(dtype) or np.dtype(dtype) not in _CODES:
            what = f"dtype {dtype}" if is_array else _checks.shown(value)
            msg = (
                f"{path}: safetensors files hold arrays of common dtypes, and this is "
                f"{what}. Save the parameters alone, as state.params or "
                "nnx.state(model, nnx.Param), and of PRNG keys jax.random.key_data."
            )
            raise CheckpointError(msg)
        spec = ArraySpec(path, (), tuple(value.shape), np.dtype(dtype))
        spec = replace(spec.transposed(dims.get(path)), path=name)
        arrays.append((spec, value))
    return sorted(arrays, key=lambda array: array[0].path)


def _planned(
    path: Path,
    arrays: Sequence[_Named],
    most: int,
    metadata: Mapping[str, str] | None,
) -> list[_File]:
    """Returns the files for arrays, each of at most so many bytes if possible."""
    if not isinstance(metadata, Mapping | None):
        msg = f"metadata= must be strings by name, got {_checks.shown(metadata)}."
        raise CheckpointError(msg)
    texts = {str(key): str(text) for key, text in (metadata or {}).items()}
    groups: list[list[_Named]] = []
    num_bytes = 0
    for array in arrays:
        num_bytes += array[0].nbytes
        if not groups or num_bytes > most:
            groups.append([])
            num_bytes = array[0].nbytes
        groups[-1].append(array)
    stem, count = path.name.removesuffix(_SUFFIX), len(groups)
    files: list[_File] = []
    for i, group in enumerate(groups):
        # Large elements first: then each array begins at a multiple of its itemsize,
        # which readers that map files rely on.
        group.sort(key=lambda array: -array[0].dtype.itemsize)
        entries: dict[str, Any] = {"__metadata__": texts} if texts else {}
        begin = 0
        for spec, _ in group:
            entries[spec.path] = {
                "dtype": _CODES[spec.dtype],
                "shape": spec.shape,
                "data_offsets": [begin, begin := begin + spec.nbytes],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        name = f"{stem}-{i + 1:05}-of-{count:05}{_SUFFIX}" if count > 1 else path.name
        header = struct.pack("<Q", len(text)) + text
        files.append(_File(path.with_name(name), group, header))
    return files


# Process 0 creates the files, and gives them their names.


def _existing(path: Path) -> list[Path]:
    """Returns the files of an earlier save under this name, the index first."""
    stem = glob.escape(path.name.removesuffix(_SUFFIX))
    shards = sorted(path.parent.glob(f"{stem}-?????-of-?????{_SUFFIX}"))
    index = path.with_name(f"{path.name}{_INDEX}")
    return [file for file in (index, path, *shards) if file.exists()]


def _allocate(path: Path, files: Sequence[_File], *, overwrite: bool) -> None:
    """Creates the files with their headers and room on the disk for all arrays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    existing = _existing(path)
    if existing and not overwrite:
        msg = f"{existing[0]} exists. Give another name, or overwrite=True."
        raise CheckpointError(msg)
    for file in files:
        with file.temporary.open("wb") as stream:
            stream.write(file.header)
            stream.flush()
            # A full disk is noticed here, as an error: a write to mapped memory would
            # kill the process with SIGBUS. Windows fills what it extends.
            if file.nbytes and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(stream.fileno(), len(file.header), file.nbytes)
            stream.truncate(len(file.header) + file.nbytes)


def _publish(path: Path, files: Sequence[_File]) -> list[Path]:
    """Renames the files; a kill in between never leaves a mixture that can be loaded.

    Files without an index are refused by `load_safetensors`. So the old index is
    removed first, the new one is written last, and old files are removed after it.
    """
    earlier, index = _existing(path), path.with_name(f"{path.name}{_INDEX}")
    written = [file.path for file in files]
    for file in files:
        with file.temporary.open("r+b") as stream:
            os.fsync(stream.fileno())
    if len(files) > 1:
        index.unlink(missing_ok=True)
    for file in files:
        file.temporary.replace(file.path)
    if len(files) > 1:
        names = {x.path: file.path.name for file in files for x, _ in file.arrays}
        content = {
            "metadata": {"total_size": sum(file.nbytes for file in files)},
            "weight_map": dict(sorted(names.items())),
        }
        temporary = index.with_name(f".{index.name}.incomplete")
        temporary.write_text(f"{json.dumps(content, indent=2)}\n", encoding="utf-8")
        temporary.replace(index)
        written.append(index)
    for old in earlier:
        if old not in written:
            old.unlink(missing_ok=True)
    return written
