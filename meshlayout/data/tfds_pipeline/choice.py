"""Who reads: a number that was fixed, or what the first batches show."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from meshlayout.data.rows import whole
from meshlayout.data.tfds_pipeline.chain import (
    CALLER,
    Batches,
    Chain,
    Readers,
    check_sendable,
)
from meshlayout.errors import DataError


WorkerKind = Literal["auto", "threads", "processes"]

# Batches that each kind of readers reads: the first warms up, the others are measured.
_TURNS = 3
# More readers are chosen only where they are faster by this factor.
_GAIN = 1.1
# Reading that takes less than this per epoch does not pay for starting processes.
_WORTH_PROCESSES_S = 20.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Trial:
    readers: Readers
    speed: float

    @property
    def text(self) -> str:
        return f"{self.readers} {self.speed:,.0f} rows/s"


class Choice:
    """Who calls a function, decided once.

    Args:
        function: What reads.
        sent: What of it the user made, which has to reach worker processes.
        num_workers: How many; `"auto"` measures the first batches.
        kind: Threads or processes; `"auto"` measures both, and takes processes where
            the number is fixed.
        num_rows: Rows of an epoch.
        what: What they do, as in "Reading".
        note: Called with a sentence about the choice.

    Raises:
        DataError: If the function cannot be sent to processes that were asked for.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        sent: Any,
        *,
        num_workers: int | Literal["auto"],
        kind: WorkerKind,
        num_rows: int,
        what: str,
        note: Callable[[str], None],
    ) -> None:
        self.function, self._sent, self._kind = function, sent, kind
        self._num_rows, self._what, self._note = num_rows, what, note
        self._lock = threading.Lock()
        self._readers: Readers | None = None
        self._spare: Chain | None = None  # whose processes were started to be measured
        if num_workers == "auto":
            return
        self._readers = CALLER
        if num_workers:
            chosen = "threads" if kind == "threads" else "processes"
            self._readers = Readers(chosen, num_workers)
        if self._readers.kind == "processes":
            check_sendable(sent)
        note(f"{what} is done by {self._readers}, as num_workers={num_workers} says.")

    def readers(self, plan: Batches, place: int, stop: int | None = None) -> Readers:
        """Returns who reads; measures, if need be, on batches that are read again.

        Args:
            plan: Which rows make each batch.
            place: The place of the first batch.
            stop: The place at which the last batch has ended; None for no end.
        """
        with self._lock:
            if self._readers is None:
                self._readers = self._measured(plan, place, stop)
            return self._readers

    def chain(self, plan: Batches, place: int, stop: int | None = None) -> Chain:
        """Returns what reads from a place on.

        Args:
            plan: Which rows make each batch.
            place: The place of the first batch.
            stop: The place at which the last batch has ended; None for no end.
        """
        readers = self.readers(plan, place, stop)
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None:
            if spare.plan is plan and spare.can_go_to(place):
                spare.go_to(place)
                return spare
            spare.close()
        return Chain(self.function, plan, readers, place, stop)

    def close(self) -> None:
        """Ends the processes that were measured and not used."""
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None:
            spare.close()

    def _measured(self, plan: Batches, place: int, stop: int | None) -> Readers:
        if stop is not None and stop - place < _TURNS * plan.step:
            return CALLER  # too few rows to measure anything
        done = [self._trial(CALLER, plan, place, stop)]
        candidates, why_not = self._candidates()
        for readers in candidates:
            if readers.kind == "processes" and self._kind == "auto":
                why_not = self._why_no_processes(done)
                if why_not:
                    break
            done.append(self._trial(readers, plan, place, stop))
        best = _fastest(done)
        if self._spare is not None and best.readers.kind != "processes":
            self._spare.close()
            self._spare = None
        text = (
            f"{self._what} is done by {best.readers}: num_workers='auto' measured "
            f"{', '.join(trial.text for trial in done)}{why_not}."
        )
        self._note(text)
        _log.info(text)
        return best.readers

    def _trial(
        self, readers: Readers, plan: Batches, place: int, stop: int | None
    ) -> _Trial:
        """Measures readers; what they raise is raised when it is read again."""
        chain = Chain(self.function, plan, readers, place, stop)
        try:
            chain.pieces()
            first = chain.place
            start = time.perf_counter()
            for _ in range(_TURNS - 1):
                chain.pieces()
            seconds = time.perf_counter() - start
        except BaseException:
            chain.close()
            raise
        if readers.kind == "processes":
            self._spare = chain
        else:
            chain.close()
        places = range(first, chain.place, plan.step)
        count = sum(len(rows) for at in places for _, rows in plan.rows(at))
        return _Trial(readers, count / seconds)

    def _candidates(self) -> tuple[list[Readers], str]:
        cores = num_cores()
        if cores == 1:
            return [], "; there is one core"
        kinds = ["threads", "processes"] if self._kind == "auto" else [self._kind]
        if kinds == ["processes"]:
            check_sendable(self._sent)
        return [Readers(kind, cores) for kind in kinds], ""

    def _why_no_processes(self, done: Sequence[_Trial]) -> str:
        epoch_s = self._num_rows / _fastest(done).speed
        if epoch_s < _WORTH_PROCESSES_S:
            return f"; processes were not tried, since an epoch takes {epoch_s:.1f} s"
        try:
            check_sendable(self._sent)
        except DataError as error:
            return f"; processes were not tried, since {error}"[:-1]
        return ""


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
