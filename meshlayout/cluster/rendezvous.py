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
import os
import select
import socket
import time
from typing import Any

import jax
from jaxlib.version import __version__ as jaxlib_version

from meshlayout.cluster.settings import Settings, listed, split_address
from meshlayout.errors import ClusterError


_log = logging.getLogger(__name__)

# How long process 0, having found a contradiction, goes on telling it to newcomers.
_GRACE_S = 2.0

# How long a connection may take to say who it is: a port scanner says nothing.
_HELLO_S = 2.0

# How long another program may answer at the address: that of the previous run, ending.
_FOREIGN_S = 10.0

_WARN_AFTER_S = 10.0
_LONGEST_LINE = 2**16


def meet(settings: Settings, timeout_s: float) -> None:
    """Waits until all processes have come.

    Args:
        settings: The settings of this process, one of several.
        timeout_s: How long to wait.

    Raises:
        ClusterError: On every process that came, if one did not, if two have the same
            index, or if they were given different settings.
    """
    deadline = time.monotonic() + timeout_s
    if settings.process_index:
        _join(settings, deadline, timeout_s)
    else:
        _gather(settings, deadline, timeout_s)


@dataclasses.dataclass(frozen=True)
class _Guest:
    """A process that came to process 0, with the connection it waits at."""

    connection: socket.socket
    hello: dict[str, Any]

    def __str__(self) -> str:
        return f"pid {self.hello['pid']} on {self.hello['host']}"

    def has_left(self) -> bool:
        """Returns whether the process has ended or given up: nothing else is sent."""
        return bool(select.select([self.connection], [], [], 0)[0])

    def answer(self, problem: str) -> None:
        """Says that all have come (an empty text), or what the problem is."""
        with contextlib.suppress(OSError):
            _send(self.connection, {"problem": problem})
        self.connection.close()


def _hello(settings: Settings) -> dict[str, Any]:
    """Returns what a process says of itself."""
    return {
        "meshlayout": 1,
        "index": settings.process_index,
        "count": settings.num_processes,
        "source": settings.sources.get("num_processes", ""),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib_version},
    }


def _gather(settings: Settings, deadline: float, timeout_s: float) -> None:
    """Waits as process 0 for the others, and answers them."""
    guests: dict[int, _Guest] = {}
    here = _hello(settings)
    problem, start = "", time.monotonic()
    was_warned = False
    with _listener(settings, here) as listener:
        while not problem:
            guests = {i: guest for i, guest in guests.items() if not guest.has_left()}
            missing = [i for i in range(1, settings.num_processes) if i not in guests]
            if not missing:
                break
            now = time.monotonic()
            if now >= deadline:
                problem = _missing(missing, settings, timeout_s)
                break
            if now - start > _WARN_AFTER_S and not was_warned:
                was_warned = True
                _log.warning(
                    "process 0 has waited %.0f s at %s for %s, and waits up to %.0f s.",
                    *(now - start, settings.bind_address, _processes(missing)),
                    timeout_s,
                )
            guest = _accept(listener, min(deadline - now, 0.5))
            if guest is None:
                continue
            earlier = guests.get(guest.hello["index"])
            if earlier is not None and earlier.has_left():
                earlier = None
            problem = _contradiction(here, guest, earlier)
            if problem:
                guest.answer(problem)
            else:
                guests[guest.hello["index"]] = guest
        for guest in guests.values():
            guest.answer(problem)
        # Those who come a moment later should hear of it, too.
        grace = time.monotonic() + _GRACE_S
        while problem and (left := grace - time.monotonic()) > 0:
            if guest := _accept(listener, left):
                guest.answer(problem)
    if problem:
        raise ClusterError(problem)


def _contradiction(here: dict[str, Any], guest: _Guest, earlier: _Guest | None) -> str:
    """Returns what contradicts between a newcomer and those who came; or nothing."""
    hello = guest.hello
    index = hello["index"]
    if hello["count"] != here["count"]:
        return (
            f"initialize: process {index} ({guest}) was given num_processes="
            f"{hello['count']} (from {hello['source']}), but process 0 (pid "
            f"{here['pid']} on {here['host']}) was given {here['count']} (from "
            f"{here['source']}). All processes must be given the same number."
        )
    if index == 0 or earlier is not None:
        first = earlier or f"pid {here['pid']} on {here['host']}"
        return (
            f"initialize: two processes were given process_id={index}: {first}, and "
            f"{guest}. Each of the {here['count']} processes must have its own, from 0 "
            f"to {here['count'] - 1}."
        )
    for package, version in here["versions"].items():
        if hello["versions"].get(package) != version:
            return (
                f"initialize: process {index} ({guest}) runs {package} "
                f"{hello['versions'].get(package)}, but process 0 runs {version}. "
                "Install the same version on all machines."
            )
    return ""


def _missing(missing: list[int], settings: Settings, timeout_s: float) -> str:
    came = settings.num_processes - len(missing)
    return (
        f"initialize: {_processes(missing)} did not come to "
        f"{settings.coordinator_address} within {timeout_s:g} s; {came} of "
        f"{settings.num_processes} processes did. Look at the output of the missing "
        "ones, check that they were given the same address and can reach it, or wait "
        "longer with timeout_s."
    )


def _processes(indices: list[int]) -> str:
    """Returns processes as a sentence has them, at most ten by index."""
    names: list[object] = list(indices[:10])
    if len(indices) > len(names):
        names.append(f"{len(indices) - len(names)} more")
    return f"process{'es' * (len(indices) > 1)} {listed(names)}"


