"""From the name of a TFDS data set to global batches on the mesh.

Records are read, decoded and mapped by Grain, in threads or worker processes. Our own
are the order of the rows, which is that of every source with random access, and with
`deterministic=False` the threads that hand over pieces of files as they are ready:
Grain's interleave takes from its files in turn, and waits for a slow one.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from meshlayout._render.tables import bytes_text
from meshlayout.data.adapters.arrays import ArrayRows
from meshlayout.data.clock import Clock
from meshlayout.data.dataset import DistributedDataset
from meshlayout.data.elements import describe
from meshlayout.data.options import check_options
from meshlayout.data.planning import make_plan
from meshlayout.data.rows import (
    batch_layout,
    note_whole_batches,
    processes_of,
    row_groups,
    whole,
)
from meshlayout.data.source import RowSource, Source
from meshlayout.data.tfds_pipeline.choice import Choice, WorkerKind, check_workers
from meshlayout.data.tfds_pipeline.keeping import (
    CHUNK,
    MEMORY_SHARE,
    Decoded,
    SentAsFiles,
    decoded_bytes,
    free_memory,
    keep_in_memory,
    keep_on_disk,
)
from meshlayout.data.tfds_pipeline.mapping import MapFunction, as_map_function
from meshlayout.data.tfds_pipeline.prepared import (
    Prepared,
    find_prepared,
    supervised_keys,
)
from meshlayout.data.tfds_pipeline.records import (
    ChainRows,
    MapKept,
    MappedBatches,
    ReadRecords,
    decode,
)
from meshlayout.data.tfds_pipeline.shards import ShardStream
from meshlayout.errors import DataError, did_you_mean


Cache = Literal["auto", "memory", "disk", "none"]

_FIRST = np.zeros(1, np.int64)

_CACHES = ("auto", "memory", "disk", "none")


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
    cache_dir: str | Path | None = None,
    data_dir: str | Path | None = None,
    decoders: Any = None,
    supervised: bool = False,
    remainder: str = "pad",
    weights: str | int | None = "weight",
    epochs: int = 1,
    steps: int | None = None,
    prefetch: int = 2,
    strings: str = "error",
) -> DistributedDataset:
    """Returns a TFDS data set as shuffled, sharded, prefetched global batches.

    Needs Grain, and no TensorFlow to read a data set that is prepared as array_record;
    others are downloaded and prepared by TFDS. A split that fits into memory is decoded
    once, to its own dtypes, and every batch is gathered from there in one step. What
    does not fit is read, decoded and mapped in parallel, record by record. The order is
    a function of seed and epoch, the same on any number of processes, unless
    `deterministic=False` lets examples come as they are ready.

    Args:
        name: TFDS's name, as `mnist` or `emnist/letters`, or a builder.
        split: The split, as `train` or `train[:10%]`.
        layout_or_mesh: How batches lie on the mesh, as for `distribute_dataset`.
        global_batch_size: Rows of a global batch.
        shuffle: Whether each epoch has an order of its own.
        seed: What the orders, and the random numbers of `map`, start from.
        map: Called with every example, a tree of NumPy arrays, after decoding; returns
            another one. A second argument that it needs is a NumPy random generator,
            a function of seed, epoch and row.
        map_batched: Whether `map` is called with a batch of this process's rows.
        num_workers: How many threads or processes read, decode and map; 0 for none
            beside the one that prefetches. `"auto"` measures the first batches.
        worker_kind: `"threads"` or `"processes"`; `"auto"` measures both, and takes
            processes where the number is fixed.
        deterministic: Whether the order of the examples is the same in every run.
        cache: `"memory"` and `"disk"` decode the split once; `"none"` never keeps it;
            `"auto"` keeps it in memory if it takes at most a quarter of what is free.
        cache_dir: Where `"disk"` keeps decoded splits.
        data_dir: Where TFDS keeps prepared data sets; None for its own choice.
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
        The batches; `report()` says what was kept, who reads, and what it costs.

    Raises:
        DataError: If the data set cannot be had, or choices do not fit it.
    """
    clock = Clock()
    layout = batch_layout(layout_or_mesh)
    note_whole_batches(layout_or_mesh, clock.note)
    function = as_map_function(
        map,
        is_batched=_flag("map_batched", map_batched),
        seed=whole("seed", seed, at_least=0),
    )
    check_workers(num_workers, worker_kind)
    reading = _Reading(
        function, num_workers, worker_kind, _cache(cache, cache_dir), cache_dir, clock
    )
    if _flag("supervised", supervised) and weights == "weight":
        weights = 2

    @functools.cache
    def opened() -> _Split:
        prepared = find_prepared(name, split, data_dir, decoders)
        keys = supervised_keys(prepared.builder) if supervised else None
        return _Split(prepared, keys, f"{decoders!r} {keys!r}", strings)

    is_alone = len(processes_of(layout.mesh)) == 1
    is_stream = not _flag("deterministic", deterministic)
    if is_stream and cache == "auto" and is_alone and _fits(opened(), clock):
        is_stream = False
        clock.note(
            "deterministic=False is not needed: the split fits into memory, from where "
            "batches are gathered in the order of seed and epoch."
        )
    options = check_options(
        global_batch_size=global_batch_size,
        remainder=remainder,
        weights=weights,
        shuffle=seed if _flag("shuffle", shuffle) and not is_stream else None,
        epochs=epochs,
        steps=steps,
        prefetch=prefetch,
        per_process=is_stream and not is_alone,
        strings=strings,
    )

    def open_source() -> Source:
        if not is_stream:
            return _rows(opened(), reading)
        part = (0, 1) if is_alone else _part(layout, global_batch_size)
        return _stream(opened(), reading, seed if shuffle else None, part)

    return DistributedDataset(make_plan(open_source, layout, options, clock))


@dataclass(frozen=True)
class _Split:
    """What is read.

    Attributes:
        prepared: The split on disk.
        keys: The features that make an example; None for all of them.
        variant: What else decoded rows depend on.
        strings: Whether strings are an error.
    """

    prepared: Prepared
    keys: Any
    variant: str
    strings: str

    def __len__(self) -> int:
        return len(self.prepared.source)

    def reader(self, function: MapFunction | None = None) -> ReadRecords:
        """Returns what reads, decodes and maps some rows."""
        return ReadRecords(self.prepared.source, self.keys, function)


@dataclass(frozen=True)
class _Reading:
    """How it is read.

    Attributes:
        map: The user's function, or None.
        num_workers: How many, or `"auto"`.
        kind: Threads, processes, or `"auto"`.
        cache: What is kept.
        cache_dir: Where decoded splits are kept on disk.
        clock: Where time and notes go.
    """

    map: MapFunction | None
    num_workers: int | Literal["auto"]
    kind: WorkerKind
    cache: Cache
    cache_dir: str | Path | None
    clock: Clock

    @property
    def map_example(self) -> MapFunction | None:
        """The user's function if it takes an example."""
        return None if self.map is None or self.map.is_batched else self.map

    def choice(self, function: Callable[..., Any], num_rows: int, what: str) -> Choice:
        """Returns who calls a function."""
        return Choice(
            function,
            self.map_example,
            num_workers=self.num_workers,
            kind=self.kind,
            num_rows=num_rows,
            what=what,
            note=self.clock.note,
        )


