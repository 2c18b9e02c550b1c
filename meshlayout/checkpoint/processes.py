"""Agreement between the processes of a run, through JAX's coordination service.

Texts go through its key-value store, so that a thread may talk while the devices work.
"""

import itertools
from typing import Any

import jax

from meshlayout import _jax
from meshlayout.errors import CheckpointError


# Checkpointers are opened in the same order on all processes, so the numbers agree.
_numbers = itertools.count()

_TIMEOUT_S = 1200.0


class Channel:
    """One conversation; all processes say the same number of things in it.

    Args:
        name: What it is about, to tell the channels of one object apart.
        number: The object's number; see `next_number`.
    """

    def __init__(self, name: str, number: int) -> None:
        self._prefix = f"meshlayout/checkpoint/{number}/{name}"
        self._turn = 0

    def exchange(self, text: str) -> list[str]:
        """Returns what every process said, in the order of the processes.

        Args:
            text: What this process says.

        Raises:
            CheckpointError: If a process says nothing for too long.
        """
        count, own = jax.process_count(), jax.process_index()
        if count == 1:
            return [text]
        store = _jax.coordination_client()
        turn, self._turn = self._turn, self._turn + 1
        store.key_value_set(f"{self._prefix}/{turn}/{own}", text or " ")
        said = [self._get(store, turn, other) for other in range(count)]
        if turn:  # whoever has come here has read what was said before
            store.key_value_delete(f"{self._prefix}/{turn - 1}/{own}")
        return ["" if one == " " else one for one in said]

    def from_first(self, text: str) -> str:
        """Returns what process 0 said.

        Args:
            text: What this process says.

        Raises:
            CheckpointError: As `exchange`.
        """
        return self.exchange(text)[0]

    def _get(self, store: Any, turn: int, process: int) -> str:
        key = f"{self._prefix}/{turn}/{process}"
        try:
            return store.blocking_key_value_get(key, int(_TIMEOUT_S * 1000))
        except jax.errors.JaxRuntimeError as error:
            msg = (
                f"process {jax.process_index()} waited {_TIMEOUT_S:.0f} s for process "
                f"{process} to come to the same checkpoint. All processes have to save "
                "and restore the same steps in the same order."
            )
            raise CheckpointError(msg) from error


def next_number() -> int:
    """Returns the number of a new object that has channels."""
    return next(_numbers)
