"""PyTorch's DataLoader, and datasets with random access, as sources."""

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from meshlayout._annotations import PyTree
from meshlayout.data.adapters.arrays import refuse_batched
from meshlayout.data.adapters.iterables import IteratorStream
from meshlayout.data.clock import Clock
from meshlayout.data.examples import stack
from meshlayout.data.protocols import Source
from meshlayout.errors import DataError


def adapt(obj: Any, clock: Clock, *, batched: bool | None) -> Source | None:
    """Returns a PyTorch object as a source, or None if it is of another kind.

    Args:
        obj: A DataLoader, or a Dataset with a length.
        clock: Where notes go.
        batched: Whether it yields batches; None infers it from the loader's options.

    Raises:
        DataError: If it is an IterableDataset without a loader, or a Dataset with
            `batched=True`.
    """
    kinds = {kind.__name__ for kind in type(obj).__mro__}
    if "DataLoader" in kinds:
        return LoaderStream(obj, clock, batched=batched)
    if "IterableDataset" in kinds:
        raise DataError(
            "a PyTorch IterableDataset does not say what it gives. Put it into a "
            "torch.utils.data.DataLoader."
        )
    if "Dataset" in kinds and hasattr(obj, "__len__"):
        refuse_batched("a PyTorch Dataset", batched=batched)
        return TorchRows(obj)
    return None


class TorchRows:
    """A PyTorch Dataset with a length as a source of rows.

    Args:
        dataset: The dataset.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def read_rows(self, indices: np.ndarray, epoch: int) -> PyTree:
        """Returns rows, in the order asked for."""
        del epoch
        numbers = indices.tolist()
        if hasattr(self._dataset, "__getitems__"):
            return stack(self._dataset.__getitems__(numbers))
        return stack([self._dataset[number] for number in numbers])


class LoaderStream:
    """A PyTorch DataLoader as a stream; its tensors become arrays of the same memory.

    Attributes:
        batched: Whether it yields batches.
        num_rows: How many examples a pass yields, if the loader's sampler has a length.

    Args:
        loader: The loader.
        clock: Where notes go.
        batched: Whether it yields batches; None means that it does if it has a batch
            size or a batch sampler.
    """

    def __init__(self, loader: Any, clock: Clock, *, batched: bool | None) -> None:
        makes_batches = loader.batch_sampler is not None
        self._loader = loader
        self.batched = (makes_batches or None) if batched is None else batched
        self.num_rows = _num_rows(loader, batched=self.batched)
        parts = getattr(loader.sampler, "num_replicas", 1)
        if parts > 1:
            clock.warn(
                f"The DataLoader's sampler gives each of {parts} processes a part of "
                "its own: say per_process=True."
            )

    def open(self, epoch: int) -> IteratorStream:
        """Begins a pass, and sets the epoch of a sampler that shuffles by epoch."""
        for sampler in (self._loader.sampler, self._loader.batch_sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        return IteratorStream(_LoaderPass(self._loader))


class _Workers:
    """The reader of a loader: one with persistent workers serves one pass at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_passes = 0


# By loader, for loaders with persistent workers.
_KEPT: weakref.WeakKeyDictionary[Any, _Workers] = weakref.WeakKeyDictionary()


class _LoaderPass(Iterator[PyTree]):
    """The elements of one pass over a DataLoader, which does not know its place."""

    def __init__(self, loader: Any) -> None:
        self._workers = _Workers()
        if getattr(loader, "persistent_workers", False):
            self._workers = _KEPT.setdefault(loader, self._workers)
        with self._workers.lock:
            self._workers.num_passes += 1
            self._number = self._workers.num_passes
            self._iterator: Any = iter(loader)

    def __next__(self) -> PyTree:
        if self._iterator is None:
            raise StopIteration
        with self._workers.lock:
            if self._number != self._workers.num_passes:
                msg = (
                    "the DataLoader keeps its workers, which serve one pass at a time, "
                    "and another pass has begun. Take one iterator after another, or "
                    "make the DataLoader with persistent_workers=False."
                )
                raise DataError(msg)
            return next(self._iterator)

    def close(self) -> None:
        # The loader's worker processes end with its iterator.
        self._iterator = None


def _num_rows(loader: Any, *, batched: bool | None) -> int | None:
    """Returns how many examples a pass yields, if the loader's sampler has a length."""
    if loader.batch_sampler is None and batched:
        return None  # the sampler chooses batches
    if type(loader.batch_sampler).__name__ not in ("BatchSampler", "NoneType"):
        return None
    if not hasattr(loader.sampler, "__len__"):  # of an IterableDataset
        return None
    rows = len(loader.sampler)
    if loader.drop_last and loader.batch_size:
        return rows - rows % loader.batch_size
    return rows
