"""TFDS's data sources, which need no TensorFlow, as sources with random access."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from meshlayout.data.adapters.arrays import Rows, item_rows
from meshlayout.data.examples import named_leaves


def adapt(obj: Any, class_names: set[str], *, batched: bool | None) -> Rows | None:
    """Returns the result of `tfds.data_source` as a source."""
    del batched
    if "BaseDataSource" not in class_names:
        return None
    return item_rows(obj, feature_dtypes(obj.dataset_info.features))


def feature_dtypes(features: Any) -> Mapping[str, np.dtype]:
    """Returns the dtypes of a TFDS dataset's numbers, by path.

    TFDS decodes scalars to Python numbers, which no longer have the stored dtype.
    """
    named, _ = named_leaves(features.get_tensor_info())
    dtypes = {path: np.dtype(info.np_dtype) for path, info in named}
    return {path: dtype for path, dtype in dtypes.items() if dtype.kind in "biufc"}
