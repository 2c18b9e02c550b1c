"""Packed rows, one pass after another, each with a place to go on from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from meshlayout.data.documents import Documents
from meshlayout.data.packing import (
    Counts,
    Place,
    Reader,
    Window,
    first_fit,
    in_order,
)
from meshlayout.data.source import Block
from meshlayout.data.tokens import DocumentTokens
from meshlayout.errors import DataError


Mode: TypeAlias = Literal["chunk", "pack"]
Remainder: TypeAlias = Literal["pad", "drop", "error"]
Row: TypeAlias = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Recipe:
    """How rows are made."""

    mode: Mode
    length: int
    separator: int | None
    remainder: Remainder
    targets: bool
    document_ids: bool
    open_rows: int

    def as_json(self) -> dict[str, Any]:
        """Returns what a place among the rows depends on."""
        return {
            "mode": self.mode,
            "length": self.length,
            "separator": None if self.separator is None else int(self.separator),
            "remainder": self.remainder,
            "open_rows": self.open_rows,
        }

    def rows(self, window: Window) -> Row:
        """Returns the rows of a window that are used."""
        used = slice(window.num_used)
        found = {"tokens": window.tokens[used]}
        weights = (window.document_ids[used] >= 0).astype(np.float32)
        if self.targets:
            found["targets"] = window.targets[used]
            weights = window.has_target[used]
        if self.mode == "pack":
            found["segment_ids"] = window.segment_ids[used]
            found["positions"] = window.positions[used]
        if self.document_ids:
            found["document_ids"] = window.document_ids[used]
            found["document_positions"] = window.document_positions[used]
        return {**found, "weight": weights}


class Windows:
    """One pass over documents, as windows of rows.

    Args:
        documents: The pass.
        recipe: How rows are made.
        encode: What makes tokens of documents.
    """

    def __init__(
        self, documents: Documents, recipe: Recipe, encode: DocumentTokens
    ) -> None:
        self._documents, self._recipe = documents, recipe
        self._reader = Reader(documents, encode)
        self.can_seek = documents.can_seek

    @property
    def counts(self) -> Counts:
        """What was packed so far."""
        return self._reader.counts

    def __iter__(self) -> "Windows":
        return self

    def __next__(self) -> Row:
        recipe, reader = self._recipe, self._reader
        lay = first_fit if recipe.mode == "pack" else in_order
        window = lay(reader, recipe.open_rows, recipe.length)
        short = int(window.used[window.num_used - 1]) if window.num_used else 0
        if recipe.mode == "chunk" and 0 < short < recipe.length:
            self._finish(window, short)
        rows = window.num_used
        if not rows:
            raise StopIteration
        padding = rows * recipe.length - int(window.used.sum())
        reader.counts = reader.counts.plus(rows=rows, padding=padding)
        return recipe.rows(window)

    def place(self) -> Place:
        """Returns where the next window begins."""
        return self._reader.place()

    def go_to(self, place: Place) -> None:
        """Goes to where a window begins."""
        self._reader.go_to(place)

    def close(self) -> None:
        """Lets go of the documents."""
        self._documents.close()

    def _finish(self, window: Window, short: int) -> None:
        """Deals with a last row that is not full."""
        if self._recipe.remainder == "error":
            tokens = self.counts.tokens
            msg = (
                f"{tokens:,} tokens leave {short:,} in a last row of "
                f"{self._recipe.length:,}. Choose remainder='pad' or 'drop', or "
                "another length."
            )
            raise DataError(msg)
        if self._recipe.remainder == "drop":
            window.used[window.num_used - 1] = 0
            self._reader.counts = self.counts.plus(dropped=short)


class PackedIterator:
    """One pass over packed rows."""

    def __init__(self, windows: Windows, recipe: Recipe) -> None:
        self._windows, self._recipe = windows, recipe
        self._place = windows.place()
        self._window: Row | None = None
        self._given = 0

    def __iter__(self) -> "PackedIterator":
        return self

    def __next__(self) -> Row:
        if self._window is None:
            self._place, self._given = self._windows.place(), 0
            self._window = next(self._windows)
        window, at = self._window, self._given
        self._given += 1
        if self._given == len(window["tokens"]):
            self._window = None
        return {name: leaf[at] for name, leaf in window.items()}

    def get_state(self) -> dict[str, Any]:
        """Returns the place after the last row, as JSON takes it."""
        if self._window is None:
            return _state(self._recipe, self._windows.place(), 0)
        return _state(self._recipe, self._place, self._given)

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
        place, given = _of_state(self._recipe, state)
        if not self._windows.can_seek and not skip:
            msg = (
                "these documents can only be read one after another. Give a list or a "
                "Grain dataset, or set_state(state, skip=True), which reads and drops "
                f"{place.number:,} documents."
            )
            raise DataError(msg)
        self._windows.go_to(place)
        self._window, self._place, self._given = None, place, 0
        for _ in range(given):
            next(self)

    def close(self) -> None:
        """Lets go of the documents."""
        self._windows.close()


class PackedStream:
    """One pass over packed rows, in blocks, for `distribute_dataset`."""

    def __init__(self, windows: Windows, recipe: Recipe) -> None:
        self._windows, self._recipe = windows, recipe

    def __next__(self) -> Block:
        rows = next(self._windows)
        return Block(rows, len(rows["tokens"]), is_own=True)

    def get_state(self) -> Any:
        """Returns the place after the last block; None if documents cannot seek."""
        if not self._windows.can_seek:
            return None
        return _state(self._recipe, self._windows.place(), 0)

    def set_state(self, state: Any) -> None:
        """Goes to a place."""
        place, _ = _of_state(self._recipe, state)
        self._windows.go_to(place)

    def close(self) -> None:
        """Lets go of the documents."""
        self._windows.close()


_KIND = "packed sequences"
_VERSION = 1


def _state(recipe: Recipe, place: Place, given: int) -> dict[str, Any]:
    return {
        "kind": _KIND,
        "version": _VERSION,
        "recipe": recipe.as_json(),
        "window": place.as_json(),
        "given": given,
    }


def _of_state(recipe: Recipe, state: Any) -> tuple[Place, int]:
    is_ours = isinstance(state, Mapping) and state.get("kind") == _KIND
    if not is_ours or state.get("version") != _VERSION:
        msg = (
            f"the state {state!r} is none of pack_sequences, version {_VERSION}. Give "
            "what get_state() of such an iterator returned."
        )
        raise DataError(msg)
    now = recipe.as_json()
    for name, then in state["recipe"].items():
        if now[name] != then:
            msg = (
                f"the state is of rows packed with {name}={then!r}, and these are with "
                f"{name}={now[name]!r}: the same place is not among them."
            )
            raise DataError(msg)
    return Place.of_json(state["window"]), state["given"]
