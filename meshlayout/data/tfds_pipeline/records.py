"""Examples read from files one by one, decoded, mapped and stacked."""

import time
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from meshlayout.data.adapters.streams import as_block
from meshlayout.data.adapters.tfds import feature_dtypes
from meshlayout.data.clock import Clock
from meshlayout.data.source import RowSource
from meshlayout.data.stacking import concatenate, stack
from meshlayout.data.team import Team
from meshlayout.data.tfds_pipeline.mapping import MapFunction
from meshlayout.errors import DataError


Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Part:
    """Some rows, and the seconds that each stage took for them.

    Attributes:
        rows: A tree of arrays.
        seconds: By stage.
    """

    rows: Any
    seconds: dict[str, float]


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

    def __call__(self, indices: Array, epoch: int) -> Part:
        """Returns rows.

        Args:
            indices: Which, at least one.
            epoch: The epoch in which they are read.
        """
        watch = _Watch()
        records = self.source.data_source.__getitems__(indices.tolist())
        watch.stage("read")
        examples = [self._decoded(record) for record in records]
        watch.stage("decode")
        if self.map is None:
            rows = stack(examples, self.dtypes)
        else:
            examples = self.map.examples(examples, indices, epoch)
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
class MapRows:
    """Maps rows that were gathered; a function that a worker process can be sent.

    Attributes:
        map: The user's function.
    """

    map: MapFunction

    def __call__(self, rows: Any, indices: Array, epoch: int) -> Part:
        """Returns rows as the user's function makes them."""
        watch = _Watch()
        rows = self.map.rows(rows, indices, epoch)
        watch.stage("map")
        return Part(rows, watch.seconds)


class TeamRows:
    """A source of rows that a team of workers reads.

    Args:
        team: The team, whose function returns a `Part`.
        num_rows: How many rows there are.
        clock: Where the time goes.
        gathered: A source of what the function takes before row numbers and epoch;
            None if it takes nothing else.
        epoch: Which epoch, from 0.
    """

    def __init__(
        self,
        team: Team,
        num_rows: int,
        clock: Clock,
        gathered: RowSource | None = None,
        epoch: int = 0,
    ) -> None:
        self._team, self._num_rows, self._clock = team, num_rows, clock
        self._gathered, self._epoch = gathered, epoch

    def __len__(self) -> int:
        return self._num_rows

    def at_epoch(self, epoch: int) -> "TeamRows":
        """Returns the rows as another epoch's random numbers make them."""
        return TeamRows(self._team, self._num_rows, self._clock, self._gathered, epoch)

    def rows(self, indices: Array) -> Any:
        """Returns rows, in the order asked for."""
        if not len(indices):  # a process without rows: the structure alone
            return jax.tree.map(lambda leaf: leaf[:0], self.rows(np.zeros(1, int)))
        parts, at_once = self._team.turn(indices, self._call)
        add_stages(self._clock, parts, len(indices), at_once)
        return concatenate([part.rows for part in parts])

    def _call(self, indices: Array) -> tuple[Any, ...]:
        if self._gathered is None:
            return indices, self._epoch
        return self._gathered.rows(indices), indices, self._epoch


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

    def rows(self, indices: Array) -> Any:
        """Returns rows, in the order asked for.

        Raises:
            DataError: If the function returned another number of rows.
        """
        if not len(indices):  # a process without rows: the structure alone
            return jax.tree.map(lambda leaf: leaf[:0], self.rows(np.zeros(1, int)))
        rows = self._source.rows(indices)
        with self._clock.stage("map", len(indices)):
            mapped = self._function.rows(rows, indices, self._epoch)
        block = as_block(mapped)
        if block.count != len(indices):
            msg = (
                f"map= returned {block.count} rows for a batch of {len(indices)}. With "
                "map_batched=True it has to keep their number."
            )
            raise DataError(msg)
        return block.rows


def add_stages(clock: Clock, parts: list[Part], count: int, at_once: int) -> None:
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
