"""Notices that a process of a run has died or hangs, and ends the others naming it.

Without this the others hang in a collective, or end without a name: JAX's own
heartbeats take 100 seconds, abort inside C++, and do not see a process that is alive
and stuck. Here every process writes what it does to the key-value store of JAX's
coordination service, several times a second. Process 0, which holds the store, reads
all of it and judges; the others read its entry and its verdict, so that many processes
cost it a few calls each. They judge process 0 themselves: if it is killed, JAX aborts
them at once (see `crash`); if it is stopped, calls to the store never return, which a
second thread notices.

Silence is counted in turns of this process's own thread, of which none counts for more
than four pauses: a process that was itself stopped, or got no CPU, does not find all
others silent when it wakes up.

The end is `os._exit` after the message, because the main thread may be inside a
collective, from which no exception can get it out.
"""

import atexit
import contextlib
import faulthandler
import json
import logging
import os
import re
import socket
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import jax

from meshlayout import _jax
from meshlayout.cluster import activity
from meshlayout.cluster.crash import CrashHooks, summary
from meshlayout.cluster.failure import (
    Failure,
    is_launched,
    print_now,
    reported_by_launcher,
)
from meshlayout.cluster.verdicts import (
    Beat,
    Peer,
    doing_text,
    latest_beats,
    out_of_step,
    silent,
    stuck,
)


_log = logging.getLogger(__name__)

_PUBLIC, _BEATS = "meshlayout/watch/public/", "meshlayout/watch/beats/"

# Others have to notice within ten seconds, of which a busy machine may take some.
_HEARTBEAT_S = 6.0

# How often to write and read; less often where so many processes would cost process 0
# much time, and more often for a short time-out.
_PAUSE_S = 0.25
_PAUSE_PER_PROCESS_S = 1 / 500

# How long to wait at least, when activities change faster.
_GAP_S = 0.1

# How long process 0, and a process that has failed, let the others read why.
_LINGER_S = 2.0

# How long a process that has failed may take for its own exit handlers.
_CLEANUP_S = 5.0


def start(
    *, heartbeat_timeout_s: float | None = None, step_timeout_s: float | None = None
) -> None:
    """Starts to watch the processes of a run, after `jax.distributed.initialize`.

    Args:
        heartbeat_timeout_s: As for `initialize`.
        step_timeout_s: As for `initialize`.
    """
    global _watch
    if _watch is None and _jax.coordination_client() is not None:
        _watch = Watch(heartbeat_timeout_s or _HEARTBEAT_S, step_timeout_s)
        _watch.start()


