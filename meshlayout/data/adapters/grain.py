"""Grain's datasets and loaders as sources."""

import base64
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from meshlayout.data.adapters.arrays import ambiguous, looks_batched
from meshlayout.data.adapters.streams import Elements, ElementStream
from meshlayout.data.clock import Clock
from meshlayout.data.source import Source, Stream
from meshlayout.data.stacking import stack
from meshlayout.errors import DataError


# A dataset that repeats for ever has a length near the largest integer.
_ENDLESS = 2**48

_WHAT = "the Grain data set"


def adapt(obj: Any, clock: Clock, *, batched: bool | None) -> Source | None:
    """Returns a Grain object as a source, or None if it is of another kind.

    Args:
        obj: A MapDataset, IterDataset, DataLoader or random-access data source.
        clock: Not needed here.
        batched: Whether its elements are batches; None looks for a batch step.

    Raises:
        DataError: If its elements may be batches or examples.
    """
    del clock
    kinds = {kind.__name__ for kind in type(obj).__mro__}
    if batched is None and _gives_batches(obj):
        batched = True
    if "MapDataset" in kinds:
        if batched or _leaves_holes(obj) or len(obj) > _ENDLESS:
            return MapDatasetStream(obj, batched=batched)
        if batched is None and len(obj) and looks_batched(obj[0]):
            raise DataError(ambiguous(_WHAT))
        return MapDatasetRows(obj)
    if "IterDataset" in kinds or "DataLoader" in kinds:
        return GrainStream(obj, batched=batched)
    if hasattr(obj, "__getitem__") and hasattr(obj, "__len__") and not batched:
        return MapDatasetRows(obj)
    return None


class MapDatasetRows:
    """A Grain MapDataset, or another random-access source, as a source of rows.

    A dataset that shuffles gives another order in every epoch, as with Grain itself.

    Args:
        dataset: The dataset.
        epoch: Which epoch of it, from 0.
    """

    def __init__(self, dataset: Any, epoch: int = 0) -> None:
        self._dataset = dataset
        reshuffles = any(
            kind.__name__ == "MapDataset" for kind in type(dataset).__mro__
        )
        self._offset = epoch * len(dataset) if reshuffles else 0

    def __len__(self) -> int:
        return len(self._dataset)

    def at_epoch(self, epoch: int) -> "MapDatasetRows":
        """Returns the rows of another epoch."""
        return MapDatasetRows(self._dataset, epoch)

    def rows(self, indices: np.ndarray[Any, Any]) -> Any:
        """Returns rows, in the order asked for.

        Raises:
            DataError: If the dataset has no element there.
        """
        numbers = (indices + self._offset).tolist()
        examples = [self._dataset[number] for number in numbers]
        for number, example in zip(indices.tolist(), examples, strict=True):
            if example is None:
                msg = (
                    f"the Grain MapDataset has no element at row {number}: a step of "
                    "it filters. Give its to_iter_dataset(), which leaves them out."
                )
                raise DataError(msg)
        return stack(examples)


class MapDatasetStream:
    """A Grain MapDataset that filters, has no end or gives batches, read in order.

    Args:
        dataset: The dataset.
        batched: Whether its elements are batches; None where they tell.
    """

    def __init__(self, dataset: Any, *, batched: bool | None) -> None:
        self._dataset, self._batched = dataset, batched
        self.num_rows: int | None = None

    def open(self, epoch: int) -> Stream:
        """Begins a pass: that epoch of a dataset that shuffles."""
        elements = _Numbered(self._dataset, epoch)
        return ElementStream(elements, batched=self._batched, what=_WHAT)


class _Numbered(Elements):
    """The elements of one epoch of a MapDataset; the state is the next one's number."""

    def __init__(self, dataset: Any, epoch: int) -> None:
        self._dataset, self._next = dataset, 0
        self._length = len(dataset)
        self._offset = epoch * self._length if self._length < _ENDLESS else 0

    def __next__(self) -> Any:
        while self._next < self._length:
            element = self._dataset[self._offset + self._next]
            self._next += 1
            if element is not None:
                return element
        raise StopIteration

    def get_state(self) -> Any:
        return self._next

    def set_state(self, state: Any) -> None:
        self._next = int(state)


class GrainStream:
    """A Grain IterDataset or DataLoader as a stream.

    Args:
        dataset: The dataset or loader.
        batched: Whether its elements are batches; None where they tell.
    """

    def __init__(self, dataset: Any, *, batched: bool | None) -> None:
        self._dataset, self._batched = dataset, batched
        self.num_rows: int | None = None

    def open(self, epoch: int) -> Stream:
        """Begins a pass over the dataset; what it does in an epoch is its own."""
        mark_flags_as_parsed()
        elements = _Iterated(iter(self._dataset))
        return ElementStream(elements, batched=self._batched, what=_WHAT)


class _Iterated(Elements):
    """The elements of a Grain iterator, with Grain's own state as text or JSON."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator: Any = iterator

    def __next__(self) -> Any:
        return next(self._iterator)

    def get_state(self) -> Any:
        state = self._iterator.get_state()
        if isinstance(state, bytes):  # of a DataLoader
            return base64.b64encode(state).decode("ascii")
        return state

    def set_state(self, state: Any) -> None:
        self._iterator.set_state(
            base64.b64decode(state) if isinstance(state, str) else state
        )

    def close(self) -> None:
        # A DataLoader's iterator closes when it is let go.
        getattr(self._iterator, "close", lambda: None)()


def mark_flags_as_parsed() -> None:
    """Lets Grain's worker processes start outside of `absl.app.run`.

    Grain reads one of absl's command-line flags for them, which absl refuses before
    the flags are parsed.
    """
    flags: Any = sys.modules["absl.flags"]
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def _gives_batches(dataset: Any) -> bool:
    """Tells whether one of a data set's steps makes batches."""
    if "DataLoader" in {kind.__name__ for kind in type(dataset).__mro__}:
        operations = getattr(dataset, "_operations", ())
        return any("Batch" in type(step).__name__ for step in operations)
    for step in _chain(dataset):
        name = type(step).__name__
        if "Batch" in name:
            return True
        if "Flat" in name or "Split" in name or "Pack" in name:
            return False
    return False


def _leaves_holes(dataset: Any) -> bool:
    return any("Filter" in type(part).__name__ for part in _chain(dataset))


def _chain(dataset: Any) -> Iterator[Any]:
    """Yields a dataset and what it is made of."""
    yield dataset
    for parent in getattr(dataset, "parents", ()):
        yield from _chain(parent)
