"""Worker processes that map examples, of an executor that never holds up the exit.

Python joins executors when a program ends, which would wait for a function that never
returns. So their processes are killed before.
"""

import itertools
import multiprocessing
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from typing import Any

import jax
import numpy as np

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout.errors import DataError


class Workers:
    """Calls a function of rows and epoch in processes, started by the first call."""

    def __init__(self, function: Callable[..., list[PyTree]], count: int) -> None:
        needs = {"extra": "data", "purpose": "num_workers="}
        cloudpickle: Any = _checks.require("cloudpickle", **needs)
        with _checks.noted(
            "map= and what it uses cannot be sent to worker processes: create such "
            "objects inside of it, or use num_workers=0."
        ):
            packed = cloudpickle.dumps(function)
        self._count = count
        # JAX runs threads, and a forked child may inherit a lock that one of them
        # holds.
        context = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(count, context, _start, (packed,))
        _all.add(self)

    def __call__(self, rows: PyTree, epoch: int) -> list[PyTree]:
        """Returns the examples of some rows; raises what the function does."""
        shares = [
            jax.tree.map(lambda x, n=number: np.array_split(x, self._count)[n], rows)
            for number in range(self._count)
        ]
        try:
            results = self._executor.map(_call, shares, itertools.repeat(epoch))
            return list(itertools.chain.from_iterable(results))
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process ended while it read examples: out of memory, or "
                "because a script does not keep what it runs under `if __name__ == "
                "'__main__':`. What it printed says more, and num_workers=0."
            ) from error

    def close(self) -> None:
        """Ends the processes."""
        # A private attribute, until Python 3.14: test_data_exit notices a change.
        for process in list((self._executor._processes or {}).values()):
            process.kill()
        self._executor.shutdown()


_all: weakref.WeakSet[Workers] = weakref.WeakSet()


def _close_all() -> None:
    for workers in list(_all):
        workers.close()


# Runs before the executor's own hook, which its import has registered.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]

_function: Callable[..., list[PyTree]]


def _start(packed: bytes) -> None:
    """Prepares a worker process."""
    global _function
    # Ctrl-C goes to all processes of a terminal, and is meant for the training process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # A user's function that calls JAX must not take the accelerators from it.
    jax.config.update("jax_platforms", "cpu")
    _function = pickle.loads(packed)


def _end_with_parent() -> None:
    parent: Any = multiprocessing.parent_process()
    parent.join()  # it may be killed
    os._exit(1)


def _call(rows: PyTree, epoch: int) -> list[PyTree]:
    return _function(rows, epoch)
