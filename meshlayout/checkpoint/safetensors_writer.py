"""Writes states as safetensors: one file, or shards with an index.

Process 0 writes alone, shard after shard, into files that are preallocated on the disk;
other processes send their shards in pieces. So no host ever holds more than one shard,
and the path may be on a local disk of process 0.
"""

import contextlib
import functools
import glob
import itertools
import json
import logging
import math
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshlayout import _checks, _jax, _paths, _render
from meshlayout._annotations import PyTree
from meshlayout.checkpoint.difference import ArraySpec
from meshlayout.checkpoint.files import sync_directory, write_whole
from meshlayout.checkpoint.patterns import permutations, renamed
from meshlayout.checkpoint.safetensors import (
    DTYPES,
    INDEX,
    SUFFIX,
    check_separator,
    local_path,
)
from meshlayout.checkpoint.target import Bounds, HostArray, bounds_of
from meshlayout.checkpoint.waits import open_channel
from meshlayout.cluster.process_sync import Channel
from meshlayout.errors import CheckpointError


logger = logging.getLogger("meshlayout.checkpoint")

_CODES = {dtype: code for code, dtype in DTYPES.items()}

# Bytes sent by another process at a time; every device holds as many meanwhile.
_PIECE_BYTES = 2**24


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
    under their names when all of them are complete, and the index last. Shards are
    written one after the other, so that no array is ever whole on a device or in
    memory. On several processes all of them call this, and process 0 writes.

    Args:
        path: A file name that ends in `.safetensors`, or a directory for a
            `model.safetensors`.
        state: Any tree of arrays.
        max_shard_bytes: The most bytes of arrays in one file, unless one array is
            larger. More are written as `model-00001-of-00002.safetensors`, ... with
            an index `model.safetensors.index.json`.
        rename: `{pattern: replacement}`, applied to the paths in the state as by
            `re.sub`. A path may be changed by one pattern only.
        transpose: `{pattern: permutation}`, by path in the state: the saved array is
            `np.transpose(array, permutation)`.
        separator: The separator between the keys in the names.
        metadata: Texts to write next to the arrays, by name.
        overwrite: Whether files of that name may be replaced. One file is replaced
            at once; of several, a kill in between leaves none that can be loaded.

    Returns:
        The files that were written, the index last.

    Raises:
        CheckpointError: If the state holds no arrays, a leaf is not an array or is a
            PRNG key, a name is ambiguous, or the files cannot be written; what was
            there before is still there.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     files = save_safetensors(directory, {"w": np.ones((4, 4))})
        ...     [file.name for file in files]
        ['model.safetensors']
    """
    begin_s = time.perf_counter()
    _checks.flag("overwrite", overwrite, error=CheckpointError)
    texts = _check_metadata(metadata)
    most = _checks.count("max_shard_bytes", max_shard_bytes, error=CheckpointError)
    arrays = _named_arrays(state, rename, transpose, check_separator(separator))
    plan = _SavePlan.of(_target_file(path), arrays, most)
    channel = open_channel("the same save_safetensors")
    is_first = jax.process_index() == 0
    with _agreed(channel):
        if is_first:
            _check_free(plan, overwrite=overwrite)
    try:
        for file in plan.files:
            with _agreed(channel):
                if is_first:
                    _allocate(file, texts)
            _fill(channel, file)
        with _agreed(channel):
            if is_first:
                _publish(plan)
    finally:
        for file in plan.files if is_first else ():
            try:
                file.temporary.unlink(missing_ok=True)
            except OSError as error:  # of a save that failed before
                logger.warning("%s cannot be removed: %s", file.temporary, error)
    logger.info(
        "saved %d arrays, %s, to %s in %.1f s",
        len(arrays),
        _render.bytes_text(sum(file.nbytes for file in plan.files)),
        plan.path,
        time.perf_counter() - begin_s,
    )
    return plan.paths


def _check_metadata(metadata: object) -> dict[str, str]:
    texts = {} if metadata is None else metadata
    if not isinstance(texts, Mapping) or not all(
        isinstance(text, str) for pair in texts.items() for text in pair
    ):
        msg = f"metadata= must be strings by name, got {metadata!r}."
        raise CheckpointError(msg)
    return dict(texts)


def _target_file(path: Any) -> Path:
    path = local_path(path)
    if path.name.endswith(SUFFIX) and not path.is_dir():
        return path
    if path.suffix and not path.is_dir():
        msg = (
            f"{path}: give a file name that ends in {SUFFIX}, or a directory for a "
            f"model{SUFFIX}."
        )
        raise CheckpointError(msg)
    return path / f"model{SUFFIX}"


# Planning a save: which arrays go into which file, under which names.


@dataclass(frozen=True)
class _NamedArray:
    """An array to write; `dims` is the permutation of its dims in the file, or None."""

    name: str
    value: jax.Array | HostArray
    dims: tuple[int, ...] | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the file."""
        shape = tuple(self.value.shape)
        return shape if self.dims is None else tuple(shape[dim] for dim in self.dims)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.value.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def shards(self) -> Iterator["_Shard"]:
        """Yields its distinct shards, each with a process that has it."""
        shape, value = tuple(self.value.shape), self.value
        if not isinstance(value, jax.Array):
            yield _Shard(self, tuple((0, size) for size in shape), 0)
            return
        owners: dict[Bounds, int] = {}
        is_shared = not value.is_fully_addressable
        for device, index in value.sharding.devices_indices_map(shape).items():
            # Of an array that every process has for itself, that of process 0 counts.
            owner = device.process_index if is_shared else 0
            bounds = bounds_of(index, shape)
            owners[bounds] = min(owner, owners.get(bounds, owner))
        for bounds, owner in owners.items():
            yield _Shard(self, bounds, owner)


