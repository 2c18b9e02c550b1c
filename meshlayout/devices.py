"""Virtual devices: several CPU devices on a laptop or in a notebook."""

import os
import warnings

import jax
import numpy as np

from meshlayout import _jax
from meshlayout.errors import MeshError


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
        MeshError: If `n` is not a positive whole number, or JAX already runs with
            another number of CPU devices.

    Example:
        >>> len(virtual_devices(8))
        8
    """
    if not isinstance(n, (int, np.integer)) or isinstance(n, bool) or n < 1:
        msg = f"virtual_devices takes a number of devices, 1 or more, and got {n!r}."
        raise MeshError(msg)
    if not _jax.backends_started():
        _start(int(n))
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
    """Starts JAX's backends, with `n` CPU devices if there is nothing better."""
    nproc = os.environ.get("NPROC", "")
    jax.config.update("jax_num_cpu_devices", n)
    # XLA sizes the pool that runs CPU collectives by NPROC; with fewer threads than
    # waiting devices, queued steps dead-lock.
    os.environ["NPROC"] = str(max(32, 4 * n, int(nproc) if nproc.isdecimal() else 0))
    if jax.default_backend() != "cpu":
        os.environ["NPROC"] = nproc
        if not nproc:
            del os.environ["NPROC"]


def _count(number: int, kind: str) -> str:
    return f"{number} {kind} device{'s' * (number != 1)}"
