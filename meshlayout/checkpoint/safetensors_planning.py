"""Which arrays of a state go into which safetensors file, under which names."""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshlayout import _jax, _paths
from meshlayout.checkpoint.difference import Leaf
from meshlayout.checkpoint.patterns import renamed
from meshlayout.checkpoint.safetensors import (
    DTYPES,
    INDEX,
    SUFFIX,
    check_separator,
    local_path,
)
from meshlayout.checkpoint.transposing import permutations, permuted
from meshlayout.errors import CheckpointError


_CODES = {dtype: code for code, dtype in DTYPES.items()}


def make_plan(
    path: Any,
    state: Any,
    *,
    most: int,
    rename: Mapping[str, str] | None,
    transpose: Mapping[str, Sequence[int]] | None,
    separator: str,
) -> "Plan":
    """Returns the files that hold a state; nothing is written.

    Args:
        path: As for `save_safetensors`, as are the others.
        state: Any tree of arrays.
        most: The most bytes of arrays in one file.
        rename: New names.
        transpose: Permutations of dims.
        separator: What stands between the keys in the names.

    Raises:
        CheckpointError: If a leaf is no array, or a name not unambiguous.
    """
    arrays = _named_arrays(state, rename, transpose, check_separator(separator))
    return _grouped(_target_file(path), arrays, _check_bytes(most))


@dataclass(frozen=True)
class Array:
    """An array to write.

    Attributes:
        name: Its name in the file.
        value: The array.
        dims: The permutation of its dims in the file; None for none.
    """

    name: str
    value: Any
    dims: tuple[int, ...] | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the file."""
        shape = tuple(self.value.shape)
        return shape if self.dims is None else tuple(shape[dim] for dim in self.dims)

    @property
    def dtype(self) -> Any:
        """Its dtype."""
        return np.dtype(self.value.dtype)

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
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


def _named_arrays(
    state: Any,
    rename: Mapping[str, str] | None,
    transpose: Mapping[str, Sequence[int]] | None,
    separator: str,
) -> list[Array]:
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
    turns = permutations(transpose, paths)
    for leaf in leaves:
        known = Leaf(leaf.path, (), leaf.value.shape, leaf.value.dtype)
        permuted(known, turns.get(leaf.path))
    found = [
        Array(name, leaf.value, turns.get(leaf.path))
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


@dataclass(frozen=True)
class Part:
    """One file.

    Attributes:
        path: Its name.
        arrays: What it holds, in order.
    """

    path: Path
    arrays: list[Array]

    @property
    def temporary(self) -> Path:
        """The name that it has until it is complete."""
        return self.path.with_name(f".{self.path.name}.incomplete")

    def header(self, metadata: Mapping[str, str]) -> bytes:
        """Returns what comes before the arrays.

        Args:
            metadata: Texts by name.
        """
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
        """The bytes of its arrays."""
        return sum(one.nbytes for one in self.arrays)


@dataclass(frozen=True)
class Plan:
    """All files of a save.

    Attributes:
        path: The name of the one file, or what those of several are made of.
        parts: The files with arrays.
    """

    path: Path
    parts: list[Part]

    @property
    def index(self) -> Path:
        """The file that says which array is in which file."""
        return self.path.with_name(f"{self.path.name}{INDEX}")

    @property
    def is_sharded(self) -> bool:
        """Whether there are several files, and an index."""
        return len(self.parts) > 1

    @property
    def files(self) -> list[Path]:
        """All files, the index last."""
        files = [part.path for part in self.parts]
        return [*files, self.index] if self.is_sharded else files

    def index_text(self) -> str:
        """Returns what the index holds."""
        files = {one.name: part.path.name for part in self.parts for one in part.arrays}
        size = sum(part.nbytes for part in self.parts)
        index = {
            "metadata": {"total_size": size},
            "weight_map": dict(sorted(files.items())),
        }
        return json.dumps(index, indent=2) + "\n"


def _grouped(path: Path, arrays: Sequence[Array], most: int) -> Plan:
    groups: list[list[Array]] = [[]]
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
    return Plan(
        path,
        [
            Part(path.with_name(name), some)
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
