"""What processes agree on about one dataset: how it is made, and what it reads.

Every process decides alone which rows are its own, so all of them must have the same
options and the same source. With a source that differs between them (a shuffle without
a seed, a loader that gives each process its own part), examples would be lost silently:
each process keeps its share of an order that the others do not have. So digests of some
rows are compared when a dataset is made, and for streams again from time to time, in
the background.
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
from meshlayout.cluster.channel import LEFT, Channel
from meshlayout.data.examples import named_leaves
from meshlayout.data.position import Position
from meshlayout.data.protocols import JSON, RandomAccessSource
from meshlayout.errors import DataError
from meshlayout.mesh import Mesh


_log = logging.getLogger(__name__)

# The exchanges in which a dataset is made.
FACTS, PLAN = "facts", "plan"

_NOT_MADE = "process {process} cannot make the dataset: {failure}"

# How many rows of a source with random access are compared.
_SAMPLE = 16

# How long to wait for another process's rows before giving up comparing.
_COMPARE_S = 60.0

# At most so many batches between two comparisons; the first are closer together.
_COMPARE_EVERY = 64

# Numbers the datasets of each group of processes: the processes make them in the same
# order, so a number names the same dataset on all of them.
_counts: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)


class Agreement:
    """What the processes of a mesh exchange about one dataset.

    All of them must make their datasets in the same order, and iterate over them alike.

    Attributes:
        channel: Between the processes.
        compares_rows: Whether rows are compared; no longer once a process was late.
        finished_topics: Exchanges that this process has finished.
    """

    def __init__(self, processes: list[int]) -> None:
        number = next(_counts[tuple(processes)])
        self.channel = Channel(
            f"data/{'-'.join(map(str, processes))}/{number}",
            processes,
            what="the same dataset",
            hint="All processes must make the same datasets in the same order, and "
            "iterate over them alike.",
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
            facts: What must be the same, by name.
            digests: Of some rows, by leaf; None for a leaf that differs each time it is
                read.
            where: Which rows those are, in words.
        """
        values = self.channel.exchange(
            {"facts": facts, "digests": digests}, FACTS, failure=_NOT_MADE
        )
        first = min(values)
        for process, value in values.items():
            for name, fact in values[first]["facts"].items():
                other = value["facts"].get(name)
                if other != fact:
                    msg = (
                        f"process {first} makes the dataset with {name}={fact!r}, and "
                        f"process {process} with {name}={other!r}. It must be the "
                        "same on all processes."
                    )
                    raise DataError(msg)
        _check_rows({p: value["digests"] for p, value in values.items()}, where)

    def num_batches(self, num_batches: int, remainder: str) -> int:
        """Returns the number of batches of an epoch, given this process's number."""
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
        self.channel.exchange(None, PLAN, failure=_NOT_MADE)


