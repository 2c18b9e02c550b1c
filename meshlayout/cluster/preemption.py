"""Preemption: a run that gets SIGTERM saves after its step, and ends with status 75.

Schedulers send SIGTERM some seconds before they take a machine away. All processes of a
job must save the same step, and the signal may reach only one of them, at any moment:
so JAX's preemption service chooses the step. A job without it is on its own.
"""

import contextlib
import itertools
import logging
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

import jax

from meshlayout import _jax


logger = logging.getLogger("meshlayout.checkpoint")

EXIT_STATUS = 75  # EX_TEMPFAIL of sysexits.h, "temporary failure; try again"

_turns = itertools.count(1)  # JAX compares it between processes; it must not decrease


class Preempted(SystemExit):
    """A run was asked to end (SIGTERM) and has saved its state: start it again.

    Do not catch it: the process ends with status 75 (`EXIT_STATUS`). `step` was saved.

    Examples:
        >>> Preempted(7).code, Preempted(7).step
        (75, 7)
    """

    def __init__(self, step: int) -> None:
        super().__init__(EXIT_STATUS)
        self.step = step


class Preemption:
    """Finds out after each step whether this run was asked to end by SIGTERM.

    Use this in a loop with its own way of saving; `Checkpointer.save` and `Trainer`
    have it built in. With `jax.distributed`, a SIGTERM to one process counts for all,
    which learn of it at the same step if they ask equally often. The previous handler
    gets a second SIGTERM, and the first one if nothing asks before the block ends.

    Examples:
        >>> import os, signal
        >>> with Preemption() as preemption:
        ...     before = preemption.is_due()
        ...     os.kill(os.getpid(), signal.SIGTERM)
        ...     before, preemption.is_due()
        (False, True)
    """

    def __init__(self) -> None:
        self._is_signaled = self._is_reported = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        if _jax.coordination.preemption_sync_manager is not None:
            return self
        is_main = threading.current_thread() is threading.main_thread()
        is_known = signal.getsignal(signal.SIGTERM) is not None
        if jax.process_count() > 1 or not (is_main and is_known):
            logger.warning(
                "this run will not be saved on SIGTERM: Python handles it only in the "
                "main thread; several processes need jax_enable_preemption_service."
            )
        else:
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def is_due(self) -> bool:
        """Returns whether to save and end now; call it once after each step."""
        if _jax.coordination.preemption_sync_manager is not None:
            self._is_signaled |= _jax.reached_preemption_sync_point(next(_turns))
        self._is_reported = self._is_signaled
        return self._is_signaled

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
        # Nobody asked after the signal: the process must not outlive it.
        if self._is_signaled and not self._is_reported and error is None:
            os.kill(os.getpid(), signal.SIGTERM)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_signaled:  # again: somebody does not want to wait for the save
            signal.signal(number, self._previous)
            os.kill(os.getpid(), number)
        self._is_signaled = True


@contextlib.contextmanager
def interrupts_later(*, patience: int) -> Iterator[None]:
    """Delays Ctrl-C until the block ends; after `patience` of them, raises at once."""
    handler, caught = signal.getsignal(signal.SIGINT), list[FrameType | None]()
    is_main = threading.current_thread() is threading.main_thread()
    if not (is_main and callable(handler)):
        yield
        return

    def later(number: int, frame: FrameType | None) -> None:
        caught.append(frame)
        if len(caught) > patience:
            handler(number, frame)

    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if 0 < len(caught) <= patience:
            handler(signal.SIGINT, caught[0])
