"""One iteration over a dataset: `DataIterator`, and the thread that works ahead of it.

A daemon thread fills a bounded queue. A thread of `concurrent.futures` will not do, as
Python waits for those at exit, forever if a source blocks. A daemon thread that is in
JAX or other C++ code while Python exits crashes the process, so they are closed at
exit, which waits a moment for all. A thread refers to the `_Prefetcher` alone, never to
the user's `DataIterator`: when a loop is left without closing and that is dropped, its
finalizer closes the thread.
"""

import atexit
import contextlib
import dataclasses
import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator
from typing import Any, Self

import numpy as np

from meshlayout import _checks
from meshlayout._annotations import Batch
from meshlayout.data.agreement import Turns
from meshlayout.data.by_row import HostBatch
from meshlayout.data.examples import rows_text
from meshlayout.data.plan import DataPlan
from meshlayout.data.position import Position, from_state, to_state
from meshlayout.data.protocols import JSON
from meshlayout.errors import DataError


# How long closing waits for a thread. One inside the user's source cannot be stopped;
# it ends when the source returns.
_CLOSE_S = 1.0


class DataIterator(_checks.WithReflexes):
    """The batches of one iteration over a `DistributedDataset`.

    Reading starts when the first batch is taken. `close`, the end of a `with` block,
    and leaving the loop stop the background thread.
    """

    def __init__(
        self, plan: DataPlan, position: Position, record: Callable[[Position], None]
    ) -> None:
        # `record` is a method of the dataset, which it keeps alive for the user who
        # holds only the iterator: a dataset that is collected closes its source.
        self._plan, self._position, self._record = plan, position, record
        self._batches: _Prefetcher | None = None
        self._is_over = False

    def __iter__(self) -> Self:
        return self

    @_checks.user_call
    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        start_s = time.perf_counter()
        if self._batches is None:
            self._batches = _Prefetcher(self._plan, self._position)
            self._close_later = weakref.finalize(self, self._batches.close)
            self._close_later.atexit = False  # `_close_all` does
        try:
            batch, self._position = next(self._batches)
        except BaseException as error:
            # After Ctrl-C, the batches that are ready come next.
            self._is_over = not isinstance(error, KeyboardInterrupt)
            if self._is_over or not self._plan.options.prefetch:
                self._stop()
            raise
        self._plan.clock.waited_s += time.perf_counter() - start_s
        self._plan.clock.batches += 1
        self._record(self._position)
        return batch

    def get_state(self) -> dict[str, JSON]:
        """Returns the position after the last batch, as a JSON-serializable dict.

        Use this to resume in the middle of an epoch; a `Checkpointer` saves it with the
        state. Batches that were prefetched but not taken do not count.

        Examples:
            >>> import json, numpy as np, meshlayout as ml
            >>> mesh = ml.create_mesh({"batch": 8})
            >>> data = ml.distribute_dataset(np.arange(32), mesh, global_batch_size=8)
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
            skip: Whether to read a source that cannot seek from the start of the epoch,
                dropping the rows before the position.

        Raises:
            DataError: If the state is of another dataset, or the source cannot seek.
        """
        position = from_state(self._plan.identity, state)
        can_seek = position.row == 0 or position.source is not None
        if self._plan.is_stream and not can_seek and not skip:
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
        """Stops reading, and drops prefetched batches; the iteration is over."""
        self._is_over = True
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stop(self) -> None:
        batches, self._batches = self._batches, None
        if batches is not None:
            self._close_later.detach()
            batches.close()