class RowDigest:
    """A running digest of the rows of each leaf.

    Attributes:
        has_every_row: Whether a reader must add all rows that it reads, or only the
            last one of each batch, which costs next to nothing and reveals another
            order just as well.
    """

    def __init__(self) -> None:
        self.has_every_row = True
        self._hashes: dict[str, Any] = {}

    def add(self, named_rows: Iterable[tuple[str, np.ndarray]]) -> None:
        """Adds some rows of each leaf."""
        for path, rows in named_rows:
            digest = self._hashes.setdefault(path, hashlib.blake2b(digest_size=8))
            # The bytes of an array of objects are pointers, which differ between
            # processes.
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
        """Returns each process's value in a step.

        Raises:
            DataError: If a process has failed, or has left its loop.
        """
        try:
            values = self._agreement.channel.exchange(
                value,
                self._topic,
                failure="the source of process {process} failed: {failure}",
            )
        finally:
            self._next_step()
        for process, message in values.items():
            if message is LEFT:
                msg = (
                    f"process {process} has left its loop over the data, and this one "
                    "continues. All processes must take the same number of steps."
                )
                raise DataError(msg)
        return values

    def fail(self, error: Exception) -> None:
        """Reports an error to the other processes, once they reach this step."""
        self._agreement.channel.fail(error, self._topic)
        self._is_over = True

    def digest_for(self, position: Position) -> RowDigest:
        """Returns the digest to which the rows of the batch at a position are added."""
        self._first = self._first or position
        self._digest.has_every_row = _is_compared(position)
        return self._digest

    def compare(self, position: Position, *, at_end: bool = False) -> None:
        """Compares the rows since the last comparison, if one is due.

        Another process is waited for at most a minute; if it does not come, rows are no
        longer compared, since it may be reading batches that the others do not.

        Args:
            position: The position before the batch that was read last.
            at_end: Whether the epoch or the iteration ends at this position instead.

        Raises:
            DataError: If processes have read different rows.
        """
        if not (at_end or _is_compared(position)) or not self._compares_rows:
            return
        where = _batches_text(self._first, position, at_end=at_end)
        digests = self._digest.by_leaf()
        self._digest, self._first = RowDigest(), None
        if not self._agreement.compares_rows:
            return
        try:
            values = self._agreement.channel.exchange(
                [where, digests], self._topic, timeout_s=_COMPARE_S
            )
        except DataError as error:
            if not isinstance(error.__cause__, TimeoutError):
                raise
            self._agreement.compares_rows = False
            _log.warning("rows are not compared between processes any more: %s", error)
            return
        finally:
            # Also after a failure: `leave` must not overwrite the message that was
            # sent, which another process may still read.
            self._next_step()
        if LEFT in values.values():
            self._compares_rows = False
            return
        batches = {process: value[0] for process, value in values.items()}
        if len(set(batches.values())) > 1:
            listed = ", ".join(f"{text} on process {p}" for p, text in batches.items())
            msg = (
                f"the processes read different batches at once: {listed}. Their "
                "sources have different numbers of rows, or one of them has taken "
                f"batches that the others have not. {_WAY_OUT}"
            )
            raise DataError(msg)
        _check_rows({p: value[1] for p, value in values.items()}, where)

    def leave(self) -> None:
        """Releases processes that are waiting for this one's next step."""
        if not self._is_over:
            self._agreement.channel.leave(self._topic)
        self._is_over = True

    def end(self) -> None:
        """Records that the iteration has ended on all processes: nobody is waiting."""
        self._is_over = True

    @property
    def _topic(self) -> str:
        """The exchange that comes next."""
        return f"{self._name}/{self._step}"

    def _next_step(self) -> None:
        """Moves on, and removes this process's earlier messages.

        Not the latest one: others have sent theirs, but may not have read this one's.
        """
        finished = self._agreement.finished_topics
        while finished:
            self._agreement.channel.forget(finished.pop())
        finished.append(self._topic)
        self._step += 1


def agreement_of(mesh: Mesh) -> Agreement | None:
    """Returns the agreement of a mesh's processes; None if there is none to make."""
    processes = sorted({device.process_index for device in mesh.devices.flat})
    # A process without devices in the mesh loads no rows, and agrees with nobody.
    is_alone = len(processes) == 1 or jax.process_index() not in processes
    if is_alone or _jax.coordination_client() is None:
        return None
    return Agreement(processes)


def failure_told(
    agreement: Agreement | None, topic: str
) -> contextlib.AbstractContextManager[None]:
    """Tells the other processes of an error inside, at the exchange they do next."""
    if agreement is None:
        return contextlib.nullcontext()
    return agreement.channel.failure_told(topic)


def sample_digests(source: RandomAccessSource) -> dict[str, JSON]:
    """Returns digests of some rows of two epochs, leaf by leaf.

    Two epochs, for a source that shuffles by itself, maybe only from the second on.
    Rows are read twice: a leaf that differs between the readings (augmented without a
    seed, say) shows nothing about the order, and is None.
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
    """Returns whether rows are compared after the batch at a position.

    After the batches 1, 2, 4, ..., 32 and then every 64: sources that differ mostly do
    so from the start.
    """
    number = position.batch + 1
    return number % _COMPARE_EVERY == 0 or (
        number < _COMPARE_EVERY and not number & (number - 1)
    )


def _batches_text(first: Position | None, last: Position, *, at_end: bool) -> str:
    """Returns which batches were read between two positions, in words."""
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
    "process its own part, say per_process=True; if it shuffles or draws random "
    "numbers, give it the same seed on all processes; if it lists files, sort them."
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
