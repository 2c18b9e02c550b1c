"""Grain's packing of documents into rows.

Imported by `pack_sequences` alone, since Grain is optional. Documents travel as arrays
of shape (tokens, columns): Grain packs one feature, and targets and document ids stay
with their tokens. A position is Grain's, a few numbers: where the documents were when
the open rows were begun, and how many of these rows were yielded.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from meshlayout import _checks
from meshlayout.data.adapters.iterables import IteratorStream, NumberedItems
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

    Args:
        documents: As for `pack_sequences`.
        encode: Encodes a text; None takes its bytes.
        recipe: The other arguments of `pack_sequences`.
    """

    batched = False
    num_rows = None  # not known before they are packed

    def __init__(
        self,
        documents: Any,
        encode: Callable[[str], Any] | None,
        recipe: dict[str, Any],
    ) -> None:
        super().__init__()
        self.encode, self.recipe = encode, recipe
        self._documents, self._is_read = documents, False

    def __iter__(self) -> "PackedIterator":
        return PackedIterator(self)

    def open(self, epoch: int) -> IteratorStream:
        """Starts a pass; all of them have the same rows, if the documents do."""
        del epoch
        rows = iter(self)
        # An iterator with `set_state` is taken for one that can seek.
        return IteratorStream(rows if rows.can_seek else (row for row in rows))

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Returns all rows at once, with a first dim for the rows."""
        rows = list(self)
        if rows:
            return stack(rows)
        # No rows: a row of another document shows which arrays there would be.
        row = next(iter(PackedRows([[0]], None, self.recipe | {"remainder": "pad"})))
        return {name: leaf[None][:0] for name, leaf in row.items()}

    def to_grain(self) -> "PackedRows":
        """Returns the rows themselves, which are a Grain dataset."""
        return self

    def open_documents(self) -> Iterator[Any]:
        """Returns an iterator over the documents, with `set_state` if it can seek."""
        documents = self._documents
        if _is_indexed(documents):
            # In a Grain dataset, None is an item that a filter left out; elsewhere it
            # is a mistake, and refused as a document.
            is_grain = isinstance(documents, grain.MapDataset)
            return NumberedItems(documents, len(documents), skip_none=is_grain)
        # A second pass over an iterator would have no rows, and no error.
        if isinstance(documents, Iterator) and self._is_read:
            msg = (
                f"documents is a {type(documents).__name__}, which can be read once, "
                "and was. Give a list, or a function that returns a new one."
            )
            raise DataError(msg)
        self._is_read = True
        iterable = documents if isinstance(documents, Iterable) else documents()
        if not isinstance(iterable, Iterable):
            msg = (
                f"documents is a function that returned {_checks.shown(iterable)}, and "
                "an iterable of documents is expected."
            )
            raise DataError(msg)
        return iter(iterable)


class PackedIterator(grain.DatasetIterator):
    """One pass over packed rows.

    Attributes:
        can_seek: Whether it moves to a position without reading up to it.
    """

    def __init__(self, dataset: PackedRows) -> None:
        super().__init__()
        self._dataset, self._recipe = dataset, dataset.recipe
        self._begin()

    def _begin(self) -> None:
        length = self._recipe["length"]
        documents = self._dataset.open_documents()
        self.can_seek = hasattr(documents, "set_state")
        rows = _Documents(documents, self._dataset.encode, self._recipe["separator"])
        if self._recipe["mode"] == "pack":
            rows = grain.experimental.FlatMapIterDataset(rows, _Cut(length))
            packed = grain.experimental.FirstFitPackIterDataset(
                rows,
                length_struct={"columns": length},
                num_packing_bins=self._recipe["open_rows"],
                shuffle_bins=False,
            )
        else:
            packed = grain.experimental.ConcatThenSplitIterDataset(
                rows, length_struct={"columns": length}
            )
        self._rows = IteratorStream(iter(packed))
        self._state = self._rows.get_state()
        self._following: dict[str, np.ndarray] | None = None

    def __next__(self) -> dict[str, np.ndarray]:
        row = next(self._rows) if self._following is None else self._following
        self._state = self._rows.get_state()
        is_chunk = self._recipe["mode"] == "chunk"
        if is_chunk and self._recipe["targets"]:
            # The target of a chunk's last token is the first one of the next chunk.
            self._following = next(self._rows, None)
        columns, segments = row["columns"], row["columns_segment_ids"]
        is_used = segments > 0
        if self._recipe["remainder"] == "drop" and not is_used[-1]:
            raise StopIteration
        out = {"tokens": columns[:, _TOKEN], "weight": is_used}
        if not is_chunk:
            out |= {"segment_ids": segments, "positions": row["columns_positions"]}
        if self._recipe["document_ids"]:
            out["document_ids"] = np.where(is_used, columns[:, _DOCUMENT], -1)
            out["document_positions"] = columns[:, _POSITION]
        if self._recipe["targets"] and is_chunk:
            first = 0
            if self._following is not None:
                first = self._following["columns"][0, _TOKEN]
            out["targets"] = np.append(columns[1:, _TOKEN], first)
            out["weight"] = np.append(is_used[1:], self._following is not None)
        elif self._recipe["targets"]:
            out["targets"] = columns[:, _TARGET]
            out["weight"] = columns[:, _HAS_TARGET]
        arrays = {name: column.astype(np.int32) for name, column in out.items()}
        return {**arrays, "weight": out["weight"].astype(np.float32)}

    def get_state(self) -> JSON:
        return {"packed": self._recipe, "rows": self._state}

    def set_state(self, state: JSON) -> None:
        before = state.get("packed") if isinstance(state, dict) else None
        if before != self._recipe:
            msg = (
                f"the state is of rows packed with {before}, and these rows are packed "
                f"with {self._recipe}: its position is not among them."
            )
            raise DataError(msg)
        if not self.can_seek:
            msg = (
                "these documents can only be read in order. Give a list or a Grain "
                "dataset; or give the rows to distribute_dataset, whose iterator's "
                "set_state(state, skip=True) reads and drops them up to the position."
            )
            raise DataError(msg)
        # New iterators: those of Grain's keep what they have read of a document.
        self._begin()
        self._rows.set_state(state["rows"])
        self._state = self._rows.get_state()

    def close(self) -> None:
        if not self._closed:
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

    def __init__(
        self,
        documents: Iterator[Any],
        encode: Callable[[str], Any] | None,
        separator: int | None,
    ) -> None:
        super().__init__()
        self._documents, self._encode = IteratorStream(documents), encode
        self._end = [] if separator is None else [separator]
        self._number = 0

    def __next__(self) -> dict[str, np.ndarray]:
        tokens = np.zeros(0, np.int32)
        while not len(tokens):
            name = f"document {self._number}"
            document = _as_tokens(next(self._documents), self._encode, name)
            # Also behind an empty document, so that it still ends the one before it.
            tokens = np.append(document, _checked(self._end, "separator="))
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


def _as_tokens(
    document: Any, encode: Callable[[str], Any] | None, name: str
) -> np.ndarray:
    """Returns a document's tokens, int32.

    Args:
        document: A text, its bytes, or tokens.
        encode: Encodes a text; None takes its bytes.
        name: What a message calls the document.
    """
    if isinstance(document, np.ndarray) and document.ndim == 0:
        document = document.item()  # a text in an array, as TFDS yields it
    if isinstance(document, dict):
        msg = (
            f"{name} is a dict with the keys {', '.join(map(repr, document))}. Give "
            "the texts alone: for instance dataset.map(lambda record: record['text'])."
        )
        raise DataError(msg)
    if not isinstance(document, (str, bytes)):
        return _checked(document, name)
    try:
        if encode is None:
            data = document.encode() if isinstance(document, str) else document
            return np.frombuffer(data, np.uint8).astype(np.int32)
        text = document.decode() if isinstance(document, bytes) else document
    except UnicodeError as error:
        msg = (
            f"{name} is not UTF-8: {error}. Replace what cannot be written, with "
            "text.encode('utf-8', 'replace')."
        )
        raise DataError(msg) from None
    with _checks.noted(f"This was raised by tokenizer= at {name}."):
        tokens = encode(text)
    return _checked(tokens, f"the tokenizer, given {name},")


def _checked(tokens: Any, what: str) -> np.ndarray:
    """Returns tokens as an array, int32; raises DataError for anything else."""
    if isinstance(tokens, Sequence) and not len(tokens):  # a float64 array to NumPy
        return np.zeros(0, np.int32)
    try:
        values = np.asarray(tokens)
    except ValueError:  # ragged
        values = np.empty((), object)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        kind = f"a {type(tokens).__name__}"
        if isinstance(tokens, np.ndarray):
            kind = f"an array of dtype {tokens.dtype} and shape {tokens.shape}"
        msg = (
            f"{what} gives {kind}; a document is a text, bytes, or a 1-D array of "
            "integers."
        )
        raise DataError(msg)
    if values.size and (values.min() < 0 or values.max() > _LARGEST):
        outside = values.min() if values.min() < 0 else values.max()
        msg = f"{what} gives the token {outside}; tokens are from 0 to {_LARGEST}."
        raise DataError(msg)
    return values.astype(np.int32)


def _is_indexed(documents: object) -> bool:
    return hasattr(documents, "__len__") and hasattr(documents, "__getitem__")
