"""The agreement of processes on one dataset: how it is made, and where streams end.

Every process decides alone which rows are its own: with a source that differs between
them, examples would be lost silently. So options and checksums of some rows are
compared when a dataset is made. With random access nothing is exchanged later. The
length of a stream is known only by reading it, and a step that only some processes take
hangs in its collectives. So before each batch, the processes tell each other whether
they have it, and an error or end on one of them ends the loops of all at the same step.
"""

import functools
import itertools
import zlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Self, TypeVar

import jax
import numpy as np

from meshlayout._annotations import PyTree
from meshlayout.cluster.channel import Channel
from meshlayout.data.examples import leaf_text, named_leaves
from meshlayout.data.placement import processes_of
from meshlayout.data.protocols import JSON, RandomAccessSource
from meshlayout.errors import DataError
from meshlayout.mesh import Mesh


T = TypeVar("T")

WAY_OUT = (
    "Without per_process=True, every process reads all examples in the same order, and "
    "keeps those of its devices: otherwise examples are lost. If the source gives each "
    "process its own part, say per_process=True; if it shuffles or draws random "
    "numbers, give it the same seed on all processes; if it lists files, sort them."
)

_SAMPLE = 16  # rows of a source with random access that are compared

# How long to wait for another process's batch: its loop may be busy with compiling.
_STEP_S = 3600.0

# Numbers the datasets of each group of processes: the processes make them in the same
# order, so a number names the same dataset on all of them.
_counts: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)


class Agreement:
    """The exchanges of a mesh's processes about one dataset or loop, if any."""

    def __init__(self, mesh: Mesh) -> None:
        here, processes = jax.process_index(), processes_of(mesh)
        # A process without devices in the mesh loads no rows.
        group = processes if here in processes else [here]
        self.has_others = len(group) > 1
        number = next(_counts[tuple(group)])
        self._name = f"data/{'-'.join(map(str, group))}/{number}"
        self._channel_of = functools.partial(
            Channel,
            processes=group,
            what="the same dataset",
            hint="All of them make the same datasets in the same order, and iterate "
            "over them alike.",
            error=DataError,
        )
        failure = f"process {here} cannot make the dataset: "
        self.channel = self._channel_of(self._name, failure=failure)
        self._iterations = itertools.count()

    def exchange(self, facts: dict[str, JSON], own: T) -> dict[int, T]:
        """Returns each process's `own`; raises DataError if facts differ."""
        values = self.channel.exchange((facts, own))
        (first, (facts, _)), *others = values.items()
        for name, fact in facts.items():
            for process, (other, _) in others:
                if other.get(name) != fact:
                    raise DataError(
                        f"the processes make different datasets: {name} is {fact!r} on "
                        f"process {first}, {other.get(name)!r} on process {process}. "
                        f"{WAY_OUT}"
                    )
        return {process: value for process, (_, value) in values.items()}

    def new_turns(self) -> "Turns | None":
        """Returns the exchanges of the next iteration; None if there are none."""
        if not self.has_others:
            return None
        failure = f"the source of process {jax.process_index()} failed: "
        name = f"{self._name}/{next(self._iterations)}"
        return Turns(self._channel_of(name, failure=failure, timeout_s=_STEP_S))


class Turns:
    """The exchanges of one iteration: before each batch, who has it.

    The end of a `with` block tells the other processes about an error inside, or that
    this one has left its loop.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel, self._turn, self._is_over = channel, 0, False

    def take(self, answer: Any, what: str) -> dict[int, Any]:
        """Returns each process's answer about a batch of the same name on all."""
        try:
            values = self._channel.exchange((answer, what))
            (first, (_, expected)), *others = values.items()
            for process, (_, other) in others:
                if other != expected:
                    raise DataError(
                        f"the processes read different data: {expected} on process "
                        f"{first}, {other} on process {process}. Their iterations must "
                        f"start at the same position. {WAY_OUT}"
                    )
        except DataError:  # which all processes raise
            self._is_over = True
            raise
        self._turn += 1
        return {process: value for process, (value, _) in values.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._is_over or error is None:
            return
        if isinstance(error, Exception):
            self._channel.fail(error)
        else:
            who = f"process {jax.process_index()} has left its loop over the data, and"
            all_of = "All processes must take the same number of steps."
            self._channel.leave(self._turn, f"{who} this one continues. {all_of}")


def sample_checksums(source: RandomAccessSource) -> dict[str, JSON]:
    """Returns checksums of some rows of two epochs, leaf by leaf.

    Two epochs, since a source may shuffle by itself. Rows are read twice: a leaf that
    differs between readings (for example, augmented without a seed) is left out.
    """
    indices = np.unique(np.linspace(0, len(source) - 1, _SAMPLE).astype(np.int64))
    first, second = (
        checksums(*(source.read_rows(indices, epoch) for epoch in range(2)))
        for _ in range(2)
    )
    return dict(first.items() & second.items())


def checksums(*blocks: PyTree) -> dict[str, JSON]:
    """Returns a checksum of each leaf of some trees of rows, with its description."""
    sums: dict[str, int] = {}
    for path, leaf in (pair for block in blocks for pair in named_leaves(block)[0]):
        name, rows = f"the checksum of some rows of {leaf_text(path)}", np.asarray(leaf)
        # The bytes of an array of objects are pointers, which differ by process.
        is_plain = not rows.dtype.hasobject
        data = rows.tobytes() if is_plain else repr(rows.tolist()).encode()
        sums[name] = zlib.crc32(data, sums.get(name, 0))
    return sums
