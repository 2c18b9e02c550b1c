"""The start and the end of a program of several processes.

On one process nothing is started, so that the same program runs on a laptop. On
several, the processes meet before JAX's own start, because JAX can neither name a
process that does not come nor be interrupted while it waits.
"""

import functools
import logging
import os
from collections.abc import Sequence

import jax

from meshlayout import _checks, _jax
from meshlayout.cluster import rendezvous, watch
from meshlayout.cluster.channel import Channel
from meshlayout.cluster.settings import Settings, find_settings
from meshlayout.errors import ClusterError


_log = logging.getLogger(__name__)

# gRPC's variable for the hosts that it asks no proxy for.
_DIRECT = "no_grpc_proxy"

# What `initialize` was given, from its call until `shutdown`; on several processes also
# where they meet to leave.
_running: Settings | None = None
_timeouts: dict[str, float] = {}
_leaving: Channel | None = None


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    coordinator_bind_address: str | None = None,
    timeout_s: float = 300.0,
    heartbeat_timeout_s: float | None = None,
    step_timeout_s: float | None = None,
) -> None:
    """Makes this process part of a program of several, wherever it was started.

    Use this as the first call of a program, instead of `jax.distributed.initialize`:
    the same on a laptop, Colab, a GPU host, a TPU pod slice or under SLURM. On one
    process it does nothing. Otherwise it waits for all processes, and then
    `jax.devices()` are those of all of them.

    What is not given as an argument comes from the first of these that says it: JAX's
    variables (JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID,
    JAX_COORDINATOR_BIND_ADDRESS, JAX_LOCAL_DEVICE_IDS), TF_CONFIG (chief and workers),
    DTENSOR_JOBS with DTENSOR_CLIENT_ID, KERAS_DISTRIBUTION_JOB_ADDRESSES with
    KERAS_DISTRIBUTION_NUM_PROCESSES and KERAS_DISTRIBUTION_PROCESS_ID, and JAX's own
    detection of SLURM, Open MPI, Kubernetes and Google Cloud TPU. The choice is logged
    at level info. A second call with the same settings does nothing.

    Args:
        coordinator_address: The host of process 0 and a free port on it, as
            `"10.0.0.1:1234"`, the same for all processes.
        num_processes: The number of processes.
        process_id: The index of this process, from 0.
        local_device_ids: The ids of the GPUs of this machine that this process may
            use; None for all of them.
        coordinator_bind_address: The address and port at which process 0 listens, if
            it is not the coordinator's: `"0.0.0.0:1234"` for all interfaces.
        timeout_s: How long to wait for the other processes.
        heartbeat_timeout_s: After how many seconds of silence a process counts as
            lost; None for 6. A process is silent when it is killed, stopped or cut off,
            but also while a single call of C code holds Python's lock (the GIL), as
            pickling a very large object does: raise this if such a call takes longer
            than about 5 seconds. Compiling, collectives, file access and most of NumPy
            do not hold the lock.
        step_timeout_s: After how many seconds without progress in any process the
            program counts as stuck; None for never. Progress is a call of a step, a
            batch, the beginning and the end of a save, a restore or a barrier; a step
            that compiles makes progress as long as that lasts. So this must exceed the
            longest of these, and also the longest that all processes compute in Python
            between them, as for plots or an evaluation without steps. It counts from
            the first step until the first process ends its program. The process with
            the fewest calls of steps is named; among equals one that does not wait for
            others, and then the one that has been idle for longest.

    Raises:
        ClusterError: If a setting is malformed or missing, or sources contradict each
            other; if the processes that came are not those that should; if process 0
            cannot listen at its address; if called again with other settings; or if JAX
            has already started its devices.

    Example:
        >>> initialize()  # on one process, it does nothing
        >>> shutdown()
    """
    global _running, _leaving
    timeout_s = _seconds("timeout_s", timeout_s)
    timeouts = {
        name: _seconds(name, value)
        for name, value in (
            ("heartbeat_timeout_s", heartbeat_timeout_s),
            ("step_timeout_s", step_timeout_s),
        )
        if value is not None
    }
    arguments = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
        "local_device_ids": local_device_ids,
        "coordinator_bind_address": coordinator_bind_address,
    }
    settings = find_settings(
        arguments,
        os.environ,
        functools.partial(_jax.detect_cluster, timeout_s=timeout_s),
    )
    if _running is not None:
        _check_same(settings, timeouts, _running)
        return
    if settings.num_processes > 1:
        _check_not_started()
        _start(settings, timeout_s)
        watch.start(**timeouts)
        hint = "All processes must call it, or all end without it."
        _leaving = Channel("shutdown", what="shutdown()", hint=hint)
    elif settings.local_device_ids is not None:
        _check_not_started()
        _jax.restrict_devices(settings.local_device_ids)
    _running = settings
    _timeouts.update(timeouts)
    _log.info("%s%s.", settings, _origin(settings) or "; no cluster was found")


