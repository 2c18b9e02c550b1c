"""Rows of one length, packed or cut from documents, with a position and statistics.

Both modes are one loop over a window of open rows: a piece of a document goes into the
first row that has room for it, and if none has, all rows are closed. Cutting a text
into chunks is a window of one row, which takes as much of a document as fits. So a
position is where the window started and how many of its rows were yielded: it is as
small as a position in the documents, and moving there reads one window again.
"""

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from meshlayout import _checks
from meshlayout.data.adapters.iterables import IteratorStream, seek_errors
from meshlayout.data.documents import (
    Documents,
    DocumentTokens,
    TokenArray,
    open_documents,
)
from meshlayout.data.protocols import JSON
from meshlayout.errors import DataError


PackingMode: TypeAlias = Literal["chunk", "pack"]
ShortRow: TypeAlias = Literal["pad", "drop", "error"]
Row: TypeAlias = dict[str, np.ndarray[Any, Any]]

_KIND = "packed sequences"
# Of the saved state; increased when an older one would mean other rows.
_VERSION = 3


@dataclass(frozen=True)
class Recipe:
    """How rows are made: the arguments of `pack_sequences` that a position depends on.

    The fields are those arguments, with the same names.
    """

    mode: PackingMode
    length: int
    separator: int | None
    remainder: ShortRow
    targets: bool
    document_ids: bool
    open_rows: int


class TokenCounts(NamedTuple):
    """Counts of the documents and rows so far.

    Attributes:
        documents: Documents that were read.
        empty: Documents among them without tokens.
        split: Documents among them that are in more than one row.
        tokens: Tokens of the documents, including separators.
        rows: Rows that were made.
        padding: Padding tokens in these rows.
        dropped: Tokens that are in no row.
    """

    documents: int = 0
    empty: int = 0
    split: int = 0
    tokens: int = 0
    rows: int = 0
    padding: int = 0
    dropped: int = 0

    def plus(self, **more: int) -> "TokenCounts":
        """Returns the counts with some increased."""
        sums = {name: getattr(self, name) + count for name, count in more.items()}
        return self._replace(**sums)


