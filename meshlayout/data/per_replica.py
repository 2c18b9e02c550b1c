"""Sources that each process makes for itself, as in tf.distribute.

Use them for input that cannot be divided afterward: files on local disks, a service
that sends each host its part. Processes that share a replica must make the same input,
so the user's function is given the index of its input pipeline, not of its process.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from meshlayout import _checks
from meshlayout._batches import num_row_shards
from meshlayout.data.dataset import DistributedDataset
from meshlayout.data.placement import (
    LayoutOrMesh,
    batch_layout,
    input_pipeline,
    rows_per_replica,
)
from meshlayout.data.plan import Assemble, DataPlan
from meshlayout.errors import DataError


@dataclass(frozen=True)
class InputContext:
    """The part of the input that this process makes.

    Attributes:
        num_input_pipelines: The number of pipelines. Processes that hold parts of the
            same replicas form one.
        input_pipeline_id: The index of this one, from 0.
        num_replicas_in_sync: The number of replicas, in all pipelines together.

    Examples:
        >>> context = InputContext(2, 0, 8)
        >>> context.get_per_replica_batch_size(512)
        64
    """

    num_input_pipelines: int
    input_pipeline_id: int
    num_replicas_in_sync: int

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the number of rows of a global batch per replica."""
        return rows_per_replica(global_batch_size, self.num_replicas_in_sync)

    @classmethod
    def of(cls, layout_or_mesh: LayoutOrMesh) -> "InputContext":
        """Returns this process's context, for the layout of batches or a mesh."""
        layout = batch_layout(layout_or_mesh)
        return cls(*input_pipeline(layout), num_row_shards(layout))


@_checks.user_call
def distribute_datasets_from_function(
    fn: Callable[[InputContext], Any],
    layout_or_mesh: LayoutOrMesh,
    *,
    batched: bool | None = None,
    **options: Any,
) -> DistributedDataset:
    """Makes global batches from the sources that a function makes on each process.

    Use this to port a pipeline from tf.distribute, or if each process must read its own
    part of the data. The source that the function returns is cut into this process's
    part of the global batches, one replica's rows after another's. A source of batches
    of the per-replica size, as in tf.distribute, gives each replica one in turn.

    Args:
        fn: Called with an `InputContext`, once, or once per epoch if it is a
            generator function; returns any source that `distribute_dataset` takes.
        layout_or_mesh: The layout of batches, as for `distribute_dataset`.
        batched: Whether the elements of an iterable are batches. Without
            `global_batch_size`, None takes ambiguous elements for batches, as
            tf.distribute does.
        **options: Those of `distribute_dataset` except `per_process`.
            `global_batch_size` defaults to the size of the source's first batch times
            the number of replicas.

    Raises:
        DataError: As `distribute_dataset`, or if the batch size cannot be inferred.

    Examples:
        >>> import numpy as np
        >>> from meshlayout import create_mesh
        >>> def make_source(context):
        ...     size = context.get_per_replica_batch_size(16)
        ...     return [{"x": np.full((size, 3), i)} for i in range(16)]
        >>> data = distribute_datasets_from_function(
        ...     make_source, create_mesh({"batch": 8})
        ... )
        >>> [batch["x"][::2, 0].tolist() for batch in data]
        [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]
    """
    return DistributedDataset(
        make_plan_from_function(fn, layout_or_mesh, options, batched=batched)
    )


def make_plan_from_function(
    fn: Callable[[InputContext], Any],
    layout_or_mesh: LayoutOrMesh,
    options: Mapping[str, Any],
    *,
    batched: bool | None = None,
    assemble: Assemble | None = None,
) -> DataPlan:
    """Returns the plan of a dataset of the sources that `fn` makes."""

    def make_source() -> Any:
        context = InputContext.of(layout_or_mesh)
        with _checks.noted(f"This was raised by the function, called with {context}."):
            source = fn(context)
        if not isinstance(source, Generator):
            return source
        first = [source]  # each epoch needs one of its own
        return lambda: first.pop() if first else fn(context)

    def batch_size_of(rows: int | None) -> int:
        if rows is None:
            msg = (
                "the function returned a source of single rows, which does not say the "
            )
            msg += "size of a batch. Give global_batch_size=, or return batches of the "
            raise DataError(f"{msg}per-replica size.")
        return rows * num_row_shards(batch_layout(layout_or_mesh))

    return DataPlan(
        make_source,
        layout_or_mesh,
        {**options, "per_process": True},  # what a function makes is this process's own
        batched=batched,
        batch_size_of=batch_size_of,
        assemble=assemble,
    )
