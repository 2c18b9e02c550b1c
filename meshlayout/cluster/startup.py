"""The start and the end of a program of several processes.

On one process nothing is started, so the same program runs on a laptop. If processes
are missing, JAX ends the others with SIGABRT and names none. So they meet first, at the
coordinator's address: each sends process 0 a line of JSON with its name, and waits for
one with all names, or the problem.
"""

import contextlib
import functools
import json
import logging
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from meshlayout import _checks, _jax
from meshlayout.cluster import watch
from meshlayout.cluster.channel import processes_text
from meshlayout.cluster.environment import Settings, find_settings, split_address
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

# What `initialize` was given, from its call until `shutdown`.
_running: Settings | None = None


@_checks.user_call
def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    coordinator_bind_address: str | None = None,
    timeout_s: float = 300.0,
    heartbeat_timeout_s: float = 6.0,
    step_timeout_s: float | None = None,
) -> None:
    """Makes this process part of a program of several, wherever it was started.

    Call it first, instead of `jax.distributed.initialize`: the same on a laptop, Colab,
    a GPU host, a TPU pod slice or under SLURM. On one process it does nothing.
    Otherwise it waits for all processes, and `jax.devices()` then lists the devices of
    all. If one fails later, the others name it and end.

    Omitted arguments come from JAX's variables (JAX_COORDINATOR_ADDRESS and so on),
    from TF_CONFIG (chief and workers), or from JAX's detection of SLURM, Open MPI,
    Kubernetes and Google Cloud TPU. The choice is logged at level info.

    Args:
        coordinator_address: The host of process 0 and a free port, `"10.0.0.1:1234"`.
        num_processes: The number of processes.
        process_id: The index of this process, from 0.
        local_device_ids: The ids of this machine's GPUs to use; None for all.
        coordinator_bind_address: Where process 0 listens, if elsewhere, as
            `"0.0.0.0:1234"` for all interfaces.
        timeout_s: Seconds to wait for the other processes.
        heartbeat_timeout_s: Seconds without a heartbeat until a process counts as lost.
        step_timeout_s: The program counts as stuck after this many seconds without the
            start of a step or an exchange between processes; None for never. It must
            exceed any compilation, save or Python code between two steps.

    Raises:
        ClusterError: If settings are malformed, missing, contradictory or wrong,
            process 0 cannot listen at its address, or JAX has started its devices.

    Examples:
        >>> initialize()  # on one process, it does nothing
        >>> shutdown()
    """
    global _running
    arguments = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
        "local_device_ids": local_device_ids,
        "coordinator_bind_address": coordinator_bind_address,
    }
    timeouts = {"timeout_s": timeout_s, "heartbeat_timeout_s": heartbeat_timeout_s}
    timeouts |= {} if step_timeout_s is None else {"step_timeout_s": step_timeout_s}
    where: dict[str, Any] = {"where": "initialize", "error": ClusterError}
    for name, value in timeouts.items():  # sockets and locks take no larger ones
        _checks.number(name, value, above=0, at_most=1e9, **where)
    detect = functools.partial(_jax.detect_cluster, timeout_s=timeout_s)
    settings = find_settings(arguments, os.environ, detect)
    if _running is not None:
        if settings.source and settings != _running:
            msg = f"initialize: this program already runs as {_running}, and cannot "
            raise ClusterError(f"{msg}become {settings}. Call shutdown() first.")
        return
    count, ids = settings.num_processes, settings.local_device_ids
    has_started = _jax.has_backend() or jax.distributed.is_initialized()
    if has_started and (count > 1 or ids is not None):
        msg = "initialize comes too late: JAX has started its devices or its own "
        msg += "jax.distributed. Call it before any other use of JAX, virtual_devices "
        raise ClusterError(f"{msg}included; in a notebook, restart the kernel first.")
    if count > 1:
        names = meet(settings, timeout_s)
        # gRPC would wait forever for a proxy that cannot reach the cluster's machines.
        host = settings.coordinator_address.rpartition(":")[0].strip("[]")
        direct, others = "no_grpc_proxy", os.environ.get("no_proxy", "")
        os.environ[direct] = f"{os.environ.get(direct) or others},{host}".strip(",")
        if settings.process_index:
            watch.delay_abort()
        # A process that is lost does not abort the others: the watch ends them.
        jax.config.update("jax_enable_recoverability", True)  # noqa: FBT003
        jax.config.update("jax_check_proxy_envs", False)  # noqa: FBT003
        jax.distributed.initialize(
            *(settings.coordinator_address, count, settings.process_index),
            local_device_ids=ids,
            cluster_detection_method="deactivate",
            coordinator_bind_address=settings.bind_address,
            initialization_timeout=60,  # all are there already
            heartbeat_timeout_seconds=math.ceil(heartbeat_timeout_s),
        )
        watch.Watch(names, heartbeat_timeout_s, step_timeout_s)
    elif ids is not None:
        for kind in ("cuda", "rocm"):  # of one process; before JAX has started them
            jax.config.update(f"jax_{kind}_visible_devices", ",".join(map(str, ids)))
    _running = settings
    _log.info("%s%s.", settings, "" if settings.source else "; no cluster was found")


