"""From the name of a TFDS dataset to global batches on the mesh.

A split that fits into memory is decoded once and gathered from there. Everything else
is read batch by batch. Either way the split is a source with random access, so that
order, shards, padding and positions work as for any other source.
"""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout._render.tables import bytes_text
from meshlayout.data.adapters.arrays import Rows, array_rows
from meshlayout.data.adapters.tfds import feature_dtypes
from meshlayout.data.dataset import DataOptions, DistributedDataset, dataset_of
from meshlayout.data.examples import describe, leaf_text, named_leaves, stack
from meshlayout.data.prepared import Builder, find_split
from meshlayout.data.protocols import RandomAccessSource
from meshlayout.data.report import Clock
from meshlayout.data.row_map import RowMap, row_map
from meshlayout.data.workers import Workers
from meshlayout.errors import DataError


# Without in_memory=, a split is kept if it takes at most this share of the free memory.
_MEMORY_SHARE = 0.25

# How many rows are decoded at a time.
_CHUNK = 512

# Bytes that Python adds to a string in memory, roughly.
_STRING_OVERHEAD = 64


def from_tfds(
    name: Any,
    split: str,
    layout_or_mesh: Any,
    *,
    global_batch_size: int,
    shuffle: int | None = 0,
    map: Callable[..., Any] | None = None,
    num_workers: int = 0,
    in_memory: bool | None = None,
    data_dir: str | Path | None = None,
    decoders: Any = None,
    supervised: bool = False,
    remainder: str = "pad",
    weights: str | int | None = "weight",
    epochs: int | None = 1,
    prefetch: int = 2,
    strings: str = "error",
) -> DistributedDataset:
    """Returns a TFDS dataset as shuffled, sharded, prefetched global batches.

    Use this if TFDS has the dataset: the name is enough. Datasets that are prepared as
    array_record are read without TensorFlow; others are downloaded and prepared by
    TFDS, those of the MNIST family without TensorFlow, too. A split that fits into
    memory is decoded once, in its own dtypes, and every batch is gathered from there in
    one step. Batches are a function of seed and epoch, the same on any number of
    processes and workers, and iteration resumes at any of them.

    Args:
        name: TFDS's name, such as `mnist` or `emnist/letters`, or a builder.
        split: The split, such as `train` or `train[:10%]`.
        layout_or_mesh: The layout of batches, as for `distribute_dataset`.
        global_batch_size: Rows of a global batch.
        shuffle: A seed, which together with the epoch determines the order of the rows
            and the random numbers of `map`. None keeps the order of the files.
        map: Called with every example, a tree of NumPy arrays, after decoding; returns
            a tree. If it requires a second argument, it gets a NumPy random generator
            that is a function of seed, epoch and row.
        num_workers: How many processes read, decode and map; 0 leaves it to the
            prefetching thread. Processes import the script that starts them, as always
            in Python: what it runs belongs under `if __name__ == "__main__":`.
        in_memory: Whether the split is decoded once and kept. None keeps it if it takes
            at most a quarter of the free memory.
        data_dir: Where TFDS keeps prepared datasets; None for its default.
        decoders: TFDS's decoders by feature, as for `tfds.data_source`.
        supervised: Whether examples are TFDS's pairs of input and target; by default
            they are dicts of all features.
        remainder: As for `distribute_dataset`.
        weights: As for `distribute_dataset`; index 2, after the pair, if `supervised`.
        epochs: As for `distribute_dataset`.
        prefetch: As for `distribute_dataset`.
        strings: As for `distribute_dataset`.

    Returns:
        The batches. Their `report()` says whether the split is in memory, and why.

    Raises:
        DataError: If an argument is wrong, the dataset can be neither found nor
            downloaded, or its examples cannot be made into batches.
    """
    in_memory = _checks.choice(
        "in_memory", in_memory, (True, False, None), error=DataError
    )
    hint = "It is a number of processes; 0 starts none."
    num_workers = _checks.count(
        "num_workers", num_workers, at_least=0, error=DataError, hint=hint
    )
    is_supervised = _checks.flag("supervised", supervised, error=DataError)
    if is_supervised and isinstance(weights, str) and weights == "weight":
        weights = 2  # the default key, of a pair: append them
    options = DataOptions(
        global_batch_size=global_batch_size,
        remainder=remainder,
        weights=weights,
        shuffle=shuffle,
        epochs=epochs,
        prefetch=prefetch,
        strings=strings,
    )
    function = row_map(map, seed=options.shuffle or 0)
    clock = Clock()
    closing = contextlib.ExitStack()

    def in_workers(read: "_ExampleReader") -> "_Read":
        if not num_workers:
            return read
        workers = Workers(read, num_workers)
        closing.callback(workers.close)
        return workers

    def open_source() -> RandomAccessSource:
        builder, source = find_split(name, split, data_dir, decoders)
        keys = _supervised_keys(builder) if is_supervised else None
        read = _ExampleReader(source, keys, None)
        # What cannot be placed is refused before the whole split is decoded.
        first = read((np.zeros(1, np.int64), ()), 0)
        mapped = (
            first if function is None else function(first, np.zeros(1, np.int64), 0)
        )
        describe(stack(mapped), options.strings, lambda _: None)
        reason = None if in_memory else _why_not_kept(stack(first), builder, split)
        if in_memory is None and reason:
            clock.note(f"The split is not kept in memory: {reason}.")
        num_rows = len(source)
        if in_memory is False or reason:
            return _rows(in_workers(_ExampleReader(source, keys, function)), num_rows)
        decoded = array_rows(_decoded_rows(in_workers(read), num_rows, clock.note))
        closing.close()
        if function is None:
            return decoded
        return _rows(
            in_workers(_ExampleReader(None, None, function)), num_rows, decoded
        )

    return dataset_of(
        open_source, layout_or_mesh, options, clock=clock, close=closing.close
    )


