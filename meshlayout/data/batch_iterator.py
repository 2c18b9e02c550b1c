"""One iteration over a dataset: `DataIterator`, and the thread that works ahead of it.

Three objects, so that a loop that is left without closing leaves no thread behind. The
user holds a `DataIterator`; it holds a `Prefetch`, which the thread holds as well; and
the thread runs a `BatchIterator`, which makes the batches. The thread never refers to
the `DataIterator`, so when the user drops that, its finalizer stops the thread.

The thread is also stopped before Python exits: one that uses devices during shutdown
crashes the process. It sets an event when it is done, because after an interrupted
`Thread.join` Python 3.11 and 3.12 report a live thread as ended.
"""

import atexit
import contextlib
import dataclasses
import queue
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeVar

import numpy as np

from meshlayout import _checks
from meshlayout._annotations import Batch
from meshlayout.cluster import activity
from meshlayout.data.agreement import check_alike, check_rows
from meshlayout.data.by_row import HostBatch
from meshlayout.data.elements import no_rows, rows_text
from meshlayout.data.plan import DataPlan, Reader
from meshlayout.data.position import Position, from_state, to_state
from meshlayout.data.protocols import JSON
from meshlayout.errors import DataError


BatchT = TypeVar("BatchT")

# How long closing waits for the thread. One that is inside the user's source cannot be
# stopped there; it ends when the source returns.
_JOIN_S = 0.2


