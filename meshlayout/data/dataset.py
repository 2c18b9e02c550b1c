"""`distribute_dataset`: from a source to global batches on a mesh.

The user's object becomes one of the two kinds of source in `protocols`, a `DataPlan`
decides everything that can be decided before the first batch, and the dataset hands out
iterators. A dataset is not an iterator: it only counts the epochs of its iterations, so
several loops over it can run at once.
"""

import dataclasses
import functools
import weakref

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout.data.iterator import DataIterator
from meshlayout.data.placement import LayoutOrMesh
from meshlayout.data.plan import DataPlan
from meshlayout.data.position import Position
from meshlayout.data.report import PipelineReport
from meshlayout.errors import DataError


@_checks.user_call
def distribute_dataset(
    source: object,
    layout_or_mesh: LayoutOrMesh,
    global_batch_size: int,
    *,
    remainder: str = "pad",
    weights: str | int | None = "weight",
    shuffle: int | None = None,
    epochs: int | None = 1,
    prefetch: int = 2,
    per_process: bool = False,
    strings: str = "error",
    batched: bool | None = None,
) -> "DistributedDataset":
    """Makes global batches on a mesh from a source of examples.

    Use this to feed a step from arrays in memory, a generator, or a dataset of another
    framework. Every example is in exactly one batch of an epoch, and each process loads
    only the rows that its devices need. All batches have the same shape and structure:
    the last one of an epoch is padded with copies of its last row, which have weight 0.

    On several processes, all must pass the same source (or `per_process=True`) and take
    the same number of batches. They compare their options and some rows when the
    dataset is made. If a stream fails or ends on one process, the loops of all
    processes end at the same step.

    Args:
        source: A tree of arrays or a table; a list of examples; an iterable, an
            iterator or a generator function of examples or batches; a dataset of Grain,
            TFDS, tf.data, PyTorch or Hugging Face; or your own `RandomAccessSource` or
            `StreamSource`. A data frame is a dict of its columns; in a dict or tuple,
            anything with `__array__` is an array, and so is a list of numbers.
        layout_or_mesh: The layout of batches: a `Layout`, whose missing dims are
            unsharded; or a mesh, whose axes called batch, data, replica, fsdp, dp, ddp
            or data_parallel shard the first dim. Without such an axis, every device
            gets all rows, and a warning is logged.
        global_batch_size: Rows of a batch, on all processes together.
        remainder: What to do with rows that do not fill a batch: `"pad"`, `"drop"`, or
            `"repeat"`, which fills it from the next epoch.
        weights: Where batches carry one float32 weight per example, which padding
            needs: a key of a dict, or an index into a tuple (its length appends them).
            Weights in the source are kept, and are 0 for padding. None for batches
            without weights.
        shuffle: A seed for the order of rows with random access; None keeps it.
        epochs: Passes over the source in one iteration; the next iteration continues
            with the next epoch. None for as many as the loop takes, and for endless
            sources. To take some batches at a time, use `itertools.islice`.
        prefetch: The number of batches that a thread prepares ahead; 0 for no thread.
        per_process: Whether the source on each process yields only this process's rows,
            in the order of `process_rows`. All processes take as many steps as the one
            with the most rows (with `remainder="drop"`, the fewest). A process without
            rows left pads with its first row.
        strings: `"error"`; or `"host"`, for sources with random access, to keep strings
            as NumPy arrays of this process's rows.
        batched: Whether the elements of a list or an iterable are batches (True) or
            examples (False). None infers it from the first; if unclear, an error asks.

    Returns:
        The batches; you can iterate over them any number of times.

    Raises:
        DataError: If an argument is wrong, the source is empty or does not fit, or
            processes have different sources; during iteration, if the source fails,
            ends or differs on another process. The process where it fails raises its
            own error.

    Examples:
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
    options = dict(locals())
    del options["source"], options["layout_or_mesh"], options["batched"]
    plan = DataPlan(lambda: source, layout_or_mesh, options, batched=batched)
    return DistributedDataset(plan)


class DistributedDataset(_checks.WithReflexes):
    """Global batches on a mesh; made by `distribute_dataset`.

    Each iteration yields the next `epochs` epochs of the source; with `epochs=None` or
    `remainder="repeat"` it continues where the latest one stopped.
    """

    def __init__(self, plan: DataPlan) -> None:
        self._plan = plan
        self._next = Position(0)
        self._num_iterations = 0
        # Not at exit: worker processes and threads end by themselves, and closing files
        # while Python shuts down can fail.
        weakref.finalize(self, plan.close).atexit = False

    @property
    def element_spec(self) -> PyTree:
        """The shape, dtype and sharding of every leaf of a batch."""
        return self._plan.element_spec

    @property
    def global_batch_size(self) -> int:
        """Rows of a global batch, padding included."""
        return self._plan.identity["global_batch_size"]

    @property
    def weights(self) -> str | int | None:
        """The key or index of the weights in a batch; None if batches have none."""
        return self._plan.options.weights if self._plan.has_weights else None

    def __len__(self) -> int:
        if (steps := self._plan.num_steps) is None:
            msg = "this dataset does not know how many batches it has. "
            msg += "itertools.islice(iterator, steps) takes a number of them."
            raise TypeError(msg)
        return steps

    def __repr__(self) -> str:
        size, steps = self.global_batch_size, self._plan.num_steps
        return f"DistributedDataset(global_batch_size={size}, batches={steps})"

    def __iter__(self) -> DataIterator:
        return self.iterator()

    def iterator(self, *, epoch: int | None = None) -> DataIterator:
        """Returns the next iteration; it can be used in a `with` block.

        Args:
            epoch: The epoch to start with, for example to measure the same rows each
                time; None for the epoch after those of earlier iterations.
        """
        if epoch is None:
            self._num_iterations += 1
            number, start = self._num_iterations, self._next
            start = start._replace(first_epoch=start.epoch, first_row=start.row)
        else:
            epoch = _checks.count("epoch", epoch, at_least=0, error=DataError)
            number, start = -1, Position(epoch, first_epoch=epoch)
        record = functools.partial(self._record, number)
        record(start)
        return DataIterator(self._plan, start, record)

    def report(self) -> PipelineReport:
        """Returns a report on the pipeline's work so far, on this process."""
        return dataclasses.replace(self._plan.clock)

    def _record(self, iteration: int, position: Position) -> None:
        """Records how far an iteration has come, if it is the latest one.

        An older loop that is still running must not move the next one back.
        """
        if iteration != self._num_iterations:
            return
        options = self._plan.options
        self._next = position
        if options.epochs is not None and options.remainder != "repeat":
            # Also if the loop is left early: epochs start at their first row.
            self._next = Position(position.first_epoch + options.epochs)
