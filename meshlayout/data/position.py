"""The position of an iteration over a dataset, as JSON.

A position is a few counts: with random access they determine the next batch, and a
stream adds its own position. It is saved with everything that determines the batches:
if that changed, some examples would silently be skipped, and others repeated.
"""

from typing import Any, NamedTuple

from meshlayout import _checks
from meshlayout.data.protocols import JSON
from meshlayout.errors import DataError


# Increased when a saved position would mean other batches; older ones are refused.
_VERSION = 3


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
    """Returns a position, with its dataset's identity, as a JSON-serializable dict."""
    of = {f"of_{name}": value for name, value in identity.items()}
    header = {"kind": "meshlayout.data", "version": _VERSION}
    return {**header, **of, **position._asdict()}


def from_state(identity: dict[str, JSON], state: object) -> Position:
    """Returns the position in a dict made by `to_state`, for the same dataset."""
    here = to_state(identity, Position(0))
    if not isinstance(state, dict) or state.keys() != here.keys():
        msg = "the state must be that of a data iterator's get_state(), got "
        raise DataError(f"{msg}{_checks.shown(state)}.")
    for name in here:
        if name not in Position._fields and state[name] != here[name]:
            what = name.removeprefix("of_")
            raise DataError(
                f"the state is of a dataset with {what}={state[name]!r}, and this one "
                f"has {what}={here[name]!r}: its batches would be different ones. Make "
                "the dataset as it was, or restore without it, to start the data anew."
            )
    return Position(**{name: state[name] for name in Position._fields})
