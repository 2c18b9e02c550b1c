"""TensorFlow's tf.data.Dataset, which tfds.load returns, as streams.

A tf.data.Dataset has no public flag for whether its elements are batches: a batch of 5
rows and an example of 5 vectors have the same spec. The first element shows it if its
tensors differ in their first dim; otherwise, `batched=` is required.
"""

from typing import Any

from meshlayout.data.adapters.iterables import IteratorSource


def adapt(
    obj: Any, class_names: set[str], *, batched: bool | None
) -> IteratorSource | None:
    """Returns a tf.data.Dataset of dense tensors as a source."""
    if "DatasetV2" not in class_names:
        return None
    # Negative if it is unknown or infinite; of batches, it is not the number of rows.
    cardinality = -1 if batched else int(obj.cardinality())
    num_rows = cardinality if cardinality >= 0 else None
    # The dataset decides whether it reshuffles in an epoch.
    return IteratorSource(lambda epoch: obj.as_numpy_iterator(), batched, num_rows)
