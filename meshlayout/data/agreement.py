"""What processes agree on about one dataset: how it is made, and where streams end.

Every process decides alone which rows are its own: with a source that differs between
them (a shuffle without a seed, a loader that gives each its own part), examples would
be lost silently. So options and digests of some rows are compared when it is made.

With random access the number of batches is known then, and nothing is exchanged later:
a process that fails is named by the others' watch. How long a stream is, only reading
shows, and a step that only some processes take hangs in its collectives. So before each
batch of a stream, in the background, the processes tell each other whether they have
it; an error or an end on one of them then ends the loops of all at the same step.
"""

import contextlib
import itertools
import zlib
from collections import defaultdict
from collections.abc import Iterator

import jax
import numpy as np

from meshlayout import _jax
from meshlayout._annotations import PyTree
from meshlayout.cluster.channel import LEFT, Channel
from meshlayout.data.examples import named_leaves
from meshlayout.data.placement import processes_of
from meshlayout.data.protocols import JSON, RandomAccessSource
from meshlayout.errors import DataError
from meshlayout.mesh import Mesh


# The exchanges in which a dataset is made.
_FACTS, _MADE = "facts", "made"
_NOT_MADE = "process {process} cannot make the dataset: {failure}"

WAY_OUT = (
    "Without per_process=True, every process reads all examples in the same order, and "
    "keeps those of its devices: otherwise examples are lost. If the source gives each "
    "process its own part, say per_process=True; if it shuffles or draws random "
    "numbers, give it the same seed on all processes; if it lists files, sort them."
)

_SAMPLE = 16  # rows of a source with random access that are compared

# How long to wait for another process's batch. Its loop may be busy for long, with
# compiling or with work that is only its own, and this one's thread is ahead of both.
_STEP_S = 3600.0

# Numbers the datasets of each group of processes: the processes make them in the same
# order, so a number names the same dataset on all of them.
_counts: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)


class Agreement:
    """What the processes of a mesh exchange about one dataset or loop, if anything."""

    def __init__(self, mesh: Mesh) -> None:
        self._processes = processes = processes_of(mesh)
        # A process without devices in the mesh loads no rows.
        is_alone = len(processes) == 1 or jax.process_index() not in processes
        self.has_others = not is_alone and _jax.coordination_client() is not None
        if self.has_others:
            number = next(_counts[tuple(processes)])
            self._name = f"data/{'-'.join(map(str, processes))}/{number}"
            self._channel = self._channel_of(self._name)
            self._iterations = itertools.count()

    def _channel_of(self, name: str) -> Channel:
        return Channel(
            name,
            self._processes,
            what="the same dataset",
            hint="All processes must make the same datasets in the same order, and "
            "iterate over them alike.",
            warn_after_s=60,
            error=DataError,
        )

    def failure_told(
        self, *, made: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Tells the others of an error inside, in `check_same`, or in `check_made`."""
        if not self.has_others:
            return contextlib.nullcontext()
        return self._channel.failure_told(_MADE if made else _FACTS)

    def check_same(self, facts: dict[str, JSON], digests: dict[str, JSON]) -> None:
        """Raises DataError if processes make a dataset with other facts or rows."""
        values = self._channel.exchange((facts, digests), _FACTS, failure=_NOT_MADE)
        (first, (facts, digests)), *others = values.items()
        for process, (other_facts, other_digests) in others:
            for name, fact in facts.items():
                if other_facts.get(name) != fact:
                    raise DataError(
                        f"process {first} makes the dataset with {name}={fact!r}, and "
                        f"process {process} with {name}={other_facts.get(name)!r}. It "
                        "must be the same on all processes."
                    )
            for path, digest in digests.items():
                if digest and other_digests.get(path) not in (None, digest):
                    raise DataError(
                        f"the source gives process {first} and process {process} "
                        f"different examples: {path or 'the array'!r} differs in some "
                        f"rows. {WAY_OUT}"
                    )

    def counts(self, own: tuple[int, int], remainder: str) -> tuple[int, int]:
        """Returns the batches of an epoch, and how many need no padding anywhere."""
        batches, full = zip(
            *self._channel.exchange(own, "batches").values(), strict=True
        )
        return (min if remainder == "drop" else max)(batches), min(full)

    def check_made(self) -> None:
        """Raises DataError if another process could not make its dataset."""
        if self.has_others:
            self._channel.exchange(None, _MADE, failure=_NOT_MADE)

    def new_turns(self) -> "Turns | None":
        """Returns the exchanges of the next iteration; None if there are none."""
        if not self.has_others:
            return None
        return Turns(self._channel_of(f"{self._name}/{next(self._iterations)}"))


class Turns:
    """The exchanges of one iteration: before each batch, who has it."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._turn, self._is_over = channel, 0, False

    def take(self, rows: int | None, where: str) -> dict[int, int | None]:
        """Returns what each process has for a batch `where`; None for no batch."""
        failure = "the source of process {process} failed: {failure}"
        try:
            values = self._channel.exchange(
                (rows, where), str(self._turn), timeout_s=_STEP_S, failure=failure
            )
        except DataError:
            self._is_over = True  # the others know
            raise
        for process, value in values.items():
            if value is LEFT:
                self._is_over = True
                raise DataError(
                    f"process {process} has left its loop over the data, and this one "
                    "continues. All processes must take the same number of steps."
                )
        (first, (_, where)), *others = values.items()
        for process, (_, other) in others:
            if other != where:
                self._is_over = True  # all raise it
                raise DataError(
                    f"the processes read different batches at once: {where} on process "
                    f"{first}, {other} on process {process}. Start their iterations at "
                    f"the same position. {WAY_OUT}"
                )
        if self._turn:  # which all have read, as they have come to this one
            self._channel.forget(str(self._turn - 1))
        self._turn += 1
        return {process: count for process, (count, _) in values.items()}

    def fail(self, error: BaseException) -> None:
        """Reports an error to the other processes, once they reach this step."""
        if not self._is_over:
            self._is_over = True
            self._channel.fail(error, str(self._turn))

    def leave(self, *, ended: bool = False) -> None:
        """Releases processes that wait for this one; nobody does where all `ended`."""
        if not self._is_over and not ended:
            self._channel.leave(str(self._turn))
        self._is_over = True


def sample_digests(source: RandomAccessSource) -> dict[str, JSON]:
    """Returns digests of some rows of two epochs, leaf by leaf.

    Two epochs, for a source that shuffles by itself, maybe only from the second on.
    Rows are read twice: a leaf that differs between the readings (augmented without a
    seed, say) shows nothing about the order, and is None.
    """
    indices = np.unique(np.linspace(0, len(source) - 1, _SAMPLE).astype(np.int64))
    first, second = (
        digests(*(source.read_rows(indices, epoch) for epoch in range(2)))
        for _ in range(2)
    )
    return {path: d if second.get(path) == d else None for path, d in first.items()}


def digests(*blocks: PyTree) -> dict[str, int]:
    """Returns a digest of each leaf of some trees of rows."""
    sums: dict[str, int] = {}
    for path, leaf in (pair for block in blocks for pair in named_leaves(block)[0]):
        rows = np.asarray(leaf)
        # The bytes of an array of objects are pointers, which differ by process.
        is_plain = not rows.dtype.hasobject
        data = rows.tobytes() if is_plain else repr(rows.tolist()).encode()
        sums[path] = zlib.crc32(data, sums.get(path, 0))
    return sums
