"""Agreement between the processes of a run, through JAX's coordination service.

Texts go through its key-value store, so that a thread may talk while the devices work.
"""

import itertools
import logging
from typing import Any

import jax

from meshlayout import _jax
from meshlayout.errors import CheckpointError


logger = logging.getLogger("meshlayout.checkpoint")

# Checkpointers are opened in the same order on all processes, so the numbers agree.
_numbers = itertools.count()

_TIMEOUT_S = 1200

# A process that saves alone, the usual mistake, is told soon what it waits for.
_WARN_AFTER_S = 10


class Channel:
    """One conversation; all processes say the same number of things in it.

    Args:
        name: What it is about, to tell the channels of one object apart.
        number: The object's number; see `next_number`.
        is_patient: Whether long waits are usual, as for the files of another process.
    """

    def __init__(self, name: str, number: int, *, is_patient: bool = False) -> None:
        self._prefix = f"meshlayout/checkpoint/{number}/{name}"
        self._is_patient = is_patient
        self._turn = 0

    def exchange(self, text: str, purpose: str = "at the same checkpoint") -> list[str]:
        """Returns what every process said, in the order of the processes.

        Args:
            text: What this process says.
            purpose: What the others are waited for, as "to save step 3".

        Raises:
            CheckpointError: If a process says nothing for too long, or is gone.
        """
        count, own = jax.process_count(), jax.process_index()
        if count == 1:
            return [text]
        store = _jax.coordination_client()
        turn, self._turn = self._turn, self._turn + 1
        store.key_value_set(f"{self._prefix}/{turn}/{own}", text or " ")
        texts = [self._get(store, turn, other, purpose) for other in range(count)]
        if turn:  # whoever has come here has read what was said before
            store.key_value_delete(f"{self._prefix}/{turn - 1}/{own}")
        return ["" if text == " " else text for text in texts]

    def from_first(self, text: str, purpose: str = "at the same checkpoint") -> str:
        """Returns what process 0 said.

        Args:
            text: What this process says.
            purpose: As for `exchange`.

        Raises:
            CheckpointError: As `exchange`.
        """
        return self.exchange(text, purpose)[0]

    def _get(self, store: Any, turn: int, process: int, purpose: str) -> str:
        key = f"{self._prefix}/{turn}/{process}"
        own = jax.process_index()
        rule = (
            "Every process has to open a checkpointer, save and restore the same steps "
            "in the same order, and not process 0 alone."
        )
        waits_s = [_WARN_AFTER_S, _TIMEOUT_S - _WARN_AFTER_S]
        if self._is_patient:
            waits_s = [_TIMEOUT_S]
        for wait_s in waits_s:
            try:
                return store.blocking_key_value_get(key, 1000 * wait_s)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    msg = (
                        f"process {own} waited for process {process} {purpose}, and "
                        f"that process, or process 0, is gone: {error}"
                    )
                    raise CheckpointError(msg) from error
            if wait_s == _WARN_AFTER_S:
                logger.warning(
                    "process %d has waited %d s for process %d %s. %s",
                    *(own, wait_s, process, purpose, rule),
                )
        msg = (
            f"process {own} waited {_TIMEOUT_S} s for process {process} {purpose}. "
            f"{rule}"
        )
        raise CheckpointError(msg)


def next_number() -> int:
    """Returns the number of a new object that has channels."""
    return next(_numbers)
