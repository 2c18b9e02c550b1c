"""The position of an iteration over a dataset, as JSON.

A position is a few counts, never a list of rows: with random access they determine the
next batch, and a stream adds its own position. It is saved with what must be the same
for it to mean the same batches; a position that silently meant others would skip some
examples and repeat others.
"""

from typing import Any, NamedTuple

from meshlayout import _checks
from meshlayout.data.protocols import JSON
from meshlayout.errors import DataError


# Increased when a saved position would mean other batches; older ones are refused.
_VERSION = 3

# What must be the same for a position to mean the same batches, as messages say it.
_IDENTITY_TEXTS = {
    "source": "a source of kind {}",  # "rows" for random access, or "stream"
    "num_rows": "a source of {} rows",  # only with random access
    "global_batch_size": "global_batch_size={}",
    "remainder": "remainder={!r}",
    "seed": "shuffle={}",
    "process": "[process, processes]={}",  # only if each has a source of its own
    # A stream of batches may count batches in its own position, which means other rows
    # if their size differs. None for single examples, and with random access.
    "block": "a stream whose first batch has {} examples",
}


class Position(NamedTuple):
    """The position after some batch; the names of its fields are part of the format.

    Attributes:
        epoch: The epoch of the next batch, from 0.
        batch: The number of batches of this epoch that were yielded.
        row: The number of rows of this epoch that were used.
        first_epoch: The epoch in which the iteration started.
        first_row: The row of that epoch at which it started.
        source: The stream's own position, if it has one: before the block of rows in
            which the next batch starts.
        offset: The number of rows of that block that were used.
    """

    epoch: int
    batch: int = 0
    row: int = 0
    first_epoch: int = 0
    first_row: int = 0
    source: Any = None
    offset: int = 0


def to_state(identity: dict[str, JSON], position: Position) -> dict[str, JSON]:
    """Returns a position as a JSON-serializable dict, with what it belongs to."""
    return {
        "kind": "meshlayout.data",
        "version": _VERSION,
        **{f"of_{name}": value for name, value in identity.items()},
        **position._asdict(),
    }


def from_state(identity: dict[str, JSON], state: object) -> Position:
    """Returns the position in a dict made by `to_state`.

    Raises:
        DataError: If it is not such a dict, or belongs to another dataset.
    """
    if not isinstance(state, dict) or state.get("kind") != "meshlayout.data":
        msg = (
            "the state is not that of a data iterator: expected what get_state() "
            f"returned, got {_checks.shown(state)}."
        )
        raise DataError(msg)
    if state.get("version") != _VERSION:
        msg = (
            f"the state has version {state.get('version')!r}, and this release reads "
            f"version {_VERSION}."
        )
        raise DataError(msg)
    for name in [*Position._fields, *(f"of_{name}" for name in identity)]:
        if name not in state:
            msg = f"the state lacks {name!r}; it was cut or written by hand."
            raise DataError(msg)
    for name, here in identity.items():
        there = state[f"of_{name}"]
        # The block size matters only to a position of the stream's own.
        if there != here and (name != "block" or state["source"] is not None):
            msg = (
                f"the state is of {_text(name, there)}, and this dataset has "
                f"{_text(name, here)}: its batches would be different ones. Make the "
                "dataset as it was when the state was saved."
            )
            raise DataError(msg)
    counts = {
        name: _checks.count(
            f"the state's {name!r}", state[name], at_least=0, error=DataError
        )
        for name in Position._fields
        if name != "source"
    }
    return Position(source=state["source"], **counts)


def _text(name: str, value: object) -> str:
    if name == "block" and value is None:
        return "a stream of single examples"
    return _IDENTITY_TEXTS[name].format(value)
