"""`Save`: one save, in a thread of its own, where Ctrl-C cannot cut it in two.

All processes must agree on each outcome, or some would wait forever for the others. So
each exchange is reached on every path: a process that fails sends its error instead of
its result, and all of them raise the first one.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax

from meshlayout import _render
from meshlayout.checkpoint import directory as steps, orbax
from meshlayout.cluster import activity
from meshlayout.cluster.channel import Channel
from meshlayout.errors import CheckpointError


logger = logging.getLogger("meshlayout.checkpoint")

# How often a process that waits for Orbax looks whether another one has failed.
_PEEK_S = 1.0


class Save:
    """One running save, of trees by name of arrays by keys; see `orbax.start_writing`.

    A Future tells of its end, and whether the thread or an interrupted caller was
    first. `Thread.join` cannot be trusted: in Python 3.11 and 3.12 an exception inside
    it, such as Ctrl-C, marks a running thread as stopped. The channel connects the
    threads of the processes; `after` is called on process 0 once the step exists.
    """

    def __init__(
        self,
        directory: Path,
        step: int,
        trees: Mapping[str, Mapping[Any, Any]],
        facts: Mapping[str, Any],
        channel: Channel,
        after: Callable[[], None],
    ) -> None:
        self._directory, self._step, self._channel = directory, step, channel
        self._trees, self._facts, self._after = trees, facts, after
        self._begin_s, self._pid = time.perf_counter(), os.getpid()
        self._copied = threading.Event()
        self._result: Future[CheckpointError | None] = Future()

    @property
    def is_done(self) -> bool:
        """Whether it has finished, successfully or not."""
        return self._result.done()

    def start(self) -> None:
        """Returns when the state may be donated."""
        orbax.finish_at_exit()
        orbax.unfinished[self] = self._finish
        try:
            threading.Thread(target=self._run, name=f"checkpoint-{self._step}").start()
            self._copied.wait()
        except BaseException:  # Ctrl-C, after which the caller may donate the state
            if not self._result.cancel():
                self._copied.wait()
            raise

    def wait(self) -> CheckpointError | None:
        """Waits for its end, and returns its error; may be interrupted and repeated."""
        # A forked child does not have the thread, and one that was cancelled never ran.
        is_here = self._pid == os.getpid() and not self._result.cancel()
        error = self._result.result() if is_here else None
        orbax.unfinished.pop(self, None)
        return error

    def _finish(self) -> None:
        if not self.is_done:
            logger.info("the process ends once step %d is saved", self._step)
        error = self.wait()
        if error is not None:  # no later call is left to raise it
            logger.error("%s", error)

    # In the thread.

    def _run(self) -> None:
        if not self._result.set_running_or_notify_cancel():
            return
        error = None
        try:
            with activity.during(f"saving step {self._step} in {self._directory}"):
                self._write()
        except BaseException as problem:
            error = failed(self._step, self._directory, problem)
        self._trees = {}
        if error is None:
            orbax.unfinished.pop(self, None)
        self._result.set_result(error)
        self._copied.set()

    def _write(self) -> None:
        is_remote, channel = steps.is_remote(self._directory), self._channel
        name = str(self._step) if is_remote else f"{self._step}.new"
        path = self._directory / name
        with channel.failure_told(), failures(self._step, self._directory):
            trees, self._trees = self._trees, {}
            nbytes = sum(x.nbytes for tree in trees.values() for x in tree.values())
            with orbax.undisturbed():
                response = orbax.start_writing(path, trees, self._facts)
            del trees
            stall_s = time.perf_counter() - self._begin_s
            self._copied.set()
            self._await(response)
            digests = {} if is_remote else steps.digests(path)
        parts = channel.exchange(digests).values()
        # The others wait for what process 0 does, so that all list the same steps.
        with channel.failure_told(), failures(self._step, self._directory):
            if jax.process_index() == 0 and not is_remote:
                steps.seal(path, {k: v for part in parts for k, v in part.items()})
                steps.take_name(self._directory, self._step)
        channel.exchange(None)
        activity.now.checkpoint = f"step {self._step} in {self._directory}"
        size, end_s = _render.bytes_text(nbytes), time.perf_counter()
        text = "saved step %d: %s in %.2f s (the caller waited %.2f s)"
        logger.info(text, self._step, size, end_s - self._begin_s, stall_s)
        channel.on_first(self._after)

    def _await(self, response: Any) -> None:
        """Waits for Orbax, which would wait for minutes for a process that failed."""
        while jax.process_count() > 1:
            begin_s = time.monotonic()
            try:
                return response.result(timeout=_PEEK_S)
            except TimeoutError:
                if time.monotonic() - begin_s < _PEEK_S:
                    raise  # Orbax's own
            failure = self._channel.failure()
            if failure:
                raise CheckpointError(failure)
        return response.result()


def failed(step: int, directory: Path, error: BaseException) -> CheckpointError:
    """Returns the error of a save, from what went wrong."""
    if isinstance(error, CheckpointError):
        return error
    problem = CheckpointError(
        f"step {step} could not be saved in {directory}: {orbax.reason(error)}. "
        "Earlier steps are unchanged; the next save starts anew."
    )
    problem.__cause__ = error
    return problem


@contextlib.contextmanager
def failures(step: int, directory: Path) -> Iterator[None]:
    """Raises what fails inside as the error of a save."""
    try:
        yield
    except Exception as error:
        raise failed(step, directory, error) from error.__cause__
