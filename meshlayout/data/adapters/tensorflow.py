"""TensorFlow's tf.data.Dataset, and TFDS's data sources, which need no TensorFlow.

A tf.data.Dataset has no public flag for whether its elements are batches: a batch of 5
rows and an example of 5 vectors have the same spec. The first element shows it if its
tensors differ in their first dim; otherwise, `batched=` is required.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from meshlayout.data.adapters.arrays import item_rows
from meshlayout.data.adapters.iterables import IteratorSource
from meshlayout.data.examples import named_leaves
from meshlayout.data.protocols import Source


def adapt(obj: Any, class_names: set[str], *, batched: bool | None) -> Source | None:
    """Returns a tf.data.Dataset, or the result of `tfds.data_source`, as a source."""
    if "BaseDataSource" in class_names:
        return item_rows(obj, feature_dtypes(obj.dataset_info.features))
    if "DatasetV2" not in class_names:
        return None
    # Negative if it is unknown or infinite; of batches, it is not the number of rows.
    cardinality = -1 if batched else int(obj.cardinality())
    num_rows = cardinality if cardinality >= 0 else None
    # The dataset decides whether it reshuffles in an epoch.
    return IteratorSource(lambda epoch: obj.as_numpy_iterator(), batched, num_rows)


def feature_dtypes(features: Any) -> Mapping[str, np.dtype]:
    """Returns the dtypes of a TFDS dataset's numbers, by path.

    TFDS decodes scalars to Python numbers, which no longer have the stored dtype.
    """
    named, _ = named_leaves(features.get_tensor_info())
    dtypes = {path: np.dtype(info.np_dtype) for path, info in named}
    return {path: dtype for path, dtype in dtypes.items() if dtype.kind in "biufc"}
