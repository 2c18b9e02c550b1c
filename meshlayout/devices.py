"""Virtual devices: several CPU devices on a laptop or in a notebook."""

import os
import warnings

import jax

from meshlayout import _checks, _jax
from meshlayout.errors import MeshError


# Each device is an object with its own queue; JAX takes no more than 32 bits.
_MOST = 2**16


def virtual_devices(n: int) -> list[_jax.Device]:
    """Gives a machine without accelerators `n` CPU devices, to try meshes on.

    Call it first, before anything looks at JAX's devices; calling it again with the
    same number is fine. On a machine with TPUs or GPUs it changes nothing, and warns:
    the devices are those. A program of several processes calls
    `jax.distributed.initialize` before it; `n` then counts each process's devices.

    Args:
        n: The number of CPU devices of this process.

    Returns:
        The devices of JAX's default backend, those of other processes included.

    Raises:
        MeshError: If `n` is not a positive integer, or JAX already runs with
            another number of CPU devices.

    Example:
        >>> len(virtual_devices(8))
        8
    """
    n = _checks.count("n", n, where="virtual_devices", error=MeshError)
    if n > _MOST:
        msg = f"virtual_devices: n must be at most {_MOST}, got {n}."
        raise MeshError(msg)
    _start(n)
    devices = jax.local_devices()
    platform = devices[0].platform
    if platform != "cpu":
        warnings.warn(
            f"virtual_devices({n}) changes nothing here: JAX runs on "
            f"{_count(len(devices), platform.upper())}, and a mesh is made of "
            "those. To try virtual CPU devices on this machine, set JAX_PLATFORMS=cpu "
            "before Python starts.",
            stacklevel=2,
        )
    elif len(devices) != n:
        msg = (
            f"virtual_devices({n}) comes too late: JAX already runs with "
            f"{_count(len(devices), 'CPU')}, and the number cannot change any more. "
            "Restart the kernel or process and call it before anything else of JAX, or "
            "make a mesh over what is here: create_mesh()."
        )
        raise MeshError(msg)
    return jax.devices()


def _start(n: int) -> None:
    """Starts JAX's backends, if they have not started, with `n` CPU devices."""
    try:
        jax.config.update("jax_num_cpu_devices", n)
    except RuntimeError:  # "... should be updated before backends are initialized"
        return
    # XLA's CPU client runs collectives in a pool of NPROC threads, and splits matrix
    # products into as many pieces. With fewer threads than waiting devices, queued
    # steps dead-lock; on one device there is nothing to wait for, and more threads than
    # cores make small products twice as slow. A value set by the user is left alone.
    if n == 1 or os.environ.get("NPROC"):
        return
    os.environ["NPROC"] = str(2 * n)
    if jax.default_backend() != "cpu":
        del os.environ["NPROC"]


def _count(number: int, kind: str) -> str:
    return f"{number} {kind} device{'s' * (number != 1)}"
