"""What processes agree on about one dataset: how it is made, and what it reads.

Every process decides alone which rows are its own, so all of them must see the same
options and the same source. A source that differs (a shuffle without a seed, a loader
that hands each process its part) would silently lose examples: each process
keeps its share of an order that the others do not have. So digests of some rows are
compared when a dataset is made, and for streams again now and then, in the background.
"""

import contextlib
import hashlib
import itertools
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from meshlayout import _jax
from meshlayout._annotations import PyTree
from meshlayout.cluster.process_sync import Channel
from meshlayout.data.examples import named_leaves
from meshlayout.data.position import Position
from meshlayout.data.protocols import JSON, RandomAccessSource
from meshlayout.errors import DataError, MeshLayoutError
from meshlayout.mesh import Mesh


_log = logging.getLogger(__name__)

# The exchanges in which a dataset is made.
FACTS, PLAN = "facts", "plan"

# The message of a process that takes no more steps, and the key of an error's.
_LEFT, _FAILED = ["left"], "failed"

_NOT_MADE = "process {} cannot make the dataset"

# Rows of a source with random access that are compared.
_SAMPLE = 16

# How long to wait for another process's rows before they are no longer compared.
_COMPARE_S = 60.0

# Batches of an epoch between two comparisons at most; the first are closer together.
_COMPARE_EVERY = 64

_counts: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)


class Agreement:
    """What some processes exchange about one dataset.

    All of them make their datasets in the same order, and iterate over them alike.

    Attributes:
        channel: Between them.
        compares_rows: Whether rows are compared; no longer once a process did not come.
        finished_topics: Exchanges that this process has finished.
    """

    def __init__(self, processes: list[int]) -> None:
        number = next(_counts[tuple(processes)])
        self.channel = Channel(
            f"data/{'-'.join(map(str, processes))}/{number}",
            processes,
            what="the same dataset",
            hint="All processes have to make the same datasets in the same order, and "
            "to iterate over them alike.",
            warn_after_s=60,
            error=DataError,
        )
        self.compares_rows = True
        self.finished_topics: list[str] = []
        self._iterations = itertools.count()

    def new_iteration(self) -> "IterationExchange":
        """Returns the exchanges of the next iteration, the same on all processes."""
        return IterationExchange(self, f"iteration{next(self._iterations)}")

    def check_same(self, facts: dict[str, JSON], digests: JSON, where: str) -> None:
        """Raises DataError if processes make a dataset differently.

        Args:
            facts: What has to be the same, by name.
            digests: Of some rows, by leaf; None for a leaf that differs at each
                reading.
            where: Which rows, in words.
        """
        values = self.channel.exchange({"facts": facts, "digests": digests}, FACTS)
        _raise_failure(values, _NOT_MADE)
        first = min(values)
        for process, value in values.items():
            for name, fact in values[first]["facts"].items():
                other = value["facts"].get(name)
                if other != fact:
                    msg = (
                        f"process {first} makes the dataset with {name}={fact!r}, and "
                        f"process {process} with {name}={other!r}. It has to be the "
                        "same on all processes."
                    )
                    raise DataError(msg)
        _check_rows({p: value["digests"] for p, value in values.items()}, where)

    def num_batches(self, num_batches: int, remainder: str) -> int:
        """Returns how many batches an epoch has if each process has its own rows."""
        counts = self.channel.exchange(num_batches, "batches")
        if remainder == "error" and len(set(counts.values())) > 1:
            listed = ", ".join(f"{n} on process {p}" for p, n in counts.items())
            msg = (
                f"the processes have different numbers of batches: {listed}. "
                "remainder='pad' pads the shorter ones."
            )
            raise DataError(msg)
        return (min if remainder == "drop" else max)(counts.values())

    def check_made(self) -> None:
        """Raises DataError if another process could not make its dataset."""
        _raise_failure(self.channel.exchange({}, PLAN), _NOT_MADE)


