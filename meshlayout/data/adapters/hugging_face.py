"""Hugging Face's data sets as sources."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from meshlayout.data.adapters.arrays import refuse_batches
from meshlayout.data.adapters.arrow import columns
from meshlayout.data.adapters.streams import Elements, ElementStream, as_block
from meshlayout.data.clock import Clock
from meshlayout.data.source import Source, Stream
from meshlayout.data.stacking import stack
from meshlayout.errors import DataError


Array = np.ndarray[Any, Any]

# Formats whose elements are arrays, or become ones.
_FORMATS = ("numpy", "torch", "tensorflow", "jax", "custom")


# The place before the first example, which a data set names only after it.
_START = "start"


def adapt(obj: Any, clock: Clock, *, batched: bool | None) -> Source | None:
    """Returns a Hugging Face object as a source, or None if it is of another kind.

    Args:
        obj: A Dataset or IterableDataset of the `datasets` package.
        clock: Not needed here.
        batched: Whether an IterableDataset gives batches; None looks for a batch step.

    Raises:
        DataError: If it holds several splits, is formatted as tables, or is a Dataset
            that is said to give batches.
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
        if batched is None:
            batched = _gives_batches(obj)
        return IterableStream(obj, batched=batched)
    if "Dataset" not in kinds:
        return None
    refuse_batches("a Hugging Face Dataset", batched)
    return DatasetRows(obj)


class DatasetRows:
    """A Hugging Face Dataset as a source of rows.

    Without a format of the user's, numbers come straight from the Arrow table, in the
    dtypes of its features; images and other decoded features as NumPy arrays.

    Args:
        dataset: The data set.

    Raises:
        DataError: If it is formatted as tables.
    """

    def __init__(self, dataset: Any) -> None:
        self._length = len(dataset)
        self._readers: list[Callable[[list[int]], Mapping[str, Any]]] = []
        kind = dataset.format["type"]
        names = dataset.format["columns"]
        if kind is not None:
            _check_format(kind)
            self._readers.append(lambda rows: dataset[rows])
            return
        plain = [name for name in names if _is_plain(dataset.features[name])]
        decoded = [name for name in names if name not in plain]
        if plain:
            table = dataset.with_format("arrow", columns=plain)
            self._readers.append(lambda rows: columns(table[rows]))
        if decoded:
            arrays = dataset.with_format("numpy", columns=decoded)
            self._readers.append(lambda rows: arrays[rows])

    def __len__(self) -> int:
        return self._length

    def rows(self, indices: Array) -> Any:
        """Returns rows, in the order asked for."""
        numbers = indices.tolist()
        found: dict[str, Any] = {}
        for reader in self._readers:
            found.update(reader(numbers))
        return as_block(_as_arrays(found, {})).rows


class IterableStream:
    """A Hugging Face IterableDataset as a stream.

    Args:
        dataset: The data set.
        batched: Whether its elements are batches.

    Raises:
        DataError: If it is formatted as tables.
    """

    def __init__(self, dataset: Any, *, batched: bool) -> None:
        self.num_rows: int | None = None
        formatting = getattr(dataset, "_formatting", None)
        kind = getattr(formatting, "format_type", None)
        if kind is not None:
            _check_format(kind)
        self._dtypes: dict[str, Any] = {}
        self._dataset, self._batched = dataset, batched
        self._passes = _Passes()
        if kind is None and dataset.features is not None and not batched:
            self._dtypes = _dtypes(dataset.features)

    def open(self, epoch: int) -> Stream:
        """Begins a pass; a data set that shuffles is told the epoch."""
        elements = _Examples(self._dataset, self._dtypes, epoch, self._passes)
        return ElementStream(elements, batched=self._batched, dtypes=self._dtypes)


class _Passes:
    """Which pass a data set, which keeps the place of one, has begun last."""

    def __init__(self) -> None:
        self.latest: Any = None
        self.is_mixed = False

    def begin(self, one: Any) -> None:
        self.latest, self.is_mixed = one, False

    def read(self, one: Any) -> None:
        self.is_mixed = self.is_mixed or one is not self.latest

    def knows(self, one: Any) -> bool:
        return one is self.latest and not self.is_mixed


