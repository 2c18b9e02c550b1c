"""Peak figures of accelerators, and slices that are only described.

All constants of the estimates are in `CHIPS`, from the makers' pages. A device is what
JAX counts as one: on v4, half a chip.
"""

import functools
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
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
    scratch_bytes: float = 0.0  # of memory on the chip, where compilers put what fits
    host_bytes_per_s: float = 16e9  # to and from the host: PCIe 3.0 x16, an assumption


def _tpu(name: str, flops: float, memory: float, *rates: float, macs: int) -> Chip:
    # The clock is the one at which the matrix units reach the peak. Memory is what
    # libtpu says is available; of that on the chip it uses 125 MB (v5e).
    source, cores = f"https://cloud.google.com/tpu/docs/{name}", 1 + (name == "v4")
    rate, port = (x / cores for x in rates)
    facts = flops / cores, memory * 2**30, rate, 2 * port, flops / (2 * macs), source
    return Chip(f"TPU {name}", *facts, scratch_bytes=1.25e8)


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
_KINDS = {"v5 lite": "v5e", "v5e": "v5e", "v6": "v6e", "v5": "v5p", "v4": "v4"}

_GRIDS_2D = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"
_GRIDS_3D = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x12 8x8x16 8x16x16"
_GRIDS: dict[str, tuple[str, ...]] = {
    "v4": (*_GRIDS_3D.split(),),
    "v5e": (*_GRIDS_2D.split(),),
    "v5p": (*_GRIDS_3D.split(), "16x16x16", "16x16x24"),
    "v6e": (*_GRIDS_2D.split(),),
}

# What the compiler asks of an H100 that is not there: NVIDIA's data sheet, and CUDA's
# device query. tests/test_gpu_programs.py compiles for it.
_H100 = """
platform_name: "CUDA" device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 8 } gpu_device_info {
  cuda_compute_capability { major: 9 } core_count: 132 fpus_per_core: 128
  clock_rate_ghz: 1.98 memory_bandwidth: 3352320000000 device_memory_size: 84978434048
  l2_cache_size: 52428800 shared_memory_per_core: 233472 shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 threads_per_warp: 32 threads_per_core_limit: 2048
  threads_per_block_limit: 1024 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
"""

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
    kind, sizes = parse_topology(topology)
    platform, name, extra = "tpu", topology.strip().lower(), "tpu"
    options: dict[str, Any] = {}
    if kind == "h100":
        platform, name, extra = "cuda", kind, "cuda12"
        options = {"topology": "1x{}x{}".format(*sizes), "target_config": _H100}
    elif jax.default_backend() != "tpu":
        for variable in _VARIABLES.split():
            os.environ.setdefault(*variable.split("=", 1))
    if math.prod(sizes) == 1 and platform == "tpu":
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        return _jax.described_devices(platform, name, **options)
    except (RuntimeError, ImportError) as error:
        # The same version, so that pip keeps the installed jax.
        install = f"pip install 'jax[{extra}]=={jax.__version__}'"
        fact = f"there is no compiler for {topology!r}: {str(error).splitlines()[0]}"
        raise MeshError(
            f"{fact.rstrip('.')}. If it is not installed, {install}."
        ) from error


def parse_topology(topology: str) -> tuple[str, tuple[int, ...]]:
    """Returns the kind of chip and the grid; of GPUs, hosts and the GPUs of each."""
    text = topology.strip().lower() if isinstance(topology, str) else ""
    kind, _, grid = text.partition(":")
    count = int(grid) if kind == "h100" and grid.isdecimal() else 0
    if count in (1, 2, 4) or (count and count % 8 == 0):
        return kind, (max(1, count // 8), min(count, 8))
    if grid in _GRIDS.get(kind, ()):
        return kind, tuple(map(int, grid.split("x")))
    names = [f"{name}:{grid}" for name, grids in _GRIDS.items() for grid in grids]
    names += [f"h100:{count}" for count in (1, 2, 4, 8)]
    some = [name for name in names if name.startswith(f"{kind}:")] or names
    hint = did_you_mean(text, names)
    msg = f"there is no topology {topology!r}.{hint} There are {', '.join(some)}."
    raise MeshError(msg)


@dataclass(frozen=True)
class Slice:
    """Devices to plan for, described or here, and the grid that they are in."""

    name: str
    devices: tuple[_jax.Device, ...]
    grid: tuple[int, ...]
    topology: str = ""  # to compile for; empty if the devices are here

    @classmethod
    def of(cls, target: str | Mesh | jax.sharding.Mesh) -> "Slice":
        """Returns a slice of a topology, or the devices of a mesh."""
        if isinstance(target, str):
            _, grid = parse_topology(target)
            return cls(target, tuple(describe_devices(target)), grid, target)
        devices = tuple(as_mesh(target).devices.flat)
        name = f"{len(devices)} {devices[0].platform.upper()} devices"
        return cls(name, devices, (len(devices),))

    @property
    def chip(self) -> Chip:
        """The figures of each device; MeshError if they are not known."""
        platform, kind = self.devices[0].platform, self.devices[0].device_kind.lower()
        names = _KINDS if platform == "tpu" else {name: name for name in CHIPS}
        text = "cpu" if platform == "cpu" else kind
        if name := next((name for part, name in names.items() if part in text), None):
            return CHIPS[name]
        known = ", ".join(chip.name for chip in CHIPS.values())
        raise MeshError(f"the figures of {kind!r} are not known, only of {known}.")

    def larger(self) -> "Iterator[Slice]":
        """Yields larger and larger slices of the same chips, if they are described."""
        kind, _, grid = self.topology.partition(":")
        grids = _GRIDS.get(kind, ())
        for other in grids[grids.index(grid) + 1 :] if grid in grids else ():
            yield Slice.of(f"{kind}:{other}")


def memory_refusal(error: BaseException) -> tuple[float, float] | None:
    """Returns the bytes that a program needs and has, if it was refused for these."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        return None
    size = r"([\d.]+)([KMGT]?)"
    pattern = rf"{size}(?: of |\) exceeds available \w+ \(){size}"
    match = re.search(pattern, str(error))
    needed, unit, available, other = match.groups() if match else ("nan", "", "nan", "")
    first, second = (2 ** (10 * " KMGT".find(x or " ")) for x in (unit, other))
    return float(needed) * first, float(available) * second
