"""Messages between processes, through JAX's coordination service.

Values go through its key-value store. No device is involved, so a background thread can
exchange values while the devices compute, which is not true of a collective. A process
that has waited for a while logs for whom (`warn_after_s`). It waits in slices, because
one long wait inside the store would hold back Ctrl-C until it ended.

Keys are written once and read by everybody. A process deletes its own key only when
every other process must have read it, which their later messages prove.
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

# How long one wait inside the store may take, and so Ctrl-C.
_SLICE_S = 2.0


class Channel:
    """A sequence of exchanges between processes, each of which takes part in all.

    Args:
        name: Distinguishes the channel from others; the same on all processes, and
            used once in a run.
        processes: The processes that take part, including this one; None for all.
        what: What the processes do together, to complete "process 1 did not come to
            ...".
        hint: A sentence to end a message with: what all processes must do.
        timeout_s: How long to wait for another process.
        warn_after_s: How long to wait before logging which process is late.
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
        """Sends a value, and returns every process's, by process index in order.

        Args:
            value: This process's value, JSON-serializable.
            topic: The name of the exchange, if the exchanges have no common order:
                used once, or removed with `forget`. None for the next of a sequence of
                exchanges, which are removed automatically.
            timeout_s: How long to wait for another process; None for the channel's.

        Raises:
            MeshLayoutError: As `error`, if a process sends nothing in time.
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
        # All processes have sent their value of this turn, and so have read those of
        # the turn before. They may not have read this turn's yet.
        if turn:
            self.forget(str(turn - 1))
        return values

    def from_first(self, value: Any) -> Any:
        """Returns the value of the first process; all processes must call this."""
        return self.exchange(value)[self._processes[0]]

    def say(self, topic: str, value: Any) -> None:
        """Sends a value to the other processes without waiting for theirs."""
        text = json.dumps(value)
        client = _jax.coordination_client()
        client.key_value_set(self._key(topic), text, allow_overwrite=True)

    def forget(self, topic: str) -> None:
        """Removes this process's value of an exchange that all have finished."""
        _jax.coordination_client().key_value_delete(self._key(topic))

    def _key(self, topic: str, process: int | None = None) -> str:
        process = jax.process_index() if process is None else process
        return f"{self._name}/{topic}/{process}"

    def _get(self, topic: str, process: int, timeout_s: float) -> str:
        """Waits for the value of a process, in slices."""
        client, key = _jax.coordination_client(), self._key(topic, process)
        start, was_warned = time.monotonic(), False
        while True:
            waited = time.monotonic() - start
            left = min(_SLICE_S, timeout_s - waited)
            try:
                return client.blocking_key_value_get(key, max(1, int(left * 1000)))
            except jax.errors.JaxRuntimeError as error:
                # The store has no exception class of its own for a time-out.
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
