"""Peak figures of accelerators, and slices that are only described.

All constants of the estimates are in `CHIPS`, from the makers' pages. A device is what
JAX counts as one: on v4, half a chip.
"""

import functools
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from meshlayout import _jax
from meshlayout.errors import MeshError, did_you_mean
from meshlayout.mesh import Mesh, as_mesh


@dataclass(frozen=True)
class Chip:
    """The peak figures of one device."""

    name: str
    flops_per_s: float  # of matrix products in bfloat16
    memory_bytes: float  # that a program may take, by the compiler
    memory_bytes_per_s: float  # read and written
    ring_bytes_per_s: float  # sent in a ring, in both directions together
    clock_hz: float | None  # of the cycles that its compiler estimates, if it does
    source: str  # of the figures
    host_bytes_per_s: float = 16e9  # to and from the host: PCIe 3.0 x16, an assumption


def _tpu(name: str, flops: float, memory: float, *rates: float, macs: int) -> Chip:
    # The clock is the one at which the matrix units reach the peak. Memory is what
    # libtpu says is available.
    source, cores = f"https://cloud.google.com/tpu/docs/{name}", 1 + (name == "v4")
    rate, port = (x / cores for x in rates)
    facts = flops / cores, memory * 2**30, rate, 2 * port, flops / (2 * macs), source
    return Chip(f"TPU {name}", *facts)


_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
# Ports of TPUs: the page's rate of a chip over its ports and both directions; there are
# 4 ports on v5e and v6e, and 6 on v4 and v5p.
CHIPS = {
    "v4": _tpu("v4", 275e12, 15.25, 1.228e12, 50e9, macs=8 * 128**2),
    "v5e": _tpu("v5e", 197e12, 15.75, 0.819e12, 50e9, macs=4 * 128**2),
    "v5p": _tpu("v5p", 459e12, 95.74, 2.765e12, 100e9, macs=8 * 128**2),
    "v6e": _tpu("v6e", 918e12, 31.25, 1.640e12, 100e9, macs=4 * 256**2),
    "a100": Chip("A100", 312e12, 80e9, 2.039e12, 300e9, None, f"{_NVIDIA}a100"),
    "h100": Chip("H100", 989e12, 80e9, 3.35e12, 450e9, None, f"{_NVIDIA}h100"),
    "h200": Chip("H200", 989e12, 141e9, 4.8e12, 450e9, None, f"{_NVIDIA}h200"),
    # Nominal: it ranks layouts; it predicts no time.
    "cpu": Chip("CPU", 5e10, math.inf, 1e10, 5e9, None, "an assumption"),
}
# Parts of what JAX calls the kinds of devices; the first that is there.
_KINDS = {"v5 lite": "v5e", **{x: x for x in CHIPS}, "v6": "v6e", "v5": "v5p"}

_FLAT = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"
_CUBIC = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x12 8x8x16 8x16x16"
_GRIDS = {"v4": _CUBIC, "v5e": _FLAT, "v5p": f"{_CUBIC} 16x16x16 16x16x24"}
_GRIDS |= {"v6e": _FLAT, "h100": "1 2 4 8 16 32 64 128 256"}
TOPOLOGIES = [f"{kind}:{x}" for kind, grids in _GRIDS.items() for x in grids.split()]

# Without a TPU's own environment, libtpu asks a metadata server, and one process locks
# out the others, as the workers of `plan`.
_VARIABLES = """
    TPU_SKIP_MDS_QUERY=1 TPU_ACCELERATOR_TYPE=v5litepod-8 TPU_WORKER_HOSTNAMES=localhost
    TPU_WORKER_ID=0 ALLOW_MULTIPLE_LIBTPU_LOAD=1 TPU_LOG_DIR=disabled
    TPU_MIN_LOG_LEVEL=3 TPU_STDERR_LOG_LEVEL=3
"""


