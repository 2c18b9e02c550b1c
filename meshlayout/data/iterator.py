"""One iteration over a dataset: `DataIterator`, and the thread that works ahead of it.

A daemon thread fills a bounded queue. A thread of `concurrent.futures` would do, but
for one thing: Python waits for those before it exits, for ever if a source blocks. A
daemon thread that calls JAX while Python exits crashes the process, so the thread calls
it only while it holds a lock, which the exit takes for good. The thread refers to the
`_Worker` alone, never to the user's `DataIterator`: when a loop is left without closing
and that is dropped, its finalizer stops the thread.
"""

import atexit
import contextlib
import dataclasses
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np

from meshlayout import _checks
from meshlayout._annotations import Batch
from meshlayout.cluster import activity
from meshlayout.data.agreement import WAY_OUT
from meshlayout.data.by_row import HostBatch
from meshlayout.data.examples import no_rows, rows_text
from meshlayout.data.plan import DataPlan
from meshlayout.data.position import Position, from_state, to_state
from meshlayout.data.protocols import JSON
from meshlayout.errors import DataError


# How long closing waits for the thread. One that is inside the user's source cannot be
# stopped there; it ends when the source returns.
_JOIN_S = 0.2

# How long the exit waits for a batch that is being placed on devices.
_PLACE_S = 1.0

# Held by a thread that calls JAX; the exit takes it, and never releases it.
_calls_jax = threading.Lock()


@atexit.register
def _end_calls() -> None:
    _calls_jax.acquire(timeout=_PLACE_S)


class DataIterator:
    """The batches of one iteration over a `DistributedDataset`.

    Reading starts with the first batch. `close` stops the background thread, as does
    the end of a `with` block, or leaving the loop.

    Args:
        plan: The dataset's.
        position: Where the first batch starts.
        record: Called with the position after every batch. A method of the dataset,
            which also keeps it alive if the user holds only the iterator: a dataset
            that is collected closes its source.
    """

    def __init__(
        self, plan: DataPlan, position: Position, record: Callable[[Position], None]
    ) -> None:
        self._plan, self._position, self._record = plan, position, record
        self._worker: _Worker | None = None
        self._is_closed = self._is_over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        self._check_open()
        if self._is_over:
            raise StopIteration
        activity.now.name = "next(batch)"
        activity.now.moves += 1
        start = time.perf_counter()
        if self._worker is None:
            self._worker = _Worker(self._plan, self._position)
            self._stop_later = weakref.finalize(self, self._worker.stop)
            self._stop_later.atexit = False
        try:
            batch, self._position = self._worker.take()
        except BaseException as error:
            # After Ctrl-C, the batches that are ready come next.
            if not isinstance(error, KeyboardInterrupt):
                self._is_over = True
                self._stop()
            raise
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
        self._check_open()
        position = from_state(self._plan.identity, state)
        self._plan.check_position(position, skip=skip)
        self._stop()
        self._position, self._is_over = position, False
        self._record(position)

    def close(self) -> None:
        """Stops reading, and drops prefetched batches."""
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
        worker, self._worker = self._worker, None
        if worker is not None:
            self._stop_later.detach()
            worker.stop()
            worker.is_done.wait(_JOIN_S)


