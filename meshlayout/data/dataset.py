"""`distribute_dataset`: from a source to global batches on a mesh."""

import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import (
    Any,
    Generic,
    NoReturn,
    Required,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import jax
import numpy as np

from meshlayout import _checks
from meshlayout._annotations import Batch, PyTree
from meshlayout.cluster.process_sync import report_failure_to
from meshlayout.data.agreement import FACTS, agreement_of
from meshlayout.data.batch_iterator import (
    BatchIterator,
    DataIterator,
    DataOptions,
    Hooks,
)
from meshlayout.data.by_stream import Reader
from meshlayout.data.clock import Clock, PipelineReport
from meshlayout.data.plan import DataPlan, as_source, make_plan
from meshlayout.data.position import Position
from meshlayout.data.prefetch import Prefetch
from meshlayout.data.rows import (
    LayoutOrMesh,
    batch_layout,
    note_whole_batches,
    processes_of,
)
from meshlayout.errors import DataError


BatchT = TypeVar("BatchT")

REMAINDERS = ("pad", "drop", "repeat", "error")


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
    layout = batch_layout(layout_or_mesh)
    agreement = agreement_of(processes_of(layout.mesh))
    with report_failure_to(agreement and agreement.channel, FACTS):
        options = check_options(
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
        _check_epochs(source, options)
    clock = Clock()
    note_whole_batches(layout_or_mesh, clock.note)
    open_source = functools.partial(as_source, source, clock, batched=batched)
    return DistributedDataset(make_plan(open_source, layout, options, clock, agreement))


def check_options(
    *,
    global_batch_size: object,
    remainder: object,
    weights: object,
    shuffle: object,
    epochs: object,
    steps: object,
    prefetch: object,
    per_process: object,
    strings: object,
) -> DataOptions:
    """Returns the arguments of a dataset, or raises DataError for a wrong one."""
    count = functools.partial(_checks.count, error=DataError)
    if shuffle is not None:
        hint = "shuffle=0 is a shuffle that is the same in every run."
        shuffle = count("shuffle", shuffle, at_least=0, hint=hint)
    is_key = isinstance(weights, (str, int)) and not isinstance(weights, bool)
    if weights is not None and not is_key:
        msg = (
            "weights must be a batch's key, a place in a tuple, or None, got "
            f"{_checks.shown(weights)}."
        )
        raise DataError(msg)
    options = DataOptions(
        count("global_batch_size", global_batch_size),
        _checks.choice("remainder", remainder, REMAINDERS, error=DataError),
        weights,  # type: ignore[arg-type]
        shuffle,
        None if epochs is None else count("epochs", epochs),
        None if steps is None else count("steps", steps),
        count("prefetch", prefetch, at_least=0),
        _checks.flag("per_process", per_process, error=DataError),
        _checks.choice("strings", strings, ("error", "host"), error=DataError),
    )
    if options.per_process and options.remainder == "repeat" and steps is None:
        msg = (
            "remainder='repeat' with per_process=True needs steps=: the processes may "
            "have different numbers of rows, and have to take as many steps."
        )
        raise DataError(msg)
    return options


def _check_epochs(source: object, options: DataOptions) -> None:
    """Raises DataError for several epochs of what can be read once."""
    if hasattr(source, "__next__") and (options.epochs or 1) > 1:
        msg = (
            f"the source is an iterator, which can be read once, and epochs="
            f"{options.epochs}. Give a function that makes one, as lambda: "
            "make_iterator()."
        )
        raise DataError(msg)


class DistributedDataset(Generic[BatchT]):
    """Global batches on a mesh; made by `distribute_dataset`.

    Each iteration yields the next `epochs` epochs of the source, or the next `steps`
    batches. Several iterations at once do not disturb each other; each takes the
    epochs after those of the iteration that was begun before it.

    Args:
        plan: How batches are made.
    """

    def __init__(self, plan: DataPlan) -> None:
        self._plan = plan
        self._next = Position(0)
        self._latest = 0
        self._parking = _Parking()
        weakref.finalize(self, _close, plan, self._parking).atexit = False

    @property
    def element_spec(self) -> PyTree:
        """The shape, dtype and sharding of every leaf of a batch."""
        return self._plan.element_spec

    @property
    def global_batch_size(self) -> int:
        """Rows of a global batch, padding included."""
        return self._plan.pipeline.options.global_batch_size

    @property
    def weights(self) -> str | int | None:
        """Where batches carry weights; None if they carry none."""
        place = self._plan.pipeline.weights
        has_none = place is None or place.index is None
        return None if has_none else self._plan.pipeline.options.weights

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

    def __iter__(self) -> DataIterator[BatchT]:
        return self.iterator()

    def iterator(self) -> DataIterator[BatchT]:
        """Returns the next iteration; it can be used in a `with` block."""
        start = self._next._replace(
            first_epoch=self._next.epoch, first_row=self._next.row, given=0
        )
        self._latest += 1
        moved = functools.partial(self._moved, self._latest)
        self._next = self._after(start)
        return self._new_iterator(start, moved)

    def _new_iterator(
        self, start: Position, moved: Callable[[Position], None]
    ) -> DataIterator[BatchT]:
        plan = self._plan

        # The iterator keeps the dataset, which may have no other name, alive.
        def begin(position: Position) -> Prefetch[tuple[Batch, Position]]:
            return _begin(plan, self._parking, position)

        return DataIterator(
            Hooks(plan.identity, plan.pipeline.clock, begin, moved), start
        )

    def restarted(self) -> "RestartedDataset[BatchT]":
        """Returns the same batches, from the start in every iteration.

        Use this to measure: with `steps=`, each validation then takes the same rows.
        """
        return RestartedDataset(self)

    def _first_iteration(self) -> DataIterator[BatchT]:
        """Returns an iteration from the start, which does not move the next one."""
        return self._new_iterator(Position(0), lambda position: None)

    def report(self) -> PipelineReport:
        """Returns the work of each stage so far, on this process."""
        return self._plan.pipeline.clock.report()

    def _moved(self, number: int, position: Position) -> None:
        """Records the position of an iteration, if it is the latest one."""
        if number == self._latest:
            self._next = self._after(position)

    def _after(self, position: Position) -> Position:
        """Returns the position at which the next iteration begins."""
        options = self._plan.pipeline.options
        if options.goes_on or options.epochs is None:
            return position
        return Position(position.first_epoch + options.epochs)


class RestartedDataset(Generic[BatchT]):
    """The batches of a dataset, from the start in every iteration."""

    def __init__(self, dataset: DistributedDataset[BatchT]) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> DataIterator[BatchT]:
        return self._dataset._first_iteration()


class _Parking:
    """Keeps the reader of a stream for the iteration that continues it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parked: tuple[Position, Reader] | None = None

    def leave(self, batches: BatchIterator) -> None:
        """Keeps the reader of an iteration that has ended."""
        entry = (_place(batches.position), batches.reader)
        with self._lock:
            before, self._parked = self._parked, entry
        if before is not None:
            before[1].close()

    def take(self, position: Position) -> Reader | None:
        """Returns the reader that is at a position, if there is one."""
        with self._lock:
            parked, self._parked = self._parked, None
        if parked is None or parked[0] == _place(position):
            return parked and parked[1]
        parked[1].close()
        return None

    def close(self) -> None:
        with self._lock:
            parked, self._parked = self._parked, None
        if parked is not None:
            parked[1].close()


def _begin(
    plan: DataPlan, parking: _Parking, position: Position
) -> Prefetch[tuple[Batch, Position]]:
    """Returns the batches of an iteration from a place on."""
    options = plan.pipeline.options
    parked = parking.take(position)
    agreement = plan.agreement
    exchange = None if agreement is None else agreement.new_iteration()
    try:
        reader = parked or plan.new_reader()
    except Exception as error:
        if exchange is not None and options.per_process:
            exchange.fail(error)
        raise
    batches = BatchIterator(
        plan.pipeline, reader, position, must_seek=parked is None, exchange=exchange
    )
    at_end = None
    if options.goes_on and plan.identity.source == "stream":
        at_end = functools.partial(parking.leave, batches)
    return Prefetch(batches, options.prefetch, at_end)


def _place(position: Position) -> Position:
    """Returns a position without the fields of its iteration."""
    return position._replace(first_epoch=0, first_row=0, given=0)


def _close(plan: DataPlan, parking: _Parking) -> None:
    plan.close()
    parking.close()
