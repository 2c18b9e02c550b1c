"""Closures that wait for a worker, and what became of them."""

import threading
from collections import deque
from collections.abc import Callable

from meshlayout.distribute.parameter_server.closures import Packed
from meshlayout.distribute.parameter_server.results import RemoteValue
from meshlayout.errors import StrategyError


class Closure:
    """A scheduled function.

    Args:
        number: Its number, which servers remember.
        packed: The function and its arguments.

    Attributes:
        result: Where its result will be.
        num_lost: How many workers died while they ran it.
    """

    def __init__(self, number: int, packed: Packed) -> None:
        self.number = number
        self.packed = packed
        self.result = RemoteValue(packed.name)
        self.num_lost = 0


class ClosureQueue:
    """Closures in the order in which they were scheduled, for several threads.

    An exception of one cancels those that wait, and is raised once, when somebody asks.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Closure] = deque()
        self._num_running = 0
        self._error: BaseException | None = None
        self._reason = ""
        self._fatal: BaseException | None = None
        self._is_closed = False

    def put(self, closure: Closure) -> None:
        """Appends a closure; after an exception that nobody has seen, cancels it.

        Raises:
            Exception: If nothing can be run any more.
        """
        with self._changed:
            if self._fatal is not None:
                raise self._fatal
            self._waiting.append(closure)
            if self._error is not None:
                self._cancel(self._reason)
            self._changed.notify_all()

    def put_first(self, *closures: Closure) -> None:
        """Adds closures that are to be run again, before all others."""
        with self._changed:
            self._waiting.extendleft(reversed(closures))
            if self._fatal is not None:
                self._cancel(str(self._fatal))
            self._changed.notify_all()

    def take(self) -> Closure | None:
        """Waits for a closure, and returns it; None at the end."""
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            self._num_running += 1
            return self._waiting.popleft()

    def release(self) -> None:
        """Says that what was taken is no longer run: it is done, or put back."""
        with self._changed:
            self._num_running -= 1
            self._changed.notify_all()

    def fail(self, closure: Closure, error: BaseException) -> None:
        """Notes an exception, and cancels all closures that wait."""
        closure.result._set(error=error)
        with self._changed:
            if self._error is None:
                self._error = error
                self._reason = f"{closure.packed.name} raised {type(error).__name__}."
            self._cancel(self._reason)

    def fail_for_good(self, error: BaseException) -> None:
        """Notes that nothing can be run any more."""
        with self._changed:
            self._fatal = self._fatal or error
            self._cancel(str(error))
            self._changed.notify_all()

    def _cancel(self, reason: str) -> None:
        while self._waiting:
            waiting = self._waiting.popleft()
            msg = f"{waiting.packed.name} was cancelled, because {reason}"
            waiting.result._set(error=StrategyError(msg))

    def is_idle(self) -> bool:
        """Returns whether all closures have finished.

        Raises:
            Exception: The exception of a closure.
        """
        with self._changed:
            idle = not self._waiting and not self._num_running
            if idle:
                self._raise_error()
            return idle

    def wait(self, *, until: Callable[[], None] = lambda: None) -> None:
        """Waits until all closures have finished.

        Args:
            until: Called then, before an exception is raised; it may add closures.

        Raises:
            Exception: The exception of a closure.
        """
        while True:
            with self._changed:
                while self._waiting or self._num_running:
                    self._changed.wait(0.5)
                if self._fatal is not None:
                    raise self._fatal
            until()
            with self._changed:
                if not self._waiting and not self._num_running:
                    self._raise_error()
                    return

    def close(self) -> None:
        """Ends the threads that take closures."""
        with self._changed:
            self._is_closed = True
            self.fail_for_good(StrategyError("the coordinator was shut down."))

    def _raise_error(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        error, self._error = self._error, None
        if error is not None:
            raise error
