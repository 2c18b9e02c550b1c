"""What tells the other processes of a crash: hooks for exceptions and for SIGABRT.

Python's own hook for exceptions posts the failure before the process ends, because JAX
would wait minutes at exit for the others, which wait in a collective for this one.

JAX ends a process by `abort()` in a thread of C++ as soon as process 0 is gone, and no
Python code can prevent or catch that. A signal handler in C can still run: ctypes makes
one of a Python function, which takes Python's lock like any callback. `signal.signal`
would not do: Python runs its handlers in the main thread, which may be in a collective.
jax 0.7 leaves by `_exit`, which nothing can catch, after a message that says only that
"the leader task" died. tests/test_cluster_faults.py notices if JAX ends otherwise.
"""

import ctypes
import os
import re
import signal
import sys
import threading
import traceback
from types import TracebackType
from typing import NoReturn, Protocol

from meshlayout.cluster.failure import OtherProcessError
from meshlayout.errors import ClusterError


# What JAX says, in exceptions of several classes, because another process is gone.
_ECHO = re.compile(
    r"^(UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED)\b|\b(Gloo|NCCL)\b"
    r"|[Cc]onnection (closed|reset|refused)|[Ss]ocket closed|coordination service"
)

_ECHOES = (OtherProcessError, ClusterError, TimeoutError, ConnectionError)


class Watcher(Protocol):
    """What is told of crashes; see `Watch`."""

    def fail(self, text: str) -> None:
        """This process has failed, and ends."""

    def interrupt(self) -> None:
        """This process was interrupted, and ends."""

    def exiting(self, status: int) -> None:
        """The program calls `sys.exit`, and will end unless somebody catches that."""

    def note(self, text: str) -> None:
        """Something that may explain a later failure."""

    def wait_for_failure(self, *, is_own: bool = False) -> None:
        """Waits for the failure of another process, which ends this one.

        Args:
            is_own: Whether the error is probably this process's own.
        """

    def abort(self) -> None:
        """This process is being aborted; returns if that is its own failure."""


class CrashHooks:
    """The hooks of one process, which do nothing in a process forked from it.

    Args:
        watcher: What is told.
    """

    def __init__(self, watcher: Watcher) -> None:
        self._watcher, self._pid = watcher, os.getpid()
        self._excepthook, self._thread_hook = sys.excepthook, threading.excepthook
        self._sys_exit = sys.exit
        # Kept alive: C calls it.
        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._on_abort)
        self._libc = ctypes.CDLL(None)
        self._libc.signal.restype = ctypes.c_void_p
        self._libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        self._previous: int | None = None

    def install(self) -> None:
        """Installs the hooks; those that are there are called as well."""
        sys.excepthook, threading.excepthook = self._on_exception, self._on_thread_error
        # Python calls no hook for SystemExit, and exit handlers cannot see its status.
        sys.exit = self._on_sys_exit
        handler = ctypes.cast(self._handler, ctypes.c_void_p)
        self._previous = self._libc.signal(signal.SIGABRT, handler)

    def remove(self) -> None:
        """Puts back what was there before, unless somebody else has come after."""
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook
        if threading.excepthook == self._on_thread_error:
            threading.excepthook = self._thread_hook
        if sys.exit == self._on_sys_exit:
            sys.exit = self._sys_exit
        self._libc.signal(signal.SIGABRT, self._previous)

    def _on_exception(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        self._excepthook(kind, error, trace)
        # In an interactive session the process goes on.
        is_interactive = hasattr(sys, "ps1") or sys.flags.interactive
        if is_interactive or os.getpid() != self._pid:
            return
        if isinstance(error, KeyboardInterrupt):
            self._watcher.interrupt()
            return
        if is_echo(error):
            # JAX raises others: this comes of a socket of the program's own, mostly.
            is_own = isinstance(error, ConnectionError | TimeoutError)
            self._watcher.wait_for_failure(is_own=is_own)
        self._watcher.fail(f"failed: {summary(error)}.")

    def _on_sys_exit(self, status: str | int | None = None, /) -> NoReturn:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and os.getpid() == self._pid and status:
            # As Python does: a text is printed, and is status 1.
            self._watcher.exiting(status & 0xFF if isinstance(status, int) else 1)
        self._sys_exit(status)

    def _on_thread_error(self, args: threading.ExceptHookArgs) -> None:
        self._thread_hook(args)
        if os.getpid() == self._pid and args.exc_value is not None:
            name = args.thread.name if args.thread is not None else "unknown"
            self._watcher.note(
                f"its thread {name!r} had failed: {summary(args.exc_value)}"
            )

    def _on_abort(self, _number: int) -> None:
        if os.getpid() == self._pid:
            self._watcher.abort()
        # Die of it, by whatever handled it before: the default, or faulthandler.
        self._libc.signal(signal.SIGABRT, self._previous)
        os.kill(os.getpid(), signal.SIGABRT)


def is_echo(error: BaseException) -> bool:
    """Returns whether an error may only say that another process is gone."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, _ECHOES):
            return True
        if _ECHO.search(str(chain)):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def summary(error: BaseException) -> str:
    """Returns an error as a line, and the line of the program that raised it."""
    lines = traceback.format_exception_only(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{''.join(lines).strip()}{where}"
