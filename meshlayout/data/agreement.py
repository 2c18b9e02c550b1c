"""What processes agree on about one dataset: how it is made, and what it reads.

Every process decides alone which rows are its own, so all of them must have the same
options and the same source. With a source that differs between them (a shuffle without
a seed, a loader that gives each process its own part), examples would be lost silently:
each process keeps its share of an order that the others do not have. So digests of some
rows are compared when a dataset is made.

A step that only some processes take hangs in its collectives. So before each batch, in
the background, the processes tell each other whether they have it. An error or an end
of the data on one of them then ends the loops of all at the same step. Processes that
read the same stream also compare the rows of each batch.

That takes two calls of JAX's coordination service for two processes, and about three
for more: 0.5 and 1 ms of CPU per batch, in the thread that works ahead of the loop.
"""

import contextlib
import functools
import itertools
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from meshlayout import _jax
from meshlayout._annotations import PyTree
from meshlayout.cluster.channel import LEFT, Channel
from meshlayout.data.examples import named_leaves
from meshlayout.data.protocols import JSON, RandomAccessSource
from meshlayout.errors import DataError
from meshlayout.mesh import Mesh


# The exchanges in which a dataset is made.
FACTS, PLAN = "facts", "plan"

_NOT_MADE = "process {process} cannot make the dataset: {failure}"

# How many rows of a source with random access are compared.
_SAMPLE = 16

# How long to wait for another process's batch. Its loop may be busy for long, with
# compiling or with work that is only its own, and this one's thread is ahead of both.
_STEP_S = 3600.0

# Exchanges whose messages are removed together, which saves a call for each.
_DIRECTORY_STEPS = 16

# Numbers the datasets of each group of processes: the processes make them in the same
# order, so a number names the same dataset on all of them.
_counts: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)


class Agreement:
    """What the processes of a mesh exchange about one dataset.

    All of them must make their datasets in the same order, and iterate over them alike.

    Attributes:
        channel: Between the processes.
        ended: Iterations that are over on this process, and whose messages remain.
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
        self.ended: list[str] = []
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
        digests = {process: value["digests"] for process, value in values.items()}
        _check_rows(digests, where, _WAY_OUT)

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

    Args:
        paths: The paths of the leaves.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._sums = dict.fromkeys(paths, 0)

    def add(self, leaves: Iterable[np.ndarray]) -> None:
        """Adds some rows of each leaf."""
        sums = self._sums
        for path, rows in zip(sums, leaves, strict=True):
            # The bytes of an array of objects are pointers, which differ between
            # processes.
            is_plain = not rows.dtype.hasobject
            data = rows.tobytes() if is_plain else repr(rows.tolist()).encode()
            # Four times as fast as a cryptographic hash, and nobody forges rows.
            sums[path] = zlib.crc32(data, sums[path])

    def by_leaf(self) -> dict[str, int]:
        """Returns the digest of each leaf by its path."""
        return self._sums.copy()


class BatchReport(NamedTuple):
    """What a process tells the others about its next batch.

    Attributes:
        epoch: The epoch, from 0.
        number: The number of the batch in the epoch, from 0.
        num_rows: Its rows without padding; None at the end of the epoch.
        digests: Of its rows, by leaf, if all processes read them.
        is_full: Whether it needs no padding.
    """

    epoch: int
    number: int
    num_rows: int | None
    digests: dict[str, int]
    is_full: bool = False

    @property
    def text(self) -> str:
        """Which batch it is, in words."""
        return f"batch {self.number + 1} of epoch {self.epoch + 1}"


class IterationExchange:
    """What processes exchange in one iteration, batch by batch."""

    def __init__(self, agreement: Agreement, name: str) -> None:
        self._agreement, self._name = agreement, name
        self._step = 0
        self._is_over = False

    def agree(self, report: BatchReport) -> dict[int, BatchReport]:
        """Returns each process's report of its next batch.

        Raises:
            DataError: If a process has failed, or has left its loop.
        """
        try:
            messages = self._agreement.channel.exchange(
                (report, tuple(self._agreement.ended)),
                self._topic,
                timeout_s=_STEP_S,
                failure="the source of process {process} failed: {failure}",
            )
        except DataError:
            self.end()  # the others know
            raise
        finally:
            # What was sent must stay, even after Ctrl-C: others may still read it.
            self._step += 1
        for process, message in messages.items():
            if message is LEFT:
                self.end()
                msg = (
                    f"process {process} has left its loop over the data, and this one "
                    "continues. All processes must take the same number of steps."
                )
                raise DataError(msg)
        self._forget([ended for _, ended in messages.values()])
        return {process: report for process, (report, _) in messages.items()}

    def fail(self, error: BaseException) -> None:
        """Reports an error to the other processes, once they reach this step."""
        if not self._is_over:
            self._agreement.channel.fail(error, self._topic)
            self.end()

    def leave(self) -> None:
        """Releases processes that are waiting for this one's next step."""
        if not self._is_over:
            self._agreement.channel.leave(self._topic)
            self.end()

    def end(self) -> None:
        """Records that the iteration has ended on all processes: nobody is waiting."""
        if not self._is_over:
            self._is_over = True
            self._agreement.ended.append(self._name)

    @property
    def _topic(self) -> str:
        """The exchange that comes next."""
        return f"{self._directory}/{self._step % _DIRECTORY_STEPS}"

    @property
    def _directory(self) -> str:
        return f"{self._name}/{self._step // _DIRECTORY_STEPS}"

    def _forget(self, ended: Sequence[tuple[str, ...]]) -> None:
        """Removes messages that all processes have read.

        Args:
            ended: For each process, the iterations that are over there.
        """
        channel, number = self._agreement.channel, self._step - 1
        if number and number % _DIRECTORY_STEPS == 0:
            # All have come to this directory, and so have finished the one before.
            channel.forget_directory(f"{self._name}/{number // _DIRECTORY_STEPS - 1}")
        for name in set.intersection(*map(set, ended)):
            channel.forget_directory(name)
            # A loop in another thread may have removed it.
            with contextlib.suppress(ValueError):
                self._agreement.ended.remove(name)


