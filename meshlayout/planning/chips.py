"""What accelerators do at most, and slices of them that are only described.

All constants of the estimates are in one table, from the makers' pages. A device is
what JAX counts as one: on v4, half a chip.
"""

import importlib.util
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies  # noqa: TID251

from meshlayout import _jax
from meshlayout.errors import MeshError, did_you_mean
from meshlayout.mesh import Mesh, as_mesh, create_mesh


@dataclass(frozen=True)
class Chip:
    """What one device does at most.

    Attributes:
        name: Such as `"TPU v5e"`.
        flops_per_s: Of matrix products in bfloat16.
        memory_bytes: That a program may take, by the compiler.
        memory_bytes_per_s: Read and written.
        ring_bytes_per_s: That a device sends in a ring, in both directions together.
        clock_hz: Of the cycles that the compiler estimates; None where it gives none.
        source: Where the figures are from.
    """

    name: str
    flops_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    ring_bytes_per_s: float
    clock_hz: float | None
    source: str


_GIB = 2**30
_TPU = "https://cloud.google.com/tpu/docs/"


def _tpu(
    generation: str,
    flops: float,
    memory: float,
    memory_rate: float,
    port_rate: float,
    macs: int,
    cores: int = 1,
) -> Chip:
    # The clock at which the matrix units do the peak. Compiled, a product of two 4096 x
    # 4096 matrices takes 1.03 (v5e), 1.04 (v5p), 1.12 (v4) and 1.15 (v6e) times the
    # ideal. Memory is what libtpu says is available.
    clock = flops / (2 * macs)
    rates = (memory_rate / cores, 2 * port_rate / cores)
    source = f"{_TPU}{generation}"
    name = f"TPU {generation}"
    return Chip(name, flops / cores, memory * _GIB, *rates, clock, source)


# Of a port, the page's rate of a chip over its ports and both directions: there are 4
# ports on v5e and v6e, and 6 on v4 and v5p.
CHIPS = {
    "v4": _tpu("v4", 275e12, 15.25, 1.228e12, 50e9, 8 * 128**2, cores=2),
    "v5e": _tpu("v5e", 197e12, 15.75, 0.819e12, 50e9, 4 * 128**2),
    "v5p": _tpu("v5p", 459e12, 95.74, 2.765e12, 100e9, 8 * 128**2),
    "v6e": _tpu("v6e", 918e12, 31.25, 1.640e12, 100e9, 4 * 256**2),
    "a100": Chip(
        *("NVIDIA A100", 312e12, 80e9, 2.039e12, 300e9, None),
        "https://www.nvidia.com/en-us/data-center/a100",
    ),
    "h100": Chip(
        *("NVIDIA H100", 989e12, 80e9, 3.35e12, 450e9, None),
        "https://www.nvidia.com/en-us/data-center/h100",
    ),
    "h200": Chip(
        *("NVIDIA H200", 989e12, 141e9, 4.8e12, 450e9, None),
        "https://www.nvidia.com/en-us/data-center/h200",
    ),
    # Nominal: it ranks layouts; it predicts no time.
    "cpu": Chip("CPU", 5e10, math.inf, 1e10, 5e9, None, "an assumption"),
}
_KINDS = {"v5 lite": "v5e", "v5e": "v5e", "v6": "v6e", "v5": "v5p", "v4": "v4"}

_GRIDS_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_GRIDS_3D = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x12", "8x8x16", "8x16x16", "16x16x16"),
)
_GRIDS = {
    "v4": _GRIDS_3D[:-1],
    "v5e": _GRIDS_2D,
    "v5p": (*_GRIDS_3D, "16x16x24"),
    "v6e": _GRIDS_2D,
}

