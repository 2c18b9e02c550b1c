"""Sources of examples: the two protocols that every adapter implements.

`distribute_dataset` takes arrays, iterables and the datasets of several frameworks. If
none of them fits (a database, your own file format, a service), write a class with
these methods. Any class with all the methods of a protocol is a source; there is
nothing to inherit or register.

Examples:
    >>> import numpy as np
    >>> import meshlayout as ml
    >>> class Squares:
    ...     def __len__(self):
    ...         return 8
    ...
    ...     def read_rows(self, indices, epoch):
    ...         return {"x": indices, "y": indices**2}
    >>> isinstance(Squares(), ml.data.RandomAccessSource)
    True
    >>> mesh = ml.create_mesh({"batch": 8})
    >>> (batch,) = ml.distribute_dataset(Squares(), mesh, global_batch_size=8)
    >>> batch["y"].tolist()
    [0, 1, 4, 9, 16, 25, 36, 49]
"""

from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from meshlayout._annotations import PyTree


JSON: TypeAlias = Any
"""What `json.dumps` accepts: numbers, strings, None, lists and dicts of them."""


@runtime_checkable
class RandomAccessSource(Protocol):
    """A source that can read any of its rows by index.

    Use this if rows can be looked up: `shuffle=` then shuffles batches, every process
    reads only the rows that its devices need, and iteration resumes anywhere.
    """

    def __len__(self) -> int:
        """Returns the number of rows, the same in every epoch and on every process."""
        ...

    def read_rows(self, indices: np.ndarray, epoch: int) -> PyTree:
        """Returns rows as a tree of NumPy arrays, whose first dim is `len(indices)`.

        `indices` is an int64 array of at least one row, in the requested order. Row `i`
        of an `epoch`, from 0, must be the same on every process and in every run; only
        sources that shuffle or augment by themselves differ by epoch. Several threads
        may call this at once, and returned arrays must not be modified later.
        """
        ...


@runtime_checkable
class Stream(Iterator[PyTree], Protocol):
    """One pass over a `StreamSource`; an iterator of its elements."""

    def get_state(self) -> JSON:
        """Returns the position after the last element, JSON-serializable.

        None means that the stream cannot seek: to resume, it is read from the start.
        """
        ...

    def set_state(self, state: JSON) -> None:
        """Moves to a position that `get_state` returned, here or in another run."""
        ...

    def close(self) -> None:
        """Releases the resources of the pass: files, threads, processes."""
        ...


@runtime_checkable
class StreamSource(Protocol):
    """A source that is read from start to end: a socket, a compressed file, a queue.

    Without `per_process=True`, every process reads the whole stream, in the same order,
    and keeps the rows that its devices need.
    """

    @property
    def batched(self) -> bool | None:
        """Whether elements are batches (True) or single examples (False).

        None infers it from the first element: an example if its arrays differ in their
        first dim, and an error otherwise.
        """
        ...

    @property
    def num_rows(self) -> int | None:
        """The number of examples in an epoch; None if that is not known."""
        ...

    def open(self, epoch: int) -> Stream:
        """Starts the pass of an epoch, from 0.

        Elements are copied as they are read, so a stream may reuse their memory.
        """
        ...


Source: TypeAlias = RandomAccessSource | StreamSource