@dataclass(frozen=True)
class _Shard:
    """A piece of an array: its bounds in every dim, and a process that has it."""

    array: _NamedArray
    bounds: Bounds
    owner: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.bounds)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.array.dtype.itemsize

    def values(self) -> HostArray:
        """Returns its values, on the process that has it."""
        value = self.array.value
        if not isinstance(value, jax.Array):
            return np.asarray(value)
        shape = tuple(value.shape)
        return next(
            np.asarray(shard.data)
            for shard in value.addressable_shards
            if bounds_of(shard.index, shape) == self.bounds
        )

    def write(self, whole: HostArray, values: HostArray) -> None:
        """Writes its values into the whole array of the file."""
        index = tuple(slice(*bound) for bound in self.bounds)
        dims = self.array.dims
        if dims is not None:
            index, values = (
                tuple(index[dim] for dim in dims),
                np.transpose(values, dims),
            )
        whole[index] = values


@dataclass(frozen=True)
class _File:
    """One file, and the arrays that it holds, in order."""

    path: Path
    arrays: list[_NamedArray]

    @property
    def temporary(self) -> Path:
        """The name that it has until it is complete."""
        return self.path.with_name(f".{self.path.name}.incomplete")

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @functools.cached_property
    def offsets(self) -> dict[str, int]:
        """Where each array begins, after the header."""
        sizes = [array.nbytes for array in self.arrays]
        begins = itertools.accumulate(sizes, initial=0)
        return dict(zip([array.name for array in self.arrays], begins, strict=False))

    def header(self, metadata: Mapping[str, str]) -> bytes:
        """Returns the bytes before the arrays."""
        entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        for array, begin in zip(self.arrays, self.offsets.values(), strict=True):
            entries[array.name] = {
                "dtype": _CODES[array.dtype],
                "shape": list(array.shape),
                "data_offsets": [begin, begin + array.nbytes],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


@dataclass(frozen=True)
class _SavePlan:
    """All files of a save; `path` is the one file, or what the names are made of."""

    path: Path
    files: list[_File]

    @classmethod
    def of(cls, path: Path, arrays: Sequence[_NamedArray], most: int) -> "_SavePlan":
        """Returns the files for arrays, each of at most so many bytes if it can be."""
        groups: list[list[_NamedArray]] = [[]]
        for array in arrays:
            size = sum(other.nbytes for other in groups[-1]) + array.nbytes
            if groups[-1] and size > most:
                groups.append([])
            groups[-1].append(array)
        stem, count = path.name.removesuffix(SUFFIX), len(groups)
        paths = [path]
        if count > 1:
            names = [f"{stem}-{i + 1:05}-of-{count:05}{SUFFIX}" for i in range(count)]
            paths = [path.with_name(name) for name in names]
        for group in groups:
            # Large elements first: each array then begins at a multiple of its element.
            group.sort(key=lambda array: -array.dtype.itemsize)
        return cls(path, [_File(*pair) for pair in zip(paths, groups, strict=True)])

    @property
    def index(self) -> Path:
        """The file that says which array is in which file, if there are several."""
        return self.path.with_name(f"{self.path.name}{INDEX}")

    @property
    def paths(self) -> list[Path]:
        """All files, the index last."""
        paths = [file.path for file in self.files]
        return [*paths, self.index] if len(paths) > 1 else paths

    def index_text(self) -> str:
        """Returns the content of the index."""
        names = {a.name: file.path.name for file in self.files for a in file.arrays}
        total = sum(file.nbytes for file in self.files)
        weight_map = dict(sorted(names.items()))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        return json.dumps(index, indent=2) + "\n"


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
        _check_array(leaf)
    paths = [leaf.path for leaf in leaves]
    names = renamed(paths, rename)
    for path, name in zip(paths, names, strict=True):
        if separator != "/" and name == path and separator in path:
            msg = (
                f"{path}: a key holds {separator!r}, which also stands between keys in "
                "the file. Give separator='/', or rename it."
            )
            raise CheckpointError(msg)
    names = [name.replace("/", separator) for name in names]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or "__metadata__" in names:
        msg = (
            f"{(twice or ['__metadata__'])[0]}: more than one thing in the file would "
            "have this name. Change rename=."
        )
        raise CheckpointError(msg)
    dims = permutations(transpose, paths)
    for leaf in leaves:
        shape = tuple(leaf.value.shape)
        ArraySpec(leaf.path, (), shape, leaf.value.dtype).transposed(
            dims.get(leaf.path)
        )
    arrays = [
        _NamedArray(name, leaf.value, dims.get(leaf.path))
        for name, leaf in zip(names, leaves, strict=True)
    ]
    return sorted(arrays, key=lambda array: array.name)


def _check_array(leaf: _paths.Leaf) -> None:
    value, dtype = leaf.value, getattr(leaf.value, "dtype", None)
    alone = "Save the parameters alone, as state.params or nnx.state(model, nnx.Param)"
    problem = ""
    if not leaf.path:
        msg = "the state is one leaf without a name. Put it into a dict."
        raise CheckpointError(msg)
    if dtype is not None and _jax.is_extended(dtype):
        problem = (
            f"it is a PRNG key, which safetensors files cannot hold. {alone}, or "
            "jax.random.key_data of the key."
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
        msg = f"{leaf.path}: {problem}"
        raise CheckpointError(msg)


# Writing.


@contextlib.contextmanager
def _agreed(channel: Channel) -> Iterator[None]:
    """Raises on all processes an error of one of them."""
    problem: CheckpointError | None = None
    try:
        yield
    except CheckpointError as error:
        problem = error
    except OSError as error:
        msg = f"the safetensors files cannot be written: {error}."
        problem = CheckpointError(msg)
    texts = channel.exchange("" if problem is None else str(problem)).values()
    if problem is not None:
        raise problem
    for process, text in enumerate(texts):
        if text:
            msg = f"process {process}: {text}"
            raise CheckpointError(msg)


def _existing(plan: _SavePlan) -> list[Path]:
    """Returns the files of an earlier save under this name."""
    stem = glob.escape(plan.path.name.removesuffix(SUFFIX))
    shards = plan.path.parent.glob(f"{stem}-?????-of-?????{SUFFIX}")
    paths = [plan.index, plan.path, *sorted(shards)]
    return [path for path in paths if path.exists()]


def _check_free(plan: _SavePlan, *, overwrite: bool) -> None:
    plan.path.parent.mkdir(parents=True, exist_ok=True)
    existing = _existing(plan)
    if existing and not overwrite:
        msg = f"{existing[0]} exists. Give another name, or overwrite=True."
        raise CheckpointError(msg)


def _allocate(file: _File, metadata: Mapping[str, str]) -> None:
    """Makes the file, with its header and with room on the disk for all arrays."""
    header = file.header(metadata)
    with file.temporary.open("wb") as stream:
        stream.write(header)
        stream.flush()
        # A full disk is detected here: a write to mapped memory would kill the process.
        if file.nbytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(stream.fileno(), len(header), file.nbytes)
        else:
            for begin in range(0, file.nbytes, _PIECE_BYTES):
                stream.write(bytes(min(_PIECE_BYTES, file.nbytes - begin)))
        os.fsync(stream.fileno())


def _fill(channel: Channel, file: _File) -> None:
    """Writes all shards of a file's arrays, on process 0.

    Errors are raised at the end: until then the other processes send their shards, and
    would wait forever for a process that no longer takes part.
    """
    is_first = jax.process_index() == 0
    problem: OSError | None = None
    for shard, values in _all_values(file):
        if is_first and problem is None:
            try:
                _write(file, shard, values)
            except OSError as error:
                problem = error
    with _agreed(channel):
        if problem is not None:
            raise problem
        if is_first:
            with file.temporary.open("r+b") as stream:
                os.fsync(stream.fileno())


def _all_values(file: _File) -> Iterator[tuple[_Shard, HostArray]]:
    """Yields the shards of a file with their values, on process 0."""
    remote: list[_Shard] = []
    for array in file.arrays:
        for shard in array.shards() if array.nbytes else ():
            if shard.owner:
                remote.append(shard)
            elif jax.process_index() == 0:
                yield shard, shard.values()
    for batch in _batches(remote):
        content = _received(batch)
        for shard in batch:
            values = content[: shard.nbytes].view(shard.array.dtype)
            content = content[shard.nbytes :]
            yield shard, values.reshape(shard.shape)


def _write(file: _File, shard: _Shard, values: HostArray) -> None:
    array = shard.array
    with file.temporary.open("r+b") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        offset = 8 + size + file.offsets[array.name]
        whole = np.memmap(stream, array.dtype, "r+", offset, array.shape or (1,))
    shard.write(whole.reshape(array.shape), values)


def _batches(shards: Sequence[_Shard]) -> Iterator[list[_Shard]]:
    """Yields shards of one process each, small ones together."""
    batch: list[_Shard] = []
    for shard in sorted(shards, key=lambda shard: shard.owner):
        size = sum(other.nbytes for other in batch) + shard.nbytes
        if batch and (batch[0].owner != shard.owner or size > _PIECE_BYTES):
            yield batch
            batch = []
        batch.append(shard)
    if batch:
        yield batch


def _received(batch: Sequence[_Shard]) -> HostArray:
    """Returns the bytes of shards of another process; all processes call it.

    They come in pieces of at most `_PIECE_BYTES`, of few different sizes, as a program
    is compiled for each size.
    """
    is_owner = batch[0].owner == jax.process_index()
    total = sum(shard.nbytes for shard in batch)
    content = np.zeros(total, np.uint8)
    if is_owner:
        parts = [np.ascontiguousarray(shard.values()) for shard in batch]
        content = np.concatenate([part.reshape(-1).view(np.uint8) for part in parts])
    for begin in range(0, total, _PIECE_BYTES):
        size = min(_PIECE_BYTES, total - begin)
        piece = np.zeros(max(1024, 1 << (size - 1).bit_length()), np.uint8)
        piece[:size] = content[begin : begin + size]
        piece = _jax.from_one_process(piece, is_source=is_owner)
        content[begin : begin + size] = piece[:size]
    return content


def _publish(plan: _SavePlan) -> None:
    """Renames the files; a kill in between never leaves a mixture that loads."""
    existing = set(_existing(plan))
    is_sharded = len(plan.files) > 1
    if is_sharded:
        # Without its index an old set is not one, and cannot mix with the new one.
        plan.index.unlink(missing_ok=True)
    for file in plan.files:
        file.temporary.replace(file.path)
    if is_sharded:
        sync_directory(plan.path.parent)
        write_whole(plan.index, plan.index_text().encode())
    for path in sorted(existing - set(plan.paths), key=lambda path: path != plan.index):
        path.unlink(missing_ok=True)
    sync_directory(plan.path.parent)
