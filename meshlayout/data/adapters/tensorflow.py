"""TensorFlow's tf.data.Dataset, which tfds.load returns, as streams.

A tf.data.Dataset has no public flag for whether its elements are batches: a batch of 5
rows and an example of 5 vectors have the same spec. A scalar tensor settles it; without
one, `batched=` is required.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from meshlayout._annotations import PyTree
from meshlayout.data.adapters.iterables import IteratorSource
from meshlayout.data.clock import Clock
from meshlayout.data.examples import leaf_text, named_leaves
from meshlayout.errors import DataError


# Single examples are fetched in blocks of so many bytes, at most so many at a time:
# each fetch costs more than an example.
_BLOCK_BYTES = 2**20
_MAX_BLOCK_ROWS = 512


def adapt(
    obj: Any, class_names: set[str], clock: Clock, *, batched: bool | None
) -> IteratorSource | None:
    """Returns a tf.data.Dataset of dense tensors as a source."""
    del clock
    if "DatasetV2" not in class_names:
        return None
    specs = _specs(obj)
    if batched is None:
        batched = _yields_batches(specs)
    num_rows = None
    if not batched:
        cardinality = int(obj.cardinality())
        # Negative if it is unknown or infinite.
        num_rows = cardinality if cardinality >= 0 else None
        if all(spec.shape.is_fully_defined() for spec in specs):
            # TensorFlow stacks them: the same examples in the same order.
            obj, batched = obj.batch(_block_rows(specs)), True

    def begin(epoch: int) -> Iterator[PyTree]:
        del epoch  # the dataset decides whether it reshuffles
        yield from obj.as_numpy_iterator()

    return IteratorSource(begin, batched, num_rows)


def _specs(dataset: Any) -> list[Any]:
    """Returns the specs of a dataset's tensors.

    Raises:
        DataError: If one is not a dense tensor.
    """
    named, _ = named_leaves(dataset.element_spec)
    for path, spec in named:
        kind = type(spec).__name__
        if kind != "TensorSpec":
            msg = (
                f"{leaf_text(path)} of the tf.data.Dataset is a "
                f"{kind.removesuffix('Spec')}, not a dense tensor. Make it one with "
                "map, for instance by to_tensor() or tf.sparse.to_dense."
            )
            raise DataError(msg)
    return [spec for _, spec in named]


def _yields_batches(specs: list[Any]) -> bool:
    """Returns False if shapes show that elements are examples; raises otherwise."""
    # Unknown ranks and sizes show nothing.
    first_dims = {spec.shape[0] for spec in specs if spec.shape.rank} - {None}
    if len(first_dims) > 1 or any(spec.shape.rank == 0 for spec in specs):
        return False
    shapes = ", ".join(str(spec.shape) for spec in specs)
    msg = (
        f"the tf.data.Dataset yields tensors of shape {shapes}, which may be batches "
        "or single examples. Say which with batched=True or batched=False."
    )
    raise DataError(msg)


def _block_rows(specs: list[Any]) -> int:
    sizes = [
        spec.shape.num_elements() * np.dtype(spec.dtype.as_numpy_dtype).itemsize
        for spec in specs
    ]
    return max(1, min(_MAX_BLOCK_ROWS, _BLOCK_BYTES // max(1, sum(sizes))))
