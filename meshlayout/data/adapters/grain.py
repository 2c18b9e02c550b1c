"""Grain's datasets and loaders as sources.

Grain has no public API for whether a dataset batches, filters or shuffles. Where the
elements do not show it, the class names of its steps are a hint; a step that another
release renames leads to an error that asks for `batched=` or `to_iter_dataset()`, never
to wrong rows. `test_data_adapters` covers each of the hints.
"""

import base64
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from meshlayout._annotations import PyTree
from meshlayout.data.adapters.iterables import IteratorStream
from meshlayout.data.by_stream import ambiguous
from meshlayout.data.clock import Clock
from meshlayout.data.examples import looks_batched, stack
from meshlayout.data.protocols import JSON, Source
from meshlayout.errors import DataError


# A dataset that repeats forever has a length near the largest integer.
_ENDLESS = 2**48


def adapt(obj: Any, clock: Clock, *, batched: bool | None) -> Source | None:
    """Returns a Grain object as a source, or None if it is of another kind.

    Args:
        obj: A MapDataset, IterDataset, DataLoader or random-access data source.
        clock: Where notes go.
        batched: Whether its elements are batches; None infers it from them.

    Raises:
        DataError: If its elements may be batches or examples.
    """
    kinds = {kind.__name__ for kind in type(obj).__mro__}
    if batched is None and _has_batch_step(obj):
        batched = True
    if "MapDataset" in kinds:
        if batched or _has_step(obj, "Filter") or len(obj) > _ENDLESS:
            return MapDatasetStream(obj, batched=batched)
        if batched is None and len(obj) and looks_batched(obj[0]):
            raise DataError(ambiguous("the Grain dataset"))
        return MapDatasetRows(obj)
    if "IterDataset" in kinds or "DataLoader" in kinds:
        return IterDatasetStream(obj, clock.warn, batched=batched)
    if hasattr(obj, "__getitem__") and hasattr(obj, "__len__") and not batched:
        return MapDatasetRows(obj)
    return None


class MapDatasetRows:
    """A Grain MapDataset, or another random-access source, as a source of rows.

    A MapDataset that shuffles has a new order in every epoch, as with Grain itself:
    its rows beyond its length are those of later epochs.

    Args:
        dataset: The dataset.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        kinds = {kind.__name__ for kind in type(dataset).__mro__}
        self._epoch_rows = len(dataset) if "MapDataset" in kinds else 0

    def __len__(self) -> int:
        return len(self._dataset)

    def read_rows(self, indices: np.ndarray, epoch: int) -> PyTree:
        """Returns rows, in the order asked for.

        Raises:
            DataError: If the dataset has no element there.
        """
        numbers = (indices + epoch * self._epoch_rows).tolist()
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
    """A Grain MapDataset that filters, is endless or yields batches, read in order.

    Args:
        dataset: The dataset.
        batched: Whether its elements are batches; None infers it from them.
    """

    num_rows = None

    def __init__(self, dataset: Any, *, batched: bool | None) -> None:
        self._dataset, self.batched = dataset, batched

    def open(self, epoch: int) -> IteratorStream:
        """Begins a pass: that epoch of a dataset that shuffles."""
        return IteratorStream(_Numbered(self._dataset, epoch))


class _Numbered(Iterator[PyTree]):
    """The elements of one epoch of a MapDataset; the state is the next one's number."""

    def __init__(self, dataset: Any, epoch: int) -> None:
        self._dataset, self._next = dataset, 0
        self._length = len(dataset)
        self._offset = epoch * self._length if self._length < _ENDLESS else 0

    def __next__(self) -> PyTree:
        while self._next < self._length:
            element = self._dataset[self._offset + self._next]
            self._next += 1
            if element is not None:
                return element
        raise StopIteration

    def get_state(self) -> JSON:
        return self._next

    def set_state(self, state: JSON) -> None:
        self._next = int(state)


class IterDatasetStream:
    """A Grain IterDataset or DataLoader as a stream.

    Args:
        dataset: The dataset or loader.
        warn: Called with a sentence if every epoch has one shuffled order.
        batched: Whether its elements are batches; None infers it from them.
    """

    num_rows = None

    def __init__(
        self, dataset: Any, warn: Callable[[str], None], *, batched: bool | None
    ) -> None:
        self._dataset, self._warn, self.batched = dataset, warn, batched
        self._is_shuffled_once = _has_step(dataset, "Shuffle") and not _has_step(
            dataset, "Repeat"
        )

    def open(self, epoch: int) -> IteratorStream:
        """Begins a pass over the dataset, which ignores the epoch."""
        if epoch and self._is_shuffled_once:
            self._warn(
                "Grain's IterDataset shuffles, and repeats one order in every epoch. "
                "Give the MapDataset, which has another one in each; or repeat() it "
                "before to_iter_dataset(), and say steps=."
            )
        mark_flags_as_parsed()
        return IteratorStream(_Encoded(iter(self._dataset)))


class _Encoded(Iterator[PyTree]):
    """A Grain iterator, with Grain's own state as text or JSON."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __next__(self) -> PyTree:
        return next(self._iterator)

    def get_state(self) -> JSON:
        state = self._iterator.get_state()
        if isinstance(state, bytes):  # of a DataLoader
            return base64.b64encode(state).decode("ascii")
        return state

    def set_state(self, state: JSON) -> None:
        self._iterator.set_state(
            base64.b64decode(state) if isinstance(state, str) else state
        )

    def close(self) -> None:
        # A DataLoader's iterator closes when it is garbage collected.
        if hasattr(self._iterator, "close"):
            self._iterator.close()


def mark_flags_as_parsed() -> None:
    """Lets Grain's worker processes start outside of `absl.app.run`.

    Grain reads one of absl's command-line flags for them, and absl raises until its
    flags are parsed.
    """
    flags: Any = sys.modules["absl.flags"]
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def _has_batch_step(dataset: object) -> bool:
    """Returns whether a step makes batches that no later one unbatches."""
    for step in _steps(dataset):
        name = type(step).__name__
        if "Batch" in name:
            return True
        if "Flat" in name or "Split" in name or "Pack" in name:
            return False
    return False


def _has_step(dataset: object, word: str) -> bool:
    return any(word in type(step).__name__ for step in _steps(dataset))


def _steps(dataset: object) -> Iterator[object]:
    """Yields a dataset and its parents."""
    yield dataset
    for parent in getattr(dataset, "parents", ()):
        yield from _steps(parent)
