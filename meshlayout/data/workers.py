"""Worker processes that map examples, one share of the rows each.

Each worker has a pipe of its own, on which a share goes out and its examples come back.
An executor of `concurrent.futures` would wait for a function that never returns when
the program ends; these processes end with it. A worker whose pipe closes has died.
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

from meshlayout import _optional
from meshlayout._annotations import PyTree
from meshlayout.errors import DataError


class Workers:
    """Calls a function in worker processes, which start when it is first called.

    Args:
        function: Takes a tree of arrays with as many rows, and an epoch; returns a list
            of examples, one per row.
        count: The number of processes.

    Raises:
        DataError: If the function cannot be sent to a process.
    """

    def __init__(self, function: Callable[..., list[PyTree]], count: int) -> None:
        cloudpickle: Any = _optional.require(
            "cloudpickle", extra="data", purpose="num_workers="
        )
        try:
            self._function = cloudpickle.dumps(function)
        except Exception as error:
            msg = (
                "map= and what it uses cannot be sent to worker processes "
                f"({type(error).__name__}: {error}). Create such objects inside of "
                "map, or use num_workers=0."
            )
            raise DataError(msg) from error
        self._count, self._lock = count, threading.Lock()
        self._pipes: list[Any] = []
        self._processes: list[Any] = []

    def __call__(self, rows: PyTree, epoch: int) -> list[PyTree]:
        """Returns the examples of some rows, in order.

        Raises:
            DataError: If a worker process ended.
            Exception: Whatever the function raised.
        """
        with self._lock:  # iterations in several threads share the workers
            try:
                self._start()
                for number, pipe in enumerate(self._pipes):
                    pipe.send((jax.tree.map(self._share(number), rows), epoch))
                results = [pipe.recv() for pipe in self._pipes]
            except (EOFError, ConnectionError) as error:
                self.close()
                msg = (
                    "a worker process ended while it read examples. Running out of "
                    "memory is one cause, and a script that does not keep what it runs "
                    "under `if __name__ == '__main__':` another. What it printed says "
                    "more; num_workers=0 shows errors where they happen."
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
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _share(self, number: int) -> Callable[[np.ndarray], np.ndarray]:
        return lambda leaf: np.array_split(leaf, self._count)[number]

    def _start(self) -> None:
        # JAX runs threads, and a forked child may inherit a lock that one of them holds.
        context = multiprocessing.get_context("spawn")
        while len(self._processes) < self._count:
            pipe, far_end = context.Pipe()
            # A daemon is killed when the program ends, whatever it is doing.
            process = context.Process(
                target=_work, args=(far_end, self._function), daemon=True
            )
            process.start()
            far_end.close()
            self._processes.append(process)
            self._pipes.append(pipe)


def _work(pipe: Any, packed: bytes) -> None:
    """Answers one share of rows after another, until the other end is closed."""
    # Ctrl-C goes to all processes of a terminal, and is meant for the training process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A user's function that calls JAX must not take the accelerators from it.
    jax.config.update("jax_platforms", "cpu")
    function = pickle.loads(packed)
    with suppress(EOFError, ConnectionError):  # the training process has ended
        while True:
            pipe.send(_result(function, *pipe.recv()))


def _result(function: Callable[..., list[PyTree]], rows: PyTree, epoch: int) -> Any:
    """Returns the examples; or the error that was raised, if it can be sent."""
    try:
        return function(rows, epoch)
    except BaseException as error:  # the training process raises all of them
        note = f"In a worker process:\n{''.join(traceback.format_exception(error))}"
        error.add_note(note.rstrip())
        # Neither is an error whose pickle does not load sent, nor one that is no
        # Exception: SystemExit would end the training process.
        with suppress(Exception):
            if isinstance(pickle.loads(pickle.dumps(error)), Exception):
                return error
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        plain.add_note(note.rstrip())
        return plain