# Takes row indices, with their rows if these are decoded already, and the epoch.
_Read = Callable[[tuple[np.ndarray, PyTree], int], list[PyTree]]


@dataclass(frozen=True)
class _ExampleReader:
    """Reads, decodes and maps rows; can be sent to a worker process.

    Attributes:
        source: TFDS's data source; None if decoded rows come along.
        keys: The features that make up an example, in the form of TFDS's supervised
            keys; None for a dict of all features.
        map: The user's function of an example, or None.
    """

    source: Any
    keys: PyTree
    map: RowMap | None

    def __call__(self, inputs: tuple[np.ndarray, PyTree], epoch: int) -> list[PyTree]:
        rows, decoded = inputs
        if self.source is None:
            leaves, treedef = jax.tree.flatten(decoded)
            columns = zip(*leaves, strict=True)
            examples = [treedef.unflatten(example) for example in columns]
        else:
            examples = self._typed(self.source.__getitems__(rows.tolist()))
        return examples if self.map is None else self.map(examples, rows, epoch)

    @functools.cached_property
    def _dtypes(self) -> Any:
        """The dtypes of numbers by path; TFDS would compute them for every batch."""
        return feature_dtypes(self.source.dataset_info.features)

    def _typed(self, examples: Sequence[PyTree]) -> list[PyTree]:
        """Returns examples with Python's numbers in the dtypes of their features."""
        if not examples:
            return []
        named, treedef = named_leaves(examples[0])
        dtypes = [
            self._dtypes.get(path) if isinstance(leaf, (bool, int, float)) else None
            for path, leaf in named
        ]
        typed = [
            treedef.unflatten(
                leaf if dtype is None else dtype.type(leaf)
                for leaf, dtype in zip(
                    treedef.flatten_up_to(example), dtypes, strict=True
                )
            )
            for example in examples
        ]
        if self.keys is None:
            return typed
        return [jax.tree.map(example.__getitem__, self.keys) for example in typed]


def _rows(
    read: _Read, num_rows: int, decoded: RandomAccessSource | None = None
) -> Rows:
    """Returns a source of rows that are read, or of decoded ones that are mapped."""

    def read_rows(indices: np.ndarray, epoch: int) -> PyTree:
        rows = () if decoded is None else decoded.read_rows(indices, epoch)
        return stack(read((indices, rows), epoch))

    return Rows(num_rows, read_rows)


def _supervised_keys(builder: Builder) -> PyTree:
    """Returns the features that are input and target, as TFDS's builder names them."""
    keys = builder.info.supervised_keys
    if keys is None:
        named, _ = named_leaves(builder.info.features.get_tensor_info())
        msg = (
            f"{builder.info.full_name} does not say which of its features are input "
            f"and target, so that supervised=True has no meaning. It has "
            f"{', '.join(repr(path) for path, _ in named)}: choose with map=."
        )
        raise DataError(msg)
    return keys


def _decoded_rows(read: _Read, num_rows: int, note: Callable[[str], None]) -> PyTree:
    """Returns every row of a split, as a tree of arrays in the dtypes of the dataset.

    Raises:
        DataError: If a leaf's shape differs between rows.
    """
    start_s = time.perf_counter()
    arrays: list[np.ndarray] = []
    treedef: Any = None
    for start in range(0, num_rows, _CHUNK):
        indices = np.arange(start, min(start + _CHUNK, num_rows))
        named, treedef = named_leaves(stack(read((indices, ()), 0)))
        if not arrays:
            # Allocated once: joining the chunks at the end would take twice the memory
            # that `_why_not_kept` has counted on.
            arrays = [
                np.empty((num_rows, *leaf.shape[1:]), leaf.dtype) for _, leaf in named
            ]
        for array, (path, leaf) in zip(arrays, named, strict=True):
            if leaf.shape[1:] != array.shape[1:]:
                msg = (
                    f"{leaf_text(path)} is ragged: an example has shape "
                    f"{leaf.shape[1:]}, and the first one has {array.shape[1:]}. It "
                    "cannot be kept in one array: use in_memory=False, with a map= "
                    "that makes the shapes equal."
                )
                raise DataError(msg)
            array[indices] = leaf
    size = bytes_text(sum(array.nbytes for array in arrays))
    note(
        f"Decoded {num_rows:,} examples once into {size} of memory in "
        f"{time.perf_counter() - start_s:.1f} s."
    )
    return treedef.unflatten(arrays)


def _why_not_kept(first: PyTree, builder: Builder, split: str) -> str | None:
    """Returns why a decoded split should not be kept in memory; None if it should.

    Args:
        first: The first row, as a tree of arrays with one row.
        builder: TFDS's builder.
        split: The split.
    """
    # An unknown dim does not mean that examples differ, but an array cannot be
    # allocated for it without decoding all of them.
    infos = jax.tree.leaves(builder.info.features.get_tensor_info())
    if any(dim is None for info in infos for dim in info.shape):
        return "examples differ in size"
    info = builder.info.splits[split]
    size = 0
    for leaf in jax.tree.leaves(first):
        size += info.num_examples * max(
            leaf.nbytes, _STRING_OVERHEAD * (leaf.dtype == object)
        )
        if leaf.dtype == object:  # strings take at most the size of the files
            size += sum(Path(path).stat().st_size for path in info.filepaths)
    allowed = int(_MEMORY_SHARE * free_memory())
    if size <= allowed:
        return None
    return (
        f"decoded, it takes {bytes_text(size)}, more than {bytes_text(allowed)}, "
        f"{_MEMORY_SHARE:.0%} of the free memory"
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
