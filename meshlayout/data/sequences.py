"""Documents of any length as rows of one length, for a language model.

Grain packs and cuts; what is here are the pieces that it packs, the names that models
expect, targets, and what became of every token. A place in the rows is the place that
Grain keeps for its own iterators, and as small as that of the documents.
"""

import ast
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import numpy as np

from meshlayout import _checks
from meshlayout._optional import require
from meshlayout.data.documents import (
    DocumentPass,
    DocumentTokens,
    Encode,
    TokenArray,
    Tokenizer,
    check_documents,
    is_read_once,
)
from meshlayout.data.source import Block
from meshlayout.errors import DataError


PackingMode: TypeAlias = Literal["chunk", "pack"]
ShortRow: TypeAlias = Literal["pad", "drop", "error"]
Row: TypeAlias = dict[str, np.ndarray[Any, Any]]

# Rows that are handed to `distribute_dataset` at a time.
_BLOCK_ROWS = 64

_KIND = "packed sequences"
_VERSION = 2


def pack_sequences(
    documents: Any,
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
    `tokens`, int32, and `weight`, float32, 0 where there is nothing to learn, as at
    padding. `mode="chunk"` writes the documents one after another and cuts the whole
    into rows. `mode="pack"` puts whole documents into a row, several if they fit, and
    adds `segment_ids` (1, 2, ... in a row; 0 is padding) and `positions` (0, 1, ... in
    a segment), so that a model keeps them apart.

    Packing is first-fit over `open_rows` open rows: each document goes into the first
    that has room, and when one fits into none, all are closed (Grain's
    FirstFitPackIterDataset). A document longer than a row is cut into full rows and a
    rest, which is a segment like any other. Every token is in exactly one row.

    Args:
        documents: Texts, bytes, or 1-D arrays of tokens: a list or other sequence; a
            Grain MapDataset, IterDataset or DataLoader of them; any iterable; or a
            function that returns one, called once for every pass. A Grain dataset can
            encode in its own threads or processes: map it there, and give tokens.
        length: Tokens in a row.
        mode: `"chunk"` or `"pack"`.
        tokenizer: What encodes texts: an object with `encode(text)`, or a function. By
            default, every byte of a text's UTF-8 is a token, 0 to 255.
        separator: A token to add after every document, for instance 0, which is a byte
            that text does not have. None adds nothing.
        remainder: What becomes of a last row of chunks that is not full: `"pad"`,
            `"drop"` (counted in the report) or `"error"`. Packed rows are padded.
        targets: Whether rows get `targets`, for every token the next one in its
            document (in chunks, the next one in the whole text). Where there is none,
            the target is 0 and so is the weight.
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
class Recipe:
    """How rows are made; a place in the rows is only found again with the same."""

    mode: PackingMode
    length: int
    separator: int | None
    remainder: ShortRow
    targets: bool
    document_ids: bool
    open_rows: int


class TokenCounts(NamedTuple):
    """What was packed so far.

    Attributes:
        documents: Documents that were read.
        empty: How many of them have no tokens.
        split: How many are in more than one row.
        tokens: Tokens of the documents, including separators.
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

    def plus(self, **more: int) -> "TokenCounts":
        """Returns counts with some added to."""
        sums = {name: getattr(self, name) + count for name, count in more.items()}
        return self._replace(**sums)


@dataclass(frozen=True)
class PackingReport:
    """What became of the documents of a pass, so far.

    Attributes:
        counts: Documents, tokens, rows and padding.
        length: Tokens in a row.
    """

    counts: TokenCounts
    length: int

    @property
    def fill(self) -> float:
        """The share of the rows that holds tokens."""
        places = self.counts.rows * self.length
        return 1 - self.counts.padding / places if places else 0.0

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
    """Rows of one length, made anew from the documents in every pass.

    Made by `pack_sequences`. Iterating gives rows; the iterator has `get_state` and
    `set_state`, which name a place to the row and are as small as the documents' own.
    """

    def __init__(self, documents: Any, recipe: Recipe, encode: DocumentTokens) -> None:
        self._documents, self._recipe, self._encode = documents, recipe, encode
        self._latest: PackedIterator | None = None
        #: Rows of a pass; not known before they are made.
        self.num_rows: int | None = None

    @property
    def length(self) -> int:
        """Tokens in a row."""
        return self._recipe.length

    def __iter__(self) -> "PackedIterator":
        if is_read_once(self._documents) and self._latest is not None:
            msg = (
                f"documents is a {type(self._documents).__name__}, which can be read "
                "once, and was. Give a list, or a function that returns a new one."
            )
            raise DataError(msg)
        documents = DocumentPass(self._documents)
        self._latest = PackedIterator(documents, self._recipe, self._encode)
        return self._latest

    def open(self, epoch: int) -> "PackedBlocks":
        """Begins a pass whose rows come in blocks.

        Args:
            epoch: Which pass; all have the same rows, if the documents do.
        """
        return PackedBlocks(iter(self))

    def report(self) -> PackingReport:
        """Returns what became of the documents in the pass that was begun last."""
        counts = TokenCounts() if self._latest is None else self._latest.counts
        return PackingReport(counts, self._recipe.length)

    def to_arrays(self) -> Row:
        """Returns all rows at once, with a first dim for them.

        Use this where the rows fit into memory: `distribute_dataset` then shuffles
        them.

        Example:
            >>> rows = pack_sequences(["some text", "and more"], 4)
            >>> rows.to_arrays()["tokens"].shape
            (5, 4)
        """
        return _stacked(list(self), self._recipe)

    def to_grain(self) -> Any:
        """Returns the rows as a Grain IterDataset, for Grain's own further steps.

        Its iterators have Grain's `get_state` and `set_state`.

        Example:
            >>> rows = pack_sequences(["some text", "and more"], 4)
            >>> batches = rows.to_grain().batch(2)
            >>> [batch["tokens"].shape for batch in batches]
            [(2, 4), (2, 4), (1, 4)]
        """
        return _as_grain(lambda: iter(self))


class PackedIterator:
    """One pass over packed rows."""

    def __init__(
        self, documents: DocumentPass, recipe: Recipe, encode: DocumentTokens
    ) -> None:
        self._documents, self._recipe = documents, recipe
        self._pieces = _Pieces(documents, recipe, encode)
        self._packed = iter(_packed(self._pieces, recipe))
        self._counts = TokenCounts()
        # In chunks with targets, the last target of a row is in the next one.
        self._looks_ahead = recipe.targets and recipe.mode == "chunk"
        self._next: Row | None = None
        self._place = self._where()

    @property
    def can_seek(self) -> bool:
        """Whether a place is found again without reading up to it."""
        return self._documents.can_seek

    @property
    def counts(self) -> TokenCounts:
        """What was packed so far."""
        of_documents = self._pieces.counts
        return of_documents._replace(
            rows=self._counts.rows,
            padding=self._counts.padding,
            dropped=self._counts.dropped,
        )

    def __iter__(self) -> "PackedIterator":
        return self

    def __next__(self) -> Row:
        recipe = self._recipe
        packed = next(self._packed) if self._next is None else self._next
        self._next, self._place = None, self._where()
        used = packed["tokens_segment_ids"] > 0
        num_used = int(used.sum())
        if recipe.mode == "chunk" and num_used < recipe.length:
            self._check_short(num_used)
        if self._looks_ahead:
            self._next = next(self._packed, None)
        self._counts = self._counts.plus(rows=1, padding=recipe.length - num_used)
        row = {"tokens": packed["tokens"]}
        weight = used.astype(np.float32)
        if recipe.mode == "pack":
            row["segment_ids"] = packed["tokens_segment_ids"]
            row["positions"] = packed["tokens_positions"]
            if recipe.targets:
                row["targets"], weight = packed["targets"], packed["has_target"]
        elif recipe.targets:
            row["targets"] = np.append(packed["tokens"][1:], np.int32(0))
            if self._next is not None:
                row["targets"][-1] = self._next["tokens"][0]
            else:
                weight[num_used - 1] = 0
        if recipe.document_ids:
            row["document_ids"] = np.where(used, packed["document_ids"], np.int32(-1))
            row["document_positions"] = packed["document_positions"]
        return {**row, "weight": weight}

    def _check_short(self, num_used: int) -> None:
        """Ends the pass, or raises, where a short last row is not to be padded."""
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
        """Returns the place after the last row, as JSON takes it."""
        place, read = self._place
        return {
            "kind": _KIND,
            "version": _VERSION,
            "recipe": asdict(self._recipe),
            # As text, since JSON would make lists of Grain's tuples.
            "place": repr(jax.tree.map(_python_number, place)),
            # In chunks, Grain reads up to the place at once: what it read is compared.
            "read": list(read) if self._recipe.mode == "chunk" else None,
            "counts": list(self._counts),
        }

    def _where(self) -> tuple[Any, TokenCounts]:
        """Returns Grain's place, and what was read of the documents up to there."""
        return self._packed.get_state(), self._pieces.counts

    def set_state(self, state: Any, *, skip: bool = False) -> None:
        """Goes to a place.

        Args:
            state: What `get_state` returned, of rows that were made in the same way.
            skip: Whether documents that can only be read one after another are read
                and dropped up to the place.

        Raises:
            DataError: If the rows were made otherwise, or the documents cannot go to
                a place and are not to be skipped.
        """
        _check_state(self._recipe, state)
        if not self.can_seek and not skip:
            msg = (
                "these documents can only be read one after another. Give a list or a "
                "Grain dataset, or set_state(state, skip=True), which reads and drops "
                "the documents before the place."
            )
            raise DataError(msg)
        self._packed.set_state(ast.literal_eval(state["place"]))
        self._next, self._place = None, self._where()
        self._counts = TokenCounts(*state["counts"])
        read = self._pieces.counts
        if state["read"] is not None and list(read) != list(state["read"]):
            then = TokenCounts(*state["read"])
            msg = (
                f"the place is after {then.tokens:,} tokens of "
                f"{_counted(then.documents, 'document')}, and here are "
                f"{read.tokens:,} of {_counted(read.documents, 'document')}: the "
                "documents are not those of the state."
            )
            raise DataError(msg)

    def close(self) -> None:
        """Releases the documents."""
        self._documents.close()


class PackedBlocks:
    """One pass over packed rows, in blocks, for `distribute_dataset`."""

    def __init__(self, rows: PackedIterator) -> None:
        self._rows = rows

    def __next__(self) -> Block:
        rows = [row for _, row in zip(range(_BLOCK_ROWS), self._rows, strict=False)]
        if not rows:
            raise StopIteration
        return Block(_stacked(rows, None), len(rows), is_own=True)

    def get_state(self) -> Any:
        """Returns the place after the last block; None if documents cannot seek."""
        return self._rows.get_state() if self._rows.can_seek else None

    def set_state(self, state: Any) -> None:
        """Goes to a place."""
        self._rows.set_state(state)

    def close(self) -> None:
        """Releases the documents."""
        self._rows.close()


class _Pieces:
    """Documents as the pieces that Grain packs: whole, or cut into rows and a rest."""

    def __init__(
        self, documents: DocumentPass, recipe: Recipe, encode: DocumentTokens
    ) -> None:
        self._documents, self._recipe, self._encode = documents, recipe, encode
        self.counts = TokenCounts()
        self._before: dict[str, Any] | None = None  # the document that is being cut
        self._tokens: TokenArray = np.zeros(0, np.int32)
        self._offset = 0

    def __next__(self) -> Row:
        if self._before is None:
            self._load()
        recipe, tokens, start = self._recipe, self._tokens, self._offset
        end = len(tokens)
        if recipe.mode == "pack":
            end = min(end, start + recipe.length)
        piece = {"tokens": tokens[start:end]}
        if recipe.mode == "pack" and recipe.targets:
            # One longer, and 0 after the document's end.
            following = np.append(tokens, np.int32(0))[start + 1 : end + 1]
            has_target = np.arange(start + 1, end + 1) < len(tokens)
            piece["targets"] = following
            piece["has_target"] = has_target.astype(np.float32)
        if recipe.document_ids:
            number = self.counts.documents - 1
            piece["document_ids"] = np.full(end - start, number, np.int32)
            piece["document_positions"] = np.arange(start, end, dtype=np.int32)
        self._offset = end
        if end == len(tokens):
            self._before = None
        return piece

    def _load(self) -> None:
        """Reads the next document that has tokens."""
        length, chunks = self._recipe.length, self._recipe.mode == "chunk"
        while True:
            before = self._state()
            document = next(self._documents)
            self._tokens = self._encode(document, self.counts.documents)
            size = len(self._tokens)
            start = self.counts.tokens % length if chunks else 0
            self.counts = self.counts.plus(
                documents=1,
                empty=int(not size),
                split=int(start + size > length),
                tokens=size,
            )
            if size:
                self._before, self._offset = before, 0
                return

    def _state(self) -> dict[str, Any]:
        return {
            "documents": self._documents.get_state(),
            "counts": tuple(self.counts),
            "offset": 0,
        }

    def get_state(self) -> dict[str, Any]:
        """Returns where the next piece begins."""
        if self._before is None:
            return self._state()
        return {**self._before, "offset": self._offset}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where a piece begins.

        Raises:
            DataError: If these documents have no such place.
        """
        self._documents.set_state(state["documents"])
        self.counts, self._before = TokenCounts(*state["counts"]), None
        offset = state["offset"]
        if not offset:
            return
        number = self.counts.documents
        try:
            self._load()
        except StopIteration:
            self._tokens = self._tokens[:0]
        if offset >= len(self._tokens):
            msg = (
                f"the place is after token {offset} of document {number}, which is not "
                "that long: the documents are not those of the state."
            )
            raise DataError(msg)
        self._offset = offset

    def close(self) -> None:
        """Releases the documents."""
        self._documents.close()


def _packed(pieces: _Pieces, recipe: Recipe) -> Any:
    """Returns Grain's dataset of packed rows."""
    grain: Any = require("grain", extra="data", purpose="pack_sequences")
    names = ["tokens"]
    if recipe.document_ids:
        names += ["document_ids", "document_positions"]
    parent = _as_grain(lambda: pieces)
    if recipe.mode == "chunk":
        return grain.experimental.ConcatThenSplitIterDataset(
            parent, length_struct=dict.fromkeys(names, recipe.length)
        )
    if recipe.targets:
        names += ["targets", "has_target"]
    return grain.experimental.FirstFitPackIterDataset(
        parent,
        length_struct=dict.fromkeys(names, recipe.length),
        num_packing_bins=recipe.open_rows,
        shuffle_bins=False,
    )


def _as_grain(begin: Any) -> Any:
    """Returns a Grain dataset whose iterators are what a function returns."""
    grain: Any = require("grain", extra="data", purpose="pack_sequences")

    class PassIterator(grain.DatasetIterator):
        def __init__(self) -> None:
            super().__init__()
            self._pass = begin()

        def __next__(self) -> Any:
            return next(self._pass)

        def get_state(self) -> Any:
            return self._pass.get_state()

        def set_state(self, state: Any) -> None:
            self._pass.set_state(state)

    class PassDataset(grain.IterDataset):
        def __iter__(self) -> Any:
            return PassIterator()

    return PassDataset()


def _check_state(recipe: Recipe, state: Any) -> None:
    is_ours = isinstance(state, Mapping) and state.get("kind") == _KIND
    if not is_ours or state.get("version") != _VERSION:
        msg = (
            f"the state {_checks.shown(state)} is not of pack_sequences, version "
            f"{_VERSION}. Give what get_state() of such an iterator returned."
        )
        raise DataError(msg)
    now = asdict(recipe)
    for name, then in state["recipe"].items():
        if now[name] != then:
            msg = (
                f"the state is of rows packed with {name}={then!r}, and these are with "
                f"{name}={now[name]!r}: the same place is not among them."
            )
            raise DataError(msg)


def _stacked(rows: list[Row], recipe: Recipe | None) -> Row:
    """Returns rows as arrays with a first dim for them; recipe says what none have."""
    if not rows and recipe is not None:
        empty = pack_sequences([np.zeros(recipe.length, np.int32)], **asdict(recipe))
        return {name: leaf[None][:0] for name, leaf in next(iter(empty)).items()}
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _python_number(leaf: Any) -> Any:
    return leaf.item() if isinstance(leaf, np.generic) else leaf


def _counted(number: int, word: str) -> str:
    return f"{number:,} {word}{'s' * (number != 1)}"
