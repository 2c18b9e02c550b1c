"""Examples in whatever order they are ready: files read side by side.

Grain's interleave takes from its files in turn, so that a file that is slow holds up
the others. Here the threads that take pieces of files, and the queue from which blocks
come as they are ready, are our own; worker processes are Grain's, one chain for each.
"""

import collections
import queue
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from meshlayout.data.clock import Clock
from meshlayout.data.position import NO_ORDER
from meshlayout.data.source import Block
from meshlayout.data.tfds_pipeline.chain import Chain, Part, Readers
from meshlayout.data.tfds_pipeline.choice import Choice
from meshlayout.data.tfds_pipeline.records import add_stages


Array = np.ndarray[Any, Any]

# Rows that a reader takes from a file at a time.
_UNIT = 64

# The place after all rows.
_END = "end"

# How long a thread waits before it looks whether it is to stop.
_LOOK_S = 0.1


class ShardStream:
    """A source that reads several files at once and gives blocks as they come.

    Args:
        choice: Who reads.
        shards: The rows that lie in each file.
        seed: What shuffles the pieces of files and the rows in them; None reads the
            files in turn.
        part: Which of how many equal parts of the rows is given.
        clock: Where the time goes.
    """

    def __init__(
        self,
        choice: Choice,
        shards: list[range],
        *,
        seed: int | None,
        part: tuple[int, int],
        clock: Clock,
    ) -> None:
        self._choice, self._clock = choice, clock
        number, of = part
        # Every part gets rows of every piece, so that parts differ by few rows.
        units = [unit[number::of] for unit in interleaved(shards, _UNIT)]
        self._units = _Units([unit for unit in units if len(unit)], seed)
        self._num_rows = sum(map(len, units))
        self.num_rows: int | None = self._num_rows
        self._lock = threading.Lock()
        self._idle: dict[int, Chain] = {}
        self._is_closed = False

    def open(self, epoch: int) -> "ShardPass":
        """Begins a pass."""
        if not len(self._units):
            return ShardPass([], 0, self._clock)
        readers = self._choice.readers(self._units, 0, len(self._units))
        self._choice.close()  # other processes read here, one for each part
        count = max(1, min(readers.count, len(self._units)))
        if readers.kind != "processes":
            shared = _Taken(self._choice, self._units.of_epoch(epoch), epoch)
            return ShardPass([shared] * count, self._num_rows, self._clock)
        lanes = [_Lane(self, number, count, epoch) for number in range(count)]
        return ShardPass(lanes, self._num_rows, self._clock)

    def chain(self, number: int, count: int, epoch: int) -> tuple[Chain, int]:
        """Returns a process that reads a part of the pieces, and how many those are.

        Args:
            number: Which part.
            count: Of how many.
            epoch: The epoch.
        """
        units = self._units.part(number, count)
        with self._lock:
            chain = self._idle.pop(number, None)
        start = epoch * len(units)
        if chain is not None and not chain.can_go_to(start):
            chain.close()
            chain = None
        if chain is None:
            one = Readers("processes", 1)
            chain = Chain(self._choice.function, units, one, start)
        chain.go_to(start)
        return chain, len(units)

    def leave(self, number: int, chain: Chain) -> None:
        """Keeps a process for the next pass.

        Args:
            number: Which part of the pieces it reads.
            chain: The process.
        """
        with self._lock:
            is_kept = not self._is_closed and number not in self._idle
            if is_kept:
                self._idle[number] = chain
        if not is_kept:
            chain.close()

    def close(self) -> None:
        """Ends the processes; one that is in use ends when it is left."""
        with self._lock:
            self._is_closed = True
            chains = list(self._idle.values())
            self._idle.clear()
        for chain in chains:
            chain.close()


