"""Where an iteration over a data set stands, as JSON takes it."""

import json
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from meshlayout.errors import DataError


_VERSION = 1

# The place of a source whose examples come in another order in every run.
NO_ORDER = "no order"


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


@dataclass(frozen=True)
class Identity:
    """What has to be the same for a place to mean the same batches.

    Attributes:
        source: `"rows"` for random access, `"stream"` for one way.
        num_rows: Rows of a source with random access.
        global_batch_size: Rows of a global batch.
        remainder: What becomes of rows that do not fill a batch.
        seed: What shuffles the rows.
        process: This process's index and the number of processes, where each of them
            has a source of its own.
    """

    source: str
    num_rows: int | None
    global_batch_size: int
    remainder: str
    seed: int | None
    process: list[int] | None


_WORDS = {
    "source": "a source of kind {}",
    "num_rows": "a source of {} rows",
    "global_batch_size": "global_batch_size={}",
    "remainder": "remainder={!r}",
    "seed": "shuffle={}",
    "process": "[process, processes]={}",
}


def to_state(identity: Identity, position: Position) -> dict[str, Any]:
    """Returns a place as a dict that JSON takes.

    Args:
        identity: Whose place it is.
        position: The place.
    """
    return {
        "kind": "meshlayout.data",
        "version": _VERSION,
        **{f"of_{name}": value for name, value in asdict(identity).items()},
        **position._asdict(),
    }


def from_state(identity: Identity, state: Any) -> Position:
    """Returns the place that a dict names.

    Args:
        identity: Of the data set that is to go there.
        state: What `to_state` has returned, or JSON has read.

    Raises:
        DataError: If it is none, or one of another data set.
    """
    if not isinstance(state, dict) or state.get("kind") != "meshlayout.data":
        msg = (
            "the state is not one of a data iterator: expected what get_state() "
            f"returned, and got {_shortened(state)}."
        )
        raise DataError(msg)
    if state.get("version") != _VERSION:
        msg = (
            f"the state has version {state.get('version')!r}, and this release reads "
            f"version {_VERSION}."
        )
        raise DataError(msg)
    fields = Position._fields
    own = asdict(identity)
    missing = [
        name for name in [*fields, *(f"of_{name}" for name in own)] if name not in state
    ]
    if missing:
        msg = f"the state lacks {missing[0]!r}; it was cut or written by hand."
        raise DataError(msg)
    for name, here in own.items():
        there = state[f"of_{name}"]
        if there != here:
            word = _WORDS[name]
            msg = (
                f"the state is of {word.format(there)}, and this data set has "
                f"{word.format(here)}: its batches would be others. Make the data set "
                "as it was when the state was taken."
            )
            raise DataError(msg)
    numbers = {name: state[name] for name in fields}
    for name in fields:
        if name != "source" and (type(numbers[name]) is not int or numbers[name] < 0):
            msg = f"the state's {name!r} is {numbers[name]!r}, and no count."
            raise DataError(msg)
    return Position(**numbers)


def check_json(state: Any) -> Any:
    """Returns a source's own state, or raises DataError if JSON does not take it.

    Args:
        state: What the source returned.
    """
    if state is None:
        return None
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        msg = (
            f"the source's get_state() returned a {type(state).__name__} that JSON "
            f"does not take: {error}. Return numbers, strings, lists and dicts."
        )
        raise DataError(msg) from error


def _shortened(state: Any) -> str:
    text = repr(state)
    return text if len(text) <= 60 else f"{text[:60]}..."
