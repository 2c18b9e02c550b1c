"""Rows that are read in pieces: by the caller, in threads or in worker processes.

Python's executors do the work, one batch at a time, so that a place in the data stays
a plain number and any batch can be asked for next. Grain's workers were tried before:
they have to know the order of all batches in advance, wait forever for a worker that
exits with status 0, and outside of `absl.app.run` start only after absl's command-line
flags are marked as parsed by hand. If the number of workers is not set, it is measured
on the first batch, which is read several times, much as tf.data's AUTOTUNE does.
"""

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
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
from typing import Any, Literal, TypeAlias, TypeVar

import cloudpickle
import jax
import numpy as np

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout.errors import DataError


Array: TypeAlias = np.ndarray[Any, Any]
WorkerKind: TypeAlias = Literal["auto", "threads", "processes"]

# Pieces of a batch for each worker: more than one, since some take longer than others.
_PIECES = 2
# A batch is read this often to measure workers, after a first time to warm up.
_TURNS = 2
# More workers are chosen only where they are faster by this factor.
_GAIN = 1.1
# Reading that takes less time per epoch does not pay for starting processes.
_WORTH_PROCESSES_S = 20.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TimedRows:
    """Some rows, and how long each stage took to make them.

    Attributes:
        rows: A tree of arrays with one row per example.
        seconds: By stage.
    """

    rows: PyTree
    seconds: dict[str, float]


# Makes rows of row numbers and the epoch in which they are read.
RowFunction: TypeAlias = Callable[[Array, int], TimedRows]


@dataclass(frozen=True)
class Workforce:
    """Who reads: the calling thread, threads or processes.

    Attributes:
        kind: `"caller"`, `"threads"` or `"processes"`.
        count: How many workers; 0 for the calling thread.
    """

    kind: str
    count: int

    def __str__(self) -> str:
        if self.kind == "caller":
            return "0 workers"
        singular = {"threads": "thread", "processes": "process"}[self.kind]
        return f"{self.count} {singular if self.count == 1 else self.kind}"


_CALLER = Workforce("caller", 0)


class WorkerPool:
    """Calls a function of rows, in pieces, in the workers that were chosen.

    Args:
        function: Reads rows.
        sent: The part of it that the user wrote, which has to reach worker processes.
        num_workers: How many; `"auto"` measures the first batch.
        kind: Threads or processes; `"auto"` measures both, and takes processes where
            the number is fixed.
        num_rows: Rows of an epoch.
        task: What the workers do, as in "Reading".
        note: Called with a sentence about the choice.

    Raises:
        DataError: If processes were asked for, and the function cannot be sent to
            them or the script cannot be imported by them.
    """

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
        self._function, self._sent, self._kind = function, sent, kind
        self._num_rows, self._task, self._note = num_rows, task, note
        self._lock = threading.Lock()
        self._crew: _Crew | None = None
        self._workforce: Workforce | None = None
        if num_workers == "auto":
            if kind == "processes":
                _check_processes(sent)
            return
        self._workforce = _CALLER
        if num_workers:
            chosen = "threads" if kind == "threads" else "processes"
            self._workforce = Workforce(chosen, num_workers)
        if self._workforce.kind == "processes":
            _check_processes(sent)
        note(f"{task} is done by {self._workforce}, as num_workers={num_workers} says.")

    def read(self, rows: Array, epoch: int) -> tuple[Sequence[TimedRows], int]:
        """Returns rows in pieces, and how many workers read them.

        Args:
            rows: Row numbers, at least one.
            epoch: The epoch in which they are read.

        Raises:
            DataError: If a worker process ended.
            Exception: What reading or the user's function raised.
        """
        if len(rows) == 1:  # which cannot be split, and says nothing about speed
            return [self._function(rows, epoch)], 1
        with self._lock:
            if self._workforce is None:
                self._workforce, self._crew = self._measured(rows, epoch)
            if self._crew is None:
                self._crew = _Crew(self._function, self._workforce)
            crew = self._crew
        try:
            return crew.read(rows, epoch), max(1, crew.workforce.count)
        except BrokenExecutor as error:
            self.close()
            raise DataError(crew.how_it_ended()) from error

    def close(self) -> None:
        """Ends threads and processes; they start again when rows are read."""
        with self._lock:
            crew, self._crew = self._crew, None
        if crew is not None:
            crew.close()

    def _measured(self, rows: Array, epoch: int) -> "tuple[Workforce, _Crew | None]":
        if (_TURNS + 1) * len(rows) > self._num_rows:
            return _CALLER, None  # too few rows to measure anything
        candidates, why_not = self._candidates()
        crew = _Crew(self._function, _CALLER)
        best = speed = crew.speed(rows, epoch)
        trials = [f"{_CALLER} {speed:,.0f} rows/s"]
        for workforce in candidates:
            if workforce.kind == "processes" and self._kind == "auto":
                why_not = self._why_no_processes(self._num_rows / best)
                if why_not:
                    break
            trial = _Crew(self._function, workforce)
            try:
                speed = trial.speed(rows, epoch)
            except BrokenExecutor as error:
                raise DataError(trial.how_it_ended()) from error
            trials.append(f"{workforce} {speed:,.0f} rows/s")
            if speed > best * _GAIN:
                crew, trial, best = trial, crew, speed
            trial.close()
        text = (
            f"{self._task} is done by {crew.workforce}: num_workers='auto' measured "
            f"{', '.join(trials)}{why_not}."
        )
        self._note(text)
        _log.info(text)
        return crew.workforce, crew

    def _candidates(self) -> tuple[list[Workforce], str]:
        cores = num_cores()
        if cores == 1:
            return [], "; there is one core"
        kinds = ["threads", "processes"] if self._kind == "auto" else [self._kind]
        return [Workforce(kind, cores) for kind in kinds], ""

    def _why_no_processes(self, epoch_s: float) -> str:
        if epoch_s < _WORTH_PROCESSES_S:
            return f"; processes were not tried, since an epoch takes {epoch_s:.1f} s"
        try:
            _check_processes(self._sent)
        except DataError as error:
            return f"; processes were not tried, since {error}"[:-1]
        return ""


