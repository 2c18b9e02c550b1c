"""`pack_sequences`: documents of any length as rows of one length.

Every token is in exactly one row, and a position in the rows is as small as one in the
documents, however many rows are open. Tokenizers and corpora are left to the user.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from meshlayout import _checks
from meshlayout._optional import require
from meshlayout.data.adapters.iterables import IteratorStream
from meshlayout.data.documents import (
    Documents,
    DocumentTokens,
    Encode,
    Tokenizer,
    check_documents,
)
from meshlayout.data.element_rows import stack
from meshlayout.data.protocols import JSON
from meshlayout.data.token_rows import (
    PackedIterator,
    PackingMode,
    Recipe,
    Row,
    ShortRow,
    TokenCounts,
)
from meshlayout.errors import DataError


def pack_sequences(
    documents: Documents,
    length: int,
    *,
    mode: PackingMode = "chunk",
    tokenizer: Tokenizer | Encode | None = None,
    separator: int | None = None,
    remainder: ShortRow = "pad",
    targets: bool = False,
    document_ids: bool = False,
    open_rows: int = 64,
) -> "PackedSequences":
    r"""Makes rows of one length from documents of any length.

    Use this to feed a language model. A row is a dict of arrays of shape (length,):
    `tokens`, int32, and `weight`, float32, which is 0 where there is nothing to learn,
    such as padding. `mode="chunk"` concatenates the documents and cuts the result into
    rows. `mode="pack"` puts whole documents into a row, several if they fit, and adds
    `segment_ids` (1, 2, ... in a row; 0 is padding) and `positions` (0, 1, ... in a
    segment), so that a model can keep them apart.

    Packing is first-fit over `open_rows` open rows: each document goes into the first
    row that has room, and when one fits into none, all rows are closed (like Grain's
    FirstFitPackIterDataset). A document longer than a row is cut into full rows and a
    rest, which is a segment like any other. Every token is in exactly one row.

    Args:
        documents: Texts, bytes, or 1-D arrays of tokens: a list or other sequence; a
            Grain MapDataset, IterDataset or DataLoader of them; any iterable; or a
            function that returns one, called once per pass. A Grain dataset can
            encode in its own threads or processes: map it there, and pass tokens.
        length: Tokens in a row.
        mode: `"chunk"` or `"pack"`.
        tokenizer: Encodes texts: an object with `encode(text)`, or a function. By
            default, every byte of a text's UTF-8 is a token, 0 to 255.
        separator: A token to add after every document, for instance 0, a byte that
            does not occur in text. None adds nothing.
        remainder: What to do with a last row of chunks that is not full: `"pad"`,
            `"drop"` (counted in the report) or `"error"`. Packed rows are padded.
        targets: Whether rows get `targets`: for every token the next one of its
            document (in chunks, the next one of the whole text). Where there is none,
            target and weight are 0.
        document_ids: Whether rows get `document_ids`, the index of each token's
            document in its pass (-1 for padding), and `document_positions`, the
            token's index in the document.
        open_rows: Rows that are open at once: more rows leave less padding, and read
            more of the text ahead.

    Returns:
        The rows: an iterable of them, and a source for `distribute_dataset`.

    Raises:
        DataError: If an argument is wrong, or there are no documents.

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
    modes: tuple[PackingMode, ...] = get_args(PackingMode)
    remainders: tuple[ShortRow, ...] = get_args(ShortRow)
    encode = DocumentTokens(tokenizer, separator)
    recipe = Recipe(
        mode=_checks.choice("mode", mode, modes, error=DataError),
        length=_checks.count("length", length, error=DataError),
        separator=None if separator is None else int(separator),
        remainder=_checks.choice("remainder", remainder, remainders, error=DataError),
        targets=_checks.flag("targets", targets, error=DataError),
        document_ids=_checks.flag("document_ids", document_ids, error=DataError),
        open_rows=_checks.count("open_rows", open_rows, error=DataError),
    )
    if recipe.mode == "pack" and recipe.remainder != "pad":
        msg = (
            f"remainder={remainder!r} is for mode='chunk', where all rows but the last "
            "are full. Packed rows are padded where nothing fits; leave it out."
        )
        raise DataError(msg)
    return PackedSequences(documents, recipe, encode)


