"""One iteration over a dataset: batches on the mesh, one after another, with a place.

A `BatchIterator` makes the batches, in a background thread if some are prefetched;
`DataIterator` is what users hold. The place that `get_state` returns counts batches
that were given to the loop, not those that were made ready and may never be taken.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, NoReturn, Self, TypeVar

import numpy as np

from meshlayout import _jax
from meshlayout._annotations import Batch
from meshlayout._batches import mark_weights
from meshlayout.data.agreement import IterationExchange
from meshlayout.data.by_row import Cut, HostBatch
from meshlayout.data.by_stream import Reader, no_rows, rows_text
from meshlayout.data.clock import Clock
from meshlayout.data.placement import Placement, WeightsPlace
from meshlayout.data.position import Identity, Position, from_state, to_state
from meshlayout.data.prefetch import Prefetch
from meshlayout.data.protocols import JSON
from meshlayout.errors import DataError


BatchT = TypeVar("BatchT")


@dataclass(frozen=True)
class DataOptions:
    """The arguments of `distribute_dataset`, checked.

    Attributes:
        global_batch_size: Rows of a global batch.
        remainder: What becomes of rows that do not fill a batch.
        weights: Where batches carry their weights; None for nowhere.
        shuffle: The seed that shuffles the rows of a source with random access.
        epochs: Passes over the source in one iteration; None for no end.
        steps: Batches in one iteration; None for all.
        prefetch: Batches that are made ready ahead.
        per_process: Whether the source yields only this process's rows.
        strings: `"error"` or `"host"`.
    """

    global_batch_size: int
    remainder: str
    weights: str | int | None
    shuffle: int | None
    epochs: int | None
    steps: int | None
    prefetch: int
    per_process: bool
    strings: str

    @property
    def goes_on(self) -> bool:
        """Whether an iteration begins where the last one ended."""
        is_part = self.steps is not None or self.epochs is None
        return is_part or self.remainder == "repeat"


@dataclass(frozen=True)
class Pipeline:
    """What all iterations over a dataset share.

    Attributes:
        options: What was asked for.
        cut: How batches are cut.
        weights: Where batches have their weights.
        placement: Where they go; None for batches that are placed already.
        no_place: What to do if batches cannot be padded.
        filler: The row that fills batches for which a process has no rows, leaf by
            leaf; None if there cannot be such batches.
        x64: Whether arrays are 64-bit.
        clock: Where the time goes.
    """

    options: DataOptions
    cut: Cut
    weights: WeightsPlace | None
    placement: Placement | None
    no_place: str
    filler: list[np.ndarray] | None
    x64: bool
    clock: Clock

    def check_padding(self, batch: HostBatch) -> None:
        """Raises DataError if a batch is padded and has no place for weights."""
        if self.weights is None or self.weights.index is not None:
            return
        if self.cut.is_real(batch.count) is not None:
            msg = (
                f"the last batch of an epoch has {rows_text(batch.count)}, and batches "
                f"have {self.cut.size}. {self.no_place}"
            )
            raise DataError(msg)

    def placed(self, batch: HostBatch) -> Batch:
        """Returns a batch on the mesh, with its weights."""
        if self.placement is None or self.weights is None:
            return batch.leaves[0]
        is_real = self.cut.is_real(batch.count)
        with (
            self.clock.stage("place", self.cut.num_kept),
            _jax.x64_mode(enabled=self.x64),
        ):
            leaves = self.weights.weighted(batch.leaves, is_real, self.cut.num_kept)
            arrays = self.placement.placed(leaves)
            if self.weights.index is not None:
                mark_weights(arrays[self.weights.index])
            return self.placement.treedef.unflatten(arrays)


class BatchIterator:
    """Makes the batches of one iteration.

    Attributes:
        position: The place after the last batch.
        reader: Where batches come from.

    Args:
        pipeline: What to do with them.
        reader: Where they come from.
        position: Where to begin.
        must_seek: Whether the reader still has to move there.
        exchange: With the other processes, if any.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        reader: Reader,
        position: Position,
        *,
        must_seek: bool,
        exchange: IterationExchange | None,
    ) -> None:
        self._pipeline, self.reader, self.position = pipeline, reader, position
        self._here = position
        self._must_seek = must_seek and (position.row > 0 or position.batch > 0)
        is_alone = exchange is None
        is_per_process = pipeline.options.per_process
        # Processes with separate sources agree in every step that all have a
        # batch; those that read the same source compare its rows now and then.
        self._steps = exchange if is_per_process and not is_alone else None
        self._rows = exchange if not is_per_process and not is_alone else None
        self._exchange = exchange

    def __next__(self) -> tuple[Batch, Position]:
        batch = self._next_host_batch()
        self._here = batch.position._replace(given=self._here.given + 1)
        self.position = self._here
        return self._pipeline.placed(batch), self.position

    def close(self) -> None:
        """Releases the source, and the other processes that wait for this one."""
        try:
            self.reader.close()
        finally:
            if self._exchange is not None:
                self._exchange.leave()

    def _next_host_batch(self) -> HostBatch:
        while not self._is_over():
            batch = self._agreed()
            if batch is not None:
                return batch
            self._here = self._here._replace(
                epoch=self._here.epoch + 1, batch=0, row=0, source=None, offset=0
            )
        if self._exchange is not None:
            self._exchange.end()
        raise StopIteration

    def _is_over(self) -> bool:
        options, here = self._pipeline.options, self._here
        if options.steps is not None and here.given >= options.steps:
            return True
        if options.epochs is None:
            return False
        last = here.first_epoch + options.epochs
        if options.steps is None:
            if options.remainder == "repeat":
                return (here.epoch, here.row) >= (last, here.first_row)
            return here.epoch >= last
        # It resumed where the last one ended, maybe in the middle of an epoch.
        is_left = (here.epoch, here.row) < (last, here.first_row)
        if options.remainder == "repeat" or is_left:
            return False
        epochs = "1 epoch" if options.epochs == 1 else f"{options.epochs} epochs"
        msg = (
            f"the data ended after {here.given} of steps={options.steps}: {epochs} had "
            "no more batches. Take more epochs=, fewer steps=, or remainder='repeat'."
        )
        raise DataError(msg)

    def _agreed(self) -> HostBatch | None:
        """Returns the next batch, or None at the epoch's end, on all processes."""
        if self._steps is None:
            batch = self._read()
            if self._rows is not None and batch is not None and batch.digests:
                here = self._here
                where = f"batch {here.batch + 1} of epoch {here.epoch + 1}"
                self._rows.compare(where, batch.digests)
            return batch
        try:
            batch = self._read()
        except Exception as error:
            # Raised here, and by the others, once all have reached this step.
            self._steps.fail(error)
            raise
        if batch is None and self._pipeline.options.remainder == "repeat":
            return None  # the next epoch has this step's batch
        values = self._steps.agree(batch is not None)
        going = [process for process, has_batch in values.items() if has_batch]
        if len(going) in (0, len(values)):
            return batch
        ended = next(process for process in values if process not in going)
        return self._out_of_step(batch, going[0], ended)

    def _read(self) -> HostBatch | None:
        """Returns this process's next batch, or None at the epoch's end."""
        if self._must_seek:
            self.reader.seek(self._here)
            self._must_seek = False
        # The first batch of an epoch, the second, the fourth, the eighth ...
        is_due = not (self._here.batch + 1) & self._here.batch
        is_digested = self._rows is not None and is_due
        batch = self.reader.read(self._here, digest=is_digested)
        if batch is not None:
            self._pipeline.check_padding(batch)
        elif not self._here.row:
            raise DataError(no_rows(self._here.epoch))
        return batch

    def _out_of_step(
        self, batch: HostBatch | None, going: int, ended: int
    ) -> HostBatch | None:
        """Returns the batch of a step for which only some processes have rows."""
        pipeline = self._pipeline
        remainder, filler = pipeline.options.remainder, pipeline.filler
        if remainder == "pad" and filler is not None:
            if batch is not None:
                return batch
            count = pipeline.cut.num_kept
            leaves = [np.repeat(row, count, axis=0) for row in filler]
            after = self._here._replace(batch=self._here.batch + 1)
            return HostBatch(leaves, 0, after)
        if remainder == "drop":
            if batch is not None:
                pipeline.clock.warn(
                    f"Dropped at least {rows_text(batch.count)} at the end of an "
                    f"epoch: process {ended} had no more batches, and the source was "
                    "not read any further."
                )
            return None
        way_out = pipeline.no_place
        if remainder != "pad":
            way_out = "remainder='pad' pads the shorter ones."
        msg = (
            f"the source of process {ended} has fewer batches than that of process "
            f"{going}. {way_out}"
        )
        raise DataError(msg)


