"""Grain's chain: the pieces of batches, read in threads or in worker processes.

Grain's elements are pieces of batches: each thread or process reads, decodes, maps and
stacks its share of a batch in one call, and Grain gives them back in their order. What
Grain does not do is here as well: worker processes leave the user's script alone, end
with the process that started them, and send errors of any class.
"""

import atexit
import contextlib
import copy
import pickle
import re
import signal
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import parent_process, spawn
from typing import Any, Protocol

import cloudpickle
import jax
import numpy as np

from meshlayout import _optional
from meshlayout.data.adapters.grain import mark_flags_as_parsed
from meshlayout.errors import DataError


Array = np.ndarray[Any, Any]

# The pieces that each thread or process makes ready ahead.
_AHEAD = 2

# A chain goes on through all epochs; its length is only an index that is never met.
_ENDLESS = 2**48

# Bytes above which Grain would put an array into shared memory.
_NEVER_SHARED = 2**62

# The name that Grain gives its worker processes.
_PROCESS_NAME = "grain-process-prefetch"

_starting = threading.Lock()

_with_processes: "weakref.WeakSet[Chain]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Ends worker processes while Python still has all that Grain needs for it."""
    for chain in list(_with_processes):
        chain.close()


class Batches(Protocol):
    """Which rows make each batch, as `RowPlan` says it.

    Attributes:
        step: By how much a place grows with a batch.
    """

    step: int

    def rows(self, place: int) -> list[tuple[int, Array]]:
        """Returns epochs, and rows of each."""
        ...


@dataclass(frozen=True)
class Readers:
    """Who reads.

    Attributes:
        kind: `"caller"`, `"threads"` or `"processes"`.
        count: How many; 0 for the calling thread.
    """

    kind: str
    count: int

    def __str__(self) -> str:
        if self.kind == "caller":
            return "0 workers"
        one = {"threads": "thread", "processes": "process"}[self.kind]
        return f"{self.count} {one if self.count == 1 else self.kind}"

    @property
    def pieces(self) -> int:
        """Into how many pieces a batch is cut."""
        return max(1, self.count)


CALLER = Readers("caller", 0)


@dataclass(frozen=True)
class Part:
    """Some rows, and the seconds that each stage took for them.

    Attributes:
        rows: A tree of arrays.
        seconds: By stage.
    """

    rows: Any
    seconds: dict[str, float]


class Chain:
    """Grain's iterator over the pieces of batches, from a place on.

    Args:
        function: Reads rows, given their numbers and epochs; returns a `Part`.
        plan: Which rows make each batch.
        readers: Who reads.
        place: The place of the first batch.
        stop: The place at which the last batch has ended; None for no end.

    Attributes:
        plan: Which rows make each batch.
        readers: Who reads.
        place: The place of the next batch.
    """

    def __init__(
        self,
        function: Callable[[Array, Array], Part],
        plan: Batches,
        readers: Readers,
        place: int,
        stop: int | None = None,
    ) -> None:
        self.plan, self.readers = plan, readers
        self._start = self.place = place
        self._stop = stop
        self._are_processes = readers.kind == "processes"
        pieces = _Pieces(plan, place, stop, readers.pieces)
        attempt = _Attempt(function, self._are_processes)
        self._iterator: Any = iter(_grain_dataset(pieces, attempt, readers))
        self._first_state = copy.deepcopy(self._iterator.get_state())
        self._is_started = False
        if self._are_processes:
            _with_processes.add(self)

    def parts(self) -> list[Part]:
        """Returns the next batch, in its pieces.

        Raises:
            DataError: If a worker process ended.
            Exception: What reading or the user's function raised.
        """
        return [_part(piece) for piece in self.pieces()]

    def pieces(self) -> list[Any]:
        """Returns the next batch, as it comes from the workers."""
        try:
            with contextlib.ExitStack() as stack:
                if self._are_processes and not self._is_started:
                    stack.enter_context(_no_main_in_workers())
                    self._iterator.start_prefetch()
                found = [next(self._iterator) for _ in range(self.readers.pieces)]
        except RuntimeError as error:
            message = _how_it_ended(error)
            if message is None:
                raise
            raise DataError(message) from error
        self._is_started = True
        self.place += self.plan.step
        return found

    def can_go_to(self, place: int) -> bool:
        """Tells whether the chain gives the batch at a place.

        Args:
            place: The place.
        """
        is_inside = self._start <= place and (self._stop is None or place < self._stop)
        return is_inside and (place - self._start) % self.plan.step == 0

    def go_to(self, place: int) -> None:
        """Goes to a place; processes that run go on.

        Args:
            place: One to which the chain can go.
        """
        if place == self.place:
            return
        number = (place - self._start) // self.plan.step
        if not self._are_processes:
            number *= self.readers.pieces  # each process has its own piece of all
        self._iterator.set_state(_with_next_index(self._first_state, number))
        self.place = place

    def close(self) -> None:
        """Ends the threads, or the processes after the pieces that they read."""
        _with_processes.discard(self)
        self._iterator.close()


