"""`StepWriter`: one save, most of which runs in a background thread.

The caller waits only until the state is on the host, and may then donate it. A thread
computes fingerprints of those host copies, waits for the files, and commits the step by
its manifest. Fingerprints are not computed on the devices: that took a compiled program
for each distinct shape and a dispatch for each array, all in the caller's thread, and
blocked it three to four times as long as the copy itself.

An Event signals the end of a save. `Thread.join` and `is_alive` cannot be trusted: in
Python 3.11 and 3.12 an exception inside `join`, such as Ctrl-C, marks a running thread
as stopped, and the next `join` returns at once.

All processes must agree on the outcome, or some would wait forever for the others. So
each exchange is reached on every path: a process that fails sends its error instead of
its result, and all of them raise the first one.
"""

import atexit
import concurrent.futures.thread
import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from meshlayout import _render
from meshlayout.checkpoint import files, lease, orbax
from meshlayout.checkpoint.attempt import Attempt, NotDurableError
from meshlayout.checkpoint.fingerprint import Sums, slice_sums, text_of, total
from meshlayout.checkpoint.lease import Lease
from meshlayout.checkpoint.manifest import Manifest, SavedFile, SavedLeaf
from meshlayout.checkpoint.snapshot import Shard, host_shards
from meshlayout.checkpoint.store import AnyPath
from meshlayout.cluster import activity
from meshlayout.cluster.channel import Channel
from meshlayout.errors import CheckpointError


logger = logging.getLogger("meshlayout.checkpoint")

# Files of up to this size are hashed. Reading larger ones back would take time; they
# hold arrays, whose fingerprints show damage.
_HASHED_BYTES = 4 * 2**20

# Saves that are running, or whose error has not been raised yet.
_unsettled: "set[StepWriter]" = set()


