"""One step: `Save` writes it in a thread of its own, `SavedStep` is read.

Ctrl-C cannot cut a save in two. All processes must agree on each outcome, or some would
wait forever for the others. So each exchange is reached on every path: a process that
fails sends its error instead of its result, and all of them raise the first one.
"""

import contextlib
import logging
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
from meshlayout.checkpoint import directory as steps, orbax
from meshlayout.checkpoint.load import Source, load
from meshlayout.checkpoint.match import Request
from meshlayout.cluster.channel import Channel
from meshlayout.cluster.watch import taking_part
from meshlayout.errors import CheckpointError, DamagedCheckpointError


logger = logging.getLogger("meshlayout.checkpoint")

# How often a process that waits for Orbax looks whether another one has failed.
_PEEK_S = 1.0


@dataclass(eq=False)
class Save:
    """One running save, of trees as for `orbax.start_writing`; `after` follows it.

    A Future tells of its end, and whether the thread or an interrupted caller was
    first. In Python 3.11 and 3.12, Ctrl-C breaks `Thread.join`.
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
        orbax.finish_at_exit()
        orbax.unfinished[self] = self._finish
        try:
            threading.Thread(target=self._run, name=f"checkpoint-{self.step}").start()
            self.copied.wait()
        except BaseException:  # Ctrl-C, after which the caller may donate the state
            if not self.end.cancel():
                self.copied.wait()
            raise

    def error(self) -> BaseException | None:
        """Waits for its end, and returns its error; may be interrupted and repeated."""
        # If Ctrl-C came before its thread, it never runs.
        error = None if self.end.cancel() else self.end.result()
        orbax.unfinished.pop(self, None)
        return error

    def _finish(self) -> None:
        error = self.error()
        if error is not None:  # no later call is left to raise it
            logger.error("%s", error)

    # In the thread.

    def _run(self) -> None:
        if not self.end.set_running_or_notify_cancel():
            return
        error: BaseException | None = None
        try:
            with taking_part():
                self._write()
        except BaseException as problem:
            error = problem
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
            with orbax.undisturbed():
                response = orbax.start_writing(path, trees, self.facts)
            del trees
            self.copied.set()
            self._await(response)
            digests = {} if is_remote else steps.digests(path)
        parts = channel.exchange(digests).values()

        def finish() -> None:
            if not is_remote:
                with failures(self.step, self.directory):
                    steps.seal(path, {k: v for part in parts for k, v in part.items()})
                    steps.take_name(self.directory, self.step)

        # The others wait for what process 0 does, so that all list the same steps.
        channel.on_first(finish)
        seconds, size = time.perf_counter() - begin_s, _render.bytes_text(nbytes)
        logger.info("saved step %d: %s in %.2f s", self.step, size, seconds)
        channel.on_first(self.after)

    def _await(self, response: Any) -> None:
        """Waits for Orbax, which would wait for minutes for a process that failed."""
        while jax.process_count() > 1:
            begin_s = time.monotonic()
            try:
                return response.result(timeout=_PEEK_S)
            except TimeoutError:
                if time.monotonic() - begin_s < _PEEK_S:
                    raise  # Orbax's own
            failure = self.channel.failure()
            if failure:
                raise CheckpointError(failure)
        return response.result()


@contextlib.contextmanager
def failures(step: int, directory: Path) -> Iterator[None]:
    """Raises what fails inside as the error of a save."""
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


@dataclass(frozen=True)
class SavedStep:
    """A step that is intact: its number, directory, and the facts saved with it.

    `confirm` is called before arrays are read, which no process begins alone.
    """

    number: int
    path: Path
    facts: Mapping[str, Any]
    confirm: Callable[[], Any]

    @classmethod
    def open(
        cls, number: int, path: Path, confirm: Callable[[], Any], *, verify: bool
    ) -> "SavedStep":
        """Opens a step, and compares its files with what was saved."""
        facts = steps.read_facts(path)
        steps.check(path, verify=verify)
        if facts["step"] != number:
            msg = f"{path} is step {facts['step']}: the directory was renamed."
            raise DamagedCheckpointError(msg)
        return cls(number, path, facts, confirm)

    def source(self, tree: str = "state") -> Source:
        """Returns one of its trees as a source to load from."""
        leaves = self.facts["items"][tree]
        return orbax.saved_tree(self.path, tree, leaves, str(self.path), self.confirm)

    def load(self, request: Request, tree: str = "state") -> Any:
        """Returns one of its trees, restored into `request.like`."""
        with orbax.undisturbed():
            return load(self.source(tree), request)
