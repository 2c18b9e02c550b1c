"""From the name of a TFDS dataset to global batches on the mesh.

A split that fits into memory is decoded once and gathered from there. Everything else
is read by workers, batch by batch. Either way the split is a source of rows by number,
so that order, shards, padding and places to resume from are those of any other source.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout.data import decode_cache
from meshlayout.data.adapters.arrays import array_rows
from meshlayout.data.clock import Clock
from meshlayout.data.dataset import DistributedDataset, check_options
from meshlayout.data.examples import describe
from meshlayout.data.plan import make_plan
from meshlayout.data.preparation import Prepared, find_prepared, supervised_keys
from meshlayout.data.protocols import RandomAccessSource
from meshlayout.data.records import (
    FileOrder,
    MapFunction,
    MappedBatches,
    OrderedRows,
    RecordDecoder,
    RecordRows,
    RowMapper,
    as_map_function,
)
from meshlayout.data.rows import batch_layout, note_whole_batches, process_rows
from meshlayout.data.workers import RowFunction, WorkerKind, WorkerPool, check_workers
from meshlayout.errors import DataError


Cache: TypeAlias = Literal["auto", "memory", "none"]

_FIRST = np.zeros(1, np.int64)


def from_tfds(
    name: Any,
    split: str,
    layout_or_mesh: Any,
    *,
    global_batch_size: int,
    shuffle: bool = True,
    seed: int = 0,
    map: Callable[..., Any] | None = None,
    map_batched: bool = False,
    num_workers: int | Literal["auto"] = "auto",
    worker_kind: WorkerKind = "auto",
    deterministic: bool = True,
    cache: Cache = "auto",
    data_dir: str | Path | None = None,
    decoders: Any = None,
    supervised: bool = False,
    remainder: str = "pad",
    weights: str | int | None = "weight",
    epochs: int | None = 1,
    steps: int | None = None,
    prefetch: int = 2,
    strings: str = "error",
) -> DistributedDataset[Any]:
    """Returns a TFDS dataset as shuffled, sharded, prefetched global batches.

    Use this when TFDS has the dataset: the name is enough. It needs no TensorFlow to
    read what is prepared as array_record; other datasets are downloaded and prepared
    by TFDS. A split that fits into memory is decoded once, in its own dtypes, and every
    batch is gathered from there in one step. What does not fit is read, decoded and
    mapped in parallel. Batches are a function of seed and epoch, the same on any number
    of processes and workers, and iteration resumes at any of them.

    Worker processes import the script that starts them, as Python's multiprocessing
    does: what the script runs belongs under `if __name__ == "__main__":`. Processes are
    only used where they can be, or where they are asked for.

    Args:
        name: TFDS's name, as `mnist` or `emnist/letters`, or a builder.
        split: The split, as `train` or `train[:10%]`.
        layout_or_mesh: The layout of batches, as for `distribute_dataset`.
        global_batch_size: Rows of a global batch.
        shuffle: Whether each epoch has an order of its own.
        seed: What the orders, and the random numbers of `map`, start from.
        map: Called with every example, a tree of NumPy arrays, after decoding; returns
            another one. A second argument that it needs is a NumPy random generator, a
            function of seed, epoch and row.
        map_batched: Whether `map` is called with a batch of this process's rows. A
            second argument then draws for each row by itself, with `size=(rows, ...)`,
            and is a list of the generators of the rows.
        num_workers: How many threads or processes read, decode and map; 0 for none
            beyond the prefetching thread. `"auto"` measures the first batch.
        worker_kind: `"threads"` or `"processes"`; `"auto"` measures both, and takes
            processes where the number is fixed.
        deterministic: Whether the order is a shuffle of all rows. If False, it follows
            the files: neighbors are read together, from many files at once, and
            shuffled within a window. That suits disks and buckets, where each read
            costs time, and the order is still the same in every run.
        cache: `"memory"` decodes the split once and keeps it; `"none"` never does;
            `"auto"` does if it takes at most a quarter of the free memory.
        data_dir: Where TFDS keeps prepared datasets; None for its own choice.
        decoders: What TFDS decodes how, as for `tfds.data_source`.
        supervised: Whether examples are TFDS's pairs of input and target; by default
            they are dicts of all features.
        remainder: As for `distribute_dataset`.
        weights: As for `distribute_dataset`; after the pair if `supervised`.
        epochs: As for `distribute_dataset`.
        steps: As for `distribute_dataset`.
        prefetch: As for `distribute_dataset`.
        strings: As for `distribute_dataset`.

    Returns:
        The batches; `report()` says what was kept, who reads, and how long it takes.

    Raises:
        DataError: If the dataset is not available, or choices do not fit it.
    """
    clock = Clock()
    layout = batch_layout(layout_or_mesh)
    note_whole_batches(layout_or_mesh, clock.note)
    caches: tuple[Cache, ...] = ("auto", "memory", "none")
    cache = _checks.choice("cache", cache, caches, error=DataError)
    is_shuffled = _flag("shuffle", shuffle)
    is_ordered = _flag("deterministic", deterministic)
    is_supervised = _flag("supervised", supervised)
    seed = _checks.count("seed", seed, at_least=0, error=DataError)
    function = as_map_function(
        map, is_batched=_flag("map_batched", map_batched), seed=seed
    )
    num_workers, worker_kind = check_workers(num_workers, worker_kind)
    if not is_ordered and cache == "memory":
        msg = (
            "cache='memory' gathers batches from arrays, where no order is faster than "
            "another. Leave out deterministic=False, for a shuffle of all rows."
        )
        raise DataError(msg)
    if is_supervised and isinstance(weights, str) and weights == "weight":
        weights = 2
    options = check_options(
        global_batch_size=global_batch_size,
        remainder=remainder,
        weights=weights,
        # Without a fixed order, the source shuffles by itself.
        shuffle=seed if is_shuffled and is_ordered else None,
        epochs=epochs,
        steps=steps,
        prefetch=prefetch,
        per_process=False,
        strings=strings,
    )
    batch_size = len(process_rows(layout, options.global_batch_size))
    pools = contextlib.ExitStack()
    shuffle_seed = seed if is_shuffled else None

    def open_source() -> RandomAccessSource:
        prepared = find_prepared(name, split, data_dir, decoders)
        keys = supervised_keys(prepared.builder) if is_supervised else None
        loader = _SplitLoader(
            prepared, keys, function, num_workers, worker_kind, cache, clock, pools
        )
        loader.check_first(batch_size, options.strings)
        source = loader.rows()
        if function is not None and function.is_batched:
            source = MappedBatches(source, function, batch_size, clock)
        if is_ordered:
            return source
        files = prepared.files()
        how = "" if shuffle_seed is None else " and shuffled within a window"
        clock.note(
            f"deterministic=False: rows come in the order of {len(files)} files, read "
            f"side by side{how}."
        )
        return OrderedRows(source, FileOrder(files, shuffle_seed).at)

    plan = make_plan(open_source, layout, options, clock, close=pools.close)
    if not is_ordered:
        # The same place in a full shuffle is a different row.
        identity = replace(
            plan.identity, source="rows in the order of files", seed=shuffle_seed
        )
        plan = replace(plan, identity=identity)
    return DistributedDataset(plan)


@dataclass(frozen=True)
class _SplitLoader:
    """How a split becomes a source of rows.

    Attributes:
        prepared: The split on disk.
        keys: The features that make an example; None for all of them.
        map: The user's function, or None.
        num_workers: How many, or `"auto"`.
        kind: Threads, processes, or `"auto"`.
        cache: What is kept.
        clock: Where time and notes go.
        pools: Closes the workers when the dataset is no longer used.
    """

    prepared: Prepared
    keys: PyTree
    map: MapFunction | None
    num_workers: int | Literal["auto"]
    kind: WorkerKind
    cache: Cache
    clock: Clock
    pools: contextlib.ExitStack

    @property
    def map_example(self) -> MapFunction | None:
        """The user's function if it takes an example."""
        return None if self.map is None or self.map.is_batched else self.map

    def check_first(self, batch_size: int, strings: str) -> None:
        """Refuses examples that cannot be placed, before the whole split is decoded."""
        first = self._decoder(self.map_example)(_FIRST, 0).rows
        if self.map is not None and self.map.is_batched:
            rows = np.repeat(_FIRST, max(1, batch_size))
            first = jax.tree.map(lambda leaf: leaf[rows], first)
            first = self.map.batch(first, rows, 0)
        describe(first, strings, lambda _: None)

    def rows(self) -> RandomAccessSource:
        """Returns the rows, mapped if the user's function takes an example."""
        num_rows = len(self.prepared.source)
        if not self._is_kept():
            pool = self._pool(self._decoder(self.map_example), "Reading")
            return RecordRows(pool, num_rows, self.clock)
        pool = self._pool(self._decoder(), "Decoding")
        try:
            arrays = decode_cache.decoded_rows(pool, num_rows, self.clock.note)
        finally:
            pool.close()
        if self.map_example is None:
            return array_rows(arrays)
        mapper = RowMapper(decode_cache.SharedRows(arrays), self.map_example)
        return RecordRows(self._pool(mapper, "map="), num_rows, self.clock)

    def _decoder(self, function: MapFunction | None = None) -> RecordDecoder:
        return RecordDecoder(self.prepared.source, self.keys, function)

    def _pool(self, function: RowFunction, task: str) -> WorkerPool:
        """Returns the workers that call a function."""
        pool = WorkerPool(
            function,
            self.map_example,
            num_workers=self.num_workers,
            kind=self.kind,
            num_rows=len(self.prepared.source),
            task=task,
            note=self.clock.note,
        )
        self.pools.callback(pool.close)
        return pool

    def _is_kept(self) -> bool:
        """Returns whether the split is kept in memory, decoded; notes why not."""
        if self.cache != "auto":
            return self.cache == "memory"
        first = self._decoder()(_FIRST, 0).rows
        why_not = decode_cache.why_not_kept(first, self.prepared)
        if why_not is not None:
            self.clock.note(f"cache='auto' keeps nothing: {why_not}.")
        return why_not is None


def _flag(name: str, value: object) -> bool:
    return _checks.flag(name, value, error=DataError)
