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
from meshlayout.cluster.process_sync import Channel, failure, first_failure
from meshlayout.data.examples import named_leaves
from meshlayout.data.protocols import JSON, RandomAccessSource
from meshlayout.errors import DataError


_log = logging.getLogger(__name__)

# The exchanges in which a dataset is made.
FACTS, PLAN = "facts", "plan"

# The message of a process that takes no more steps.
_LEFT = ["left"]

# Rows of a source with random access that are compared.
_SAMPLE = 16

# How long to wait for another process's rows before they are no longer compared.
_COMPARE_S = 60.0

_counts: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)


class Agreement:
    """What some processes exchange about one dataset.

    All of them make their datasets in the same order, and iterate over them alike.

    Attributes:
        channel: Between them.

    Args:
        processes: Which processes; this one is among them.
    """

    def __init__(self, processes: list[int]) -> None:
        number = next(_counts[tuple(processes)])
        name = f"data/{'-'.join(map(str, processes))}/{number}"
        hint = (
            "All processes have to make the same datasets in the same order, and to "
            "iterate over them alike."
        )
        what = "the same dataset"
        self.channel = Channel(
            name, processes, what=what, hint=hint, warn_after_s=60, error=DataError
        )
        self._rows = Channel(
            name, processes, what=what, timeout_s=_COMPARE_S, error=DataError
        )
        self._iterations = itertools.count()
        self._compares = True
        self.finished_topics: list[str] = []

    def new_iteration(self) -> "IterationExchange":
        """Returns the exchanges of the next iteration, the same on all processes."""
        return IterationExchange(self, f"iteration{next(self._iterations)}")

    def check_same(self, facts: dict[str, JSON]) -> None:
        """Raises DataError if processes make a dataset differently.

        Args:
            facts: What has to be the same, by name; under `"rows"`, a digest of some
                rows of each leaf, or None for a leaf that differs at each reading.
        """
        values = self.channel.exchange(facts, FACTS)
        _raise_failure(values)
        first = min(values)
        for process, other in values.items():
            for name, value in values[first].items():
                if name != "rows" and other.get(name) != value:
                    msg = (
                        f"process {first} makes the dataset with {name}={value!r}, and "
                        f"process {process} with {name}={other.get(name)!r}. It has to "
                        "be the same on all processes."
                    )
                    raise DataError(msg)
        where = "the first rows" if values[first].get("number of rows") is None else ""
        digests = {process: v.get("rows") or {} for process, v in values.items()}
        _check_rows(digests, where or "some rows")

    def check_made(self) -> None:
        """Raises DataError if another process could not make its dataset."""
        _raise_failure(self.channel.exchange({}, PLAN))

    def check_rows(self, topic: str, where: str, digests: dict[str, str]) -> bool:
        """Raises DataError if processes have read different rows for a batch.

        A process that does not get here is waited for at most a minute, and rows are
        no longer compared: it may look at batches that the others do not.

        Args:
            topic: The exchange.
            where: Which batch.
            digests: Of the rows of each leaf.

        Returns:
            Whether the other processes still compare theirs.
        """
        if not self._compares:
            return False
        try:
            values = self._rows.exchange([where, digests], topic)
        except DataError as error:
            self._compares = False
            _log.warning("rows are not compared between processes any more: %s", error)
            return False
        if _LEFT in values.values():
            return False
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
        return True


class IterationExchange:
    """What processes exchange in one iteration, step by step.

    Args:
        agreement: About the dataset.
        name: The iteration's, the same on all processes.
    """

    def __init__(self, agreement: Agreement, name: str) -> None:
        self._agreement, self._name = agreement, name
        self._step = 0
        self._is_over = False
        self._compares = True

    @property
    def topic(self) -> str:
        """The exchange that comes next."""
        return f"{self._name}/{self._step}"

    def agree(self, value: JSON) -> dict[int, JSON]:
        """Returns the message of each process in a step; each has its own source.

        Raises:
            DataError: If a process has failed, or has left its loop.
        """
        values = self._agreement.channel.exchange(value, self.topic)
        self._done()
        failed = first_failure(values)
        if failed is not None:
            process, text = failed
            raise DataError(f"the source of process {process} failed: {text}")
        for process, word in values.items():
            if word == _LEFT:
                msg = (
                    f"process {process} has left its loop over the data, and this one "
                    "goes on. All processes have to take the same number of steps."
                )
                raise DataError(msg)
        return values

    def fail(self, error: Exception) -> None:
        """Tells the other processes of an error, once they come to this step."""
        with contextlib.suppress(DataError):
            self._agreement.channel.exchange(failure(error), self.topic)
        self._is_over = True

    def compare(self, where: str, digests: dict[str, str]) -> None:
        """Raises DataError if processes have read different rows for a batch."""
        if not self._compares:
            return
        try:
            self._compares = self._agreement.check_rows(self.topic, where, digests)
        finally:
            self._done()  # leaving does not overwrite this message

    def _done(self) -> None:
        """Removes this process's earlier messages: every process here has read them."""
        finished = self._agreement.finished_topics
        while finished:
            self._agreement.channel.forget(finished.pop())
        finished.append(self.topic)
        self._step += 1

    def leave(self) -> None:
        """Tells processes that wait for this one's next step not to."""
        if not self._is_over:
            self._agreement.channel.say(self.topic, _LEFT)
        self._is_over = True

    def end(self) -> None:
        """Records that no process has more steps."""
        self._is_over = True


def agreement_of(processes: list[int]) -> Agreement | None:
    """Returns the agreement of some processes.

    Returns:
        None if this is the only process.
    """
    is_alone = len(processes) == 1 or jax.process_index() not in processes
    if is_alone or _jax.coordination_client() is None:
        return None
    return Agreement(processes)


def sample_digests(source: RandomAccessSource) -> dict[str, JSON]:
    """Returns digests of some rows of two epochs, leaf by leaf.

    Rows are read twice. A leaf that differs between the two readings (say, augmented
    without a seed) says nothing about the order, and is None.
    """
    indices = np.unique(np.linspace(0, len(source) - 1, _SAMPLE).astype(np.int64))

    def digests() -> dict[str, str]:
        epochs = [source.read_rows(indices, epoch) for epoch in range(2)]
        return block_digests(epochs)

    first, second = digests(), digests()
    return {path: d if second.get(path) == d else None for path, d in first.items()}


def block_digests(blocks: Iterable[PyTree]) -> dict[str, str]:
    """Returns a digest of each leaf of some trees of rows."""
    hashes: dict[str, Any] = {}
    for rows in blocks:
        for path, leaf in named_leaves(rows)[0]:
            digest = hashes.setdefault(path, hashlib.blake2b(digest_size=8))
            digest.update(row_bytes(np.asarray(leaf)))
    return {path: digest.hexdigest() for path, digest in hashes.items()}


def row_bytes(leaf: np.ndarray) -> bytes:
    """Returns the bytes that identify rows, also if they are strings."""
    if leaf.dtype.hasobject:
        return repr(leaf.tolist()).encode()
    return np.ascontiguousarray(leaf).tobytes()


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


def _raise_failure(values: dict[int, JSON]) -> None:
    failed = first_failure(values)
    if failed is not None:
        process, text = failed
        raise DataError(f"process {process} cannot make the dataset: {text}")