@functools.cache  # so that meshes of one topology are equal
def describe_devices(topology: str) -> list[_jax.Device]:
    """Returns described devices, to make a mesh of and to compile for.

    They hold no arrays: lower and compile steps for them with abstract arrays. A TPU
    slice needs libtpu, GPUs need JAX's plugin for CUDA; neither needs the hardware.

    Args:
        topology: A TPU slice, such as `"v5e:4x4"`, or GPUs, such as `"h100:8"`.

    Raises:
        MeshError: If there is no such topology, or its compiler is not installed.

    Examples:
        >>> devices = describe_devices("v5e:2x4")  # doctest: +SKIP
        >>> ml.create_mesh({"batch": 2, "model": 4}, devices=devices)  # doctest: +SKIP
        Mesh(batch=2, model=4; batch across 2 processes)
    """
    sizes, options = _grid(topology), dict[str, Any]()
    place = "tpu", topology
    if len(sizes) == 1:  # GPUs, eight on each host
        place, count = ("cuda", "h100"), sizes[0]
        options["topology"] = f"1x{max(1, count // 8)}x{min(count, 8)}"
        path = Path(__file__).with_name("h100.textproto")
        options["target_config"] = path.read_text()
    elif jax.default_backend() != "tpu":
        for variable in _VARIABLES.split():
            os.environ.setdefault(*variable.split("=", 1))
    if sizes == (1, 1):
        options["chips_per_host_bounds"] = 1, 1, 1
    try:
        return _jax.described_devices(*place, **options)
    except (RuntimeError, ImportError) as error:
        # The same version, so that pip keeps the installed jax.
        extra = place[0].replace("cuda", "cuda12")
        install = f"pip install 'jax[{extra}]=={jax.__version__}'"
        fact = f"there is no compiler for {topology!r}: {str(error).splitlines()[0]}"
        fact = f"{fact.rstrip('.')}. If it is not installed, {install}."
        raise MeshError(fact) from error


def _grid(topology: str) -> tuple[int, ...]:
    """Returns the sides of a topology; MeshError if there is no such one."""
    if topology not in TOPOLOGIES:
        kind, hint = f"{topology}:".split(":")[0], did_you_mean(topology, TOPOLOGIES)
        some = [x for x in TOPOLOGIES if x.startswith(f"{kind}:")] or TOPOLOGIES
        msg = f"there is no topology {topology!r}.{hint} There are {', '.join(some)}."
        raise MeshError(msg)
    return tuple(map(int, topology.partition(":")[2].split("x")))


@dataclass(frozen=True)
class Slice:
    """Devices to plan for, described or here, and the grid that they are in."""

    name: str
    devices: tuple[_jax.Device, ...]
    grid: tuple[int, ...]
    place: str  # of compilers: a topology, or the platform of devices that are here

    @classmethod
    def of(cls, target: str | Mesh | jax.sharding.Mesh) -> "Slice":
        """Returns a slice of a topology, or the devices of a mesh."""
        if isinstance(target, str):
            return cls(target, (*describe_devices(target),), _grid(target), target)
        devices = tuple(as_mesh(target).devices.flat)
        count, platform = len(devices), devices[0].platform
        return cls(f"{count} {platform.upper()} devices", devices, (count,), platform)

    @property
    def chip(self) -> Chip:
        """The figures of each device; MeshError if they are not known."""
        kind = self.devices[0].device_kind.lower()
        for part, name in _KINDS.items():
            if part in kind:
                return CHIPS[name]
        raise MeshError(f"the figures of {kind!r} are not known, only of {[*CHIPS]}.")

    @property
    def larger(self) -> list[str]:
        """The larger topologies of the same chips, if these are described."""
        kind = [x for x in TOPOLOGIES if x.startswith(self.place.partition(":")[0])]
        return kind[kind.index(self.place) + 1 :] if self.place in kind else []


def memory_refusal(error: BaseException) -> tuple[float, float] | None:
    """Returns the bytes that a program needs and has, if it was refused for these."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        return None
    size = r"([\d.]+)([KMGT]?)"
    scale = {unit: 1024**power for power, unit in enumerate(["", *"KMGT"])}
    match = re.search(rf"{size}(?: of |\) exceeds available \w+ \(){size}", str(error))
    needed, unit, available, other = match.groups() if match else ("nan", "", "nan", "")
    return float(needed) * scale[unit], float(available) * scale[other]
