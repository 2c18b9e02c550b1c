"""From the name of a TFDS dataset to global batches on the mesh.

A split that fits into memory is decoded once and gathered from there. Everything else
is read by workers, batch by batch. Either way the split is a source with random access,
so that order, shards, padding and positions work as for any other source.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import jax
import numpy as np

from meshlayout import _checks
from meshlayout.data import decode_cache
from meshlayout.data.adapters.arrays import Rows, array_rows
from meshlayout.data.clock import Clock
from meshlayout.data.dataset import DistributedDataset
from meshlayout.data.examples import describe
from meshlayout.data.placement import batch_layout, process_rows
from meshlayout.data.plan import DataOptions, DataPlan
from meshlayout.data.preparation import Prepared, find_prepared, supervised_keys
from meshlayout.data.protocols import RandomAccessSource
from meshlayout.data.records import (
    FileOrder,
    MapFunction,
    RecordDecoder,
    RowMapper,
    as_map_function,
    mapped_batches,
    worker_rows,
)
from meshlayout.data.workers import RowFunction, WorkerKind, WorkerPool
from meshlayout.errors import DataError


Cache: TypeAlias = Literal["auto", "memory", "none"]

_FIRST_ROW = np.zeros(1, np.int64)


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

    Use this if TFDS has the dataset: the name is enough. Datasets that are prepared as
    array_record are read without TensorFlow; others are downloaded and prepared by
    TFDS, those of the MNIST family without TensorFlow, too. A split that fits into
    memory is decoded once, in its own dtypes, and every batch is gathered from there in
    one step. What does not fit is read, decoded and mapped in parallel. Batches are a
    function of seed and epoch, the same on any number of processes and workers, and
    iteration resumes at any of them.

    Worker processes import the script that starts them, as always with Python's
    multiprocessing: what the script runs belongs under `if __name__ == "__main__":`.
    Unless they are asked for, processes are used only if that is the case.

    Args:
        name: TFDS's name, such as `mnist` or `emnist/letters`, or a builder.
        split: The split, such as `train` or `train[:10%]`.
        layout_or_mesh: The layout of batches, as for `distribute_dataset`.
        global_batch_size: Rows of a global batch.
        shuffle: Whether each epoch has a different, shuffled order.
        seed: The seed of the shuffle and of the random numbers of `map`.
        map: Called with every example, a tree of NumPy arrays, after decoding; returns
            a tree. If it requires a second argument, it gets a NumPy random generator
            that is a function of seed, epoch and row.
        map_batched: Whether `map` is called with a batch of this process's rows. The
            second argument is then a list of the generators of the rows, which also
            draws for all rows at once, with `size=(rows, ...)`.
        num_workers: How many threads or processes read, decode and map; 0 for none
            besides the prefetching thread. `"auto"` measures on the first batch.
        worker_kind: `"threads"` or `"processes"`; `"auto"` measures both, and means
            processes if `num_workers` is a number.
        deterministic: Whether the order is a shuffle of all rows. If False, it follows
            the files: neighboring rows are read together, from many files at once, and
            shuffled within a window. That suits disks and buckets, where every read
            takes time; the order is still the same in every run.
        cache: `"memory"` decodes the split once and keeps it; `"none"` never does;
            `"auto"` does if it takes at most a quarter of the free memory.
        data_dir: Where TFDS keeps prepared datasets; None for its default.
        decoders: TFDS's decoders by feature, as for `tfds.data_source`.
        supervised: Whether examples are TFDS's pairs of input and target; by default
            they are dicts of all features.
        remainder: As for `distribute_dataset`.
        weights: As for `distribute_dataset`; index 2, after the pair, if `supervised`.
        epochs: As for `distribute_dataset`.
        steps: As for `distribute_dataset`.
        prefetch: As for `distribute_dataset`.
        strings: As for `distribute_dataset`.

    Returns:
        The batches. Their `report()` says whether the split is in memory, which workers
        were chosen and why, and how long each stage takes.

    Raises:
        DataError: If an argument is wrong, the dataset is not available, or its
            examples cannot be made into batches.
    """
    clock = Clock()
    layout = batch_layout(layout_or_mesh, clock.note)
    flag = functools.partial(_checks.flag, error=DataError)
    choice = functools.partial(_checks.choice, error=DataError)
    cache = choice("cache", cache, get_args(Cache))
    worker_kind = choice("worker_kind", worker_kind, get_args(WorkerKind))
    if not (isinstance(num_workers, str) and num_workers == "auto"):
        num_workers = _checks.count(
            "num_workers",
            num_workers,
            at_least=0,
            error=DataError,
            hint="Or 'auto', which measures.",
        )
    is_shuffled = flag("shuffle", shuffle)
    is_ordered = flag("deterministic", deterministic)
    is_supervised = flag("supervised", supervised)
    seed = _checks.count("seed", seed, at_least=0, error=DataError)
    function = as_map_function(
        map, is_batched=flag("map_batched", map_batched), seed=seed
    )
    if not is_ordered and cache == "memory":
        msg = (
            "cache='memory' gathers batches from arrays, where no order is faster than "
            "another. Leave out deterministic=False, for a shuffle of all rows."
        )
        raise DataError(msg)
    if is_supervised and isinstance(weights, str) and weights == "weight":
        weights = 2  # the default key, of a pair: append them
    options = DataOptions(
        global_batch_size=global_batch_size,
        remainder=remainder,
        weights=weights,
        # In the order of the files, the source shuffles by itself.
        shuffle=seed if is_shuffled and is_ordered else None,
        epochs=epochs,
        steps=steps,
        prefetch=prefetch,
        per_process=False,
        strings=strings,
    )
    batch_size = len(process_rows(layout, options.global_batch_size))
    # Workers map single examples. A function of batches runs in the prefetching thread:
    # only there are all rows of a batch together.
    pools = contextlib.ExitStack()
    by_batch = function if map_batched else None
    by_example = None if map_batched else function

    def new_pool(read: RowFunction, num_rows: int, task: str) -> WorkerPool:
        pool = WorkerPool(
            read,
            by_example,
            num_workers=num_workers,
            kind=worker_kind,
            num_rows=num_rows,
            task=task,
            note=clock.note,
        )
        pools.callback(pool.close)
        return pool

    def open_source() -> RandomAccessSource:
        prepared = find_prepared(name, split, data_dir, decoders)
        keys = supervised_keys(prepared.builder) if is_supervised else None
        decode = RecordDecoder(prepared.source, keys)
        # Refuse what cannot be placed before the whole split is decoded.
        first = replace(decode, map=by_example)(_FIRST_ROW, 0).rows
        if by_batch is not None:
            indices = np.repeat(_FIRST_ROW, max(1, batch_size))
            rows = jax.tree.map(lambda leaf: leaf[indices], first)
            first = by_batch.batch(rows, indices, 0)
        describe(first, options.strings, lambda _: None)
        source = _rows(prepared, decode, by_example, new_pool, cache, clock)
        if by_batch is not None:
            source = mapped_batches(source, by_batch, batch_size, clock)
        if is_ordered:
            return source
        how = " and shuffled within a window" if is_shuffled else ""
        clock.note(
            f"deterministic=False: rows come in the order of {len(prepared.files)} "
            f"files, read side by side{how}."
        )
        # TFDS numbers rows through its files in this order.
        counts = (count for _, count in prepared.files)
        ends = itertools.accumulate(counts, initial=0)
        files = list(itertools.starmap(range, itertools.pairwise(ends)))
        order = FileOrder(files, seed if is_shuffled else None)
        return Rows(
            len(source),
            lambda indices, epoch: source.read_rows(order.at(indices, epoch), epoch),
        )

    plan = DataPlan(open_source, layout, options, clock, close=pools.close)
    if not is_ordered:
        # The same position in a shuffle of all rows would mean other rows.
        order = {
            "source": "rows in file order",
            "seed": seed if is_shuffled else None,
        }
        plan.identity.update(order)
    return DistributedDataset(plan)


def _rows(
    prepared: Prepared,
    decode: RecordDecoder,
    function: MapFunction | None,
    new_pool: Callable[[RowFunction, int, str], WorkerPool],
    cache: Cache,
    clock: Clock,
) -> RandomAccessSource:
    """Returns the rows of a split, mapped, from memory or read by workers."""
    num_rows = len(prepared.source)
    is_kept = cache == "memory"
    if cache == "auto":
        reason = decode_cache.why_not_kept(decode(_FIRST_ROW, 0).rows, prepared)
        is_kept = reason is None
        if not is_kept:
            clock.note(f"cache='auto' keeps nothing: {reason}.")
    if not is_kept:
        pool = new_pool(replace(decode, map=function), num_rows, "Reading")
        return worker_rows(pool, num_rows, clock)
    # The split is kept as it is before `map`, which may differ in every epoch.
    pool = new_pool(decode, num_rows, "Decoding")
    try:
        decoded = array_rows(decode_cache.decoded_rows(pool, num_rows, clock.note))
    finally:
        pool.close()
    if function is None:
        return decoded
    pool = new_pool(RowMapper(function), num_rows, "map=")
    return worker_rows(pool, num_rows, clock, decoded)
