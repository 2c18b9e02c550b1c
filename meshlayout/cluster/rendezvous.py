"""The meeting of all processes before JAX's coordination service starts.

JAX ends a process whose partners do not come with SIGABRT and without their names. So
the processes meet at the coordinator's address first: each sends process 0 a line of
JSON that says who it is, and waits for one with the problem, if any, and all names.
"""

import contextlib
import functools
import json
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import jax

from meshlayout.cluster.channel import processes_text
from meshlayout.cluster.environment import Settings, split_address
from meshlayout.errors import ClusterError


_log = logging.getLogger(__name__)

_HELLO_S = 2.0  # for a connection to say who it is: a port scanner says nothing
_GONE_S = 8.0  # for a process 0 that came and ended to come again
_TOLD_S = 2.0  # for those that come late to hear of a problem
_BIND_S = 10.0  # for an earlier run to leave the port
_WARN_AFTER_S = 10.0
_PAUSE_S = 0.1

_LOOK = (
    "Look at the output there, check that all were given the same address and can "
    "reach it, or wait longer with timeout_s."
)


def meet(settings: Settings, timeout_s: float) -> list[str]:
    """Waits until all processes have come; returns their names, with hosts and pids."""
    index, count = settings.process_index, settings.num_processes
    name = f"process {index} ({socket.gethostname()}, pid {os.getpid()})"
    facts = {"num_processes": count, "jax": jax.__version__}
    hello = {"process_id": index, "name": name, **facts}
    late = [0] if index else [*range(1, count)]
    log = functools.partial(_log.warning, "%s has waited 10 s for %s.", name)
    timer = threading.Timer(_WARN_AFTER_S, lambda: log(processes_text(late)))
    timer.start()
    args = settings, hello, timeout_s
    try:
        problem, names = _join(*args) if index else _gather(*args, late)
    finally:
        timer.cancel()
    if problem:
        raise ClusterError(f"initialize: {problem}")
    return names


def _gather(settings: Settings, here: Any, timeout_s: float, late: list[int]) -> Any:
    """Waits for the others as process 0; answers the problem, and all names."""
    start_s, problem = time.monotonic(), ""
    hellos, connections = {0: here}, list[socket.socket]()
    with contextlib.ExitStack() as stack:
        listener, poll = stack.enter_context(_listener(settings)), select.poll()
        while late and not problem:
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                guest = stack.enter_context(listener.accept()[0])
                hello = _receive(guest, _HELLO_S)
                problem = _contradiction(hello, hellos)
                connections.append(guest)
                late.remove(hello["process_id"])
                hellos[hello["process_id"]] = {**hello, "file": guest.fileno()}
                poll.register(guest, select.POLLIN)
            # After its hello, a process only says that it has ended.
            files = {file for file, _ in poll.poll(0)}
            gone = [i for i, hello in hellos.items() if hello.get("file") in files]
            waited_s = time.monotonic() - start_s
            if not problem and (gone or (late and waited_s > timeout_s)):
                what = "came, and ended before all did" if gone else "did not come"
                problem = f"{processes_text(gone or late)} {what} (process 0 waited "
                problem += f"{waited_s:.0f} s at {settings.bind_address}). {_LOOK}"
        deadline_s = time.monotonic() + (_TOLD_S if problem else 0)
        while time.monotonic() < deadline_s:  # those that come now hear of it, too
            with contextlib.suppress(OSError):
                connections.append(stack.enter_context(listener.accept()[0]))
        listener.close()  # whoever connects from now on waits for JAX's service
        answer = problem, [hellos[index]["name"] for index in sorted(hellos)]
        for connection in connections:
            with contextlib.suppress(OSError):
                _send(connection, answer)
    return answer


def _contradiction(hello: Any, hellos: Mapping[int, Any]) -> str:
    """Returns how a newcomer contradicts those who came; empty if it does not."""
    index, name = hello["process_id"], hello["name"]
    if index in hellos:
        names = f"{hellos[index]['name']} and {name}"
        return f"two processes were given process_id={index}: {names}."
    for fact in ("num_processes", "jax"):
        if hello[fact] != hellos[0][fact]:
            texts = [f"{x[fact]} on {x['name']}" for x in (hello, hellos[0])]
            return f"{fact} is {', and '.join(texts)}."
    return ""


def _listener(settings: Settings) -> socket.socket:
    """Returns a socket that listens where JAX's service will."""
    address = split_address(settings.bind_address) or ("", 0)
    deadline_s = time.monotonic() + _BIND_S
    while True:
        try:
            family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
            # It sets SO_REUSEADDR: the port of a run that has ended is free at once.
            listener = socket.create_server(address, family=family, backlog=2**12)
            listener.settimeout(_PAUSE_S)
            return listener
        except OSError as error:
            if time.monotonic() > deadline_s:
                msg = f"initialize: process 0 cannot listen at {settings.bind_address}:"
                msg += f" {error}. It must be an address of {socket.gethostname()} and "
                msg += "a free port; behind a gateway, give "
                msg += "coordinator_bind_address='0.0.0.0:1234', too."
                raise ClusterError(msg) from error
        time.sleep(_PAUSE_S)


def _join(settings: Settings, hello: Any, timeout_s: float) -> Any:
    """Tells process 0 that this process has come; returns its answer."""
    address = split_address(settings.coordinator_address) or ("", 0)
    start_s, why, gone = time.monotonic(), "", ""
    deadline_s = start_s + timeout_s
    while time.monotonic() < deadline_s:
        try:
            with socket.create_connection(address, 5.0) as connection:
                _send(connection, hello)
                # Process 0 may have started later, and waits for as long.
                problem, names = _receive(connection, timeout_s + _TOLD_S + _HELLO_S)
                return problem, names
        except ConnectionResetError:
            gone = "it came, and ended before all did"
            deadline_s = min(start_s + timeout_s, time.monotonic() + _GONE_S)
        except (OSError, ValueError, LookupError, TypeError) as error:
            # Also of an earlier run's service; or, where nobody listens, of this very
            # socket: Linux may connect it to itself.
            why = str(error)
        time.sleep(_PAUSE_S)
    problem = f"{hello['name']} waited for process 0, which did not come to "
    problem += f"{settings.coordinator_address}: {gone or why}. {_LOOK}"
    return problem, []


def _send(connection: socket.socket, line: Any) -> None:
    connection.settimeout(_HELLO_S)
    connection.sendall(json.dumps(line).encode() + b"\n")


def _receive(connection: socket.socket, timeout_s: float) -> Any:
    """Returns a line; raises ConnectionResetError if the other end closed."""
    connection.settimeout(timeout_s)
    with connection.makefile("rb") as stream:
        line = stream.readline(2**24)
    if not line:
        raise ConnectionResetError
    return json.loads(line)
