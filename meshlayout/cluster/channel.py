"""Messages between processes, through the key-value store of JAX's service.

No device is involved, so a background thread can exchange values while devices compute,
unlike in a collective. Processes that wait for one whose program has ended name it; one
that is lost or has failed ends them (see `watch`).
"""

import contextlib
import functools
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from meshlayout import _jax, _render
from meshlayout._counts import counts
from meshlayout.cluster import watch
from meshlayout.errors import ClusterError, MeshLayoutError


_log = logging.getLogger(__name__)

T = TypeVar("T")

_SLICE_S = 1.0  # one wait inside the store, and so Ctrl-C
_LONG_S = 10.0  # a wait that is logged, and looked into


class Channel:
    """A sequence of exchanges, in all of which every process takes part.

    `name` is the same on all processes, and unique in a run. `what` completes "did not
    come to ...", and `hint` ends that message. `failure` opens that of one that fails.
    """

    def __init__(
        self,
        name: str,
        processes: Sequence[int] | None = None,
        *,
        what: str = "",
        hint: str = "",
        failure: str = "",
        timeout_s: float = 600.0,
        error: type[MeshLayoutError] = ClusterError,
    ) -> None:
        self.processes = list(processes or range(_jax.process_count()))
        self._name, self._what, self._hint, self._failure = name, what, hint, failure
        self._timeout_s, self._error = timeout_s, error
        self._turn, self._lock = 0, threading.Lock()

    def exchange(
        self, value: object, *, what: str = "", timeout_s: float | None = None
    ) -> dict[int, Any]:
        """Sends a value, and returns those of all, by process.

        Raises the channel's error if another process failed, has ended, or is late.
        """
        here = _jax.process_index()
        if self.processes == [here]:
            return {here: value}
        with self._lock:
            counts.meetings += 1
            turn, self._turn = self._turn, self._turn + 1
            self._send(turn, value)
            limit_s = self._timeout_s if timeout_s is None else timeout_s
            try:
                values = self._receive(turn, what or self._what, limit_s)
            finally:
                watch.post_wait()
            # All have sent their value of this turn, and so have read those before it.
            if turn:
                _jax.coordination.client.key_value_delete(self._key(turn - 1, here))
        return {process: values[process] for process in self.processes}

    def _receive(self, turn: int, what: str, limit_s: float) -> dict[int, Any]:
        client, here = _jax.coordination.client, _jax.process_index()
        start_s, waited_s = time.monotonic(), 0.0
        while True:
            ends = {p: watch.end_of(p) for p in self.processes}  # before the last look
            values = self._sent(turn)
            for process, value in values.items():
                if isinstance(value, watch.PeerError) and process != here:
                    raise self._blaming(value)
            late = [process for process in self.processes if process not in values]
            if not late:
                return values
            ended = [process for process in late if ends[process]]
            if ended or waited_s >= limit_s:
                msg = f"process {here} waited {limit_s:.0f} s for "
                msg += f"{processes_text(late)}, which did not come to {what}"
                if ended:
                    msg = f"{ends[ended[0]]}, and process {here} waits for it in {what}"
                blamed, msg = [*ended, *late][0], f"{msg}. {self._hint}".strip()
                problem = watch.PeerError(msg, blamed)
                # Whoever comes later must not take this process for one that waits.
                if not isinstance(values.get(here), watch.PeerError):
                    self._send(turn, problem)
                raise self._blaming(problem)
            slice_s = max(0.001, min(_SLICE_S, limit_s - waited_s))
            try:  # after this one, most others have come, too
                key = self._key(turn, late[0])
                client.blocking_key_value_get_bytes(key, int(1000 * slice_s))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            before_s, waited_s = waited_s, time.monotonic() - start_s
            if before_s < _LONG_S <= waited_s:
                msg = "process %d has waited %.0f s for %s in %s."
                _log.warning(msg, here, waited_s, processes_text(late), what)
            if waited_s >= _LONG_S:
                watch.post_wait(waited_s, self._key(turn), what, late)

    def _blaming(self, problem: watch.PeerError) -> MeshLayoutError:
        """Returns the error of a problem, hidden in it: it is for `watch` to read."""
        error = self._error(problem.args[0])
        error.__context__, error.__suppress_context__ = problem, True
        return error

    def on_first(self, work: Callable[[], T]) -> T:
        """Calls a function on the first process, and returns its result on all."""
        first, result = self.processes[0], None
        if _jax.process_index() == first:
            with self.failure_told():
                result = work()
        return self.exchange(result)[first]

    @contextlib.contextmanager
    def failure_told(self) -> Iterator[None]:
        """Reports an error inside to the others, at the next exchange."""
        try:
            yield
        except Exception as error:
            if not isinstance(error.__context__, watch.PeerError):  # which all know
                self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Sends an error instead of a value, and waits until the others read it."""
        is_ours = isinstance(error, MeshLayoutError)
        text = str(error) if is_ours else f"{type(error).__name__}: {error}"
        # This process raises its own error, whatever the others say.
        with contextlib.suppress(self._error):
            self.exchange(watch.PeerError(self._failure + text, _jax.process_index()))

    def failure(self) -> str:
        """Returns why another process will not come to the next exchange, or ``."""
        values = self._sent(self._turn).values() if len(self.processes) > 1 else ()
        texts = [x.args[0] for x in values if isinstance(x, watch.PeerError)]
        return next(filter(None, [*texts, *map(watch.end_of, self.processes)]), "")

    def leave(self, turn: int, text: str) -> None:
        """Ends an exchange, by its number, with an error on processes that wait."""
        self._send(turn, watch.PeerError(text, _jax.process_index()))

    def _send(self, turn: int, value: object) -> None:
        key, client = self._key(turn, _jax.process_index()), _jax.coordination.client
        client.key_value_set_bytes(key, pickle.dumps(value), allow_overwrite=True)

    def _sent(self, turn: int) -> dict[int, Any]:
        entries = _jax.coordination.client.key_value_dir_get_bytes(self._key(turn))
        return {int(k.rpartition("/")[2]): pickle.loads(value) for k, value in entries}

    def _key(self, turn: int, process: int | str = "") -> str:
        # The name of another channel may go on after this one's, with a slash.
        return f"meshlayout/{self._name}:{turn}/{process}"


@functools.cache
def shared_channel(client: Any, name: str, *args: Any, **options: Any) -> Channel:
    """Returns a channel that is opened once in a run of a coordination client."""
    return Channel(name, *args, **options)


def processes_text(processes: Sequence[int]) -> str:
    """Returns the name of one or more processes, such as `processes 0-2,5`."""
    plural = "es" * (len(processes) > 1)
    return f"process{plural} {_render.ranges_text(processes)}"
