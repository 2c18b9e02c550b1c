"""The start and the end of a program of several processes.

On one process nothing is started, so that the same program runs on a laptop. On
several, the processes meet before JAX's own start, because JAX can neither name a
process that does not come nor be interrupted while it waits.
"""

import functools
import logging
import math
import os
from collections.abc import Sequence
from typing import Any

import jax

from meshlayout import _checks, _jax
from meshlayout.cluster import rendezvous, watch
from meshlayout.cluster.environment import Settings, find_settings
from meshlayout.errors import ClusterError


_log = logging.getLogger(__name__)

_DIRECT = "no_grpc_proxy"  # the hosts that gRPC asks no proxy for

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

    Use this as the first call of a program, instead of `jax.distributed.initialize`:
    the same on a laptop, Colab, a GPU host, a TPU pod slice or under SLURM. On one
    process it does nothing. Otherwise it waits for all processes, and then
    `jax.devices()` are those of all of them. If one of them fails later, all others
    name it and end; docs/scaling.md says after how long.

    What is not given as an argument comes from JAX's variables (JAX_COORDINATOR_ADDRESS
    and so on, named as the arguments), from TF_CONFIG (chief and workers), or from
    JAX's detection of SLURM, Open MPI, Kubernetes and Google Cloud TPU. The choice is
    logged at level info.

    Args:
        coordinator_address: The host of process 0 and a free port on it, as
            `"10.0.0.1:1234"`, the same for all processes.
        num_processes: The number of processes.
        process_id: The index of this process, from 0.
        local_device_ids: The ids of this machine's GPUs to use; None for all.
        coordinator_bind_address: Where process 0 listens, if it is not the
            coordinator's address: `"0.0.0.0:1234"` for all interfaces.
        timeout_s: How long to wait for the other processes.
        heartbeat_timeout_s: After how many seconds without a heartbeat of JAX a process
            counts as killed, stopped or cut off.
        step_timeout_s: After how many seconds in which no process has begun a step or a
            meeting the program counts as stuck; None for never. It must exceed the
            longest that all compile, save or compute in Python between two of these.

    Raises:
        ClusterError: If a setting is malformed or missing, or sources contradict each
            other; if other processes came than should; if process 0 cannot listen at
            its address; if called again with other settings; or if JAX has already
            started its devices.

    Example:
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
    for name, value in timeouts.items():
        # Sockets and locks take no more than nine billion seconds.
        _checks.number(name, value, above=0, at_most=1e9, **where)
    detect = functools.partial(_jax.detect_cluster, timeout_s=timeout_s)
    settings = find_settings(arguments, os.environ, detect)
    if _running is not None:
        if settings.source and settings != _running:
            msg = f"initialize: this program already runs as {_running}, and cannot "
            raise ClusterError(f"{msg}become {settings}. Call shutdown() before.")
        return
    is_late = _jax.has_backend() or jax.distributed.is_initialized()
    if is_late and (
        settings.num_processes > 1 or settings.local_device_ids is not None
    ):
        msg = (
            "initialize comes too late: JAX has already started its devices, or was "
            "started by jax.distributed.initialize, whose place this takes. Call it "
            "before any other use of JAX, virtual_devices included; in a notebook, "
            "restart the kernel first."
        )
        raise ClusterError(msg)
    if settings.num_processes > 1:
        names = rendezvous.meet(settings, timeout_s)
        # gRPC would ask a proxy in the environment for process 0, and wait forever
        # where that cannot reach the cluster's machines. The meeting has connected.
        host = settings.coordinator_address.rpartition(":")[0].strip("[]")
        others = os.environ.get(_DIRECT) or os.environ.get("no_proxy")
        os.environ[_DIRECT] = f"{others},{host}" if others else host
        if settings.process_index:
            watch.delay_abort()
        # A process that is lost does not abort the others: the watch ends them.
        jax.config.update("jax_enable_recoverability", True)  # noqa: FBT003
        jax.config.update("jax_check_proxy_envs", False)  # noqa: FBT003
        jax.distributed.initialize(
            settings.coordinator_address,
            settings.num_processes,
            settings.process_index,
            local_device_ids=settings.local_device_ids,
            cluster_detection_method="deactivate",
            coordinator_bind_address=settings.bind_address,
            initialization_timeout=60,  # all are there already
            heartbeat_timeout_seconds=math.ceil(heartbeat_timeout_s),
        )
        watch.Watch(names, heartbeat_timeout_s, step_timeout_s)
    elif settings.local_device_ids is not None:
        for kind in ("cuda", "rocm"):  # of one process; before JAX has started them
            ids = ",".join(map(str, settings.local_device_ids))
            jax.config.update(f"jax_{kind}_visible_devices", ids)
    _running = settings
    _log.info("%s%s.", settings, "" if settings.source else "; no cluster was found")


def shutdown() -> None:
    """Leaves the program; `jax.distributed.shutdown()` does the same.

    A program may also just end: that leaves it, too. Process 0 waits until all others
    have left. On one process this does nothing.
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
    """Returns whether this is process 0, which prints and writes for all.

    Example:
        >>> is_main()
        True
    """
    return process_index() == 0
