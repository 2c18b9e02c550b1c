"""Virtual devices: several CPU devices on a laptop or in a notebook."""

import logging
import os
import warnings

import jax

from meshlayout import _checks, _jax
from meshlayout.errors import MeshError


_log = logging.getLogger(__name__)


@_checks.user_call
def virtual_devices(n: int) -> list[_jax.Device]:
    """Gives a machine without accelerators `n` CPU devices, to try meshes.

    Call it before anything accesses JAX's devices, but after `ml.initialize`. On a
    machine with TPUs or GPUs it changes nothing and warns. The option
    `--devices-per-process` of `python -m meshlayout.launch` overrides `n`.

    Args:
        n: The number of CPU devices of this process.

    Returns:
        The devices of JAX's default backend, including those of other processes.

    Raises:
        MeshError: If `n` is not a positive integer, or JAX runs with other CPU devices.

    Examples:
        >>> len(virtual_devices(8))
        8
    """
    n = _checks.count("n", n, where="virtual_devices", error=MeshError)
    _jax.check_joined("virtual_devices")
    launched = _jax.launcher_devices()
    if launched not in (None, n):
        _log.info("virtual_devices(%d): --devices-per-process=%d counts.", n, launched)
        n = launched
    _start(n)
    devices = jax.local_devices()
    platform = devices[0].platform
    existing = f"{len(devices)} {platform.upper()} device{'s' * (len(devices) != 1)}"
    if platform != "cpu":
        warnings.warn(
            f"virtual_devices({n}) has no effect here: JAX runs on {existing}. To try "
            "virtual CPU devices, set JAX_PLATFORMS=cpu before Python starts.",
            stacklevel=2,
        )
    elif len(devices) != n:
        fact = f"virtual_devices({n}) comes too late: JAX already runs with {existing}."
        fix = "Restart the kernel or process and call it before any other use of JAX"
        mesh = "make a mesh of the devices that exist: create_mesh()"
        raise MeshError(f"{fact} {fix}, or {mesh}.")
    return jax.devices()


def _start(n: int) -> None:
    """Starts JAX's backends, if they have not started, with `n` CPU devices."""
    try:
        jax.config.update("jax_num_cpu_devices", n)
    except RuntimeError:  # "... should be updated before backends are initialized"
        return
    # XLA's CPU client runs collectives, and pieces of matrix products, in NPROC
    # threads. With fewer threads than waiting devices, queued steps deadlock. On one
    # device, more threads than cores make small products twice as slow.
    if n == 1 or os.environ.get("NPROC"):
        return
    os.environ["NPROC"] = str(2 * n)
    # Asking for the backend starts it; XLA reads NPROC once, then.
    if jax.default_backend() != "cpu":
        del os.environ["NPROC"]
