"""Grain's datasets and loaders as sources.

Grain has no public API to find out whether a dataset batches, filters or shuffles. If
the elements do not show it, the class names of its steps are a hint. A step that a
later release renames leads to an error that asks for `batched=` or `to_iter_dataset()`,
never to wrong rows; `test_data_adapters` covers each of the hints.
"""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from meshlayout._annotations import PyTree
from meshlayout.data.adapters.arrays import Rows, item_rows
from meshlayout.data.adapters.iterables import IteratorSource, NumberedItems
from meshlayout.data.clock import Clock
from meshlayout.data.element_rows import looks_batched, stack
from meshlayout.data.elements import ambiguous
from meshlayout.data.protocols import Source
from meshlayout.errors import DataError


# A dataset that repeats forever reports a length near the largest integer.
_ENDLESS = 2**48


def adapt(
    obj: Any, class_names: set[str], clock: Clock, *, batched: bool | None
) -> Source | None:
    """Returns a MapDataset, IterDataset, DataLoader or data source as a source."""
    if batched is None and _has_batch_step(obj):
        batched = True
    if "MapDataset" in class_names:
        is_endless = len(obj) > _ENDLESS
        # Batches, and examples of which some are left out, have no row indices: the
        # dataset is read in order instead.
        if batched or is_endless or _has_step(obj, "Filter"):
            return IteratorSource(
                lambda epoch: NumberedItems(
                    obj,
                    len(obj),
                    first=0 if is_endless else epoch * len(obj),
                    skip_none=True,
                ),
                batched,
            )
        if batched is None and len(obj) and looks_batched(obj[0]):
            raise DataError(ambiguous("the Grain dataset"))
        return _map_dataset_rows(obj)
    if "IterDataset" in class_names or "DataLoader" in class_names:
        return _iter_dataset_source(obj, clock, batched=batched)
    if hasattr(obj, "__getitem__") and hasattr(obj, "__len__") and not batched:
        return item_rows(obj)
    return None


def _map_dataset_rows(dataset: Any) -> Rows:
    """Returns a MapDataset as a source with random access.

    A dataset that shuffles has a new order in every epoch, as in Grain, where indices
    beyond the length are those of later epochs.
    """
    length = len(dataset)

    def read(indices: np.ndarray, epoch: int) -> PyTree:
        numbers = (indices + epoch * length).tolist()
        examples = [dataset[number] for number in numbers]
        for number, example in zip(indices.tolist(), examples, strict=True):
            if example is None:
                msg = (
                    f"the Grain MapDataset has no element at row {number}: one of its "
                    "steps filters. Give its to_iter_dataset(), which leaves them out."
                )
                raise DataError(msg)
        return stack(examples)

    return Rows(length, read)


def _iter_dataset_source(
    dataset: Any, clock: Clock, *, batched: bool | None
) -> IteratorSource:
    """Returns an IterDataset or DataLoader as a source; neither has epochs."""
    has_one_order = _has_step(dataset, "Shuffle") and not _has_step(dataset, "Repeat")

    def begin(epoch: int) -> Iterator[PyTree]:
        if epoch and has_one_order:
            clock.warn(
                "Grain's IterDataset shuffles, and repeats one order in every epoch. "
                "Give the MapDataset, which has another one in each; or repeat() it "
                "before to_iter_dataset(), and say steps=."
            )
        # Grain reads one of absl's command-line flags when it starts worker processes,
        # and absl raises unless its flags were parsed, which `absl.app.run` does. This
        # is absl's public way to run without it. A Grain without the flag ignores it;
        # `test_grains_worker_processes_start_outside_of_absl` notices.
        flags: Any = sys.modules["absl.flags"]
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        return iter(dataset)

    return IteratorSource(begin, batched)


def _has_batch_step(dataset: object) -> bool:
    """Returns whether a step makes batches that no later step takes apart."""
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
