"""Grain's packing of documents into rows.

Imported by `pack_sequences` alone, since Grain is optional. Documents travel as arrays
of shape (tokens, columns): Grain packs one feature, and targets and document ids stay
with their tokens. A position is Grain's, a few numbers: where the documents were when
the open rows were begun, and how many of these rows were yielded.
"""

import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from meshlayout import _checks
from meshlayout.data.adapters import iterables
from meshlayout.data.examples import stack
from meshlayout.data.protocols import JSON
from meshlayout.errors import DataError


grain: Any = importlib.import_module("grain")

# The columns of a document's array.
_TOKEN, _TARGET, _HAS_TARGET, _DOCUMENT, _POSITION = range(5)

# The largest token: they are int32, as JAX has no larger integers by default.
_LARGEST = 2**31 - 1


class PackedRows(grain.IterDataset):
    """Packed rows: a Grain dataset, and a `StreamSource` of single examples.

    `encode` encodes a text, and None takes its bytes; `recipe` has the other arguments
    of `pack_sequences`.
    """

    batched = False
    num_rows = None  # not known before they are packed

    def __init__(self, documents: Any, encode: Any, recipe: dict[str, Any]) -> None:
        super().__init__()
        self.documents, self.encode, self.recipe = documents, encode, recipe
        source = iterables.adapt(documents, batched=False)
        self._begin, self._passes = source.begin, itertools.count()

    def __iter__(self) -> "PackedIterator":
        return PackedIterator(self)

    def open(self, epoch: int) -> iterables.IteratorStream:
        """Starts a pass; all of them have the same rows, if the documents do."""
        del epoch
        rows = iter(self)
        # An iterator with `set_state` is taken for one that can seek.
        return iterables.IteratorStream(rows if rows.can_seek else (r for r in rows))

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Returns all rows at once, with a first dim for the rows."""
        rows = list(self)
        if not rows:  # a row of another document shows which arrays there would be
            (row,) = PackedRows([[0]], None, self.recipe | {"remainder": "pad"})
            return {name: leaf[None][:0] for name, leaf in row.items()}
        return stack(rows)

    def to_grain(self) -> "PackedRows":
        """Returns the rows as the Grain dataset that they are."""
        return self

    def open_documents(self) -> Iterator[Any]:
        """Returns an iterator over the documents, with `set_state` if it can seek."""
        if isinstance(self.documents, grain.MapDataset):  # None is one that it filters
            size = len(self.documents)
            return iterables.NumberedItems(self.documents, size, skip_none=True)
        return self._begin(next(self._passes))


class PackedIterator(grain.DatasetIterator):
    """One pass over packed rows; `can_seek` tells whether it has positions."""

    def __init__(self, dataset: PackedRows) -> None:
        super().__init__()
        self._dataset, self._recipe = dataset, dataset.recipe
        self._rows: Any = None
        self._open()

    def _open(self) -> None:
        documents, length = self._dataset.open_documents(), self._recipe["length"]
        self.can_seek = hasattr(documents, "set_state")
        rows = _Documents(documents, self._dataset.encode, self._recipe["separator"])
        grained, struct = grain.experimental, {"columns": length}
        if self._recipe["mode"] == "pack":
            packed = grained.FirstFitPackIterDataset(
                grained.FlatMapIterDataset(rows, _Cut(length)),
                length_struct=struct,
                num_packing_bins=self._recipe["open_rows"],
                shuffle_bins=False,
            )
        else:
            packed = grained.ConcatThenSplitIterDataset(rows, length_struct=struct)
        self._rows = iterables.IteratorStream(iter(packed))
        self._state = self._rows.get_state()
        self._following: dict[str, np.ndarray] | None = None

    def __next__(self) -> dict[str, np.ndarray]:
        recipe, following = self._recipe, None
        row = next(self._rows) if self._following is None else self._following
        self._state = self._rows.get_state()
        columns, segments = row["columns"], row["columns_segment_ids"]
        is_used = weight = segments > 0
        out = {"tokens": columns[:, _TOKEN]}
        if recipe["mode"] == "pack":
            out |= {"segment_ids": segments, "positions": row["columns_positions"]}
            if recipe["targets"]:
                out["targets"], weight = columns[:, _TARGET], columns[:, _HAS_TARGET]
        elif recipe["targets"]:
            # The target of a chunk's last token is the first one of the next chunk.
            following = next(self._rows, None)
            first = 0 if following is None else following["columns"][0, _TOKEN]
            out["targets"] = np.append(columns[1:, _TOKEN], first)
            weight = np.append(is_used[1:], following is not None)
        self._following = following
        if recipe["remainder"] == "drop" and not is_used[-1]:
            raise StopIteration
        if recipe["document_ids"]:
            out["document_ids"] = np.where(is_used, columns[:, _DOCUMENT], -1)
            out["document_positions"] = columns[:, _POSITION]
        arrays = {name: column.astype(np.int32) for name, column in out.items()}
        return {**arrays, "weight": weight.astype(np.float32)}

    def get_state(self) -> JSON:
        """Returns the position after the last row."""
        return {"packed": self._recipe, "rows": self._state}

    def set_state(self, state: JSON) -> None:
        """Moves to a position; raises DataError if it is not one of these rows."""
        before = state.get("packed") if isinstance(state, dict) else None
        msg = ""
        if before != self._recipe:
            msg = f"the state is of rows packed with {before}, not with {self._recipe}."
        elif not self.can_seek:
            msg = (
                "these documents can only be read in order. Give a list or a Grain "
                "dataset, or set the state of distribute_dataset's iterator."
            )
        if msg:
            raise DataError(msg)
        # New iterators: those of Grain's keep what they have read of a document.
        self._open()
        self._rows.set_state(state["rows"])
        self._state = self._rows.get_state()

    def close(self) -> None:
        """Releases the documents."""
        if self._rows is not None and not self._closed:
            self._rows.close()
        super().close()


class _Documents(grain.IterDataset):
    """Documents that have tokens, as arrays of columns; for one pass."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        self._arguments = arguments

    def __iter__(self) -> "_DocumentIterator":
        return _DocumentIterator(*self._arguments)


