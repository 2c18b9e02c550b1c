"""One iteration over a dataset: `DataIterator`, and the thread that works ahead of it.

A daemon thread fills a bounded queue. A thread of `concurrent.futures` would do, but
for one thing: Python waits for those before it exits, for ever if a source blocks. A
daemon thread that calls JAX while Python exits crashes the process, so the thread calls
it only while it holds a lock, which the exit takes for good. The thread refers to the
`_Prefetcher` alone, never to the user's `DataIterator`: when a loop is left without
closing and that is dropped, its finalizer stops the thread.
"""

import atexit
import contextlib
import dataclasses
import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
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

# Held by a thread that calls JAX; the exit takes it, and never releases it. The exit
# does not wait longer than a batch should take to be placed.
_calls_jax = threading.Lock()
atexit.register(_calls_jax.acquire, timeout=1.0)


class DataIterator:
    """The batches of one iteration over a `DistributedDataset`.

    Reading starts with the first batch. `close` stops the background thread, as does
    the end of a `with` block, or leaving the loop.
    """

    def __init__(
        self, plan: DataPlan, position: Position, record: Callable[[Position], None]
    ) -> None:
        # `record` is a method of the dataset, which it keeps alive for the user who
        # holds only the iterator: a dataset that is collected closes its source.
        self._plan, self._position, self._record = plan, position, record
        self._worker: _Prefetcher | None = None
        self._is_closed = self._is_over = False
        self._lock = threading.Lock()  # several threads may take batches

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        with self._lock:
            self._check_open()
            if self._is_over:
                raise StopIteration
            activity.now.name = "next(batch)"
            activity.now.moves += 1
            start = time.perf_counter()
            if self._worker is None:
                self._worker = _Prefetcher(self._plan, self._position)
                self._stop_later = weakref.finalize(self, self._worker.stop)
                self._stop_later.atexit = False
            try:
                batch, self._position = self._worker.take()
            except KeyboardInterrupt:
                raise  # the batches that are ready come next
            except BaseException:
                self._is_over = True
                self._stop()
                raise
            self._plan.clock.add(waited_s=time.perf_counter() - start, batches=1)
            self._record(self._position)
            return batch

    def __reduce__(self) -> NoReturn:
        raise DataError(
            "a data iterator holds a thread, and is not pickled. Save its get_state()."
        )

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
        is_inside = position.row > 0 or position.batch > 0
        if self._plan.is_stream and is_inside and position.source is None and not skip:
            raise DataError(
                f"this source cannot seek to row {position.row} of epoch "
                f"{position.epoch + 1}: it has no position of its own. "
                "iterator.set_state(state, skip=True) reads the rows before it, and "
                "drops them."
            )
        self._stop()
        self._position, self._is_over = position, False
        self._record(position)

    def close(self) -> None:
        """Stops reading, and drops prefetched batches."""
        self._is_closed = True
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
            if threading.current_thread() is not worker.thread:
                worker.is_done.wait(_JOIN_S)