@dataclass(frozen=True)
class Hooks:
    """What an iterator needs from its dataset.

    Attributes:
        identity: What has to be the same for a state to fit.
        clock: Where waiting is measured.
        begin: Makes the batches from a place on.
        moved: Called with the place after every batch that was given.
    """

    identity: Identity
    clock: Clock
    begin: Callable[[Position], Prefetch[tuple[Batch, Position]]]
    moved: Callable[[Position], None]


class DataIterator(Generic[BatchT]):
    """The batches of one iteration over a `DistributedDataset`.

    Several threads may take batches from it; each batch is given once. Reading starts
    with the first batch. `close` stops what runs in the background, as does the end of
    a `with` block, or leaving the loop.

    Args:
        hooks: What it needs from its dataset.
        position: Where to begin.
    """

    def __init__(self, hooks: Hooks, position: Position) -> None:
        self._hooks, self._position = hooks, position
        self._batches: Prefetch[tuple[Batch, Position]] | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> BatchT:
        with self._lock:
            self._check_open()
            start = time.perf_counter()
            if self._batches is None:
                self._batches = self._hooks.begin(self._position)
            batch, self._position = next(self._batches)
            self._hooks.clock.waited(time.perf_counter() - start)
            self._hooks.moved(self._position)
            return batch

    def __reduce__(self) -> NoReturn:
        msg = (
            "a data iterator holds threads and devices, and cannot be copied or "
            "pickled. Save its get_state(), and set it on another one with "
            "set_state()."
        )
        raise DataError(msg)

    def get_state(self) -> dict[str, JSON]:
        """Returns the place after the last batch that was given, as JSON takes it.

        Batches that were made ready and not given do not count.

        Example:
            >>> import json, numpy as np
            >>> from meshlayout import create_mesh
            >>> from meshlayout.data import distribute_dataset
            >>> mesh = create_mesh({"batch": 8})
            >>> data = distribute_dataset(np.arange(32), mesh, global_batch_size=8)
            >>> it = iter(data)
            >>> _ = next(it)
            >>> state = json.loads(json.dumps(it.get_state()))
            >>> again = iter(data)
            >>> again.set_state(state)
            >>> np.asarray(next(again))
            array([ 8,  9, 10, 11, 12, 13, 14, 15], dtype=int32)
        """
        with self._lock:
            return to_state(self._hooks.identity, self._position)

    def set_state(self, state: JSON, *, skip: bool = False) -> None:
        """Goes to a place, so that the batch after it comes next.

        Args:
            state: What `get_state` returned, here or in another run, on as many or
                other processes.
            skip: Whether a source that cannot go to a place may be read from the
                epoch's start, and what comes before the place be dropped.

        Raises:
            DataError: If the state is of another dataset, or the source cannot go
                there.
        """
        with self._lock:
            self._check_open()
            position = from_state(self._hooks.identity, state)
            self._check_reachable(position, skip=skip)
            self._stop()
            self._position = position
            self._hooks.moved(position)

    def _check_reachable(self, position: Position, *, skip: bool) -> None:
        """Raises DataError if the source cannot go to a place."""
        if position.row == 0 and position.batch == 0:
            return
        is_stream = self._hooks.identity.source == "stream"
        if is_stream and position.source is None and not skip:
            msg = (
                f"this source cannot go to row {position.row} of epoch "
                f"{position.epoch + 1}: it does not know its place. "
                "iterator.set_state(state, skip=True) reads the rows before it, and "
                "drops them."
            )
            raise DataError(msg)

    def close(self) -> None:
        """Stops reading, and drops batches that were made ready."""
        # A thread that waits for a batch holds the lock; stopping wakes it.
        batches = self._batches
        if batches is not None:
            batches.stop()
        with self._lock:
            self._is_closed = True
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            msg = "this data iterator is closed; iter(data) begins another one."
            raise DataError(msg)

    def _stop(self) -> None:
        if self._batches is not None:
            self._batches.close()
            self._batches = None
