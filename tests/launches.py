"""Runs of the launcher, for tests: forked from a process that has imported it.

A launch is `python -m meshlayout.launch ...` in a process of its own, without the
seconds that the import takes each time. Run as `python -m tests.launches` it serves
jobs: each line of its input is a job as JSON, for which it forks a launcher; it says the
launcher's process id, and later how it ended.
"""

import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

from meshlayout.cluster import launcher


ROOT = Path(__file__).parent.parent


class Launch:
    """A launcher that runs, or has ended.

    Attributes:
        pid: Its process id.
    """

    def __init__(self, folder, events):
        self._out, self._err = _files(folder)
        self._events = events
        self.pid = events.get(timeout=60)
        self._status = None

    def wait(self, timeout_s=300):
        """Returns its exit status, as a shell has it."""
        if self._status is None:
            self._status = self._events.get(timeout=timeout_s)
        return self._status

    def kill(self, number=signal.SIGKILL):
        os.kill(self.pid, number)

    @property
    def out(self):
        return self._out.read_text()

    @property
    def err(self):
        return self._err.read_text()

    def wait_for(self, text, times=1, timeout_s=300):
        """Waits until the launcher has printed a text to stdout so often."""
        deadline = time.monotonic() + timeout_s
        while self.out.count(text) < times:
            assert time.monotonic() < deadline, (self.out, self.err)
            assert self._status is None, (self.out, self.err)
            with contextlib.suppress(queue.Empty):
                self._status = self._events.get(timeout=0.01)


class Launcher:
    """Starts launches; ends those that are left."""

    def __enter__(self):
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.launches"],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._numbers, self._events = itertools.count(), {}
        self._running = {}
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        return self

    def __exit__(self, *error):
        for pid in list(self._running.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # its guard ends its processes
        self._server.stdin.close()
        self._server.wait(60)
        self._listener.join()
        self._server.stdout.close()

    def _listen(self):
        for line in self._server.stdout or ():
            kind, number, value = line.decode().split()
            if kind == "pid":
                self._running[int(number)] = int(value)
            else:
                self._running.pop(int(number), None)
            self._events[int(number)].put(int(value))

    def start(self, folder, *arguments, **environment):
        """Starts `launch` with arguments, in a folder; its output goes to files there."""
        number = next(self._numbers)
        self._events[number] = queue.Queue()
        for path in _files(folder):
            path.write_text("")
        job = {
            "number": number,
            "folder": str(folder),
            "arguments": [str(argument) for argument in arguments],
            "environment": environment,
        }
        self._server.stdin.write((json.dumps(job) + "\n").encode())
        self._server.stdin.flush()
        return Launch(folder, self._events[number])

    def run(self, folder, *arguments, **environment):
        """Runs `launch` to its end."""
        launch = self.start(folder, *arguments, **environment)
        launch.wait()
        return launch


def _files(folder):
    return folder / "out.txt", folder / "err.txt"


def _launch(job):
    """Becomes a launcher; does not return."""
    status = 70
    try:
        os.chdir(job["folder"])
        os.environ.update(job["environment"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for target, path in enumerate(_files(Path(job["folder"])), 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), target)
        status = launcher.main(job["arguments"])
    except SystemExit as error:
        status = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _reap(number, pid):
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    os.write(1, f"end {number} {128 - code if code < 0 else code}\n".encode())


def _serve():
    warnings.filterwarnings("ignore", "os.fork")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _launch(job)
        os.write(1, f"pid {job['number']} {pid}\n".encode())
        threading.Thread(target=_reap, args=(job["number"], pid), daemon=True).start()


if __name__ == "__main__":
    _serve()