def shutdown() -> None:
    """Leaves the program, as `jax.distributed.shutdown()` and a program's end also do.

    Process 0 waits until all others have left. On one process, it does nothing.
    """
    global _running
    if _running is not None and _running.num_processes > 1:
        jax.distributed.shutdown()
    _running = None


def process_index() -> int:
    """Returns the index of this process, from 0; it starts no devices."""
    return _jax.process_index() if _running is None else _running.process_index


def process_count() -> int:
    """Returns the number of processes of the program."""
    return _jax.process_count() if _running is None else _running.num_processes


def is_main() -> bool:
    """Returns whether this is process 0, which prints and writes for all."""
    return process_index() == 0


# The meeting.


def meet(settings: Settings, timeout_s: float) -> list[str]:
    """Waits until all processes have come; returns their names, with hosts and pids."""
    index, count = settings.process_index, settings.num_processes
    name = f"process {index} ({socket.gethostname()}, pid {os.getpid()})"
    hello = {"process_id": index, "name": name}
    hello |= {"num_processes": count, "jax": jax.__version__}
    late = [0] if index else [*range(1, count)]
    warn = functools.partial(_log.warning, "%s has waited 10 s for %s.", name)
    timer = threading.Timer(_WARN_AFTER_S, lambda: warn(processes_text(late)))
    timer.start()
    try:
        problem, names = (_join if index else _gather)(settings, hello, timeout_s, late)
    finally:
        timer.cancel()
    if problem:
        raise ClusterError(f"initialize: {problem}")
    return names


def _gather(settings: Settings, hello: Any, timeout_s: float, late: list[int]) -> Any:
    start_s, problem, hellos = time.monotonic(), "", {0: hello}
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listener(settings))
        listener.settimeout(_PAUSE_S)
        guests = stack.enter_context(selectors.DefaultSelector())
        while late and not problem:
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                guest = stack.enter_context(listener.accept()[0])
                hello = _receive(guest, _HELLO_S)
                problem, index = _contradiction(hello, hellos), hello["process_id"]
                guests.register(guest, selectors.EVENT_READ, index)
                late.remove(index)
                hellos[index] = hello
            # After its hello, a process only says that it has ended.
            gone = [key.data for key, _ in guests.select(0)]
            waited_s = time.monotonic() - start_s
            if not problem and (gone or (late and waited_s > timeout_s)):
                what = "came, and ended before all did" if gone else "did not come"
                problem = f"{processes_text(gone or late)} {what} (process 0 waited "
                problem += f"{waited_s:.0f} s at {settings.bind_address}). {_LOOK}"
        deadline_s = time.monotonic() + (_TOLD_S if problem else 0)
        while time.monotonic() < deadline_s:  # those that come now hear of it, too
            with contextlib.suppress(OSError):
                guest = stack.enter_context(listener.accept()[0])
                guests.register(guest, selectors.EVENT_READ)
        listener.close()  # whoever connects from now on waits for JAX's service
        answer = problem, [hellos[index]["name"] for index in sorted(hellos)]
        for key in guests.get_map().values():
            with contextlib.suppress(OSError):
                _send(key.fileobj, answer)
    return answer


def _contradiction(hello: Any, hellos: Mapping[int, Any]) -> str:
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
    address: Any = split_address(settings.bind_address)
    deadline_s = time.monotonic() + _BIND_S
    while True:
        try:
            family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
            # It sets SO_REUSEADDR: the port of a run that has ended is free at once.
            return socket.create_server(address, family=family, backlog=2**12)
        except OSError as error:
            if time.monotonic() > deadline_s:
                msg = f"initialize: process 0 cannot listen at {settings.bind_address}:"
                msg += f" {error}. It must be an address of {socket.gethostname()} and "
                msg += "a free port; behind a gateway, give coordinator_bind_address="
                raise ClusterError(f"{msg}'0.0.0.0:1234', too.") from error
        time.sleep(_PAUSE_S)


def _join(settings: Settings, hello: Any, timeout_s: float, late: list[int]) -> Any:
    address: Any = split_address(settings.coordinator_address)
    deadline_s, why, gone = time.monotonic() + timeout_s, "", ""
    while time.monotonic() < deadline_s:
        try:
            with socket.create_connection(address, 5.0) as connection:
                _send(connection, hello)
                # Process 0 may have started later, and waits for as long.
                problem, names = _receive(connection, timeout_s + _TOLD_S + _HELLO_S)
                return problem, names
        except ConnectionResetError:
            gone = "it came, and ended before all did"
            deadline_s = min(deadline_s, time.monotonic() + _GONE_S)
        except (OSError, ValueError, LookupError, TypeError) as error:
            # Or an earlier run's service; or Linux connects this socket to itself.
            why = str(error)
        time.sleep(_PAUSE_S)
    problem = f"{hello['name']} waited for process 0, which did not come to "
    problem += f"{settings.coordinator_address}: {gone or why}. {_LOOK}"
    return problem, []


def _send(connection: Any, line: Any) -> None:
    connection.settimeout(_HELLO_S)
    connection.sendall(json.dumps(line).encode() + b"\n")


def _receive(connection: socket.socket, timeout_s: float) -> Any:
    connection.settimeout(timeout_s)
    with connection.makefile("rb") as stream:
        line = stream.readline(2**24)
    if not line:  # the other end closed
        raise ConnectionResetError
    return json.loads(line)
