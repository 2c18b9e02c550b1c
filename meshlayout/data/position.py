"""The position of an iteration over a dataset, as JSON."""

from typing import Any, NamedTuple

from meshlayout import _checks
from meshlayout.data.protocols import JSON
from meshlayout.errors import DataError


# 2: shuffles use this library's own permutation, and streams record how they are cut.
_VERSION = 2

# What has to be the same for a place to mean the same batches, in words.
_WORDS = {
    "source": "a source of kind {}",  # "rows" for random access, "stream" for one way
    "num_rows": "a source of {} rows",  # of a source with random access
    "global_batch_size": "global_batch_size={}",
    "remainder": "remainder={!r}",
    "seed": "shuffle={}",
    "process": "[process, processes]={}",  # where each has a source of its own
    # A stream of batches may count batches in its own place, which means other rows if
    # their size differs; None for single examples, and where rows are counted.
    "block": "a stream whose first batch has {} examples",
}


class Position(NamedTuple):
    """The place after some batch.

    Attributes:
        epoch: The epoch of the next batch, from 0.
        batch: How many batches of this epoch were given.
        row: How many rows of this epoch were used.
        first_epoch: The epoch in which the iteration began.
        first_row: The row of that epoch at which it began.
        given: How many batches the iteration has given.
        source: The source's own place, where it has one: before the block of rows in
            which the next batch begins.
        offset: The rows of that block that were used.
    """

    epoch: int
    batch: int = 0
    row: int = 0
    first_epoch: int = 0
    first_row: int = 0
    given: int = 0
    source: Any = None
    offset: int = 0


def to_state(identity: dict[str, JSON], position: Position) -> dict[str, JSON]:
    """Returns a place as a JSON-serializable dict, with what it is a place of."""
    return {
        "kind": "meshlayout.data",
        "version": _VERSION,
        **{f"of_{name}": value for name, value in identity.items()},
        **position._asdict(),
    }


def from_state(identity: dict[str, JSON], state: object) -> Position:
    """Returns the place that a dict of `to_state` names.

    Raises:
        DataError: If it is not a place, or one of another dataset.
    """
    if not isinstance(state, dict) or state.get("kind") != "meshlayout.data":
        msg = (
            "the state is not one of a data iterator: expected what get_state() "
            f"returned, and got {_checks.shown(state)}."
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
        # How a stream is cut matters only to the place that it has named itself.
        if there != here and (name != "block" or state["source"] is not None):
            msg = (
                f"the state is of {_text(name, there)}, and this dataset has "
                f"{_text(name, here)}: its batches would be others. Make the dataset "
                "as it was when the state was taken."
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
    return _WORDS[name].format(value)
