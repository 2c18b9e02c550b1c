"""TFDS's data sources, which need no TensorFlow, as sources of rows."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from meshlayout import _paths
from meshlayout._annotations import PyTree
from meshlayout.data.adapters.arrays import refuse_batched
from meshlayout.data.clock import Clock
from meshlayout.data.examples import stack
from meshlayout.data.protocols import RandomAccessSource


def adapt(obj: Any, clock: Clock, *, batched: bool | None) -> RandomAccessSource | None:
    """Returns a TFDS data source as a source, or None if it is of another kind.

    Args:
        obj: What `tfds.data_source` or a builder's `as_data_source` returned.
        clock: Not needed here.
        batched: Must not be True: no data source yields batches.

    Raises:
        DataError: If `batched` is True.
    """
    del clock
    if "BaseDataSource" not in {kind.__name__ for kind in type(obj).__mro__}:
        return None
    refuse_batched("a TFDS data source", batched=batched)
    return DataSourceRows(obj)


class DataSourceRows:
    """A TFDS data source as a source of rows, read and decoded in one call per batch.

    Args:
        source: The data source.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._dtypes = feature_dtypes(source.dataset_info.features)

    def __len__(self) -> int:
        return len(self._source)

    def read_rows(self, indices: np.ndarray, epoch: int) -> PyTree:
        """Returns rows, decoded, in the order asked for."""
        del epoch
        return stack(self._source.__getitems__(indices.tolist()), self._dtypes)


def feature_dtypes(features: Any) -> Mapping[str, Any]:
    """Returns by path the dtypes of a TFDS dataset's numbers.

    TFDS decodes a lone number to a Python number; this is what it was stored as.
    """
    entries, _ = jax.tree_util.tree_flatten_with_path(features.get_tensor_info())
    dtypes = {}
    for keys, info in entries:
        path = "/".join(map(_paths.key_name, keys))
        dtype = np.dtype(info.np_dtype)
        if dtype.kind in "biufc":
            dtypes[path] = dtype
    return dtypes
