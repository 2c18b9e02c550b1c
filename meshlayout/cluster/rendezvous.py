"""The meeting of all processes before JAX's coordination service starts.

JAX ends a process whose partners do not come with SIGABRT and without their names. Two
processes with the same id, or with different numbers of processes, get the same. So the
processes meet at the coordinator's address first, over plain sockets: each of the
others sends process 0 one line of JSON that says who it is, and waits. When all have
come, process 0 answers "go" and leaves the port to JAX. Otherwise it answers who is
missing or what contradicts, and all raise that sentence.
"""

import contextlib
import dataclasses
import errno
import json
import logging
import math
import os
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import jax
from jaxlib.version import __version__ as jaxlib_version

from meshlayout.cluster.settings import Settings
from meshlayout.cluster.variables import listed, split_address
from meshlayout.errors import ClusterError


_log = logging.getLogger(__name__)

# How long process 0 tells newcomers of a problem before it raises it.
_GRACE_S = 2.0

# How long a connection may take to say who it is: a port scanner says nothing.
_HELLO_S = 2.0

# How long another program may answer at the address: the previous run may be ending.
_FOREIGN_S = 10.0

# How long JAX's service may take to start.
_SERVICE_S = 60.0

# How many processes may come at the same moment.
_BACKLOG = 2**12

_WARN_AFTER_S = 10.0
_LONGEST_LINE = 2**16

_FOREIGN = "another program answers there, or a run that began without this process"


def meet(settings: Settings, timeout_s: float) -> None:
    """Waits until all processes have come.

    Args:
        settings: The settings of this process, one of several.
        timeout_s: How long to wait.

    Raises:
        ClusterError: On every process that came, if one did not, if two have the same
            index, or if they were given different settings.
    """
    if settings.process_index:
        _join(settings, timeout_s)
    else:
        _gather(settings, timeout_s)


@dataclasses.dataclass(frozen=True)
class _Guest:
    """A process that came to process 0, with the connection at which it waits."""

    connection: socket.socket
    hello: dict[str, Any]

    def __str__(self) -> str:
        return _name(self.hello)

    def has_left(self) -> bool:
        """Returns whether the process has ended or given up."""
        try:
            # It says nothing after its hello: anything to read is the end.
            self.connection.settimeout(0)
            self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def answer(self, problem: str) -> None:
        """Says what the problem is, or (an empty text) that all have come."""
        with contextlib.suppress(OSError):
            self.connection.settimeout(_HELLO_S)
            _send(self.connection, {"problem": problem})
        self.connection.close()


def _name(hello: dict[str, Any]) -> str:
    return f"pid {hello['pid']} on {hello['host']}"


def _hello(settings: Settings) -> dict[str, Any]:
    """Returns the description that a process sends of itself."""
    return {
        "meshlayout": 1,
        "index": settings.process_index,
        "count": settings.num_processes,
        "source": settings.sources.get("num_processes", ""),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib_version},
    }


def _gather(settings: Settings, timeout_s: float) -> None:
    """Waits as process 0 for the others, and answers them."""
    here = _hello(settings)
    guests: dict[int, _Guest] = {}
    with _listener(settings, here) as listener:
        try:
            problem = _fill(guests, listener, settings, here, timeout_s)
            if not problem:
                listener.close()  # Who connects from now on waits for JAX's service.
            for guest in guests.values():
                guest.answer(problem)
            end = time.monotonic() + (_GRACE_S if problem else 0)
            while (left_s := end - time.monotonic()) > 0:
                guest = _accept(listener, left_s)
                if guest is not None:
                    guest.answer(problem)
        finally:  # also after Ctrl-C
            for guest in guests.values():
                guest.connection.close()
    if problem:
        raise ClusterError(problem)