class _Prefetcher:
    """Makes batches ahead in a thread, or on demand with `prefetch=0`.

    Permits limit the batches made ahead. With a bounded queue, the thread would make
    one more, and wait to put it there.
    """

    def __init__(self, plan: DataPlan, position: Position) -> None:
        self._plan, self._is_stopped = plan, False
        self._batches = _host_batches(plan, position)
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._permits = threading.Semaphore(plan.options.prefetch)
        self._thread: threading.Thread | None = None
        if plan.options.prefetch:
            name = "meshlayout-data"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        _open.add(self)

    def __next__(self) -> tuple[Batch, Position]:
        if self._thread is None:
            return self._made()
        result = self._ready.get()
        if isinstance(result, BaseException):
            raise result
        self._permits.release()
        return result

    def close(self, wait_s: float = _CLOSE_S) -> None:
        """Ends the thread once it leaves the source, and drops what is ready."""
        _open.discard(self)
        # In this order: once woken by a permit, the thread has to see the flag.
        self._is_stopped = True
        self._permits.release()
        ready, self._ready = self._ready, queue.SimpleQueue()
        ready.put(StopIteration())  # for a loop that waits in another thread
        if self._thread is None:
            self._batches.close()
        elif self._thread is not threading.current_thread():  # as a finalizer may be
            self._thread.join(wait_s)

    def _made(self) -> tuple[Batch, Position]:
        batch = next(self._batches)
        if self._is_stopped:  # JAX is not called once the program ends
            raise StopIteration
        return self._plan.placed(batch), batch.after

    def _run(self) -> None:
        end: BaseException = StopIteration()
        try:
            with contextlib.closing(self._batches):
                while self._permits.acquire() and not self._is_stopped:
                    self._ready.put(self._made())
        except BaseException as error:  # raised again in the user's loop
            end = error
        self._ready.put(end)


_open: weakref.WeakSet[_Prefetcher] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Closes all open threads, in the time that closing one may take."""
    prefetchers, end_s = list(_open), time.monotonic() + _CLOSE_S
    for prefetcher in prefetchers:
        prefetcher.close(0.0)
    for prefetcher in prefetchers:
        prefetcher.close(max(0.0, end_s - time.monotonic()))


def _host_batches(
    plan: DataPlan, position: Position
) -> Generator[HostBatch, None, None]:
    """Yields the batches after a position, which all processes have."""
    options, reader = plan.options, plan.new_reader()
    turns = plan.agreement.new_turns() if plan.agreement and plan.is_stream else None
    # An iteration that started in an epoch's middle ends at the same row.
    last_row = position.first_row if options.remainder == "repeat" else 0
    last = position.first_epoch + (options.epochs or 0), last_row
    with contextlib.closing(reader), turns or contextlib.nullcontext():
        while options.epochs is None or (position.epoch, position.row) < last:
            start_s = time.perf_counter()
            batch = reader.read(position)
            plan.clock.read_s += time.perf_counter() - start_s
            if batch is not None:
                plan.check_padding(batch.count, plan.size)
            if turns is not None:
                batch = _agreed(plan, turns, position, batch)
            if batch is not None:
                position = batch.after
                yield batch
            else:
                position = position._replace(
                    epoch=position.epoch + 1, batch=0, row=0, source=None, offset=0
                )


def _agreed(
    plan: DataPlan, turns: Turns, position: Position, batch: HostBatch | None
) -> HostBatch | None:
    """Returns the next batch, or None at the epoch's end, on all processes."""
    remainder, where = plan.options.remainder, f"epoch {position.epoch + 1}"
    if not plan.options.per_process:
        rows = "no rows" if batch is None else rows_text(batch.count)
        turns.take(None, f"{rows} in batch {position.batch + 1} of {where}")
        return batch
    if batch is None and remainder == "repeat":
        return None  # the next epoch has this step's batch
    rows = None if batch is None else batch.count / plan.num_replicas
    answers = turns.take(rows, f"batch {position.batch + 1} of {where}")
    ended = [process for process, answer in answers.items() if answer is None]
    if ended and (remainder == "drop" or len(ended) == len(answers)):
        return None
    if ended and not plan.has_weights:
        fact = (
            f"the source of process {ended[0]} has fewer batches than that of another"
        )
        raise DataError(f"{fact} process. {plan.padding_hint}")
    if batch is None:
        leaves = [np.repeat(row, len(plan.own), axis=0) for row in plan.filler]
        batch = HostBatch(leaves, 0, position._replace(batch=position.batch + 1))
    return dataclasses.replace(batch, parts=frozenset(answers.values()))
