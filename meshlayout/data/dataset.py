"""`distribute_dataset`: from a source to global batches on a mesh."""

import functools
import threading
import time
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import (
    Any,
    Generic,
    NoReturn,
    Required,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import jax
import numpy as np

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout.data.agreement import FACTS, agreement_of, failure_reported
from meshlayout.data.batch_iterator import BatchIterator, Prefetch
from meshlayout.data.clock import Clock, PipelineReport
from meshlayout.data.placement import LayoutOrMesh, batch_layout
from meshlayout.data.plan import DataOptions, DataPlan, as_source
from meshlayout.data.position import Position, from_state, to_state
from meshlayout.data.protocols import JSON
from meshlayout.errors import DataError


BatchT = TypeVar("BatchT")


class DatasetArguments(TypedDict, total=False):
    """The named arguments of `distribute_dataset`, for type checkers."""

    global_batch_size: Required[int]
    remainder: str
    weights: str | int | None
    shuffle: int | None
    epochs: int | None
    steps: int | None
    prefetch: int
    per_process: bool
    strings: str
    batched: bool | None


@overload
def distribute_dataset(
    source: Mapping[str, np.ndarray | jax.Array],
    layout_or_mesh: LayoutOrMesh,
    **arguments: Unpack[DatasetArguments],
) -> "DistributedDataset[dict[str, jax.Array]]": ...
@overload
def distribute_dataset(
    source: tuple[np.ndarray | jax.Array, ...],
    layout_or_mesh: LayoutOrMesh,
    **arguments: Unpack[DatasetArguments],
) -> "DistributedDataset[tuple[jax.Array, ...]]": ...
@overload
def distribute_dataset(
    source: np.ndarray | jax.Array,
    layout_or_mesh: LayoutOrMesh,
    **arguments: Unpack[DatasetArguments],
) -> "DistributedDataset[jax.Array]": ...
@overload
def distribute_dataset(
    source: object,
    layout_or_mesh: LayoutOrMesh,
    **arguments: Unpack[DatasetArguments],
) -> "DistributedDataset[Any]": ...
def distribute_dataset(
    source: object,
    layout_or_mesh: LayoutOrMesh,
    *,
    global_batch_size: int,
    remainder: str = "pad",
    weights: str | int | None = "weight",
    shuffle: int | None = None,
    epochs: int | None = 1,
    steps: int | None = None,
    prefetch: int = 2,
    per_process: bool = False,
    strings: str = "error",
    batched: bool | None = None,
) -> "DistributedDataset[Any]":
    """Makes global batches on a mesh from a source of examples.

    Every example is in one batch of an epoch, and each process loads the rows of which
    its devices hold a part. Batches have one shape and one structure; those that the
    source cannot fill are padded with its last row, and marked by weights of 0.

    On several processes, all of them must pass the same source (or
    `per_process=True`): rows are compared now and then, and a source that differs is
    refused on all of them.

    Args:
        source: A tree of arrays, a list of examples, an iterable, an iterator or a
            generator function of examples or batches; a dataset of Grain, TFDS,
            tf.data, PyTorch or Hugging Face; or your own `RandomAccessSource` or
            `StreamSource`.
        layout_or_mesh: How batches are laid out: a `Layout`, whose missing dims are
            unsharded, or a mesh, whose axes called batch, data or fsdp shard the first
            dim.
        global_batch_size: Rows of a batch, on all processes together.
        remainder: What becomes of rows that do not fill a batch: `"pad"`; `"drop"`;
            `"repeat"`, in which epochs run into each other; or `"error"`.
        weights: Where batches carry one weight per example, float32: a dict's key, or
            a tuple's place, its length to append them. Padding needs such a place;
            weights that the source has are kept, and are 0 for padding. None for
            nowhere.
        shuffle: A seed, which together with the epoch determines the order of the rows
            of a source with random access. None leaves them as they are.
        epochs: Passes over the source in one iteration; None for as many as the loop
            takes batches of, also from a source without an end.
        steps: Batches in one iteration; None for all. The next iteration begins where
            the last one ended, so that all rows are seen in time.
        prefetch: How many batches a background thread prepares ahead; 0 starts no
            thread.
        per_process: Whether the source on each process yields this process's rows only,
            in the order of `process_rows`. Processes take as many steps as the one
            with the most rows, or with `remainder="drop"` the fewest. Where a stream
            has no rows left for a step, its first one is the padding.
        strings: `"error"`, or `"host"` to leave leaves of strings as NumPy arrays of
            this process's rows.
        batched: Whether the elements of an iterable are batches (True) or examples
            (False); None leaves it to the first element, where that can tell.

    Returns:
        The batches, to be iterated over once or more often.

    Raises:
        DataError: If an argument is wrong, the source is empty or does not fit, or
            processes have different sources.

    Example:
        >>> import numpy as np
        >>> from meshlayout import create_mesh
        >>> mesh = create_mesh({"batch": 8})
        >>> source = {"x": np.ones((20, 3), np.uint8), "y": np.arange(20)}
        >>> data = distribute_dataset(source, mesh, global_batch_size=16)
        >>> len(data), data.element_spec["x"].shape
        (2, (16, 3))
        >>> [int(batch["weight"].sum()) for batch in data]
        [16, 4]
    """
    clock = Clock()
    layout = batch_layout(layout_or_mesh, clock.note)
    agreement = agreement_of(layout.mesh)
    with failure_reported(agreement, FACTS):
        options = DataOptions(
            global_batch_size=global_batch_size,
            remainder=remainder,
            weights=weights,
            shuffle=shuffle,
            epochs=epochs,
            steps=steps,
            prefetch=prefetch,
            per_process=per_process,
            strings=strings,
        )
        if hasattr(source, "__next__") and (options.epochs or 1) > 1:
            msg = (
                f"the source is an iterator, which can be read once, and epochs="
                f"{options.epochs}. Give a function that makes one, as lambda: "
                "make_iterator()."
            )
            raise DataError(msg)
    open_source = functools.partial(as_source, source, clock, batched=batched)
    return DistributedDataset(DataPlan(open_source, layout, options, clock, agreement))


class DistributedDataset(Generic[BatchT]):
    """Global batches on a mesh; made by `distribute_dataset`.

    Each iteration yields the next `epochs` epochs of the source, or the next `steps`
    batches. Several iterations at once do not disturb each other; each takes the
    epochs after those of the iteration that was begun before it.
    """

    def __init__(self, plan: DataPlan) -> None:
        self._plan = plan
        self._next = Position(0)
        self._latest = 0
        weakref.finalize(self, plan.close).atexit = False

    @property
    def element_spec(self) -> PyTree:
        """The shape, dtype and sharding of every leaf of a batch."""
        return self._plan.element_spec

    @property
    def global_batch_size(self) -> int:
        """Rows of a global batch, padding included."""
        return self._plan.options.global_batch_size

    @property
    def weights(self) -> str | int | None:
        """Where batches carry weights; None if they carry none."""
        return self._plan.options.weights if self._plan.has_weights else None

    def __len__(self) -> int:
        steps = self._plan.num_steps
        if steps is None:
            msg = (
                "this dataset does not know how many batches it has. Give steps= to "
                "have the same number in every iteration."
            )
            raise TypeError(msg)
        return steps

    def __reduce__(self) -> NoReturn:
        msg = (
            "a dataset holds its source, threads and devices, and cannot be copied or "
            "pickled. Make another one with distribute_dataset; a place in it is saved "
            "by get_state() of its iterator."
        )
        raise DataError(msg)

    def __iter__(self) -> "DataIterator[BatchT]":
        return self.iterator()

    def iterator(self) -> "DataIterator[BatchT]":
        """Returns the next iteration; it can be used in a `with` block."""
        start = self._next._replace(
            first_epoch=self._next.epoch, first_row=self._next.row, given=0
        )
        self._latest += 1
        self._next = self._after(start)
        return DataIterator(self, start, self._latest)

    def restarted(self) -> "RestartedDataset[BatchT]":
        """Returns the same batches, from the start in every iteration.

        Use this to measure: with `steps=`, each validation then takes the same rows.
        """
        return RestartedDataset(self)

    def report(self) -> PipelineReport:
        """Returns the work of each stage so far, on this process."""
        return self._plan.clock.report()

    def _begin(self, position: Position) -> Prefetch:
        """Returns the batches of an iteration from a position on."""
        plan = self._plan
        exchange = None if plan.agreement is None else plan.agreement.new_iteration()
        batches = BatchIterator(plan, position, exchange)
        return Prefetch(batches, plan.options.prefetch)

    def _moved(self, number: int, position: Position) -> None:
        """Records the position of an iteration, if it is the latest one."""
        if number == self._latest:
            self._next = self._after(position)

    def _after(self, position: Position) -> Position:
        """Returns the position at which the next iteration begins."""
        options = self._plan.options
        if options.goes_on or options.epochs is None:
            return position
        return Position(position.first_epoch + options.epochs)


class RestartedDataset(Generic[BatchT]):
    """The batches of a dataset, from the start in every iteration."""

    def __init__(self, dataset: DistributedDataset[BatchT]) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> "DataIterator[BatchT]":
        # A number that is never the latest: this iteration does not move the next.
        return DataIterator(self._dataset, Position(0), -1)


class DataIterator(Generic[BatchT]):
    """The batches of one iteration over a `DistributedDataset`.

    Several threads may take batches from it; each batch is given once. Reading starts
    with the first batch. `close` stops what runs in the background, as does the end of
    a `with` block, or leaving the loop. The dataset is kept: it may have no other name.
    """

    def __init__(
        self, dataset: DistributedDataset[BatchT], position: Position, number: int
    ) -> None:
        self._dataset, self._position, self._number = dataset, position, number
        self._batches: Prefetch | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> BatchT:
        with self._lock:
            self._check_open()
            start = time.perf_counter()
            if self._batches is None:
                self._batches = self._dataset._begin(self._position)
                # A loop that is left without closing leaves no thread behind.
                self._stop_later = weakref.finalize(self, self._batches.stop)
                self._stop_later.atexit = False
            batch, self._position = next(self._batches)
            self._dataset._plan.clock.waited(time.perf_counter() - start)
            self._dataset._moved(self._number, self._position)
            return batch

    def __reduce__(self) -> NoReturn:
        msg = (
            "a data iterator holds threads and devices, and cannot be copied or "
            "pickled. Save its get_state(), and set it on another one with "
            "set_state()."
        )
        raise DataError(msg)

    def get_state(self) -> dict[str, JSON]:
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
            return to_state(self._dataset._plan.identity, self._position)

    def set_state(self, state: JSON, *, skip: bool = False) -> None:
        """Goes to a place, so that the batch after it comes next.

        Args:
            state: What `get_state` returned, here or in another run, on as many or
                other processes.
            skip: Whether a source that cannot go to a place may be read from the
                epoch's start, and what comes before the place be dropped.

        Raises:
            DataError: If the state is of another dataset, or the source cannot go
                there.
        """
        skip = _checks.flag("skip", skip, error=DataError)
        with self._lock:
            self._check_open()
            plan = self._dataset._plan
            position = from_state(plan.identity, state)
            is_start = position.row == 0 and position.batch == 0
            if plan.is_stream and position.source is None and not (is_start or skip):
                msg = (
                    f"this source cannot go to row {position.row} of epoch "
                    f"{position.epoch + 1}: it does not know its place. "
                    "iterator.set_state(state, skip=True) reads the rows before it, "
                    "and drops them."
                )
                raise DataError(msg)
            self._stop()
            self._position = position
            self._dataset._moved(self._number, position)

    def close(self) -> None:
        """Stops reading, and drops batches that were made ready."""
        # A thread that waits for a batch holds the lock; stopping wakes it.
        batches = self._batches
        if batches is not None:
            batches.stop()
        with self._lock:
            self._is_closed = True
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            msg = "this data iterator is closed; iter(data) begins another one."
            raise DataError(msg)

    def _stop(self) -> None:
        if self._batches is not None:
            self._stop_later.detach()
            self._batches.close()
            self._batches = None
