"""Rows that are read in pieces: by the caller, in threads or in worker processes.

Python's executors do the work, one batch at a time, so that a position in the data
stays a plain number and any batch can be asked for next. Grain's workers were tried
before: they have to know the order of all batches in advance, wait forever for a worker
that exits with status 0, and outside of `absl.app.run` start only after absl's
command-line flags are marked as parsed by hand. If the number of workers is not set, it
is measured on the first batch, which is read several times, much as tf.data's AUTOTUNE
does.
"""

import itertools
import logging
import multiprocessing
import operator
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import (
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
)
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import cloudpickle
import jax
import numpy as np

from meshlayout._annotations import PyTree
from meshlayout.data.clock import Stage
from meshlayout.errors import DataError


Array: TypeAlias = np.ndarray[Any, Any]
WorkerKind: TypeAlias = Literal["auto", "threads", "processes"]

# Pieces of a batch per worker: more than one, since some take longer than others.
_PIECES = 2
# How often a batch is read to measure workers, after a first time to warm up.
_TURNS = 2
# More workers are chosen only if they are faster by this factor: they cost memory.
_GAIN = 1.1
# Starting processes takes seconds, each of which imports JAX: not worth it if a whole
# epoch takes less than this to read.
_WORTH_PROCESSES_S = 20.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TimedRows:
    """Some rows, and the time each stage took, which a worker process sends along.

    Attributes:
        rows: A tree of arrays with one row per example.
        stages: The work of each stage.
    """

    rows: PyTree
    stages: tuple[Stage, ...]


# Takes row indices, the epoch, and any number of trees of arrays with as many rows.
RowFunction: TypeAlias = Callable[..., TimedRows]


class WorkerPool:
    """Calls a function that reads rows, in pieces, in threads or processes."""

    def __init__(
        self,
        function: RowFunction,
        sent: object,
        *,
        num_workers: int | Literal["auto"],
        kind: WorkerKind,
        num_rows: int,
        task: str,
        note: Callable[[str], None],
    ) -> None:
        """Chooses the workers, or leaves it to the first batch; none is started yet.

        Args:
            function: Reads rows.
            sent: The part of it that the user wrote, which must be sendable to worker
                processes.
            num_workers: How many; 0 for the calling thread; `"auto"` measures on the
                first batch.
            kind: Threads or processes; `"auto"` measures both, and means processes if
                the number is given.
            num_rows: Rows of an epoch.
            task: What the workers do, such as "Reading", for notes.
            note: Called with a sentence about the choice.

        Raises:
            DataError: If processes were asked for, and the function cannot be sent to
                them or they cannot import the script.
        """
        self._function, self._sent, self._kind = function, sent, kind
        self._num_rows, self._task, self._note = num_rows, task, note
        self._lock = threading.Lock()
        self._crew: _Crew | None = None
        if num_workers != "auto":
            chosen = "processes" if kind == "auto" else kind
            self._crew = _Crew(function, chosen, num_workers)
            note(f"{task} is done by {self._crew}, as num_workers={num_workers} says.")
        has_processes = kind == "processes" or (
            kind == "auto" and num_workers != "auto"
        )
        if has_processes and num_workers != 0:
            _check_processes(sent)

    def read(
        self, rows: Array, epoch: int, *inputs: PyTree
    ) -> tuple[list[TimedRows], int]:
        """Returns rows in pieces, and the number of workers that read them.

        Args:
            rows: Row indices, at least one.
            epoch: The epoch in which they are read.
            *inputs: Further arguments of the function: trees of arrays with as many
                rows, which are divided among the workers.

        Raises:
            DataError: If a worker process ended.
            Exception: Whatever reading or the user's function raised.
        """
        if len(rows) == 1:  # nothing to split, and too little to measure speed by
            return [self._function(rows, epoch, *inputs)], 1
        # Several iterations may start at once: one measures, and the others wait.
        with self._lock:
            if self._crew is None:
                self._crew = self._measured(rows, epoch, *inputs)
            crew = self._crew
        return crew.read(rows, epoch, *inputs), max(1, crew.count)

    def close(self) -> None:
        """Ends threads and processes; they start again when rows are read."""
        with self._lock:
            if self._crew is not None:
                self._crew.close()

    def _measured(self, rows: Array, *args: Any) -> "_Crew":
        """Returns the fastest workers that are worth starting, and notes why.

        Trials go from cheap to expensive: no workers, threads, processes.
        """
        best = _Crew(self._function, "threads", 0)
        if (_TURNS + 1) * len(rows) > self._num_rows:
            return best  # measuring would take longer than the whole epoch
        best_speed = best.speed(rows, *args)
        trials = [f"{best} {best_speed:,.0f} rows/s"]
        num_cores = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):  # a container may have fewer; not on macOS
            num_cores = len(os.sched_getaffinity(0))
        kinds = ["threads", "processes"] if self._kind == "auto" else [self._kind]
        why_not = ""
        if num_cores == 1:
            kinds, why_not = [], "; there is one core"
        for kind in kinds:
            if kind == "processes" and self._kind == "auto":
                why_not = self._why_no_processes(self._num_rows / best_speed)
                if why_not:
                    break
            trial = _Crew(self._function, kind, num_cores)
            speed = trial.speed(rows, *args)
            trials.append(f"{trial} {speed:,.0f} rows/s")
            if speed > best_speed * _GAIN:
                best, trial, best_speed = trial, best, speed
            trial.close()
        text = (
            f"{self._task} is done by {best}: num_workers='auto' measured "
            f"{', '.join(trials)}{why_not}."
        )
        self._note(text)
        _log.info(text)
        return best

    def _why_no_processes(self, epoch_s: float) -> str:
        if epoch_s < _WORTH_PROCESSES_S:
            return f"; processes were not tried, since an epoch takes {epoch_s:.1f} s"
        try:
            _check_processes(self._sent)
        except DataError as error:
            return f"; processes were not tried, since {error}"[:-1]
        return ""


