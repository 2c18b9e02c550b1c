"""Examples read from files one by one, decoded, mapped and stacked."""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from meshlayout.data.adapters.streams import as_block
from meshlayout.data.adapters.tfds import feature_dtypes
from meshlayout.data.clock import Clock
from meshlayout.data.host_batches import Cut
from meshlayout.data.row_batches import rows_ahead
from meshlayout.data.row_plan import RowPlan, batches_in_epoch
from meshlayout.data.source import RowsAhead, RowSource
from meshlayout.data.stacking import concatenate, examples_of, stack
from meshlayout.data.tfds_pipeline.chain import Chain, Part
from meshlayout.data.tfds_pipeline.choice import Choice
from meshlayout.data.tfds_pipeline.keeping import SentAsFiles
from meshlayout.data.tfds_pipeline.mapping import MapFunction
from meshlayout.errors import DataError


Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ReadRecords:
    """Reads, decodes, maps and stacks; a function that a worker process can be sent.

    Attributes:
        source: TFDS's data source.
        keys: The features that make an example, as TFDS's supervised keys; None for
            all of them, by name.
        map: The user's function of an example, or None.
    """

    source: Any
    keys: Any
    map: MapFunction | None
    dtypes: Any = field(init=False)

    def __post_init__(self) -> None:
        dtypes = feature_dtypes(self.source.dataset_info.features)
        if self.keys is not None:
            named, _ = jax.tree_util.tree_flatten_with_path(self.keys)
            dtypes = {
                "/".join(str(key.idx) for key in path): dtypes[name]
                for path, name in named
                if name in dtypes
            }
        object.__setattr__(self, "dtypes", dtypes)

    def __call__(self, indices: Array, epochs: Array) -> Part:
        """Returns rows.

        Args:
            indices: Which, at least one.
            epochs: The epoch in which each of them is read.
        """
        watch = _Watch()
        records = self.source.data_source.__getitems__(indices.tolist())
        watch.stage("read")
        examples = [self._decoded(record) for record in records]
        watch.stage("decode")
        if self.map is None:
            rows = stack(examples, self.dtypes)
        else:
            examples = self.map.examples(examples, indices, epochs)
            watch.stage("map")
            rows = stack(examples, self.dtypes)
        watch.stage("stack")
        return Part(rows, watch.seconds)

    def _decoded(self, record: bytes) -> Any:
        source = self.source
        features = source.dataset_info.features
        example = features.deserialize_example_np(record, decoders=source.decoders)
        if self.keys is None:
            return example
        return jax.tree.map(lambda key: example[key], self.keys)


@dataclass(frozen=True)
class MapKept:
    """Gathers rows and maps them; a function that a worker process can be sent.

    Attributes:
        kept: The decoded rows.
        map: The user's function.
    """

    kept: SentAsFiles
    map: MapFunction

    def __call__(self, indices: Array, epochs: Array) -> Part:
        """Returns rows as the user's function makes them."""
        watch = _Watch()
        rows = self.kept.rows(indices)
        watch.stage("read")
        examples = examples_of(rows, len(indices))
        mapped = self.map.examples(examples, indices, epochs)
        watch.stage("map")
        rows = stack(mapped)
        watch.stage("map")
        return Part(rows, watch.seconds)


