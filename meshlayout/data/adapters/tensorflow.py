"""TensorFlow's tf.data.Dataset, and TFDS's data sources, which need no TensorFlow.

A tf.data.Dataset has no public flag for whether its elements are batches: a batch of 5
rows and an example of 5 vectors have the same spec. The first element shows it if its
tensors differ in their first dim; otherwise, `batched=` is required.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshlayout._annotations import PyTree
from meshlayout.data.adapters.arrays import Rows
from meshlayout.data.adapters.iterables import IteratorSource
from meshlayout.data.examples import named_leaves, stack
from meshlayout.data.protocols import Source


def adapt(obj: Any, class_names: set[str], *, batched: bool | None) -> Source | None:
    """Returns a tf.data.Dataset, or the result of `tfds.data_source`, as a source."""
    if "BaseDataSource" in class_names:
        read = TypedExamples(obj, obj.dataset_info.features)
        return Rows(len(obj), lambda indices, epoch: stack(read(indices)))
    if "DatasetV2" not in class_names:
        return None
    # Negative if it is unknown or infinite; of batches, it is not the number of rows.
    cardinality = -1 if batched else int(obj.cardinality())
    num_rows = cardinality if cardinality >= 0 else None
    # The dataset decides whether it reshuffles in an epoch.
    return IteratorSource(lambda epoch: obj.as_numpy_iterator(), batched, num_rows)


class TypedExamples:
    """Examples of a TFDS data source, with numbers in the dtypes of its features.

    TFDS decodes scalars to Python numbers, which no longer have the stored dtype.
    """

    def __init__(self, source: Any, features: Any) -> None:
        named, _ = named_leaves(features.get_tensor_info())
        self._source = source
        self._dtypes = {path: np.dtype(info.np_dtype) for path, info in named}

    def __call__(self, indices: np.ndarray) -> Sequence[PyTree]:
        """Returns the examples at some indices."""
        return list(map(self._typed, self._source.__getitems__(indices.tolist())))

    def _typed(self, example: PyTree) -> PyTree:
        named, treedef = named_leaves(example)
        leaves = [
            self._dtypes[path].type(leaf) if type(leaf) in (bool, int, float) else leaf
            for path, leaf in named
        ]
        return treedef.unflatten(leaves)
