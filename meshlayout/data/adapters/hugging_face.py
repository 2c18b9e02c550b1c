"""Hugging Face's datasets as sources.

Rows come from Arrow tables, which keep the dtypes of the features: the "numpy" format
would turn all numbers into int64 and float32. Lists become arrays; structures inside
lists (a list of dicts) have no columns, and are left to the user's own map.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from meshlayout._annotations import PyTree
from meshlayout.data.adapters.arrays import Rows, refuse_batched
from meshlayout.data.adapters.iterables import IteratorSource
from meshlayout.data.examples import as_batch, leaf_text
from meshlayout.data.protocols import JSON, Source
from meshlayout.data.report import Clock
from meshlayout.errors import DataError


# By path; None marks what an Arrow table does not hold as arrays.
Dtypes: TypeAlias = Mapping[str, np.dtype | None]

# Names, so that the package need not be imported. A feature class that is not listed
# takes the slower way through the "numpy" format.
_LISTS = ("List", "LargeList", "Sequence")
_STRINGS = ("string", "large_string", "binary", "large_binary")
_NUMBERS = ("Value", "ClassLabel", "Array2D", "Array3D", "Array4D", "Array5D")

_FIX = "with the dataset's map or filter."


def adapt(
    obj: Any, class_names: set[str], clock: Clock, *, batched: bool | None
) -> Source | None:
    """Returns a Dataset or IterableDataset of the `datasets` package as a source."""
    del clock
    if "DatasetDict" in class_names or "IterableDatasetDict" in class_names:
        msg = (
            f"a {type(obj).__name__} holds the splits {', '.join(map(repr, obj))}. "
            f"Choose one, as dataset[{next(iter(obj), 'train')!r}]."
        )
        raise DataError(msg)
    if "IterableDataset" in class_names:
        dtypes = {} if obj.features is None else _dtypes(dict(obj.features))
        readers: set[_Pass] = set()
        return IteratorSource(lambda epoch: _Pass(obj, dtypes, epoch, readers), batched)
    if "Dataset" not in class_names:
        return None
    refuse_batched("a Hugging Face Dataset", batched=batched)
    return _dataset_rows(obj)


def _dataset_rows(dataset: Any) -> Rows:
    """Returns a Dataset as a source with random access, in the user's format if any."""
    kind, names = dataset.format["type"], dataset.format["columns"]
    plain, arrays = [], dataset
    if kind in (None, "arrow", "pandas", "polars"):  # those of tables hold no arrays
        dtypes = {name: _dtypes(dataset.features[name]).values() for name in names}
        # By identity: to NumPy, a dtype of None equals float64.
        plain = [name for name in names if all(d is not None for d in dtypes[name])]
        others = [name for name in names if name not in plain]
        arrays = dataset.with_format("numpy", columns=others)
    tables = dataset.with_format("arrow", columns=plain)

    def read(indices: np.ndarray, epoch: int) -> PyTree:
        del epoch
        columns: dict[str, PyTree] = {}
        if plain:
            table = tables[indices.tolist()]
            for name in table.column_names:
                columns[name] = _column(table.column(name).combine_chunks(), name)
        if len(plain) < len(names):
            columns |= arrays[indices.tolist()]
        return as_batch(_as_arrays(columns, {}))[0]

    return Rows(len(dataset), read)


class _Pass(Iterator[PyTree]):
    """The elements of one pass over an IterableDataset, with lists as arrays.

    A dataset keeps a single position, which is also where its next iteration starts. So
    it is set when a pass starts reading, and trusted only while no other pass reads:
    `readers` are those that have read since the latest of them started.
    """

    def __init__(
        self, dataset: Any, dtypes: Dtypes, epoch: int, readers: "set[_Pass]"
    ) -> None:
        self._dataset, self._dtypes, self._epoch = dataset, dtypes, epoch
        self._readers, self._can_seek = readers, _can_seek(dataset)
        self._iterator: Any = None
        self._start: JSON = "start"  # where nothing is read yet, and there is no state

    def __next__(self) -> PyTree:
        if self._iterator is None:
            self._dataset.set_epoch(self._epoch)
            # None makes the dataset forget the position of an earlier pass.
            state = None if self._start == "start" else self._start
            self._dataset.load_state_dict(state)
            self._readers.clear()
            self._iterator = iter(self._dataset)
        self._readers.add(self)
        return _as_arrays(next(self._iterator), self._dtypes)

    def get_state(self) -> JSON:
        if self._iterator is None:
            return self._start
        if not self._can_seek or self._readers != {self}:
            return None
        # A copy: the dataset later changes the object that it returns.
        return json.loads(json.dumps(self._dataset.state_dict()))

    def set_state(self, state: JSON) -> None:
        self._start, self._iterator = state, None

    def close(self) -> None:
        self._iterator = iter(())


