"""`distribute_dataset`: from a source to global batches on a mesh."""

import functools
import threading
import weakref
from typing import Any

from meshlayout.data.adapters import as_source
from meshlayout.data.agreement import FACTS, agreement_of, telling
from meshlayout.data.clock import Clock, PipelineReport
from meshlayout.data.host_batches import Reader
from meshlayout.data.iterator import DataIterator, Hooks
from meshlayout.data.options import check_options
from meshlayout.data.planning import Plan, make_plan
from meshlayout.data.position import Position
from meshlayout.data.prefetching import Prefetched
from meshlayout.data.producing import Producer, topic
from meshlayout.data.rows import batch_layout, note_whole_batches


def distribute_dataset(
    source: Any,
    layout_or_mesh: Any,
    *,
    global_batch_size: int,
    remainder: str = "pad",
    weights: str | int | None = "weight",
    shuffle: int | None = None,
    epochs: int = 1,
    steps: int | None = None,
    prefetch: int = 2,
    per_process: bool = False,
    strings: str = "error",
    batched: bool | None = None,
) -> "DistributedDataset":
    """Makes global batches on a mesh from what gives examples.

    Every example is in one batch of an epoch, and each process loads the rows of which
    its devices hold a part. Batches have one shape and one structure; those that the
    source cannot fill are padded with its last row, and marked by weights of 0.

    Args:
        source: A tree of arrays, a list of examples, an iterable, an iterator or a
            generator function of examples or batches, or a data set of Grain, TFDS,
            tf.data, PyTorch or Hugging Face.
        layout_or_mesh: How batches lie on the mesh: a `Layout`, whose missing dims are
            unsharded, or a mesh, whose axes called batch, data or fsdp shard the first
            dim.
        global_batch_size: Rows of a batch, on all processes together.
        remainder: What becomes of rows that do not fill a batch: `"pad"`; `"drop"`;
            `"repeat"`, in which epochs run into each other and the next iteration
            begins where the last one ended; or `"error"`.
        weights: Where batches carry one weight per example, float32: a dict's key, or
            a tuple's place, its length to append them. Padding needs such a place;
            weights that the source has are kept, and are 0 for padding. None for
            nowhere.
        shuffle: A seed, which with the number of the epoch gives the order of the rows
            of a source with random access. None leaves them as they are.
        epochs: Passes over the source in one iteration.
        steps: Batches in one iteration; None for all.
        prefetch: How many batches a background thread makes ready ahead; with 0, there
            is no thread.
        per_process: Whether the source on each process gives this process's rows only,
            in the order of `process_rows`. Processes take as many steps as the one
            with the most rows, or with `remainder="drop"` the fewest. Where a stream
            has no rows left for a step, its first one is the padding.
        strings: `"error"`, or `"host"` to leave leaves of strings as NumPy arrays of
            this process's rows.
        batched: Whether the elements of an iterable are batches (True) or examples
            (False); None where they tell.

    Returns:
        The batches, to be iterated over once or more often.

    Raises:
        DataError: If an argument is wrong, or the source is empty or does not fit.

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
    agreement = agreement_of(layout)
    with telling(agreement, FACTS):
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
    clock = Clock()
    note_whole_batches(layout_or_mesh, clock.note)
    opened = functools.partial(as_source, source, clock, batched=batched)
    return DistributedDataset(make_plan(opened, layout, options, clock, agreement))


class DistributedDataset:
    """Global batches on a mesh; made by `distribute_dataset`.

    Each iteration gives the next `epochs` epochs of the source. Several iterations at
    once do not disturb each other.

    Args:
        plan: How batches are made.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._next = Position(0)
        self._latest = 0
        self._parking = _Parking()
        weakref.finalize(self, _close, plan, self._parking).atexit = False

    @property
    def element_spec(self) -> Any:
        """The shape, dtype and sharding of every leaf of a batch."""
        return self._plan.element_spec

    @property
    def global_batch_size(self) -> int:
        """Rows of a global batch, padding included."""
        return self._plan.pipeline.options.global_batch_size

    @property
    def weights(self) -> str | int | None:
        """Where batches carry weights; None if they carry none."""
        weighting = self._plan.pipeline.weighting
        has_none = weighting is None or weighting.at is None
        return None if has_none else self._plan.pipeline.options.weights

    def __len__(self) -> int:
        steps = self._plan.num_steps
        if steps is None:
            msg = (
                "this data set does not know how many batches it has: its source does "
                "not tell. Give steps= to have the same number in every iteration."
            )
            raise TypeError(msg)
        return steps

    def __iter__(self) -> DataIterator:
        return self.iterator()

    def iterator(self) -> DataIterator:
        """Returns the next iteration; it can be used in a `with` block."""
        start = self._next._replace(
            first_epoch=self._next.epoch, first_row=self._next.row, given=0
        )
        self._latest += 1
        # The iterator keeps the data set, which may have no other name, alive.
        moved = functools.partial(self.moved, self._latest)
        self._next = self._after(start)
        plan = self._plan
        begin = functools.partial(_begin, plan, self._parking)
        hooks = Hooks(plan.identity, plan.pipeline.clock, begin, moved)
        return DataIterator(hooks, start)

    def report(self) -> PipelineReport:
        """Returns what the stages have done so far, on this process."""
        return self._plan.pipeline.clock.report()

    def moved(self, number: int, position: Position) -> None:
        """Remembers where an iteration stands, if it is the latest one.

        Args:
            number: Which iteration, from 1.
            position: The place after its last batch.
        """
        if number == self._latest:
            self._next = self._after(position)

    def _after(self, position: Position) -> Position:
        """Returns where the iteration after one begins."""
        options = self._plan.pipeline.options
        if options.remainder == "repeat":
            return position
        return Position(position.first_epoch + options.epochs)


class _Parking:
    """Keeps what reads a stream between iterations that run into each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: tuple[Position, Reader] | None = None

    def leave(self, position: Position, reader: Reader) -> None:
        with self._lock:
            before, self._kept = self._kept, (_place(position), reader)
        if before is not None:
            before[1].close()

    def take(self, position: Position) -> Reader | None:
        """Returns the reader that stands at a place, if there is one."""
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is None:
            return None
        if kept[0] == _place(position):
            return kept[1]
        kept[1].close()
        return None

    def close(self) -> None:
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None:
            kept[1].close()


def _begin(plan: Plan, parking: _Parking, position: Position) -> Prefetched:
    """Returns the batches of an iteration from a place on."""
    options = plan.pipeline.options
    parked = parking.take(position)
    name = plan.agreement.new_iteration() if plan.agreement is not None else ""
    with telling(plan.pipeline.agreement, topic(name, 0)):
        reader = parked or plan.new_reader()
    producer = Producer(
        plan.pipeline,
        reader,
        position,
        must_seek=parked is None,
        name=name,
    )
    at_end = None
    if options.remainder == "repeat" and plan.identity.source == "stream":
        at_end = functools.partial(_leave, parking, producer)
    return Prefetched(producer, options.prefetch, at_end)


def _leave(parking: _Parking, producer: Producer) -> None:
    parking.leave(producer.given, producer.reader)


def _place(position: Position) -> Position:
    """Returns a position without the iteration that it is of."""
    return position._replace(first_epoch=0, first_row=0, given=0)


def _close(plan: Plan, parking: _Parking) -> None:
    plan.close()
    parking.close()
