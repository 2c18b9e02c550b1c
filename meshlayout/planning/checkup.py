"""`doctor`: what this machine has, and what is set wrong, with the sentence to mend it.

What is seen and what follows from it are apart: `wrong_of` and `advice_of` are pure.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax

from meshlayout import _checks, _jax, _render
from meshlayout.cluster.environment import split_address
from meshlayout.errors import MeshLayoutError


# What each extra of this library installs, by the name that Python imports.
_EXTRAS = {
    "data": ("grain", "cloudpickle"),
    "checkpoint": ("orbax.checkpoint",),
    "gcs": ("orbax.checkpoint", "gcsfs"),
    "safetensors": ("safetensors",),
    "tensorboard": ("tensorboardX",),
    "ray": ("ray", "cloudpickle"),
    "notebook": ("jupytext", "ipykernel"),
    "tpu": ("libtpu",),
    "cuda": ("jax_plugins.xla_cuda12",),
}
_PLUGINS = {"tpu": _EXTRAS["tpu"], "gpu": (*_EXTRAS["cuda"], "jax_plugins.xla_cuda13")}
_WHEELS = [f"jax-cuda{x}-{part}" for x in (12, 13) for part in ("plugin", "pjrt")]
_PACKAGES = ("meshlayout", "jax", "jaxlib", "libtpu", "flax", "optax", *_WHEELS)


@dataclass(frozen=True)
class Machine:
    """What is seen of this machine and this process."""

    versions: Mapping[str, str]  # of the packages that are installed
    environment: Mapping[str, str] = field(repr=False)
    platform: str  # that JAX uses
    devices: Sequence[str]  # the kind of each local device
    failure: str = ""  # what JAX said instead of giving devices
    libtpu_pin: str = ""  # what jax requires, as "0.0.42"
    memory_bytes: int = 0  # of the first device, or of the machine for CPUs
    num_processes: int = 1
    hardware: Sequence[str] = ()  # that the system shows: "tpu", "gpu"
    asked_devices: int = 0  # virtual CPU devices, by JAX's settings
    cache: str | None = None  # the directory of JAX's compilation cache
    importable: Sequence[str] = ()  # modules of extras
    data_directory: str = ""  # of TensorFlow Datasets
    cores: int = 1


@dataclass(frozen=True, repr=False)
class Checkup:
    """The result of `doctor`: text if printed, a table in notebooks."""

    machine: Machine
    wrong: tuple[str, ...]  # for this, programs fail, hang or run elsewhere
    advice: tuple[str, ...]

    @property
    def mesh(self) -> str:
        """The call that makes a mesh of all devices."""
        machine, hosts = self.machine, self.machine.num_processes
        sizes = f'{{"batch": {len(machine.devices) * hosts}}}'
        if machine.platform == "gpu" and hosts > 1:
            sizes = f'{{"replica": {hosts}, "fsdp": -1}}, dcn="replica"'
        return f"ml.create_mesh({sizes})" if machine.devices else ""

    def to_dict(self) -> dict[str, Any]:
        """Returns values that JSON can hold, without the environment variables."""
        facts = asdict(self)
        del facts["machine"]["environment"]  # an address of a proxy may have a password
        return {**facts, "mesh": self.mesh}

    def __repr__(self) -> str:
        return _render.text_table(**self._table())

    def _repr_html_(self) -> str:
        return _render.html_table(**self._table())

    def _table(self) -> dict[str, Any]:
        machine, kinds = self.machine, Counter(self.machine.devices)
        devices = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        devices = f"{devices} ({machine.platform})" if kinds else "none"
        size = _render.bytes_text(machine.memory_bytes)
        rows = [*machine.versions.items(), ("devices", devices), ("memory", size)]
        rows += [("processes", str(machine.num_processes)), ("mesh", self.mesh)]
        wrong = [f"wrong: {x}" for x in self.wrong] or ["Nothing is wrong."]
        notes = [*wrong, *(f"advice: {x}" for x in self.advice)]
        return {"headers": ["", "here"], "rows": rows, "notes": notes}


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
    versions, current = machine.versions, machine.versions.get("jax", "")
    for name in ("jaxlib", *_WHEELS):
        other = versions.get(name, current)
        is_minor = _numbers(other)[:2] == _numbers(current)[:2]
        if not is_minor or _numbers(other) > _numbers(current):
            package = f"jax[{name.split('-')[1]}]" if "-" in name else name
            fix = f"pip install '{package}=={current}'"
            yield f"jax {current} and {name} {other} do not fit: {fix}."
    libtpu, pin = versions.get("libtpu", ""), _numbers(machine.libtpu_pin)
    if libtpu and pin != _numbers(libtpu)[: len(pin)]:
        fact = f"jax {current} is made for libtpu {machine.libtpu_pin}, not {libtpu}"
        yield f"{fact}: pip install 'jax[tpu]=={current}'."
    setting = machine.environment.get("JAX_PLATFORMS", "")
    if machine.failure:
        fix = "Restart the process, and look at what JAX logs"
        if setting:
            fix = f"JAX_PLATFORMS={setting} asks for them: unset it, or install them"
        yield f"JAX starts no devices ({machine.failure.rstrip('.')}). {fix}."
    if machine.platform == "cpu":
        yield from _of_cpu_devices(machine, setting, current)
    address = split_address(machine.environment.get("JAX_COORDINATOR_ADDRESS"))
    names = [name for name in machine.environment if name.lower().endswith("_proxy")]
    values = {name: machine.environment[name] for name in sorted(names, reverse=True)}
    direct = [
        values.pop(name, "") for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY")
    ]
    proxy = next((name for name in values if values[name]), "")
    if address and proxy and address[0] not in re.split(r"[\s,]+", ",".join(direct)):
        text = f"{proxy} is a proxy before the coordinator: add {address[0]} to "
        yield f"{text}no_proxy, or start with ml.initialize(), which does."
    for extra in needs:
        for module in sorted({*_EXTRAS[extra]}.difference(machine.importable)):
            yield f"{module} is not installed: pip install 'meshlayout[{extra}]'."


def _of_cpu_devices(machine: Machine, setting: str, version: str) -> Iterator[str]:
    environment = machine.environment
    hidden = environment.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    for kind in machine.hardware:
        if setting:
            fix = f"JAX_PLATFORMS={setting} asks for it: unset that variable"
        elif kind == "gpu" and hidden:
            fix = "CUDA_VISIBLE_DEVICES hides it: unset that variable"
        elif {*_PLUGINS[kind]}.isdisjoint(machine.importable):
            extra = {"tpu": "tpu", "gpu": "cuda12"}[kind]
            fix = f"it has no plugin: pip install 'jax[{extra}]=={version}'"
        else:
            fix = "another process may hold it: end that, or look at what JAX logs"
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
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    required = "\n".join(importlib.metadata.requires("jax") or [])
    pins = re.findall(r"^libtpu *\(?==([\d.]+\d)", required, re.MULTILINE)
    flags = re.findall(r"device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    config: Any = jax.config
    setting = config.jax_num_cpu_devices
    folder = os.environ.get("TFDS_DATA_DIR") or Path.home() / "tensorflow_datasets"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if devices and devices[0].platform != "cpu":
        memory = int((devices[0].memory_stats() or {}).get("bytes_limit", 0))
    modules = {x for names in (_EXTRAS | _PLUGINS).values() for x in names}
    return Machine(
        versions=versions,
        environment=dict(os.environ),
        platform=devices[0].platform if devices else "",
        devices=[device.device_kind for device in devices],
        failure=failure,
        libtpu_pin="".join(pins[:1]),
        memory_bytes=memory,
        num_processes=1 if failure else _jax.process_count(),
        hardware=_jax.visible_accelerators(),
        asked_devices=setting if setting > 0 else int([0, *flags][-1]),
        cache=config.jax_enable_compilation_cache and config.jax_compilation_cache_dir,
        importable=sorted(filter(_is_importable, modules)),
        data_directory=str(folder) if Path(folder).is_dir() else "",
        cores=os.cpu_count() or 1,
    )


def _is_importable(module: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):  # of the package around it
        return importlib.util.find_spec(module) is not None
    return False