class _Crew:
    """A number of workers of one kind, which start when rows are read.

    With 0 workers, the calling thread reads.
    """

    def __init__(self, function: RowFunction, kind: str, count: int) -> None:
        self._function, self._kind, self.count = function, kind, count
        self._executor: Executor | None = None
        # Executors do not name their processes. Those that are new since it was made
        # are taken for its own, to find out how one of them has ended.
        self._others: set[Any] = set()
        self._children: set[Any] = set()
        self._lock = threading.Lock()

    def __str__(self) -> str:
        singular = {"threads": "thread", "processes": "process"}[self._kind]
        kind = self._kind if self.count != 1 else singular
        return f"{self.count} {kind}" if self.count else "0 workers"

    def read(self, rows: Array, epoch: int, *inputs: PyTree) -> list[TimedRows]:
        """Returns rows, in pieces."""
        if not self.count:
            return [self._function(rows, epoch, *inputs)]
        executor = self._started()
        function: Callable[..., Any] = self._function
        if self._kind == "processes":  # which were sent the function once
            function = _read_in_worker
        num_pieces = min(len(rows), _PIECES * self.count)
        ends = [len(rows) * piece // num_pieces for piece in range(num_pieces + 1)]
        futures: list[Future[Any]] = []
        try:
            for start, end in itertools.pairwise(ends):
                cut = operator.itemgetter(slice(start, end))
                piece, *rest = jax.tree.map(cut, (rows, *inputs))
                futures.append(executor.submit(function, piece, epoch, *rest))
            # The executor starts its processes when it is given work.
            self._children |= set(multiprocessing.active_children()) - self._others
            results = [future.result() for future in futures]
        except BrokenExecutor as error:
            self.close()
            raise DataError(self._how_it_ended()) from error
        finally:  # after an error, pieces that nobody started need not be read
            for future in futures:
                future.cancel()
        for result in results:
            if isinstance(result, bytes):  # an error; see `_read_in_worker`
                raise pickle.loads(result)
        return results

    def speed(self, rows: Array, *args: Any) -> float:
        """Returns the rows read per second; closes the workers if reading fails."""
        try:
            self.read(rows, *args)
            start = time.perf_counter()
            for _ in range(_TURNS):
                self.read(rows, *args)
            return _TURNS * len(rows) / (time.perf_counter() - start)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends threads, or processes after the pieces that they are reading."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            self._finalizer()

    def _started(self) -> Executor:
        with self._lock:
            if self._executor is None:
                self._others = set(multiprocessing.active_children())
                self._executor = self._new_executor()
                # Workers also end with a dataset that nobody has closed.
                self._finalizer = weakref.finalize(self, _shut_down, self._executor)
            return self._executor

    def _new_executor(self) -> Executor:
        if self._kind == "threads":
            return ThreadPoolExecutor(self.count, thread_name_prefix="meshlayout-read")
        return ProcessPoolExecutor(
            self.count,
            # JAX runs threads, and a forked child may inherit a lock that one of them
            # holds.
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_prepare_worker,
            initargs=(cloudpickle.dumps(self._function),),
        )

    def _how_it_ended(self) -> str:
        """Returns the message about a worker process that has ended."""
        codes = [child.exitcode for child in self._children]
        # When one process dies, the executor ends the others with SIGTERM.
        codes = [code for code in codes if code not in (None, -signal.SIGTERM)]
        how, why = "ended", "What it printed says why"
        if codes:
            how = f"ended with exit code {codes[0]}"
            if codes[0] < 0:
                how = f"was killed by {signal.Signals(-codes[0]).name}"
                why = "Running out of memory is the usual cause: use fewer workers"
        return (
            f"a worker process {how} while it read examples. {why}, or use "
            "num_workers=0, which shows errors where they happen."
        )


def _shut_down(executor: Executor) -> None:
    is_process_pool = isinstance(executor, ProcessPoolExecutor)
    # The garbage collector may call this in the executor's own thread, which cannot
    # wait for itself.
    with suppress(RuntimeError):
        executor.shutdown(wait=is_process_pool, cancel_futures=True)


# Worker processes


def _check_processes(sent: object) -> None:
    """Raises DataError if worker processes cannot run the user's function.

    The script is looked at because a missing main guard would start the whole training
    again in every worker, which Python reports only after it has happened.
    """
    try:
        cloudpickle.dumps(sent)
    except Exception as error:
        msg = (
            "map= and what it uses cannot be sent to worker processes "
            f"({type(error).__name__}: {error}). Create such objects inside of map, or "
            "use worker_kind='threads'."
        )
        raise DataError(msg) from error
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    # In notebooks and interactive sessions there is no file to import again.
    if script is None or not Path(script).is_file():
        return
    if b"__main__" not in Path(script).read_bytes():
        msg = (
            f"every worker process imports {Path(script).name} again, and would run "
            "all of it. Put what it runs under `if __name__ == '__main__':`, or use "
            "worker_kind='threads'."
        )
        raise DataError(msg)


# In a worker process: the function that reads, as "function".
_in_worker: dict[str, RowFunction] = {}


def _prepare_worker(packed: bytes) -> None:
    """Prepares a worker process before it reads anything."""
    # Ctrl-C goes to all processes of a terminal, and is meant for the training process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A user's function that calls JAX must not take the accelerators from it.
    jax.config.update("jax_platforms", "cpu")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _in_worker["function"] = cloudpickle.loads(packed)


def _end_with_parent() -> None:
    """Ends a worker process whose parent was killed: it would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        signal.raise_signal(signal.SIGKILL)


def _read_in_worker(*args: Any) -> TimedRows | bytes:
    """Returns rows; or the error that was raised, pickled.

    Left to the executor, an error class whose constructor takes other arguments than
    its `args` would fail when it is unpickled, and break the whole pool.
    """
    try:
        return _in_worker["function"](*args)
    except BaseException as error:  # the caller handles all of them
        text = "".join(traceback.format_exception(error)).rstrip()
        note = f"In a worker process:\n{text}"
        error.add_note(note)
        # Neither is an error whose pickle does not load sent, nor one that is no
        # Exception: SystemExit would end the training process.
        with suppress(Exception):
            packed = pickle.dumps(error, protocol=5)
            if isinstance(pickle.loads(packed), Exception):
                return packed
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        plain.add_note(note)
        return pickle.dumps(plain, protocol=5)
