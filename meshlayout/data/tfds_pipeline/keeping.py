"""A split that is decoded once, and kept in memory or in files."""

import hashlib
import json
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshlayout._render.tables import bytes_text
from meshlayout.data.adapters.arrays import ArrayRows
from meshlayout.data.leaves import leaf_text, named_leaves
from meshlayout.data.tfds_pipeline.prepared import Prepared
from meshlayout.errors import DataError


Array = np.ndarray[Any, Any]

# A split is kept in memory by itself if it takes no more of what is free.
MEMORY_SHARE = 0.25

# Rows that are decoded at a time.
CHUNK = 512

# What Python adds to a string in memory.
_STRING_OVERHEAD = 64

_INDEX = "index.json"


def decoded_bytes(first: Any, num_rows: int, prepared: Prepared) -> int | None:
    """Returns what a split takes when it is decoded, or None if rows differ in size.

    Args:
        first: Its first row, as a tree of arrays with one row.
        num_rows: How many rows it has.
        prepared: The data set and split.
    """
    infos = jax.tree.leaves(prepared.builder.info.features.get_tensor_info())
    if any(dim is None for info in infos for dim in info.shape):
        return None
    size = 0
    for leaf in jax.tree.leaves(first):
        if leaf.dtype == object:  # strings, which take no more than they do in files
            size += num_rows * _STRING_OVERHEAD + prepared.file_bytes
        else:
            size += num_rows * leaf.nbytes
    return size


def free_memory() -> int:
    """Returns how many bytes of memory this process may still take."""
    page = os.sysconf("SC_PAGE_SIZE")
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * page
    except (ValueError, OSError):  # macOS knows only the whole
        free = os.sysconf("SC_PHYS_PAGES") * page
    # Memory that holds files can be had, too.
    known = Path("/proc/meminfo")
    if known.exists():
        lines = (line.split() for line in known.read_text().splitlines())
        sizes = {line[0]: int(line[1]) * 1024 for line in lines if len(line) > 1}
        free = sizes.get("MemAvailable:", free)
    limit = _container_limit()
    return free if limit is None else min(free, limit)


@dataclass(frozen=True)
class Decoded:
    """Rows that are decoded as they are asked for.

    Attributes:
        num_rows: How many there are.
        blocks: Gives all of them in order, in blocks with their places.
    """

    num_rows: int
    blocks: Iterable[tuple[slice, Any]]


def keep_in_memory(source: Decoded, note: Callable[[str], None]) -> Any:
    """Decodes every row of a source into arrays.

    Args:
        source: The rows.
        note: Called with a sentence about what was done.

    Returns:
        A tree of arrays, each in its own dtype.

    Raises:
        DataError: If a leaf's shape differs between rows.
    """
    start = time.perf_counter()
    arrays = _filled(source, lambda _, shape, dtype: np.empty(shape, dtype))
    seconds = time.perf_counter() - start
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
    note(
        f"Decoded {source.num_rows:,} examples once into {bytes_text(size)} of "
        f"memory, in {seconds:.1f} s."
    )
    return arrays


def keep_on_disk(
    new_source: Callable[[], Decoded],
    prepared: Prepared,
    cache_dir: str | Path,
    variant: str,
    note: Callable[[str], None],
) -> Any:
    """Decodes every row of a source into files, once for all runs.

    The files of a split lie in a directory of their own, which appears whole or not at
    all.

    Args:
        new_source: Makes the source of the rows, if they have to be read.
        prepared: The data set and split.
        cache_dir: The directory of all caches.
        variant: What else the rows depend on.
        note: Called with a sentence about what was done.

    Returns:
        A tree of arrays that are read from the files as they are needed.

    Raises:
        DataError: If a leaf's shape differs between rows, or if the files are damaged.
    """
    directory = Path(cache_dir) / prepared.name / _key(prepared, variant)
    if directory.is_dir():
        note(f"Read the decoded examples that are kept in {directory}.")
        return _opened(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    source = new_source()
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=directory.parent))
    try:
        _write(source, building)
        _appear(building, directory)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    seconds = time.perf_counter() - start
    note(
        f"Decoded {source.num_rows:,} examples once into files in {directory}, in "
        f"{seconds:.1f} s."
    )
    return _opened(directory)


class SentAsFiles:
    """Rows in memory that worker processes read from files, which all of them share.

    Args:
        tree: A tree of arrays.
    """

    def __init__(self, tree: Any) -> None:
        self._tree, self._rows = tree, ArrayRows(tree)
        self._directory: Path | None = None

    def rows(self, indices: Array) -> Any:
        """Returns rows, in the order asked for."""
        return self._rows.rows(indices)

    def __reduce__(self) -> Any:
        leaves, treedef = jax.tree.flatten(self._tree)
        if self._directory is None:
            directory = Path(tempfile.mkdtemp(prefix="meshlayout-"))
            weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)
            for number, leaf in enumerate(leaves):
                np.save(directory / f"{number}.npy", _plain(leaf), allow_pickle=True)
            self._directory = directory
        dtypes = [leaf.dtype for leaf in leaves]
        tree = treedef.unflatten(range(len(leaves)))
        return _from_files, (self._directory, tree, dtypes)


def _from_files(directory: Path, tree: Any, dtypes: list[Any]) -> SentAsFiles:
    def opened(number: int) -> Array:
        path = directory / f"{number}.npy"
        if dtypes[number].hasobject:
            return np.load(path, allow_pickle=True)
        return np.asarray(np.load(path, mmap_mode="r")).view(dtypes[number])

    return SentAsFiles(jax.tree.map(opened, tree))


def _plain(leaf: Array) -> Array:
    """Returns a leaf as its bytes if NumPy's files do not know its dtype."""
    if leaf.dtype.kind != "V":
        return leaf
    return leaf.view(np.dtype(f"u{leaf.dtype.itemsize}"))