class DataIterator(Generic[BatchT]):
    """The batches of one iteration over a `DistributedDataset`.

    Several threads may take batches from it; each batch is yielded once. Reading starts
    with the first batch. `close` stops the background thread, as does the end of a
    `with` block, or leaving the loop.
    """

    def __init__(
        self,
        plan: DataPlan,
        position: Position,
        record: Callable[[Position], None],
    ) -> None:
        """Starts at a position; nothing is read yet.

        Args:
            plan: The dataset's.
            position: Where the first batch starts.
            record: Called with the position after every batch. A method of the
                dataset, which also keeps it alive if the user holds only the iterator:
                a dataset that is collected closes its source.
        """
        self._plan, self._position, self._record = plan, position, record
        self._batches: Prefetch | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> BatchT:
        with self._lock:
            self._check_open()
            activity.now.name = "next(batch)"
            activity.now.moves += 1
            start = time.perf_counter()
            if self._batches is None:
                batches = BatchIterator(self._plan, self._position)
                self._batches = Prefetch(batches, self._plan.options.prefetch)
                self._stop_later = weakref.finalize(self, self._batches.abandon)
                self._stop_later.atexit = False  # `_stop_all` does it, and waits
            batch, self._position = next(self._batches)
            self._plan.clock.waited(time.perf_counter() - start)
            self._record(self._position)
            return batch

    def __reduce__(self) -> NoReturn:
        msg = (
            "a data iterator holds threads and devices, and cannot be copied or "
            "pickled. Save its get_state(), and set it on another one with "
            "set_state()."
        )
        raise DataError(msg)

    def get_state(self) -> dict[str, JSON]:
        """Returns the position after the last batch, as a JSON-serializable dict.

        Use this to resume in the middle of an epoch; `Checkpointer` saves it along with
        a state. Batches that were prefetched but not taken do not count.

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
            return to_state(self._plan.identity, self._position)

    def set_state(self, state: JSON, *, skip: bool = False) -> None:
        """Moves to a saved position, so that the batch after it comes next.

        Args:
            state: What `get_state` returned, here or in another run, on the same or
                another number of processes.
            skip: Whether a source that cannot seek may be read from the start of the
                epoch, dropping the rows before the position.

        Raises:
            DataError: If the state is of another dataset, or the source cannot seek.
        """
        skip = _checks.flag("skip", skip, error=DataError)
        with self._lock:
            self._check_open()
            plan = self._plan
            position = from_state(plan.identity, state)
            plan.check_position(position)
            is_start = position.row == 0 and position.batch == 0
            if plan.is_stream and position.source is None and not (is_start or skip):
                msg = (
                    f"this source cannot seek to row {position.row} of epoch "
                    f"{position.epoch + 1}: it has no position of its own. "
                    "iterator.set_state(state, skip=True) reads the rows before it, "
                    "and drops them."
                )
                raise DataError(msg)
            self._stop()
            self._position = position
            self._record(position)

    def close(self) -> None:
        """Stops reading, and drops prefetched batches."""
        # A thread that is waiting for a batch holds the lock; stopping wakes it up.
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
            msg = "this data iterator is closed; iter(data) starts another one."
            raise DataError(msg)

    def _stop(self) -> None:
        if self._batches is not None:
            self._stop_later.detach()
            self._batches.close()
            self._batches = None


class BatchIterator:
    """Makes the batches of one iteration, each with the position after it."""

    def __init__(self, plan: DataPlan, position: Position) -> None:
        self._plan, self._position = plan, position
        self._reader: Reader | None = plan.take_reader()
        agreement = plan.agreement
        exchange = None if agreement is None else agreement.new_iteration()
        self._exchange = exchange

    def __next__(self) -> tuple[Batch, Position]:
        try:
            batch = self._next_host_batch()
            given = self._position.given + 1
            self._position = batch.position._replace(given=given)
            return self._plan.placed(batch), self._position
        except StopIteration:
            raise
        except (Exception, SystemExit) as error:
            # The others raise it too, once they have reached this step.
            if self._exchange is not None:
                self._exchange.fail(error)
            raise

    def close(self) -> None:
        """Releases the source, and other processes that are waiting for this one."""
        reader, self._reader = self._reader, None
        try:
            if reader is not None:
                reader.close()
        finally:
            if self._exchange is not None:
                self._exchange.leave()

    def _next_host_batch(self) -> HostBatch:
        while not self._is_over():
            batch = self._agreed(self._read())
            if batch is not None:
                return batch
            self._position = self._position._replace(
                epoch=self._position.epoch + 1, batch=0, row=0, source=None, offset=0
            )
        if self._exchange is not None:
            self._exchange.end()
        if self._plan.options.continues and self._reader is not None:
            # The next iteration starts here; a stream that cannot seek would
            # otherwise have to be read again from the start of the epoch.
            self._plan.keep_reader(self._reader)
            self._reader = None
        raise StopIteration

    def _is_over(self) -> bool:
        options, position = self._plan.options, self._position
        if options.steps is not None and position.given >= options.steps:
            return True
        if options.epochs is None:
            return False
        last = position.first_epoch + options.epochs
        # An iteration that started in the middle of an epoch ends at the same row.
        is_before_end = (position.epoch, position.row) < (last, position.first_row)
        if options.steps is None:
            is_repeated = options.remainder == "repeat"
            return not is_before_end if is_repeated else position.epoch >= last
        if options.remainder == "repeat" or is_before_end:
            return False
        # Raised, and not ended early: a schedule was made for this many steps.
        epochs = "1 epoch" if options.epochs == 1 else f"{options.epochs} epochs"
        msg = (
            f"the data ended after {position.given} of steps={options.steps}: {epochs} "
            "had no more batches. Take more epochs=, fewer steps=, or "
            "remainder='repeat'."
        )
        raise DataError(msg)

    def _read(self) -> HostBatch | None:
        """Returns this process's next batch, or None at the epoch's end."""
        position = self._position
        if self._reader is None:  # closed
            raise StopIteration
        batch = self._reader.read(position)
        if batch is None and not position.row:
            # With epochs=None this would be an endless loop of empty epochs.
            raise DataError(no_rows(position.epoch))
        if batch is not None:
            self._plan.check_padding(batch)
        return batch

    def _agreed(self, batch: HostBatch | None) -> HostBatch | None:
        """Returns the next batch, or None at the epoch's end, on all processes."""
        options, position = self._plan.options, self._position
        if self._exchange is None:
            return batch
        if batch is None and options.per_process and options.remainder == "repeat":
            return None  # the next epoch has this step's batch
        reports = self._exchange.agree(self._plan.report_of(batch, position))
        if not options.per_process:
            check_alike(reports)
        check_rows(reports, self._plan.groups, per_process=options.per_process)
        if not options.per_process:
            return batch
        with_rows = [p for p, report in reports.items() if report.num_rows is not None]
        if len(with_rows) not in (0, len(reports)):
            ended = next(process for process in reports if process not in with_rows)
            batch = self._uneven(batch, with_rows[0], ended)
        if batch is None or all(report.is_full for report in reports.values()):
            return batch
        return dataclasses.replace(batch, is_padded_elsewhere=True)

    def _uneven(
        self, batch: HostBatch | None, continuing: int, ended: int
    ) -> HostBatch | None:
        """Returns the batch of a step for which only some processes have rows.

        Args:
            batch: This process's batch, if it has one.
            continuing: A process that has one.
            ended: A process that has none.
        """
        plan = self._plan
        if plan.options.remainder == "pad" and plan.filler is not None:
            if batch is not None:
                return batch
            leaves = [np.repeat(row, plan.cut.num_kept, axis=0) for row in plan.filler]
            after = self._position._replace(batch=self._position.batch + 1)
            return HostBatch(leaves, 0, after)
        if plan.options.remainder == "drop":
            if batch is not None:
                plan.clock.warn(
                    f"Dropped at least {rows_text(batch.count)} at the end of an "
                    f"epoch: process {ended} had no more batches, and the source was "
                    "not read any further."
                )
            return None
        padding_hint = plan.padding_hint
        if plan.options.remainder != "pad":
            padding_hint = "remainder='pad' pads the shorter ones."
        msg = (
            f"the source of process {ended} has fewer batches than that of process "
            f"{continuing}. {padding_hint}"
        )
        raise DataError(msg)