class _Prefetcher:
    """Makes batches: ahead, in a thread, or with `prefetch=0` when they are taken.

    Two `SimpleQueue`s bound how many are made ahead: batches that are ready, and
    permits to make another one. They cost less per batch than a condition, and Ctrl-C
    interrupts the loop that waits for one.
    """

    def __init__(self, plan: DataPlan, position: Position) -> None:
        self._plan, self._position = plan, position
        self._reader = plan.new_reader()
        self._turns = plan.agreement.new_turns() if plan.is_stream else None
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._permits: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_stopped = False
        self.is_done = threading.Event()
        self.thread: threading.Thread | None = None
        for _ in range(plan.options.prefetch):
            self._permits.put(None)
        if plan.options.prefetch:
            name = "meshlayout-data"
            self.thread = threading.Thread(target=self._run, name=name, daemon=True)
            self.thread.start()

    def take(self) -> tuple[Batch, Position]:
        """Returns the next batch, or raises what making it has raised."""
        if self.thread is None:
            return self._next(contextlib.nullcontext())
        result = self._ready.get()
        if isinstance(result, BaseException):
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
        if self.thread is None:
            self._close()
            self.is_done.set()
        else:
            self._permits.put(None)
            self._clear()

    def _clear(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
        self._ready.put(StopIteration())  # for a loop that waits in another thread

    def _close(self) -> None:
        try:
            self._reader.close()
        finally:
            if self._turns is not None:
                self._turns.leave()

    def _run(self) -> None:
        """Makes batches while there are permits; what the thread runs."""
        end: BaseException = StopIteration()
        try:
            while self._permits.get() is None and not self._is_stopped:
                self._ready.put(self._next(_calls_jax))
        except BaseException as error:  # raised again in the user's loop
            end = error
        try:
            self._close()
        except BaseException as error:  # from a `finally` clause of the source
            end = error if isinstance(end, StopIteration) else end
        self._ready.put(end)
        del end  # see `take`
        if self._is_stopped:  # a batch in between must not stay on the devices
            self._clear()
        self.is_done.set()

    def _next(self, lock: AbstractContextManager[Any]) -> tuple[Batch, Position]:
        """Returns the next batch on the mesh, and the position after it."""
        try:
            batch = self._next_on_host()
            if batch is not None:
                self._position = batch.after
                with lock:
                    return self._plan.placed(batch), batch.after
        except (Exception, SystemExit) as error:
            # The others raise it too, once they have reached this step.
            if self._turns is not None:
                self._turns.fail(error)
            raise
        if self._turns is not None:
            self._turns.leave(ended=True)
        raise StopIteration

    def _next_on_host(self) -> HostBatch | None:
        """Returns the next batch, which all processes have; None at the end."""
        options = self._plan.options
        while True:
            position = self._position
            if options.epochs is not None:
                last = position.first_epoch + options.epochs
                # An iteration that started in an epoch's middle ends at the same row.
                row = position.first_row if options.remainder == "repeat" else 0
                if (position.epoch, position.row) >= (last, row):
                    return None
            batch = self._reader.read(position)
            if batch is None and not position.row:
                # With epochs=None this would be an endless loop of empty epochs.
                raise DataError(no_rows(position.epoch))
            if batch is not None:
                self._plan.check_padding(batch)
            batch = self._agreed(batch)
            if batch is not None:
                return batch
            self._position = position._replace(
                epoch=position.epoch + 1, batch=0, row=0, source=None, offset=0
            )

    def _agreed(self, batch: HostBatch | None) -> HostBatch | None:
        """Returns the next batch, or None at the epoch's end, on all processes."""
        plan, position = self._plan, self._position
        is_own, remainder = plan.options.per_process, plan.options.remainder
        if self._turns is None or (batch is None and is_own and remainder == "repeat"):
            return batch  # the next epoch has this step's batch
        missing = None if batch is None else plan.size - batch.count
        where = f"batch {position.batch + 1} of epoch {position.epoch + 1}"
        answers = self._turns.take(missing, where)
        ended = [process for process, answer in answers.items() if answer is None]
        if set(answers.values()) == {missing} and (not missing or not is_own):
            return batch
        if not is_own:
            (first, expected), *others = answers.items()
            process, rows = next(other for other in others if other[1] != expected)
            here, there = (
                "no more rows" if missing is None else rows_text(plan.size - missing)
                for missing in (expected, rows)
            )
            raise DataError(
                f"the sources of process {first} and process {process} have different "
                f"numbers of rows: {here} and {there} in {where}. {WAY_OUT}"
            )
        if ended and remainder == "drop":
            if batch is not None:
                plan.clock.warn(
                    f"Dropped at least {rows_text(batch.count)} at the end of an "
                    f"epoch: process {ended[0]} had no more batches, and the source "
                    "was not read any further."
                )
            return None
        if ended and not plan.has_weights:
            others = next(process for process in answers if process not in ended)
            raise DataError(
                f"the source of process {ended[0]} has fewer batches than that of "
                f"process {others}. {plan.padding_hint}"
            )
        if batch is None:
            leaves = [np.repeat(row, len(plan.own), axis=0) for row in plan.filler]
            batch = HostBatch(leaves, 0, position._replace(batch=position.batch + 1))
        return dataclasses.replace(batch, is_padded_elsewhere=True)
