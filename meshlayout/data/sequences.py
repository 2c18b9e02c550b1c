"""Documents of any length as rows of one length, for a language model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from meshlayout._optional import require
from meshlayout.data.documents import check_documents, open_documents
from meshlayout.data.packed import (
    Mode,
    PackedIterator,
    PackedStream,
    Recipe,
    Remainder,
    Row,
    Windows,
)
from meshlayout.data.packing import Counts, Window
from meshlayout.data.tokens import DocumentTokens, Encode, Tokenizer
from meshlayout.errors import DataError


def pack_sequences(
    documents: Any,
    length: int,
    *,
    mode: Mode = "chunk",
    tokenizer: Tokenizer | Encode | None = None,
    separator: int | None = None,
    remainder: Remainder = "pad",
    targets: bool = False,
    document_ids: bool = False,
    open_rows: int = 64,
) -> "PackedSequences":
    r"""Makes rows of one length from documents of any length.

    A row is a dict of arrays of shape (length,): `tokens`, int32, and `weight`,
    float32, 0 where there is nothing to learn: at padding. `mode="chunk"` writes the
    documents one after another and cuts the whole into rows. `mode="pack"` lays whole
    documents into a row, several if they fit, and adds `segment_ids` (1, 2, ... in a
    row; 0 is padding) and `positions` (0, 1, ... in a segment), so that a model keeps
    them apart.

    Packing is first-fit over `open_rows` open rows: each document goes into the first
    that has room, and when one fits into none, all are closed (what Grain's
    FirstFitPackIterDataset does). A document longer than a row is cut into full rows
    and a rest, which is a segment like any other. Every token is in exactly one row.

    Args:
        documents: Texts, bytes, or 1-D arrays of tokens: a list or other sequence; a
            Grain MapDataset, IterDataset or DataLoader of them; any iterable; or a
            function that returns one, called once for every pass. A Grain dataset can
            encode in its own threads or processes: map it there, and give tokens.
        length: Tokens in a row.
        mode: `"chunk"` or `"pack"`.
        tokenizer: What encodes texts: an object with `encode(text)`, or a function. By
            default a `ByteTokenizer`, a token for every byte of UTF-8.
        separator: A token to add behind every document, for instance 0, which is a
            byte that text does not have. None adds nothing.
        remainder: What becomes of a last row of chunks that is not full: `"pad"`,
            `"drop"` (counted in the report) or `"error"`. Packed rows are padded.
        targets: Whether rows get `targets`, for every token the one after it in its
            document (in chunks, the one after it in the whole text). Where there is
            none, the target is 0 and so is the weight.
        document_ids: Whether rows get `document_ids`, the number of each token's
            document in its pass (-1 at padding), and `document_positions`, its place
            in the document.
        open_rows: Rows that are open at once: more leave less padding, and more of the
            text is read ahead.

    Returns:
        The rows: an iterable of them, and a source for `distribute_dataset`.

    Raises:
        DataError: If an argument is not one of these, or there are no documents.

    Example:
        >>> rows = pack_sequences(["to be", "or", "not"], 6, mode="pack")
        >>> for row in rows:
        ...     print(bytes(row["tokens"].tolist()), row["segment_ids"])
        b'to be\x00' [1 1 1 1 1 0]
        b'ornot\x00' [1 1 2 2 2 0]
        >>> print(rows.report())
        3 documents with 10 tokens in 2 rows of 6: 83.3% full, 2 padding.
    """
    check_documents(documents)
    _check_choice("mode", mode, get_args(Mode))
    _check_choice("remainder", remainder, get_args(Remainder))
    _check_count("length", length)
    _check_count("open_rows", open_rows)
    if mode == "pack" and remainder != "pad":
        msg = (
            f"remainder={remainder!r} is for mode='chunk', where all rows but the last "
            "are full. Packed rows are padded where nothing fits; leave it out."
        )
        raise DataError(msg)
    recipe = Recipe(
        mode, length, separator, remainder, targets, document_ids, open_rows
    )
    return PackedSequences(documents, recipe, DocumentTokens(tokenizer, separator))


@dataclass(frozen=True)
class PackingReport:
    """What became of the documents of a pass, so far.

    Attributes:
        counts: Documents, tokens, rows and padding.
        length: Tokens in a row.
    """

    counts: Counts
    length: int

    @property
    def fill(self) -> float:
        """The share of the rows that holds tokens."""
        places = self.counts.rows * self.length
        return 1 - self.counts.padding / places if places else 0.0

    def __str__(self) -> str:
        counts = self.counts
        said = (
            f"{_counted(counts.documents, 'document')} with "
            f"{_counted(counts.tokens, 'token')} in {_counted(counts.rows, 'row')} of "
            f"{self.length:,}: {self.fill:.1%} full, {counts.padding:,} padding."
        )
        if counts.split:
            said += f" Cut over several rows: {_counted(counts.split, 'document')}."
        if counts.empty:
            said += f" Without tokens: {_counted(counts.empty, 'document')}."
        if counts.dropped:
            said += f" Dropped from the end: {_counted(counts.dropped, 'token')}."
        return said


class PackedSequences:
    """Rows of one length, made anew from the documents in every pass.

    Made by `pack_sequences`. Iterating gives rows; the iterator has `get_state` and
    `set_state`, which name a place to the row and are as small as the documents' own.
    """

    def __init__(
        self, documents: Any, recipe: "Recipe", encode: DocumentTokens
    ) -> None:
        self._documents, self._recipe, self._encode = documents, recipe, encode
        self._windows: Windows | None = None
        #: Rows of a pass; not known before they are made.
        self.num_rows: int | None = None

    @property
    def length(self) -> int:
        """Tokens in a row."""
        return self._recipe.length

    def __iter__(self) -> "PackedIterator":
        return PackedIterator(self._begin(), self._recipe)

    def open(self, epoch: int) -> "PackedStream":
        """Begins a pass whose rows come in blocks.

        Args:
            epoch: Which pass; all have the same rows, if the documents do.
        """
        return PackedStream(self._begin(), self._recipe)

    def report(self) -> PackingReport:
        """Returns what became of the documents in the pass that was begun last."""
        counts = Counts() if self._windows is None else self._windows.counts
        return PackingReport(counts, self._recipe.length)

    def to_arrays(self) -> Row:
        """Returns all rows at once, with a first dim for them.

        Rows in memory are had in any order: `distribute_dataset` shuffles them.

        Example:
            >>> rows = pack_sequences(["some text", "and more"], 4)
            >>> rows.to_arrays()["tokens"].shape
            (5, 4)
        """
        windows = list(self._begin())
        if not windows:
            return self._recipe.rows(Window(0, self._recipe.length))
        return {
            name: np.concatenate([window[name] for window in windows])
            for name in windows[0]
        }

    def to_grain(self) -> Any:
        """Returns the rows as a Grain IterDataset, to go on with in Grain.

        Its iterators have Grain's `get_state` and `set_state`.

        Example:
            >>> rows = pack_sequences(["some text", "and more"], 4)
            >>> batches = rows.to_grain().batch(2)
            >>> [batch["tokens"].shape for batch in batches]
            [(2, 4), (2, 4), (1, 4)]
        """
        grain: Any = require("grain", extra="data", purpose="to_grain")
        packed = self

        class Rows(grain.DatasetIterator):
            def __init__(self) -> None:
                super().__init__()
                self._rows = iter(packed)

            def __next__(self) -> Row:
                return next(self._rows)

            def get_state(self) -> Any:
                return self._rows.get_state()

            def set_state(self, state: Any) -> None:
                self._rows.set_state(state)

        class PackedDataset(grain.IterDataset):
            def __iter__(self) -> Any:
                return Rows()

        return PackedDataset()

    def _begin(self) -> "Windows":
        documents = self._documents
        if isinstance(documents, Iterator) and self._windows is not None:
            msg = (
                f"documents is a {type(documents).__name__}, which can be read once, "
                "and was. Give a list, or a function that returns a new one."
            )
            raise DataError(msg)
        self._windows = Windows(open_documents(documents), self._recipe, self._encode)
        return self._windows


def _counted(number: int, word: str) -> str:
    return f"{number:,} {word}{'s' * (number != 1)}"


def _check_choice(name: str, given: Any, choices: tuple[str, ...]) -> None:
    if given not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        msg = f"{name}={given!r} is none of {listed}."
        raise DataError(msg)


def _check_count(name: str, given: Any) -> None:
    is_count = isinstance(given, (int, np.integer)) and not isinstance(given, bool)
    if not is_count or given < 1:
        msg = f"{name}={given!r} is no positive integer."
        raise DataError(msg)