@dataclass(frozen=True)
class PackingReport:
    """Packing statistics of a pass so far.

    Attributes:
        counts: The numbers of documents, tokens, rows and padding tokens.
        length: Tokens in a row.
    """

    counts: TokenCounts
    length: int

    @property
    def fill(self) -> float:
        """The fraction of the rows that is tokens, not padding."""
        capacity = self.counts.rows * self.length
        return 1 - self.counts.padding / capacity if capacity else 0.0

    def __str__(self) -> str:
        counts = self.counts
        text = (
            f"{_counted(counts.documents, 'document')} with "
            f"{_counted(counts.tokens, 'token')} in {_counted(counts.rows, 'row')} of "
            f"{self.length:,}: {self.fill:.1%} full, {counts.padding:,} padding."
        )
        if counts.split:
            text += f" Cut over several rows: {_counted(counts.split, 'document')}."
        if counts.empty:
            text += f" Without tokens: {_counted(counts.empty, 'document')}."
        if counts.dropped:
            text += f" Dropped from the end: {_counted(counts.dropped, 'token')}."
        return text


class PackedSequences:
    """Rows of one length, packed again from the documents in every pass.

    Made by `pack_sequences`. Iterating yields rows; the iterator has `get_state` and
    `set_state`, exact to the row, with states as small as those of the documents.
    """

    def __init__(
        self, documents: Documents, recipe: Recipe, encode: DocumentTokens
    ) -> None:
        self._documents, self._recipe, self._encode = documents, recipe, encode
        self._latest: PackedIterator | None = None
        # What `StreamSource` asks for: rows are single examples, and how many there
        # are is not known before they are packed.
        self.num_rows: int | None = None
        self.batched = False

    @property
    def length(self) -> int:
        """Tokens in a row."""
        return self._recipe.length

    def __iter__(self) -> "PackedIterator":
        # A second pass over an iterator would have no rows, and no error.
        if isinstance(self._documents, Iterator) and self._latest is not None:
            msg = (
                f"documents is a {type(self._documents).__name__}, which can be read "
                "once, and was. Give a list, or a function that returns a new one."
            )
            raise DataError(msg)
        self._latest = PackedIterator(self._documents, self._recipe, self._encode)
        return self._latest

    def open(self, epoch: int) -> IteratorStream:
        """Starts a pass; all passes have the same rows, if the documents do.

        Args:
            epoch: The epoch, which makes no difference.
        """
        rows = iter(self)
        # An iterator with `set_state` is taken for one that can seek.
        return IteratorStream(rows if rows.can_seek else _without_state(rows))

    def report(self) -> PackingReport:
        """Returns the packing statistics of the latest pass."""
        counts = TokenCounts() if self._latest is None else self._latest.counts
        return PackingReport(counts, self._recipe.length)

    def to_arrays(self) -> Row:
        """Returns all rows at once, with a first dim for the rows.

        Use this if the rows fit into memory: `distribute_dataset` can then shuffle
        them.

        Example:
            >>> rows = pack_sequences(["some text", "and more"], 4)
            >>> rows.to_arrays()["tokens"].shape
            (5, 4)
        """
        rows = list(self)
        if rows:
            return stack(rows)
        # No rows: a row of another document shows which arrays there would be.
        document = [np.zeros(self.length, np.int32)]
        row = next(PackedIterator(document, self._recipe, self._encode))
        return {name: leaf[None][:0] for name, leaf in row.items()}

    def to_grain(self) -> Any:
        """Returns the rows as a Grain IterDataset.

        Use this for further steps of Grain's, such as `mix` or `prefetch`. Its
        iterators have Grain's `get_state` and `set_state`.

        Example:
            >>> rows = pack_sequences(["some text", "and more"], 4)
            >>> batches = rows.to_grain().batch(2)
            >>> [batch["tokens"].shape for batch in batches]
            [(2, 4), (2, 4), (1, 4)]
        """
        grain: Any = require("grain", extra="data", purpose="to_grain")
        packed = self

        # Here, because Grain is optional and can be imported only now.
        class PackedRows(grain.DatasetIterator):
            def __init__(self) -> None:
                super().__init__()
                self._rows = iter(packed)

            def __next__(self) -> Row:
                return next(self._rows)

            def get_state(self) -> JSON:
                return self._rows.get_state()

            def set_state(self, state: JSON) -> None:
                self._rows.set_state(state)

        class PackedDataset(grain.IterDataset):
            def __iter__(self) -> PackedRows:
                return PackedRows()

        return PackedDataset()


def _without_state(rows: PackedIterator) -> Iterator[Row]:
    """Yields rows of documents that can only be read in order."""
    with contextlib.closing(rows):
        yield from rows


def _counted(number: int, word: str) -> str:
    return f"{number:,} {word}{'s' * (number != 1)}"
