"""Batches of plain arrays, for `fit(x, y, batch_size=32)`."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from meshlayout import _checks
from meshlayout._annotations import Batch, PyTree
from meshlayout._batches import num_examples
from meshlayout.data.by_row import Order
from meshlayout.errors import MeshLayoutError


class ArrayBatches:
    """Batches of a tree of arrays on the host; each iteration is an epoch.

    Args:
        arrays: A dict, tuple or array, with one row per example.
        batch_size: Rows of a global batch; the last one of an epoch may have fewer.
        shuffle: Whether each epoch has a new order.

    Example:
        >>> batches = ArrayBatches(np.arange(5), 2, shuffle=False)
        >>> [batch.tolist() for batch in batches]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(self, arrays: PyTree, batch_size: int, *, shuffle: bool) -> None:
        self.arrays, self.batch_size = arrays, batch_size
        self.seed = 0 if shuffle else None
        self.num_rows = num_examples(arrays)
        self.num_epochs = 0  # so far; numbers the next one, which its order depends on

    def __len__(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def __iter__(self) -> "ArrayBatchIterator":
        self.num_epochs += 1
        return ArrayBatchIterator(self, self.num_epochs - 1)


class ArrayBatchIterator(Iterator[Batch]):
    """One epoch of `ArrayBatches`, whose position can be saved."""

    def __init__(self, batches: ArrayBatches, epoch: int) -> None:
        self._batches, self._epoch, self._row = batches, epoch, 0
        self._order: Order | None = None

    def __next__(self) -> Batch:
        data, start = self._batches, self._row
        if start >= data.num_rows:
            raise StopIteration
        # Only now: `set_state` may still change the epoch, which the order depends on.
        if self._order is None:
            self._order = Order(data.num_rows, data.seed, self._epoch)
        self._row = min(start + data.batch_size, data.num_rows)
        rows = self._order.at(np.arange(start, self._row))
        return jax.tree.map(lambda leaf: leaf[rows], data.arrays)

    def get_state(self) -> dict[str, int]:
        """Returns the position as JSON values."""
        return {"epoch": self._epoch, "row": self._row}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Moves to a position from `get_state`; later epochs are numbered after it."""
        self._epoch, self._row, self._order = state["epoch"], state["row"], None
        self._batches.num_epochs = self._epoch + 1


def batches_from(
    where: str,
    name: str,
    data: Any,
    labels: Any = None,
    batch_size: int | None = None,
    *,
    shuffle: bool = False,
) -> Any:
    """Cuts arrays into batches; returns other data unchanged.

    Args:
        where: The method that was called, for error messages.
        name: Its parameter that holds the data.
        data: Arrays or batches.
        labels: More arrays of the same examples, or None.
        batch_size: Rows of a batch of arrays.
        shuffle: Whether to shuffle arrays.

    Raises:
        MeshLayoutError: If arrays come without a batch size, or batches with one.
    """
    arrays = data if labels is None else (data, labels)
    if batch_size is not None:
        batch_size = _checks.count("batch_size", batch_size, where=where)
    if are_arrays(arrays):
        if batch_size is not None:
            arrays = jax.tree.map(np.asarray, arrays)
            return ArrayBatches(arrays, batch_size, shuffle=shuffle)
        arguments = name if labels is None else f"{name}, labels"
        msg = (
            f"{where}: {name} is {_checks.shown(data)}, of arrays with "
            f"{num_examples(arrays):,} rows. Give the size of a batch, "
            f"{where}({arguments}, batch_size=32), or an iterable of batches, which "
            "may be a list of one batch."
        )
        raise MeshLayoutError(msg)
    if labels is not None:
        msg = (
            f"{where}: {name} and the labels after it must be arrays with one row "
            f"per example, got {_checks.shown(data)} and {_checks.shown(labels)}. "
            f"Data that is already in batches is a single argument: {where}(batches)."
        )
        raise MeshLayoutError(msg)
    if batch_size is not None:
        msg = (
            f"{where}: batch_size cuts arrays into batches, but {name} is "
            f"{_checks.shown(data)}. Turn lists into arrays, np.asarray(rows), or "
            "omit batch_size if the data is already in batches."
        )
        raise MeshLayoutError(msg)
    return data


def are_arrays(data: Any) -> bool:
    """Returns whether data is arrays with one row per example, not batches.

    Example:
        >>> x = np.ones((4, 2))
        >>> are_arrays(x), are_arrays({"x": x}), are_arrays((x, x)), are_arrays([x, x])
        (True, True, True, False)
    """
    if isinstance(data, (np.ndarray, jax.Array)):
        return data.ndim > 0
    if not isinstance(data, (Mapping, tuple)):
        return False
    leaves = jax.tree.leaves(dict(data)) if isinstance(data, Mapping) else list(data)
    is_array = (isinstance(x, (np.ndarray, jax.Array)) and np.ndim(x) for x in leaves)
    return bool(leaves) and all(is_array)