class _Units:
    """Pieces of files, as the batches of a chain; each epoch has its own order."""

    step = 1

    def __init__(
        self, units: list[range], seed: int | None, part: tuple[int, int] = (0, 1)
    ) -> None:
        self._units, self._seed, self._part = units, seed, part
        self._latest: tuple[int, list[Array]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_latest": None}

    def __len__(self) -> int:
        number, count = self._part
        return len(range(number, len(self._units), count))

    def part(self, number: int, count: int) -> "_Units":
        """Returns the pieces that one of several readers reads."""
        return _Units(self._units, self._seed, (number, count))

    def of_epoch(self, epoch: int) -> list[Array]:
        """Returns the rows of each piece, in an epoch's order."""
        units = [np.arange(len(unit)) * unit.step + unit.start for unit in self._units]
        if self._seed is not None:
            rng = np.random.default_rng([self._seed, epoch])
            units = [rng.permutation(units[i]) for i in rng.permutation(len(units))]
        number, count = self._part
        return units[number::count]

    def rows(self, place: int) -> list[tuple[int, Array]]:
        """Returns the epoch and the rows of a piece."""
        epoch, unit = divmod(place, len(self))
        latest = self._latest
        if latest is None or latest[0] != epoch:
            latest = self._latest = (epoch, self.of_epoch(epoch))
        return [(epoch, latest[1][unit])]


class _Taken:
    """Pieces that several threads take, each as soon as it has nothing to do."""

    def __init__(self, choice: Choice, units: list[Array], epoch: int) -> None:
        self._function, self._epoch = choice.function, epoch
        self._units = collections.deque(units)

    def next(self) -> Part | None:
        """Returns the next piece, or None after the last."""
        try:
            unit = self._units.popleft()
        except IndexError:
            return None
        return self._function(unit, np.full(len(unit), self._epoch))

    def close(self) -> None:
        """Leaves nothing to take."""
        self._units.clear()


class _Lane:
    """The pieces that one worker process reads."""

    def __init__(self, stream: ShardStream, number: int, of: int, epoch: int) -> None:
        self._stream, self._number = stream, number
        self._chain, self._left = stream.chain(number, of, epoch)
        self._is_whole = True

    def next(self) -> Part | None:
        """Returns the next piece, or None after the last."""
        if not self._left:
            return None
        self._left -= 1
        self._is_whole = False
        (part,) = self._chain.parts()
        self._is_whole = True
        return part

    def close(self) -> None:
        """Leaves the process to the next pass."""
        if self._is_whole:
            self._stream.leave(self._number, self._chain)
        else:
            self._chain.close()


class ShardPass:
    """One pass: threads that read pieces and hand them over.

    Args:
        lanes: What each thread reads.
        num_rows: How many rows all of them have.
        clock: Where the time goes.
    """

    def __init__(self, lanes: list[Any], num_rows: int, clock: Clock) -> None:
        self._left = num_rows
        self._stop = threading.Event()
        self._ready: queue.Queue[Any] = queue.Queue(2 * len(lanes))
        self._running = self._at_once = len(lanes)
        self._clock = clock
        for lane in lanes:
            reading = threading.Thread(
                target=_read,
                args=(lane, self._ready, self._stop),
                name="meshlayout-shards",
                daemon=True,
            )
            reading.start()

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
                try:
                    raise found
                finally:
                    del found  # a cycle with its traceback would keep frames
            else:
                part, count = found
                self._left -= count
                add_stages(self._clock, [part], count, self._at_once)
                return Block(part.rows, count)
        raise StopIteration

    def get_state(self) -> Any:
        """Returns whether all rows were given: they come in another order every time.

        Returns:
            What names the pass's end, or says that there is no place.
        """
        return NO_ORDER if self._left else _END

    def set_state(self, state: Any) -> None:
        """Goes to the pass's end, the only place that it knows."""
        assert state == _END
        self.close()

    def close(self) -> None:
        """Lets the threads end after the piece that they are reading."""
        self._stop.set()


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


def _read(lane: Any, ready: "queue.Queue[Any]", stop: threading.Event) -> None:
    try:
        while not stop.is_set():
            part = lane.next()
            if part is None:
                break
            count = len(jax.tree.leaves(part.rows)[0])
            _put(ready, (part, count), stop)
    except Exception as error:  # raised again where blocks are asked for
        _put(ready, error, stop)
    lane.close()
    _put(ready, None, stop)


def _put(ready: "queue.Queue[Any]", found: Any, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            ready.put(found, timeout=_LOOK_S)
        except queue.Full:
            continue
        return