class _Crew:
    """Workers that are running, or the calling thread."""

    def __init__(self, function: RowFunction, workforce: Workforce) -> None:
        self._function, self.workforce = function, workforce
        self._executor: Executor | None = None
        self._others = set(multiprocessing.active_children())
        self._children: set[Any] = set()
        if workforce.kind == "threads":
            self._executor = ThreadPoolExecutor(
                workforce.count, thread_name_prefix="meshlayout-read"
            )
        elif workforce.kind == "processes":
            self._executor = ProcessPoolExecutor(
                workforce.count,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_prepare_worker,
                initargs=(cloudpickle.dumps(function),),
            )
        if self._executor is not None:
            self._finalizer = weakref.finalize(self, _shut_down, self._executor)

    def read(self, rows: Array, epoch: int) -> list[TimedRows]:
        """Returns rows, in pieces."""
        executor = self._executor
        if executor is None:
            return [self._function(rows, epoch)]
        num_pieces = min(len(rows), _PIECES * self.workforce.count)
        pieces = np.array_split(rows, num_pieces)
        if self.workforce.kind == "threads":
            return _results(
                [executor.submit(self._function, piece, epoch) for piece in pieces]
            )
        futures = [executor.submit(_read_in_worker, piece, epoch) for piece in pieces]
        # Processes start with the first pieces.
        self._children |= set(multiprocessing.active_children()) - self._others
        return [_unpacked(result) for result in _results(futures)]

    def speed(self, rows: Array, epoch: int) -> float:
        """Returns how many rows are read in a second; closes if that fails."""
        try:
            self.read(rows, epoch)
            start = time.perf_counter()
            for _ in range(_TURNS):
                self.read(rows, epoch)
            return _TURNS * len(rows) / (time.perf_counter() - start)
        except BaseException:
            self.close()
            raise

    def how_it_ended(self) -> str:
        """Returns the message about a worker process that has ended."""
        codes = [child.exitcode for child in self._children]
        # When one is gone, the executor ends the others with SIGTERM.
        codes = [code for code in codes if code not in (None, -signal.SIGTERM)]
        how, why = "ended", "What it printed says why"
        if codes:
            how = f"ended with exit code {codes[0]}"
            if codes[0] < 0:
                how = f"was killed by {signal.Signals(-codes[0]).name}"
                why = "Memory that ran out is the usual cause: use fewer workers"
        return (
            f"a worker process {how} while it read examples. {why}, or use "
            "num_workers=0, which shows errors where they happen."
        )

    def close(self) -> None:
        """Ends threads, or processes after the pieces that they read."""
        if self._executor is not None:
            self._finalizer()


