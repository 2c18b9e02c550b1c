"""The meeting of all processes before JAX's coordination service starts.

JAX ends a process whose partners do not come with SIGABRT and without their names. So
the processes meet at the coordinator's address first, over plain sockets: each sends
process 0 one line of JSON that says who it is, and waits for one with the problem that
all of them raise, which is empty if there is none.
"""

import contextlib
import errno
import json
import logging
import os
import socket
import time
from typing import Any

import jax

from meshlayout.cluster.channel import processes_text
from meshlayout.cluster.environment import Settings, split_address
from meshlayout.errors import ClusterError


_log = logging.getLogger(__name__)

_HELLO_S = 2.0  # for a connection to say who it is: a port scanner says nothing
_GONE_S = 8.0  # for one that came and ended to come again, if something restarts it
_TOLD_S = 2.0  # for those that come late to hear of a problem
_BIND_S = 10.0  # for an earlier run to leave the port
_WARN_AFTER_S = 10.0
_PAUSE_S = 0.1

_LOOK = (
    "Look at the output there, check that all were given the same address and can "
    "reach it, or wait longer with timeout_s."
)


def meet(settings: Settings, timeout_s: float) -> None:
    """Waits until all processes have come.

    Args:
        settings: The settings of this process, one of several.
        timeout_s: How long to wait.

    Raises:
        ClusterError: On every process that came, if one did not or ended, if two have
            the same index, or if their numbers of processes or versions differ.
    """
    hello = {
        "process_id": settings.process_index,
        "num_processes": settings.num_processes,
        "jax": jax.__version__,
        "name": f"pid {os.getpid()} on {socket.gethostname()}",
    }
    take_part = _join if settings.process_index else _gather
    problem = take_part(settings, hello, timeout_s)
    if problem:
        raise ClusterError(f"initialize: {problem}")


def _gather(settings: Settings, here: dict[str, Any], timeout_s: float) -> str:
    """Waits for the others as process 0, and answers them; returns the problem."""
    start_s, problem, is_warned = time.monotonic(), "", False
    hellos, guests = {0: here}, dict[int, socket.socket]()
    connections, left_s = list[socket.socket](), dict[int, float]()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listener(settings))
        while not problem and len(hellos) < settings.num_processes:
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                guest = stack.enter_context(listener.accept()[0])
                hello = _receive(guest, _HELLO_S)
                problem = _contradiction(hello, hellos)
                hellos[hello["process_id"]], guests[hello["process_id"]] = hello, guest
                connections.append(guest)
            waited_s = time.monotonic() - start_s
            for index in [i for i, guest in guests.items() if _has_left(guest)]:
                del hellos[index], guests[index]
                left_s[index] = waited_s
            late = [i for i in range(settings.num_processes) if i not in hellos]
            gone = [i for i in late if waited_s - left_s.get(i, waited_s) > _GONE_S]
            if not problem and (gone or (late and waited_s > timeout_s)):
                what = "came, and ended before all did" if gone else "did not come"
                problem = f"{processes_text(gone or late)} {what} (process 0 waited "
                problem += f"{waited_s:.0f} s at {settings.bind_address}). {_LOOK}"
            elif late and waited_s > _WARN_AFTER_S and not is_warned:
                is_warned = True
                _log.warning("process 0 has waited 10 s for %s.", processes_text(late))
        deadline_s = time.monotonic() + (_TOLD_S if problem else 0)
        while time.monotonic() < deadline_s:  # those that come now hear of it, too
            with contextlib.suppress(OSError):
                connections.append(stack.enter_context(listener.accept()[0]))
        listener.close()  # whoever connects from now on waits for JAX's service
        for connection in connections:
            with contextlib.suppress(OSError):
                _send(connection, {"problem": problem})
    return problem


def _contradiction(hello: dict[str, Any], hellos: dict[int, dict[str, Any]]) -> str:
    """Returns how a newcomer contradicts those who came; empty if it does not."""
    index, name = hello["process_id"], hello["name"]
    if index in hellos:
        names = f"{hellos[index]['name']}, and {name}"
        return f"two processes were given process_id={index}: {names}."
    for fact in ("num_processes", "jax"):
        if hello[fact] != hellos[0][fact]:
            text = f"{fact} is {hello[fact]} on process {index} ({name}), and "
            return f"{text}{hellos[0][fact]} on process 0 ({hellos[0]['name']})."
    return ""


def _has_left(guest: socket.socket) -> bool:
    """Returns whether a process has ended: it says nothing more after its hello."""
    guest.settimeout(0)
    try:
        guest.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _listener(settings: Settings) -> socket.socket:
    """Returns a socket that listens where JAX's service will."""
    address = split_address(settings.bind_address) or ("", 0)
    deadline_s = time.monotonic() + _BIND_S
    while True:
        try:
            family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
            # It sets SO_REUSEADDR: the port of a run that has ended is free at once.
            listener = socket.create_server(address, family=family, backlog=2**12)
        except OSError as error:
            is_taken = error.errno == errno.EADDRINUSE
            if is_taken and time.monotonic() < deadline_s:
                time.sleep(_PAUSE_S)
                continue
            hint = "End the program that listens there, or choose another port."
            if not is_taken:
                hint = f"It must be an address of {socket.gethostname()}; behind a "
                hint += "gateway, give coordinator_bind_address='0.0.0.0:1234', too."
            msg = f"initialize: process 0 cannot listen at {settings.bind_address}: "
            raise ClusterError(f"{msg}{error}. {hint}") from error
        listener.settimeout(_PAUSE_S)
        return listener


def _join(settings: Settings, hello: dict[str, Any], timeout_s: float) -> str:
    """Tells process 0 that this process has come; returns its answer."""
    address = split_address(settings.coordinator_address) or ("", 0)
    start_s, left_s, why, is_warned = time.monotonic(), float("inf"), "", False
    while time.monotonic() < min(start_s + timeout_s, left_s + _GONE_S):
        try:
            with socket.create_connection(address, 5.0) as connection:
                # Where nobody listens, Linux may connect a socket to itself.
                if connection.getsockname() != connection.getpeername():
                    _send(connection, hello)
                    # Process 0 may have started later, and waits for as long.
                    answer = _receive(connection, timeout_s + _TOLD_S + _HELLO_S)
                    return str(answer["problem"])
        except ConnectionResetError:
            why, left_s = "it came, and ended before all did", time.monotonic()
        except (OSError, ValueError, LookupError, TypeError) as error:
            # Also at an earlier run, which is about to end.
            why = why if left_s < float("inf") else str(error)
        if time.monotonic() - start_s > _WARN_AFTER_S and not is_warned:
            is_warned = True
            _log.warning(
                "process %d has waited 10 s for process 0.", settings.process_index
            )
        time.sleep(_PAUSE_S)
    text = f"process {settings.process_index} waited for process 0, which did not come "
    return f"{text}to {settings.coordinator_address}: {why}. {_LOOK}"


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.settimeout(_HELLO_S)
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, timeout_s: float) -> Any:
    """Returns a message; raises ConnectionResetError if the other end closed."""
    connection.settimeout(timeout_s)
    with connection.makefile("rb") as stream:
        line = stream.readline(2**16)
    if not line:
        raise ConnectionResetError
    return json.loads(line)