def agreement_of(mesh: Mesh) -> Agreement | None:
    """Returns an agreement of a mesh's processes; None if there is none to make."""
    processes = _processes_of(mesh)
    return None if processes is None else Agreement(processes)


def loop_agreement_of(mesh: Mesh) -> Agreement | None:
    """Returns the agreement of all loops over something other than a dataset.

    Each loop is an iteration of it. If each made its own agreement, as a dataset does,
    its last messages would stay forever, and there may be many evaluations.
    """
    processes = _processes_of(mesh)
    return None if processes is None else _loop_agreement(tuple(processes))


@functools.cache
def _loop_agreement(processes: tuple[int, ...]) -> Agreement:
    return Agreement(list(processes))


def _processes_of(mesh: Mesh) -> list[int] | None:
    """Returns the processes of a mesh; None if this one agrees with no other."""
    processes = sorted({device.process_index for device in mesh.devices.flat})
    # A process without devices in the mesh loads no rows.
    is_alone = len(processes) == 1 or jax.process_index() not in processes
    return None if is_alone or _jax.coordination_client() is None else processes


def failure_told(
    agreement: Agreement | None, topic: str
) -> contextlib.AbstractContextManager[None]:
    """Tells the other processes of an error inside, at the exchange they do next."""
    if agreement is None:
        return contextlib.nullcontext()
    return agreement.channel.failure_told(topic)


def check_alike(reports: dict[int, BatchReport]) -> None:
    """Raises DataError if processes that have the same source read different batches.

    Args:
        reports: Of each process.
    """
    first = min(reports)
    expected = reports[first]
    for process, report in reports.items():
        if report == expected:
            continue
        if report[:2] != expected[:2]:
            msg = (
                f"the processes read different batches at once: {expected.text} on "
                f"process {first}, {report.text} on process {process}. Start their "
                f"iterations at the same position. {_WAY_OUT}"
            )
            raise DataError(msg)
        if report.num_rows != expected.num_rows:
            msg = (
                f"the sources of process {first} and process {process} have different "
                f"numbers of rows: {_rows_text(expected, first)}, and "
                f"{_rows_text(report, process)}. {_WAY_OUT}"
            )
            raise DataError(msg)


def check_rows(
    reports: Mapping[int, BatchReport],
    groups: Iterable[Sequence[int]],
    *,
    per_process: bool,
) -> None:
    """Raises DataError if processes have read different rows.

    Args:
        reports: Of each process.
        groups: The processes that must read the same rows, group by group.
        per_process: Whether each process has a source of its own.
    """
    for group in groups:
        digests = {process: reports[process].digests for process in group}
        hint = _SAME_ROWS if per_process else _WAY_OUT
        _check_rows(digests, reports[group[0]].text, hint)


def _rows_text(report: BatchReport, process: int) -> str:
    if report.num_rows is None:
        return f"that of process {process} ends before {report.text}"
    return f"process {process} has {report.num_rows} in {report.text}"


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


def block_digests(blocks: Iterable[PyTree]) -> dict[str, int]:
    """Returns a digest of each leaf of some trees of rows."""
    named = [named_leaves(rows)[0] for rows in blocks]
    digest = RowDigest([path for path, _ in named[0]])
    for pairs in named:
        digest.add(np.asarray(leaf) for _, leaf in pairs)
    return digest.by_leaf()


_WAY_OUT = (
    "Without per_process=True, every process reads all examples in the same order, and "
    "keeps those of its devices: otherwise examples are lost. If the source gives each "
    "process its own part, say per_process=True; if it shuffles or draws random "
    "numbers, give it the same seed on all processes; if it lists files, sort them."
)


_SAME_ROWS = (
    "Their devices hold the same rows of each batch, so both sources must yield the "
    "same: give them the same files, in the same order, and the same seed."
)


def _check_rows(
    digests: Mapping[int, Mapping[str, int | None]], where: str, hint: str
) -> None:
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
                f"{where}. {hint}"
            )
            raise DataError(msg)
