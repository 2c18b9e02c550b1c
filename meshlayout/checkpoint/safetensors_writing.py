"""Writes states as safetensors files, never more than one shard in memory."""

import functools
import json
import logging
import math
import os
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from meshlayout import _jax, _paths, _render
from meshlayout.checkpoint.difference import Leaf
from meshlayout.checkpoint.files import sync_directory
from meshlayout.checkpoint.patterns import by_pattern, renamed
from meshlayout.checkpoint.placing import check_permutations
from meshlayout.checkpoint.processes import Channel, next_number
from meshlayout.checkpoint.safetensors import (
    DTYPES,
    INDEX,
    SUFFIX,
    check_separator,
    local_path,
)
from meshlayout.errors import CheckpointError


logger = logging.getLogger("meshlayout.checkpoint")

_CODES = {dtype: code for code, dtype in DTYPES.items()}


def save_safetensors(
    path: Any,
    state: Any,
    *,
    max_shard_bytes: int = 5 * 2**30,
    rename: Mapping[str, str] | None = None,
    transpose: Mapping[str, Sequence[int]] | None = None,
    separator: str = ".",
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> list[Path]:
    r"""Writes the arrays of a state to safetensors files.

    The files appear under their names when all of them are complete, and the index
    last. Each device's shards are written one after the other, so that no array is
    ever whole on a device or in memory. On several processes all of them call this,
    with a path on a disk that they share; each writes its own shards.

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
        separator: What stands between the keys in the names.
        metadata: Texts to write beside, by name.
        overwrite: Whether files of that name may be replaced. One file is replaced
            at once; of several, a kill in between leaves none that can be loaded.

    Returns:
        The files that were written, the index last.

    Raises:
        CheckpointError: If a leaf is no array or a PRNG key, a name is not
            unambiguous, or the files cannot be written; what was there before is
            there still.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     files = save_safetensors(directory, {"w": np.ones((4, 4))})
        ...     [file.name for file in files]
        ['model.safetensors']
    """
    begin = time.perf_counter()
    arrays = _arrays(state, rename, transpose, check_separator(separator))
    texts = _check_metadata(metadata)
    plan = _plan(_target_file(path), arrays, _check_bytes(max_shard_bytes))
    channel = Channel("safetensors", next_number())
    check = functools.partial(_check_free, plan, overwrite=overwrite)
    _together(channel, check, first_only=True)
    try:
        for part in plan.parts:
            make = functools.partial(_allocate, part, texts)
            _together(channel, make, first_only=True)
            _together(channel, functools.partial(_fill, part))
        _together(channel, functools.partial(_publish, plan), first_only=True)
    finally:
        if jax.process_index() == 0:
            for part in plan.parts:
                part.temporary.unlink(missing_ok=True)
    logger.info(
        "saved %d arrays, %s, to %s in %.1f s",
        len(arrays),
        _render.bytes_text(sum(one.nbytes for one in arrays)),
        plan.path,
        time.perf_counter() - begin,
    )
    return plan.files


@dataclass(frozen=True)
class _Array:
    """An array to write, and its place in the file."""

    name: str
    value: Any
    dims: tuple[int, ...] | None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.value.shape)
        return shape if self.dims is None else tuple(shape[dim] for dim in self.dims)

    @property
    def dtype(self) -> Any:
        return np.dtype(self.value.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def write(self, whole: np.ndarray[Any, Any]) -> None:
        """Writes what this process has to write, in the file's dims."""
        for index, part in _own_parts(self.value):
            if self.dims is not None:
                full = tuple(index) + (slice(None),) * (len(self.dims) - len(index))
                index, part = (
                    tuple(full[dim] for dim in self.dims),
                    np.transpose(part, self.dims),
                )
            whole[index] = part


def _own_parts(value: Any) -> Any:
    """Yields index and value of the shards that this process writes, one by one."""
    is_first = jax.process_index() == 0
    if not isinstance(value, jax.Array):
        if is_first:
            yield (), np.asarray(value)
        return
    if value.is_fully_addressable and not is_first:
        return  # every process has this array
    for shard in value.addressable_shards:
        if shard.replica_id == 0:
            yield shard.index, np.asarray(shard.data)


def _arrays(
    state: Any,
    rename: Mapping[str, str] | None,
    transpose: Mapping[str, Sequence[int]] | None,
    separator: str,
) -> list[_Array]:
    leaves = _paths.flatten(state).leaves
    for leaf in leaves:
        _check_array(leaf)
    paths = [leaf.path for leaf in leaves]
    names = renamed(paths, rename)
    if separator != "/":
        for path, name in zip(paths, names, strict=True):
            if name == path and separator in path:
                msg = (
                    f"{path}: a key holds {separator!r}, which also stands between "
                    "keys in the file. Give separator='/', or rename it."
                )
                raise CheckpointError(msg)
        names = [name.replace("/", separator) for name in names]
    if "__metadata__" in names or len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        name = (twice or ["__metadata__"])[0]
        msg = (
            f"{name}: more than one thing in the file would have this name. Change "
            "rename=."
        )
        raise CheckpointError(msg)
    turns = (
        by_pattern(check_permutations(transpose), paths, "transpose")
        if transpose
        else {}
    )
    for leaf in leaves:
        dims = turns.get(leaf.path)
        if dims is not None and len(dims) != len(leaf.value.shape):
            known = Leaf(leaf.path, (), leaf.value.shape, leaf.value.dtype)
            msg = (
                f"{known}: transpose= gives it the dims {dims}, which are for arrays "
                f"of {len(dims)} dims. Make the pattern narrower."
            )
            raise CheckpointError(msg)
    found = [
        _Array(name, leaf.value, turns.get(leaf.path))
        for name, leaf in zip(names, leaves, strict=True)
    ]
    return sorted(found, key=lambda one: one.name)


def _check_array(leaf: _paths.Leaf) -> None:
    value = leaf.value
    if not leaf.path:
        msg = "the state is one leaf without a name. Put it into a dict."
        raise CheckpointError(msg)
    dtype = getattr(value, "dtype", None)
    if dtype is not None and _jax.is_extended(dtype):
        msg = (
            f"{leaf.path}: it is a PRNG key, which safetensors files cannot hold. Save "
            "the parameters alone, as state.params or nnx.state(model, nnx.Param), or "
            "jax.random.key_data of the key."
        )
        raise CheckpointError(msg)
    if not isinstance(value, (jax.Array, np.ndarray, np.generic)):
        msg = (
            f"{leaf.path}: safetensors files hold arrays, and this is "
            f"{value!r} of type {type(value).__name__}. Save the parameters alone, as "
            "state.params or nnx.state(model, nnx.Param)."
        )
        raise CheckpointError(msg)
    if np.dtype(dtype) not in _CODES:
        msg = (
            f"{leaf.path}: safetensors files cannot hold the dtype {dtype}. Cast it to "
            "another one."
        )
        raise CheckpointError(msg)


# Planning.


@dataclass(frozen=True)
class _Part:
    """One file: its arrays, in order, and the name that it has until it is complete."""

    path: Path
    arrays: list[_Array]

    @property
    def temporary(self) -> Path:
        return self.path.with_name(f".{self.path.name}.incomplete")

    def header(self, metadata: Mapping[str, str]) -> bytes:
        entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        at = 0
        for one in self.arrays:
            entries[one.name] = {
                "dtype": _CODES[one.dtype],
                "shape": list(one.shape),
                "data_offsets": [at, at + one.nbytes],
            }
            at += one.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.arrays)