@dataclass(eq=False, kw_only=True)
class StepWriter:
    """One running save.

    Attributes:
        directory: The directory of all steps.
        step: The step.
        leaves: The state's leaves for the manifest, without fingerprints.
        arrays: Its arrays by their names in the files; empty once they are on the host.
        data: The input iterator's state, as the content of a file; None without one.
        metadata: The user's metadata as JSON.
        metrics: The metrics at this step.
        hold: Returns the lease of the directory; called on process 0.
        channel: Exchanges messages between the background threads.
        after: Called on process 0 once the step exists.
        error: The error of a finished save that failed; None otherwise.
    """

    directory: AnyPath
    step: int
    leaves: list[SavedLeaf]
    arrays: dict[str, Any]
    data: bytes | None
    metadata: Any
    metrics: dict[str, float]
    hold: Callable[[], Lease]
    channel: Channel
    after: Callable[[], None]
    error: CheckpointError | None = None

    def __post_init__(self) -> None:
        self.nbytes = sum(leaf.nbytes for leaf in self.leaves)
        self._begin_s, self._stall_s = time.perf_counter(), 0.0
        self._attempt: Attempt | None = None  # on process 0
        # By array: its shape, and this process's shards of it.
        self._shards: dict[str, tuple[Sequence[int], list[Shard]]] = {}
        self._wait: Callable[[], None] | None = None
        self._problem: Exception | None = None
        self._finished = threading.Event()
        # A token: whoever pops it, the thread or a caller who was interrupted while
        # starting it, ends the save. Popping from a list is atomic.
        self._turn = [True]

    @property
    def is_done(self) -> bool:
        """Whether it has finished, successfully or not."""
        return self._finished.is_set()

    def wait(self) -> None:
        """Waits until it has finished; may be interrupted and called again."""
        self._finished.wait()

    def settle(self) -> None:
        """Raises the error of a finished save; called once.

        Raises:
            CheckpointError: If the step could not be saved.
        """
        _unsettled.discard(self)
        if self.error is not None:
            raise self.error

    def start(self, channel: Channel) -> None:
        """Copies the state from the devices, and starts a thread for the rest.

        Raises:
            CheckpointError: If nothing can be written, or the processes disagree.
        """
        _finish_at_exit()
        _unsettled.add(self)
        try:
            with activity.during(f"starting to save step {self.step}"):
                self._begin(channel)
            self._stall_s = time.perf_counter() - self._begin_s
            name = f"checkpoint-{self.step}"
            threading.Thread(target=self._run, name=name, daemon=False).start()
        except BaseException:
            # Ctrl-C may come after the thread has started, which then runs to its end.
            if self._turn and self._turn.pop():
                self._end()
                _unsettled.discard(self)
                self._finished.set()
            raise

    def _begin(self, channel: Channel) -> None:
        facts = [(leaf.path, leaf.shape, leaf.dtype) for leaf in self.leaves]
        message: dict[str, Any] = {
            "step": self.step,
            "directory": str(self.directory),
            "state": files.digest(repr(facts).encode()),
        }
        with self._failure_told(channel):
            if jax.process_index() == 0:
                self._attempt = Attempt.begin(self.directory, self.step, self.hold())
                message["arrays"] = (
                    f"{self._attempt.folder.name}/{self._attempt.arrays}"
                )
        messages = list(channel.exchange(message).values())
        # Before anything is written: Orbax would wait for its peers without a word.
        _check_agreement(messages)
        if not self.arrays:
            return
        try:
            where = self.directory / messages[0]["arrays"]
            self._wait = orbax.start_writing(where, self.arrays)
            self._shards = {
                name: (array.shape, host_shards(array))
                for name, array in self.arrays.items()
            }
            # From now on the caller may donate the devices' memory.
            self.arrays = {}
        except Exception as error:
            if jax.process_count() == 1:
                raise self._failed(orbax.reason(error)) from error
            # The others have started to write: tell them in the next exchange, which
            # is in the background.
            self._problem = error

    # In the thread.

    def _run(self) -> None:
        try:
            self._turn.pop()
        except IndexError:
            return
        try:
            with activity.during(f"saving step {self.step} in {self.directory}"):
                self._finish()
        except CheckpointError as error:
            self.error = error
        except BaseException as error:
            self.error = self._failed(orbax.reason(error))
            self.error.__cause__ = error
        if self.error is None:
            _unsettled.discard(self)
        self._finished.set()

    def _finish(self) -> None:
        try:
            with self._failure_told(self.channel):
                written = self._written()
            sums = list(self.channel.exchange(written).values())
        except CheckpointError:
            self._end()
            raise
        # The others wait for retention, too, so that all list the same steps.
        self.channel.on_first(functools.partial(self._commit, sums))
        activity.now.checkpoint = f"step {self.step} in {self.directory}"

    def _written(self) -> dict[str, Sums]:
        """Waits for the files; returns the sums of this process's shards."""
        if self._problem is not None:
            raise self._problem
        sums = {
            name: total(slice_sums(values, starts, shape) for starts, values in shards)
            for name, (shape, shards) in self._shards.items()
        }
        self._shards = {}  # frees the host copies as soon as Orbax needs them no more
        if self._wait is not None:
            self._wait()
        return sums

    def _commit(self, sums: Sequence[Mapping[str, Sequence[int]]]) -> None:
        """Makes the step exist, and applies retention; on process 0."""
        attempt = self._attempt
        assert attempt is not None
        try:
            contents = self._manifest(attempt, sums)
            attempt.commit(contents.to_bytes())
        except NotDurableError as error:
            # `after` is skipped: older steps that are durable must not be deleted.
            msg = (
                f"step {self.step} is written to {self.directory}, but may not survive "
                f"a power cut: {error}."
            )
            raise CheckpointError(msg) from error
        except Exception as error:
            self._end()
            raise self._failed(orbax.reason(error)) from error
        logger.info(
            "saved step %d: %s in %.2f s (%s on disk; the caller waited %.2f s)",
            self.step,
            _render.bytes_text(self.nbytes),
            time.perf_counter() - self._begin_s,
            _render.bytes_text(contents.file_bytes),
            self._stall_s,
        )
        try:
            attempt.end()
            self.after()
        except Exception as error:
            raise CheckpointError(f"step {self.step} is saved, but {error}") from error

    def _manifest(
        self, attempt: Attempt, sums: Sequence[Mapping[str, Sequence[int]]]
    ) -> Manifest:
        """Writes the input iterator's state, and returns the manifest of all files."""
        saved: dict[str, SavedFile] = {}
        if self.data is not None:
            files.write_whole(attempt.folder / attempt.data, self.data)
            saved[attempt.data] = SavedFile(len(self.data), files.digest(self.data))
        leaves: list[SavedLeaf] = []
        for leaf in self.leaves:
            if leaf.array is not None:
                parts = (own[leaf.array] for own in sums)
                leaf = replace(leaf, fingerprint=text_of(total(parts)))
            leaves.append(leaf)
        has_arrays = any(leaf.array is not None for leaf in leaves)
        if has_arrays:
            saved |= _saved_files(attempt.folder, attempt.arrays)
        return Manifest(
            step=self.step,
            saved_at=time.time(),
            num_processes=jax.process_count(),
            arrays=attempt.arrays if has_arrays else None,
            data=None if self.data is None else attempt.data,
            metadata=self.metadata,
            metrics=self.metrics,
            leaves=tuple(leaves),
            files=saved,
        )

    def _end(self) -> None:
        try:
            if self._attempt is not None:
                self._attempt.end()
        except (OSError, CheckpointError) as error:
            # The next process that opens the directory removes them.
            logger.info(
                "temporary files of step %d cannot be removed: %s", self.step, error
            )

    @contextlib.contextmanager
    def _failure_told(self, channel: Channel) -> Iterator[None]:
        """Raises an error inside as that of this save, on all processes."""
        with channel.failure_told():
            try:
                yield
            except Exception as error:
                raise self._failed(orbax.reason(error)) from error

    def _failed(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"step {self.step} could not be saved in {self.directory}: {why}. Earlier "
            "steps are unchanged; the next save starts anew."
        )


