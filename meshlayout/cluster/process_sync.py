"""Messages between processes, through JAX's coordination service.

Values go through its key-value store. No device takes part, so a background thread may
exchange values while the devices compute, which a collective could not. A process that
waits logs early for whom (`warn_after_s`), and can be interrupted: one long wait inside
the store would hold Ctrl-C back until it ended.
"""

import json
import logging
import time
from collections.abc import Sequence
from typing import Any

import jax

from meshlayout import _jax
from meshlayout.errors import MeshLayoutError


_log = logging.getLogger(__name__)

# One wait inside the store: as long as Ctrl-C may take.
_SLICE_S = 2.0

_FAILED = "failed"


class Channel:
    """One conversation between processes.

    All of them open their channels of one name in the same order, and come to the same
    exchanges.

    Args:
        name: Distinguishes it from other channels; the same on all processes.
        processes: Which processes take part, this one among them; None for all.
        what: What the processes do together, to complete "process 1 did not come to
            ...".
        hint: A sentence to end a message with: what all processes have to do.
        timeout_s: How long to wait for another process.
        warn_after_s: After how long to log who is waited for.
        error: The class to raise.
    """

    def __init__(
        self,
        name: str,
        processes: Sequence[int] | None = None,
        *,
        what: str,
        hint: str = "",
        timeout_s: float = 600.0,
        warn_after_s: float = 10.0,
        error: type[MeshLayoutError] = MeshLayoutError,
    ) -> None:
        self._processes = list(processes or range(jax.process_count()))
        self._name, self._what, self._hint = f"meshlayout/{name}", what, hint
        self._timeout_s, self._warn_after_s = timeout_s, warn_after_s
        self._error = error
        self._turn = 0

    def exchange(
        self, value: Any, topic: str | None = None, timeout_s: float | None = None
    ) -> dict[int, Any]:
        """Returns what each process says, by process index in ascending order.

        Args:
            value: What this process says, as JSON takes it.
            topic: What it is about, in exchanges that have no common order: a name
                that is used once, or whose answers are removed with `forget`. None for
                the next exchange in a row, whose answers are removed by themselves.
            timeout_s: How long to wait for another process; None as for all exchanges.

        Raises:
            MeshLayoutError: As `error`, if a process says nothing in time.
        """
        here = jax.process_index()
        if self._processes == [here]:
            return {here: value}
        turn = None
        if topic is None:
            turn, self._turn = self._turn, self._turn + 1
            topic = str(turn)
        self.say(topic, value)
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        values = {
            process: json.loads(self._get(topic, process, limit_s))
            for process in self._processes
        }
        if turn:  # whoever has come here has read what was said before
            self.forget(str(turn - 1))
        return values

    def from_first(self, value: Any) -> Any:
        """Returns what the first process says, in an exchange of all of them."""
        return self.exchange(value)[self._processes[0]]

    def say(self, topic: str, value: Any) -> None:
        """Answers the other processes, and does not wait for them."""
        text = json.dumps(value)
        client = _jax.coordination_client()
        client.key_value_set(self._key(topic), text, allow_overwrite=True)

    def forget(self, topic: str) -> None:
        """Removes what this process said in an exchange that all have finished."""
        _jax.coordination_client().key_value_delete(self._key(topic))

    def _key(self, topic: str, process: int | None = None) -> str:
        process = jax.process_index() if process is None else process
        return f"{self._name}/{topic}/{process}"

    def _get(self, topic: str, process: int, timeout_s: float) -> str:
        """Waits for what a process says, in slices."""
        client, key = _jax.coordination_client(), self._key(topic, process)
        start, was_warned = time.monotonic(), False
        while True:
            waited = time.monotonic() - start
            left = min(_SLICE_S, timeout_s - waited)
            try:
                return client.blocking_key_value_get(key, max(1, int(left * 1000)))
            except jax.errors.JaxRuntimeError as error:
                is_late = "DEADLINE_EXCEEDED" in str(error)
                waited = time.monotonic() - start
                if not is_late or waited >= timeout_s:
                    msg = (
                        f"process {jax.process_index()} waited {waited:.0f} s for "
                        f"process {process}, which did not come to {self._what}. "
                        f"{self._hint}"
                    )
                    raise self._error(msg.rstrip()) from error
            if waited >= self._warn_after_s and not was_warned:
                was_warned = True
                _log.warning(
                    "process %d has waited %.0f s for process %d to come to %s, and "
                    "waits up to %.0f s. %s",
                    *(jax.process_index(), waited, process, self._what),
                    *(timeout_s, self._hint),
                )
