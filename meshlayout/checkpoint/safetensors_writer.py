"""Writes states as safetensors: one file, or several with an index.

Only process 0 writes, one shard of an array after the other, into files that are
preallocated on the disk; other processes send their shards in pieces. So no host ever
holds more than one shard, and the path may be on a local disk of process 0.

The files are complete under temporary names before any of them is renamed. On several
processes every call below that exchanges messages is made by all of them, in the same
order; an error on process 0 is raised on all.
"""

import functools
import glob
import itertools
import json
import logging
import math
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from meshlayout import _checks, _jax, _paths, _render
from meshlayout._annotations import Leaf, PyTree
from meshlayout.checkpoint.difference import ArraySpec
from meshlayout.checkpoint.files import sync_directory, write_whole
from meshlayout.checkpoint.patterns import permutations, renamed
from meshlayout.checkpoint.safetensors import (
    DTYPES,
    INDEX,
    SEPARATORS,
    SUFFIX,
    local_path,
)
from meshlayout.checkpoint.target import Bounds, HostArray, bounds_of
from meshlayout.checkpoint.waits import open_channel
from meshlayout.cluster.channel import Channel
from meshlayout.errors import CheckpointError


logger = logging.getLogger("meshlayout.checkpoint")

_CODES = {dtype: code for code, dtype in DTYPES.items()}

# How many bytes another process sends at a time; each device holds as many meanwhile.
_PIECE_BYTES = 2**24

_Sized = TypeVar("_Sized", "_NamedArray", "_Shard")


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
    r"""Writes the arrays of a state to safetensors files.

    Use this to publish weights, or to hand them to another library. The files appear
    under their names once all of them are complete, the index last. Shards of arrays
    are written one after the other, so that no array is ever whole on a device or in
    memory. All processes call this, and process 0 writes.

    Args:
        path: A file name that ends in `.safetensors`, or a directory for a
            `model.safetensors`.
        state: Any tree of arrays.
        max_shard_bytes: The most bytes of arrays in one file, unless one array is
            larger. A larger state is written as `model-00001-of-00002.safetensors`
            and so on, with an index `model.safetensors.index.json`.
        rename: `{pattern: replacement}`, as for `load_safetensors`, applied to the
            paths in the state.
        transpose: `{pattern: permutation}`, by path in the state: the saved array is
            `np.transpose(array, permutation)`.
        separator: The separator between the keys in the names.
        metadata: Strings to write into the header, by name.
        overwrite: Whether existing files of that name may be replaced. A single file
            is replaced atomically; if the process is killed while it replaces several,
            none of them can be loaded.

    Returns:
        The paths of the files, the index last.

    Raises:
        CheckpointError: If the state holds no arrays, a leaf is not an array or is a
            PRNG key, a name is ambiguous, or the files cannot be written. Existing
            files are then unchanged.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     files = save_safetensors(directory, {"w": np.ones((4, 4))})
        ...     [file.name for file in files]
        ['model.safetensors']
    """
    begin_s = time.perf_counter()
    _checks.flag("overwrite", overwrite, error=CheckpointError)
    _checks.choice("separator", separator, SEPARATORS, error=CheckpointError)
    most = _checks.count("max_shard_bytes", max_shard_bytes, error=CheckpointError)
    arrays = _named_arrays(state, rename, transpose, separator)
    path = _target_file(path)
    files = _files(path, arrays, most, _checked_metadata(metadata))
    channel = open_channel("the same save_safetensors")
    _write_on_first(channel, functools.partial(_check_free, path, overwrite=overwrite))
    try:
        for file in files:
            _write_on_first(channel, file.allocate)
            _fill(channel, file)
        _write_on_first(channel, functools.partial(_publish, path, files))
    finally:
        for file in files if jax.process_index() == 0 else ():
            try:
                file.temporary.unlink(missing_ok=True)
            except OSError as error:
                # The error that ended the save is the one to raise.
                logger.warning("%s cannot be removed: %s", file.temporary, error)
    logger.info(
        "saved %d arrays, %s, to %s in %.1f s",
        len(arrays),
        _render.bytes_text(sum(array.nbytes for array in arrays)),
        path,
        time.perf_counter() - begin_s,
    )
    paths = [file.path for file in files]
    return [*paths, _index_of(path)] if len(paths) > 1 else paths


