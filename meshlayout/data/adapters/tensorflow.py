"""TensorFlow's tf.data.Dataset, which tfds.load returns, as streams.

A tf.data.Dataset has no public flag for whether its elements are batches: a batch of 5
rows and an example of 5 vectors have the same spec. A scalar tensor settles it; without
one, `batched=` is required.
"""

from typing import Any

from meshlayout.data.adapters.iterables import IteratorSource
from meshlayout.data.examples import leaf_text, named_leaves
from meshlayout.data.report import Clock
from meshlayout.errors import DataError


def adapt(
    obj: Any, class_names: set[str], clock: Clock, *, batched: bool | None
) -> IteratorSource | None:
    """Returns a tf.data.Dataset of dense tensors as a source."""
    del clock
    if "DatasetV2" not in class_names:
        return None
    named, _ = named_leaves(obj.element_spec)
    for path, spec in named:
        kind = type(spec).__name__
        if kind != "TensorSpec":
            msg = (
                f"{leaf_text(path)} of the tf.data.Dataset is a "
                f"{kind.removesuffix('Spec')}, not a dense tensor. Make it one with "
                "map, for instance by to_tensor() or tf.sparse.to_dense."
            )
            raise DataError(msg)
    if batched is None:
        _check_examples([spec.shape for _, spec in named])
    # Negative if it is unknown or infinite; of batches, it is not the number of rows.
    cardinality = -1 if batched else int(obj.cardinality())
    # The dataset decides whether it reshuffles in an epoch.
    return IteratorSource(
        lambda epoch: obj.as_numpy_iterator(),
        bool(batched),
        cardinality if cardinality >= 0 else None,
    )


def _check_examples(shapes: list[Any]) -> None:
    """Raises DataError unless shapes show that elements are single examples."""
    # Unknown ranks and sizes show nothing.
    first_dims = {shape[0] for shape in shapes if shape.rank} - {None}
    if len(first_dims) > 1 or any(shape.rank == 0 for shape in shapes):
        return
    msg = (
        f"the tf.data.Dataset yields tensors of shape {', '.join(map(str, shapes))}, "
        "which may be batches or single examples. Say which with batched=True or "
        "batched=False."
    )
    raise DataError(msg)
