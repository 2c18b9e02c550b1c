"""TFDS's data sources, which need no TensorFlow, as sources of rows."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from meshlayout.data.adapters.arrays import Rows, item_rows, refuse_batched
from meshlayout.data.clock import Clock
from meshlayout.data.examples import named_leaves


def adapt(
    obj: Any, kinds: set[str], clock: Clock, *, batched: bool | None
) -> Rows | None:
    """Returns what `tfds.data_source` returns as a source of rows."""
    del clock
    if "BaseDataSource" not in kinds:
        return None
    refuse_batched("a TFDS data source", batched=batched)
    return item_rows(obj, feature_dtypes(obj.dataset_info.features))


def feature_dtypes(features: Any) -> Mapping[str, np.dtype]:
    """Returns by path the dtypes of a TFDS dataset's numbers.

    TFDS decodes a lone number to a Python number; this is what it was stored as.
    """
    named, _ = named_leaves(features.get_tensor_info())
    dtypes = {path: np.dtype(info.np_dtype) for path, info in named}
    return {path: dtype for path, dtype in dtypes.items() if dtype.kind in "biufc"}