def _checked_metadata(metadata: object) -> dict[str, str]:
    texts = {} if metadata is None else metadata
    if not isinstance(texts, Mapping) or not all(
        isinstance(text, str) for pair in texts.items() for text in pair
    ):
        msg = f"metadata= must be strings by name, got {_checks.shown(metadata)}."
        raise CheckpointError(msg)
    return dict(texts)


def _target_file(path: Any) -> Path:
    path = local_path(path)
    if path.is_dir() or not path.suffix:
        return path / f"model{SUFFIX}"
    if path.name.endswith(SUFFIX):
        return path
    msg = (
        f"{path}: give a file name that ends in {SUFFIX}, or a directory for a "
        f"model{SUFFIX}."
    )
    raise CheckpointError(msg)


# The plan of a save: which arrays go into which file, under which names.


@dataclass(frozen=True)
class _NamedArray:
    """An array to write; `spec` is its name, shape and dtype in the file."""

    spec: ArraySpec
    value: jax.Array | HostArray

    @property
    def nbytes(self) -> int:
        return math.prod(self.spec.shape) * self.spec.dtype.itemsize

    def shards(self) -> Iterator["_Shard"]:
        """Yields its distinct shards, each with a process that holds it."""
        shape, value = tuple(self.value.shape), self.value
        if not isinstance(value, jax.Array):
            yield _Shard(self, tuple((0, size) for size in shape), 0)
            return
        owners: dict[Bounds, int] = {}
        is_shared = not value.is_fully_addressable
        for device, index in value.sharding.devices_indices_map(shape).items():
            # If every process has an array of its own, that of process 0 is written.
            owner = device.process_index if is_shared else 0
            bounds = bounds_of(index, shape)
            owners[bounds] = min(owner, owners.get(bounds, owner))
        for bounds, owner in owners.items():
            yield _Shard(self, bounds, owner)


@dataclass(frozen=True)
class _Shard:
    """A shard of an array: its bounds in every dim, and a process that holds it."""

    array: _NamedArray
    bounds: Bounds
    owner: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.bounds)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.array.spec.dtype.itemsize

    def values(self) -> HostArray:
        """Returns its values, on the process that holds it."""
        value = self.array.value
        if not isinstance(value, jax.Array):
            return np.asarray(value)
        shape = tuple(value.shape)
        return next(
            np.asarray(shard.data)
            for shard in _jax.with_shards(value).addressable_shards
            if bounds_of(shard.index, shape) == self.bounds
        )


