"""PyTorch's DataLoader, and datasets with random access, as sources.

A DataLoader is read as a stream: its workers, sampler and collate function are the
user's choice, and are left to do what they do in PyTorch.
"""

from collections.abc import Iterator
from typing import Any

from meshlayout._annotations import PyTree
from meshlayout.data.adapters.arrays import item_rows
from meshlayout.data.adapters.iterables import IteratorSource
from meshlayout.data.protocols import Source


def adapt(obj: Any, class_names: set[str], *, batched: bool | None) -> Source | None:
    """Returns a DataLoader, an IterableDataset or a Dataset of a length as a source."""
    if "IterableDataset" in class_names:
        return IteratorSource(lambda epoch: iter(obj), batched)
    if "DataLoader" not in class_names:
        is_rows = "Dataset" in class_names and hasattr(obj, "__len__")
        return item_rows(obj) if is_rows else None
    batches = obj.batch_sampler
    if batched is None and batches is not None:
        batched = True
    # With a batch sampler of the user's, the sampler of rows is inside of that.
    sampler: Any = getattr(batches, "sampler", obj.sampler)

    def begin(epoch: int) -> Iterator[PyTree]:
        for each in (sampler, batches):
            getattr(each, "set_epoch", lambda _: None)(epoch)
        return iter(obj)

    num_rows = None
    # A batch sampler of another class may choose rows by itself, and a sampler without
    # one may choose batches.
    chooses_rows = type(batches).__name__ == "BatchSampler" or not (batches or batched)
    if chooses_rows and hasattr(sampler, "__len__"):
        num_rows = len(sampler)
        if batches is not None and batches.drop_last:
            num_rows -= num_rows % batches.batch_size
    return IteratorSource(begin, batched, num_rows)
