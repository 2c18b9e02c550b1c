"""The processes of a job on this machine: started together, and ended together.

A job hangs if one of its processes is gone, so the first failure ends all of them.
Threads wait for the processes in the kernel (`waitpid`), which reports ends in their
order, and also that a process was stopped; signal handlers only put a number into the
same queue. So one loop, in the main thread, sees everything one after another.

All processes are in one process group, whose leader is the guard: a tiny process that
waits for the end of a pipe whose other end is in the launcher. However the launcher
ends, also by `kill -9`, the guard then kills the group, with itself and whatever the
processes have started. (PR_SET_PDEATHSIG would reach no further than the processes
themselves, and exists on Linux alone.)
"""

import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue

from meshlayout.cluster.process_output import ProcessOutput


# EX_TEMPFAIL of sysexits.h; `checkpoint.EXIT_STATUS`, which says "start me again".
RESTART_STATUS = 75

# The others have this long to say whom they lost, and what it was doing; then they get
# SIGTERM, and then SIGKILL, within two seconds in all.
_FAILURE_S, _KILL_S = 1.3, 0.3
# A process that ended because it was told to waits this long for the others, which may
# still be saving.
_SAVE_S = 60.0
# A process that is stopped for longer has failed.
_STOPPED_S = 0.3
# If several fail, one that was killed by a signal counts as the first even if it is
# noticed so much later: the others may have lost their connections to it before.
_SIGNAL_S = 0.5
# A traceback that is older is not why a process ended.
_TRACEBACK_S = 5.0

# What is passed on to the processes; of these, what does not ask them to end.
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_NOT_TO_END = (signal.SIGUSR1, signal.SIGUSR2)

_GUARD = """
import os, signal
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
os.read(0, 1)
os.killpg(0, signal.SIGKILL)
"""


@dataclass(frozen=True)
class StateChange:
    """A process ended, was stopped, or continues, as `waitpid` reports it."""

    index: int
    status: int
    time_s: float


# What the supervisor waits for: a change, or the number of a signal to the launcher.
Events = SimpleQueue[StateChange | int]


@dataclass(frozen=True)
class ProcessEnd:
    """How a process ended, or failed.

    Attributes:
        index: The number of the process.
        pid: Its process id.
        code: The exit status; minus the signal if one killed or stopped it.
        time_s: When, as `time.monotonic()`.
        is_stopped: Whether it was stopped, and did not end by itself.
    """

    index: int
    pid: int
    code: int
    time_s: float
    is_stopped: bool = False

    @property
    def status(self) -> int:
        """The exit status as shells have it: 128 and the signal's number."""
        return 128 - self.code if self.code < 0 else self.code

    @property
    def fate(self) -> str:
        """What became of it, to follow its name."""
        if self.code >= 0:
            return f"ended with exit status {self.code}"
        verb = "stopped" if self.is_stopped else "killed"
        return f"was {verb} by {_signal_name(-self.code)}"

    def __str__(self) -> str:
        return f"process {self.index} (pid {self.pid}) {self.fate}"


@dataclass(frozen=True)
class JobEnd:
    """How a job ended.

    Attributes:
        status: 0 if every process ended with 0; else that of the first failure.
        first: The process that failed first; None if none did.
        was_requested: Whether a signal to the launcher asked for it.
    """

    status: int
    first: ProcessEnd | None
    was_requested: bool


