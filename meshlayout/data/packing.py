"""Documents cut into pieces, and pieces laid into rows of one length.

Rows are made a window at a time: as many as are open at once. A window begins at a
place in the documents, from which it can be made again.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from meshlayout.data.documents import Documents
from meshlayout.data.tokens import DocumentTokens
from meshlayout.errors import DataError


Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Counts:
    """What was packed so far.

    Attributes:
        documents: Documents that were read to their end.
        empty: How many of them have no tokens.
        split: How many lie in more than one row.
        tokens: Tokens of the documents, separators with them.
        rows: Rows that were made.
        padding: Places in them without a token.
        dropped: Tokens that are in no row.
    """

    documents: int = 0
    empty: int = 0
    split: int = 0
    tokens: int = 0
    rows: int = 0
    padding: int = 0
    dropped: int = 0

    def plus(self, **more: int) -> "Counts":
        """Returns counts with some added to."""
        added = {name: getattr(self, name) + count for name, count in more.items()}
        return replace(self, **added)


@dataclass(frozen=True)
class Place:
    """A place in the documents of one pass.

    Attributes:
        documents: The state of the pass before the document.
        number: The document's number.
        offset: How many of its tokens come before the place.
        cuts: Into how many pieces they were cut.
        counts: What was packed up to here.
    """

    documents: Any
    number: int
    offset: int
    cuts: int
    counts: Counts

    def as_json(self) -> dict[str, Any]:
        """Returns the place as JSON takes it."""
        return asdict(self)

    @classmethod
    def of_json(cls, state: Any) -> "Place":
        """Returns the place that `as_json` wrote."""
        return cls(**{**state, "counts": Counts(**state["counts"])})


@dataclass(frozen=True)
class Piece:
    """Tokens in a row of one document.

    Attributes:
        tokens: The tokens.
        document: The document's number.
        offset: How many of its tokens come before.
        after: The document's next token, or None if this is its last piece.
    """

    tokens: Array
    document: int
    offset: int
    after: int | None


class Reader:
    """Reads documents piece by piece, and counts.

    Args:
        documents: A pass over documents.
        encode: What makes tokens of them.
    """

    def __init__(self, documents: Documents, encode: DocumentTokens) -> None:
        self._documents, self._encode = documents, encode
        self.counts = Counts()
        self._tokens: Array | None = None
        self._before: Any = None
        self._number = -1
        self._offset = self._cuts = 0

    def place(self) -> Place:
        """Returns where the next piece begins."""
        if self._tokens is None:
            before, number = self._documents.get_state(), self._number + 1
            return Place(before, number, 0, 0, self.counts)
        return Place(self._before, self._number, self._offset, self._cuts, self.counts)

    def go_to(self, place: Place) -> None:
        """Goes to a place.

        Args:
            place: Where.

        Raises:
            DataError: If these documents have no such place.
        """
        self._documents.set_state(place.documents)
        self._tokens, self._number = None, place.number - 1
        self.counts = place.counts
        if not place.offset:
            return
        if not self._load() or place.offset >= len(self._loaded()):
            msg = (
                f"the place is after token {place.offset} of document {place.number}, "
                "which is not that long: the documents are not those of the state."
            )
            raise DataError(msg)
        self._offset, self._cuts = place.offset, place.cuts

    def peek(self, most: int) -> Piece | None:
        """Returns the next piece, of up to `most` tokens; None after the last."""
        if not self._load():
            return None
        tokens, end = self._loaded(), self._offset + most
        after = int(tokens[end]) if end < len(tokens) else None
        return Piece(tokens[self._offset : end], self._number, self._offset, after)

    def take(self, piece: Piece) -> None:
        """Goes behind the piece that `peek` returned."""
        self._offset += len(piece.tokens)
        self._cuts += 1
        if piece.after is None:
            self._finish()

    def _load(self) -> bool:
        """Returns whether there is a document with tokens left."""
        while self._tokens is None:
            before = self._documents.get_state()
            try:
                document = next(self._documents)
            except StopIteration:
                return False
            self._before, self._number = before, self._number + 1
            self._offset = self._cuts = 0
            self._tokens = self._encode(document, self._number)
            if not self._tokens.size:
                self._finish()
        return True

    def _loaded(self) -> Array:
        assert self._tokens is not None
        return self._tokens

    def _finish(self) -> None:
        size = len(self._loaded())
        self.counts = self.counts.plus(
            documents=1, empty=int(not size), split=int(self._cuts > 1), tokens=size
        )
        self._tokens = None


class Window:
    """Rows that are open at once.

    Args:
        num_rows: How many.
        length: Tokens in a row.
    """

    def __init__(self, num_rows: int, length: int) -> None:
        shape = (num_rows, length)
        self.tokens = np.zeros(shape, np.int32)
        self.targets = np.zeros(shape, np.int32)
        self.segment_ids = np.zeros(shape, np.int32)
        self.positions = np.zeros(shape, np.int32)
        self.document_ids = np.full(shape, -1, np.int32)
        self.document_positions = np.zeros(shape, np.int32)
        self.has_target = np.zeros(shape, np.float32)
        self.used = np.zeros(num_rows, np.int64)
        self._segments = np.zeros(num_rows, np.int32)
        self._length = length

    def first_with_room(self, size: int) -> int | None:
        """Returns the first row that can take so many tokens more."""
        fits = self.used + size <= self._length
        row = int(np.argmax(fits))
        return row if fits[row] else None

    def add(self, row: int, piece: Piece) -> None:
        """Lays a piece behind what a row holds, as a segment of its own."""
        start = int(self.used[row])
        end = start + len(piece.tokens)
        here = (row, slice(start, end))
        counted = np.arange(end - start, dtype=np.int32)
        self._segments[row] += 1
        self.used[row] = end
        self.tokens[here] = piece.tokens
        self.segment_ids[here] = self._segments[row]
        self.positions[here] = counted
        self.document_ids[here] = piece.document
        self.document_positions[here] = counted + piece.offset
        self.targets[row, start : end - 1] = piece.tokens[1:]
        self.has_target[row, start : end - 1] = 1
        if piece.after is not None:
            self.set_target(row, end - 1, piece.after)

    def set_target(self, row: int, at: int, token: int) -> None:
        """Says which token comes after a place."""
        self.targets[row, at] = token
        self.has_target[row, at] = 1

    @property
    def num_used(self) -> int:
        """How many rows hold tokens."""
        return int(np.count_nonzero(self.used))


def first_fit(reader: Reader, num_rows: int, length: int) -> Window:
    """Lays each next piece into the first open row that has room for it.

    The window ends with the first piece that fits into none: first-fit bin packing
    over a bounded number of open bins that are closed together, as in Grain's
    FirstFitPackIterDataset. Documents longer than a row are cut into rows and a rest.

    Args:
        reader: Where pieces come from.
        num_rows: Open rows.
        length: Tokens in a row.
    """
    window = Window(num_rows, length)
    while (piece := reader.peek(length)) is not None:
        row = window.first_with_room(len(piece.tokens))
        if row is None:
            break
        window.add(row, piece)
        reader.take(piece)
    return window


def in_order(reader: Reader, num_rows: int, length: int) -> Window:
    """Fills row after row, cutting documents wherever a row is full.

    Args:
        reader: Where pieces come from.
        num_rows: Rows to fill.
        length: Tokens in a row.
    """
    window = Window(num_rows, length)
    last: tuple[int, int] | None = None
    for row in range(num_rows):
        while (room := length - int(window.used[row])) and (piece := reader.peek(room)):
            if last is not None:
                window.set_target(*last, int(piece.tokens[0]))
            window.add(row, piece)
            reader.take(piece)
            last = (row, int(window.used[row]) - 1)
    following = reader.peek(1)
    if last is not None and following is not None:
        window.set_target(*last, int(following.tokens[0]))
    return window