def stop() -> None:
    """Ends `jax.distributed`, watched until all processes have come, and the watch.

    Does nothing if nothing is watched.
    """
    if _watch is not None:
        _watch.stop()


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Tells the others that this process comes to its end while it waits for theirs.

    It may be on its way out of an exception, and they in a collective with it.
    """
    error = sys.exception()
    if _watch is not None:
        _watch.leave(error)
    try:
        yield
    except BaseException:
        if _watch is not None and error is None:
            _watch.stay()
        raise


def lost(process: int) -> str | None:
    """Returns a sentence on why a process will not answer any more; None if it may.

    Use this while waiting for a message of that process.
    """
    return None if _watch is None else _watch.lost(process)


class Watch:
    """The watch that one process keeps over a run.

    Args:
        heartbeat_s: After how long a silent process is lost.
        step_timeout_s: After how long a run without progress is stuck; None for never.
    """

    def __init__(self, heartbeat_s: float, step_timeout_s: float | None) -> None:
        self._client = _jax.coordination_client()
        self._index, self._pid = _jax.process_index(), os.getpid()
        self._heartbeat_s, self._step_timeout_s = heartbeat_s, step_timeout_s
        pause_s = max(_PAUSE_S, _PAUSE_PER_PROCESS_S * _jax.process_count())
        self._pause_s = min(pause_s, heartbeat_s / 8)
        self._name = f"process {self._index} ({socket.gethostname()}, pid {self._pid})"
        self._status, self._note = "running", ""
        # The latest call of `sys.exit`: its status, and the steps at that time.
        self._exit = (0, -1)
        self._number, self._moved_s = 0, time.monotonic()
        # The beat that is being sent, while calls to the store are under way.
        self._sending: int | None = None
        # Process 0 also reads its own beat.
        judged = (0,) if self._index else range(_jax.process_count())
        self._peers = {index: Peer() for index in judged}
        self._failure: Failure | None = None
        self._failed_s: float | None = None  # when this process failed
        self._is_aborted = False  # by its own fault
        self._is_over, self._wake = threading.Event(), activity.now.changed
        self._ending = threading.Lock()
        self._hooks = CrashHooks(self)
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in (
                (self._run, "meshlayout-watch"),
                (self._guard, "meshlayout-watch-guard"),
            )
        ]

    def start(self) -> None:
        """Installs the hooks, and starts the threads."""
        self._hooks.install()
        # Registered after JAX's, and so called before it waits for all processes.
        atexit.register(self._at_exit)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends `jax.distributed` and then the watch."""
        self.leave()
        # JAX waits for five minutes only; others may compute for longer.
        while len(self._ended()) < _jax.process_count():
            time.sleep(self._pause_s)
        try:
            jax.distributed.shutdown()
        finally:
            self._is_over.set()
            self._wake.set()
            for thread in self._threads:
                thread.join(self._heartbeat_s)
            self._close()

    def leave(self, error: BaseException | None = None) -> None:
        """Tells the others that the program has ended here, perhaps by an exception."""
        if error is not None:
            self.note(f"before that, {summary(error)}")
        if self._status == "running":
            self._set_status("ended")

    def stay(self) -> None:
        """Takes back that the program has ended."""
        self._set_status("running")

    def _close(self) -> None:
        global _watch
        self._is_over.set()
        self._hooks.remove()
        atexit.unregister(self._at_exit)
        _watch = None

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:  # forked from this process
            return
        if self._failed_s is None:
            try:
                self.stop()
                return
            except KeyboardInterrupt:  # perhaps the second one: wait no longer
                self._failed_s = time.monotonic()
                text = "was interrupted (Ctrl-C) while it waited for the others to end."
                self._failure = self._agreed(self._own_failure(text, is_interrupt=True))
        self._wait_for_others()
        assert self._failure is not None
        print_now("")  # what is buffered
        self._failure.exit()

    def lost(self, process: int) -> str | None:
        """Returns why a process will not answer any more; None if it may."""
        if self._failure is not None and self._failure.process == process:
            line = self._failure.text.partition("\n")[0]
            return f"{line[0].upper()}{line[1:]}"
        has_ended = process in self._ended()
        return f"Process {process} has ended its program." if has_ended else None

    def _wait_for_others(self) -> None:
        """Waits until the other processes know of the failure of this one."""
        self._set_status("leaving")
        deadline_s = time.monotonic() + _LINGER_S
        while time.monotonic() < deadline_s and not self._others_know():
            time.sleep(self._pause_s / 4)

    # What the hooks call.

    def fail(self, text: str) -> None:
        """Tells the others that this process fails; its main thread then ends it.

        Args:
            text: What happened, to follow the name of the process.
        """
        failure = self._own_failure(text)
        self._failed_s = time.monotonic()
        self._failure = self._agreed(failure)
        if self._failure != failure:  # another one failed before
            print_now(self._message(self._failure))

    def interrupt(self) -> None:
        """Tells the others that this process was interrupted, as they may be, too."""
        self._set_status("interrupted")

    def exiting(self, status: int) -> None:
        """Notes a call of `sys.exit`, which counts if it ends the program."""
        self._exit = (status, activity.now.steps)

    def note(self, text: str) -> None:
        """Adds something to what this process is said to have been doing."""
        self._note = text

    def wait_for_failure(self, *, is_own: bool = False) -> None:
        """Waits as long as others take to fail visibly, which ends this process."""
        # The launcher reports at once who has failed; not who left with status 0.
        is_brief = is_own and is_launched()
        silence_s = 0.0 if is_brief else self._heartbeat_s
        deadline_s = time.monotonic() + silence_s + 4 * self._pause_s
        # If one has ended, that is the reason, and it will not fail.
        while time.monotonic() < deadline_s and not self._ended():
            time.sleep(self._pause_s)

    def abort(self) -> None:
        """Ends this process if it is aborted because of another one."""
        if self._is_aborted:  # JAX does it once more, as process 0 has left
            return
        if self._failed_s is not None:  # process 0 has read why, and left
            (self._failure or self._own_failure("failed.")).exit()
        if self._failure is not None:
            self._end(self._failure)
        if self._index and not _answers(_jax.coordinator_address()):
            self._end(self._lost_first("is lost: it was killed, or its host is gone"))
        self._failed_s, self._is_aborted = time.monotonic(), True
        failure = self._own_failure("is aborted by C code (SIGABRT), which says why.")
        # In a thread: this process may be too broken to post anything.
        poster = threading.Thread(target=self._agreed, args=(failure,), daemon=True)
        poster.start()
        poster.join(_LINGER_S)
        print_now(self._message(self._failure or failure))
        self._wait_for_others()

    # The threads.

    def _run(self) -> None:
        """Writes beats, reads those of others, and judges."""
        while not self._is_over.is_set() and _jax.coordination_client() is not None:
            start_s = time.monotonic()
            # JAX raises one of its errors if process 0 has gone, which is silent then.
            # Whatever else happens must not end this thread.
            try:
                self._exchange()
                self._judge()
            except jax.errors.JaxRuntimeError:
                pass
            except Exception:
                if not self._is_over.is_set():
                    _log.exception("the watch over other processes failed, and goes on")
            # Soon after a change, because it may be the last; but not for every one.
            self._is_over.wait(min(_GAP_S, self._pause_s))
            self._wake.wait(max(0.0, self._pause_s - _GAP_S))
            self._wake.clear()
            elapsed_s = min(time.monotonic() - start_s, 4 * self._pause_s)
            for peer in self._peers.values():
                peer.silent_s += elapsed_s
                peer.status_s += elapsed_s
        if not self._is_over.is_set():  # the user called jax.distributed.shutdown
            self._close()

    def _guard(self) -> None:
        """Notes when the activity moves, and calls to the store that do not return."""
        moves, sending, stuck_s = (-1, -1), None, 0.0
        last_s = time.monotonic()
        while not self._is_over.wait(self._pause_s / 2):
            now_s = time.monotonic()
            elapsed_s, last_s = min(now_s - last_s, self._pause_s), now_s
            if moves != (activity.now.moves, activity.now.steps):
                moves, self._moved_s = (activity.now.moves, activity.now.steps), now_s
            is_same = sending is not None and sending == self._sending
            stuck_s = stuck_s + elapsed_s if is_same else 0.0
            sending = self._sending
            if self._index and stuck_s > self._heartbeat_s:
                self._end(
                    self._lost_first(
                        f"is lost: it has not answered for {stuck_s:.1f} s, so it was "
                        "stopped or cut off"
                    )
                )

    def _exchange(self) -> None:
        """Writes this process's beat, and reads what it judges by."""
        self._number += 1
        beat = json.dumps(asdict(self._beat()))
        folder = _BEATS if self._index else _PUBLIC
        self._sending = self._number
        try:
            self._client.key_value_set(
                f"{folder}{self._index}", beat, allow_overwrite=True
            )
            entries = self._client.key_value_dir_get(_PUBLIC)
            if self._index == 0:
                entries += self._client.key_value_dir_get(_BEATS)
        finally:
            self._sending = None
        for key, text in entries:
            name = key.rpartition("/")[2]
            if name == "failure":
                self._failure = Failure.from_json(text)
            elif int(name) in self._peers:
                self._peers[int(name)].hear(Beat(**json.loads(text)))

    # Verdicts.

    def _judge(self) -> None:
        if self._failed_s is not None:
            assert self._failure is not None
            if time.monotonic() - self._failed_s > _CLEANUP_S:
                self._failure.exit()  # its own exit handlers wait for something
            return
        failure = self._failure or self._reported()
        failure = failure or silent(self._peers, self._index, self._heartbeat_s)
        if failure is None and self._index == 0:
            failure = out_of_step(self._peers)
            failure = failure or stuck(self._peers, self._step_timeout_s)
        if failure is not None:
            self._failure = self._agreed(failure)
            self._end(self._failure)

    def _reported(self) -> Failure | None:
        """Returns the failure of a process that the launcher saw, if there is one."""
        index, fate = reported_by_launcher() or (self._index, "")
        peer = self._peers.get(index)
        if index == self._index or peer is None:
            return None
        name = f"process {index}" if peer.beat is None else peer.beat.process
        doing = "" if peer.beat is None else f"\n{doing_text(peer.beat.doing)}"
        return Failure(index, f"{name} {fate}.{doing}")

    def _lost_first(self, why: str) -> Failure:
        """Returns the failure of process 0."""
        beat = self._peers[0].beat
        name, doing = "process 0", ""
        if beat is not None:
            name, doing = beat.process, f"\n{doing_text(beat.doing)}"
        return Failure(0, f"{name} {why}.{doing}")

    def _agreed(self, failure: Failure) -> Failure:
        """Posts a failure; returns the one that was posted first, for all to name."""
        with contextlib.suppress(Exception):
            self._client.key_value_set(f"{_PUBLIC}failure", failure.to_json())
            return failure
        with contextlib.suppress(Exception):
            for key, text in self._client.key_value_dir_get(_PUBLIC):
                if key.endswith("/failure"):
                    return Failure.from_json(text)
        return failure

    # The end.

    def _end(self, failure: Failure) -> NoReturn:
        """Prints the message and ends this process."""
        if not self._ending.acquire(blocking=False):
            time.sleep(self._heartbeat_s)  # another thread does it
            failure.exit()
        self._failure = failure
        print_now(self._message(failure))
        self._status = "leaving"
        if threading.current_thread() is self._threads[0]:
            self._let_others_read()
        failure.exit()

    def _let_others_read(self) -> None:
        """Process 0 holds the store, and must be the last to leave."""
        deadline_s = time.monotonic() + _LINGER_S
        with contextlib.suppress(Exception):
            self._exchange()
            while self._index == 0 and time.monotonic() < deadline_s:
                if self._others_know():
                    break
                time.sleep(self._pause_s / 4)
                self._exchange()

    def _others_know(self) -> bool:
        """Returns whether process 0 knows the failure, or on it all that are alive."""
        return all(
            peer.beat is None
            or peer.beat.status == "leaving"
            or peer.is_silent(self._heartbeat_s / 2)
            for index, peer in self._peers.items()
            if index != self._index
        )

    def _message(self, failure: Failure) -> str:
        lines = [f"meshlayout: {failure.text}"]
        if failure.process != self._index:
            lines.append(f"This is {self._name}, doing: {self._doing() or 'nothing'}.")
        if activity.now.checkpoint:
            lines.append(f"The newest checkpoint: {activity.now.checkpoint}.")
        lines.append("A run needs all of its processes, so all of them end.")
        return "\n  ".join("\n".join(lines).split("\n")) + "\n"

    # This process.

    def _own_failure(self, text: str, *, is_interrupt: bool = False) -> Failure:
        text = f"{self._name} {text}\n{doing_text(self._doing())}"
        return Failure(self._index, text, is_interrupt=is_interrupt)

    def _set_status(self, status: str) -> None:
        self._status = status
        self._wake.set()

    def _beat(self) -> Beat:
        now = activity.now
        return Beat(
            number=self._number,
            process=self._name,
            doing=self._doing(),
            steps=now.steps,
            idle_s=time.monotonic() - self._moved_s,
            is_waiting=any(waits for _, _, waits in list(now.ongoing.values())),
            is_compiling=bool(now.compiling),
            status=self._status,
            exit_status=self._exit_status(),
            ended=self._ended(),
        )

    def _exit_status(self) -> int:
        """Returns the status by `sys.exit` if the program has ended by that, else 0."""
        status, steps = self._exit
        # A program that has gone on since then caught it.
        return status if self._status == "ended" and steps == activity.now.steps else 0

    def _doing(self) -> str:
        """Returns a phrase about what this process is doing."""
        now, now_s = activity.now, time.monotonic()
        phrases = [
            f"{name} (for {now_s - start_s:.1f} s)"
            for name, start_s, _ in list(now.ongoing.values())
        ]
        if now.compiling:
            phrases.append(f"compiling {now.compiling}")
        elif now.name:
            calls = f", step call {now.steps}" if now.steps else ""
            phrases.append(f"{now.name}{calls} ({now_s - self._moved_s:.1f} s ago)")
        phrases += [text for text in (_user_line(), self._note) if text]
        return "; ".join(phrases)

    def _ended(self) -> list[int]:
        """Returns the processes whose programs have ended, as process 0 knows them."""
        beats = latest_beats(self._peers)
        if self._index:
            return beats[0].ended if beats else []
        return [i for i, b in beats.items() if b.status in ("ended", "interrupted")]


_watch: Watch | None = None

_LIBRARIES = tuple(
    {
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        str(Path(__file__).parent.parent),
        "<frozen",
    }
)


# As faulthandler writes a thread and its frames, the innermost first.
_THREAD = re.compile(r"[Tt]hread 0x([0-9a-f]+)[^\n]*\n((?:  [^\n]*\n)*)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def _user_line() -> str:
    """Returns the line of the user's program that the main thread is in, if any.

    Not by `sys._current_frames`: while a thread walks the frames of another one, that
    goes on, and Python 3.11 may then read freed memory. faulthandler walks them without
    letting another thread run.
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        text = file.read().decode(errors="replace")
    main_thread = threading.main_thread().ident
    for number, frames in _THREAD.findall(text):
        if int(number, 16) == main_thread:
            for filename, line, name in _FRAME.findall(frames):
                if not filename.startswith(_LIBRARIES):
                    return f"line {line} of {filename}, in {name}"
    return ""


def _answers(address: str) -> bool:
    """Returns whether something listens at an address."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), 1.0).close()
    except OSError:
        return False
    return True