def _rows(split: _Split, reading: _Reading) -> RowSource:
    """Returns a split as a source of rows, kept or read by record."""
    first = split.reader(reading.map_example)(_FIRST, _FIRST).rows
    if reading.map is not None and reading.map.is_batched:
        first = reading.map.batch(first, 0, 0)
    # What cannot be placed is refused before the whole split is decoded.
    describe(first, split.strings, lambda _: None)
    arrays = _kept(split, reading)
    if arrays is None:
        choice = reading.choice(
            split.reader(reading.map_example), len(split), "Reading"
        )
        source: RowSource = ChainRows(choice, len(split), reading.clock)
    elif reading.map_example is not None:
        kept = MapKept(SentAsFiles(arrays), reading.map_example)
        choice = reading.choice(kept, len(split), "map=")
        source = ChainRows(choice, len(split), reading.clock)
    else:
        source = ArrayRows(arrays)
    if reading.map is not None and reading.map.is_batched:
        return MappedBatches(source, reading.map, reading.clock)
    return source


def _stream(
    split: _Split, reading: _Reading, seed: int | None, part: tuple[int, int]
) -> Source:
    """Returns a split as a stream of examples as they are ready."""
    if reading.cache in ("memory", "disk"):
        msg = (
            f"cache={reading.cache!r} gathers every batch from arrays, in one order: "
            "nothing is faster without it. Leave out deterministic=False."
        )
        raise DataError(msg)
    if reading.map is not None and reading.map.is_batched:
        msg = (
            "map_batched=True needs batches, which with deterministic=False are made "
            "after map=. Leave out one of them."
        )
        raise DataError(msg)
    choice = reading.choice(split.reader(reading.map_example), len(split), "Reading")
    shards = split.prepared.shards()
    reading.clock.note(
        f"Examples of {len(shards)} files come as they are ready: another order in "
        "every run, and no place to resume from but an epoch's end."
    )
    return ShardStream(choice, shards, seed=seed, part=part, clock=reading.clock)


