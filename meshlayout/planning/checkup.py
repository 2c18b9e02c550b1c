"""`doctor`: what this machine has, and what is set wrong, with the sentence to mend it.

What is seen and what follows from it are apart: `wrong_of` and `advice_of` are pure.
"""

import contextlib
import importlib.metadata
import os
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from meshlayout import _checks, _jax, _render
from meshlayout.cluster.environment import split_address
from meshlayout.errors import MeshLayoutError


_WHEELS = [f"jax-cuda{x}-{part}" for x in (12, 13) for part in ("plugin", "pjrt")]
# The distributions that each extra of this library needs.
_EXTRAS = {
    "data": ("grain", "cloudpickle"),
    "checkpoint": ("orbax-checkpoint",),
    "gcs": ("orbax-checkpoint", "gcsfs"),
    "safetensors": ("safetensors",),
    "tensorboard": ("tensorboardX",),
    "ray": ("ray", "cloudpickle"),
    "notebook": ("jupytext", "ipykernel"),
    "tpu": ("libtpu",),
    "cuda": ("jax-cuda12-plugin",),
}


@dataclass(frozen=True)
class Machine:
    """What is seen of this machine and this process."""

    versions: Mapping[str, str]  # of the distributions that are installed
    environment: Mapping[str, str] = field(repr=False)  # a proxy may have a password
    platform: str  # that JAX uses
    devices: Sequence[str]  # the kind of each local device
    failure: str = ""  # what JAX said instead of giving devices
    libtpu_pin: str = ""  # what jax requires, as "0.0.42"
    memory_bytes: int = 0  # of the first device, or of the machine for CPUs
    num_processes: int = 1
    hardware: Sequence[str] = ()  # that the system shows: "tpu", "gpu"
    asked_devices: int = 0  # virtual CPU devices, by JAX's settings
    cache: str | None = None  # the directory of JAX's compilation cache
    data_directory: str = ""  # of TensorFlow Datasets
    cores: int = 1


@dataclass(frozen=True, repr=False)
class Checkup:
    """The result of `doctor`, a table if printed."""

    machine: Machine
    wrong: tuple[str, ...]  # for this, programs fail, hang or run elsewhere
    advice: tuple[str, ...]

    @property
    def mesh(self) -> str:
        """The call that makes a mesh of all devices."""
        count = len(self.machine.devices) * self.machine.num_processes
        return f'ml.create_mesh({{"batch": {count}}})' if count else ""

    def to_dict(self) -> dict[str, Any]:
        """Returns values that JSON can hold, without the environment variables."""
        facts = {x: v for x, v in vars(self.machine).items() if x != "environment"}
        return {**facts, "wrong": self.wrong, "advice": self.advice, "mesh": self.mesh}

    def __repr__(self) -> str:
        machine, kinds = self.machine, Counter(self.machine.devices)
        devices = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        devices = f"{devices} ({machine.platform})" if kinds else "none"
        size = _render.bytes_text(machine.memory_bytes)
        rows = [*machine.versions.items(), ("devices", devices), ("memory", size)]
        rows += [("processes", machine.num_processes), ("mesh", self.mesh)]
        wrong = [f"wrong: {x}" for x in self.wrong] or ["Nothing is wrong."]
        notes = [*wrong, *(f"advice: {x}" for x in self.advice)]
        return _render.text_table(["", "here"], rows, notes=notes)


@_checks.user_call
def doctor(*, needs: str | Sequence[str] = ()) -> Checkup:
    """Looks at this machine, and says what is set wrong and how to mend it.

    It starts JAX's devices. Use this when a program is slow, hangs or does not see its
    devices; `python -m meshlayout doctor` does the same.

    Args:
        needs: The extras of this library that must be installed, as `["data"]`.

    Raises:
        MeshLayoutError: If there is no such extra.

    Example:
        >>> import meshlayout as ml
        >>> ml.doctor().mesh
        'ml.create_mesh({"batch": 8})'
    """
    needs = [needs] if isinstance(needs, str) else needs
    for extra in needs:
        _checks.choice("needs", extra, _EXTRAS, where="doctor", error=MeshLayoutError)
    machine = _machine_here()
    return Checkup(machine, (*wrong_of(machine, needs),), (*advice_of(machine),))