class _Examples(Elements):
    """The examples of one pass, lists as arrays."""

    def __init__(
        self, dataset: Any, dtypes: dict[str, Any], epoch: int, passes: _Passes
    ) -> None:
        self._dataset, self._dtypes, self._epoch = dataset, dtypes, epoch
        self._passes = passes
        # A buffer that shuffles is filled anew after a resume, with other examples.
        self._forgets = any(
            "BufferShuffled" in type(step).__name__
            for step in _steps(getattr(dataset, "_ex_iterable", None))
        )
        self._iterator: Any = None
        self._begin: Any = _START  # where the first example is read from
        self._is_closed = False

    def __next__(self) -> Any:
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

    def get_state(self) -> Any:
        if self._iterator is None:
            return self._begin
        if not self._passes.knows(self) or self._forgets:
            return None
        # A copy: the data set goes on to change what it returns.
        return json.loads(json.dumps(self._dataset.state_dict()))

    def set_state(self, state: Any) -> None:
        self._begin, self._iterator = state, None

    def close(self) -> None:
        self._is_closed, self._iterator = True, None


def _gives_batches(dataset: Any) -> bool:
    """Tells whether the last step that changes the number of rows is `batch`."""
    for step in _steps(getattr(dataset, "_ex_iterable", None)):
        if getattr(step, "batched", False):
            function = getattr(step, "function", None)
            function = getattr(function, "func", function)  # inside of a partial
            name = f"{function.__module__}.{getattr(function, '__name__', '')}"
            return name.startswith("datasets.") and "._batch" in name
    return False


def _steps(step: Any) -> Iterator[Any]:
    """Yields a step of an IterableDataset, and those that it reads from."""
    yield step
    inner = getattr(step, "ex_iterable", None)
    for one in [inner] if inner is not None else getattr(step, "ex_iterables", ()):
        yield from _steps(one)


def _check_format(kind: str) -> None:
    if kind not in _FORMATS:
        msg = (
            f"the Hugging Face data set is formatted as {kind!r}, which gives no "
            "arrays. Use with_format('numpy')."
        )
        raise DataError(msg)


def _as_arrays(node: Any, dtypes: dict[str, Any], path: str = "") -> Any:
    """Returns an example or a batch with its lists as arrays.

    Structures in lists become dicts of arrays, one for each of their fields.

    Args:
        node: A dict of columns, or what is inside of it.
        dtypes: By path, the dtypes of numbers that carry none of their own.
        path: Where the node is.
    """
    if isinstance(node, dict):
        return {
            name: _as_arrays(inner, dtypes, f"{path}/{name}" if path else name)
            for name, inner in node.items()
        }
    is_dicts = isinstance(node, np.ndarray) and isinstance(_first(node), dict)
    items = node.tolist() if is_dicts else node
    if not isinstance(items, list):
        return node
    first = _first(items)
    if isinstance(first, dict):
        return {
            name: _as_arrays(_field(items, name, path), dtypes, f"{path}/{name}")
            for name in first
        }
    if isinstance(first, (str, bytes)):
        return np.asarray(items, object)
    if first is None or isinstance(first, (bool, int, float, complex, list)):
        return np.asarray(items, dtypes.get(path))
    rows = [_as_arrays(item, dtypes, path) for item in items]
    return stack([{path: row} for row in rows])[path]


def _first(items: Any) -> Any:
    """Returns the first item of nested lists, or an empty list."""
    if isinstance(items, np.ndarray):
        return items.flat[0] if items.dtype == object and items.size else None
    while isinstance(items, list) and items:
        items = items[0]
    return items


def _field(items: list[Any], name: str, path: str) -> list[Any]:
    """Returns a field of all structures in nested lists."""
    if None in items:
        msg = (
            f"{path}: some of the rows asked for are None. Fill them in, or leave them "
            "out, with the data set's map or filter."
        )
        raise DataError(msg)
    return [
        _field(item, name, path) if isinstance(item, list) else item[name]
        for item in items
    ]


# Features: what a column holds


def _item(feature: Any) -> Any:
    """Returns the feature of what is inside of lists."""
    while True:
        if isinstance(feature, list):
            feature = feature[0]
        elif type(feature).__name__ in ("List", "LargeList", "Sequence"):
            feature = feature.feature
        else:
            return feature


def _number_dtype(feature: Any) -> Any:
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
    if isinstance(feature, dict):
        return all(map(_is_plain, feature.values()))
    return getattr(feature, "dtype", "") == "string" or (
        _number_dtype(feature) is not None
    )


def _dtypes(features: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, feature in features.items():
        item = _item(feature)
        if isinstance(item, dict):
            found |= _dtypes(item, f"{prefix}{name}/")
        elif (dtype := _number_dtype(item)) is not None:
            found[prefix + name] = dtype
    return found
