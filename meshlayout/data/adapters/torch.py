"""PyTorch's DataLoader, and datasets with random access, as sources.

A DataLoader is read as a stream: its workers, sampler and collate function are the
user's choice, and are left to do what they do in PyTorch.
"""

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from meshlayout._annotations import PyTree
from meshlayout.data.adapters.arrays import item_rows, refuse_batched
from meshlayout.data.adapters.iterables import IteratorSource
from meshlayout.data.clock import Clock
from meshlayout.data.protocols import Source
from meshlayout.errors import DataError


def adapt(
    obj: Any, class_names: set[str], clock: Clock, *, batched: bool | None
) -> Source | None:
    """Returns a DataLoader, or a Dataset with a length, as a source."""
    del clock
    if "DataLoader" in class_names:
        return _loader_source(obj, batched=batched)
    if "IterableDataset" in class_names:
        raise DataError(
            "a PyTorch IterableDataset does not say what it yields. Wrap it in a "
            "torch.utils.data.DataLoader."
        )
    if "Dataset" in class_names and hasattr(obj, "__len__"):
        refuse_batched("a PyTorch Dataset", batched=batched)
        return item_rows(obj)
    return None


@dataclass(frozen=True)
class LoaderSource(IteratorSource):
    """The source of a DataLoader, whose tensors become arrays that share their memory.

    Attributes:
        num_parts: The number of parts into which its sampler divides the rows, as a
            DistributedSampler does, one for each process.
    """

    num_parts: int = 1


def _loader_source(loader: Any, *, batched: bool | None) -> LoaderSource:
    """Returns a DataLoader as a source.

    Unless `batched` says otherwise, it yields batches if it has a batch size or a batch
    sampler.
    """
    if batched is None:
        batched = loader.batch_sampler is not None or None
    # With a batch sampler of the user's, the sampler of rows is inside of that.
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    return LoaderSource(
        lambda epoch: _read(loader, (sampler, loader.batch_sampler), epoch),
        batched,
        _num_rows(loader, sampler, batched=batched),
        getattr(sampler, "num_replicas", 1),
    )


@dataclass
class _LoaderPasses:
    """The passes over a loader, of which only the latest may be read."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    count: int = 0


# By loader, for loaders with persistent workers: starting a pass resets the workers,
# and the pass before it would yield the new one's elements.
_PASSES: weakref.WeakKeyDictionary[Any, _LoaderPasses] = weakref.WeakKeyDictionary()


def _read(loader: Any, samplers: tuple[Any, ...], epoch: int) -> Iterator[PyTree]:
    """Yields the elements of a pass; the loader's workers end when it is closed."""
    passes = _LoaderPasses()  # shared with no other pass, unless workers are
    if getattr(loader, "persistent_workers", False):
        passes = _PASSES.setdefault(loader, passes)
    with passes.lock:
        passes.count += 1
        number = passes.count
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        elements = iter(loader)
    while True:
        with passes.lock:
            if number != passes.count:
                msg = (
                    "the DataLoader keeps its workers, which serve one pass at a time, "
                    "and another pass has begun. Take one iterator after another, or "
                    "make the DataLoader with persistent_workers=False."
                )
                raise DataError(msg)
            try:
                element = next(elements)
            except StopIteration:
                return
        yield element


def _num_rows(loader: Any, sampler: Any, *, batched: bool | None) -> int | None:
    """Returns the number of examples in a pass, if the sampler of rows has a length."""
    batches = loader.batch_sampler
    if batches is None and batched:
        return None  # the sampler chooses batches
    # A batch sampler of another class may choose rows by itself.
    if type(batches).__name__ not in ("BatchSampler", "NoneType"):
        return None
    if not hasattr(sampler, "__len__"):  # of an IterableDataset
        return None
    dropped = len(sampler) % batches.batch_size if batches and batches.drop_last else 0
    return len(sampler) - dropped