class ChainRows:
    """A source of rows that Grain reads, ahead where the plan of the rows is known.

    Args:
        choice: Who reads.
        num_rows: How many rows there are.
        clock: Where the time goes.
    """

    def __init__(self, choice: Choice, num_rows: int, clock: Clock) -> None:
        self.choice, self._num_rows, self.clock = choice, num_rows, clock
        self._lock = threading.Lock()
        self._idle: tuple[RowPlan, Chain] | None = None
        self._is_closed = False

    def __len__(self) -> int:
        return self._num_rows

    def rows(self, indices: Array) -> Any:
        """Returns rows as in the first epoch, read by the caller."""
        if not len(indices):  # the structure alone
            return _cut(self.rows(np.zeros(1, int)), slice(0))
        return self.choice.function(indices, np.zeros_like(indices)).rows

    def ahead(self, plan: RowPlan) -> "ChainAhead":
        """Returns what reads a plan's batches ahead."""
        return ChainAhead(self, plan)

    def chain(self, plan: RowPlan, place: int) -> Chain:
        """Returns what reads from a place on: processes that run already, if any.

        Args:
            plan: The rows of each batch.
            place: The place of the first batch.
        """
        with self._lock:
            idle, self._idle = self._idle, None
        if idle is not None:
            if idle[0].key == plan.key and idle[1].can_go_to(place):
                idle[1].go_to(place)
                return idle[1]
            idle[1].close()
        readers = self.choice.readers(plan, place)
        # Processes are there for all epochs; threads begin at once, and read ahead no
        # more than is asked for.
        are_processes = readers.kind == "processes"
        stop = None if are_processes else plan.end_of_epoch(place)
        return self.choice.chain(plan, place, stop)

    def leave(self, plan: RowPlan, chain: Chain) -> None:
        """Keeps the processes of a chain for the next iteration.

        Args:
            plan: The rows of each batch.
            chain: What read them.
        """
        with self._lock:
            is_kept = self._idle is None and not self._is_closed
            is_kept = is_kept and chain.readers.kind == "processes"
            if is_kept:
                self._idle = (plan, chain)
        if not is_kept:
            chain.close()

    def close(self) -> None:
        """Ends threads and processes; what is in use ends when it is left."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, None
        if idle is not None:
            idle[1].close()
        self.choice.close()


class ChainAhead:
    """The batches of one iteration, read by a chain.

    Args:
        source: Whose rows they are.
        plan: The rows of each batch.
    """

    def __init__(self, source: ChainRows, plan: RowPlan) -> None:
        self._source, self._plan = source, plan
        self._chain: Chain | None = None

    def rows(self, place: int) -> list[Any]:
        """Returns the rows of a batch, for each epoch in it."""
        chain = self._chain
        if chain is not None and not chain.can_go_to(place):
            chain.close()
            chain = None
        if chain is None:
            chain = self._source.chain(self._plan, place)
        self._chain = None  # an error leaves a chain between two batches
        try:
            chain.go_to(place)
            parts = [part for part in chain.parts() if part.rows is not None]
        except BaseException:
            chain.close()
            raise
        self._chain = chain
        wanted = self._plan.rows(place)
        count = sum(len(rows) for _, rows in wanted)
        add_stages(self._source.clock, parts, count, chain.readers.pieces)
        joined = concatenate([part.rows for part in parts])
        if len(wanted) == 1:
            return [joined]
        found, start = [], 0
        for _, rows in wanted:
            found.append(_cut(joined, slice(start, start + len(rows))))
            start += len(rows)
        return found

    def close(self) -> None:
        """Leaves processes to the next iteration."""
        chain, self._chain = self._chain, None
        if chain is not None:
            self._source.leave(self._plan, chain)


class MappedBatches:
    """A source of rows that a user's function of a batch has mapped.

    Attributes:
        maps_batches: That it is asked for whole batches, padding included.

    Args:
        source: The rows before.
        function: The user's function.
        clock: Where the time goes.
        epoch: Which epoch, from 0.
    """

    maps_batches = True

    def __init__(
        self, source: RowSource, function: MapFunction, clock: Clock, epoch: int = 0
    ) -> None:
        self._source, self._function = source, function
        self._clock, self._epoch = clock, epoch

    def __len__(self) -> int:
        return len(self._source)

    def at_epoch(self, epoch: int) -> "MappedBatches":
        """Returns the rows as another epoch's random numbers make them."""
        return MappedBatches(self._source, self._function, self._clock, epoch)

    def ahead(self, plan: RowPlan) -> "_MappedAhead | None":
        """Returns what reads a plan's batches ahead, if the rows before are read so."""
        inner = rows_ahead(self._source, plan)
        return None if inner is None else _MappedAhead(inner, self, plan)

    def close(self) -> None:
        """Closes the rows before."""
        getattr(self._source, "close", _nothing)()

    def rows(self, indices: Array) -> Any:
        """Returns rows, in the order asked for.

        Raises:
            DataError: If the function returned another number of rows.
        """
        if not len(indices):  # a process without rows: the structure alone
            return _cut(self.rows(np.zeros(1, int)), slice(0))
        return self.mapped(self._source.rows(indices), indices, self._epoch)

    def mapped(self, rows: Any, indices: Array, epoch: int) -> Any:
        """Returns what the function makes of rows.

        Args:
            rows: A tree of arrays.
            indices: Their numbers.
            epoch: The epoch in which they are read.

        Raises:
            DataError: If the function returned another number of rows.
        """
        with self._clock.stage("map", len(indices)):
            mapped = self._function.batch(rows, int(indices[0]), epoch)
        block = as_block(mapped)
        if block.count != len(indices):
            msg = (
                f"map= returned {block.count} rows for a batch of {len(indices)}. With "
                "map_batched=True it has to keep their number."
            )
            raise DataError(msg)
        return block.rows


class _MappedAhead:
    def __init__(self, inner: RowsAhead, source: MappedBatches, plan: RowPlan) -> None:
        self._inner, self._source, self._plan = inner, source, plan

    def rows(self, place: int) -> list[Any]:
        parts = zip(self._inner.rows(place), self._plan.rows(place), strict=True)
        return [self._source.mapped(part, rows, epoch) for part, (epoch, rows) in parts]

    def close(self) -> None:
        self._inner.close()


def decode(choice: Choice, num_rows: int, size: int) -> Iterator[tuple[slice, Any]]:
    """Yields all rows in order, in blocks.

    Args:
        choice: Who reads.
        num_rows: How many rows there are.
        size: Rows of a block.
    """
    stop = batches_in_epoch(num_rows, size, "pad")
    plan = RowPlan(num_rows, Cut(size, None), seed=None, num_batches=stop)
    chain = choice.chain(plan, 0, stop)
    try:
        for start in range(0, num_rows, size):
            parts = [part for part in chain.parts() if part.rows is not None]
            block = slice(start, min(start + size, num_rows))
            yield block, concatenate([part.rows for part in parts])
    finally:
        chain.close()


def _cut(rows: Any, chosen: slice) -> Any:
    return jax.tree.map(lambda leaf: leaf[chosen], rows)


def _nothing() -> None:
    """Does nothing."""


def add_stages(clock: Clock, parts: Sequence[Part], count: int, at_once: int) -> None:
    """Adds the seconds of parts that were read at once to a clock's stages.

    Args:
        clock: The clock.
        parts: The parts.
        count: How many rows they have together.
        at_once: How many were read at once.
    """
    for stage in parts[0].seconds:
        seconds = sum(part.seconds[stage] for part in parts) / at_once
        clock.add(stage, 0 if stage == "read" else count, seconds)


class _Watch:
    """Seconds by stage, one after another."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def stage(self, name: str) -> None:
        """Counts the time since the last stage to a stage."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now