class Job:
    """Processes that are started together, watched, and ended together.

    Args:
        command: What each process executes, beginning with the program's path.
        environments: The environment of each process.
        events: Where signals to the launcher arrive.
        report: The file in which the processes find the first failure
            (`failure.reported_by_launcher`).
    """

    def __init__(
        self,
        command: list[str],
        environments: Sequence[Mapping[str, str]],
        events: Events,
        report: Path,
    ) -> None:
        self._command, self._environments = command, environments
        self._events, self._report = events, report
        self._output = ProcessOutput(on_broken=lambda: events.put(signal.SIGPIPE))
        self._pids: list[int] = []
        self._running: set[int] = set()
        self._failures: list[ProcessEnd] = []
        # Stopped processes, and when each counts as failed.
        self._stopped: dict[int, tuple[float, ProcessEnd]] = {}
        # The signal that asked for the end, and those that are still to be sent because
        # a process failed: (when, which).
        self._request: int | None = None
        self._deadlines: list[tuple[float, int]] = []
        self._sent: set[int] = set()

    def run(self) -> JobEnd:
        """Starts the processes, and returns when none is left.

        Raises:
            OSError: If a process cannot be started; none is left then, either.
        """
        guard, guard_pipe = _start_guard()
        try:
            self._start(guard)
            while self._running:
                self._handle(self._next_event())
        finally:
            # Also what the processes started and left behind, and the guard.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(guard, signal.SIGKILL)
            os.close(guard_pipe)
            os.waitpid(guard, 0)
            self._output.end()
        is_written = self._wait_for_output()
        end = self._result()
        if is_written and end.first is not None and not self._is_meant(end.first):
            self._show(end.first)
        return end

    def _start(self, group: int) -> None:
        pipes = [self._output.pipes(index) for index in range(len(self._environments))]
        self._output.start()
        try:
            for environment, (out, err) in zip(self._environments, pipes, strict=True):
                actions = [
                    # In a group of their own they cannot read from the terminal.
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, out, 1),
                    (os.POSIX_SPAWN_DUP2, err, 2),
                ]
                pid = os.posix_spawn(
                    self._command[0],
                    self._command,
                    environment,
                    file_actions=actions,
                    setpgroup=group,
                    setsigdef=[signal.SIGPIPE],  # which Python ignores
                )
                self._pids.append(pid)
        finally:
            for end in (end for both in pipes for end in both):
                os.close(end)
        self._running.update(range(len(self._pids)))
        for index in self._running:
            threading.Thread(target=self._wait, args=[index], daemon=True).start()

    def _wait(self, index: int) -> None:
        """Reports what becomes of a process; in a thread of its own."""
        while True:
            options = os.WUNTRACED | os.WCONTINUED
            _, status = os.waitpid(self._pids[index], options)
            self._events.put(StateChange(index, status, time.monotonic()))
            if not (os.WIFSTOPPED(status) or os.WIFCONTINUED(status)):
                return

    def _next_event(self) -> StateChange | int | None:
        """Waits for an event, or until something is to be done."""
        times = [due_s for due_s, _ in (*self._stopped.values(), *self._deadlines)]
        wait_s = min(times, default=math.inf) - time.monotonic()
        with contextlib.suppress(Empty):
            return self._events.get(timeout=min(max(wait_s, 0.0), 1.0))
        return None

    def _handle(self, event: StateChange | int | None) -> None:
        if isinstance(event, StateChange):
            self._on_change(event)
        elif event is not None:
            self._on_signal(event)
        now_s = time.monotonic()
        for index, (due_s, end) in list(self._stopped.items()):
            if now_s >= due_s:
                del self._stopped[index]
                self._on_failure(end)
        while self._deadlines and now_s >= self._deadlines[0][0]:
            _, number = self._deadlines.pop(0)
            self._end_all(number)

    def _on_change(self, event: StateChange) -> None:
        index, status, pid = event.index, event.status, self._pids[event.index]
        self._stopped.pop(index, None)
        if os.WIFSTOPPED(status):
            code = -os.WSTOPSIG(status)
            end = ProcessEnd(index, pid, code, event.time_s, is_stopped=True)
            # From now on, not from when it was stopped: with Ctrl-Z the launcher was
            # stopped, too, and the process continues in a moment.
            self._stopped[index] = time.monotonic() + _STOPPED_S, end
        elif not os.WIFCONTINUED(status):
            self._running.discard(index)
            code = os.waitstatus_to_exitcode(status)
            if code:
                self._on_failure(ProcessEnd(index, pid, code, event.time_s))

    def _on_failure(self, end: ProcessEnd) -> None:
        if any(end.index == failure.index for failure in self._failures):
            return  # it was stopped, which counted, and then killed
        if -end.code in self._sent and not end.is_stopped:
            # Ended by the launcher. A process with an exception has failed all the
            # same, and may have been waiting for the others to hear of it.
            if self._traceback_s(end) is not None:
                self._failures.append(replace(end, code=1))
            return
        others = self._running - {end.index}
        is_meant = self._is_meant(end)
        limit_s = _SAVE_S if is_meant else _FAILURE_S
        if others and not is_meant:
            self._tell_others(end)
        if end.is_stopped:
            # The others then lose their connections to it, and need not wait for it.
            os.kill(end.pid, signal.SIGKILL)
        if others and not self._failures:
            count = _count(len(others))
            wait = f"waiting up to {limit_s:g} s for {count}"
            what = wait if is_meant else f"ending {count} in {limit_s:g} s"
            self._output.note(f"{end}; {what}.")
        self._failures.append(end)
        due_s = time.monotonic() + limit_s
        if not self._deadlines or due_s < self._deadlines[0][0]:
            self._deadlines = [
                (due_s, signal.SIGTERM),
                (due_s + _KILL_S, signal.SIGKILL),
            ]

    def _tell_others(self, end: ProcessEnd) -> None:
        """Writes down who failed, unless another one did before."""
        if not self._report.exists():
            draft = self._report.with_suffix(".draft")
            draft.write_text(json.dumps([end.index, end.fate]))
            draft.replace(self._report)

    def _is_meant(self, end: ProcessEnd) -> bool:
        """Returns whether a process ended because it was told to."""
        if end.is_stopped:
            return False
        request = self._request
        return end.status == RESTART_STATUS or (
            request is not None and end.status == 128 + request
        )

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGTSTP:
            self._pause()
        elif number == signal.SIGPIPE:  # as `head` ends what it has read enough of
            self._request = number
            self._end_all(signal.SIGKILL)
        elif number in _NOT_TO_END:
            self._send(number)
        elif number == self._request:
            self._output.note(f"got {_signal_name(number)} again: killing all.")
            self._end_all(signal.SIGKILL)
        else:
            self._send(number)
            self._request = number
            name, count = _signal_name(number), _count(len(self._running))
            self._output.note(f"passed {name} on to {count}; a second one kills all.")

    def _pause(self) -> None:
        """Stops the processes and the launcher, as Ctrl-Z is meant."""
        self._send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        # Here it goes on: `fg` or `bg` sent SIGCONT to the launcher.
        self._send(signal.SIGCONT)

    def _end_all(self, number: int) -> None:
        self._sent.add(number)
        self._send(number)

    def _send(self, number: int) -> None:
        """Sends a signal to the processes that run.

        A process that its thread has just waited for may get it no more; its id is not
        used again so soon.
        """
        for index in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[index], number)

    def _wait_for_output(self) -> bool:
        """Waits until all output is written; returns False if a signal came before."""
        while not self._output.wait(0.2):
            with contextlib.suppress(Empty):
                event = self._events.get_nowait()
                if not isinstance(event, StateChange):
                    self._request = event
                    return False
        return True

    def _result(self) -> JobEnd:
        was_requested = self._request is not None
        failures = [end for end in self._failures if not self._is_meant(end)]
        failures = failures or self._failures
        if not failures:
            # Processes that a second Ctrl-C killed have not failed.
            was_killed = signal.SIGKILL in self._sent
            status = 128 + (self._request or 0) if was_killed else 0
            return JobEnd(status, None, was_requested)
        first = min(failures, key=self._failure_s)
        return JobEnd(first.status, first, was_requested)

    def _failure_s(self, end: ProcessEnd) -> float:
        """Returns when a process failed, as far as it matters who was the first."""
        # JAX aborts a process that has lost another one; no other signal comes of that.
        if end.code < 0 and end.code != -signal.SIGABRT:
            return end.time_s - _SIGNAL_S
        return self._traceback_s(end) or end.time_s

    def _traceback_s(self, end: ProcessEnd) -> float | None:
        """Returns when the exception that ended a process was printed, if one did.

        A process with an exception may outlive those that noticed it. It printed its
        traceback before, so that is when it failed.
        """
        time_s = self._output.traceback_s(end.index)
        is_cause = time_s is not None and end.time_s - time_s < _TRACEBACK_S
        return time_s if is_cause else None

    def _show(self, end: ProcessEnd) -> None:
        """Prints how a process failed, what the others say of it, and its traceback."""
        is_alone = len(self._environments) == 1
        sentences = [f"{end}{'' if is_alone else ', before any other'}."]
        if end.code < 0:  # it could not say by itself what it was doing
            since_s = end.time_s - _TRACEBACK_S
            sentences += self._output.lines_about(end.index, since_s)
        self._output.show_end(end.index, sentences)


def _start_guard() -> tuple[int, int]:
    """Returns the id of the guard, and the pipe that it watches."""
    read_end, write_end = os.pipe()
    try:
        actions = [
            (os.POSIX_SPAWN_DUP2, read_end, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ]
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", "-c", _GUARD],
            os.environ,
            file_actions=actions,
            setpgroup=0,
        )
    finally:
        os.close(read_end)
    return pid, write_end


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _count(number: int) -> str:
    return f"{number} process{'es' * (number != 1)}"
