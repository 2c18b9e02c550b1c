"""Ends all processes of a run when one of them fails, and says which one it was.

JAX knows who is alive: its heartbeats come from threads of C++, so that a process that
holds Python's lock for minutes is not lost. `jax_enable_recoverability` leaves the rest
to us. One thread asks JAX which processes are alive, which it answers once all of these
have asked. Another reads what processes post: "failure" (the first one counts),
"ended", which tells a finished program from a lost one, and long "waits". The end is
`os._exit`, as the main thread may be in a collective. Process 0 ends last.
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
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax

from meshlayout import _jax
from meshlayout._counts import counts


_REPORT = "MESHLAYOUT_LAUNCHER_REPORT"  # where `meshlayout.launch` reads who failed
_ROOT = "meshlayout/watch/"
_PAUSE_S = 0.5
_NO_DEVICES = _NOBODY = -1  # instead of a number of steps, and of a process
_LINGER_S = 3.0  # for the others to read why; most do within two pauses
_CLEANUP_S = 5.0  # for the exit handlers of a program that has failed
_LOOKS = 5  # at a wait in vain: a step may be about to come to a meeting inside it

# What JAX and `Channel.failure` say because another process is gone.
_ECHO = re.compile(
    r"^(UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED)\b|\b(Gloo|NCCL)\b"
    r"|[Cc]onnection (closed|reset|refused)|[Ss]ocket closed|coordination service"
    r"|has ended its program"
)


class PeerError(Exception):
    """A text and the process to blame: the cause of an error, or sent by itself."""


class _Failure(NamedTuple):
    """Which process failed, how, and the exit status of those it ends."""

    process: int
    text: str
    status: int = 1


_watch: "Watch | None" = None


def post_wait(*wait: Any) -> None:
    """Posts how long the main thread waits, where, for whom; no arguments end it.

    Only its steps and meetings have the same order on all processes.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if _watch is not None and is_main and (wait or _watch.is_waiting):
        _watch.is_waiting = bool(wait)
        _watch.post(f"waits/{_jax.process_index()}", [counts.steps, *wait])


def end_of(process: int) -> str:
    """Returns a sentence if the program of a process has ended, or nothing."""
    if _watch is None or process not in _watch.ended:
        return ""
    return f"{_watch.names[process]} has ended its program"


def delay_abort() -> None:
    """Makes `abort` wait 6 s; all processes but 0 call this before they connect.

    When process 0 is gone, JAX aborts at once. C's own `sleep` as the handler, which
    gets the number of the signal, leaves time to say so. (faulthandler has its own.)
    """
    if not faulthandler.is_enabled():
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


