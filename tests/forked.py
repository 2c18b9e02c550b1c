"""Programs that start in no time, forked by a process that has imported everything.

`python -m tests.forked` has started no backend of JAX. For each line of its input, a job
as JSON, it forks a process, which calls a function by its name and then ends as any
program does. It says when a job starts, what the job says, and how it ends.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path


ROOT = Path(__file__).parent.parent


class Program:
    """A program, in the test's process; what it prints is in the file `log`."""

    def __init__(self, log):
        self.log, self.events = log, queue.Queue()
        self.pid, self.code, self.said = None, None, []

    def next_event(self, timeout_s=90):
        kind, value = self.events.get(timeout=timeout_s)
        if kind == "pid":
            self.pid = int(value)
        elif kind == "end":
            self.code = int(value)
        else:
            self.said.append(json.loads(value))
        return kind, value

    def wait_until(self, is_enough):
        """Waits until what it has said is enough, or it has ended."""
        while self.code is None and not is_enough(self.said):
            self.next_event()

    def wait(self):
        """Waits for its end, and returns its status: negative for a signal."""
        self.wait_until(lambda said: False)
        return self.code

    def kill(self, number=signal.SIGKILL):
        while self.pid is None:
            self.next_event()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


_starting = threading.Lock()


@functools.cache
def _server():
    """Starts the server; returns its process, and a list for the programs."""
    programs = []
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.forked"],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )

    def listen():
        for line in process.stdout or ():
            number, kind, value = line.decode().split(" ", 2)
            programs[int(number)].events.put((kind, value))
        for program in programs:
            program.events.put(("end", -1))

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()

    @atexit.register
    def close():
        os.killpg(process.pid, signal.SIGKILL)  # programs that still run, too
        process.wait()
        listener.join()
        process.stdin.close()
        process.stdout.close()

    return process, programs


def start(log, function, *args):
    """Starts a program that calls a function of a module with arguments of JSON."""
    name, program = f"{function.__module__}:{function.__name__}", Program(log)
    with _starting:  # threads of a test start programs at the same time
        process, programs = _server()
        line = json.dumps([len(programs), str(log), name, args]) + "\n"
        programs.append(program)
        process.stdin.write(line.encode())
        process.stdin.flush()
    return program


# In the programs.

_own = []


def say(value):
    """Says something to the test."""
    number, pipe = _own
    os.write(pipe, f"{number} said {json.dumps(value)}\n".encode())


def serve():
    """Forks a program for every job, in which it returns the job."""
    warnings.filterwarnings("ignore", "os.fork")
    for line in sys.stdin:
        number, log, *job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _own[:] = number, os.dup(1)
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, 1)
            os.dup2(file, 2)
            return job
        os.write(1, f"{number} pid {pid}\n".encode())
        threading.Thread(target=_reap, args=(number, pid), daemon=True).start()
    return None


def _reap(number, pid):
    _, status = os.waitpid(pid, 0)
    os.write(1, f"{number} end {os.waitstatus_to_exitcode(status)}\n".encode())


# What programs import, so that none has to.
_IMPORTED = (
    *("optax", "orbax.checkpoint.experimental.v1", "pytest"),
    *("meshlayout.checkpoint.checkpointer", "meshlayout.trainer.trainer"),
)


def _main():
    for name in _IMPORTED:
        importlib.import_module(name)
    job = importlib.import_module("tests.forked").serve()
    if job is not None:
        name, args = job
        module, function = name.split(":")
        getattr(importlib.import_module(module), function)(*args)


if __name__ == "__main__":
    _main()
