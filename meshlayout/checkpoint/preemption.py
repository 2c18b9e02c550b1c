"""Preemption: a run that is told to end saves at the next step, and says so."""

import itertools
import logging
import os
import signal
import threading
from types import TracebackType
from typing import Any, Self

import jax

from meshlayout import _jax


logger = logging.getLogger("meshlayout.checkpoint")

# EX_TEMPFAIL of sysexits.h, "temporary failure; try again": neither Python (1, 2) nor
# shells (126 to 165, for signals too) end a process with it, so that a scheduler can
# tell a run that is to be started again from one that failed.
EXIT_STATUS = 75

# JAX compares what processes say; one count for all loops of a process never goes back.
_turns = itertools.count(1)


class Preempted(SystemExit):
    """A run was told to end (SIGTERM), and its state is saved: start it again.

    Nobody has to catch it: the process ends with status 75 (`EXIT_STATUS`).

    Args:
        step: The step that is saved.

    Attributes:
        step: The step that is saved.

    Example:
        >>> Preempted(7).code, Preempted(7).step
        (75, 7)
    """

    def __init__(self, step: int) -> None:
        super().__init__(EXIT_STATUS)
        self.step = step


class Preemption:
    """Tells at each step whether this run was told to end, by SIGTERM.

    With `jax.distributed`, its preemption service looks out for the signal, a SIGTERM
    to one process counts for all, and all are told at the same step, some tenths of a
    second later; they have to ask equally often. A run without it handles the signal
    itself inside the `with` block, in the main thread; a second SIGTERM does what it
    did before. If the first came and nobody asked any more, it does that at the end of
    the block.

    Example:
        >>> import os, signal
        >>> with Preemption() as preemption:
        ...     before = preemption.is_due()
        ...     os.kill(os.getpid(), signal.SIGTERM)
        ...     before, preemption.is_due()
        (False, True)
    """

    def __init__(self) -> None:
        self._is_told = self._is_known = self._is_handling = False
        self._before: Any = None

    def __enter__(self) -> Self:
        if _jax.has_preemption_service():
            return self
        before = signal.getsignal(signal.SIGTERM)
        problem = _why_not(before)
        if problem:
            logger.warning("SIGTERM will not save this run: %s", problem)
            return self
        self._before, self._is_handling = before, True
        signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def is_due(self) -> bool:
        """Tells whether to save and end now; to be asked once after each step.

        Once it is due it stays so.
        """
        if _jax.has_preemption_service():
            reached = _jax.reached_preemption_sync_point(next(_turns))
            self._is_told = self._is_told or reached
        self._is_known = self._is_told
        return self._is_told

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._put_back()
        if self._is_told and not self._is_known and error is None:
            os.kill(os.getpid(), signal.SIGTERM)

    def _put_back(self) -> None:
        if self._is_handling:
            self._is_handling = False
            signal.signal(signal.SIGTERM, self._before)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._is_told:
            self._put_back()
            os.kill(os.getpid(), number)
        self._is_told = True


def _why_not(before: Any) -> str:
    """Returns why SIGTERM cannot be handled here; empty if it can."""
    if jax.process_count() > 1:
        return "jax_enable_preemption_service is off, so that processes cannot agree."
    if threading.current_thread() is not threading.main_thread():
        return "Python handles signals in the main thread only."
    return "it is handled outside Python." if before is None else ""