class _Worker:
    """Makes batches: ahead, in a thread, or with `prefetch=0` when they are taken.

    Two `SimpleQueue`s bound how many are made ahead: batches that are ready, and
    permits to make another one. They cost less per batch than a condition, and Ctrl-C
    interrupts the loop that waits for one.
    """

    def __init__(self, plan: DataPlan, position: Position) -> None:
        self._batches = _Batches(plan, position)
        self._ready: queue.SimpleQueue[tuple[Batch, Position] | BaseException] = (
            queue.SimpleQueue()
        )
        self._permits: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_stopped = False
        self._is_threaded = plan.options.prefetch > 0
        self.is_done = threading.Event()
        for _ in range(plan.options.prefetch):
            self._permits.put(None)
        if self._is_threaded:
            threading.Thread(
                target=self._run, name="meshlayout-data", daemon=True
            ).start()

    def take(self) -> tuple[Batch, Position]:
        """Returns the next batch, or raises what making it has raised."""
        if not self._is_threaded:
            return self._batches.placed(self._batches.next_on_host())
        result = self._ready.get()
        if isinstance(result, BaseException):
            self._ready.put(StopIteration())  # for other threads that are waiting
            try:
                raise result
            finally:
                # The traceback refers to this frame, and the frame to the error: the
                # cycle would keep the frames of the source alive.
                del result
        self._permits.put(None)
        return result

    def stop(self) -> None:
        """Ends the thread once it leaves the source, and drops what is ready."""
        # In this order: once woken by a permit, the thread has to see the flag.
        self._is_stopped = True
        if self._is_threaded:
            self._permits.put(None)
            self._clear()
        else:
            self._batches.close()
            self.is_done.set()

    def _clear(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
        self._ready.put(StopIteration())

    def _run(self) -> None:
        """Makes batches while there are permits; what the thread runs."""
        end: BaseException = StopIteration()
        try:
            while self._permits.get() is None and not self._is_stopped:
                batch = self._batches.next_on_host()
                with _calls_jax:
                    self._ready.put(self._batches.placed(batch))
        except BaseException as error:  # raised again in the user's loop
            end = error
        try:
            self._batches.close()
        except BaseException as error:  # from a `finally` clause of the source
            end = error if isinstance(end, StopIteration) else end
        self._ready.put(end)
        if self._is_stopped:  # a batch in between must not stay on the devices
            self._clear()
        del end  # see `take`
        self.is_done.set()


class _Batches:
    """Makes the batches of one iteration, each with the position after it."""

    def __init__(self, plan: DataPlan, position: Position) -> None:
        self._plan, self._position = plan, position
        self._reader = plan.new_reader()
        self._turns = plan.agreement.new_turns() if plan.is_stream else None

    def next_on_host(self) -> HostBatch:
        """Returns the next batch, which all processes have; raises StopIteration."""
        with self._failure_told():
            while not self._is_over():
                batch = self._reader.read(self._position)
                if batch is None and not self._position.row:
                    # With epochs=None this would be an endless loop of empty epochs.
                    raise DataError(no_rows(self._position.epoch))
                batch = self._agreed(batch)
                if batch is not None:
                    self._position = batch.after
                    return batch
                self._position = self._position._replace(
                    epoch=self._position.epoch + 1, batch=0, row=0, source=None, offset=0
                )
        if self._turns is not None:
            self._turns.leave(ended=True)
        raise StopIteration

    def placed(self, batch: HostBatch) -> tuple[Batch, Position]:
        """Returns a batch on the mesh, and the position after it."""
        with self._failure_told():
            return self._plan.placed(batch), batch.after

    def close(self) -> None:
        """Releases the source, and other processes that are waiting for this one."""
        try:
            self._reader.close()
        finally:
            if self._turns is not None:
                self._turns.leave()

    @contextlib.contextmanager
    def _failure_told(self) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            # The others raise it too, once they have reached this step.
            if self._turns is not None:
                self._turns.fail(error)
            raise

    def _is_over(self) -> bool:
        options, position = self._plan.options, self._position
        if options.epochs is None:
            return False
        last = position.first_epoch + options.epochs
        if options.remainder != "repeat":
            return position.epoch >= last
        # An iteration that started in the middle of an epoch ends at the same row.
        return (position.epoch, position.row) >= (last, position.first_row)

    def _agreed(self, batch: HostBatch | None) -> HostBatch | None:
        """Returns the next batch, or None at the epoch's end, on all processes."""
        plan, position = self._plan, self._position
        is_own, remainder = plan.options.per_process, plan.options.remainder
        if self._turns is None or (batch is None and is_own and remainder == "repeat"):
            return batch  # the next epoch has this step's batch
        missing = None if batch is None else plan.size - batch.count
        where = f"batch {position.batch + 1} of epoch {position.epoch + 1}"
        answers = self._turns.take(missing, where)
        if len(set(answers.values())) == 1 and not missing:
            return batch
        if not is_own:
            self._check_alike(answers, where)
            return batch
        ended = [process for process, rows in answers.items() if rows is None]
        if len(ended) == len(answers):
            return None
        if ended and remainder == "drop":
            if batch is not None:
                plan.clock.warn(
                    f"Dropped at least {rows_text(batch.count)} at the end of an "
                    f"epoch: process {ended[0]} had no more batches, and the source "
                    "was not read any further."
                )
            return None
        if ended and plan.filler is None:
            others = next(process for process in answers if process not in ended)
            msg = (
                f"the source of process {ended[0]} has fewer batches than that of "
                f"process {others}. {plan.padding_hint}"
            )
            raise DataError(msg)
        if batch is None:
            leaves = [np.repeat(row, len(plan.own), axis=0) for row in plan.filler or ()]
            batch = HostBatch(leaves, 0, position._replace(batch=position.batch + 1))
        return dataclasses.replace(batch, is_padded_elsewhere=True)

    def _check_alike(self, answers: dict[int, int | None], where: str) -> None:
        """Raises DataError if processes that share a stream have different batches."""
        (first, expected), *others = answers.items()

        def text(process: int, missing: int | None) -> str:
            if missing is None:
                return f"that of process {process} ends before {where}"
            return f"process {process} has {self._plan.size - missing} in {where}"

        for process, missing in others:
            if missing != expected:
                msg = (
                    f"the sources of process {first} and process {process} have "
                    f"different numbers of rows: {text(first, expected)}, and "
                    f"{text(process, missing)}. {WAY_OUT}"
                )
                raise DataError(msg)
