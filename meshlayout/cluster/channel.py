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
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeVar

import jax

from meshlayout import _jax, _render
from meshlayout.cluster import activity, watch
from meshlayout.cluster.failure import OtherProcessError
from meshlayout.errors import ClusterError, MeshLayoutError


_log = logging.getLogger(__name__)

T = TypeVar("T")

# Large messages are sent in pieces, as a message of the service has at most 2 GiB. All
# heads together are read after a time-out, and so are apart.
_HEADS, _PIECES = "meshlayout/heads", "meshlayout/pieces"
_PIECE_BYTES = 2**20
_SHORT_BYTES = 2**12

# How long one wait inside the store may take, and so Ctrl-C.
_SLICE_S = 2.0

# Numbers this process's messages, so that the latest can be found.
_numbers = itertools.count()


class Left(Enum):
    """The type of `LEFT`."""

    LEFT = "has left"


# What `exchange` returns for a process that has left.
LEFT: Final = Left.LEFT


@dataclass(frozen=True)
class _FailureMessage:
    """What a process sends that has failed: what went wrong."""

    text: str


@dataclass(frozen=True)
class _Head:
    """The first piece of a message.

    Attributes:
        number: Counts the messages of a process.
        what: What it is for, as in `Channel`.
        num_bytes: Of the whole message.
        piece: The first bytes.
    """

    number: int
    what: str
    num_bytes: int
    piece: bytes


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
        self._error = error
        self._turn = 0
        self._topics_in_pieces: set[str] = set()
        self.lock = threading.Lock()

    def exchange(
        self,
        value: Any,
        topic: str | None = None,
        *,
        what: str | None = None,
        timeout_s: float | None = None,
        failure: str = "{failure}",
    ) -> dict[int, Any]:
        """Sends a value, and returns every process's, by process index in order.

        Args:
            value: This process's value, which pickle can hold.
            topic: The name of the exchange, if the exchanges have no common order:
                used once, or removed with `forget`. None for the next of a sequence of
                exchanges, which are removed automatically.
            what: What the processes do together; None for the channel's.
            timeout_s: How long to wait for the others; None for the channel's.
            failure: The message if another process failed, in which `{process}`,
                `{what}` and `{failure}` are filled in.

        Returns:
            The values; `LEFT` for a process that has left.

        Raises:
            MeshLayoutError: As `error`, if another process failed, or sends nothing in
                time; with a TimeoutError as its cause in the latter case.
        """
        here = _jax.process_index()
        if self.processes == [here]:
            return {here: value}
        turn = None
        if topic is None:
            turn, self._turn = self._turn, self._turn + 1
            topic = str(turn)
        what = what or self._what
        # Of short messages, all that have come are read in one call. They mostly come
        # together, so that a process needs a few calls, however many there are.
        is_short = self._send(topic, value, what) <= _SHORT_BYTES
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        wait = _Wait(what, self._hint, limit_s, self._warn_after_s)
        values: dict[int, Any] = dict.fromkeys(self.processes)
        come = {here: value}
        with activity.during(f"waiting for all to come to {what}", waits=True):
            for process in self.processes:
                # Also after one is late: the error names all of them.
                if process not in come:
                    come[process] = wait.value(self._key(topic, process), process)
                    if is_short and not wait.late and len(come) < len(values):
                        come = self._come(topic) | come
                answer = come[process]
                if isinstance(answer, _FailureMessage) and process != here:
                    msg = failure.format(
                        process=process, what=what, failure=answer.text
                    )
                    cause = OtherProcessError(f"process {process} failed")
                    raise self._error(msg) from cause
                values[process] = answer
        if wait.late:
            late = wait.error()
            # Whoever comes later must not take this process for one that waits.
            if not isinstance(value, _FailureMessage):
                self._send(topic, _FailureMessage(str(late)), what)
            raise self._error(str(late)) from late
        # All processes have sent their value of this turn, and so have read those of
        # the turn before. They may not have read this turn's yet.
        if turn:
            self.forget(str(turn - 1))
        return values

    def from_first(self, value: T) -> T:
        """Returns the value of the first process; all processes must call this."""
        return self.exchange(value)[self.processes[0]]

    def on_first(self, work: Callable[[], T]) -> T:
        """Calls a function on the first process, and returns its result on all.

        Raises:
            MeshLayoutError: What `work` raises; as `error` on the other processes.
        """
        if _jax.process_index() != self.processes[0]:
            return self.exchange(None)[self.processes[0]]
        with self.failure_told():
            result = work()
        return self.from_first(result)

    @contextlib.contextmanager
    def failure_told(self, topic: str | None = None) -> Iterator[None]:
        """Tells the others of an error inside, at the exchange that comes next.

        One that came from another process inside is known to all.
        """
        try:
            yield
        except Exception as error:
            if not isinstance(error.__cause__, OtherProcessError):
                self.fail(error, topic)
            raise

    def fail(
        self,
        error: BaseException,
        topic: str | None = None,
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
            self.exchange(_FailureMessage(text), topic, what=what, timeout_s=timeout_s)

    def failure(self) -> str:
        """Returns the error that another process sent to the next exchange, or ``.

        For a process that waits for the others in another way, and would wait for one
        that has failed.
        """
        if len(self.processes) == 1:
            return ""
        come = self._come(str(self._turn)).values()
        return next((x.text for x in come if isinstance(x, _FailureMessage)), "")

    def leave(self, topic: str) -> None:
        """Releases processes that wait for this one in an exchange."""
        self._send(topic, LEFT)

    def forget(self, topic: str) -> None:
        """Removes this process's value of an exchange that all have finished."""
        client = _jax.coordination_client()
        client.key_value_delete(f"{_HEADS}/{self._key(topic)}")
        if topic in self._topics_in_pieces:
            self._topics_in_pieces.remove(topic)
            client.key_value_delete(f"{_PIECES}/{self._key(topic)}/")

    def forget_directory(self, directory: str) -> None:
        """Removes the short values of all exchanges whose topics are in a directory.

        All processes must have finished them. Every process may call this; the first
        one removes them.
        """
        if _jax.process_index() == self.processes[0]:
            client = _jax.coordination_client()
            client.key_value_delete(f"{_HEADS}/{self._name}/{directory}/")

    def _send(self, topic: str, value: Any, what: str | None = None) -> int:
        """Sends a value, and returns its length in bytes."""
        client, key = _jax.coordination_client(), self._key(topic)
        content = pickle.dumps(value)
        # The head last: whoever finds it finds all pieces.
        for start in range(_PIECE_BYTES, len(content), _PIECE_BYTES):
            self._topics_in_pieces.add(topic)
            piece = content[start : start + _PIECE_BYTES]
            name = f"{_PIECES}/{key}/{start}"
            client.key_value_set_bytes(name, piece, allow_overwrite=True)
        head = _Head(
            next(_numbers), what or self._what, len(content), content[:_PIECE_BYTES]
        )
        name, message = f"{_HEADS}/{key}", pickle.dumps(head)
        client.key_value_set_bytes(name, message, allow_overwrite=True)
        return len(content)

    def _come(self, topic: str) -> dict[int, Any]:
        """Returns the values that have come, by process; only those in one piece."""
        directory = f"{_HEADS}/{self._name}/{topic}/"
        come: dict[int, Any] = {}
        client = _jax.coordination_client()
        for key, message in client.key_value_dir_get_bytes(directory):
            head: _Head = pickle.loads(message)
            if len(head.piece) == head.num_bytes:
                come[int(key.rpartition("/")[2])] = pickle.loads(head.piece)
        return come

    def _key(self, topic: str, process: int | None = None) -> str:
        process = _jax.process_index() if process is None else process
        return f"{self._name}/{topic}/{process}"


# The channels that `shared_channel` has opened, with the service's client of their run.
_shared: dict[str, tuple[Any, Channel]] = {}
_shared_lock = threading.Lock()


def shared_channel(name: str, *args: Any, **kwargs: Any) -> Channel:
    """Returns the channel of a name, opened once in a run.

    Args:
        name: The channel's name.
        *args: As for `Channel`.
        **kwargs: As for `Channel`.
    """
    client = _jax.coordination_client()
    with _shared_lock:
        if name not in _shared or _shared[name][0] is not client:
            _shared[name] = client, Channel(name, *args, **kwargs)
        return _shared[name][1]


class _Wait:
    """One wait for the messages of several processes.

    Args:
        what: What the processes do together, as in `Channel`.
        hint: What all processes must do.
        limit_s: How long to wait.
        warn_after_s: How long to wait before logging which process is late.

    Attributes:
        late: The processes whose message did not come.
    """

    def __init__(
        self, what: str, hint: str, limit_s: float, warn_after_s: float
    ) -> None:
        self._what, self._hint = what, hint
        self._limit_s, self._warn_after_s = limit_s, warn_after_s
        self._start = time.monotonic()
        self._was_warned = False
        self._cause: Exception | None = None
        self.late: list[int] = []

    def value(self, key: str, process: int) -> Any:
        """Returns the message of a process; None, and noted, if it does not come."""
        get = _jax.coordination_client().blocking_key_value_get_bytes
        while True:
            left_s = min(_SLICE_S, self._limit_s - self._waited_s())
            try:
                head = pickle.loads(get(f"{_HEADS}/{key}", max(1, int(1000 * left_s))))
                content = bytearray(head.piece)
                while len(content) < head.num_bytes:
                    # It was sent before the head.
                    content += get(f"{_PIECES}/{key}/{len(content)}", 60_000)
                return pickle.loads(content)
            except jax.errors.JaxRuntimeError as error:
                # The store has no exception class of its own for a time-out.
                if watch.lost(process) is not None:
                    self._limit_s = 0.0  # nor is there a use to wait for others
                is_over = self._waited_s() >= self._limit_s
                if is_over or "DEADLINE_EXCEEDED" not in str(error):
                    self._cause = error
                    self.late.append(process)
                    return None
            self._warn(process)

    def error(self) -> TimeoutError:
        """Returns an error that names the late processes, and what they last did."""
        seen = "".join(map(_last_seen, self.late))
        reasons = [f"{why} " for why in map(watch.lost, self.late) if why is not None]
        error = TimeoutError(
            f"process {_jax.process_index()} waited {self._waited_s():.0f} s for "
            f"{processes_text(self.late)}, which did not come to {self._what}. "
            f"{seen}{''.join(reasons)}{self._hint}".rstrip()
        )
        error.__cause__ = self._cause
        return error

    def _waited_s(self) -> float:
        return time.monotonic() - self._start

    def _warn(self, process: int) -> None:
        if self._waited_s() < self._warn_after_s or self._was_warned:
            return
        self._was_warned = True
        _log.warning(
            "process %d has waited %.0f s for process %d to come to %s, and waits up "
            "to %.0f s. %s",
            *(_jax.process_index(), self._waited_s(), process, self._what),
            *(self._limit_s, self._hint),
        )


def _last_seen(process: int) -> str:
    """Returns a sentence about the latest exchange that a process came to."""
    try:
        entries = _jax.coordination_client().key_value_dir_get_bytes(_HEADS)
    except jax.errors.JaxRuntimeError:  # the service has ended
        return ""
    heads = [
        pickle.loads(message)
        for key, message in entries
        if key.rpartition("/")[2] == str(process)
    ]
    if not heads:
        return ""
    latest = max(heads, key=operator.attrgetter("number"))
    return f"Process {process} last came to {latest.what}. "


def processes_text(processes: Sequence[int]) -> str:
    """Returns the name of one or more processes.

    Example:
        >>> processes_text([3]), processes_text([0, 1, 2, 5])
        ('process 3', 'processes 0-2,5')
    """
    plural = "es" * (len(processes) > 1)
    return f"process{plural} {_render.ranges_text(processes)}"
