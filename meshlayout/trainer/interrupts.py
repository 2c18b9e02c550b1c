"""Ctrl-C at a safe moment: never between the old state's end and the new one's."""

import signal
import threading
from types import FrameType
from typing import Any, Self


# So that a step that hangs in Python can still be interrupted.
_MAX_HELD = 2


class Interrupts:
    """Holds Ctrl-C back inside `with interrupts.held:`, and lets it through elsewhere.

    A step uses up the state that it is given, so that an interrupt between the call and
    the assignment of its result would leave no state at all. The third Ctrl-C in one
    step is not held back. Outside the main thread, where Python sees no signals, and
    where SIGINT is not Python's to handle, it does nothing.
    """

    def __init__(self) -> None:
        self.held = _Held()
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):
                self._before = self.held.handler = before
                signal.signal(signal.SIGINT, self.held.on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


class _Held:
    """A block of code in which a signal is deferred."""

    def __init__(self) -> None:
        self.handler: Any = None
        self._is_holding = False
        self._waiting: list[tuple[int, Any]] = []

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal now, or at the end of the block."""
        if not self._is_holding or len(self._waiting) >= _MAX_HELD:
            self._waiting.clear()
            self.handler(number, frame)
        else:
            self._waiting.append((number, frame))

    def __enter__(self) -> None:
        self._is_holding = True

    def __exit__(self, *exception: object) -> None:
        self._is_holding = False
        if self._waiting:
            first, *_ = self._waiting
            self._waiting.clear()
            self.handler(*first)