def _kept(split: _Split, reading: _Reading) -> Any:
    """Returns a split's decoded arrays if they are kept, or None."""
    if reading.cache == "none" or (
        reading.cache == "auto" and not _fits(split, reading.clock)
    ):
        return None
    choices: list[Choice] = []

    def decoded() -> Decoded:
        choices.append(reading.choice(split.reader(), len(split), "Decoding"))
        return Decoded(len(split), decode(choices[0], len(split), CHUNK))

    note = reading.clock.note
    try:
        if reading.cache != "disk":
            return keep_in_memory(decoded(), note)
        assert reading.cache_dir is not None
        return keep_on_disk(
            decoded, split.prepared, reading.cache_dir, split.variant, note
        )
    finally:
        for choice in choices:
            choice.close()


def _fits(split: _Split, clock: Clock) -> bool:
    """Tells whether a split is to be kept in memory, decoded; notes why not."""
    one = split.reader()(_FIRST, _FIRST).rows
    size = decoded_bytes(one, len(split), split.prepared)
    if size is None:
        clock.note("cache='auto' keeps nothing: examples differ in size.")
        return False
    allowed = int(MEMORY_SHARE * free_memory())
    if size > allowed:
        clock.note(
            f"cache='auto' keeps nothing: decoded, the split takes {bytes_text(size)}, "
            f"more than {bytes_text(allowed)}, {MEMORY_SHARE:.0%} of the free memory."
        )
        return False
    return True


def _part(layout: Any, global_batch_size: int) -> tuple[int, int]:
    """Returns which part of the rows this process reads, and of how many."""
    groups = row_groups(layout, global_batch_size)
    if any(len(group) > 1 for group in groups):
        msg = (
            "deterministic=False gives each process examples of its own, and under "
            f"{layout!r} several processes hold the same rows. Leave it out."
        )
        raise DataError(msg)
    here = [group[0] for group in groups].index(jax.process_index())
    return here, len(groups)


def _cache(cache: Any, cache_dir: Any) -> Cache:
    if not isinstance(cache, str) or cache not in _CACHES:
        listed = ", ".join(map(repr, _CACHES))
        hint = did_you_mean(cache, _CACHES)
        msg = f"cache= is one of {listed}, and got {cache!r}.{hint}"
        raise DataError(msg)
    if cache == "disk" and cache_dir is None:
        msg = "cache='disk' needs cache_dir=, the directory that keeps decoded splits."
        raise DataError(msg)
    if cache != "disk" and cache_dir is not None:
        msg = f"cache_dir= is for cache='disk', and cache={cache!r}."
        raise DataError(msg)
    return cache


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        msg = f"{name}= is True or False, and got {value!r}."
        raise DataError(msg)
    return value