# An H100 as the compiler asks for one that is not there: NVIDIA's data sheet and the
# device query of CUDA. tests/test_gpu_programs.py compiles for it.
_H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 8 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  memory_bandwidth: 3352320000000 device_memory_size: 84978434048
  l2_cache_size: 52428800
  shared_memory_per_core: 233472 shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  threads_per_warp: 32 threads_per_core_limit: 2048 threads_per_block_limit: 1024
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}
"""

# Without a TPU's own environment, libtpu asks a metadata server, and one process locks
# out the others, as the workers of `plan`.
_VARIABLES = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}


def describe_devices(topology: str) -> list[_jax.Device]:
    """Returns devices that are not here, to make a mesh of and to compile for.

    They hold no arrays: lower and compile steps for them with abstract arrays. A TPU
    slice needs libtpu, GPUs need JAX's plugin for CUDA; neither needs the hardware.

    Args:
        topology: A TPU slice, as `"v5e:4x4"`, or a number of GPUs, as `"h100:8"`.

    Raises:
        MeshError: If there is no such topology, or its compiler is not installed.

    Example:
        >>> devices = describe_devices("v5e:2x4")  # doctest: +SKIP
        >>> ml.create_mesh({"batch": 2, "model": 4}, devices=devices)  # doctest: +SKIP
        Mesh(batch=2, model=4; batch across 2 processes)
    """
    kind, sizes = parse_topology(topology)
    if kind == "h100":
        return _described_gpus(topology, *sizes)
    if jax.default_backend() != "tpu":
        for name, value in _VARIABLES.items():
            os.environ.setdefault(name, value)
    one = {"chips_per_host_bounds": (1, 1, 1)} if math.prod(sizes) == 1 else {}
    try:
        return topologies.get_topology_desc(topology, "tpu", **one).devices
    except (RuntimeError, ImportError) as error:
        if importlib.util.find_spec("libtpu"):
            fact = str(error).splitlines()[0]
            raise MeshError(f"libtpu cannot describe {topology!r}: {fact}") from error
        # The same version, so that pip keeps the installed jax.
        install = f"pip install 'jax[tpu]=={jax.__version__}'"
        msg = f"to compile for {topology!r}, the TPU compiler is needed: {install}."
        raise MeshError(msg) from error


def _described_gpus(topology: str, count: int) -> list[_jax.Device]:
    shape = f"1x{max(1, count // 8)}x{min(count, 8)}"
    options = {"topology": shape, "target_config": _H100}
    try:
        return topologies.get_topology_desc("h100", "cuda", **options).devices
    except (RuntimeError, ImportError, NotImplementedError) as error:
        install = f"pip install 'jax[cuda12]=={jax.__version__}'"
        msg = f"to compile for {topology!r}, JAX's CUDA plugin is needed: {install}."
        raise MeshError(msg) from error


def parse_topology(topology: str) -> tuple[str, tuple[int, ...]]:
    """Returns the kind of chip and the grid of a topology, or raises MeshError."""
    text = topology.strip().lower() if isinstance(topology, str) else ""
    kind, _, grid = text.partition(":")
    if kind == "h100":
        count = int(grid) if grid.isdecimal() else 0
        if count in (1, 2, 4) or (count and count % 8 == 0):
            return kind, (count,)
        msg = f"there is no topology {topology!r}: give h100:1, 2, 4, 8 or a multiple."
        raise MeshError(msg)
    if grid in _GRIDS.get(kind, ()):
        return kind, tuple(map(int, grid.split("x")))
    names = [f"{name}:{grid}" for name, grids in _GRIDS.items() for grid in grids]
    some = [name for name in names if name.startswith(f"{kind}:")] or names
    hint = did_you_mean(text, names)
    msg = f"there is no topology {topology!r}.{hint} There are {', '.join(some)}"
    raise MeshError(f"{msg}{'' if len(some) < len(names) else ', and h100:8'}.")


def larger_topology(topology: str) -> str:
    """Returns the next larger slice of the same chips, or an empty string."""
    kind, _, grid = topology.partition(":")
    grids = _GRIDS.get(kind, ())
    rest = grids[grids.index(grid) + 1 :] if grid in grids else ()
    return f"{kind}:{rest[0]}" if rest else ""


def chip_of(device: _jax.Device) -> Chip:
    """Returns the figures of a device, described or here.

    Raises:
        MeshError: If they are not known.
    """
    kind = str(getattr(device, "device_kind", "")).lower()
    if device.platform == "cpu":
        return CHIPS["cpu"]
    for name, chip in CHIPS.items():
        if device.platform != "tpu" and name in kind:
            return chip
    for part, name in _KINDS.items():
        if device.platform == "tpu" and part in kind:
            return CHIPS[name]
    known = ", ".join(chip.name for chip in CHIPS.values())
    msg = f"the figures of {device.device_kind!r} are not known, only of {known}."
    raise MeshError(msg)


def grid_of(topology: "str | Mesh | jax.sharding.Mesh") -> tuple[int, ...]:
    """Returns the physical grid of a topology; of devices that are here, their number.

    Hosts of GPUs come first: (hosts, GPUs of each).
    """
    if isinstance(topology, str):
        kind, sizes = parse_topology(topology)
        if kind == "h100":
            return (max(1, sizes[0] // 8), min(sizes[0], 8))
        return sizes
    devices = as_mesh(topology).devices.flat
    coords: list[Any] = [getattr(device, "coords", None) for device in devices]
    if any(place is None for place in coords):
        return (len(coords),)
    grid = tuple(len({place[dim] for place in coords}) for dim in range(len(coords[0])))
    return grid if math.prod(grid) == len(coords) else (len(coords),)


def mesh_for(target: "str | Mesh | jax.sharding.Mesh", axes: Mapping[str, int]) -> Mesh:
    """Returns a mesh with these axes: one that is given, or over a topology's devices.

    If the sizes do not make a topology's devices, the first axis takes what is left.
    """
    if not isinstance(target, str):
        return as_mesh(target)
    devices = describe_devices(target)
    first, *rest = axes or {"batch": -1}
    if math.prod(axes.values()) == len(devices):
        return create_mesh(axes, devices=devices)
    sizes = {first: -1, **{name: axes[name] for name in rest}}
    return create_mesh(sizes, devices=devices)


_MEMORY = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available \w+ \(([\d.]+)([KMGT]?)")
_USED = re.compile(r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT])")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def memory_refusal(error: BaseException) -> tuple[float, float] | None:
    """Returns the bytes that a program needs and has, if it was refused for these."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return None
    match = _USED.search(text) or _MEMORY.search(text)
    if match is None:
        return math.nan, math.nan
    needed, unit, available, other = match.groups()
    return float(needed) * _UNITS[unit], float(available) * _UNITS[other]