def shutdown(timeout_s: float = 300.0) -> None:
    """Leaves the program, after all of its processes have come to this call.

    Use this as the last call of a program of several processes, so that none ends while
    another still needs it. On one process it does nothing.

    Args:
        timeout_s: How long to wait for the other processes.

    Raises:
        ClusterError: On all processes, if one does not come in time. They stay in the
            program.
    """
    global _running, _leaving
    timeout_s = _seconds("timeout_s", timeout_s, where="shutdown")
    # Nobody is left to wait for after jax.distributed.shutdown().
    if _leaving is not None and _jax.coordination_client() is not None:
        with watch.leaving():
            _leaving.exchange(None, timeout_s=timeout_s)
        watch.stop()
    _leaving = None
    _running = None
    _timeouts.clear()


def process_index() -> int:
    """Returns the index of this process, from 0.

    After `initialize`, it does not start JAX's devices.
    """
    return _jax.process_index() if _running is None else _running.process_index


def process_count() -> int:
    """Returns the number of processes of the program.

    After `initialize`, it does not start JAX's devices.
    """
    return _jax.process_count() if _running is None else _running.num_processes


def is_main() -> bool:
    """Returns whether this is process 0, which prints and writes for all.

    Example:
        >>> is_main()
        True
    """
    return process_index() == 0


def _origin(settings: Settings) -> str:
    return f" (from {settings.source})" if settings.source else ""


def _seconds(name: str, value: float, where: str = "initialize") -> float:
    # Sockets and locks take no more than nine billion seconds.
    return _checks.number(
        name, value, above=0, at_most=1e9, where=where, error=ClusterError
    )


def _check_same(
    settings: Settings, timeouts: dict[str, float], running: Settings
) -> None:
    """Refuses a second call with other settings; without any, it means the first's."""
    if settings.sources and settings != running:
        msg = (
            f"initialize: this program already runs as {running}{_origin(running)}, "
            f"and cannot become {settings}{_origin(settings)}. Call initialize once, "
            "or shutdown() before other settings."
        )
        raise ClusterError(msg)
    for name, value in timeouts.items():
        if value != _timeouts.get(name):
            before = _timeouts.get(name, "the default")
            msg = (
                f"initialize: {name} is {before} since the first call, and cannot "
                f"become {value}. Give it in the first call."
            )
            raise ClusterError(msg)


def _check_not_started() -> None:
    """Refuses to start when JAX's devices, or its processes, have been started."""
    if jax.distributed.is_initialized():
        msg = (
            "initialize: jax.distributed.initialize was called before. Call "
            "ml.initialize instead of it; it takes the same arguments."
        )
        raise ClusterError(msg)
    if _jax.has_backend():
        msg = (
            "initialize comes too late: JAX has already started its devices, and other "
            "processes can no longer join them. Call it before any other use of JAX, "
            "virtual_devices included; in a notebook, restart the kernel first."
        )
        raise ClusterError(msg)


def _start(settings: Settings, timeout_s: float) -> None:
    address, bind_address = settings.coordinator_address, settings.bind_address
    assert address is not None
    assert bind_address is not None
    rendezvous.meet(settings, timeout_s)
    _bypass_proxies(address)
    try:
        _jax.start_processes(
            coordinator_address=address,
            num_processes=settings.num_processes,
            process_id=settings.process_index,
            local_device_ids=settings.local_device_ids,
            coordinator_bind_address=bind_address,
        )
    except RuntimeError as problem:
        msg = (
            f"initialize: process {settings.process_index} could not start JAX's "
            f"service at {bind_address}: {problem}. If another program has taken the "
            "port meanwhile, choose another one."
        )
        raise ClusterError(msg) from problem


def _bypass_proxies(address: str) -> None:
    """Lets gRPC connect to the coordinator itself, as the rendezvous just did.

    It would ask an HTTP proxy named in the environment, and wait for ever where that
    cannot reach the cluster's machines. JAX only warns of this.
    """
    if not any(map(os.environ.get, ("grpc_proxy", "https_proxy", "http_proxy"))):
        return
    host = address.rpartition(":")[0].strip("[]")
    others = os.environ.get(_DIRECT) or os.environ.get("no_proxy")
    os.environ[_DIRECT] = f"{others},{host}" if others else host
    _jax.ignore_proxies()
