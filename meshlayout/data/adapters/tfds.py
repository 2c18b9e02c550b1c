"""TFDS's data sources, which need no TensorFlow, as sources of rows."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from meshlayout.data.adapters.arrays import Rows, item_rows, refuse_batched
from meshlayout.data.clock import Clock
from meshlayout.data.examples import named_leaves


def adapt(obj: Any, clock: Clock, *, batched: bool | None) -> Rows | None:
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
    return item_rows(obj, feature_dtypes(obj.dataset_info.features))


def feature_dtypes(features: Any) -> Mapping[str, np.dtype]:
    """Returns by path the dtypes of a TFDS dataset's numbers.

    TFDS decodes a lone number to a Python number; this is what it was stored as.
    """
    named, _ = named_leaves(features.get_tensor_info())
    dtypes = {path: np.dtype(info.np_dtype) for path, info in named}
    return {path: dtype for path, dtype in dtypes.items() if dtype.kind in "biufc"}