@dataclass(frozen=True)
class _File:
    """One file, and the arrays that it holds, in order."""

    path: Path
    arrays: list[_NamedArray]
    metadata: Mapping[str, str]

    @property
    def temporary(self) -> Path:
        """The name of the file until all files are complete."""
        return self.path.with_name(f".{self.path.name}.incomplete")

    @property
    def nbytes(self) -> int:
        """The bytes after the header."""
        return sum(array.nbytes for array in self.arrays)

    @functools.cached_property
    def begins(self) -> dict[str, int]:
        """The first byte of each array after the header, by name."""
        sizes = itertools.accumulate((array.nbytes for array in self.arrays), initial=0)
        return {a.spec.path: size for a, size in zip(self.arrays, sizes, strict=False)}

    @functools.cached_property
    def header(self) -> bytes:
        """The bytes before the arrays."""
        entries: dict[str, Any] = {}
        if self.metadata:
            entries["__metadata__"] = self.metadata
        for array in self.arrays:
            spec, begin = array.spec, self.begins[array.spec.path]
            entries[spec.path] = {
                "dtype": _CODES[spec.dtype],
                "shape": spec.shape,
                "data_offsets": [begin, begin + array.nbytes],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # arrays begin at a multiple of 8, for mapping
        return struct.pack("<Q", len(text)) + text

    def allocate(self) -> None:
        """Creates the file with its header and space on the disk for all arrays."""
        with self.temporary.open("wb") as stream:
            stream.write(self.header)
            stream.flush()
            # A full disk is noticed here, as an error: a write to mapped memory would
            # kill the process with SIGBUS.
            if self.nbytes and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(stream.fileno(), len(self.header), self.nbytes)
            else:
                for begin in range(0, self.nbytes, _PIECE_BYTES):
                    stream.write(bytes(min(_PIECE_BYTES, self.nbytes - begin)))
            os.fsync(stream.fileno())

    def write(self, shard: _Shard, values: HostArray) -> None:
        """Writes a shard's values into the file."""
        spec = shard.array.spec
        offset = len(self.header) + self.begins[spec.path]
        whole = np.memmap(self.temporary, spec.dtype, "r+", offset, spec.shape or (1,))
        index = tuple(slice(*bound) for bound in shard.bounds)
        if spec.dims is not None:
            index = tuple(index[dim] for dim in spec.dims)
            values = np.transpose(values, spec.dims)
        whole.reshape(spec.shape)[index] = values


def _files(
    path: Path, arrays: Sequence[_NamedArray], most: int, metadata: Mapping[str, str]
) -> list[_File]:
    """Returns the files for arrays, each of at most so many bytes if possible."""
    groups = _grouped(arrays, most)
    stem, count = path.name.removesuffix(SUFFIX), len(groups)
    names = [f"{stem}-{i + 1:05}-of-{count:05}{SUFFIX}" for i in range(count)]
    if count == 1:
        names = [path.name]
    for group in groups:
        # Large elements first: then each array begins at a multiple of its itemsize,
        # which readers that map files rely on.
        group.sort(key=lambda array: -array.spec.dtype.itemsize)
    return [
        _File(path.with_name(name), group, metadata)
        for name, group in zip(names, groups, strict=True)
    ]


def _grouped(items: Iterable[_Sized], most: int) -> list[list[_Sized]]:
    """Groups items in order, each group of at most so many bytes or a single item."""
    groups: list[list[_Sized]] = []
    size = 0
    for item in items:
        size += item.nbytes
        if not groups or size > most:
            groups.append([])
            size = item.nbytes
        groups[-1].append(item)
    return groups


def _index_of(path: Path) -> Path:
    """Returns the path of the index, which says which array is in which file."""
    return path.with_name(f"{path.name}{INDEX}")


def _named_arrays(
    state: PyTree,
    rename: Mapping[str, str] | None,
    transpose: Mapping[str, Sequence[int]] | None,
    separator: str,
) -> list[_NamedArray]:
    """Returns all arrays of a state, by their names in the files."""
    leaves = _paths.flatten(state).leaves
    if not leaves:
        _checks.has_arrays(
            "state", state, where="save_safetensors", error=CheckpointError
        )
    for leaf in leaves:
        _check_array(leaf.path, leaf.value)
    paths = [leaf.path for leaf in leaves]
    names = renamed(paths, rename)
    for path, name in zip(paths, names, strict=True):
        # `a.b/c` would be read back as `a/b/c`. A user's new name may be what is meant.
        if separator != "/" and name == path and separator in path:
            msg = (
                f"{path}: a key contains {separator!r}, which also separates keys in "
                "the file. Give separator='/', or rename the array."
            )
            raise CheckpointError(msg)
    names = renamed(paths, rename, "/", separator)
    if "__metadata__" in names:
        msg = (
            "__metadata__: safetensors reserves this name for the metadata. Change "
            "rename=."
        )
        raise CheckpointError(msg)
    dims = permutations(transpose, paths)
    arrays: list[_NamedArray] = []
    for leaf, name in zip(leaves, names, strict=True):
        shape, dtype = tuple(leaf.value.shape), np.dtype(leaf.value.dtype)
        spec = ArraySpec(leaf.path, (), shape, dtype).transposed(dims.get(leaf.path))
        arrays.append(_NamedArray(replace(spec, path=name), leaf.value))
    return sorted(arrays, key=lambda array: array.spec.path)


def _check_array(path: str, value: Leaf) -> None:
    """Raises CheckpointError for a leaf that safetensors files cannot hold."""
    if not path:
        msg = "the state is a single leaf without a name. Put it into a dict."
        raise CheckpointError(msg)
    dtype = getattr(value, "dtype", None)
    alone = "Save the parameters alone, as state.params or nnx.state(model, nnx.Param)"
    problem = ""
    if dtype is not None and _jax.is_extended(dtype):
        problem = (
            f"safetensors files cannot hold PRNG keys. {alone}, or "
            "jax.random.key_data(key) instead of the key."
        )
    elif not isinstance(value, (jax.Array, np.ndarray, np.generic)):
        problem = (
            f"safetensors files hold arrays, and this is {value!r} of type "
            f"{type(value).__name__}. {alone}."
        )
    elif np.dtype(dtype) not in _CODES:
        problem = (
            f"safetensors files cannot hold the dtype {dtype}. Cast it to another one."
        )
    elif isinstance(value, jax.Array) and value.is_deleted():
        problem = (
            "the array is deleted: it was donated to a step or a relayout. Save what "
            "the step returned."
        )
    if problem:
        raise CheckpointError(f"{path}: {problem}")


# Writing.


def _write_on_first(channel: Channel, work: Callable[[], None]) -> None:
    """Calls a function on process 0, and raises its errors on all processes."""

    def write() -> None:
        try:
            work()
        except OSError as error:
            msg = f"the safetensors files cannot be written: {error}."
            raise CheckpointError(msg) from error

    channel.on_first(write)


def _existing(path: Path) -> list[Path]:
    """Returns the files of an earlier save under this name."""
    stem = glob.escape(path.name.removesuffix(SUFFIX))
    shards = path.parent.glob(f"{stem}-?????-of-?????{SUFFIX}")
    return [file for file in (_index_of(path), path, *sorted(shards)) if file.exists()]


def _check_free(path: Path, *, overwrite: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    existing = _existing(path)
    if existing and not overwrite:
        msg = f"{existing[0]} exists. Give another name, or overwrite=True."
        raise CheckpointError(msg)


def _fill(channel: Channel, file: _File) -> None:
    """Writes all shards of a file's arrays, on process 0.

    Errors are raised at the end: until then the other processes send their shards in
    collectives, and would wait forever for a process that no longer takes part.
    """
    problem: OSError | None = None
    for shard, values in _all_values(file):
        if jax.process_index() == 0 and problem is None:
            try:
                file.write(shard, values)
            except OSError as error:
                problem = error

    def finish() -> None:
        if problem is not None:
            raise problem
        with file.temporary.open("r+b") as stream:
            os.fsync(stream.fileno())

    _write_on_first(channel, finish)


def _all_values(file: _File) -> Iterator[tuple[_Shard, HostArray]]:
    """Yields the shards of a file with their values, on process 0."""
    remote: dict[int, list[_Shard]] = {}
    for array in file.arrays:
        for shard in array.shards() if array.nbytes else ():
            # The plan is the same on all processes, which take part in each transfer.
            if shard.owner:
                remote.setdefault(shard.owner, []).append(shard)
            elif jax.process_index() == 0:
                yield shard, shard.values()
    for owner in sorted(remote):
        for group in _grouped(remote[owner], _PIECE_BYTES):
            content = _received(group)
            for shard in group:
                values = content[: shard.nbytes].view(shard.array.spec.dtype)
                content = content[shard.nbytes :]
                yield shard, values.reshape(shard.shape)


def _received(shards: Sequence[_Shard]) -> HostArray:
    """Returns the bytes of another process's shards; called on all processes.

    They are sent in pieces of at most `_PIECE_BYTES`, padded to a power of two: a
    program is compiled for each size.
    """
    is_owner = shards[0].owner == jax.process_index()
    total = sum(shard.nbytes for shard in shards)
    content = np.zeros(total, np.uint8)
    if is_owner:
        parts = [np.ascontiguousarray(shard.values()) for shard in shards]
        content = np.concatenate([part.reshape(-1).view(np.uint8) for part in parts])
    for begin in range(0, total, _PIECE_BYTES):
        size = min(_PIECE_BYTES, total - begin)
        piece = np.zeros(max(1024, 1 << (size - 1).bit_length()), np.uint8)
        piece[:size] = content[begin : begin + size]
        piece = _jax.from_one_process(piece, is_source=is_owner)
        content[begin : begin + size] = piece[:size]
    return content


def _publish(path: Path, files: Sequence[_File]) -> None:
    """Renames the files; a kill in between never leaves a mixture that can be loaded.

    Files without an index are refused by `load_safetensors`. So the old index is
    removed first, the new one is written last, and old files are removed after it.
    """
    earlier, index = _existing(path), _index_of(path)
    is_sharded = len(files) > 1
    if is_sharded:
        index.unlink(missing_ok=True)
    for file in files:
        file.temporary.replace(file.path)
    written = {file.path for file in files}
    if is_sharded:
        sync_directory(path.parent)
        names = {a.spec.path: file.path.name for file in files for a in file.arrays}
        content = {
            "metadata": {"total_size": sum(file.nbytes for file in files)},
            "weight_map": dict(sorted(names.items())),
        }
        write_whole(index, f"{json.dumps(content, indent=2)}\n".encode())
        written.add(index)
    for old in earlier:  # the index first
        if old not in written:
            old.unlink(missing_ok=True)
    sync_directory(path.parent)