def _filled(
    source: Decoded, new_array: Callable[[str, tuple[int, ...], Any], Array]
) -> Any:
    """Returns a source's rows in new arrays, read in order."""
    arrays: list[Array] = []
    treedef: Any = None
    for block, rows in source.blocks:
        named, treedef = named_leaves(rows)
        if not arrays:
            arrays = [
                new_array(path, (source.num_rows, *leaf.shape[1:]), leaf.dtype)
                for path, leaf in named
            ]
        for array, (path, leaf) in zip(arrays, named, strict=True):
            _check_shape(path, leaf, array)
            array[block] = leaf
    return treedef.unflatten(arrays)


def _check_shape(path: str, leaf: Array, array: Array) -> None:
    if leaf.shape[1:] != array.shape[1:]:
        msg = (
            f"{leaf_text(path)} is ragged: an example has shape {leaf.shape[1:]}, and "
            f"the first one has {array.shape[1:]}. It cannot be kept in one array: use "
            "cache='none', with a map= that makes the shapes equal."
        )
        raise DataError(msg)


# Files


def _key(prepared: Prepared, variant: str) -> str:
    """Returns the name of a cache's directory: other data never has the same."""
    info = prepared.builder.info
    split = info.splits[prepared.split]
    facts = [
        prepared.name,
        prepared.split,
        [str(part) for part in split.file_instructions],
        [str(size) for size in split.shard_lengths],
        str(info.features),
        variant,
    ]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    readable = "".join(c if c.isalnum() else "_" for c in prepared.split)
    return f"{readable}-{digest}"


def _write(source: Decoded, directory: Path) -> None:
    leaves: list[dict[str, Any]] = []

    def new_file(path: str, shape: tuple[int, ...], dtype: Any) -> Array:
        if dtype.kind == "O":
            name = f"{len(leaves)}.json"
            leaves.append({"path": path, "file": name, "shape": shape})
            return np.empty(shape, object)
        name = f"{len(leaves)}.npy"
        leaves.append({"path": path, "file": name, "dtype": dtype.name})
        # Dtypes that NumPy's files do not know are kept as their bytes.
        plain = dtype if dtype.kind != "V" else np.dtype(f"u{dtype.itemsize}")
        file = np.lib.format.open_memmap(
            directory / name, mode="w+", dtype=plain, shape=shape
        )
        return file.view(dtype)

    filled = _filled(source, new_file)
    for leaf, entry in zip(jax.tree.leaves(filled), leaves, strict=True):
        if leaf.dtype.kind == "O":
            entry["dtype"] = _write_strings(
                entry["path"], leaf, directory / entry["file"]
            )
        else:
            leaf.flush()
    index = {"leaves": leaves, "structure": _structure(filled)}
    (directory / _INDEX).write_text(json.dumps(index, indent=1))


def _write_strings(path: str, leaf: Array, file: Path) -> str:
    """Writes strings, which are read back as a whole, and returns of what type."""
    values = leaf.ravel().tolist()
    kinds = {type(value).__name__ for value in values}
    if kinds == {"bytes"}:
        values = [value.decode("latin-1") for value in values]
    elif kinds != {"str"}:
        listed = ", ".join(sorted(kinds))
        msg = (
            f"{leaf_text(path)} holds objects of type {listed}, which cache='disk' "
            "does not keep. Use cache='memory' or 'none'."
        )
        raise DataError(msg)
    file.write_text(json.dumps(values))
    return kinds.pop()


def _read(entry: dict[str, Any], directory: Path) -> Array:
    """Returns a leaf from its file: numbers as they are needed, strings at once."""
    file = directory / entry["file"]
    if entry["dtype"] not in ("bytes", "str"):
        numbers = np.asarray(np.load(file, mmap_mode="r"))
        return numbers.view(np.dtype(entry["dtype"]))
    values = json.loads(file.read_text())
    if entry["dtype"] == "bytes":
        values = [value.encode("latin-1") for value in values]
    return np.array(values, object).reshape(entry["shape"])


def _appear(building: Path, directory: Path) -> None:
    try:
        building.rename(directory)
    except OSError:
        # Another process was faster: its files hold the same.
        if not directory.is_dir():
            raise


def _opened(directory: Path) -> Any:
    try:
        index = json.loads((directory / _INDEX).read_text())
        arrays = [_read(leaf, directory) for leaf in index["leaves"]]
    except (OSError, ValueError, KeyError) as error:
        first = str(error).partition("\n")[0]
        msg = (
            f"the decoded examples kept in {directory} cannot be read ({first}). "
            "Remove that directory: it is made again."
        )
        raise DataError(msg) from error
    return _restored(index["structure"], arrays)


def _structure(tree: Any) -> Any:
    """Returns a tree's containers as JSON takes them, with numbers for its leaves."""
    leaves, treedef = jax.tree.flatten(tree)
    return _described(treedef.unflatten(range(len(leaves))))


def _described(node: Any) -> Any:
    if isinstance(node, dict):
        return {"dict": {key: _described(value) for key, value in node.items()}}
    if isinstance(node, (tuple, list)):
        return {type(node).__name__: [_described(value) for value in node]}
    return node


def _restored(node: Any, arrays: list[Array]) -> Any:
    if not isinstance(node, dict):
        return arrays[node]
    ((kind, inside),) = node.items()
    if kind == "dict":
        return {key: _restored(value, arrays) for key, value in inside.items()}
    values = [_restored(value, arrays) for value in inside]
    return tuple(values) if kind == "tuple" else values


def _container_limit() -> int | None:
    """Returns how many bytes a container may still take, where it is limited."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - int(used))