def check_workers(
    num_workers: object, kind: object
) -> tuple[int | Literal["auto"], WorkerKind]:
    """Returns `num_workers` and `kind`, checked.

    Args:
        num_workers: A number, or `"auto"`.
        kind: `"auto"`, `"threads"` or `"processes"`.

    Raises:
        DataError: If they are something else.
    """
    kinds: tuple[WorkerKind, ...] = ("auto", "threads", "processes")
    checked_kind = _checks.choice("worker_kind", kind, kinds, error=DataError)
    if isinstance(num_workers, str) and num_workers == "auto":
        return "auto", checked_kind
    checked = _checks.count(
        "num_workers",
        num_workers,
        at_least=0,
        error=DataError,
        hint="Or 'auto', which measures.",
    )
    return checked, checked_kind


def num_cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


T = TypeVar("T")


def _results(futures: "list[Future[T]]") -> list[T]:
    """Returns the results of futures; raises the first error and cancels the rest."""
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


def _shut_down(executor: Executor) -> None:
    is_process_pool = isinstance(executor, ProcessPoolExecutor)
    with suppress(RuntimeError):  # a garbage collection in the executor's own thread
        executor.shutdown(wait=is_process_pool, cancel_futures=True)


# Worker processes


def _check_processes(sent: object) -> None:
    """Raises DataError if worker processes cannot run what a user wrote."""
    try:
        cloudpickle.dumps(sent)
    except Exception as error:
        msg = (
            "map= and what it uses cannot be sent to worker processes "
            f"({type(error).__name__}: {error}). Create such objects inside of map, or "
            "use worker_kind='threads'."
        )
        raise DataError(msg) from error
    script = _script_without_guard()
    if script is not None:
        msg = (
            f"every worker process imports {script} again, and would run all of it. "
            "Put what it runs under `if __name__ == '__main__':`, or use "
            "worker_kind='threads'."
        )
        raise DataError(msg)


def _script_without_guard() -> str | None:
    """Returns the running script if nothing in it keeps an import from running it."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    # Notebooks and interactive sessions have no file, and nothing is imported again.
    if path is None or not Path(path).is_file():
        return None
    return None if b"__main__" in Path(path).read_bytes() else Path(path).name


# In a worker process: the function that reads.
_in_worker: dict[str, RowFunction] = {}


def _prepare_worker(packed: bytes) -> None:
    """Runs first in a worker process."""
    # An interrupt from the keyboard is for the process that trains.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Accelerators belong to it, too.
    jax.config.update("jax_platforms", "cpu")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _in_worker["function"] = cloudpickle.loads(packed)


def _end_with_parent() -> None:
    """Ends a worker process whose parent was killed: the executor's would stay."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        signal.raise_signal(signal.SIGKILL)


def _read_in_worker(rows: Array, epoch: int) -> TimedRows | bytes:
    """Returns rows, or the error that was raised, in a form that can be pickled."""
    try:
        return _in_worker["function"](rows, epoch)
    except BaseException as error:  # the caller handles all of them
        return _as_bytes(error)


def _unpacked(result: TimedRows | bytes) -> TimedRows:
    if isinstance(result, bytes):
        raise pickle.loads(result)
    return result


def _as_bytes(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error)).rstrip()
    error.add_note(f"In a worker process:\n{text}")
    try:
        if not isinstance(error, Exception):
            raise TypeError  # SystemExit must not end the process that trains
        packed = pickle.dumps(error, protocol=5)
        pickle.loads(packed)
    except Exception:  # an error class that does not survive being sent
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        plain.add_note(f"In a worker process:\n{text}")
        return pickle.dumps(plain, protocol=5)
    return packed
