"""Examples in whatever order they are ready: files read side by side."""

import collections
import queue
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from meshlayout.data.clock import Clock
from meshlayout.data.source import Block
from meshlayout.data.team import Team
from meshlayout.data.tfds_pipeline.records import add_stages


Array = np.ndarray[Any, Any]

# Rows that a reader takes from a file at a time.
_UNIT = 64

# How long a thread waits before it looks whether it is to stop.
_LOOK_S = 0.1


class ShardStream:
    """A source that reads several files at once and gives blocks as they come.

    Args:
        team: Who reads; its function returns a `Part`.
        shards: The rows that lie in each file.
        seed: What shuffles the pieces of files and the rows in them; None reads the
            files in turn.
        part: Which of how many equal parts of the rows is given.
        clock: Where the time goes.
    """

    def __init__(
        self,
        team: Team,
        shards: list[range],
        *,
        seed: int | None,
        part: tuple[int, int],
        clock: Clock,
    ) -> None:
        self._team, self._seed, self._clock = team, seed, clock
        number, of = part
        units = interleaved(shards, _UNIT)
        # Every part gets rows of every piece, so that parts differ by few rows.
        self._units = [unit[number::of] for unit in units]
        self._units = [unit for unit in self._units if len(unit)]
        self.num_rows: int | None = sum(map(len, self._units))

    def open(self, epoch: int) -> "ShardPass":
        """Begins a pass."""
        units = [np.arange(len(unit)) * unit.step + unit.start for unit in self._units]
        if self._seed is not None:
            rng = np.random.default_rng([self._seed, epoch])
            units = [rng.permutation(units[i]) for i in rng.permutation(len(units))]
        self._settle(units)
        return ShardPass(self._team, units, epoch, self._clock)

    def _settle(self, units: list[Array]) -> None:
        """Lets a team choose by reading some pieces, which are read again later."""
        for unit in units * 2:
            if self._team.is_settled:
                return
            self._team.turn(unit, lambda rows: (rows, 0))
        self._team.settle()


class ShardPass:
    """One pass: threads that take pieces, read them and hand them over.

    Args:
        team: Who reads.
        units: The rows of each piece.
        epoch: The epoch.
        clock: Where the time goes.
    """

    def __init__(
        self, team: Team, units: list[Array], epoch: int, clock: Clock
    ) -> None:
        self._units = collections.deque(units)
        self._stop = threading.Event()
        count = max(1, min(team.workers.count, len(units)))
        self._ready: queue.Queue[Any] = queue.Queue(2 * count)
        self._running = count
        for _ in range(count):
            reading = threading.Thread(
                target=_read,
                args=(team, self._units, epoch, self._ready, self._stop),
                name="meshlayout-shards",
                daemon=True,
            )
            reading.start()
        self._clock, self._at_once = clock, count

    def __next__(self) -> Block:
        while self._running and not self._stop.is_set():
            try:
                found = self._ready.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            if found is None:
                self._running -= 1
            elif isinstance(found, Exception):
                self.close()
                raise found
            else:
                part, count = found
                add_stages(self._clock, [part], count, self._at_once)
                return Block(part.rows, count)
        raise StopIteration

    def get_state(self) -> Any:
        """Returns None: rows come in another order every time."""

    def set_state(self, state: Any) -> None:
        """Is never called, since there is no state."""
        raise NotImplementedError

    def close(self) -> None:
        """Lets the threads end after the piece that they are reading."""
        self._stop.set()
        self._units.clear()


def interleaved(shards: list[range], size: int) -> list[range]:
    """Returns the rows of files in pieces, one of each file in turn.

    Args:
        shards: The rows that lie in each file.
        size: Rows of a piece.

    Example:
        >>> interleaved([range(0, 5), range(5, 8)], 2)
        [range(0, 2), range(5, 7), range(2, 4), range(7, 8), range(4, 5)]
    """
    left = [_pieces(shard, size) for shard in shards]
    found = []
    while left:
        still = []
        for pieces in left:
            piece = next(pieces, None)
            if piece is not None:
                found.append(piece)
                still.append(pieces)
        left = still
    return found


def _pieces(shard: range, size: int) -> Iterator[range]:
    for start in range(0, len(shard), size):
        yield shard[start : start + size]


def _read(
    team: Team,
    units: "collections.deque[Array]",
    epoch: int,
    ready: "queue.Queue[Any]",
    stop: threading.Event,
) -> None:
    while not stop.is_set():
        try:
            unit = units.popleft()
        except IndexError:
            break
        try:
            (part,) = team.workers.run([(unit, epoch)])
            found: Any = (part, len(unit))
        except Exception as error:
            found = error
        _put(ready, found, stop)
    _put(ready, None, stop)


def _put(ready: "queue.Queue[Any]", found: Any, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            ready.put(found, timeout=_LOOK_S)
        except queue.Full:
            continue
        return
