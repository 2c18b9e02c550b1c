"""Batches that are on the devices already, and pass through."""

from typing import Any

from meshlayout.data.adapters.arrays import is_placed
from meshlayout.data.clock import Clock
from meshlayout.data.host_batches import HostBatch
from meshlayout.data.position import Position, check_json
from meshlayout.data.source import Stream, StreamSource
from meshlayout.errors import DataError


class PlacedReader:
    """Gives batches that are on the devices already, as they are.

    Args:
        source: The source, whose blocks are such batches.
        clock: Where the time goes.
    """

    def __init__(self, source: StreamSource, clock: Clock) -> None:
        self._source, self._clock = source, clock
        self._stream: Stream | None = None
        self._epoch = -1

    def seek(self, position: Position) -> None:
        """Goes to a place; by reading and dropping where the source tells none."""
        self._open(position.epoch)
        stream: Any = self._stream
        if not position.batch:
            return
        if position.source is not None:
            stream.set_state(position.source)
        else:
            for _ in range(position.batch):
                next(stream)

    def read(self, position: Position) -> HostBatch | None:
        """Returns the next batch, or None at the epoch's end."""
        if self._stream is None or self._epoch != position.epoch:
            self._open(position.epoch)
        stream: Any = self._stream
        with self._clock.stage("read"):
            try:
                block = next(stream)
            except StopIteration:
                return None
        self._clock.add("read", block.count, 0.0)
        if not is_placed(block.rows):
            msg = (
                "the source gave a batch on the host after others on devices. Give all "
                "of them in one place."
            )
            raise DataError(msg)
        after = position._replace(
            batch=position.batch + 1,
            row=position.row + block.count,
            source=check_json(stream.get_state()),
        )
        leaves = [block.rows]
        return HostBatch(leaves, block.count, after, is_placed=True)

    def close(self) -> None:
        """Closes the pass that is open."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _open(self, epoch: int) -> None:
        self.close()
        self._stream = self._source.open(epoch)
        self._epoch = epoch
