"""Ends all processes of a run when one of them fails, and says which one it was.

JAX knows who is alive: its heartbeats come from threads of C++, so that a process that
holds Python's lock for minutes is not lost. `jax_enable_recoverability` leaves the rest
to us. One thread asks JAX who is alive, which is answered once all that are have asked;
another one reads what the processes write into the key-value store: "failure" (the
first one counts) and "ended", so that a program that has come to its end is not lost.
The end is `os._exit` after the message, as the main thread may be inside a collective.
Process 0 holds the store, and leaves last.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import json
import math
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax

from meshlayout import _jax
from meshlayout._counts import counts


_REPORT = "MESHLAYOUT_LAUNCHER_REPORT"  # where `meshlayout.launch` reads who failed
_ROOT = "meshlayout/watch/"
_PAUSE_S = 0.5
_NO_DEVICES = -1  # instead of a number of steps
_NOBODY = -1  # instead of a process
_LINGER_S = 3.0  # for the others to read why; most do within two pauses
_CLEANUP_S = 5.0  # for the exit handlers of a program that has failed

# What JAX and `Channel.failure` say because another process is gone.
_ECHO = re.compile(
    r"^(UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED)\b|\b(Gloo|NCCL)\b"
    r"|[Cc]onnection (closed|reset|refused)|[Ss]ocket closed|coordination service"
    r"|has ended its program"
)


class PeerError(Exception):
    """The cause of an error for which another process, its argument, is to blame."""


class _Failure(NamedTuple):
    """Which process failed, how, and the exit status of those that end for it."""

    process: int
    text: str
    status: int = 1


_watch: "Watch | None" = None


def end_of(process: int) -> str:
    """Returns that the program of a process has ended; empty if it has not."""
    watch = _watch
    if watch is None or process not in watch.ended:
        return ""
    return f"{watch.names[process]} has ended its program"


def delay_abort() -> None:
    """Makes `abort` wait for 6 s; all but process 0 call this before they connect.

    When process 0 is gone, JAX aborts at once. C's own `sleep` as the handler, which
    gets the number of the signal, leaves time to say so. (faulthandler has its own.)
    """
    if not faulthandler.is_enabled():
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


class Watch:
    """The watch that one process keeps over all, once JAX's service has started.

    `ended` has the steps that the processes had begun whose programs have ended.
    """

    def __init__(
        self, names: Sequence[str], heartbeat_s: float, step_timeout_s: float | None
    ) -> None:
        global _watch
        state, _watch = _jax.coordination_state(), self
        counts.steps = counts.others = counts.meetings = 0
        self._client, self._index = state.client, state.process_id
        self.names, self._name, self._pid = names, names[self._index], os.getpid()
        self._pause_s = max(_PAUSE_S, len(names) / 500)  # process 0 answers all
        self._heartbeat_s, self._step_timeout_s = heartbeat_s, step_timeout_s
        self._moves, self._moved_s = dict[int, int](), time.monotonic()
        self._live, self.ended = {*range(len(names))}, dict[int, int]()
        self._failure: _Failure | None = None
        self._entries: dict[str, str] | None = None
        self._failed_s, self._is_leaving, self._has_devices = 0.0, False, False
        self._is_over, self._ending = threading.Event(), threading.Lock()
        self._hook, sys.excepthook = sys.excepthook, self._on_exception
        # For whoever calls jax.distributed.shutdown, JAX's own exit handler included.
        self._shutdown, state.shutdown = state.shutdown, self.leave
        atexit.register(self._note_devices)  # before JAX's handler, which ends them
        targets = {"meshlayout-read": self._read, "meshlayout-ask": self._ask}
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in targets.items()
        ]
        for thread in self._threads:
            thread.start()

    def leave(self) -> None:
        """Ends `jax.distributed` here; process 0 first waits for all others."""
        global _watch
        if os.getpid() != self._pid:  # forked from this process
            return
        error = sys.exception()  # in `finally: ml.shutdown()`, it is on its way
        if isinstance(error, Exception) and self._failure is None:
            self._failure = self._post(self._failure_of(error))
        if self._failure is None:
            self._note_devices()
            # Without its devices, no other process can start its own.
            steps = counts.steps + counts.others if self._has_devices else _NO_DEVICES
            self._set(f"ended/{self._index}", steps)
            try:
                if self._index == 0:  # `_read` finds one that leaves without "ended"
                    _wait_while(lambda: bool(self._others()) and self._failure is None)
                self._linger(self._heartbeat_s)
            except KeyboardInterrupt as interrupt:
                self._end(self._post(self._failure_of(interrupt)))
        if self._failure is not None:
            self._linger(_LINGER_S)
        _jax.coordination_state().shutdown = self._shutdown
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._hook
        self._is_leaving = True
        self._shutdown()
        self._is_over.set()
        for thread in self._threads:  # Python must not end while they are in C++
            thread.join(self._heartbeat_s)
        _watch = None

    def _note_devices(self) -> None:
        self._has_devices |= _jax.has_backend()

    def _others(self) -> set[int]:
        """Returns the other processes whose programs have not ended."""
        return {*range(len(self.names))} - {self._index, *self.ended}

    def _linger(self, limit_s: float) -> None:
        """Waits, on process 0, until all others have left its store."""
        _wait_while(lambda: self._index == 0 and bool(self._live - {0}), limit_s)

    def _on_exception(self, kind: Any, error: BaseException, trace: Any) -> None:
        if self._ending.locked():  # the message is out, and this follows from it
            self._ending.acquire()
        self._hook(kind, error, trace)
        is_interactive = hasattr(sys, "ps1") or sys.flags.interactive
        if is_interactive or os.getpid() != self._pid:
            return
        failure = self._post(self._failure_of(error))
        if failure.process != self._index:
            self._end(failure)
        self._failed_s, self._failure = time.monotonic(), failure

    def _failure_of(self, error: BaseException) -> _Failure:
        """Returns the failure that an exception means, perhaps of another process."""
        if isinstance(error, KeyboardInterrupt):
            text = f"{self._name} was interrupted (Ctrl-C)."
            return _Failure(self._index, text, 128 + signal.SIGINT)
        chain, cause = list[BaseException](), error
        while cause is not None:
            chain.append(cause)
            cause = cause.__cause__ or cause.__context__
        for link in chain:
            if isinstance(link, PeerError):
                return _Failure(link.args[0], str(error))
        is_own = isinstance(error, OSError)  # of a socket of the program
        if not is_own and any(_ECHO.search(str(link)) for link in chain):
            # Another process is the cause; if it is lost, `_read` ends this one.
            _wait_while(lambda: not self.ended, self._heartbeat_s + 3)
            for process in self.ended:
                text = f"{end_of(process)}, and {self._name} needs it: {error}"
                return _Failure(process, text)
        place = ""
        for frame in traceback.extract_tb(error.__traceback__)[-1:]:
            place = f" ({frame.filename}, line {frame.lineno})"
        text = f"{self._name} failed: {type(error).__name__}: {error}{place}"
        return _Failure(self._index, text)

    # The threads.

    def _ask(self) -> None:
        """Asks JAX who is alive; JAX answers when all that are have asked."""
        while not self._is_over.wait(self._pause_s):
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # `_read` has it, too
                processes = [*range(len(self.names))]
                self._live = {*self._client.get_live_nodes(processes)}

    def _read(self) -> None:
        """Reads what the others have written, and judges."""
        answered_s = time.monotonic()
        while not self._is_over.wait(self._pause_s):
            live = self._live  # before what is read: "ended" is written before it
            self._entries = None
            # This has no time-out, and waits forever for a process 0 that is gone.
            _in_time(self._get_entries, 1.0)
            if self._entries is not None:
                answered_s = time.monotonic()
                self._judge(self._entries, live)
            elif self._index and not self._is_over.is_set():
                self._judge_first(time.monotonic() - answered_s)

    def _get_entries(self) -> None:
        entries = self._client.key_value_dir_get(_ROOT)
        self._entries = {k.removeprefix(_ROOT): text for k, text in entries}

    def _judge_first(self, silent_s: float) -> None:
        """Judges process 0, whose store has not answered."""
        why = f"has not answered for {silent_s:.0f} s, so it was stopped or cut off"
        host, _, port = _jax.coordination_state().coordinator_address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), 1.0).close()
        except OSError:
            why = "was killed, or its host is gone"
            # It may have ended well, just after this process has left the store.
            silent_s = 2 * silent_s if self._is_leaving else self._heartbeat_s
        if silent_s >= self._heartbeat_s:
            text = f"{self.names[0]} is lost: it {why}."
            self._end(self._failure or _Failure(0, text))

    def _judge(self, entries: dict[str, str], live: set[int]) -> None:
        numbers: dict[str, dict[int, int]] = {"moves": {}, "ended": {}}
        for kind, _, process in (key.partition("/") for key in entries if "/" in key):
            numbers[kind][int(process)] = int(entries[f"{kind}/{process}"])
        self.ended |= numbers["ended"]
        if "failure" in entries:
            failure = _Failure(*json.loads(entries["failure"]))
            is_own = failure.process == self._index
            if self._failure is None and is_own:
                self._failed_s, self._failure = time.monotonic(), failure
            # The exit handlers of one that has failed may still do their work.
            if not is_own or time.monotonic() > self._failed_s + _CLEANUP_S:
                self._end(failure)
            return
        for process in sorted(self._others() - live):
            text = f"{self.names[process]} is lost: it was killed, stopped or cut off,"
            self._end(self._post(_Failure(process, f"{text} or left by os._exit.")))
        own = counts.steps + counts.others
        for process, steps in self.ended.items():
            is_starting = steps == _NO_DEVICES and _jax.is_starting_devices()
            is_ahead = own > max(steps, 0)
            if (is_ahead or is_starting) and self._index not in self.ended:
                where = f"in step or save {own}" if is_ahead else "starting devices"
                text = f"{end_of(process)}, and {self._name} is {where}, which "
                self._end(self._post(_Failure(process, f"{text}needs it.")))
        if self._step_timeout_s is not None:
            self._judge_moves(numbers["moves"], self._step_timeout_s)

    def _judge_moves(self, moves: dict[int, int], limit_s: float) -> None:
        """Ends all if none has begun a step or a meeting for too long."""
        own = counts.steps + counts.others + counts.meetings
        self._set(f"moves/{self._index}", own)
        if moves != self._moves or self.ended:
            self._moves, self._moved_s = moves, time.monotonic()
        elif time.monotonic() > self._moved_s + limit_s:
            last, most = min(moves, key=moves.__getitem__), max(moves.values())
            where = f"{self.names[last]} is behind, in number {moves[last]} of {most}."
            if moves[last] == most:
                where = f"no process is behind another, all are in number {most}."
                last = _NOBODY
            text = f"no step or meeting has begun for {limit_s:g} s (step_timeout_s): "
            self._end(self._post(_Failure(last, text + where)))

    # What these stand on.

    def _set(self, key: str, value: int) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            key = f"{_ROOT}{key}"
            self._client.key_value_set(key, str(value), allow_overwrite=True)

    def _post(self, failure: _Failure) -> _Failure:
        """Posts a failure; returns the one that was posted first, for all to name."""
        key = f"{_ROOT}failure"
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            try:
                self._client.key_value_set(key, json.dumps(failure))
            except jax.errors.JaxRuntimeError:
                text = self._client.blocking_key_value_get(key, 1000)
                return _Failure(*json.loads(text))
        return failure

    def _end(self, failure: _Failure) -> NoReturn:
        """Prints the message, and ends this process."""
        self._ending.acquire()  # never released: one thread does it
        path = os.environ.get(_REPORT)
        if path and failure.process != _NOBODY:
            with contextlib.suppress(OSError), Path(path).open("x") as file:
                file.write(str(failure.process))
        for stream in (sys.stdout, sys.stderr):  # another thread may hold it
            _in_time(stream.flush, 0.5)
        with contextlib.suppress(OSError):
            os.write(2, f"meshlayout: {failure.text}\n".encode())
        for worker in multiprocessing.active_children():  # would hold the output open
            worker.kill()
        self._linger(_LINGER_S)
        if self._index:  # else JAX's service in process 0 takes 5 s to end
            _in_time(self._shutdown, 1.0)  # if process 0 is gone, it waits
        os._exit(failure.status)


def _wait_while(is_so: Callable[[], bool], limit_s: float = math.inf) -> None:
    deadline_s = time.monotonic() + limit_s
    while is_so() and time.monotonic() < deadline_s:
        time.sleep(_PAUSE_S / 5)


def _in_time(call: Callable[[], Any], limit_s: float) -> None:
    """Calls something that may fail or not return, and waits for it for a while."""

    def run() -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            call()

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # since 3.12, Python starts none while it ends
        run()
    else:
        thread.join(limit_s)
