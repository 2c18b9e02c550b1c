"""Calls of one function in this thread, in several threads or in worker processes."""

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol

import cloudpickle

from meshlayout.errors import DataError


_PROGRAM = Path(__file__).with_name("worker_process.py")


class Workers(Protocol):
    """Something that calls a function several times, perhaps at once.

    Attributes:
        count: How many there are; 0 is the calling thread.
        text: What they are, as in "2 threads".
    """

    count: int
    text: str

    def run(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Returns what the function returns for each tuple of arguments, in order."""
        ...

    def is_ready(self) -> bool:
        """Tells whether a call would not wait for a start."""
        ...

    def close(self) -> None:
        """Ends them."""
        ...


class InCaller:
    """Calls in the calling thread.

    Args:
        function: What is called.
    """

    count = 0
    text = "0 workers"

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def run(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Returns the results, in order."""
        return [self._function(*call) for call in calls]

    def is_ready(self) -> bool:
        """Always: there is nothing to start."""
        return True

    def close(self) -> None:
        """Has nothing to end."""


class Threads:
    """Calls in threads of this process.

    Args:
        function: What is called; several calls run at once.
        count: How many threads.
    """

    def __init__(self, function: Callable[..., Any], count: int) -> None:
        self.count = count
        self.text = f"{count} {'thread' if count == 1 else 'threads'}"
        self._function = function
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="meshlayout-read")
        # Threads of a pool that was forgotten would wait for work for ever.
        weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)

    def run(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Returns the results, in order; raises the first error in that order."""
        return list(self._pool.map(lambda call: self._function(*call), calls))

    def is_ready(self) -> bool:
        """Always: threads start at once."""
        return True

    def close(self) -> None:
        """Lets the threads end after what they are doing."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Processes:
    """Calls in worker processes, which start in the background.

    Args:
        function: What is called; it and what it holds are sent once.
        count: How many processes.

    Raises:
        DataError: If the function cannot be sent to another process.
    """

    def __init__(self, function: Callable[..., Any], count: int) -> None:
        self.count = count
        self.text = f"{count} {'process' if count == 1 else 'processes'}"
        packed = packed_function(function)
        self._all = [WorkerProcess(packed) for _ in range(count)]
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        for worker in self._all:
            self._idle.put(worker)
        # A thread per process, which waits for its answers.
        self._threads = Threads(_Dispatch(self._idle), count)

    def run(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Returns the results, in order; raises the first error in that order."""
        return self._threads.run(calls)

    def is_ready(self) -> bool:
        """Tells whether all processes have loaded the function."""
        return all(worker.is_ready() for worker in self._all)

    def close(self) -> None:
        """Ends the processes at once."""
        for worker in self._all:
            worker.close()
        self._threads.close()


class _Dispatch:
    """Hands a call to a process that has nothing to do."""

    def __init__(self, idle: "queue.SimpleQueue[WorkerProcess]") -> None:
        self._idle = idle

    def __call__(self, *call: Any) -> Any:
        worker = self._idle.get()
        try:
            return worker.call(call)
        finally:
            self._idle.put(worker)


class WorkerProcess:
    """One worker process and the pipe to it.

    Args:
        packed: The function that it calls, pickled.
    """

    def __init__(self, packed: bytes) -> None:
        self._pipe, theirs = Pipe()
        # Worker processes leave accelerators to the process that trains.
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            [sys.executable, str(_PROGRAM), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        theirs.close()
        self._loaded = False
        self._failure: Exception | None = None
        self.close = weakref.finalize(self, _end, self._process, self._pipe)
        # Sent by a thread: the pipe takes a long message as slowly as it is read.
        sender = threading.Thread(
            target=_send, args=(self._pipe, sys.path, packed), daemon=True
        )
        sender.start()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def is_ready(self) -> bool:
        """Tells whether the function is loaded, or could not be."""
        return self._loaded or (not self._pipe.closed and self._pipe.poll())

    def call(self, arguments: tuple[Any, ...]) -> Any:
        """Returns what the function returns in the process.

        Args:
            arguments: Its arguments, which can be pickled.

        Raises:
            DataError: If the process ended.
        """
        if not self._loaded:
            self._load()
        if self._failure is not None:
            raise self._failure
        try:
            self._pipe.send_bytes(pickle.dumps(arguments, protocol=5))
        except OSError as error:
            raise DataError(self._ended()) from error
        return self._receive()

    def _load(self) -> None:
        self._loaded = True
        try:
            self._receive()
        except Exception as error:
            self._failure = error

    def _receive(self) -> Any:
        try:
            went_well, result = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise DataError(self._ended()) from error
        if not went_well:
            raise result
        return result

    def _ended(self) -> str:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            how = "closed its pipe"
        else:
            how = f"ended with exit code {code}"
            if code < 0:
                how = f"was killed by {signal.Signals(-code).name}"
        return (
            f"the worker process {self.pid} {how} while it read examples. Memory that "
            "ran out is the usual cause: use fewer workers, or num_workers=0, which "
            "shows errors where they happen."
        )


def packed_function(function: Callable[..., Any]) -> bytes:
    """Returns a function as bytes for another process.

    Args:
        function: The function, which may be local or a lambda.

    Raises:
        DataError: If it holds what cannot be sent, as a lock or an open file.
    """
    try:
        return cloudpickle.dumps(function)
    except Exception as error:
        msg = (
            "map= and what it uses cannot be sent to worker processes "
            f"({type(error).__name__}: {error}). Create such objects inside of map, or "
            "use worker_kind='threads'."
        )
        raise DataError(msg) from error


def _send(pipe: Connection, path: list[str], packed: bytes) -> None:
    try:
        pipe.send(path)
        pipe.send_bytes(packed)
    except OSError:  # the process has ended; whoever waits for its answer is told
        return


def _end(process: subprocess.Popen[bytes], pipe: Connection) -> None:
    process.kill()
    process.wait()
    pipe.close()
