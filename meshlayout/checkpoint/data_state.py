"""The positions of the processes' input iterators in a checkpoint."""

import inspect
import json
import logging
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax

from meshlayout import _checks
from meshlayout.checkpoint.manifest import decode, encode
from meshlayout.checkpoint.store import StoreError
from meshlayout.cluster.process_sync import Channel
from meshlayout.errors import CheckpointError, DamagedCheckpointError, DataError


logger = logging.getLogger("meshlayout.checkpoint")

# JSON never begins with this.
_ERROR = "error: "


@runtime_checkable
class Continues(Protocol):
    """An iterator whose position can be saved and restored."""

    def get_state(self) -> Any:
        """Returns the position as JSON-serializable values."""
        ...

    def set_state(self, state: Any) -> None:
        """Moves the iterator to a position that `get_state` returned."""
        ...


@dataclass(frozen=True)
class DataState:
    """The positions of all processes' iterators.

    Attributes:
        states: One for each process, as JSON; a single one if all are the same.
    """

    states: tuple[Any, ...]

    @classmethod
    def of(cls, data: object, channel: Channel) -> "DataState":
        """Returns the position of an iterator, and of those of the other processes.

        Args:
            data: The iterator.
            channel: Exchanges messages between the processes.

        Raises:
            CheckpointError: If it has none, on any process.
        """
        texts = list(channel.exchange(_text(data)).values())
        errors = [text for text in texts if text.startswith(_ERROR)]
        if errors:  # raised on all processes, so that none waits for the others
            raise CheckpointError(errors[0].removeprefix(_ERROR))
        distinct = texts[:1] if len(set(texts)) == 1 else texts
        return cls(tuple(json.loads(text) for text in distinct))

    @classmethod
    def read(cls, file: Any) -> "DataState":
        """Reads what `to_bytes` returned.

        Args:
            file: The file.

        Raises:
            DamagedCheckpointError: If it cannot be read.
        """
        try:
            content = file.read_bytes()
            return cls(tuple(json.loads(content)["states"]))
        except StoreError:
            raise
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            msg = f"{file}, the state of the input iterator, cannot be read: {error}."
            raise DamagedCheckpointError(msg) from error

    def to_bytes(self) -> bytes:
        """Returns the content of a file."""
        return json.dumps({"states": self.states}).encode()

    def set(self, data: Any) -> None:
        """Moves this process's iterator to its position.

        One that cannot go there directly, and takes `skip=True`, reads up to it; the
        log says so.

        Args:
            data: The iterator.

        Raises:
            CheckpointError: If the processes had different positions, and their number
                has changed.
        """
        states = self.states
        if len(states) > 1 and len(states) != jax.process_count():
            msg = (
                f"the {len(states)} processes that saved the input iterator were at "
                f"different positions, and now there are {jax.process_count()}. "
                "Restore on as many processes, or without data=."
            )
            raise CheckpointError(msg)
        own = states[jax.process_index() % len(states)]
        _go_to(_checked(data), decode(own))


def _text(data: object) -> str:
    """Returns an iterator's position as JSON, or what is wrong with it."""
    try:
        state = encode(_checked(data).get_state(), "data.get_state()")
        return json.dumps(state, sort_keys=True)
    except CheckpointError as error:
        return f"{_ERROR}{error}"


def _go_to(data: Any, state: Any) -> None:
    """Moves an iterator to a position, reading up to it if necessary."""
    try:
        data.set_state(state)
    except DataError:
        if "skip" not in inspect.signature(data.set_state).parameters:
            raise
    else:
        return
    data.set_state(state, skip=True)
    logger.info("the data cannot go to its position: it is read, and dropped, up to it")


def _checked(data: object) -> Continues:
    if not isinstance(data, Continues):
        msg = (
            "data= must be an iterator with get_state() and set_state(state), got "
            f"{_checks.shown(data)}. Pass iter(dataset), not the dataset."
        )
        raise CheckpointError(msg)
    return data
