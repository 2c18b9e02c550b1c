"""Hugging Face's datasets as sources.

Rows come in the package's "numpy" format, streamed examples as Python's lists, and both
become arrays in the dtypes of their features. Structures inside lists (a list of dicts)
have no columns, and are left to the user's own map.
"""

import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from meshlayout._annotations import PyTree
from meshlayout.data.adapters.arrays import Rows
from meshlayout.data.adapters.iterables import IteratorSource
from meshlayout.data.examples import as_batch, leaf_text, stack
from meshlayout.data.protocols import JSON, Source
from meshlayout.errors import DataError


def adapt(obj: Any, class_names: set[str], *, batched: bool | None) -> Source | None:
    """Returns a Dataset or IterableDataset of the `datasets` package as a source."""
    if "DatasetDict" in class_names or "IterableDatasetDict" in class_names:
        msg = f"a {type(obj).__name__} holds the splits {', '.join(map(repr, obj))}. "
        raise DataError(f"{msg}Choose one, as dataset[{next(iter(obj), 'train')!r}].")
    if "IterableDataset" in class_names:
        readers: set[_Pass] = set()
        return IteratorSource(lambda epoch: _Pass(obj, epoch, readers), batched)
    return _dataset_rows(obj) if "Dataset" in class_names else None


def _dataset_rows(dataset: Any) -> Rows:
    """Returns a Dataset as a source with random access, in the user's format if any."""
    features, names, views = dataset.features, dataset.format["columns"], [dataset]
    if dataset.format["type"] in (None, "arrow", "pandas", "polars"):
        texts = [x for x in names if re.search("string|binary", repr(features[x]))]
        others = [name for name in names if name not in texts]
        # A dtype of None keeps those of the features; otherwise, all numbers would
        # become int64 and float32. NumPy's strings would lose trailing nulls.
        views = [
            dataset.with_format("numpy", columns=others, dtype=None),
            dataset.with_format(None, columns=texts),
        ]

    def column(values: Any, name: str, rows: list[int]) -> PyTree:
        if isinstance(values, np.ndarray) and _has_nan(values):
            # It may be None in the "numpy" format, also next to integers.
            values = dataset.with_format(None, columns=[name])[rows][name]
        if _has_objects(values):
            examples = [_arrays(value, features[name], name) for value in values]
            return stack([{name: example} for example in examples])[name]
        is_array = isinstance(values, np.ndarray)
        return _arrays(values, features[name], name) if is_array else values

    def read(indices: np.ndarray, epoch: int) -> PyTree:
        del epoch
        rows = indices.tolist()
        columns = [item for view in views for item in view[rows].items()]
        return as_batch({name: column(x, name, rows) for name, x in columns})[0]

    return Rows(len(dataset), read)


class _Pass(Iterator[PyTree]):
    """The elements of one pass over an IterableDataset, with lists as arrays."""

    # A dataset keeps a single position, which is also where its next iteration starts:
    # it is set when a pass starts reading, and trusted only while no other pass reads.

    def __init__(self, dataset: Any, epoch: int, readers: "set[_Pass]") -> None:
        self._dataset, self._epoch, self._readers = dataset, epoch, readers
        self._can_seek = _can_seek(getattr(dataset, "_ex_iterable", None))
        self.set_state("start")  # before the first row, where there is no state yet

    def __next__(self) -> PyTree:
        if self._iterator is None:
            self._dataset.set_epoch(self._epoch)
            # None makes the dataset forget the position of an earlier pass.
            state = None if self._start == "start" else self._start
            self._dataset.load_state_dict(state)
            self._readers.clear()
            self._iterator = iter(self._dataset)
        self._readers.add(self)
        return _arrays(next(self._iterator), self._dataset.features, "")

    def get_state(self) -> JSON:
        if self._iterator is None:
            return self._start
        is_exact = self._can_seek and self._readers == {self}
        return self._dataset.state_dict() if is_exact else None

    def set_state(self, state: JSON) -> None:
        self._start, self._iterator = state, None


def _can_seek(step: Any) -> bool:
    """Returns whether a dataset's own state leads to the same examples again.

    A shuffle buffer is refilled after resuming, with other examples, which no public
    attribute reveals. Without the private `_ex_iterable`, states are not trusted, and
    resuming asks for `skip=True`; a test of the package's own datasets notices.
    """
    if step is None or "BufferShuffled" in type(step).__name__:
        return False
    inner = [*getattr(step, "ex_iterables", ())]
    if hasattr(step, "ex_iterable"):
        inner.append(step.ex_iterable)
    return all(map(_can_seek, inner))


def _arrays(node: Any, feature: Any, path: str) -> PyTree:
    """Returns a value with its lists as arrays, in the dtypes of its feature."""
    if isinstance(node, dict):
        features = feature if isinstance(feature, dict) else {}
        return {
            name: _arrays(inner, features.get(name), f"{path}/{name}".lstrip("/"))
            for name, inner in node.items()
        }
    kinds = set()
    if node is None or _has_objects(node):
        kinds = set(map(type, np.asarray(node, object).flat))
    elif not isinstance(node, (bool, int, float, np.ndarray)):
        return node  # a string or an image
    problem = ""
    if type(None) in kinds:
        problem = "has rows that are None. Fill them in, or leave them out,"
    elif dict in kinds:
        problem = "is a list of structures. Make arrays of their fields"
    elif kinds & {list, np.ndarray}:
        problem = "is ragged: items differ in shape. Pad or crop them to one,"
    if problem:
        fix = "with the dataset's map or filter."
        raise DataError(f"{leaf_text(path)} {problem} {fix}")
    if kinds and kinds <= {str, bytes}:  # NumPy's own strings lose trailing nulls
        return np.asarray(node, object)
    return np.asarray(node, _dtype(feature))[()]


def _has_objects(node: Any) -> bool:
    is_array = isinstance(node, np.ndarray)
    return isinstance(node, list) or (is_array and node.dtype.hasobject)


def _has_nan(values: np.ndarray) -> bool:
    leaves = jax.tree.leaves(values.tolist() if values.dtype == object else values)
    return any(np.isnan(x).any() for x in leaves if np.asarray(x).dtype.kind == "f")


def _dtype(feature: Any) -> np.dtype | None:
    """Returns the dtype of a feature's numbers; None for strings, images and others."""
    while isinstance(feature, list) or hasattr(feature, "feature"):  # of a list
        feature = feature[0] if isinstance(feature, list) else feature.feature
    try:
        return np.dtype(feature.dtype)
    except (AttributeError, TypeError):
        return None