class _DocumentIterator(grain.DatasetIterator):
    """One pass over documents; its position is theirs, and how many were read."""

    def __init__(self, documents: Any, encode: Any, separator: int | None) -> None:
        super().__init__()
        self._documents, self._encode = iterables.IteratorStream(documents), encode
        self._end = np.array([] if separator is None else [separator], np.int32)
        self._number = 0

    def __next__(self) -> dict[str, np.ndarray]:
        tokens = np.zeros(0, np.int32)
        while not len(tokens):
            document = _tokens(next(self._documents), self._encode, self._number)
            # Also behind an empty document, so that it still ends the one before it.
            tokens = np.append(document, self._end)
            self._number += 1
        columns = np.zeros((len(tokens), 5), np.int32)
        columns[:, _TOKEN] = tokens
        columns[:-1, _TARGET] = tokens[1:]
        columns[:-1, _HAS_TARGET] = 1
        columns[:, _DOCUMENT] = self._number - 1
        columns[:, _POSITION] = np.arange(len(tokens))
        return {"columns": columns}

    def get_state(self) -> JSON:
        return {"number": self._number, "documents": self._documents.get_state()}

    def set_state(self, state: JSON) -> None:
        self._documents.set_state(state["documents"])
        self._number = state["number"]

    def close(self) -> None:
        if not self._closed:
            self._documents.close()
        super().close()


class _Cut(grain.experimental.FlatMapTransform):
    """Cuts documents that are longer than a row into full rows and a rest."""

    def __init__(self, length: int) -> None:
        self._length = length

    def flat_map(self, element: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        columns = element["columns"]
        starts = range(0, len(columns), self._length)
        return [{"columns": columns[at : at + self._length]} for at in starts]


def _tokens(document: Any, encode: Any, number: int) -> np.ndarray:
    """Returns the tokens, int32, of a text, of its bytes, or of an array of them."""
    if isinstance(document, np.ndarray) and document.ndim == 0:
        document = document.item()  # a text in an array, as TFDS yields it
    with _checks.noted(f"This was raised at document {number}."):
        if isinstance(document, bytes) and encode is not None:
            document = document.decode()
        if isinstance(document, str):
            document = document.encode() if encode is None else encode(document)
        if isinstance(document, bytes):
            document = np.frombuffer(document, np.uint8)
        values = np.asarray(document)
    if values.ndim == 1 and not values.size:  # a float64 array to NumPy
        return np.zeros(0, np.int32)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        msg = (
            f"document {number} gives {_checks.shown(document)}; a document is a text, "
            "bytes, or a 1-D array of integers."
        )
        raise DataError(msg)
    if values.min() < 0 or values.max() > _LARGEST:
        msg = (
            f"document {number} has tokens from {values.min()} to {values.max()}; they "
            f"must be from 0 to {_LARGEST}."
        )
        raise DataError(msg)
    return values.astype(np.int32)
