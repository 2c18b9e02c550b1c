"""A split that is decoded once and kept in memory.

Batches are then gathered in one step from arrays in their own dtypes, which is a
hundred times faster than decoding images one by one.
"""

import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from meshlayout._annotations import Batch, PyTree
from meshlayout._render.tables import bytes_text
from meshlayout.data.adapters.arrays import array_rows
from meshlayout.data.examples import leaf_text, named_leaves
from meshlayout.data.preparation import Prepared
from meshlayout.data.workers import WorkerPool
from meshlayout.errors import DataError


Array: TypeAlias = np.ndarray[Any, Any]

# A split is kept without being asked for if it takes no more of the free memory.
MEMORY_SHARE = 0.25

# Rows that are decoded at a time.
_CHUNK = 512

# What Python adds to a string in memory.
_STRING_OVERHEAD = 64


def decoded_rows(
    pool: WorkerPool, num_rows: int, note: Callable[[str], None]
) -> PyTree:
    """Decodes every row of a split.

    Args:
        pool: The workers that read.
        num_rows: How many rows there are.
        note: Called with a sentence about what was done.

    Returns:
        A tree of arrays with one row per example, each in its own dtype.

    Raises:
        DataError: If a leaf's shape differs between rows.
    """
    start_s = time.perf_counter()
    arrays: list[Array] = []
    treedef: Any = None
    for start in range(0, num_rows, _CHUNK):
        indices = np.arange(start, min(start + _CHUNK, num_rows))
        row = start
        for piece in pool.read(indices, 0)[0]:
            named, treedef = named_leaves(piece.rows)
            if not arrays:
                arrays = [
                    np.empty((num_rows, *leaf.shape[1:]), leaf.dtype)
                    for _, leaf in named
                ]
            count = len(named[0][1])
            for array, (path, leaf) in zip(arrays, named, strict=True):
                _check_shape(path, leaf, array)
                array[row : row + count] = leaf
            row += count
    seconds = time.perf_counter() - start_s
    size = bytes_text(sum(array.nbytes for array in arrays))
    note(
        f"Decoded {num_rows:,} examples once into {size} of memory in {seconds:.1f} s."
    )
    return treedef.unflatten(arrays)


def why_not_kept(first: Batch, prepared: Prepared) -> str | None:
    """Returns why a decoded split should not be kept in memory, or None.

    Args:
        first: Its first row, as a tree of arrays with one row.
        prepared: The dataset and split.
    """
    size = _decoded_bytes(first, prepared)
    if size is None:
        return "examples differ in size"
    allowed = int(MEMORY_SHARE * free_memory())
    if size <= allowed:
        return None
    return (
        f"decoded, the split takes {bytes_text(size)}, more than "
        f"{bytes_text(allowed)}, {MEMORY_SHARE:.0%} of the free memory"
    )


def free_memory() -> int:
    """Returns how many bytes of memory are available to this process."""
    page = os.sysconf("SC_PAGE_SIZE")
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * page
    except (ValueError, OSError):  # macOS reports only the total
        free = os.sysconf("SC_PHYS_PAGES") * page
    # Memory that caches files is available, too.
    known = Path("/proc/meminfo")
    if known.exists():
        lines = (line.split() for line in known.read_text().splitlines())
        sizes = {line[0]: int(line[1]) * 1024 for line in lines if len(line) > 1}
        free = sizes.get("MemAvailable:", free)
    limit = _container_limit()
    return free if limit is None else min(free, limit)


class SharedRows:
    """Rows in memory, which worker processes read from files that all of them map.

    Args:
        tree: A tree of arrays.
    """

    def __init__(self, tree: PyTree) -> None:
        self._tree, self._rows = tree, array_rows(tree)
        self._directory: Path | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def read_rows(self, indices: Array, epoch: int) -> Batch:
        """Returns rows, in the order asked for."""
        return self._rows.read_rows(indices, epoch)

    def __reduce__(self) -> Any:
        leaves, treedef = jax.tree.flatten(self._tree)
        if self._directory is None:
            directory = Path(tempfile.mkdtemp(prefix="meshlayout-"))
            weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)
            for number, leaf in enumerate(leaves):
                # NumPy files lack bfloat16 and similar dtypes: store their bits.
                is_extended = leaf.dtype.kind == "V"
                bits = leaf.view(f"u{leaf.dtype.itemsize}") if is_extended else leaf
                np.save(directory / f"{number}.npy", bits)
            self._directory = directory
        dtypes = [leaf.dtype for leaf in leaves]
        tree = treedef.unflatten(range(len(leaves)))
        return _from_files, (self._directory, tree, dtypes)


def _from_files(directory: Path, tree: PyTree, dtypes: list[Any]) -> SharedRows:
    def opened(number: int) -> Array:
        path, dtype = directory / f"{number}.npy", dtypes[number]
        if dtype.hasobject:
            return np.load(path, allow_pickle=True)
        return np.asarray(np.load(path, mmap_mode="r")).view(dtype)

    return SharedRows(jax.tree.map(opened, tree))


def _decoded_bytes(first: Batch, prepared: Prepared) -> int | None:
    """Returns the bytes of a decoded split, or None if rows differ in size."""
    infos = jax.tree.leaves(prepared.builder.info.features.get_tensor_info())
    if any(dim is None for info in infos for dim in info.shape):
        return None
    size, num_rows = 0, len(prepared.source)
    for leaf in jax.tree.leaves(first):
        if leaf.dtype == object:  # strings, which take no more than they do in files
            size += num_rows * _STRING_OVERHEAD + prepared.file_bytes
        else:
            size += num_rows * leaf.nbytes
    return size


def _check_shape(path: str, leaf: Array, array: Array) -> None:
    if leaf.shape[1:] != array.shape[1:]:
        msg = (
            f"{leaf_text(path)} is ragged: an example has shape {leaf.shape[1:]}, and "
            f"the first one has {array.shape[1:]}. It cannot be kept in one array: use "
            "cache='none', with a map= that makes the shapes equal."
        )
        raise DataError(msg)


def _container_limit() -> int | None:
    """Returns how many bytes are left to a container, if it has a limit."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - int(used))
