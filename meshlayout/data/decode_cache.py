"""A split that is decoded once and kept in memory.

Batches are then gathered in one step, from arrays in the dtypes of the dataset, which
is a hundred times faster than decoding images one by one. There is no cache on disk:
what does not fit into memory is decoded again in every epoch.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from meshlayout._annotations import Batch, PyTree
from meshlayout._render.tables import bytes_text
from meshlayout.data.examples import leaf_text, named_leaves
from meshlayout.data.preparation import Prepared
from meshlayout.data.workers import WorkerPool
from meshlayout.errors import DataError


Array: TypeAlias = np.ndarray[Any, Any]

# With cache="auto", a split is kept if it takes at most this share of the free memory.
MEMORY_SHARE = 0.25

# How many rows are decoded at a time.
_CHUNK = 512

# Bytes that Python adds to a string in memory, roughly.
_STRING_OVERHEAD = 64


def decoded_rows(
    pool: WorkerPool, num_rows: int, note: Callable[[str], None]
) -> PyTree:
    """Decodes every row of a split.

    Args:
        pool: The workers that read.
        num_rows: The number of rows.
        note: Called with a sentence about what was done.

    Returns:
        A tree of arrays with one row per example, in the dtypes of the dataset.

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
                # Allocated once: joining the pieces at the end would take twice the
                # memory that `why_not_kept` has counted on.
                arrays = [
                    np.empty((num_rows, *leaf.shape[1:]), leaf.dtype)
                    for _, leaf in named
                ]
            count = len(named[0][1])
            for array, (path, leaf) in zip(arrays, named, strict=True):
                if leaf.shape[1:] != array.shape[1:]:
                    msg = (
                        f"{leaf_text(path)} is ragged: an example has shape "
                        f"{leaf.shape[1:]}, and the first one has {array.shape[1:]}. "
                        "It cannot be kept in one array: use cache='none', with a map= "
                        "that makes the shapes equal."
                    )
                    raise DataError(msg)
                array[row : row + count] = leaf
            row += count
    seconds = time.perf_counter() - start_s
    size = bytes_text(sum(array.nbytes for array in arrays))
    note(
        f"Decoded {num_rows:,} examples once into {size} of memory in {seconds:.1f} s."
    )
    return treedef.unflatten(arrays)


def why_not_kept(first: Batch, prepared: Prepared) -> str | None:
    """Returns why a decoded split should not be kept in memory; None if it should.

    Args:
        first: The first row, as a tree of arrays with one row.
        prepared: The dataset and split.
    """
    # An unknown dim does not mean that examples differ, but an array cannot be
    # allocated for it without decoding all of them.
    infos = jax.tree.leaves(prepared.builder.info.features.get_tensor_info())
    if any(dim is None for info in infos for dim in info.shape):
        return "examples differ in size"
    size, num_rows = 0, len(prepared.source)
    for leaf in jax.tree.leaves(first):
        size += num_rows * (_STRING_OVERHEAD if leaf.dtype == object else leaf.nbytes)
        if leaf.dtype == object:  # strings take at most the size of the files
            size += sum(path.stat().st_size for path, _ in prepared.files)
    allowed = int(MEMORY_SHARE * free_memory())
    if size <= allowed:
        return None
    return (
        f"decoded, the split takes {bytes_text(size)}, more than "
        f"{bytes_text(allowed)}, {MEMORY_SHARE:.0%} of the free memory"
    )


def free_memory() -> int:
    """Returns the bytes of memory that are available to this process."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():  # macOS reports only the total
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    lines = (line.split() for line in meminfo.read_text().splitlines())
    sizes = {line[0]: int(line[1]) * 1024 for line in lines if len(line) > 1}
    free = sizes["MemAvailable:"]  # including memory that only caches files
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
    except OSError:  # not in a container, or one with cgroups of version 1
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - int(used)))
