"""Messages between processes, through JAX's coordination service.

Values go through its key-value store. No device is involved, so a background thread can
exchange values while the devices compute, which is not true of a collective. A process
that has waited for a while logs for whom (`warn_after_s`). It waits in slices, because
one long wait inside the store would hold back Ctrl-C until it ended.

Keys are written once and read by everybody. A process deletes its own key only when
every other process must have read it, which their later messages prove.

Instead of a value, a process can send that it failed (`fail`), which all others raise,
or that it does not take part any more (`leave`).
"""

import contextlib
import itertools
import logging
import operator
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, Final, TypeVar

import jax

from meshlayout import _jax
from meshlayout.cluster import activity
from meshlayout.errors import ClusterError, MeshLayoutError


_log = logging.getLogger(__name__)

T = TypeVar("T")

_PREFIX = "meshlayout/channel"

# How long one wait inside the store may take, and so Ctrl-C.
_SLICE_S = 2.0

# Numbers this process's messages, so that the latest can be found.
_numbers = itertools.count()


class Left(Enum):
    """The type of `LEFT`."""

    LEFT = "has left"


# What `exchange` returns for a process that has left.
LEFT: Final = Left.LEFT


class _Failure:
    """The message of a process that has failed.

    Args:
        text: What went wrong.
    """

    def __init__(self, text: str) -> None:
        self.text = text


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
        error: type[MeshLayoutError] = ClusterError,
    ) -> None:
        self._processes = list(processes or range(_jax.process_count()))
        self._name, self._what, self._hint = f"{_PREFIX}/{name}", what, hint
        self._timeout_s, self._warn_after_s = timeout_s, warn_after_s
        self._error = error
        self._turn = 0

    def exchange(
        self,
        value: Any,
        topic: str | None = None,
        *,
        timeout_s: float | None = None,
        failure: str = "{failure}",
    ) -> dict[int, Any]:
        """Sends a value, and returns every process's, by process index in order.

        Args:
            value: This process's value, which pickle can hold.
            topic: The name of the exchange, if the exchanges have no common order:
                used once, or removed with `forget`. None for the next of a sequence of
                exchanges, which are removed automatically.
            timeout_s: How long to wait for another process; None for the channel's.
            failure: The message if another process failed, in which `{process}` and
                `{failure}` are filled in.

        Returns:
            The values; `LEFT` for a process that has left.

        Raises:
            MeshLayoutError: As `error`, if another process failed, or sends nothing in
                time; with a TimeoutError as its cause in the latter case.
        """
        here = _jax.process_index()
        if self._processes == [here]:
            return {here: value}
        turn = None
        if topic is None:
            turn, self._turn = self._turn, self._turn + 1
            topic = str(turn)
        self._send(topic, value)
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            with activity.during(
                f"waiting for all to come to {self._what}", waits=True
            ):
                values = {p: self._get(topic, p, limit_s) for p in self._processes}
        except TimeoutError as late:
            # Whoever comes later must not take this process for one that waits.
            if not isinstance(value, _Failure):
                self._send(topic, _Failure(str(late)))
            raise self._error(str(late)) from late
        # All processes have sent their value of this turn, and so have read those of
        # the turn before. They may not have read this turn's yet.
        if turn:
            self.forget(str(turn - 1))
        for process, answer in values.items():
            if isinstance(answer, _Failure) and process != here:
                msg = failure.format(process=process, failure=answer.text)
                raise self._error(msg)
        return values

    def from_first(self, value: T) -> T:
        """Returns the value of the first process; all processes must call this."""
        return self.exchange(value)[self._processes[0]]

    def on_first(self, work: Callable[[], T]) -> T:
        """Calls a function on the first process, and returns its result on all.

        Raises:
            MeshLayoutError: What `work` raises; as `error` on the other processes.
        """
        if _jax.process_index() != self._processes[0]:
            return self.exchange(None)[self._processes[0]]
        with self.failure_told():
            result = work()
        return self.from_first(result)

    @contextlib.contextmanager
    def failure_told(self, topic: str | None = None) -> Iterator[None]:
        """Tells the others of an error inside, at the exchange that comes next."""
        try:
            yield
        except Exception as error:
            self.fail(error, topic)
            raise

    def fail(self, error: Exception, topic: str | None = None) -> None:
        """Sends an error instead of a value: the others raise it in their exchange.

        Waits for them, so that this process does not end before they have read it.
        """
        is_ours = isinstance(error, MeshLayoutError)
        text = str(error) if is_ours else f"{type(error).__name__}: {error}"
        # This process raises its own error, whatever the others say.
        with contextlib.suppress(self._error):
            self.exchange(_Failure(text), topic)

    def leave(self, topic: str) -> None:
        """Releases processes that wait for this one in an exchange."""
        self._send(topic, LEFT)

    def forget(self, topic: str) -> None:
        """Removes this process's value of an exchange that all have finished."""
        _jax.coordination_client().key_value_delete(self._key(topic))

    def _send(self, topic: str, value: Any) -> None:
        message = pickle.dumps((next(_numbers), self._what, value))
        client = _jax.coordination_client()
        client.key_value_set_bytes(self._key(topic), message, allow_overwrite=True)

    def _key(self, topic: str, process: int | None = None) -> str:
        process = _jax.process_index() if process is None else process
        return f"{self._name}/{topic}/{process}"

    def _get(self, topic: str, process: int, timeout_s: float) -> Any:
        """Waits for the value of a process, in slices.

        Raises:
            TimeoutError: If it does not come in time, or the service has ended.
        """
        client, key = _jax.coordination_client(), self._key(topic, process)
        start, was_warned = time.monotonic(), False
        while True:
            waited = time.monotonic() - start
            slice_ms = 1000 * min(_SLICE_S, timeout_s - waited)
            try:
                message = client.blocking_key_value_get_bytes(
                    key, max(1, int(slice_ms))
                )
                return pickle.loads(message)[2]
            except jax.errors.JaxRuntimeError as error:
                # The store has no exception class of its own for a time-out.
                is_late = "DEADLINE_EXCEEDED" in str(error)
                waited = time.monotonic() - start
                if not is_late or waited >= timeout_s:
                    msg = (
                        f"process {_jax.process_index()} waited {waited:.0f} s for "
                        f"process {process}, which did not come to {self._what}. "
                        f"{_last_seen(process) if is_late else ''}{self._hint}"
                    )
                    raise TimeoutError(msg.rstrip()) from error
            if waited >= self._warn_after_s and not was_warned:
                was_warned = True
                _log.warning(
                    "process %d has waited %.0f s for process %d to come to %s, and "
                    "waits up to %.0f s. %s",
                    *(_jax.process_index(), waited, process, self._what),
                    *(timeout_s, self._hint),
                )


def _last_seen(process: int) -> str:
    """Returns a sentence about the latest exchange that a process came to."""
    entries = _jax.coordination_client().key_value_dir_get_bytes(_PREFIX)
    messages = [
        pickle.loads(message)
        for key, message in entries
        if key.rpartition("/")[2] == str(process)
    ]
    if not messages:
        return ""
    return f"It last came to {max(messages, key=operator.itemgetter(0))[1]}. "
