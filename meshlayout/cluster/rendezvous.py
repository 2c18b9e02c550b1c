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
    guests: dict[int, tuple[socket.socket, dict[str, Any]]] = {}
    left_s: dict[int, float] = {}
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listener(settings))
        connections = list[socket.socket]()
        while not problem and len(guests) < settings.num_processes - 1:
            for connection, hello in _accepted(listener):
                connections.append(stack.enter_context(connection))
                index = hello["process_id"]
                problem = _contradiction(hello, here, guests.get(index, (None, here)))
                guests[index] = connection, hello
            now_s = time.monotonic()
            for index in [i for i, (guest, _) in guests.items() if _has_left(guest)]:
                del guests[index]
                left_s[index] = now_s
            late = [i for i in range(1, settings.num_processes) if i not in guests]
            ended = [i for i in late if now_s - left_s.get(i, now_s) > _GONE_S]
            if not problem and (ended or (late and now_s - start_s > timeout_s)):
                what = "came, and ended before all did" if ended else "did not come"
                problem = (
                    f"{processes_text(ended or late)} {what} (process 0 waited at "
                    f"{settings.bind_address} for {now_s - start_s:.0f} s). Look at "
                    "the output there, check that all were given the same address and "
                    "can reach it, or wait longer with timeout_s."
                )
            if late and now_s - start_s > _WARN_AFTER_S and not is_warned:
                is_warned = True
                _log.warning("process 0 has waited 10 s for %s.", processes_text(late))
        deadline_s = time.monotonic() + (_TOLD_S if problem else 0)
        while time.monotonic() < deadline_s:  # those that come now hear of it, too
            connections += [stack.enter_context(c) for c, _ in _accepted(listener)]
        listener.close()  # whoever connects from now on waits for JAX's service
        for connection in connections:
            with contextlib.suppress(OSError):
                _send(connection, {"problem": problem})
    return problem


def _accepted(
    listener: socket.socket,
) -> list[tuple[socket.socket, dict[str, Any]]]:
    """Returns the process that came, if one did, with what it says of itself."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, EOFError):
        connection = listener.accept()[0]
        hello = _receive(connection, _HELLO_S)
        if {"process_id", "num_processes", "jax", "name"} <= {*hello}:
            return [(connection, hello)]
        connection.close()
    return []


def _contradiction(
    hello: dict[str, Any], here: dict[str, Any], same: tuple[Any, dict[str, Any]]
) -> str:
    """Returns how a newcomer contradicts those who came; empty if it does not.

    Args:
        hello: What it says of itself.
        here: What process 0 says of itself.
        same: The process that came before with the same index, or process 0.
    """
    index = hello["process_id"]
    if index == same[1]["process_id"]:
        names = f"{same[1]['name']}, and {hello['name']}"
        return f"two processes were given process_id={index}: {names}."
    for fact, name in (("num_processes", "num_processes"), ("jax", "version of jax")):
        if hello[fact] != here[fact]:
            return (
                f"the {name} is {hello[fact]} on process {index} ({hello['name']}), and "
                f"{here[fact]} on process 0 ({here['name']}). All need the same."
            )
    return ""


def _has_left(guest: socket.socket) -> bool:
    """Returns whether a process has ended: it says nothing more after its hello."""
    guest.setblocking(False)
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
        except (EOFError, ConnectionResetError):
            why = "it came, and ended before all did"
            left_s = min(left_s, time.monotonic())
        except (OSError, ValueError, LookupError, TypeError) as error:
            # Also at an earlier run, which is about to end.
            why = why if left_s < float("inf") else str(error)
        if time.monotonic() - start_s > _WARN_AFTER_S and not is_warned:
            is_warned = True
            _log.warning(
                "process %d has waited 10 s for process 0 at %s: %s.",
                *(settings.process_index, settings.coordinator_address, why),
            )
        time.sleep(_PAUSE_S)
    return (
        f"process {settings.process_index} waited for process 0, which did not come to "
        f"{settings.coordinator_address}: {why}. Look at the output of process 0, "
        "check that it was given the same address, or wait longer with timeout_s."
    )


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.settimeout(_HELLO_S)
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, timeout_s: float) -> Any:
    """Returns a message; raises EOFError if the other end closed."""
    connection.settimeout(timeout_s)
    with connection.makefile("rb") as stream:
        line = stream.readline(2**16)
    if not line:
        raise EOFError
    return json.loads(line)