def _fill(
    guests: dict[int, _Guest],
    listener: socket.socket,
    settings: Settings,
    here: dict[str, Any],
    timeout_s: float,
) -> str:
    """Waits until all processes are among the guests; returns why they cannot be."""
    start, was_warned = time.monotonic(), False
    while True:
        _drop_those_that_left(guests)
        missing = [i for i in range(1, settings.num_processes) if i not in guests]
        if not missing:
            return ""
        waited_s = time.monotonic() - start
        if waited_s >= timeout_s:
            came = settings.num_processes - len(missing)
            address, bind_address = settings.coordinator_address, settings.bind_address
            bound = "" if bind_address == address else f" (bound to {bind_address})"
            return (
                f"initialize: {_processes(missing)} did not come to "
                f"{address}{bound} within {timeout_s:g} s; {came} of "
                f"{settings.num_processes} processes did. Look at the output of those "
                "that did not, check that they were given the same address and can "
                "reach it, or wait longer with timeout_s."
            )
        if waited_s > _WARN_AFTER_S and not was_warned:
            was_warned = True
            _log.warning(
                "process 0 has waited %.0f s at %s for %s, and waits up to %.0f s.",
                *(waited_s, settings.bind_address, _processes(missing), timeout_s),
            )
        guest = _accept(listener, min(timeout_s - waited_s, 0.5))
        if guest is None:
            continue
        # It may have been started again, in the place of one that ended.
        _drop_those_that_left(guests)
        index = guest.hello["index"]
        problem = _contradiction(here, guest, guests.get(index))
        if problem:
            guest.answer(problem)
            return problem
        guests[index] = guest


def _drop_those_that_left(guests: dict[int, _Guest]) -> None:
    for index in [i for i, guest in guests.items() if guest.has_left()]:
        guests.pop(index).connection.close()


def _contradiction(here: dict[str, Any], guest: _Guest, earlier: _Guest | None) -> str:
    """Returns how a newcomer contradicts those who came; empty if it does not.

    Args:
        here: What process 0 says of itself.
        guest: The newcomer.
        earlier: The process with the same index that came before, if one did.
    """
    hello, count = guest.hello, here["count"]
    if hello["count"] != count:
        return (
            f"initialize: process {hello['index']} ({guest}) was given num_processes="
            f"{hello['count']} (from {hello['source']}), but process 0 ({_name(here)}) "
            f"was given {count} (from {here['source']}). Give all processes the same "
            "number."
        )
    if hello["index"] == 0 or earlier is not None:
        return (
            f"initialize: two processes were given process_id={hello['index']}: "
            f"{earlier or _name(here)}, and {guest}. Give each of the {count} "
            f"processes its own, from 0 to {count - 1}."
        )
    for package, version in here["versions"].items():
        if hello["versions"].get(package) != version:
            return (
                f"initialize: process {hello['index']} ({guest}) has {package} "
                f"{hello['versions'].get(package)}, but process 0 ({_name(here)}) has "
                f"{version}. Install the same version for all processes."
            )
    return ""


def _processes(indices: list[int]) -> str:
    """Returns processes as a sentence has them, at most ten by their index."""
    names: list[object] = list(indices[:10])
    if len(indices) > len(names):
        names.append(f"{len(indices) - len(names)} more")
    return f"process{'es' * (len(indices) > 1)} {listed(names)}"


def _accept(listener: socket.socket, timeout_s: float) -> _Guest | None:
    """Waits for a process; None if none comes, or what comes is not one of ours.

    Raises:
        ClusterError: If this process cannot take more connections.
    """
    listener.settimeout(timeout_s)
    try:
        connection, _ = listener.accept()
    except (TimeoutError, BlockingIOError, ConnectionError):
        return None
    except OSError as problem:
        msg = (
            "initialize: process 0 cannot take the connection of another process: "
            f"{_reason(problem)}. `ulimit -n` must be above the number of processes."
        )
        raise ClusterError(msg) from problem
    hello = None
    with contextlib.suppress(OSError, ValueError):
        hello = _receive(connection, _HELLO_S)
    if not isinstance(hello, dict) or hello.get("meshlayout") != 1:
        connection.close()
        return None
    return _Guest(connection, hello)


