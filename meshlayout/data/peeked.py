"""A streamed source whose first block was read to see what its examples are."""

import contextlib
from typing import Any

from meshlayout.data.source import Block, Stream, StreamSource
from meshlayout.errors import DataError


class PeekedSource:
    """A source that hands the block that was read on, and reads nothing twice.

    Args:
        source: The source.

    Raises:
        DataError: If it has no examples.
    """

    def __init__(self, source: StreamSource) -> None:
        self._source = source
        self.num_rows = source.num_rows
        stream = source.open(0)
        with contextlib.ExitStack() as stack:
            stack.callback(stream.close)
            start = stream.get_state()
            block = _first_block(stream)
            stack.pop_all()
        self.first = block
        self._waiting: PeekedStream | None = PeekedStream(stream, block, start)

    def open(self, epoch: int) -> Stream:
        """Begins a pass; the first one is the pass that was begun for the look."""
        waiting = self._waiting
        if epoch or waiting is None:
            return self._source.open(epoch)
        self._waiting = None
        return waiting

    def close(self) -> None:
        """Closes the pass that was begun, if nobody took it."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.close()


def next_block(stream: Any, count: int) -> Block:
    """Returns the next block.

    Args:
        stream: The pass.
        count: At most how many examples, where the stream has a choice.
    """
    take = getattr(stream, "take", None)
    return next(stream) if take is None else take(count)


def _first_block(stream: Stream) -> Block:
    """Returns the first block with examples."""
    try:
        block = next_block(stream, 1)
        while not block.count:
            block = next_block(stream, 1)
    except StopIteration:
        msg = "the source is empty: it gave no examples."
        raise DataError(msg) from None
    return block


class PeekedStream:
    """A pass whose first block was read already.

    Args:
        stream: The pass.
        block: The block.
        start: The place before it.
    """

    def __init__(self, stream: Stream, block: Block, start: Any) -> None:
        self._stream, self._start = stream, start
        self._block: Block | None = block

    def __next__(self) -> Block:
        block, self._block = self._block, None
        return next(self._stream) if block is None else block

    def take(self, count: int) -> Block:
        """Returns the next block, of at most `count` examples where it has a choice."""
        block, self._block = self._block, None
        return next_block(self._stream, count) if block is None else block

    def get_state(self) -> Any:
        """Returns the place after the last block that was handed on."""
        return self._stream.get_state() if self._block is None else self._start

    def set_state(self, state: Any) -> None:
        """Goes to a place."""
        self._stream.set_state(state)
        self._block = None

    def close(self) -> None:
        """Closes the pass."""
        self._block = None
        self._stream.close()