class Prefetch:
    """The batches of a `BatchIterator`, made ahead by a thread.

    The thread holds this object, so `stop` must be called once nobody takes batches any
    more. Two `SimpleQueue`s (batches that are ready, and permits to make another one)
    cost less Python time per batch than a condition, which matters where both sides
    have little else to do.

    Attributes:
        is_done: Set once the thread has nothing more to do.

    Args:
        batches: The iterator. It is closed in the thread that runs it, since a
            generator cannot be closed while another thread is inside it.
        ahead: How many batches are made ahead; 0 makes each when it is asked for.
    """

    def __init__(self, batches: BatchIterator, ahead: int) -> None:
        self._batches: BatchIterator | None = batches
        self._ready: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(ahead):
            self._free.put(None)
        self._is_threaded = ahead > 0
        self._is_stopped = False
        self._thread: threading.Thread | None = None
        self.is_done = threading.Event()

    def __next__(self) -> tuple[Batch, Position]:
        if self._batches is None:
            raise StopIteration
        if not self._is_threaded:
            return self._next_here(self._batches)
        if self._thread is None:
            self._start(self._batches)
        kind, value = self._ready.get()
        if kind == "batch":
            self._free.put(None)
            return value
        self._ready.put(_ENDED)  # for other threads that are waiting
        self._wait()
        if kind != "failed":
            raise StopIteration
        try:
            raise value
        finally:
            # The traceback refers to this frame, and the frame to the error: the cycle
            # would keep the frames of the source alive.
            del value

    def stop(self) -> None:
        """Stops making batches, and wakes up threads that are waiting."""
        # In this order: once woken by a permit, the thread has to see the flag.
        self._is_stopped = True
        self._free.put(None)
        self._clear()

    def abandon(self) -> None:
        """Stops after a loop that was left without closing; waits for no thread."""
        self.stop()
        if self._thread is None and self._batches is not None:
            self._batches.close()  # what the thread would do

    def close(self) -> None:
        """Stops the thread, if there is one, and closes the iterator."""
        self.stop()
        if self._thread is not None:
            self._wait()
        elif self._batches is not None:
            self._batches.close()
        self._batches = None

    def _next_here(self, batches: BatchIterator) -> tuple[Batch, Position]:
        try:
            return next(batches)
        except BaseException:
            self.close()  # as the thread does
            raise

    def _start(self, batches: BatchIterator) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(batches,), name="meshlayout-data", daemon=True
        )
        _running.add(self)
        self._thread.start()

    def _wait(self) -> None:
        """Waits for the thread to end, though not for a source that blocks it."""
        self._batches = None
        # The finalizer of the loop's iterator may run in the thread itself.
        if self._thread is not threading.current_thread():
            self.is_done.wait(_JOIN_S)

    def _clear(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
        self._ready.put(_ENDED)

    def _put(self, kind: str, value: object) -> None:
        self._ready.put((kind, value))
        if self._is_stopped:  # in between: the batch must not stay on the devices
            self._clear()

    def _run(self, batches: BatchIterator) -> None:
        """Makes batches while there is room; what the thread runs."""
        end = _ENDED
        try:
            while self._free.get() is None and not self._is_stopped:
                self._put("batch", next(batches))
        except StopIteration:
            pass
        except BaseException as error:  # raised again in the user's loop
            end = ("failed", error)
        try:
            batches.close()
        except BaseException as error:  # from a `finally` clause of the source
            end = ("failed", error) if end is _ENDED else end
        self._put(*end)
        del end  # see `__next__`
        self.is_done.set()


_ENDED: tuple[str, Any] = ("ended", None)

_running: weakref.WeakSet[Prefetch] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stops all threads: one that uses devices while Python exits would crash it."""
    running = list(_running)
    for prefetch in running:
        prefetch.stop()
    for prefetch in running:
        prefetch.is_done.wait(_JOIN_S)
