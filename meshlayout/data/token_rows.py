"""Rows packed or cut by Grain, with a saved position and statistics of the tokens.

Grain's FirstFitPackIterDataset packs whole documents, its ConcatThenSplitIterDataset
cuts a text into rows. This module makes the pieces that Grain takes, and adds the names
that models expect, targets, and counts. A place in the rows is the state of Grain's own
iterators, and as small as a place in the documents.
"""

import ast
import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np

from meshlayout import _checks
from meshlayout._optional import require
from meshlayout.data.documents import (
    Documents,
    DocumentTokens,
    TokenArray,
    open_documents,
)
from meshlayout.errors import DataError


PackingMode: TypeAlias = Literal["chunk", "pack"]
ShortRow: TypeAlias = Literal["pad", "drop", "error"]
Row: TypeAlias = dict[str, np.ndarray[Any, Any]]

_KIND = "packed sequences"
_VERSION = 3


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
    """Counts of the documents and rows so far.

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
        """Returns the counts with some increased."""
        sums = {name: getattr(self, name) + count for name, count in more.items()}
        return self._replace(**sums)


class PackedIterator:
    """One pass over packed rows.

    Attributes:
        can_seek: Whether a place is found again without reading up to it.
    """

    def __init__(
        self, documents: Documents, recipe: Recipe, encode: DocumentTokens
    ) -> None:
        self._recipe = recipe
        self._pieces = _Pieces(documents, recipe, encode)
        self.can_seek = self._pieces.can_seek
        self._packed = iter(_packed(self._pieces, recipe))
        self._counts = TokenCounts()
        # In chunks with targets, the last target of a row is in the next one.
        self._looks_ahead = recipe.targets and recipe.mode == "chunk"
        self._next: Row | None = None
        self._place = self._where()

    @property
    def counts(self) -> TokenCounts:
        """Counts of the documents and rows so far."""
        rows, padding, dropped = self._counts[-3:]
        return self._pieces.counts._replace(rows=rows, padding=padding, dropped=dropped)

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
            "place": repr(jax.tree.map(lambda leaf: np.asarray(leaf).item(), place)),
            # In chunks, Grain reads up to the place at once: what it read is compared.
            "read": list(read) if self._recipe.mode == "chunk" else None,
            "counts": list(self._counts),
        }

    def _where(self) -> tuple[Any, TokenCounts]:
        """Returns Grain's place, and the counts of the documents up to there."""
        return self._packed.get_state(), self._pieces.counts

    def set_state(self, state: Any, *, skip: bool = False) -> None:
        """Goes to a place.

        Args:
            state: What `get_state` returned, of rows that were made in the same way.
            skip: Whether documents that can only be read one after another are read
                and dropped up to the place.

        Raises:
            DataError: If the rows were made differently, or the documents cannot go to
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
        try:
            counts = TokenCounts(*state["counts"])
            then = TokenCounts(*(state["read"] or ()))
            self._packed.set_state(ast.literal_eval(state["place"]))
        except DataError:
            raise
        except Exception as error:
            msg = (
                f"the place of the state is not here ({type(error).__name__}: {error})."
                " Either it is of other documents or of another version of Grain, or "
                "it is damaged."
            )
            raise DataError(msg) from error
        self._next, self._place, self._counts = None, self._where(), counts
        read = self._pieces.counts
        if state["read"] is not None and read != then:
            msg = (
                f"the place is after {then.tokens:,} tokens of "
                f"{counted(then.documents, 'document')}, and here are "
                f"{read.tokens:,} of {counted(read.documents, 'document')}: the "
                "documents are not those of the state."
            )
            raise DataError(msg)

    def close(self) -> None:
        """Releases the documents."""
        self._pieces.close()


class _Pieces:
    """Documents as the pieces that Grain packs: whole, or cut into rows and a rest.

    A place is that of the documents, and how far one of them was cut. Documents that
    do not know their place are read and dropped up to the number that were read.
    """

    def __init__(
        self, documents: Documents, recipe: Recipe, encode: DocumentTokens
    ) -> None:
        self._documents: Any = open_documents(documents)
        self.can_seek = hasattr(self._documents, "set_state")
        self._recipe, self._encode = recipe, encode
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
            "documents": self._documents.get_state() if self.can_seek else None,
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
        counts = TokenCounts(*state["counts"])
        if self.can_seek:
            self._documents.set_state(state["documents"])
        else:
            self._skip(counts.documents)
        self.counts, self._before = counts, None
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

    def _skip(self, count: int) -> None:
        """Reads documents that do not know their place, up to a number of them."""
        num_read = self.counts.documents
        if num_read > count:
            msg = (
                f"{num_read} documents were read, and the place is after {count}: "
                "documents of an iterator are read once. Set the state of a new "
                "iterator, over documents that can be read again."
            )
            raise DataError(msg)
        num_read += sum(1 for _ in itertools.islice(self._documents, count - num_read))
        if num_read < count:
            msg = (
                f"the place is after document {count}, and there are {num_read} "
                "documents: they are not those of the state."
            )
            raise DataError(msg)

    def close(self) -> None:
        """Closes the documents' iterator, if it can be closed."""
        if hasattr(self._documents, "close"):
            self._documents.close()


def _packed(pieces: _Pieces, recipe: Recipe) -> Any:
    """Returns Grain's dataset of packed rows."""
    grain: Any = require("grain", extra="data", purpose="pack_sequences")
    names = ["tokens"]
    if recipe.document_ids:
        names += ["document_ids", "document_positions"]
    parent = as_grain(lambda: pieces)
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


def as_grain(begin: Callable[[], Any]) -> Any:
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
    for name, then in state.get("recipe", {}).items():
        if name in now and now[name] != then:
            msg = (
                f"the state is of rows packed with {name}={then!r}, and these are with "
                f"{name}={now[name]!r}: the same place is not among them."
            )
            raise DataError(msg)


def counted(number: int, word: str) -> str:
    """Returns a number with its noun.

    Example:
        >>> counted(1, "row"), counted(2000, "row")
        ('1 row', '2,000 rows')
    """
    return f"{number:,} {word}{'s' * (number != 1)}"