@dataclass(frozen=True)
class _Plan:
    """All files of a save."""

    path: Path
    parts: list[_Part]

    @property
    def index(self) -> Path:
        return self.path.with_name(f"{self.path.name}{INDEX}")

    @property
    def is_sharded(self) -> bool:
        return len(self.parts) > 1

    @property
    def files(self) -> list[Path]:
        files = [part.path for part in self.parts]
        return [*files, self.index] if self.is_sharded else files

    def index_text(self) -> str:
        files = {one.name: part.path.name for part in self.parts for one in part.arrays}
        size = sum(part.nbytes for part in self.parts)
        index = {
            "metadata": {"total_size": size},
            "weight_map": dict(sorted(files.items())),
        }
        return json.dumps(index, indent=2) + "\n"


def _plan(path: Path, arrays: Sequence[_Array], most: int) -> _Plan:
    groups: list[list[_Array]] = [[]]
    size = 0
    for one in arrays:
        if groups[-1] and size + one.nbytes > most:
            groups.append([])
            size = 0
        groups[-1].append(one)
        size += one.nbytes
    stem = path.name.removesuffix(SUFFIX)
    count = len(groups)
    names = [f"{stem}-{at + 1:05}-of-{count:05}{SUFFIX}" for at in range(count)]
    names = [path.name] if count == 1 else names
    # Large elements first: each array then begins at a multiple of its element.
    ordered = [sorted(some, key=lambda one: -one.dtype.itemsize) for some in groups]
    return _Plan(
        path,
        [
            _Part(path.with_name(name), some)
            for name, some in zip(names, ordered, strict=True)
        ],
    )


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


