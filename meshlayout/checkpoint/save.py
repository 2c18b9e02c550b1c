"""One save, in a thread of its own, which Ctrl-C cannot interrupt.

All processes must agree on each outcome, or some would wait forever for the others. So
each exchange is reached on every path: a process that fails sends its error instead of
its result, and all of them raise the first one.
"""

import concurrent.futures.thread
import contextlib
import functools
import logging
import os
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from meshlayout import _render
from meshlayout._counts import taking_part
from meshlayout.checkpoint import directory as steps, orbax
from meshlayout.cluster.channel import Channel
from meshlayout.cluster.startup import shutdown
from meshlayout.errors import CheckpointError


logger = logging.getLogger("meshlayout.checkpoint")

_turn = threading.Lock()

# How often a process that waits for Orbax looks whether another one has failed.
_PEEK_S = 1.0


@dataclass(eq=False)
class Save:
    """One running save, of trees as for `orbax.start_writing`; `after` follows it.

    A Future signals its end: in Python 3.11 and 3.12, Ctrl-C breaks `Thread.join`.
    """

    directory: Path
    step: int
    trees: Mapping[str, Mapping[str, Any]]
    facts: Mapping[str, Any]
    channel: Channel
    after: Callable[[], None]
    copied: threading.Event = field(default_factory=threading.Event)
    end: Future[BaseException | None] = field(default_factory=Future)

    def start(self) -> None:
        """Returns when the state may be donated."""
        _finish_at_exit()
        name = f"checkpoint-{self.step}"
        try:
            _unfinished.add(self)
            threading.Thread(target=self._run, name=name).start()
            self.copied.wait()
        except BaseException:  # Ctrl-C
            # Perhaps before the thread began, for which other processes wait.
            threading.Thread(target=self._run, name=name).start()
            self.copied.wait()  # the caller may donate the state afterwards
            raise

    def error(self) -> BaseException | None:
        """Waits for its end, and returns its error; may be interrupted and repeated."""
        # If Ctrl-C came before `start`, it never runs.
        error = None if self.end.cancel() else self.end.result()
        _unfinished.discard(self)
        return error

    def _run(self) -> None:
        with _turn:  # of two threads, the first one saves
            if self.end.running() or self.end.done():
                return
            self.end.set_running_or_notify_cancel()
        try:
            with taking_part():
                self._write()
            _unfinished.discard(self)  # else it would keep a lost checkpointer's lock
            self.after = lambda: None
            self.end.set_result(None)
        except BaseException as error:
            self.trees = {}
            self.end.set_result(error)
            self.copied.set()

    def _write(self) -> None:
        is_remote, channel = steps.is_remote(self.directory), self.channel
        name = str(self.step) if is_remote else f"{self.step}.new"
        path, begin_s = self.directory / name, time.perf_counter()
        with channel.failure_told(), failures(self.step, self.directory):
            trees, self.trees = self.trees, {}
            nbytes = sum(x.nbytes for tree in trees.values() for x in tree.values())
            response = orbax.start_writing(path, trees, self.facts)
            del trees
            self.copied.set()
            self._await(response)
            digests = {} if is_remote else steps.digests(path)
        parts = channel.exchange(digests).values()

        def finish() -> None:
            with failures(self.step, self.directory):
                if not is_remote:
                    steps.publish(path, {k: v for x in parts for k, v in x.items()})
                self.after()

        # The others wait for what process 0 does, so that all list the same steps.
        channel.on_first(finish)
        facts = self.step, _render.bytes_text(nbytes), time.perf_counter() - begin_s
        logger.info("saved step %d: %s in %.2f s", *facts)

    def _await(self, response: Any) -> None:
        """Waits for Orbax, which waits for minutes for a process that failed."""
        while jax.process_count() > 1:
            begin_s = time.monotonic()
            try:
                return response.result(timeout=_PEEK_S)
            except TimeoutError:
                if time.monotonic() - begin_s < _PEEK_S:
                    raise  # Orbax's own
            if failure := self.channel.failure():
                _left_behind.set()
                raise CheckpointError(failure)
        return response.result()


@contextlib.contextmanager
def failures(step: int, directory: Path) -> Iterator[None]:
    """Raises any error inside as the error of a save."""
    try:
        yield
    except CheckpointError:
        raise
    except (Exception, CancelledError) as error:  # the second at Orbax's barriers
        msg = (
            f"step {step} could not be saved in {directory}: {orbax.reason(error)}. "
            "Earlier steps are unchanged; the next save starts anew."
        )
        raise CheckpointError(msg) from error


def finish_in(directory: Path) -> None:
    """Waits for saves of other checkpointers, as in a notebook cell run twice."""
    concurrent.futures.wait([x.end for x in _unfinished if x.directory == directory])


# Saves that run, or whose error was not raised; a forked child lacks their threads.
_unfinished: set[Save] = set()
_left_behind = threading.Event()  # Orbax may still wait for a process that has failed

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unfinished.clear)


@functools.cache
def _finish_at_exit() -> None:
    """Makes the interpreter finish saves before it shuts down thread pools.

    At exit Python first shuts down the pools that Orbax writes with, and then waits for
    threads: a running save would hang for minutes, and be lost. Functions registered so
    run in reverse order, so ours runs before that of `concurrent.futures`. The API is
    private (Python 3.9 to 3.14); `test_a_process_that_ends_finishes_its_save` notices.
    """
    assert concurrent.futures.thread  # its import registers its function first
    threading._register_atexit(_finish_all)  # type: ignore[attr-defined]


def _finish_all() -> None:
    for save in list(_unfinished):
        try:
            error = save.error()
        except KeyboardInterrupt:  # which would abort the process here
            logger.warning("finishing a save first; press Ctrl-C again to abandon it")
            error = save.error()
        if error is not None:  # no later call is left to raise it
            logger.error("%s", error)
    if _left_behind.is_set():
        shutdown()  # ends its wait; otherwise the pools would never shut down