class RowDigest:
    """A running digest of the rows of each leaf.

    Attributes:
        has_every_row: Whether a reader adds all rows that it reads, or of each batch
            the last one, which costs next to nothing and shows another order as well.
    """

    def __init__(self) -> None:
        self.has_every_row = True
        self._hashes: dict[str, Any] = {}

    def add(self, named_rows: Iterable[tuple[str, np.ndarray]]) -> None:
        """Adds some rows of each leaf."""
        for path, rows in named_rows:
            digest = self._hashes.setdefault(path, hashlib.blake2b(digest_size=8))
            # The pointers of objects, such as strings, differ between processes.
            is_plain = not rows.dtype.hasobject
            digest.update(rows.tobytes() if is_plain else repr(rows.tolist()).encode())

    def by_leaf(self) -> dict[str, str]:
        """Returns the digest of each leaf by its path."""
        return {path: digest.hexdigest() for path, digest in self._hashes.items()}


class IterationExchange:
    """What processes exchange in one iteration, step by step."""

    def __init__(self, agreement: Agreement, name: str) -> None:
        self._agreement, self._name = agreement, name
        self._step = 0
        self._is_over = False
        self._compares_rows = True
        self._digest = RowDigest()
        self._first: Position | None = None  # of the batches in the digest

    def agree(self, value: JSON) -> dict[int, JSON]:
        """Returns each process's message in a step, if none has failed or left."""
        values = self._agreement.channel.exchange(value, self._topic)
        self._next_step()
        _raise_failure(values, "the source of process {} failed")
        for process, word in values.items():
            if word == _LEFT:
                msg = (
                    f"process {process} has left its loop over the data, and this one "
                    "continues. All processes have to take the same number of steps."
                )
                raise DataError(msg)
        return values

    def fail(self, error: Exception) -> None:
        """Tells the other processes of an error, once they come to this step."""
        with contextlib.suppress(DataError):
            self._agreement.channel.exchange(_failure(error), self._topic)
        self._is_over = True

    def digest_for(self, position: Position) -> RowDigest:
        """Returns the digest to which the rows of the batch at a position are added."""
        self._first = self._first or position
        self._digest.has_every_row = _is_compared(position)
        return self._digest

    def compare(self, position: Position, *, at_end: bool = False) -> None:
        """Compares the rows since the last comparison, if those of a batch are due.

        A process that does not get here is waited for at most a minute, and rows are
        no longer compared: it may look at batches that the others do not.

        Args:
            position: The place before the batch that was read last.
            at_end: Whether the epoch or the iteration ends at this place instead.

        Raises:
            DataError: If processes have read different rows.
        """
        if not (at_end or _is_compared(position)) or not self._compares_rows:
            return
        where = _place_text(self._first, position, at_end=at_end)
        digests = self._digest.by_leaf()
        self._digest, self._first = RowDigest(), None
        if not self._agreement.compares_rows:
            return
        try:
            values = self._agreement.channel.exchange(
                [where, digests], self._topic, timeout_s=_COMPARE_S
            )
        except DataError as error:
            self._agreement.compares_rows = False
            _log.warning("rows are not compared between processes any more: %s", error)
            return
        finally:
            self._next_step()  # leaving does not overwrite this message
        if _LEFT in values.values():
            self._compares_rows = False
            return
        places = {process: value[0] for process, value in values.items()}
        if len(set(places.values())) > 1:
            listed = ", ".join(f"{w} on process {p}" for p, w in places.items())
            msg = (
                f"the processes read different batches at once: {listed}. Their "
                "sources have different numbers of rows, or one of them has taken "
                f"batches that the others have not. {_WAY_OUT}"
            )
            raise DataError(msg)
        _check_rows({p: value[1] for p, value in values.items()}, where)

    def leave(self) -> None:
        """Tells processes that wait for this one's next step not to."""
        if not self._is_over:
            self._agreement.channel.say(self._topic, _LEFT)
        self._is_over = True

    def end(self) -> None:
        """Records that no process has more steps."""
        self._is_over = True

    @property
    def _topic(self) -> str:
        """The exchange that comes next."""
        return f"{self._name}/{self._step}"

    def _next_step(self) -> None:
        """Removes this process's earlier messages: every process here has read them."""
        finished = self._agreement.finished_topics
        while finished:
            self._agreement.channel.forget(finished.pop())
        finished.append(self._topic)
        self._step += 1