def _check_bytes(most: Any) -> int:
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        msg = f"max_shard_bytes= is a number of bytes from 1 up, and got {most!r}."
        raise CheckpointError(msg)
    return most


def _check_metadata(metadata: Any) -> dict[str, str]:
    texts = metadata or {}
    if not isinstance(texts, Mapping) or not all(
        isinstance(text, str) for pair in texts.items() for text in pair
    ):
        msg = f"metadata= is texts by name, and got {metadata!r}."
        raise CheckpointError(msg)
    return dict(texts)


# Writing.


def _together(
    channel: Channel, act: Callable[[], None], *, first_only: bool = False
) -> None:
    """Does something on every process or the first one; if one fails, all raise."""
    problem: CheckpointError | None = None
    try:
        if jax.process_index() == 0 or not first_only:
            act()
    except CheckpointError as error:
        problem = error
    except OSError as error:
        msg = f"the safetensors files cannot be written: {error}."
        problem = CheckpointError(msg)
    said = channel.exchange("" if problem is None else str(problem))
    if problem is not None:
        raise problem
    for index, text in enumerate(said):
        if text:
            msg = f"process {index}: {text}"
            raise CheckpointError(msg)


def _old_files(plan: _Plan) -> list[Path]:
    """Returns what is there of an earlier save under this name."""
    stem = plan.path.name.removesuffix(SUFFIX)
    shards = plan.path.parent.glob(f"{_literal(stem)}-?????-of-?????{SUFFIX}")
    return [one for one in [plan.index, plan.path, *sorted(shards)] if one.exists()]


def _literal(text: str) -> str:
    return "".join(f"[{char}]" if char in "*?[" else char for char in text)


def _check_free(plan: _Plan, *, overwrite: bool) -> None:
    plan.path.parent.mkdir(parents=True, exist_ok=True)
    old = _old_files(plan)
    if old and not overwrite:
        msg = f"{old[0]} exists. Give another name, or overwrite=True."
        raise CheckpointError(msg)


def _allocate(part: _Part, metadata: Mapping[str, str]) -> None:
    """Makes the file, with its header and with room on the disk for all arrays."""
    header = part.header(metadata)
    with part.temporary.open("wb") as file:
        file.write(header)
        file.flush()
        if part.nbytes:
            _reserve(file, len(header), part.nbytes)
        os.fsync(file.fileno())


def _reserve(file: BinaryIO, begin: int, size: int) -> None:
    # A full disk is found out here: in mapped memory it would end the process.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), begin, size)
        return
    zeros = bytes(1 << 20)
    while size:
        size -= file.write(zeros[:size])


def _fill(part: _Part) -> None:
    """Writes what this process has of a file's arrays."""
    with part.temporary.open("r+b") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        at = 8 + size
        for one in part.arrays:
            if one.nbytes:
                whole = np.memmap(file, one.dtype, "r+", at, one.shape or (1,))
                one.write(whole.reshape(one.shape))
                whole.flush()
            at += one.nbytes
        os.fsync(file.fileno())


def _publish(plan: _Plan) -> None:
    """Gives the files their names; a kill in between leaves no complete mixture."""
    old = set(_old_files(plan))
    if plan.is_sharded:
        # Without its index an old set is not one, and cannot mix with the new one.
        plan.index.unlink(missing_ok=True)
    for part in plan.parts:
        part.temporary.replace(part.path)
    if plan.is_sharded:
        temporary = plan.index.with_name(f".{plan.index.name}.incomplete")
        with temporary.open("w") as file:
            file.write(plan.index_text())
            file.flush()
            os.fsync(file.fileno())
        sync_directory(plan.path.parent)
        temporary.replace(plan.index)
    for one in sorted(old - set(plan.files), key=lambda one: one != plan.index):
        one.unlink(missing_ok=True)
    sync_directory(plan.path.parent)
