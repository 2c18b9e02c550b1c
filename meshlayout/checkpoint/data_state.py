"""The positions of the processes' input iterators in a checkpoint.

The file holds one position per process, as JSON, or a single one if all are equal.
Then the number of processes may change between a save and a restore.
"""

import inspect
import json
import logging
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from meshlayout import _checks
from meshlayout.checkpoint.manifest import decode, encode
from meshlayout.checkpoint.store import StoreError
from meshlayout.cluster.channel import Channel
from meshlayout.errors import CheckpointError, DamagedCheckpointError, DataError


logger = logging.getLogger("meshlayout.checkpoint")


@runtime_checkable
class Continues(Protocol):
    """An iterator whose position can be saved and restored."""

    def get_state(self) -> Any:
        """Returns the position as JSON-serializable values."""
        ...

    def set_state(self, state: Any) -> None:
        """Moves the iterator to a position returned by `get_state`."""
        ...


def positions_of(data: object, channel: Channel) -> bytes:
    """Returns the positions of all processes' iterators, as the content of a file.

    Args:
        data: The iterator of this process.
        channel: Exchanges messages between the processes.

    Raises:
        CheckpointError: If it has no position, on any process.
    """
    with channel.failure_told():
        state = encode(_checked(data).get_state(), "data.get_state()")
    states = list(channel.exchange(state).values())
    texts = {json.dumps(state, sort_keys=True) for state in states}
    return json.dumps({"states": states[:1] if len(texts) == 1 else states}).encode()


def read_positions(file: Any) -> list[Any]:
    """Returns the positions in a file with the content that `positions_of` returned.

    Raises:
        DamagedCheckpointError: If it cannot be read.
    """
    try:
        return list(json.loads(file.read_bytes())["states"])
    except StoreError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        msg = f"{file}, the state of the input iterator, cannot be read: {error}."
        raise DamagedCheckpointError(msg) from error


def move_to_position(data: object, positions: Sequence[Any]) -> None:
    """Moves this process's iterator to its saved position.

    One that cannot go there directly but takes `skip=True` reads up to it; the log says
    so.

    Args:
        data: The iterator.
        positions: The positions of all processes that saved.

    Raises:
        CheckpointError: If the processes had different positions, and their number has
            changed.
    """
    if len(positions) > 1 and len(positions) != jax.process_count():
        msg = (
            f"the {len(positions)} processes that saved the input iterator were at "
            f"different positions, and now there are {jax.process_count()} processes. "
            "Restore on as many as before, or without data=."
        )
        raise CheckpointError(msg)
    # A single position is that of all processes.
    state = decode(positions[jax.process_index() % len(positions)])
    set_state: Any = _checked(data).set_state
    try:
        set_state(state)
    except DataError:
        if "skip" not in inspect.signature(set_state).parameters:
            raise
        set_state(state, skip=True)
        logger.info(
            "the data cannot seek to its position: batches up to it are read and "
            "dropped"
        )


def _checked(data: object) -> Continues:
    if not isinstance(data, Continues):
        msg = (
            "data= must be an iterator with get_state() and set_state(state), got "
            f"{_checks.shown(data)}. Pass iter(dataset), not the dataset."
        )
        raise CheckpointError(msg)
    return data
