"""`distribute_dataset`: from a source to global batches on a mesh.

The user's object becomes one of the two kinds of source in `protocols`, a `DataPlan`
decides everything that can be decided before the first batch, and the dataset hands out
iterators. A dataset is not an iterator: it only remembers where the next one starts, so
that several loops over it can run at once.
"""

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import (
    Any,
    Generic,
    NoReturn,
    Required,
    TypedDict,
    Unpack,
    overload,
)

import jax
import numpy as np

from meshlayout import _checks
from meshlayout._annotations import Batch, PyTree
from meshlayout.data.adapters import (
    arrays,
    grain,
    hugging_face,
    iterables,
    tensorflow,
    tfds,
    torch,
)
from meshlayout.data.agreement import FACTS, agreement_of, failure_told
from meshlayout.data.batch_iterator import BatchT, DataIterator
from meshlayout.data.clock import Clock, PipelineReport
from meshlayout.data.element_rows import looks_batched
from meshlayout.data.elements import ElementReader
from meshlayout.data.placement import LayoutOrMesh, batch_layout
from meshlayout.data.plan import DataOptions, DataPlan
from meshlayout.data.position import Position
from meshlayout.data.protocols import RandomAccessSource, Source, StreamSource
from meshlayout.errors import DataError


# By the top-level package of an object's class or of one of its bases, so that no
# framework has to be imported to recognize its objects. An adapter returns None for an
# object of its package that it does not support.
_ADAPTERS: dict[str, Callable[..., Source | None]] = {
    "grain": grain.adapt,
    "tensorflow": tensorflow.adapt,
    "tensorflow_datasets": tfds.adapt,
    "torch": torch.adapt,
    "datasets": hugging_face.adapt,
}


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