def _listener(settings: Settings, here: dict[str, Any]) -> socket.socket:
    """Returns a socket that listens where JAX's service will.

    Raises:
        ClusterError: If this process cannot listen there.
    """
    address = settings.bind_address
    host, port = split_address(address) or ("", 0)
    what = f"initialize: process 0 cannot listen at {address}"
    source = settings.sources.get("coordinator_bind_address", "coordinator_address")
    try:
        family, *_, target = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as problem:
        msg = f"{what} (from {source}): {host!r} is not the name of a host."
        raise ClusterError(msg) from problem
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Without it, the port of a run that has just ended is refused for a minute.
        # One at which another program listens is refused nevertheless, where JAX's
        # own service would share it without an error.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(settings.num_processes)
    except OSError as problem:
        listener.close()
        # It may be taken by the process 0 of this very program, which then knows.
        reply = _ask(settings, here, 1.0)
        if isinstance(reply, dict) and reply["problem"]:
            raise ClusterError(reply["problem"]) from problem
        raise ClusterError(_unbound(what, source, problem)) from problem
    _warn_of_loopback(host, str(target[0]), port)
    return listener


def _unbound(what: str, source: str, problem: OSError) -> str:
    """Returns why process 0 cannot listen, and what to do."""
    fact = f"{what} (from {source}): {problem.strerror}."
    if problem.errno == errno.EADDRINUSE:
        return (
            f"{fact} Another program listens there, perhaps an earlier run that has "
            "not ended: choose another port, or end it."
        )
    if problem.errno == errno.EADDRNOTAVAIL:
        return (
            f"{fact} It is not an address of this machine ({socket.gethostname()}). "
            "Start process 0 on the machine of the coordinator's address; if the "
            "address is that of a gateway or service before this machine, also give "
            "coordinator_bind_address, such as '0.0.0.0:1234'."
        )
    return f"{fact} Choose another port or address."


def _warn_of_loopback(name: str, address: str, port: int) -> None:
    """Warns if a name leads other machines here, but this machine to its loopback.

    Some distributions give a machine's own name the address 127.0.1.1.
    """
    if address.startswith("127.") and name != "localhost" and name != address:
        _log.warning(
            "%s is %s on this machine, where processes of other machines cannot reach "
            "it. If there are any, give coordinator_bind_address or the variable "
            "JAX_COORDINATOR_BIND_ADDRESS, such as '0.0.0.0:%d'.",
            *(name, address, port),
        )


def _accept(listener: socket.socket, timeout_s: float) -> _Guest | None:
    """Waits for a process; None if none comes, or what comes is not one of ours."""
    listener.settimeout(timeout_s)
    try:
        connection, _ = listener.accept()
    except OSError:
        return None
    hello = _receive(connection, _HELLO_S)
    if not isinstance(hello, dict) or hello.get("meshlayout") != 1:
        connection.close()
        return None
    return _Guest(connection, hello)


def _join(settings: Settings, deadline: float, timeout_s: float) -> None:
    """Tells process 0 that this process has come, and waits for its answer."""
    hello, start = _hello(settings), time.monotonic()
    first_foreign: float | None = None
    was_warned = False
    while True:
        left = deadline - time.monotonic()
        # Process 0 may have started later, and waits as long as this process.
        reply = _ask(settings, hello, max(left, 0.1), timeout_s + _GRACE_S)
        if isinstance(reply, dict):
            if reply["problem"]:
                raise ClusterError(reply["problem"])
            return
        now = time.monotonic()
        is_foreign = reply == _FOREIGN
        first_foreign = (first_foreign or now) if is_foreign else None
        is_taken = first_foreign is not None and now - first_foreign > _FOREIGN_S
        if now >= deadline or is_taken:
            msg = (
                f"initialize: process {settings.process_index} waited "
                f"{now - start:.3g} s for process 0, which did not come to "
                f"{settings.coordinator_address} (from "
                f"{settings.sources.get('coordinator_address')}): {reply}. Look at the "
                "output of process 0, check that it was given the same address, or "
                "wait longer with timeout_s."
            )
            raise ClusterError(msg)
        if now - start > _WARN_AFTER_S and not was_warned:
            was_warned = True
            _log.warning(
                "process %d has waited %.0f s for process 0 at %s (%s), and waits up "
                "to %.0f s.",
                *(settings.process_index, now - start, settings.coordinator_address),
                *(reply, timeout_s),
            )
        time.sleep(0.05)


_FOREIGN = "another program answers there, or a run that has begun"


def _ask(
    settings: Settings,
    hello: dict[str, Any],
    connect_s: float,
    answer_s: float = 1.0,
) -> dict[str, Any] | str:
    """Says hello to process 0, and returns its answer, or why there is none.

    Args:
        settings: The settings.
        hello: What to say.
        connect_s: How long the connection may take.
        answer_s: How long the answer may take.
    """
    address = split_address(settings.coordinator_address)
    assert address is not None
    try:
        connection = socket.create_connection(address, min(connect_s, 5.0))
    except OSError as problem:
        return f"{problem.strerror or problem}".lower()
    with connection:
        # Where nobody listens yet, a port may be given to both ends of one connection.
        if connection.getsockname() == connection.getpeername():
            return "connection refused"
        try:
            _send(connection, hello)
            reply = _receive(connection, answer_s)
        except OSError as problem:
            return f"{problem.strerror or problem}".lower()
    if reply is None:
        return "it ended before all processes had come"
    return reply if isinstance(reply, dict) and "problem" in reply else _FOREIGN


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, timeout_s: float) -> Any:
    """Returns a message; None if the other end closed, or `_FOREIGN` if it is none."""
    connection.settimeout(timeout_s)
    try:
        with connection.makefile("rb") as stream:
            line = stream.readline(_LONGEST_LINE)
        return json.loads(line) if line else None
    except (OSError, ValueError):
        return _FOREIGN
