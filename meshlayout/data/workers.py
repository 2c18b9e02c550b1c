"""Worker processes that map examples, one share of the rows each.

Not an executor of `concurrent.futures`, which waits at the end of the program for a
function that never returns. A worker whose pipe closes has died.
"""

import multiprocessing
import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from meshlayout import _checks, _optional
from meshlayout._annotations import PyTree
from meshlayout.errors import DataError


class Workers:
    """Calls a function of rows and epoch in processes, started by the first call."""

    def __init__(self, function: Callable[..., list[PyTree]], count: int) -> None:
        cloudpickle: Any = _optional.require(
            "cloudpickle", extra="data", purpose="num_workers="
        )
        with _checks.noted(
            "map= and what it uses cannot be sent to worker processes: create such "
            "objects inside of it, or use num_workers=0."
        ):
            self._function = cloudpickle.dumps(function)
        self._count, self._lock = count, threading.Lock()
        self._workers: list[tuple[Any, Any]] = []  # processes and their pipes

    def __call__(self, rows: PyTree, epoch: int) -> list[PyTree]:
        """Returns the examples of some rows; raises what the function does."""
        with self._lock:  # iterations in several threads share the workers
            try:
                pipes = self._started()
                for number, pipe in enumerate(pipes):
                    share = jax.tree.map(
                        lambda x, n=number: np.array_split(x, self._count)[n], rows
                    )
                    pipe.send((share, epoch))
                results = [pipe.recv() for pipe in pipes]
            except (EOFError, ConnectionError) as error:
                self.close()
                msg = (
                    "a worker process ended while it read examples: out of memory, or "
                    "because a script does not keep what it runs under `if __name__ == "
                    "'__main__':`. What it printed says more, and num_workers=0."
                )
                raise DataError(msg) from error
            except BaseException:  # answers that nobody has read may be on the way
                self.close()
                raise
        for result in results:
            if isinstance(result, Exception):
                raise result
        return [example for examples in results for example in examples]

    def close(self) -> None:
        """Ends the processes; they start again at the next call."""
        workers, self._workers = self._workers, []
        for process, _ in workers:
            process.kill()
            process.join()

    def _started(self) -> list[Any]:
        # JAX runs threads, and a forked child may inherit a lock that one of them
        # holds. A daemon is ended with the program, whatever it is doing.
        context = multiprocessing.get_context("spawn")
        while len(self._workers) < self._count:
            pipe, far_end = context.Pipe()
            arguments = (far_end, self._function)
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            far_end.close()
            self._workers.append((process, pipe))
        return [pipe for _, pipe in self._workers]


def _work(pipe: Any, packed: bytes) -> None:
    """Answers one share of rows after another, until the other end is closed."""
    # Ctrl-C goes to all processes of a terminal, and is meant for the training process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A user's function that calls JAX must not take the accelerators from it.
    jax.config.update("jax_platforms", "cpu")
    function = pickle.loads(packed)
    with suppress(EOFError, ConnectionError):
        while True:
            rows, epoch = pipe.recv()
            try:
                result = function(rows, epoch)
            except BaseException as error:  # the training process raises all of them
                result = _sendable(error)
            pipe.send(result)


def _sendable(error: BaseException) -> Exception:
    """Returns an error whose pickle loads, and that ends no training process."""
    text = "".join(traceback.format_exception(error)).rstrip()
    plain = RuntimeError(f"{type(error).__name__}: {error}")
    for each in (error, plain):
        each.add_note(f"In a worker process:\n{text}")
    with suppress(Exception):
        if isinstance(copy := pickle.loads(pickle.dumps(error)), Exception):
            return copy
    return plain
