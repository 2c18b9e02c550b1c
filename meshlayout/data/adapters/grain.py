"""Grain's datasets and loaders as sources.

Grain has no public API to find out whether a dataset batches or filters: the class
names of its steps are a hint. A step that a later release renames leads to an error
that asks for `batched=` or `to_iter_dataset()`, never to wrong rows;
`test_data_adapters` covers each of the hints.
"""

import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from meshlayout._annotations import PyTree
from meshlayout.data.adapters.arrays import Rows
from meshlayout.data.adapters.iterables import IteratorSource, NumberedItems
from meshlayout.data.examples import ambiguous, looks_batched, stack
from meshlayout.data.protocols import Source
from meshlayout.errors import DataError


# A dataset that repeats forever reports a length near the largest integer.
_ENDLESS = 2**48


def adapt(obj: Any, class_names: set[str], *, batched: bool | None) -> Source | None:
    """Returns a MapDataset, an IterDataset or a DataLoader as a source."""
    steps = " ".join(type(step).__name__ for step in _steps(obj))
    changes = re.findall("[Bb]atch|Flat|Split|Pack", steps)
    # The last step comes first.
    if batched is None and changes and changes[0] != "Flat":
        batched = changes[0] not in ("Split", "Pack")
    if "MapDataset" in class_names:
        return _map_dataset(obj, steps, batched=batched)
    if "IterDataset" in class_names or "DataLoader" in class_names:
        # Grain's worker processes read a flag of absl's, which raises unless flags were
        # parsed, by `absl.app.run` or like this. A test of worker processes notices.
        flags: Any = sys.modules["absl.flags"]
        flags.FLAGS.mark_as_parsed()
        return IteratorSource(lambda epoch: iter(obj), batched)  # it has no epochs
    return None


def _map_dataset(dataset: Any, steps: str, *, batched: bool | None) -> Source:
    """Returns a MapDataset as a source; by row if it holds one example per index.

    Indices beyond the length are those of later epochs: a dataset that shuffles has a
    new order in each of them.
    """
    length = len(dataset)
    is_endless = length > _ENDLESS
    if batched or is_endless or "Filter" in steps:

        def begin(epoch: int) -> NumberedItems:
            first = 0 if is_endless else epoch * length
            return NumberedItems(dataset, length, first=first, skip_none=True)

        return IteratorSource(begin, batched)
    if batched is None and length and looks_batched(dataset[0]):
        raise DataError(ambiguous("the Grain dataset"))

    def read(indices: np.ndarray, epoch: int) -> PyTree:
        return stack([dataset[row] for row in (indices + epoch * length).tolist()])

    return Rows(length, read)


def _steps(dataset: object) -> Iterator[object]:
    """Yields a dataset and its parents."""
    yield dataset
    for parent in getattr(dataset, "parents", ()):
        yield from _steps(parent)
