"""The batches of one iteration on the mesh, made ahead by a thread.

The thread never holds the loop's iterator, so a loop that is left without closing
leaves no thread behind; and it is stopped before Python ends, since a thread that uses
devices during shutdown crashes the process. Each thread sets an event when it is done:
after an interrupted `Thread.join`, Python 3.11 and 3.12 report a live thread as ended.
"""

import atexit
import contextlib
import queue
import threading
import weakref
from typing import Any

import numpy as np

from meshlayout._annotations import Batch
from meshlayout.data.agreement import IterationExchange
from meshlayout.data.by_row import HostBatch
from meshlayout.data.by_stream import no_rows, rows_text
from meshlayout.data.plan import DataPlan, Reader
from meshlayout.data.position import Position
from meshlayout.errors import DataError


# How long closing waits for a thread. One that is inside the user's source cannot be
# stopped there, and ends when the source returns.
_JOIN_S = 0.2


class BatchIterator:
    """Makes the batches of one iteration, each with the position after it."""

    def __init__(
        self,
        plan: DataPlan,
        position: Position,
        exchange: IterationExchange | None,
    ) -> None:
        self._plan, self._here, self._exchange = plan, position, exchange
        self._reader: Reader | None = plan.take_reader()
        # Processes with separate sources agree in every step that all have a batch;
        # those that read the same stream compare its rows now and then.
        is_per_process = plan.options.per_process
        self._steps = exchange if is_per_process else None
        self._rows = None if is_per_process or not plan.is_stream else exchange

    def __next__(self) -> tuple[Batch, Position]:
        batch = self._next_host_batch()
        self._here = batch.position._replace(given=self._here.given + 1)
        return self._plan.placed(batch), self._here

    def close(self) -> None:
        """Releases the source, and the other processes that wait for this one."""
        reader, self._reader = self._reader, None
        try:
            if reader is not None:
                reader.close()
        finally:
            if self._exchange is not None:
                self._exchange.leave()

    def _next_host_batch(self) -> HostBatch:
        while not self._is_over():
            batch = self._read() if self._steps is None else self._agreed(self._steps)
            if batch is not None:
                return batch
            self._here = self._here._replace(
                epoch=self._here.epoch + 1, batch=0, row=0, source=None, offset=0
            )
        if self._rows is not None and self._here.batch:
            self._rows.compare(self._here, at_end=True)
        if self._exchange is not None:
            self._exchange.end()
        if self._plan.options.goes_on and self._reader is not None:
            self._plan.keep_reader(self._reader)
            self._reader = None
        raise StopIteration

    def _is_over(self) -> bool:
        options, here = self._plan.options, self._here
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

    def _read(self) -> HostBatch | None:
        """Returns this process's next batch, or None at the epoch's end."""
        here, rows = self._here, self._rows
        if self._reader is None:
            raise StopIteration
        digest = None if rows is None else rows.digest_for(here)
        batch = self._reader.read(here, digest)
        if batch is None and not here.row:
            raise DataError(no_rows(here.epoch))
        if batch is not None:
            self._plan.check_padding(batch)
        if rows is not None:
            rows.compare(here, at_end=batch is None)
        return batch

    def _agreed(self, steps: IterationExchange) -> HostBatch | None:
        """Returns the next batch, or None at the epoch's end, on all processes."""
        try:
            batch = self._read()
        except Exception as error:
            # Raised here, and by the others, once all have reached this step.
            steps.fail(error)
            raise
        if batch is None and self._plan.options.remainder == "repeat":
            return None  # the next epoch has this step's batch
        values = steps.agree(batch is not None)
        going = [process for process, has_batch in values.items() if has_batch]
        if len(going) in (0, len(values)):
            return batch
        ended = next(process for process in values if process not in going)
        return self._out_of_step(batch, going[0], ended)

    def _out_of_step(
        self, batch: HostBatch | None, going: int, ended: int
    ) -> HostBatch | None:
        """Returns the batch of a step for which only some processes have rows."""
        plan = self._plan
        if plan.options.remainder == "pad" and plan.filler is not None:
            if batch is not None:
                return batch
            leaves = [np.repeat(row, plan.cut.num_kept, axis=0) for row in plan.filler]
            return HostBatch(leaves, 0, self._here._replace(batch=self._here.batch + 1))
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
            f"{going}. {padding_hint}"
        )
        raise DataError(msg)


class Prefetch:
    """The batches of an iterator, made ahead by a thread.

    The thread holds this object: `stop` has to be called when nobody takes from it any
    more. Two `SimpleQueue`s cost less Python time per batch than a condition, which
    matters where both sides have little else to do.

    Attributes:
        is_done: Set once the thread has nothing more to do.

    Args:
        batches: The iterator. It is closed in the thread that runs it.
        ahead: How many are made ready; 0 makes them when they are asked for.
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
        self._ready.put(_ENDED)  # for other waiting threads
        self._wait()
        if kind != "failed":
            raise StopIteration
        try:
            raise value
        finally:
            del value  # a cycle with its traceback would keep the source's frames

    def stop(self) -> None:
        """Stops making batches, and wakes waiting threads."""
        self._is_stopped = True
        self._free.put(None)
        self._clear()

    def close(self) -> None:
        """Stops the thread, and closes the iterator."""
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
            self.close()
            raise

    def _start(self, batches: BatchIterator) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(batches,), name="meshlayout-data", daemon=True
        )
        _running.add(self)
        self._thread.start()

    def _wait(self) -> None:
        """Waits for the thread to end, but not for a source that blocks it."""
        self._batches = None
        if self._thread is not threading.current_thread():
            self.is_done.wait(_JOIN_S)

    def _clear(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
        self._ready.put(_ENDED)

    def _put(self, kind: str, value: object) -> None:
        self._ready.put((kind, value))
        if self._is_stopped:
            self._clear()

    def _run(self, batches: BatchIterator) -> None:
        """Makes batches while there is room; what the thread runs."""
        end = _ENDED
        try:
            while self._free.get() is None and not self._is_stopped:
                self._put("batch", next(batches))
        except StopIteration:
            pass
        except BaseException as error:  # raised again in the loop
            end = ("failed", error)
        try:
            batches.close()
        except BaseException as error:  # from a `finally` clause of the source
            end = ("failed", error) if end is _ENDED else end
        self._put(*end)
        del end  # a cycle with an exception's traceback would keep the source's frames
        self.is_done.set()


_ENDED: tuple[str, Any] = ("ended", None)

_running: weakref.WeakSet[Prefetch] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stops the threads: one that uses devices while Python ends would crash it."""
    running = list(_running)
    for prefetch in running:
        prefetch.stop()
    for prefetch in running:
        prefetch.is_done.wait(_JOIN_S)
