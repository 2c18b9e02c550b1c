"""Which workers read: a number that was fixed, or what the first batches show."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from meshlayout.data.rows import whole
from meshlayout.data.workers import InCaller, Processes, Threads, Workers
from meshlayout.errors import DataError


WorkerKind = Literal["auto", "threads", "processes"]

# Turns of each kind of workers: the first warms up, the others are measured.
_TURNS = 3
# More workers are chosen only where they are faster by this factor.
_GAIN = 1.1
# Reading that takes less than this per epoch does not pay for starting processes.
_WORTH_PROCESSES_S = 20.0

_log = logging.getLogger(__name__)


@dataclass
class _Trial:
    workers: Workers
    turns: int = 0
    rows: int = 0
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        return self.rows / self.seconds if self.seconds else 0.0

    @property
    def text(self) -> str:
        return f"{self.workers.text} {self.speed:,.0f} rows/s"


@dataclass
class _State:
    current: _Trial
    done: list[_Trial] = field(default_factory=list)
    is_settled: bool = False


class Team:
    """Workers that call one function, and the choice of how many.

    Args:
        function: What reads: a pure function, called with one tuple of arguments.
        num_workers: How many; `"auto"` measures the first turns.
        kind: Threads or processes; `"auto"` measures both, and takes processes
            where the number is fixed.
        num_rows: Rows of an epoch.
        what: What they do, as in "reading".
        note: Called with a sentence about the choice.

    Raises:
        DataError: If the number or the kind is none, or the function cannot be sent
            to processes that were asked for.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        num_workers: int | Literal["auto"],
        kind: WorkerKind,
        num_rows: int,
        what: str,
        note: Callable[[str], None],
    ) -> None:
        check_workers(num_workers, kind)
        self._function, self._kind = function, kind
        self._num_rows, self._what, self._note = num_rows, what, note
        self._lock = threading.Lock()
        self._why_no_processes = ""
        if num_workers == "auto":
            self._state = _State(_Trial(InCaller(function)))
            return
        workers: Workers
        if num_workers == 0:
            workers = InCaller(function)
        elif kind == "threads":
            workers = Threads(function, num_workers)
        else:
            workers = Processes(function, num_workers)
        self._state = _State(_Trial(workers), is_settled=True)
        note(f"{what} is done by {workers.text}, as num_workers={num_workers} says.")

    def turn(
        self, indices: np.ndarray[Any, Any], call: Callable[[Any], tuple[Any, ...]]
    ) -> tuple[list[Any], int]:
        """Reads some rows, in as many parts as there are workers.

        Args:
            indices: The rows.
            call: Makes the arguments of one call from the rows of a part.

        Returns:
            The results of the parts, in order, and how many ran at once.
        """
        trial = self._current()
        parts = max(1, min(trial.workers.count, len(indices)))
        start = time.perf_counter()
        calls = [call(part) for part in np.array_split(indices, parts)]
        results = trial.workers.run(calls)
        self._record(trial, len(indices), time.perf_counter() - start)
        return results, parts

    @property
    def is_settled(self) -> bool:
        """Whether the choice is made."""
        return self._state.is_settled

    @property
    def workers(self) -> Workers:
        """The workers that were chosen, or are being measured."""
        return self._state.current.workers

    def settle(self) -> None:
        """Chooses among those that were measured so far."""
        with self._lock:
            state = self._state
            if state.is_settled:
                return
            if not state.done:  # too few rows to measure anything
                self._state = _State(state.current, is_settled=True)
                return
            if state.current not in state.done:
                state.current.workers.close()
            self._choose()

    def close(self) -> None:
        """Ends the workers."""
        with self._lock:
            self._state.current.workers.close()
            for trial in self._state.done:
                trial.workers.close()

    def _current(self) -> _Trial:
        with self._lock:
            state = self._state
            if state.current.workers.is_ready() or not state.done:
                return state.current
            return _fastest(state.done)  # processes are still starting

    def _record(self, trial: _Trial, rows: int, seconds: float) -> None:
        with self._lock:
            if self._state.is_settled or trial is not self._state.current:
                return
            trial.turns += 1
            if trial.turns > 1:
                trial.rows += rows
                trial.seconds += seconds
            if trial.turns >= _TURNS:
                self._state.done.append(trial)
                self._next()

    def _next(self) -> None:
        """Goes on to the next kind of workers, or chooses."""
        workers = self._candidate(len(self._state.done))
        if workers is None:
            self._choose()
        else:
            self._state.current = _Trial(workers)

    def _choose(self) -> None:
        done = self._state.done
        best = _fastest(done)
        for trial in done:
            if trial is not best:
                trial.workers.close()
        self._state = _State(best, is_settled=True)
        text = (
            f"{self._what} is done by {best.workers.text}: num_workers='auto' measured "
            f"{', '.join(trial.text for trial in done)}"
            f"{self._why_no_processes}."
        )
        self._note(text)
        _log.info(text)

    def _candidate(self, number: int) -> Workers | None:
        cores = num_cores()
        if cores == 1:
            self._why_no_processes = "; there is one core"
            return None
        kinds = ["threads", "processes"] if self._kind == "auto" else [self._kind]
        if number > len(kinds):
            return None
        if kinds[number - 1] == "threads":
            return Threads(self._function, cores)
        epoch_s = self._num_rows / _fastest(self._state.done).speed
        if self._kind == "auto" and epoch_s < _WORTH_PROCESSES_S:
            self._why_no_processes = (
                f"; processes were not tried, since an epoch takes {epoch_s:.1f} s"
            )
            return None
        try:
            return Processes(self._function, cores)
        except DataError as error:
            if self._kind != "auto":
                raise
            self._why_no_processes = f"; processes were not tried, since {error}"[:-1]
            return None


def check_workers(num_workers: Any, kind: Any) -> None:
    """Checks the two arguments that say who reads.

    Args:
        num_workers: A number, or `"auto"`.
        kind: `"auto"`, `"threads"` or `"processes"`.

    Raises:
        DataError: If they are something else.
    """
    if num_workers != "auto":
        if isinstance(num_workers, str):
            msg = f"num_workers= is a whole number or 'auto', and got {num_workers!r}."
            raise DataError(msg)
        whole("num_workers", num_workers, at_least=0)
    if kind not in ("auto", "threads", "processes"):
        msg = f"worker_kind= is 'auto', 'threads' or 'processes', and got {kind!r}."
        raise DataError(msg)


def num_cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _fastest(trials: Sequence[_Trial]) -> _Trial:
    """Returns the fastest; of about equal ones the earlier, which needs less."""
    best = trials[0]
    for trial in trials[1:]:
        if trial.speed > best.speed * _GAIN:
            best = trial
    return best