def _check_agreement(messages: list[dict[str, Any]]) -> None:
    """Raises, on all processes, if they do not save the same state as the same step."""
    first = messages[0]
    for index, other in enumerate(messages):
        places = [f"step {x['step']} in {x['directory']}" for x in (first, other)]
        if places[0] != places[1]:
            msg = (
                f"process 0 saves {places[0]}, and process {index} saves {places[1]}. "
                "All processes have to save the same step in the same directory."
            )
            raise CheckpointError(msg)
        if first["state"] != other["state"]:
            msg = (
                f"process 0 and process {index} save {places[0]} with states that "
                "differ in paths, shapes or dtypes. All processes have to save the "
                "same state."
            )
            raise CheckpointError(msg)


def _saved_files(folder: AnyPath, arrays: str) -> dict[str, SavedFile]:
    """Returns the size and hash of every file of the arrays."""
    saved: dict[str, SavedFile] = {}
    start = len(str(folder)) + 1
    for file in files.files_below(folder / arrays):
        size = file.stat().st_size
        digest = files.digest(file.read_bytes()) if size <= _HASHED_BYTES else None
        saved[str(file)[start:]] = SavedFile(size, digest)
    return saved


# The end of the process.


@functools.cache
def _finish_at_exit() -> None:
    """Has the interpreter finish saves before it shuts thread pools down.

    At exit Python first shuts down the pools that Orbax writes with, and only then
    waits for threads: a running save would hang for minutes, and be lost. Functions
    registered here run in reverse order, so this one, registered after that of
    `concurrent.futures`, runs before it. The API is private (in Python 3.9 to 3.14);
    without it running saves are lost at exit, and
    `test_a_process_that_ends_finishes_its_save` fails.
    """
    assert concurrent.futures.thread  # its import registers its function first
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_finish_all)


def _finish_all() -> None:
    for writer in list(_unsettled):
        if not writer.is_done:
            logger.info("the process ends once step %d is saved", writer.step)
        writer.wait()
        if writer.error is not None:  # no later call is left to raise it
            logger.error("%s", writer.error)
    lease.release_all()


def _leave_to_parent() -> None:
    """Counts saves as finished in a forked child, which does not have their threads.

    Otherwise a worker process of a data loader, forked while a save runs, never ends.
    """
    for writer in _unsettled:
        # A new one: a thread of the parent may have held the old one's lock.
        writer._finished = threading.Event()
        writer._finished.set()
    _unsettled.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
