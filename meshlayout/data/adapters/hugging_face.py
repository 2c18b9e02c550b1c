"""Hugging Face's datasets as sources.

Rows come from Arrow tables, which keep the dtypes of the features: the "numpy" format
turns all numbers into int64 and float32. Lists become arrays; structures inside lists
(a list of dicts) have no columns, and are left to the user's own map.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from meshlayout._annotations import PyTree
from meshlayout.data.adapters.arrays import refuse_batched
from meshlayout.data.adapters.iterables import IteratorStream
from meshlayout.data.clock import Clock
from meshlayout.data.examples import as_batch, leaf_text
from meshlayout.data.protocols import JSON, Source
from meshlayout.errors import DataError


# The place before the first example, which a dataset names only after it.
_START = "start"


def adapt(obj: Any, clock: Clock, *, batched: bool | None) -> Source | None:
    """Returns a Hugging Face object as a source, or None if it is of another kind.

    Args:
        obj: A Dataset or IterableDataset of the `datasets` package.
        clock: Not needed here.
        batched: Whether an IterableDataset yields batches; None infers it.

    Raises:
        DataError: If it holds several splits, is formatted as tables, or is a Dataset
            with `batched=True`.
    """
    del clock
    kinds = [kind.__name__ for kind in type(obj).__mro__]
    if "DatasetDict" in kinds or "IterableDatasetDict" in kinds:
        msg = (
            f"a {type(obj).__name__} holds the splits {', '.join(map(repr, obj))}. "
            f"Choose one, as dataset[{next(iter(obj), 'train')!r}]."
        )
        raise DataError(msg)
    if "IterableDataset" in kinds:
        return HuggingFaceStream(obj, batched=batched)
    if "Dataset" not in kinds:
        return None
    refuse_batched("a Hugging Face Dataset", batched=batched)
    return HuggingFaceRows(obj)


class HuggingFaceRows:
    """A Hugging Face Dataset as a source of rows.

    Without a format of the user's, numbers come straight from the Arrow table, in the
    dtypes of its features; images and other decoded features as NumPy arrays.

    Args:
        dataset: The dataset.

    Raises:
        DataError: If it is formatted as tables.
    """

    def __init__(self, dataset: Any) -> None:
        self._length = len(dataset)
        self._readers: list[Callable[[list[int]], Mapping[str, Any]]] = []
        kind, names = dataset.format["type"], dataset.format["columns"]
        if kind in ("arrow", "pandas", "polars"):
            msg = (
                f"the Hugging Face dataset is formatted as {kind!r}, which does not "
                "give arrays. Use with_format('numpy')."
            )
            raise DataError(msg)
        if kind is not None:
            self._readers.append(lambda rows: dataset[rows])
            return
        plain = [name for name in names if _is_plain(dataset.features[name])]
        decoded = [name for name in names if name not in plain]
        if plain:
            table = dataset.with_format("arrow", columns=plain)
            self._readers.append(lambda rows: _columns(table[rows]))
        if decoded:
            arrays = dataset.with_format("numpy", columns=decoded)
            self._readers.append(lambda rows: arrays[rows])

    def __len__(self) -> int:
        return self._length

    def read_rows(self, indices: np.ndarray, epoch: int) -> PyTree:
        """Returns rows, in the order asked for."""
        del epoch
        columns: dict[str, Any] = {}
        for reader in self._readers:
            columns.update(reader(indices.tolist()))
        rows, _ = as_batch(_as_arrays(columns, {}))
        return rows


class HuggingFaceStream:
    """A Hugging Face IterableDataset as a stream.

    Args:
        dataset: The dataset.
        batched: Whether its elements are batches; None infers it from them.
    """

    num_rows = None

    def __init__(self, dataset: Any, *, batched: bool | None) -> None:
        self._dataset, self.batched = dataset, batched
        self._passes = _Passes()
        features = dataset.features
        self._dtypes = {} if features is None else _dtypes(features)

    def open(self, epoch: int) -> IteratorStream:
        """Begins a pass, and sets the epoch of a dataset that shuffles."""
        return IteratorStream(
            _HuggingFacePass(self._dataset, self._dtypes, epoch, self._passes)
        )


class _Passes:
    """Which pass of a dataset, which keeps the place of one, was begun last."""

    def __init__(self) -> None:
        self._latest: object = None
        self._is_mixed = False

    def begin(self, each: object) -> None:
        self._latest, self._is_mixed = each, False

    def read(self, each: object) -> None:
        self._is_mixed = self._is_mixed or each is not self._latest

    def knows(self, each: object) -> bool:
        return each is self._latest and not self._is_mixed


class _HuggingFacePass(Iterator[PyTree]):
    """The elements of one pass, lists as arrays."""

    def __init__(
        self, dataset: Any, dtypes: dict[str, Any], epoch: int, passes: _Passes
    ) -> None:
        self._dataset, self._dtypes, self._epoch = dataset, dtypes, epoch
        self._passes = passes
        self._knows_place = _knows_place(dataset)
        self._iterator: Any = None
        self._begin: JSON = _START  # where the first element is read from
        self._is_closed = False

    def __next__(self) -> PyTree:
        if self._is_closed:
            raise StopIteration
        if self._iterator is None:
            self._dataset.set_epoch(self._epoch)
            # Without a place, the one of an earlier pass is forgotten.
            place = None if self._begin == _START else self._begin
            self._dataset.load_state_dict(place)
            self._passes.begin(self)
            self._iterator = iter(self._dataset)
        self._passes.read(self)
        return _as_arrays(next(self._iterator), self._dtypes)

    def get_state(self) -> JSON:
        if self._iterator is None:
            return self._begin
        if not self._knows_place or not self._passes.knows(self):
            return None
        # A copy: the dataset later changes the object that it returns.
        return json.loads(json.dumps(self._dataset.state_dict()))

    def set_state(self, state: JSON) -> None:
        self._begin, self._iterator = state, None

    def close(self) -> None:
        self._is_closed, self._iterator = True, None


def _knows_place(dataset: object) -> bool:
    """Returns whether a dataset's own state leads to the same examples.

    A shuffle buffer is refilled after a resume, with other examples, and no public
    attribute reveals whether there is one. `_ex_iterable` is private: without it,
    or with other names in it, places are not trusted, and resuming asks for
    `skip=True`. `test_an_iterable_dataset_of_hugging_face_resumes_exactly` notices.
    """
    steps = [getattr(dataset, "_ex_iterable", None)]
    names = []
    while steps:
        step = steps.pop()
        if step is None:
            return False
        names.append(type(step).__name__)
        inner = getattr(step, "ex_iterable", None)
        steps += [inner] if inner is not None else getattr(step, "ex_iterables", ())
    return not any("Shuffled" in name and "Buffer" in name for name in names)


def _as_arrays(node: Any, dtypes: Mapping[str, Any], path: str = "") -> PyTree:
    """Returns an example or a batch with its lists as arrays.

    Args:
        node: A dict of columns, or a part of one.
        dtypes: By path, the dtypes of Python numbers.
        path: Where the node is.

    Raises:
        DataError: If it holds structures inside lists, or values are missing.
    """
    if isinstance(node, dict):
        return {
            name: _as_arrays(inner, dtypes, f"{path}/{name}" if path else name)
            for name, inner in node.items()
        }
    first = _first(node)
    if isinstance(first, dict):
        msg = (
            f"{leaf_text(path)} is a list of structures, which has no columns. Make "
            "arrays of their fields with the dataset's map."
        )
        raise DataError(msg)
    if isinstance(node, (bool, int, float)):
        return np.asarray(node, dtypes.get(path))[()]
    if not isinstance(node, list):
        return node
    if isinstance(first, (str, bytes)):
        return np.asarray(node, object)
    if first is None:
        raise DataError(_missing(path, "some"))
    if isinstance(first, (bool, int, float, complex)):
        return np.asarray(node, dtypes.get(path))
    return np.stack([np.asarray(item) for item in node])


def _first(items: object) -> Any:
    """Returns the first item of nested lists, or an empty list."""
    if isinstance(items, np.ndarray):
        return items.flat[0] if items.dtype == object and items.size else None
    while isinstance(items, list) and items:
        items = items[0]
    return items


def _missing(path: str, count: str) -> str:
    return (
        f"{path}: {count} of the rows asked for are None. Fill them in, or leave them "
        "out, with the dataset's map or filter."
    )


# Columns of Arrow tables as arrays with one row per example


def _columns(table: Any) -> dict[str, PyTree]:
    """Returns the columns of a table by name, each a tree of arrays.

    Raises:
        DataError: If values are missing, or rows have different lengths.
    """
    return {
        name: _column(table.column(name).combine_chunks(), name)
        for name in table.column_names
    }


def _column(column: Any, path: str) -> PyTree:
    if column.null_count:
        raise DataError(_missing(path, str(column.null_count)))
    if hasattr(column, "storage"):
        return _column(column.storage, path)
    if str(column.type).startswith("struct"):
        fields = [column.type.field(i).name for i in range(column.type.num_fields)]
        return {name: _column(column.field(name), f"{path}/{name}") for name in fields}
    if hasattr(column, "flatten") and hasattr(column, "value_lengths"):
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        if len(set(lengths.tolist())) > 1:
            msg = (
                f"{path}: rows have different lengths, {lengths.min()} and "
                f"{lengths.max()}. Pad or crop them to one with the dataset's map."
            )
            raise DataError(msg)
        inner = _column(column.flatten(), path)
        return inner.reshape(len(column), -1, *inner.shape[1:])
    return column.to_numpy(zero_copy_only=False)


# Features: what a column holds


def _item(feature: Any) -> Any:
    """Returns the feature of the items inside lists."""
    while True:
        if isinstance(feature, list):
            feature = feature[0]
        elif type(feature).__name__ in ("List", "LargeList", "Sequence"):
            feature = feature.feature
        else:
            return feature


def _number_dtype(feature: Any) -> np.dtype | None:
    """Returns the dtype of a feature of numbers, or None if it is of another kind."""
    feature = _item(feature)
    kind = type(feature).__name__
    if kind not in ("Value", "ClassLabel", "Array2D", "Array3D", "Array4D", "Array5D"):
        return None
    try:
        return np.dtype(feature.dtype)
    except TypeError:  # Arrow's types that NumPy does not have, as strings
        return None


def _is_plain(feature: Any) -> bool:
    """Returns whether a feature is read from the Arrow table."""
    if isinstance(feature, dict):
        return all(map(_is_plain, feature.values()))
    if isinstance(_item(feature), dict):
        return False  # structures inside lists
    return getattr(feature, "dtype", "") == "string" or (
        _number_dtype(feature) is not None
    )


def _dtypes(features: Any, prefix: str = "") -> dict[str, np.dtype]:
    """Returns by path the dtypes of a dataset's numbers."""
    dtypes: dict[str, np.dtype] = {}
    for name, feature in features.items():
        if isinstance(feature, dict):
            dtypes |= _dtypes(feature, f"{prefix}{name}/")
        elif (dtype := _number_dtype(feature)) is not None:
            dtypes[prefix + name] = dtype
    return dtypes