def agreement_of(mesh: Mesh) -> Agreement | None:
    """Returns the agreement of a mesh's processes; None if this is the only one."""
    processes = sorted({device.process_index for device in mesh.devices.flat})
    is_alone = len(processes) == 1 or jax.process_index() not in processes
    if is_alone or _jax.coordination_client() is None:
        return None
    return Agreement(processes)


@contextlib.contextmanager
def failure_reported(agreement: Agreement | None, topic: str) -> Iterator[None]:
    """Tells the other processes, which come to a topic next, of an error inside."""
    try:
        yield
    except Exception as error:
        if agreement is not None:
            # This process raises its own error, whatever the others say.
            with contextlib.suppress(MeshLayoutError):
                agreement.channel.exchange(_failure(error), topic)
        raise


def _failure(error: Exception) -> dict[str, str]:
    """Returns what a process says instead of its value if it has failed."""
    is_own = isinstance(error, MeshLayoutError)
    return {_FAILED: str(error) if is_own else f"{type(error).__name__}: {error}"}


def _raise_failure(values: dict[int, JSON], what: str) -> None:
    for process, value in values.items():
        if isinstance(value, dict) and _FAILED in value:
            raise DataError(f"{what.format(process)}: {value[_FAILED]}")


def sample_digests(source: RandomAccessSource) -> dict[str, JSON]:
    """Returns digests of some rows of two epochs, leaf by leaf.

    Rows are read twice. A leaf that differs between the two readings (say, augmented
    without a seed) says nothing about the order, and is None.
    """
    indices = np.unique(np.linspace(0, len(source) - 1, _SAMPLE).astype(np.int64))
    first, second = (
        block_digests([source.read_rows(indices, epoch) for epoch in range(2)])
        for _ in range(2)
    )
    return {path: d if second.get(path) == d else None for path, d in first.items()}


def block_digests(blocks: Iterable[PyTree]) -> dict[str, str]:
    """Returns a digest of each leaf of some trees of rows."""
    digest = RowDigest()
    for rows in blocks:
        digest.add((path, np.asarray(leaf)) for path, leaf in named_leaves(rows)[0])
    return digest.by_leaf()


def _is_compared(position: Position) -> bool:
    """Returns whether rows are compared after the batch at a position."""
    number = position.batch + 1
    return number % _COMPARE_EVERY == 0 or (
        number < _COMPARE_EVERY and not number & (number - 1)
    )


def _place_text(first: Position | None, last: Position, *, at_end: bool) -> str:
    """Returns some batches in words, from the first to the last position."""
    epoch, number = last.epoch + 1, last.batch + (not at_end)
    first_number = 1
    if first is not None and first.epoch == last.epoch:
        first_number = first.batch + 1
    if first is None or first_number > number:
        return f"the end of epoch {epoch}, after batch {number}"
    if first_number == number:
        return f"batch {number} of epoch {epoch}"
    return f"batches {first_number} to {number} of epoch {epoch}"


_WAY_OUT = (
    "Without per_process=True, every process reads all examples in the same order, and "
    "keeps those of its devices: otherwise examples are lost. If the source gives each "
    "process a part of its own, say per_process=True; if it shuffles or draws random "
    "numbers, give it one seed on all processes; if it lists files, sort them."
)


def _check_rows(digests: dict[int, dict[str, str | None]], where: str) -> None:
    first = min(digests)
    for process, other in digests.items():
        names = [
            path or "the array"
            for path, digest in digests[first].items()
            if digest is not None and other.get(path) not in (None, digest)
        ]
        if names:
            listed = ", ".join(map(repr, names))
            msg = (
                f"the source gives process {first} and process {process} different "
                f"examples: {listed} {'differs' if len(names) == 1 else 'differ'} in "
                f"{where}. {_WAY_OUT}"
            )
            raise DataError(msg)
