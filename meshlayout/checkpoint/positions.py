"""The positions of the processes' input iterators in a checkpoint, as JSON.

There is one per process, or only one, for any number of processes, if all are equal.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from meshlayout import _checks
from meshlayout.errors import CheckpointError


@runtime_checkable
class Continues(Protocol):
    """An iterator whose position, in values of JSON, can be saved and restored."""

    def get_state(self) -> Any:
        """Returns the position."""

    def set_state(self, state: Any) -> None:
        """Moves to a position."""


def as_json(value: Any, where: str) -> Any:
    """Returns a value as it is after a round trip through JSON."""
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [as_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: as_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    msg = f"{where} is {_checks.shown(value)}, which cannot be written as JSON."
    raise CheckpointError(msg)


def position_of(data: object) -> Any:
    """Returns the position of this process's iterator; None for no iterator."""
    if data is None:
        return None
    if not isinstance(data, Continues):
        msg = "data= must be an iterator, such as iter(dataset), got"
        raise CheckpointError(f"{msg} {_checks.shown(data)}.")
    return as_json(data.get_state(), "data.get_state()")


def move_to_position(data: Any, positions: Sequence[Any] | None) -> None:
    """Moves this process's iterator to its position among those of all processes."""
    if positions is None:
        raise CheckpointError("the step was saved without data=: restore it without.")
    if len(positions) not in (1, jax.process_count()):
        count = f"{len(positions)} processes"
        msg = f"the data positions of {count} differed: restore on {count}."
        raise CheckpointError(msg)
    # A source of ours that cannot seek reads and drops the rows before its position.
    can_skip = "skip" in inspect.signature(data.set_state).parameters
    state = positions[jax.process_index() % len(positions)]
    data.set_state(state, **({"skip": True} if can_skip else {}))
