"""Messages between processes, through the key-value store of JAX's service.

No device is involved, so a background thread can exchange values while the devices
compute, which is not true of a collective. A process that has ended its program instead
of coming is named by those that wait for it; one that is lost or has failed ends them
(see `watch`). Keys are written once. A process deletes its own key once all others must
have read it, which their later messages prove.
"""

import contextlib
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

from meshlayout import _jax, _render
from meshlayout._counts import counts
from meshlayout.cluster import watch
from meshlayout.errors import ClusterError, MeshLayoutError


_log = logging.getLogger(__name__)

T = TypeVar("T")

_SLICE_S = 1.0  # one wait inside the store, and so Ctrl-C
_SHORT_BYTES = 2**12


class LEFT:
    """What `exchange` returns, as it is, for a process that has left."""


class _Problem(NamedTuple):
    """What a process sends that has failed."""

    text: str


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

    Attributes:
        processes: The processes that take part.
        lock: For exchanges of several threads, which the channel does not keep apart.
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
        self.processes = list(processes or range(_jax.process_count()))
        self._name, self._what, self._hint = name, what, hint
        self._timeout_s, self._warn_after_s = timeout_s, warn_after_s
        self._error, self._turn, self.lock = error, 0, threading.Lock()

    def exchange(
        self,
        value: object,
        *,
        what: str | None = None,
        timeout_s: float | None = None,
        failure: str = "{failure}",
    ) -> dict[int, Any]:
        """Sends a value, and returns every process's, by process index in order.

        Args:
            value: This process's value, which pickle can hold.
            what: What the processes do together; None for the channel's.
            timeout_s: How long to wait for the others; None for the channel's.
            failure: The message if another process failed, in which `{process}`,
                `{what}` and `{failure}` are filled in.

        Returns:
            The values; `LEFT` for a process that has left.

        Raises:
            MeshLayoutError: As `error`, if another process failed, has ended, or sends
                nothing in time.
        """
        here, what = _jax.process_index(), what or self._what
        if self.processes == [here]:
            return {here: value}
        counts.meetings += 1
        turn, self._turn = self._turn, self._turn + 1
        is_short = self._send(turn, value) < _SHORT_BYTES
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        start_s, come, late = time.monotonic(), {here: value}, list[int]()
        for process in self.processes:
            if process not in come:
                try:
                    come[process] = self._wait(turn, process, what, start_s, limit_s)
                except TimeoutError:
                    late.append(process)  # the error names all of them
                # Most come together: a few calls, however many processes there are.
                if is_short and not late and len(come) < len(self.processes):
                    come = self._come(turn) | come
            answer = come.get(process)
            if isinstance(answer, _Problem) and process != here:
                text = failure.format(process=process, what=what, failure=answer.text)
                raise self._error(text) from watch.PeerError(process)
        if late:
            text = f"process {here} waited {limit_s:.0f} s for {processes_text(late)}, "
            text = f"{text}which did not come to {what}. {self._hint}".strip()
            # Whoever comes later must not take this process for one that waits.
            if not isinstance(value, _Problem):
                self._send(turn, _Problem(text))
            raise self._error(text) from watch.PeerError(late[0])
        # All have sent their value of this turn, and so have read those before it.
        if turn:
            _jax.coordination_client().key_value_delete(self._key(turn - 1, here))
        return {process: come[process] for process in self.processes}

    def on_first(self, work: Callable[[], T]) -> T:
        """Calls a function on the first process, and returns its result on all.

        Raises:
            MeshLayoutError: What `work` raises; as `error` on the other processes.
        """
        first, result = self.processes[0], None
        if _jax.process_index() == first:
            with self.failure_told():
                result = work()
        return self.exchange(result)[first]

    @contextlib.contextmanager
    def failure_told(self) -> Iterator[None]:
        """Tells the others of an error inside, at the exchange that comes next.

        One that came from another process inside is known to all.
        """
        try:
            yield
        except Exception as error:
            if not isinstance(error.__cause__, watch.PeerError):
                self.fail(error)
            raise

    def fail(
        self,
        error: BaseException,
        *,
        what: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Sends an error instead of a value: the others raise it in their exchange.

        Waits for them, so that this process does not end before they have read it.
        """
        is_ours = isinstance(error, MeshLayoutError)
        text = str(error) if is_ours else f"{type(error).__name__}: {error}"
        # This process raises its own error, whatever the others say.
        with contextlib.suppress(self._error):
            self.exchange(_Problem(text), what=what, timeout_s=timeout_s)

    def failure(self) -> str:
        """Returns why another process will not come to the next exchange, or ``.

        For a process that waits for the others in another way.
        """
        come = self._come(self._turn).values() if len(self.processes) > 1 else ()
        texts = [x.text for x in come if isinstance(x, _Problem)]
        return next(filter(None, [*texts, *map(watch.end_of, self.processes)]), "")

    def leave(self, turn: int) -> None:
        """Releases processes that wait for this one in an exchange, by its number."""
        self._send(turn, LEFT)

    def _send(self, turn: int, value: object) -> int:
        """Sends a value, and returns its length in bytes."""
        client, content = _jax.coordination_client(), pickle.dumps(value)
        key = self._key(turn, _jax.process_index())
        client.key_value_set_bytes(key, content, allow_overwrite=True)
        return len(content)

    def _wait(
        self, turn: int, process: int, what: str, start_s: float, limit_s: float
    ) -> Any:
        """Returns the value of a process; raises TimeoutError if it does not come."""
        get = _jax.coordination_client().blocking_key_value_get_bytes
        here, key = _jax.process_index(), self._key(turn, process)
        waited_s = time.monotonic() - start_s
        while True:
            is_early = waited_s < self._warn_after_s
            end = watch.end_of(process)  # before the last look
            slice_s = max(0.001, min(_SLICE_S, limit_s - waited_s))
            try:
                return pickle.loads(get(key, int(1000 * slice_s)))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            waited_s = time.monotonic() - start_s
            if end:
                text = f"{end}, and process {here} waits for it in {what}. {self._hint}"
                raise self._error(text.strip()) from watch.PeerError(process)
            if waited_s >= limit_s:
                raise TimeoutError
            if is_early and waited_s >= self._warn_after_s:
                text = "process %d has waited %.0f s for process %d in %s."
                _log.warning(text, here, waited_s, process, what)

    def _come(self, turn: int) -> dict[int, Any]:
        """Returns the values that have come, by process."""
        client, directory = _jax.coordination_client(), self._key(turn)
        entries = client.key_value_dir_get_bytes(directory)
        return {int(k.rpartition("/")[2]): pickle.loads(value) for k, value in entries}

    def _key(self, turn: int, process: int | str = "") -> str:
        return f"meshlayout/{self._name}/{turn}/{process}"


# The channels that `shared_channel` has opened, with the service's client of their run.
_shared: dict[tuple[str, Any], Channel] = {}


def shared_channel(name: str, *args: Any, **kwargs: Any) -> Channel:
    """Returns the channel of a name, opened once in a run; arguments as for Channel."""
    key = name, _jax.coordination_client()
    return _shared.get(key) or _shared.setdefault(key, Channel(name, *args, **kwargs))


def processes_text(processes: Sequence[int]) -> str:
    """Returns the name of one or more processes.

    Example:
        >>> processes_text([3]), processes_text([0, 1, 2, 5])
        ('process 3', 'processes 0-2,5')
    """
    plural = "es" * (len(processes) > 1)
    return f"process{plural} {_render.ranges_text(processes)}"