class PackedIterator:
    """One pass over packed rows.

    Attributes:
        can_seek: Whether it moves to a position without reading up to it.
    """

    def __init__(
        self, documents: Documents, recipe: Recipe, encode: DocumentTokens
    ) -> None:
        self._recipe = recipe
        self._documents = _DocumentReader(documents, recipe, encode)
        self.can_seek = self._documents.can_seek
        self._counts = TokenCounts()
        # The position of the documents before the window, the pieces of its rows, and
        # the number of rows that were yielded.
        self._window_start = self._documents.get_state()
        self._window: list[list[Row]] = []
        self._num_yielded = 0

    @property
    def counts(self) -> TokenCounts:
        """Counts of the documents and rows so far."""
        # The reader counts documents as it reads them, and this iterator rows as it
        # yields them: the rest of the window does not count yet.
        rows, padding, dropped = self._counts[-3:]
        counts = self._documents.counts
        return counts._replace(rows=rows, padding=padding, dropped=dropped)

    def __iter__(self) -> "PackedIterator":
        return self

    def __next__(self) -> Row:
        recipe = self._recipe
        # The position before the window is read first: reading moves the documents on.
        if self._num_yielded == len(self._window):
            start, window = self._documents.get_state(), self._next_window()
            if not window:
                raise StopIteration
            self._window_start, self._window, self._num_yielded = start, window, 0
        pieces = self._window[self._num_yielded]
        self._num_yielded += 1
        num_used = _num_tokens(pieces)
        if recipe.mode == "chunk" and num_used < recipe.length:
            self._check_short(num_used)
        self._counts = self._counts.plus(rows=1, padding=recipe.length - num_used)
        return self._row(pieces)

    def _next_window(self) -> list[list[Row]]:
        """Returns the pieces of each row; no rows at the end of the documents."""
        # `room` is an array, so that finding a row among many takes one comparison.
        is_chunk, length = self._recipe.mode == "chunk", self._recipe.length
        room = np.full(1 if is_chunk else self._recipe.open_rows, length)
        rows: list[list[Row]] = [[] for _ in room]
        while num_left := len(self._documents.rest()):
            # At least one token, so that a full row ends the loop: no row has room.
            size = min(num_left, max(1, int(room[0])) if is_chunk else length)
            fitting = np.flatnonzero(room >= size)
            if not len(fitting):
                break
            row = rows[fitting[0]]
            row.append(self._documents.take(size, segment=len(row) + 1))
            room[fitting[0]] -= size
        return [pieces for pieces in rows if pieces]

    def _row(self, pieces: list[Row]) -> Row:
        """Returns the concatenated columns of the pieces, padded."""
        row: Row = {}
        for name, first in pieces[0].items():
            fill = -1 if name == "document_ids" else 0  # 0 is the first document
            row[name] = np.full(self._recipe.length, fill, first.dtype)
            row[name][: _num_tokens(pieces)] = np.concatenate([p[name] for p in pieces])
        return row

    def _check_short(self, num_used: int) -> None:
        """Ends the pass or raises, unless a short last row is to be padded."""
        if self._recipe.remainder == "error":
            msg = (
                f"{self.counts.tokens:,} tokens leave {num_used:,} in a last row of "
                f"{self._recipe.length:,}. Choose remainder='pad' or 'drop', or "
                "another length."
            )
            raise DataError(msg)
        if self._recipe.remainder == "drop":
            self._counts = self._counts.plus(dropped=num_used)
            raise StopIteration

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last row, as a JSON-serializable dict."""
        return {
            "kind": _KIND,
            "version": _VERSION,
            "recipe": asdict(self._recipe),
            "window": self._window_start,
            "given": self._row_sizes(),
            "counts": list(self._counts),
        }

    def set_state(self, state: JSON, *, skip: bool = False) -> None:
        """Moves to a saved position, so that the row after it comes next.

        Args:
            state: What `get_state` returned, of rows that were made in the same way.
            skip: Whether documents that can only be read in order may be read and
                dropped up to the position.

        Raises:
            DataError: If the rows were made differently, or the documents cannot seek
                and must not be skipped.
        """
        _check_state(self._recipe, state)
        if not self.can_seek and not skip:
            msg = (
                "these documents can only be read in order. Give a list or a "
                "Grain dataset, or set_state(state, skip=True), which reads and drops "
                "the documents before the position."
            )
            raise DataError(msg)
        with seek_errors():
            counts, row_sizes = TokenCounts(*state["counts"]), state["given"]
            self._documents.set_state(state["window"])
            self._window = self._next_window() if row_sizes else []
            self._num_yielded = len(row_sizes)
            self._window_start, self._counts = state["window"], counts
        if self._row_sizes() != row_sizes:
            msg = (
                f"the rows before the position hold {row_sizes} tokens, and here they "
                f"hold {self._row_sizes()}: the documents are not those of the state."
            )
            raise DataError(msg)

    def _row_sizes(self) -> list[int]:
        """Returns the tokens in each row of the window that was yielded.

        They are saved as a check that the documents are still the same.
        """
        return [_num_tokens(pieces) for pieces in self._window[: self._num_yielded]]

    def close(self) -> None:
        """Releases the documents."""
        self._documents.close()


class _DocumentReader:
    """Reads documents in order, of which pieces are taken.

    A position is the documents' own, and how many tokens of one of them were taken.
    Documents that cannot seek are read and dropped up to the position.
    """

    def __init__(
        self, documents: Documents, recipe: Recipe, encode: DocumentTokens
    ) -> None:
        iterator = open_documents(documents)
        self.can_seek = hasattr(iterator, "set_state")
        self._iterator = IteratorStream(iterator)
        self._recipe, self._encode = recipe, encode
        self.counts = TokenCounts()
        self._before: dict[str, JSON] = {}  # the position before this document
        self._document: TokenArray = np.zeros(0, np.int32)
        self._offset = 0

    def rest(self) -> TokenArray:
        """Returns what is left of the document, or the next one; nothing at the end."""
        while self._offset == len(self._document):
            before = self.get_state()
            try:
                document = next(self._iterator)
            except StopIteration:
                break
            tokens = self._encode(document, self.counts.documents)
            # In chunks, a document starts wherever the last one has ended in its row.
            is_chunk = self._recipe.mode == "chunk"
            start = self.counts.tokens % self._recipe.length if is_chunk else 0
            self.counts = self.counts.plus(
                documents=1,
                empty=int(not len(tokens)),
                split=int(start + len(tokens) > self._recipe.length),
                tokens=len(tokens),
            )
            self._before, self._document, self._offset = before, tokens, 0
        return self._document[self._offset :]

    def take(self, size: int, segment: int) -> Row:
        """Takes tokens, and returns their columns of a row.

        Args:
            size: The number of tokens, at most those of `rest`.
            segment: The number of their segment in the row, from 1.
        """
        recipe, document = self._recipe, self._document
        number, start = self.counts.documents - 1, self._offset
        end = self._offset = start + size
        columns: dict[str, Any] = {"tokens": document[start:end]}
        weight = np.ones(size, np.float32)
        if recipe.mode == "pack":
            columns["segment_ids"] = np.full(size, segment)
            columns["positions"] = np.arange(size)
        if recipe.document_ids:
            columns["document_ids"] = np.full(size, number)
            columns["document_positions"] = np.arange(start, end)
        if recipe.targets:
            # Chunks are of one text, which continues with the next document.
            is_chunk = recipe.mode == "chunk"
            following = self.rest()[:1] if is_chunk else document[end : end + 1]
            targets = np.concatenate([document[start + 1 : end], following])
            weight[len(targets) :] = 0  # the last token of all has no target
            columns["targets"] = np.append(targets, 0)[:size]
        row = {name: column.astype(np.int32) for name, column in columns.items()}
        return {**row, "weight": weight}

    def get_state(self) -> dict[str, JSON]:
        """Returns the position of the tokens that come next."""
        # In the middle of a document, which will be read again up to the offset.
        if self._offset < len(self._document):
            return {**self._before, "offset": self._offset}
        return {
            "documents": self._iterator.get_state(),
            "counts": list(self.counts),
            "offset": 0,
        }

    def set_state(self, state: dict[str, JSON]) -> None:
        """Moves to a position.

        Raises:
            DataError: If these documents have no such position.
        """
        counts, offset = TokenCounts(*state["counts"]), state["offset"]
        if self.can_seek:
            self._iterator.set_state(state["documents"])
        else:
            self._skip(counts.documents)
        self.counts, self._document, self._offset = counts, self._document[:0], 0
        if offset and offset >= len(self.rest()):
            msg = (
                f"the position is after token {offset} of document {counts.documents}, "
                "which is not that long: the documents are not those of the state."
            )
            raise DataError(msg)
        self._offset = offset

    def _skip(self, count: int) -> None:
        """Reads and drops documents, up to a number of them."""
        num_read = self.counts.documents
        if num_read > count:
            msg = (
                f"{num_read} documents were read, and the position is after {count}: "
                "documents of an iterator are read once. Set the state of a new "
                "iterator, over documents that can be read again."
            )
            raise DataError(msg)
        num_read += sum(1 for _ in itertools.islice(self._iterator, count - num_read))
        if num_read < count:
            msg = (
                f"the position is after document {count}, and there are {num_read} "
                "documents: they are not those of the state."
            )
            raise DataError(msg)

    def close(self) -> None:
        """Closes the documents' iterator, if it can be closed."""
        self._iterator.close()


def _num_tokens(pieces: list[Row]) -> int:
    return sum(len(piece["tokens"]) for piece in pieces)


def _check_state(recipe: Recipe, state: JSON) -> None:
    is_ours = isinstance(state, Mapping) and state.get("kind") == _KIND
    if not is_ours or state.get("version") != _VERSION:
        msg = (
            f"the state {_checks.shown(state)} is not of pack_sequences, version "
            f"{_VERSION}. Give what get_state() of such an iterator returned."
        )
        raise DataError(msg)
    now = asdict(recipe)
    for name, then in state.get("recipe", {}).items():
        if name in now and now[name] != then:
            msg = (
                f"the state is of rows packed with {name}={then!r}, and these rows are "
                f"packed with {name}={now[name]!r}: its position is not among them."
            )
            raise DataError(msg)
