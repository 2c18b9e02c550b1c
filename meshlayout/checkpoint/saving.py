"""One save: arrays, then the iterator's state, then the manifest, which makes it count.

The caller waits until the state may be donated; the rest is done by a thread.
"""

import contextlib
import functools
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from meshlayout import _render
from meshlayout.checkpoint import files, manifest, orbax
from meshlayout.checkpoint.attempts import Attempt
from meshlayout.checkpoint.manifest import Manifest, SavedFile
from meshlayout.checkpoint.processes import Channel
from meshlayout.checkpoint.snapshots import Snapshot
from meshlayout.checkpoint.store import StoreError
from meshlayout.errors import CheckpointError


logger = logging.getLogger("meshlayout.checkpoint")

# Files of up to this size are hashed; the arrays in larger ones have fingerprints.
_HASHED_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Job:
    """What is saved.

    Attributes:
        folder: The step's directory.
        step: The step.
        snapshot: The state.
        data: The input iterator's state, as the text of a file; None if there is none.
        metadata: What the user gave.
        metrics: What was measured.
    """

    folder: Any
    step: int
    snapshot: Snapshot
    data: bytes | None
    metadata: Any
    metrics: dict[str, float]


class Saving:
    """A save that was started.

    Args:
        job: What is saved.
        channel: The processes' conversation about saves.
        after: What to do once the step exists.
    """

    def __init__(self, job: Job, channel: Channel, after: Callable[[], None]) -> None:
        self._job, self._channel, self._after = job, channel, after
        self._begin_s = time.perf_counter()
        self._error: BaseException | None = None
        self.step = job.step
        self.nbytes = sum(leaf.nbytes for leaf in job.snapshot.leaves)
        self._attempt: Attempt | None = None
        self._wait = self._start()
        self._stall_s = time.perf_counter() - self._begin_s
        self._thread = threading.Thread(
            target=self._run, name=f"checkpoint-{job.step}", daemon=False
        )
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it came to an end, good or bad."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Waits for the end.

        Raises:
            CheckpointError: If the step could not be saved; once.
        """
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _start(self) -> Callable[[], None]:
        """Copies the state from the devices."""
        problem, said = None, ""
        try:
            if jax.process_index() == 0:
                self._attempt = Attempt.begin(self._job.folder)
                said = json.dumps({"number": self._attempt.number})
        except Exception as error:
            problem = error
            said = json.dumps({"error": orbax.why(error)})
        told = json.loads(self._channel.from_first(said))
        if "error" in told:
            raise CheckpointError(self._failed(told["error"])) from problem
        attempt = self._attempt or Attempt(self._job.folder, told["number"])
        self._names = attempt
        try:
            arrays = self._job.snapshot.arrays
            if not arrays:
                return _nothing
            return orbax.start_writing(self._job.folder / attempt.arrays, arrays)
        except Exception as error:
            if jax.process_count() > 1:  # the others are told in the background
                return functools.partial(_fail, error)
            self._end()
            raise CheckpointError(self._failed(orbax.why(error))) from error

    def _run(self) -> None:
        try:
            self._finish()
        except CheckpointError as error:
            self._error = error
        except Exception as error:
            self._error = CheckpointError(self._failed(orbax.why(error)))
            self._error.__cause__ = error
        if self._error is not None:
            logger.error("%s", self._error)

    def _finish(self) -> None:
        problem: Exception | None = None
        try:
            self._wait()
        except Exception as error:
            problem = error
        said = self._channel.exchange("" if problem is None else orbax.why(problem))
        told = next(filter(None, said), "")
        if not told:
            try:
                if jax.process_index() == 0:
                    self._commit()
            except Exception as error:
                problem = error
                told = orbax.why(error)
            told = self._channel.from_first(told)
        if told:
            with contextlib.suppress(OSError, StoreError):
                self._end()  # what cannot be removed now is removed at the next start
            raise CheckpointError(self._failed(told)) from problem
        self._log()
        self._clear_up()

    def _clear_up(self) -> None:
        """Deletes what is not kept; all wait for it, and list the same steps after."""
        problem = None
        try:
            self._end()
            if jax.process_index() == 0:
                self._after()
        except Exception as error:
            problem = error
        told = self._channel.from_first("" if problem is None else str(problem))
        if told:
            msg = f"step {self.step} is saved, but {told}"
            raise CheckpointError(msg) from problem

    def _commit(self) -> None:
        """Writes the manifest, by process 0 alone."""
        job, names = self._job, self._names
        found: dict[str, SavedFile] = {}
        arrays, data = None, None
        if job.data is not None:
            data = names.data
            files.write_whole(job.folder / data, job.data)
            found[data] = SavedFile(len(job.data), files.digest(job.data))
        if job.snapshot.arrays:
            arrays = names.arrays
            files.sync_tree(job.folder / arrays)
            found |= _described(job.folder, arrays)
        whole = Manifest(
            step=job.step,
            saved_at=time.time(),
            num_processes=jax.process_count(),
            arrays=arrays,
            data=data,
            metadata=job.metadata,
            metrics=job.metrics,
            leaves=job.snapshot.with_fingerprints(),
            files=found,
        )
        self._file_bytes = whole.file_bytes
        files.write_whole(job.folder / manifest.NAME, whole.to_bytes())
        if not files.is_remote(job.folder):
            files.sync_directory(job.folder.parent)

    def _end(self) -> None:
        if self._attempt is not None:
            self._attempt.end()

    def _failed(self, why: str) -> str:
        return (
            f"step {self.step} could not be saved in {self._job.folder.parent}: {why}. "
            "The steps saved before are as they were; the next save starts anew."
        )

    def _log(self) -> None:
        seconds = time.perf_counter() - self._begin_s
        if jax.process_index() == 0:
            logger.info(
                "saved step %d: %s in %.2f s (%s on disk; the caller waited %.2f s)",
                self.step,
                _render.bytes_text(self.nbytes),
                seconds,
                _render.bytes_text(self._file_bytes),
                self._stall_s,
            )


def _fail(error: Exception) -> None:
    raise error


def _nothing() -> None:
    """Waits for nothing: there are no arrays."""


def _described(folder: Any, arrays: str) -> dict[str, SavedFile]:
    """Returns the size and hash of every file of the arrays."""
    found: dict[str, SavedFile] = {}
    start = len(str(folder)) + 1
    for file in files.files_below(folder / arrays):
        size = files.size_of(file)
        hashed = files.digest(file.read_bytes()) if size <= _HASHED_BYTES else None
        found[str(file)[start:]] = SavedFile(size, hashed)
    return found