def wrong_of(machine: Machine, needs: Sequence[str] = ()) -> Iterator[str]:
    """Yields what is wrong with a machine, and how to mend it."""
    versions, environment = machine.versions, machine.environment
    current, setting = versions.get("jax", ""), environment.get("JAX_PLATFORMS", "")
    for name in ("jaxlib", *_WHEELS):
        numbers, other = _numbers(current), versions.get(name, current)
        if _numbers(other)[:2] != numbers[:2] or _numbers(other) > numbers:
            package = f"jax[{name.split('-')[1]}]" if "-" in name else name
            fix = f"pip install '{package}=={current}'"
            yield f"jax {current} and {name} {other} do not fit: {fix}."
    libtpu, pin = versions.get("libtpu", ""), _numbers(machine.libtpu_pin)
    if libtpu and pin != _numbers(libtpu)[: len(pin)]:
        fact = f"jax {current} is made for libtpu {machine.libtpu_pin}, not {libtpu}"
        yield f"{fact}: pip install 'jax[tpu]=={current}'."
    if machine.failure:
        fix = "Restart the process, and look at what JAX logs"
        if setting:
            fix = f"JAX_PLATFORMS={setting} asks for them: unset it, or install them"
        yield f"JAX starts no devices ({machine.failure.rstrip('.')}). {fix}."
    if machine.platform == "cpu":
        yield from _of_cpu_devices(machine, setting, current)
    address = split_address(environment.get("JAX_COORDINATOR_ADDRESS"))
    names = sorted(x for x in environment if x.lower().endswith("_proxy"))
    proxy = next(
        (x for x in names if not re.match("(?i)no_", x) and environment[x]), ""
    )
    direct = ",".join(environment[x] for x in names if re.match("(?i)no_", x))
    if address and proxy and address[0] not in re.split(r"[\s,]+", direct):
        text = f"{proxy} is a proxy before the coordinator: add {address[0]} to "
        yield f"{text}no_proxy, or start with ml.initialize(), which does."
    for extra in needs:
        for name in (x for x in _EXTRAS[extra] if x not in versions):
            yield f"{name} is not installed: pip install 'meshlayout[{extra}]'."


def _of_cpu_devices(machine: Machine, setting: str, version: str) -> Iterator[str]:
    environment = machine.environment
    hidden = environment.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    for kind in machine.hardware:
        extra, plugins = ("tpu", ["libtpu"]) if kind == "tpu" else ("cuda12", _WHEELS)
        fix = "another process may hold it: end that, or look at what JAX logs"
        if setting:
            fix = f"JAX_PLATFORMS={setting} asks for it: unset that variable"
        elif kind == "gpu" and hidden:
            fix = "CUDA_VISIBLE_DEVICES hides it: unset that variable"
        elif machine.versions.keys().isdisjoint(plugins):
            fix = f"it has no plugin: pip install 'jax[{extra}]=={version}'"
        yield f"this machine has a {kind.upper()}, but JAX uses the CPU; {fix}."
    count, asked = len(machine.devices), machine.asked_devices
    if asked not in (0, count):
        text = f"{asked} virtual CPU devices were asked for too late: JAX runs with "
        call = f"ml.virtual_devices({asked}) before any other use of JAX"
        yield f"{text}{count}. Restart the process, and call {call}."
    threads = environment.get("NPROC", "") or str(machine.cores)
    is_old = _numbers(version)[:2] < [0, 12]  # jaxlib 0.12 has no such deadlock
    if count > 1 and is_old and threads.isdecimal() and int(threads) < 2 * count:
        text = f"{count} CPU devices share {threads} threads, and can deadlock: set "
        yield f"{text}NPROC={2 * count} before JAX starts, or call ml.virtual_devices."


def advice_of(machine: Machine) -> Iterator[str]:
    """Yields what could be better on a machine."""
    threads, cores = machine.environment.get("NPROC", ""), machine.cores
    if len(machine.devices) == 1 and threads.isdecimal() and int(threads) > cores:
        yield f"NPROC={threads} on {cores} cores makes small products slow: unset it."
    if not machine.cache:
        yield "JAX's compilation cache is off: set JAX_COMPILATION_CACHE_DIR."
    if not machine.data_directory:
        yield "there is no directory of TensorFlow Datasets: set TFDS_DATA_DIR."


def _numbers(version: str) -> list[int]:
    return [int(x) for x in re.findall(r"\d+", version)]


def _machine_here() -> Machine:
    devices, failure = [], ""
    try:
        devices = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that one has started
        failure = next(iter(str(error).splitlines()), "no platform that was asked for")
    versions = {"Python": platform.python_version()}
    extras = {name for names in _EXTRAS.values() for name in names}
    names = ("meshlayout", "jax", "jaxlib", "flax", "optax", *_WHEELS, *sorted(extras))
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    required = "\n".join(importlib.metadata.requires("jax") or [])
    pins = re.findall(r"^libtpu *\(?==([\d.]+\d)", required, re.MULTILINE)
    flags = re.findall(r"device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    config: Any = jax.config
    folder = os.environ.get("TFDS_DATA_DIR") or Path.home() / "tensorflow_datasets"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if devices and devices[0].platform != "cpu":
        memory = int((devices[0].memory_stats() or {}).get("bytes_limit", 0))
    return Machine(
        *(versions, dict(os.environ), devices[0].platform if devices else ""),
        devices=[device.device_kind for device in devices],
        failure=failure,
        libtpu_pin="".join(pins[:1]),
        memory_bytes=memory,
        num_processes=1 if failure else _jax.process_count(),
        hardware=_jax.visible_accelerators(),
        asked_devices=max(config.jax_num_cpu_devices, *map(int, ["0", *flags])),
        cache=config.jax_enable_compilation_cache and config.jax_compilation_cache_dir,
        data_directory=str(folder) if Path(folder).is_dir() else "",
        cores=os.cpu_count() or 1,
    )
