"""The state of an input iterator in a checkpoint."""

import inspect
import json
import logging
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax

from meshlayout.checkpoint.manifest import decode, encode
from meshlayout.checkpoint.processes import Channel
from meshlayout.checkpoint.store import StoreError
from meshlayout.errors import CheckpointError, DamagedCheckpointError, DataError


logger = logging.getLogger("meshlayout.checkpoint")

# No JSON begins so.
_ERROR = "error: "


@runtime_checkable
class Continues(Protocol):
    """An iterator that tells where it is, and can be put there again."""

    def get_state(self) -> Any:
        """Returns where the iterator is."""
        ...

    def set_state(self, state: Any) -> None:
        """Puts the iterator where another one was."""
        ...


@dataclass(frozen=True)
class DataState:
    """Where the iterators of all processes are.

    Attributes:
        states: One for each process, as JSON; a single one if all are the same.
    """

    states: tuple[Any, ...]

    @classmethod
    def of(cls, data: Any, channel: Channel) -> "DataState":
        """Returns where an iterator is, and those of the other processes.

        Args:
            data: The iterator.
            channel: The processes' conversation.

        Raises:
            CheckpointError: If it cannot tell.
        """
        said = channel.exchange(_said(data))
        wrong = [one for one in said if one.startswith(_ERROR)]
        if wrong:  # on all processes, so that none waits for the others
            raise CheckpointError(wrong[0].removeprefix(_ERROR))
        some = said[:1] if len(set(said)) == 1 else said
        return cls(tuple(json.loads(one) for one in some))

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
        except (OSError, ValueError, KeyError, TypeError) as error:
            msg = f"{file}, the state of the input iterator, cannot be read: {error}."
            raise DamagedCheckpointError(msg) from error

    def to_bytes(self) -> bytes:
        """Returns the content of a file."""
        return json.dumps({"states": self.states}).encode()

    def set(self, data: Any) -> None:
        """Puts this process's iterator where it was.

        One that cannot go to a place, and takes `skip=True`, reads up to it; the log
        says so.

        Args:
            data: The iterator.

        Raises:
            CheckpointError: If the processes were at different places, and are not as
                many as they were.
        """
        states = self.states
        if len(states) > 1 and len(states) != jax.process_count():
            msg = (
                f"each of the {len(states)} processes that saved the input iterator "
                f"was at a place of its own, and now there are {jax.process_count()}. "
                "Restore on as many processes, or without data=."
            )
            raise CheckpointError(msg)
        own = states[jax.process_index() % len(states)]
        _go_to(_checked(data), decode(own))


def _said(data: Any) -> str:
    """Returns an iterator's state as JSON, or what is wrong with it."""
    try:
        state = encode(_checked(data).get_state(), "data.get_state()")
        return json.dumps(state, sort_keys=True)
    except CheckpointError as error:
        return f"{_ERROR}{error}"


def _go_to(data: Any, state: Any) -> None:
    """Puts an iterator somewhere, by reading up to it if there is no other way."""
    try:
        data.set_state(state)
    except DataError:
        if "skip" not in inspect.signature(data.set_state).parameters:
            raise
    else:
        return
    data.set_state(state, skip=True)
    logger.info("the data cannot go to its place: it is read, and dropped, up to it")


def _checked(data: Any) -> Continues:
    if not isinstance(data, Continues):
        msg = (
            f"data= takes an iterator with get_state() and set_state(state), and got "
            f"{data!r} of type {type(data).__name__}. Pass iter(dataset), not the "
            "data set."
        )
        raise CheckpointError(msg)
    return data