class Watch:
    """The watch that one process keeps over all, once JAX's service has started."""

    def __init__(
        self, names: Sequence[str], heartbeat_s: float, step_timeout_s: float | None
    ) -> None:
        global _watch
        state, _watch = _jax.coordination, self
        counts.steps = counts.others = counts.meetings = 0
        self._client, self._index = state.client, state.process_id
        self.names, self._name, self._pid = names, names[self._index], os.getpid()
        self._pause_s = max(_PAUSE_S, len(names) / 500)  # process 0 answers all
        self._heartbeat_s, self._step_timeout_s = heartbeat_s, step_timeout_s
        self._live = {*range(len(names))}
        self.ended: dict[int, int] = {}  # with the steps and saves they had begun
        self.is_waiting, self._looks = False, defaultdict[Any, set[float]](set)
        self._moves, self._moved_s = dict[int, int](), time.monotonic()
        self._failure: _Failure | None = None
        self._end_s, self._is_leaving, self._has_devices = 0.0, False, False
        self._is_over, self._ending = threading.Event(), threading.Lock()
        self._hook, sys.excepthook = sys.excepthook, self._on_exception
        # For any caller of jax.distributed.shutdown, including JAX's own exit handler.
        self._shutdown, state.shutdown = state.shutdown, self.leave
        atexit.register(self._note_devices)  # before JAX's handler, which ends them
        self._threads = [_started(self._read), _started(self._ask)]

    def leave(self) -> None:
        """Ends `jax.distributed` here; process 0 first waits for all others."""
        global _watch
        if os.getpid() != self._pid:  # forked from this process
            return
        self._is_leaving = True
        error = sys.exception()  # in `finally: ml.shutdown()`, it is on its way
        if isinstance(error, Exception) and self._failure is None:
            self._failure = self._posted(self._failure_of(error))
        if self._failure is None:
            self._note_devices()
            # Without its devices, no other process can start its own.
            steps = counts.steps + counts.others if self._has_devices else _NO_DEVICES
            self.post(f"ended/{self._index}", steps)
            try:
                if self._index == 0:  # `_read` finds one that leaves without "ended"
                    _wait_while(lambda: bool(self._others()) and self._failure is None)
                self._linger(self._heartbeat_s)
            except KeyboardInterrupt as interrupt:
                self._end(self._posted(self._failure_of(interrupt)))
        if self._failure is not None:
            self._linger(_LINGER_S)
        _jax.coordination.shutdown = self._shutdown
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._hook
        self._shutdown()
        self._is_over.set()
        for thread in self._threads:  # Python must not end while they are in C++
            thread.join(self._heartbeat_s)
        _watch = None

    def _note_devices(self) -> None:
        self._has_devices |= _jax.has_backend()

    def _others(self) -> set[int]:  # whose programs have not ended
        return {*range(len(self.names))} - {self._index, *self.ended}

    def _linger(self, limit_s: float) -> None:
        """Waits, on process 0, until all others have left its store."""
        _wait_while(lambda: self._index == 0 and bool(self._live - {0}), limit_s)

    def _on_exception(self, kind: Any, error: BaseException, trace: Any) -> None:
        if self._ending.locked():  # the message is out, and this follows from it
            self._ending.acquire()
        self._hook(kind, error, trace)
        if hasattr(sys, "ps1") or sys.flags.interactive or os.getpid() != self._pid:
            return
        self._is_leaving = True
        failure = self._posted(self._failure_of(error))
        if failure.process != self._index:
            self._end(failure)
        self._end_s, self._failure = time.monotonic() + _CLEANUP_S, failure

    def _failure_of(self, error: BaseException) -> _Failure:
        if isinstance(error, KeyboardInterrupt):
            text = f"{self._name} was interrupted (Ctrl-C)."
            return _Failure(self._index, text, 128 + signal.SIGINT)
        is_echo, link = False, error
        while link is not None:
            if isinstance(link, PeerError):
                return _Failure(link.args[1], str(error))
            is_echo |= bool(_ECHO.search(str(link)))
            link = link.__cause__ or link.__context__
        if is_echo and not isinstance(error, OSError):  # which is of its own sockets
            # Another process is the cause; if it is lost, `_read` ends this one.
            _wait_while(lambda: not self.ended, self._heartbeat_s + 3)
            for process in self.ended:
                text = f"{end_of(process)}, and {self._name} needs it: {error}"
                return _Failure(process, text)
        text = f"{self._name} failed: {type(error).__name__}: {error}"
        for frame in traceback.extract_tb(error.__traceback__)[-1:]:
            text += f" ({frame.filename}, line {frame.lineno})"
        return _Failure(self._index, text)

    def _ask(self) -> None:
        while not self._is_over.wait(self._pause_s):
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # `_read` has it, too
                self._live = {*self._client.get_live_nodes([*range(len(self.names))])}

    def _read(self) -> None:
        answered_s = time.monotonic()
        while not self._is_over.wait(self._pause_s):
            live = self._live  # before what is read: "ended" is written before it
            # This has no time-out, and waits forever for a process 0 that is gone.
            entries = _in_time(lambda: self._client.key_value_dir_get(_ROOT), 1.0)
            if entries is not None:
                answered_s = time.monotonic()
                self._judge({k.removeprefix(_ROOT): x for k, x in entries}, live)
            elif self._index and not self._is_over.is_set():
                self._judge_first(time.monotonic() - answered_s)

    def _judge_first(self, silent_s: float) -> None:
        why = f"has not answered for {silent_s:.0f} s, so it was stopped or cut off"
        host, _, port = _jax.coordination.coordinator_address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), 1.0).close()
        except OSError:
            why = "was killed, or its host is gone"
            # It may have ended well, just after this process has left the store.
            silent_s = 2 * silent_s if self._is_leaving else self._heartbeat_s
        if silent_s >= self._heartbeat_s:
            failure = _Failure(0, f"{self.names[0]} is lost: it {why}.")
            self._end(self._failure or failure)

    def _judge(self, entries: dict[str, str], live: set[int]) -> None:
        if "failure" in entries:
            failure = _Failure(*json.loads(entries["failure"]))
            is_own = failure.process == self._index
            if self._failure is None and is_own:
                self._end_s, self._failure = time.monotonic() + _CLEANUP_S, failure
            # The exit handlers of one that has failed may still do their work.
            if not (is_own and self._is_leaving and time.monotonic() < self._end_s):
                self._end(failure)
            return
        facts = defaultdict[str, dict[int, Any]](dict)
        for kind, _, process in (key.partition("/") for key in entries):
            facts[kind][int(process)] = json.loads(entries[f"{kind}/{process}"])
        self.ended |= facts["ended"]
        for process in sorted(self._others() - live):
            text = f"{self.names[process]} is lost: it was killed, stopped or cut off,"
            self._end(self._posted(_Failure(process, f"{text} or left by os._exit.")))
        own = counts.steps + counts.others
        for process, steps in self.ended.items():
            is_starting = steps == _NO_DEVICES and _jax.is_starting_devices()
            is_ahead = own > max(steps, 0)
            if (is_ahead or is_starting) and self._index not in self.ended:
                where = f"in step or save {own}" if is_ahead else "starting devices"
                text = f"{end_of(process)}, and {self._name} is {where}, which "
                self._end(self._posted(_Failure(process, f"{text}needs it.")))
        self._judge_waits(facts["waits"])
        if self._step_timeout_s is not None:
            self._judge_moves(facts["moves"], self._step_timeout_s)

    def _judge_waits(self, waits: dict[int, Any]) -> None:
        """Ends all processes if one waits in a meeting that this one never joins."""
        waits = {process: wait for process, wait in waits.items() if len(wait) > 1}
        *_, own_meeting, own_what, own_late = waits.get(self._index, ["", "", []])
        for process, (steps, waited_s, meeting, what, late) in waits.items():
            is_elsewhere = process in own_late and own_meeting != meeting
            if self._index in late and (is_elsewhere or counts.steps > steps):
                looks = self._looks[process, meeting]
                looks.add(waited_s)  # the same: it has not looked since
                if len(looks) > _LOOKS:
                    where = own_what if is_elsewhere else f"step {counts.steps}"
                    text = f"{self.names[process]} waits in {what}, and {self._name} "
                    self._end(self._posted(_Failure(process, f"{text}in {where}.")))

    def _judge_moves(self, moves: dict[int, int], limit_s: float) -> None:
        own = counts.steps + counts.others + counts.meetings
        self.post(f"moves/{self._index}", own)
        if moves != self._moves or self.ended:
            self._moves, self._moved_s = moves, time.monotonic()
        elif time.monotonic() > self._moved_s + limit_s:
            last, most = min(moves, key=moves.__getitem__), max(moves.values())
            where = f"{self.names[last]} is behind, in number {moves[last]} of {most}."
            if moves[last] == most:
                where = f"no process is behind another, all are in number {most}."
                last = _NOBODY
            text = f"no step or meeting has begun for {limit_s:g} s (step_timeout_s): "
            self._end(self._posted(_Failure(last, text + where)))

    def post(self, key: str, value: Any) -> None:
        """Posts a value for all to read."""
        key, text = f"{_ROOT}{key}", json.dumps(value)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(key, text, allow_overwrite=True)

    def _posted(self, failure: _Failure) -> _Failure:
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


def _in_time(call: Callable[[], Any], limit_s: float) -> Any:
    """Returns the result of a call that may fail or hang; None after a while."""
    results: list[Any] = []

    def run() -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            results.append(call())

    try:
        _started(run).join(limit_s)
    except RuntimeError:  # since 3.12, Python starts none while it ends
        run()
    return results[0] if results else None


def _started(target: Callable[[], None]) -> threading.Thread:
    name = f"meshlayout-{target.__name__}"
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread
