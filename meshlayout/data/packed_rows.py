"""Grain's packing of documents into rows.

Imported by `pack_sequences` alone, since Grain is optional. Documents travel as arrays
of shape (tokens, columns): Grain packs one feature, and targets and document ids stay
with their tokens. A position is Grain's, a few numbers: where the documents were when
the open rows were begun, and how many of these rows were yielded.
"""

import functools
import importlib
import itertools
import sys
from typing import Any

import numpy as np

from meshlayout import _checks
from meshlayout.data.adapters import iterables
from meshlayout.data.protocols import JSON
from meshlayout.errors import DataError


grain: Any = importlib.import_module("grain")

# Without threads that read ahead.
_IN_ORDER = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)

# The columns of a document's array.
_TOKEN, _TARGET, _HAS_TARGET, _DOCUMENT, _POSITION = range(5)

# The largest token: they are int32, as JAX has no larger integers by default.
_LARGEST = 2**31 - 1


class PackedRows(grain.IterDataset):
    """Packed rows. `recipe` has the arguments of `pack_sequences` that are numbers."""

    def __init__(self, documents: Any, encode: Any, recipe: dict[str, Any]) -> None:
        super().__init__()
        self._encode, self.recipe = encode, recipe
        self._documents, self._epochs = documents, itertools.count()
        self._source = None
        if isinstance(documents, (list, tuple, np.ndarray)):
            self.recipe = recipe | {"documents": len(documents)}
        elif isinstance(documents, grain.MapDataset):
            self._documents = documents.to_iter_dataset(_IN_ORDER)
        elif not isinstance(documents, grain.IterDataset):
            self._source = iterables.adapt(documents, batched=False)
        self.can_seek = self._source is None

    def __iter__(self) -> "PackedIterator":
        return PackedIterator(self)

    def packed(self) -> Any:
        """Starts a pass of Grain's over rows of columns."""
        recipe, grained = self.recipe, grain.experimental
        columns = functools.partial(_columns, self._encode, recipe["separator"])
        documents: Any = self._documents
        if isinstance(documents, grain.IterDataset):
            rows = documents.map_with_index(columns)
        else:
            source, epoch = self._source, next(self._epochs)
            stream = None if source is None else source.begin(epoch)

            def row(number: int) -> dict[str, np.ndarray]:
                # The StopIteration of a stream ends the pass of Grain, too.
                document = documents[number] if stream is None else next(stream)
                return columns(number, document)

            size = len(documents) if stream is None else sys.maxsize
            rows = grain.MapDataset.range(size).to_iter_dataset(_IN_ORDER).map(row)
        rows = rows.filter(lambda row: len(row["columns"]) > 0)
        struct = {"columns": recipe["length"]}
        if recipe["mode"] == "chunk":
            return iter(grained.ConcatThenSplitIterDataset(rows, length_struct=struct))
        return iter(
            grained.FirstFitPackIterDataset(
                grained.FlatMapIterDataset(rows, _Cut(recipe["length"])),
                length_struct=struct,
                num_packing_bins=recipe["open_rows"],
                shuffle_bins=False,
            )
        )


class PackedIterator(grain.DatasetIterator):
    """One pass over packed rows, on Grain's."""

    def __init__(self, dataset: PackedRows) -> None:
        super().__init__()
        self._dataset, self._recipe = dataset, dataset.recipe
        self._begin()

    def _begin(self) -> None:
        self._rows = iterables.IteratorStream(self._dataset.packed())
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
        """Returns the position after the last row; None if it cannot be set."""
        state = {"packed": self._recipe, "rows": self._state}
        return state if self._dataset.can_seek else None

    def set_state(self, state: JSON) -> None:
        """Moves to a position; raises DataError if it is not one of these rows."""
        if not self._dataset.can_seek:
            raise DataError(
                "these documents can only be read in order. Give a list or a Grain "
                "dataset, or set the state of distribute_dataset's iterator."
            )
        before = state.get("packed") if isinstance(state, dict) else None
        if before != self._recipe:
            msg = f"the state is of rows packed with {before}, not with {self._recipe}."
            raise DataError(msg)
        # New iterators: those of Grain's keep what they have read of a document.
        self._begin()
        self._rows.set_state(state["rows"])
        self._state = self._rows.get_state()


class _Cut(grain.experimental.FlatMapTransform):
    """Cuts documents that are longer than a row into full rows and a rest."""

    def __init__(self, length: int) -> None:
        self._length = length

    def flat_map(self, element: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        columns = element["columns"]
        starts = range(0, len(columns), self._length)
        return [{"columns": columns[at : at + self._length]} for at in starts]


def _columns(
    encode: Any, separator: int | None, number: int, document: Any
) -> dict[str, np.ndarray]:
    """Returns a document as an array of columns."""
    tokens = _tokens(document, encode, number)
    if separator is not None:
        tokens = np.append(tokens, np.int32(separator))
    columns = np.zeros((len(tokens), 5), np.int32)
    columns[:, _TOKEN] = tokens
    columns[:-1, _TARGET] = tokens[1:]
    columns[:-1, _HAS_TARGET] = 1
    columns[:, _DOCUMENT] = number
    columns[:, _POSITION] = np.arange(len(tokens))
    return {"columns": columns}


def _tokens(document: Any, encode: Any, number: int) -> np.ndarray:
    """Returns the tokens, int32, of a text, of its bytes, or of an array of them."""
    with _checks.noted(f"This was raised at document {number}."):
        if isinstance(document, np.ndarray) and document.ndim == 0:
            document = document.item()  # a text in an array, as TFDS yields it
        if isinstance(document, bytes) and encode is not None:
            document = document.decode()
        if isinstance(document, str):
            document = document.encode() if encode is None else encode(document)
        if isinstance(document, bytes):
            document = np.frombuffer(document, np.uint8)
        values = np.asarray(document)
    if values.ndim == 1 and not values.size:  # a float64 array to NumPy
        return np.zeros(0, np.int32)
    is_array = values.ndim == 1 and values.dtype.kind in "iu"
    if not is_array or values.min() < 0 or values.max() > _LARGEST:
        raise DataError(
            f"document {number} gives {_checks.shown(document)}; a document is a text, "
            f"bytes, or a 1-D array of integers from 0 to {_LARGEST}."
        )
    return values.astype(np.int32)