def _listener(settings: Settings, here: dict[str, Any]) -> socket.socket:
    """Returns a socket that listens where JAX's service will.

    Raises:
        ClusterError: If this process cannot listen there.
    """
    host, port = split_address(settings.bind_address) or ("", 0)
    end, pauses = time.monotonic() + _GRACE_S, _pauses()
    while True:
        listener, problem = _bound(_resolved(settings, host, port))
        if listener is not None:
            _warn_of_loopback(host, listener.getsockname()[0], port)
            return listener
        # A second process 0 finds the first one there, which says so.
        reply = _ask(settings, here, 1.0, _HELLO_S)
        if isinstance(reply, dict):
            raise ClusterError(reply["problem"]) from problem
        # The previous run may be about to end.
        is_taken = problem is not None and problem.errno == errno.EADDRINUSE
        if not is_taken or time.monotonic() > end:
            raise ClusterError(_unbound(settings, problem)) from problem
        time.sleep(next(pauses))


def _bound(addresses: list[Any]) -> tuple[socket.socket | None, OSError | None]:
    """Returns a socket that listens at one of several addresses, or why none does."""
    problem = None
    # A name may have addresses that are switched off, such as those of version 6.
    for family, *_, target in addresses:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # Without it, the port of a run that has ended is refused for a minute. One
            # where a program listens is refused nevertheless; JAX's own service would
            # share it without an error.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(target)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            problem = error
            if error.errno == errno.EADDRINUSE:
                break
        else:
            return listener, None
    return None, problem