# The overloads carry the type of the batches over from that of the arrays.
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

    Use this to feed a train or eval step from anything: arrays in memory, a generator,
    or a dataset of another framework. Every example is in exactly one batch of an
    epoch, and each process loads only the rows that its devices need. All batches have
    the same shape and structure; those that the source cannot fill are padded with its
    last row, and the padding is marked by weights of 0.

    On several processes, all of them must pass the same source (or
    `per_process=True`), and iterate over the dataset alike. Before each batch, in the
    background, they tell each other whether they have it: an error, an end of the data
    or a row of a stream that differs on one process ends the loops of all at the same
    step.

    Args:
        source: A tree of arrays, a list of examples, an iterable, an iterator or a
            generator function of examples or batches; a dataset of Grain, TFDS,
            tf.data, PyTorch or Hugging Face; or your own `RandomAccessSource` or
            `StreamSource`.
        layout_or_mesh: How batches are laid out: a `Layout`, whose missing dims are
            unsharded, or a mesh, whose axes called batch, data, replica or fsdp shard
            the first dim.
        global_batch_size: Rows of a batch, on all processes together.
        remainder: What to do with the rows that do not fill a batch: `"pad"`;
            `"drop"`; `"repeat"`, which lets epochs run into each other; or `"error"`.
        weights: Where batches carry one float32 weight per example: a key of a dict,
            or an index into a tuple; the tuple's length appends them. Padding needs
            such an entry. Weights that the source has are kept, and set to 0 for
            padding. None for batches without weights.
        shuffle: A seed, which together with the epoch determines the order of the rows
            of a source with random access. None keeps their order.
        epochs: Passes over the source in one iteration; None for as many as the loop
            needs, which a source without an end requires.
        steps: Batches in one iteration; None for all. The next iteration starts where
            the last one ended, so that every row is seen eventually.
        prefetch: How many batches a background thread prepares ahead; 0 starts no
            thread.
        per_process: Whether the source on each process yields this process's rows only,
            in the order of `process_rows`. All processes take as many steps as the one
            with the most rows, or with `remainder="drop"` the fewest. A stream that has
            no rows left for a step is padded with its first row.
        strings: `"error"`, or `"host"` to leave leaves of strings as NumPy arrays of
            this process's rows.
        batched: Whether the elements of an iterable are batches (True) or examples
            (False); None decides by the first element, and asks if it could be either.

    Returns:
        The batches, which can be iterated over any number of times.

    Raises:
        DataError: If an argument is wrong, the source is empty or does not fit, or
            processes have different sources. While iterating: if the source fails, ends
            or differs on another process; where it fails, its own error.

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
    plan = make_plan(
        source,
        layout_or_mesh,
        batched=batched,
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
    return DistributedDataset(plan)


def make_plan(
    source: object,
    layout_or_mesh: LayoutOrMesh,
    *,
    batched: bool | None,
    batch_size_of: Callable[[Source | ElementReader, int | None], int] | None = None,
    assemble: Callable[[PyTree, jax.Array | None], Batch] | None = None,
    **options: Any,
) -> DataPlan:
    """Returns the plan of a dataset.

    Args:
        source: As for `distribute_dataset`.
        layout_or_mesh: As for `distribute_dataset`.
        batched: As for `distribute_dataset`.
        batch_size_of: Returns the rows of a global batch, given the
            result of `first_batch`, if `global_batch_size` is None; None requires it.
        assemble: As for `DataPlan`.
        **options: Those of `DataOptions`.

    Raises:
        DataError: As `distribute_dataset`.
    """
    clock = Clock()
    layout = batch_layout(layout_or_mesh, clock.note)
    agreement = agreement_of(layout.mesh)
    opened: Source | ElementReader | None = None
    # The other processes are waiting to compare their options with this one's: a
    # mistake made on one process alone must not leave them waiting.
    with failure_told(agreement, FACTS):
        if options["global_batch_size"] is None and batch_size_of is not None:
            opened, rows = first_batch(source, clock, batched=batched)
            options["global_batch_size"] = batch_size_of(opened, rows)
        checked = DataOptions(**options)
        if hasattr(source, "__next__") and (checked.epochs or 1) > 1:
            msg = (
                f"the source is an iterator, which can be read once, and epochs="
                f"{checked.epochs}. Give a function that makes one, as lambda: "
                "make_iterator()."
            )
            raise DataError(msg)

    def open_source() -> Source | ElementReader:
        return as_source(source, clock, batched=batched) if opened is None else opened

    return DataPlan(open_source, layout, checked, clock, agreement, assemble=assemble)


def first_batch(
    dataset: object, clock: Clock, *, batched: bool | None
) -> tuple[Source | ElementReader, int | None]:
    """Opens a source to learn the size of its batches.

    Elements that could be batches or examples are taken for batches, since a source of
    examples has no size of batches to learn.

    Returns:
        The source; a stream as a reader that still yields the first batch, which a
        generator could not yield again. And the rows of that batch; None if these are
        not batches.
    """
    kinds = {kind.__name__ for kind in type(dataset).__mro__}
    if batched is None and isinstance(dataset, list) and dataset:
        batched = looks_batched(dataset[0])
    elif batched is None and "DatasetV2" in kinds:
        batched = True  # tf.data does not say, and tf.distribute takes batches
    source = as_source(dataset, clock, batched=batched)
    # Other frameworks know whether they are batched, or ask; a plain iterable does not.
    if batched is None and isinstance(source, iterables.IterableSource):
        source = iterables.adapt(dataset, batched=True)
    if not isinstance(source, StreamSource):
        return source, None
    reader = ElementReader(source)
    _, rows = reader.look()
    # Of examples, tf.data makes blocks to read them faster: not the user's batches.
    return reader, None if batched is False else rows


def as_source(obj: object, clock: Clock, *, batched: bool | None = None) -> Source:
    """Returns the user's object as a source.

    Args:
        obj: A source already, or an object that one of the adapters supports.
        clock: Takes notes for the report.
        batched: Whether the elements of an iterable are batches (True) or single
            examples (False); None infers it from the object, if possible.

    Raises:
        DataError: If no adapter supports it, or it is ambiguous.
    """
    batched = _checks.choice("batched", batched, (True, False, None), error=DataError)
    if isinstance(obj, type):
        # A class has the methods that a protocol checks for, but none that can be
        # called: take it as a function that makes an iterable.
        obj = functools.partial(obj)
    if isinstance(obj, (RandomAccessSource, StreamSource)):
        if batched is not None:
            msg = (
                f"a {type(obj).__name__} is a source that already defines what it "
                f"yields. Leave out batched={batched}."
            )
            raise DataError(msg)
        if isinstance(obj, RandomAccessSource):
            read = obj.read_rows
            _checks.function("read_rows", read, "indices", "epoch", error=DataError)
        else:
            _checks.function("open", obj.open, "epoch", error=DataError)
        return obj
    packages = [kind.__module__.partition(".")[0] for kind in type(obj).__mro__]
    class_names = {kind.__name__ for kind in type(obj).__mro__}
    for package in dict.fromkeys(packages):
        adapter = _ADAPTERS.get(package)
        source = adapter(obj, class_names, clock, batched=batched) if adapter else None
        if source is not None:
            return source
    rows = arrays.adapt(obj, batched=batched)
    return iterables.adapt(obj, batched=batched) if rows is None else rows


class DistributedDataset(Generic[BatchT]):
    """Global batches on a mesh; made by `distribute_dataset`.

    Each iteration yields the next `epochs` epochs of the source, or the next `steps`
    batches. Several iterations can run at once without disturbing each other; each
    takes the epochs after those of the iteration that was started before it.
    """

    def __init__(self, plan: DataPlan) -> None:
        self._plan = plan
        self._next = Position(0)
        self._latest_iteration = 0
        # Not at exit: worker processes and threads end by themselves, and closing
        # files while Python shuts down can fail.
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
        """The key or index of the weights in a batch; None if batches have none."""
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
            "pickled. Make another one with distribute_dataset; a position in it is "
            "saved by get_state() of its iterator."
        )
        raise DataError(msg)

    def __iter__(self) -> "DataIterator[BatchT]":
        return self.iterator()

    def iterator(self) -> "DataIterator[BatchT]":
        """Returns the next iteration; it can be used in a `with` block."""
        start = self._next._replace(
            first_epoch=self._next.epoch, first_row=self._next.row, given=0
        )
        self._latest_iteration += 1
        self._next = self._after(start)
        record = functools.partial(self._record, self._latest_iteration)
        return DataIterator(self._plan, start, record)

    def restarted(self) -> "RestartedDataset[BatchT]":
        """Returns the same batches, from the start in every iteration.

        Use this to measure: with `steps=`, each validation then takes the same rows.
        """
        return RestartedDataset(self)

    def report(self) -> PipelineReport:
        """Returns the work of each stage so far, on this process."""
        return self._plan.clock.report()

    def _record(self, iteration: int, position: Position) -> None:
        """Records how far an iteration has come, if it is the latest one.

        Only the latest one decides where the next starts: an older loop that is still
        running must not move it back.
        """
        if iteration == self._latest_iteration:
            self._next = self._after(position)

    def _after(self, position: Position) -> Position:
        """Returns the position at which the next iteration starts."""
        options = self._plan.options
        if options.continues or options.epochs is None:
            return position
        # Also if the loop was left early: epochs start at their first row.
        return Position(position.first_epoch + options.epochs)


class RestartedDataset(Generic[BatchT]):
    """The batches of a dataset, from the start in every iteration."""

    def __init__(self, dataset: DistributedDataset[BatchT]) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> "DataIterator[BatchT]":
        # No iteration has this number, so the dataset's own next one stays where it is.
        record = functools.partial(self._dataset._record, -1)
        return DataIterator(self._dataset._plan, Position(0), record)