def _can_seek(dataset: object) -> bool:
    """Returns whether a dataset's own state leads to the same examples again.

    A shuffle buffer is refilled after resuming, with other examples, and no public
    attribute reveals whether there is one. `_ex_iterable` is private: without it, or
    with other names in it, states are not trusted, and resuming asks for `skip=True`.
    `test_an_iterable_dataset_of_hugging_face_resumes_exactly` notices.
    """
    steps = [getattr(dataset, "_ex_iterable", None)]
    for step in steps:
        name = type(step).__name__
        if step is None or ("Shuffled" in name and "Buffer" in name):
            return False
        inner = getattr(step, "ex_iterable", None)
        steps += getattr(step, "ex_iterables", ()) if inner is None else [inner]
    return True


def _as_arrays(node: Any, dtypes: Dtypes, path: str = "") -> PyTree:
    """Returns an example or a batch with its lists as arrays."""
    if isinstance(node, dict):
        paths = {name: f"{path}/{name}".lstrip("/") for name in node}
        return {k: _as_arrays(inner, dtypes, paths[k]) for k, inner in node.items()}
    if isinstance(node, (bool, int, float)):
        return np.asarray(node, dtypes.get(path))[()]
    is_objects = isinstance(node, np.ndarray) and node.dtype == object
    if not isinstance(node, list) and not is_objects:
        return node
    values = np.asarray(node, object)
    kinds = {type(value) for value in values.flat}
    problem = ""
    if dict in kinds:
        problem = (
            "is a list of structures, which has no columns. Make arrays of their "
            f"fields {_FIX}"
        )
    elif type(None) in kinds:  # which NumPy would turn into NaN
        problem = f"has rows that are None. Fill them in, or leave them out, {_FIX}"
    elif kinds & {list, np.ndarray}:
        problem = f"is ragged: items differ in shape. Pad or crop them to one, {_FIX}"
    if problem:
        msg = f"{leaf_text(path)} {problem}"
        raise DataError(msg)
    is_strings = bool(kinds) and kinds <= {str, bytes}
    return values if is_strings else np.asarray(node, dtypes.get(path))


def _column(column: Any, path: str) -> PyTree:
    """Returns a column of an Arrow table as arrays with one row per example."""
    if hasattr(column, "storage"):  # an extension type, such as Array2D
        return _column(column.storage, path)
    if column.null_count:
        msg = (
            f"{leaf_text(path)} has rows that are None. Fill them in, or leave them "
            f"out, {_FIX}"
        )
        raise DataError(msg)
    if str(column.type).startswith("struct"):
        fields = [column.type.field(i).name for i in range(column.type.num_fields)]
        return {name: _column(column.field(name), f"{path}/{name}") for name in fields}
    if not hasattr(column, "value_lengths"):
        return column.to_numpy(zero_copy_only=False)
    lengths = set(column.value_lengths().to_pylist())
    if len(lengths) > 1:
        msg = (
            f"{leaf_text(path)} is ragged: rows have lengths from {min(lengths)} to "
            f"{max(lengths)}. Pad or crop them to one, {_FIX}"
        )
        raise DataError(msg)
    # One array of all items, which reshapes to rows without a Python loop.
    items = _column(column.flatten(), path)
    return items.reshape(len(column), -1, *items.shape[1:])


def _dtypes(feature: Any, path: str = "") -> dict[str, np.dtype | None]:
    """Returns the dtypes of a feature's values as arrays, by path."""
    if isinstance(feature, dict):
        dtypes: dict[str, np.dtype | None] = {}
        for name, inner in feature.items():
            dtypes |= _dtypes(inner, f"{path}/{name}".lstrip("/"))
        return dtypes
    while isinstance(feature, list) or type(feature).__name__ in _LISTS:
        feature = feature[0] if isinstance(feature, list) else feature.feature
    if getattr(feature, "dtype", "") in _STRINGS:
        return {path: np.dtype(object)}
    try:
        is_number = type(feature).__name__ in _NUMBERS
        return {path: np.dtype(feature.dtype) if is_number else None}
    except TypeError:
        return {path: None}