def _grain_dataset(pieces: Any, attempt: Any, readers: Readers) -> Any:
    grain = _optional.require(
        "grain", extra="data", purpose="Reading a TFDS data set by record"
    )
    dataset = grain.MapDataset.source(pieces).map(attempt)
    if readers.kind != "processes":
        ahead = _AHEAD * readers.count
        return dataset.to_iter_dataset(
            grain.ReadOptions(num_threads=readers.count, prefetch_buffer_size=ahead)
        )
    mark_flags_as_parsed()
    here = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    # Containers often have little shared memory, and worker processes that are stopped
    # leave some of it behind: arrays are sent through pipes.
    options = grain.experimental.DatasetOptions(min_shm_size=_NEVER_SHARED)
    dataset = grain.experimental.WithOptionsIterDataset(
        dataset.to_iter_dataset(here), options
    )
    workers = grain.multiprocessing.MultiprocessingOptions(
        num_workers=readers.count, per_worker_buffer_size=_AHEAD
    )
    return dataset.mp_prefetch(workers, worker_init_fn=_prepare_worker)


class _Pieces:
    """Grain's source: epochs and rows of each piece of each batch."""

    def __init__(
        self, plan: Batches, start: int, stop: int | None, pieces: int
    ) -> None:
        self._plan, self._start, self._pieces = plan, start, pieces
        self._length = _ENDLESS
        if stop is not None:
            self._length = (stop - start) // plan.step * pieces

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> tuple[Array, Array]:
        batch, piece = divmod(int(number), self._pieces)
        wanted = self._plan.rows(self._start + batch * self._plan.step)
        rows = np.concatenate([rows for _, rows in wanted])
        epochs = np.repeat(
            [epoch for epoch, _ in wanted], [len(rows) for _, rows in wanted]
        )
        # In the way of np.array_split, without making the other pieces.
        least, more = divmod(len(rows), self._pieces)
        first = piece * least + min(piece, more)
        chosen = slice(first, first + least + (piece < more))
        return rows[chosen], epochs[chosen]


@dataclass(frozen=True)
class _Attempt:
    """Calls a function; returns its error as a value, in the place of its rows.

    An error may come from a piece that is read ahead, and is raised when that piece is
    asked for. From a process it is sent in a form that arrives.
    """

    function: Callable[[Array, Array], Part]
    is_in_process: bool

    def __call__(self, wanted: tuple[Array, Array]) -> tuple[str, Any, Any]:
        rows, epochs = wanted
        if not len(rows):
            return "nothing", None, {}
        try:
            part = self.function(rows, epochs)
        except Exception as error:  # every one is the caller's to handle
            if self.is_in_process:
                return "packed", _as_bytes(error), {}
            return "error", error, {}
        except SystemExit as error:  # would end a worker process in silence
            if self.is_in_process:
                return "packed", _as_bytes(error), {}
            raise
        return "rows", part.rows, part.seconds


def _part(piece: tuple[str, Any, Any]) -> Part:
    kind, value, seconds = piece
    if kind == "packed":
        raise pickle.loads(value)
    if kind == "error":
        raise value
    return Part(value, seconds)


def check_sendable(function: Any) -> None:
    """Raises DataError if a function cannot be sent to a worker process.

    Args:
        function: The function, which may be local or a lambda.
    """
    try:
        cloudpickle.dumps(function)
    except Exception as error:
        msg = (
            "map= and what it uses cannot be sent to worker processes "
            f"({type(error).__name__}: {error}). Create such objects inside of map, or "
            "use worker_kind='threads'."
        )
        raise DataError(msg) from error


def _with_next_index(state: Any, number: int) -> Any:
    """Returns a state of Grain's in which every iterator goes on at a number."""
    if isinstance(state, dict):
        return {
            key: number if key == "next_index" else _with_next_index(value, number)
            for key, value in state.items()
        }
    if isinstance(state, list):
        return [_with_next_index(value, number) for value in state]
    return state


# Worker processes


def _prepare_worker(index: int, count: int) -> None:
    """Runs first in a worker process."""
    del index, count
    # An interrupt from the keyboard is for the process that trains.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # So are accelerators.
    jax.config.update("jax_platforms", "cpu")
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends a worker process whose parent was killed, which Grain's would outlive."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        signal.raise_signal(signal.SIGKILL)


@contextlib.contextmanager
def _no_main_in_workers() -> Iterator[None]:
    """Keeps Grain's worker processes from running the user's script again.

    What they call is sent by value, so that a script needs no
    `if __name__ == "__main__"`.
    """
    with _starting:
        original = spawn.get_preparation_data

        def prepared(name: str) -> dict[str, Any]:
            data = original(name)
            if name.startswith(_PROCESS_NAME):
                data.pop("init_main_from_path", None)
                data.pop("init_main_from_name", None)
            return data

        spawn.get_preparation_data = prepared
        try:
            yield
        finally:
            spawn.get_preparation_data = original


def _how_it_ended(error: RuntimeError) -> str | None:
    """Returns the sentence about a process that ended, or None for other errors."""
    found = re.search(r"terminated unexpectedly with exit code (-?\d+)", str(error))
    if found is None:
        return None
    code = int(found[1])
    how = f"ended with exit code {code}"
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    return (
        f"a worker process {how} while it read examples. Memory that ran out is the "
        "usual cause: use fewer workers, or num_workers=0, which shows errors where "
        "they happen."
    )


def _as_bytes(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error)).rstrip()
    error.add_note(f"In a worker process:\n{text}")
    try:
        if not isinstance(error, Exception):
            raise TypeError  # SystemExit is not to end the process that trains
        packed = pickle.dumps(error, protocol=5)
        pickle.loads(packed)
    except Exception:  # an error class that does not survive being sent
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        plain.add_note(f"In a worker process:\n{text}")
        return pickle.dumps(plain, protocol=5)
    return packed
