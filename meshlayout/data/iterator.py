"""One iteration over a data set, which can tell its place and go back to it."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from meshlayout.data.clock import Clock
from meshlayout.data.position import (
    NO_ORDER,
    Identity,
    Position,
    from_state,
    to_state,
)
from meshlayout.data.prefetching import Prefetched
from meshlayout.errors import DataError


@dataclass(frozen=True)
class Hooks:
    """What an iterator needs from its data set.

    Attributes:
        identity: What has to be the same for a state to fit.
        clock: Where waiting is measured.
        begin: Makes the batches from a place on.
        moved: Called with the place after every batch that was given.
    """

    identity: Identity
    clock: Clock
    begin: Callable[[Position], Prefetched]
    moved: Callable[[Position], None]


class DataIterator:
    """The batches of one iteration over a `DistributedDataset`.

    Several threads may take batches from it; each batch is given once. Reading starts
    with the first batch. `close` stops what runs in the background, as does the end of
    a `with` block, or leaving the loop.

    Args:
        hooks: What it needs from its data set.
        position: Where to begin.
    """

    def __init__(self, hooks: Hooks, position: Position) -> None:
        self._hooks, self._position = hooks, position
        self._batches: Prefetched | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def __iter__(self) -> "DataIterator":
        return self

    def __next__(self) -> Any:
        with self._lock:
            if self._is_closed:
                msg = "this data iterator is closed; iter(data) begins another one."
                raise DataError(msg)
            start = time.perf_counter()
            if self._batches is None:
                self._batches = self._hooks.begin(self._position)
            batch, self._position = next(self._batches)
            self._hooks.clock.waited(time.perf_counter() - start)
            self._hooks.moved(self._position)
            return batch

    def get_state(self) -> dict[str, Any]:
        """Returns the place after the last batch that was given, as JSON takes it.

        Batches that were made ready and not given do not count.

        Example:
            >>> import json, numpy as np
            >>> from meshlayout import create_mesh
            >>> from meshlayout.data import distribute_dataset
            >>> mesh = create_mesh({"batch": 8})
            >>> data = distribute_dataset(np.arange(32), mesh, global_batch_size=8)
            >>> it = iter(data)
            >>> _ = next(it)
            >>> state = json.loads(json.dumps(it.get_state()))
            >>> again = iter(data)
            >>> again.set_state(state)
            >>> np.asarray(next(again))
            array([ 8,  9, 10, 11, 12, 13, 14, 15], dtype=int32)
        """
        with self._lock:
            return to_state(self._hooks.identity, self._position)

    def set_state(self, state: Any, *, skip: bool = False) -> None:
        """Goes to a place, so that the batch after it comes next.

        Args:
            state: What `get_state` returned, here or in another run, on as many or
                other processes.
            skip: Whether a source that cannot go to a place may be read from the
                epoch's start, and what comes before the place be dropped.

        Raises:
            DataError: If the state is of another data set, or the source cannot go
                there.
        """
        with self._lock:
            if self._is_closed:
                msg = "this data iterator is closed; iter(data) begins another one."
                raise DataError(msg)
            position = from_state(self._hooks.identity, state)
            is_inside = position.row > 0 or position.batch > 0
            if is_inside and position.source == NO_ORDER:
                msg = (
                    "this source gives its examples in another order in every run, so "
                    f"that those before row {position.row} of epoch "
                    f"{position.epoch + 1} cannot be told from those after it. Resume "
                    "from a state of an epoch's end."
                )
                raise DataError(msg)
            is_stream = self._hooks.identity.source == "stream"
            if is_stream and is_inside and position.source is None and not skip:
                msg = (
                    f"this source cannot go to row {position.row} of epoch "
                    f"{position.epoch + 1}: it tells no place. "
                    "iterator.set_state(state, skip=True) reads the rows before it, "
                    "and drops them."
                )
                raise DataError(msg)
            self._stop()
            self._position = position
            self._hooks.moved(position)

    def close(self) -> None:
        """Stops reading, and lets go of batches that were made ready."""
        # A thread that waits for a batch holds the lock; stopping wakes it.
        batches = self._batches
        if batches is not None:
            batches.stop()
        with self._lock:
            self._is_closed = True
            self._stop()

    def __enter__(self) -> "DataIterator":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _stop(self) -> None:
        if self._batches is not None:
            self._batches.close()
            self._batches = None