def _resolved(settings: Settings, host: str, port: int) -> list[Any]:
    """Returns the addresses of a host, as Python's sockets take them."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as problem:
        raise ClusterError(_unbound(settings, problem)) from problem


def _unbound(settings: Settings, problem: OSError | None) -> str:
    """Returns why process 0 cannot listen at its address, and what to do."""
    field = "coordinator_bind_address"
    source = settings.sources.get(field, settings.sources["coordinator_address"])
    fact = f"initialize: process 0 cannot listen at {settings.bind_address} "
    fact += f"(from {source}): {_reason(problem)}."
    if problem is not None and problem.errno == errno.EADDRINUSE:
        return (
            f"{fact} Another program listens there, perhaps an earlier run: end it, or "
            "choose another port."
        )
    return (
        f"{fact} It must be an address of the machine of process 0, which is "
        f"{socket.gethostname()}. If the others reach this machine through a gateway "
        f"or service, also give {field}, such as '0.0.0.0:1234'."
    )


def _reason(problem: OSError | None) -> str:
    text = str((problem and problem.strerror) or problem)
    return text[:1].lower() + text[1:]


def _warn_of_loopback(name: str, address: str, port: int) -> None:
    """Warns if only this machine can reach process 0 under the name it was given.

    Some distributions give a machine's own name the address 127.0.1.1.
    """
    if address.startswith("127.") and name not in ("localhost", address):
        _log.warning(
            "%s is %s on this machine, where processes on other machines cannot reach "
            "it. If there are any, give coordinator_bind_address, or the variable "
            "JAX_COORDINATOR_BIND_ADDRESS, such as '0.0.0.0:%d'.",
            *(name, address, port),
        )


def _join(settings: Settings, timeout_s: float) -> None:
    """Tells process 0 that this process has come, and waits for its answer."""
    hello, start = _hello(settings), time.monotonic()
    foreign_since, was_warned = math.inf, False
    for pause_s in _pauses():
        left_s = start + timeout_s - time.monotonic()
        # Process 0 may have started later, and waits for as long as this process.
        reply = _ask(settings, hello, max(left_s, 0.1), timeout_s + _GRACE_S)
        if isinstance(reply, dict):
            if reply["problem"]:
                raise ClusterError(reply["problem"])
            _wait_for_service(settings)
            return
        now = time.monotonic()
        foreign_since = min(foreign_since, now) if reply == _FOREIGN else math.inf
        waited_s = now - start
        is_taken = now - foreign_since > _FOREIGN_S
        if waited_s >= timeout_s or is_taken:
            limit_s = _FOREIGN_S if is_taken else timeout_s
            msg = (
                f"initialize: process {settings.process_index} waited {limit_s:g} s "
                f"for process 0, which did not come to {settings.coordinator_address} "
                f"(from {settings.sources['coordinator_address']}): {reply}. Look at "
                "the output of process 0, check that it was given the same address, or "
                "wait longer with timeout_s."
            )
            raise ClusterError(msg)
        if waited_s > _WARN_AFTER_S and not was_warned:
            was_warned = True
            _log.warning(
                "process %d has waited %.0f s for process 0 at %s (%s), and waits up "
                "to %.0f s.",
                *(settings.process_index, waited_s, settings.coordinator_address),
                *(reply, timeout_s),
            )
        time.sleep(min(pause_s, timeout_s - waited_s))


def _pauses() -> Iterator[float]:
    """Yields how long to wait between attempts to connect, in seconds.

    The first ones are short, for a process 0 that is about to listen. Later ones spare
    it, and the servers that know its name, hundreds of processes that ask all the time.
    """
    pause_s = 0.01
    while True:
        yield pause_s
        pause_s = min(1.3 * pause_s, 0.5)


def _ask(
    settings: Settings, hello: dict[str, Any], connect_s: float, answer_s: float
) -> dict[str, Any] | str:
    """Says hello to process 0; returns its answer, or why there is none.

    Args:
        settings: The settings.
        hello: What to say.
        connect_s: How long the connection may take.
        answer_s: How long the answer may take.
    """
    try:
        with _connection(settings, connect_s) as connection:
            _send(connection, hello)
            reply = _receive(connection, answer_s)
    except TimeoutError:
        return "it did not answer"
    except (ConnectionResetError, BrokenPipeError):
        reply = None
    except OSError as problem:
        return _reason(problem)
    except ValueError:
        return _FOREIGN
    if reply is None:
        return "it ended before all processes had come"
    return reply if isinstance(reply, dict) and "problem" in reply else _FOREIGN


def _wait_for_service(settings: Settings) -> None:
    """Waits until JAX's service listens at the coordinator's address.

    JAX's client, coming too early, would try again only after a second.
    """
    end = time.monotonic() + _SERVICE_S
    for pause_s in _pauses():
        try:
            _connection(settings, 1.0).close()
        except OSError as problem:
            if time.monotonic() > end:
                msg = (
                    "initialize: all processes had come, but then process 0 did not "
                    f"start JAX's service at {settings.coordinator_address}: "
                    f"{_reason(problem)}. Look at the output of process 0."
                )
                raise ClusterError(msg) from problem
            time.sleep(pause_s)
        else:
            return


def _connection(settings: Settings, timeout_s: float) -> socket.socket:
    """Returns a connection to the coordinator's address.

    Raises:
        OSError: If nobody listens there.
    """
    address = split_address(settings.coordinator_address) or ("", 0)
    connection = socket.create_connection(address, min(timeout_s, 5.0))
    # Where nobody listens, the system may choose the target's port for this end, too,
    # and connect it to itself. Reset, it does not keep the port from process 0.
    if connection.getsockname() == connection.getpeername():
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        connection.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, "connection refused")
    return connection


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, timeout_s: float) -> Any:
    """Returns a message; None if the other end closed.

    Raises:
        OSError: If nothing comes in time.
        ValueError: If what comes is not one.
    """
    connection.settimeout(timeout_s)
    with connection.makefile("rb") as stream:
        line = stream.readline(_LONGEST_LINE)
    return json.loads(line) if line else None
