"""`doctor`: what this machine has, and what is set wrong, with the sentence to mend it.

What is seen here and what follows from it are apart: `findings_of` is a pure function.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

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
_PACKAGES = (
    *("meshlayout", "jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint"),
    *("grain", "tensorflow-datasets", "libtpu", "jax-cuda12-plugin"),
    *("jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
)


@dataclass(frozen=True)
class Machine:
    """What is seen of this machine and this process.

    Attributes:
        python: The version of Python.
        versions: Of packages, by name; those that are installed.
        needs: What else packages require, by name, such as jax's own pin of libtpu.
        environment: The environment variables.
        platform: The platform that JAX uses.
        devices: The kinds of its local devices, one text per device.
        memory_bytes: Of the first device, or of the machine for CPUs; 0 if not known.
        num_processes: How many JAX processes there are.
        hardware: The accelerators that the system shows: `"tpu"`, `"gpu"`.
        asked_devices: The number of virtual CPU devices that JAX's setting asks for.
        cache: The directory of JAX's compilation cache, or empty.
        importable: The modules of extras that can be imported.
        data_directory: TFDS's directory, or empty if there is none.
        cores: The number of processor cores.
    """

    python: str
    versions: Mapping[str, str]
    environment: Mapping[str, str]
    platform: str
    devices: Sequence[str]
    needs: Mapping[str, str] = field(default_factory=dict)
    memory_bytes: int = 0
    num_processes: int = 1
    hardware: Sequence[str] = ()
    asked_devices: int = 0
    cache: str = ""
    importable: Sequence[str] = ()
    data_directory: str = ""
    cores: int = 1


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong or could be better.

    Attributes:
        kind: `"wrong"` if programs fail, hang or run elsewhere because of it, or
            `"advice"`.
        subject: What it is about.
        sentence: What is so, and how to mend it.
    """

    kind: Literal["wrong", "advice"]
    subject: str
    sentence: str


@dataclass(frozen=True, repr=False)
class Checkup:
    """The result of `doctor`: text if printed, a table in notebooks.

    Attributes:
        machine: What is seen.
        findings: What is wrong, and then what could be better.
        mesh: The call that makes a mesh of the devices.
    """

    machine: Machine
    findings: tuple[Finding, ...]
    mesh: str

    @property
    def is_well(self) -> bool:
        """Whether nothing is wrong."""
        return not any(finding.kind == "wrong" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Returns values that JSON can hold, without the environment variables."""
        facts = {**asdict(self.machine)}
        del facts["environment"]
        findings = [asdict(finding) for finding in self.findings]
        result = {"is_well": self.is_well, "findings": findings, "mesh": self.mesh}
        return {**result, **facts}

    def __repr__(self) -> str:
        return _render.text_table(*self._table(), notes=self._notes())

    def _repr_html_(self) -> str:
        return _render.html_table(*self._table(), notes=self._notes())

    def _table(self) -> tuple[list[str], list[list[str]]]:
        machine, counts = self.machine, dict[str, int]()
        for kind in machine.devices:
            counts[kind] = counts.get(kind, 0) + 1
        devices = ", ".join(f"{count} x {kind}" for kind, count in counts.items())
        memory = machine.memory_bytes
        rows = [["Python", machine.python], *map(list, machine.versions.items())]
        rows += [["devices", f"{devices} ({machine.platform})"]]
        rows += [["memory", _render.bytes_text(memory)]] if memory else []
        rows += [["processes", str(machine.num_processes)], ["mesh", self.mesh]]
        return ["", "here"], rows

    def _notes(self) -> list[str]:
        lines = [f"{x.kind}: {x.sentence}" for x in self.findings]
        return lines or ["Nothing is wrong."]


def doctor(*, needs: Sequence[str] = ()) -> Checkup:
    """Looks at this machine, and says what is set wrong and how to mend it.

    It starts JAX's devices, if they are not started. Use this when a program is slow,
    hangs or does not see its devices; `python -m meshlayout doctor` does the same.

    Args:
        needs: The extras of this library that must be installed, as
            `["data", "checkpoint"]`.

    Raises:
        MeshLayoutError: If there is no such extra.

    Example:
        >>> import meshlayout as ml
        >>> ml.doctor().mesh
        'ml.create_mesh({"batch": 8})'
    """
    needs = [needs] if isinstance(needs, str) else needs
    for extra in needs:
        context: Any = {"where": "doctor", "error": MeshLayoutError}
        _checks.choice("needs", extra, _EXTRAS, **context)
    machine = _machine_here()
    findings = sorted(findings_of(machine, needs), key=lambda x: x.kind != "wrong")
    return Checkup(machine, tuple(findings), _mesh_text(machine))


def findings_of(machine: Machine, needs: Sequence[str] = ()) -> Iterator[Finding]:
    """Yields what is wrong with a machine, or could be better."""
    yield from _of_versions(machine)
    yield from _of_devices(machine)
    yield from _of_network(machine)
    missing = [
        (extra, module)
        for extra in needs
        for module in _EXTRAS[extra]
        if module not in machine.importable
    ]
    for extra, module in missing:
        line = f"{module} is not installed: pip install 'meshlayout[{extra}]'."
        yield Finding("wrong", "packages", line)
    if not machine.cache:
        line = (
            "JAX's compilation cache is off, so that every start compiles anew: set "
            "JAX_COMPILATION_CACHE_DIR to a directory."
        )
        yield Finding("advice", "cache", line)
    if not machine.data_directory:
        line = (
            "there is no directory of TensorFlow Datasets: set TFDS_DATA_DIR, or let "
            "tfds prepare a dataset in ~/tensorflow_datasets."
        )
        yield Finding("advice", "data", line)


def _of_versions(machine: Machine) -> Iterator[Finding]:
    versions = machine.versions
    jax_version = versions.get("jax", "")
    for name in ("jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt"):
        other = versions.get(name, jax_version)
        if other.split(".")[:2] != jax_version.split(".")[:2]:
            extra = "cuda12" if "cuda" in name else ""
            package = f"jax[{extra}]" if extra else "jaxlib"
            line = (
                f"jax is {jax_version}, and {name} is {other}, which does not fit: "
                f"pip install '{package}=={jax_version}'."
            )
            yield Finding("wrong", "versions", line)
    pin, libtpu = machine.needs.get("libtpu", ""), versions.get("libtpu", "")
    wanted = re.sub(r"[=.*\s]+$", "", pin.removeprefix("=="))
    if libtpu and wanted and not f"{libtpu}.".startswith(f"{wanted}."):
        line = (
            f"jax {jax_version} is made for libtpu {wanted}, and {libtpu} is "
            f"installed: pip install 'jax[tpu]=={jax_version}'."
        )
        yield Finding(
            "wrong" if machine.platform == "tpu" else "advice", "versions", line
        )


def _of_devices(machine: Machine) -> Iterator[Finding]:
    setting = machine.environment.get("JAX_PLATFORMS", "")
    for kind in machine.hardware if machine.platform == "cpu" else ():
        plugin = {"tpu": "libtpu", "gpu": "jax_plugins.xla_cuda12"}[kind]
        extra = {"tpu": "tpu", "gpu": "cuda12"}[kind]
        if setting:
            fix = f"JAX_PLATFORMS={setting} asks for it: unset that variable"
        elif plugin not in machine.importable:
            version = machine.versions.get("jax", "")
            fix = f"JAX has no plugin for it: pip install 'jax[{extra}]=={version}'"
        else:
            fix = (
                "another process may hold it, or its driver does not answer: look at "
                "what JAX logs at its start, and end other programs"
            )
        line = f"this machine has a {kind.upper()}, but JAX uses the CPU; {fix}."
        yield Finding("wrong", "devices", line)
    if machine.platform != "cpu":
        return
    count, asked = len(machine.devices), machine.asked_devices
    if asked not in (0, count):
        line = (
            f"{asked} virtual CPU devices were asked for too late: JAX already runs "
            f"with {count}. Restart the process, and call ml.virtual_devices({asked}) "
            "before any other use of JAX."
        )
        yield Finding("wrong", "devices", line)
    threads = machine.environment.get("NPROC", "")
    jaxlib = machine.versions.get("jaxlib", "0").split(".")[:2]
    # Fixed in jaxlib 0.12.
    is_bounded = [int(x) for x in jaxlib if x.isdecimal()] < [0, 12]
    enough = threads.isdecimal() and int(threads) >= 2 * count
    if count > 1 and is_bounded and not enough and machine.cores < 2 * count:
        line = (
            f"{count} virtual CPU devices share {threads or machine.cores} threads, "
            f"and queued collectives can deadlock: set NPROC={2 * count} before JAX "
            f"starts, or call ml.virtual_devices({count}), which does."
        )
        yield Finding("wrong", "threads", line)
    if count == 1 and threads.isdecimal() and int(threads) > machine.cores:
        line = (
            f"NPROC={threads} on {machine.cores} cores makes small products slower on "
            "one device: unset it."
        )
        yield Finding("advice", "threads", line)


def _of_network(machine: Machine) -> Iterator[Finding]:
    environment = machine.environment
    address = split_address(environment.get("JAX_COORDINATOR_ADDRESS"))
    names = ("grpc_proxy", "https_proxy", "http_proxy", "HTTPS_PROXY", "HTTP_PROXY")
    proxies = [name for name in names if environment.get(name)]
    if address is None or not proxies:
        return
    direct = ",".join(environment.get(x, "") for x in ("no_grpc_proxy", "no_proxy"))
    if address[0] not in [host.strip() for host in direct.split(",")]:
        line = (
            f"{proxies[0]} puts a proxy before the coordinator {address[0]}, and "
            f"processes may wait for it: add {address[0]} to no_proxy, or start with "
            "ml.initialize(), which does."
        )
        yield Finding("wrong", "network", line)


def _mesh_text(machine: Machine) -> str:
    count = len(machine.devices) * machine.num_processes
    if machine.platform == "gpu" and machine.num_processes > 1:
        sizes = f'{{"replica": {machine.num_processes}, "fsdp": -1}}, dcn="replica"'
        return f"ml.create_mesh({sizes})"
    return f'ml.create_mesh({{"batch": {count}}})'


# What is here.


def _machine_here() -> Machine:
    devices = jax.local_devices()
    extras = {module for modules in _EXTRAS.values() for module in modules}
    flags = re.findall(
        r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    configured = getattr(jax.config, "jax_num_cpu_devices", -1)
    asked = configured if configured > 0 else int(flags[-1]) if flags else 0
    folder = os.environ.get("TFDS_DATA_DIR") or str(Path.home() / "tensorflow_datasets")
    return Machine(
        python=platform.python_version(),
        versions=_versions(),
        environment=dict(os.environ),
        platform=devices[0].platform,
        devices=[device.device_kind for device in devices],
        needs=_pins(),
        memory_bytes=_memory(devices[0]),
        num_processes=_jax.process_count(),
        hardware=_hardware(),
        asked_devices=asked,
        cache=str(getattr(jax.config, "jax_compilation_cache_dir", None) or ""),
        importable=sorted(filter(_is_importable, extras)),
        data_directory=folder if Path(folder).is_dir() else "",
        cores=os.cpu_count() or 1,
    )


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _pins() -> dict[str, str]:
    """Returns what jax requires of plugins, by package."""
    lines = importlib.metadata.requires("jax") or []
    pairs = (re.match(r"([\w-]+)\s*\(?(==[\w.*]+)", line) for line in lines)
    return {match[1]: match[2] for match in pairs if match}


def _memory(device: _jax.Device) -> int:
    if device.platform == "cpu":
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):  # not on this system
            return 0
    return int((device.memory_stats() or {}).get("bytes_limit", 0))


def _hardware() -> list[str]:
    dev = Path("/dev")
    kinds = {"gpu": "nvidia[0-9]*", "tpu": "accel[0-9]*"}
    seen = [kind for kind, pattern in kinds.items() if any(dev.glob(pattern))]
    # Newer TPU machines show their chips as VFIO groups; other devices do, too.
    if "tpu" not in seen and any((dev / "vfio").glob("[0-9]*")):
        seen += ["tpu"] if os.environ.get("TPU_ACCELERATOR_TYPE") else []
    return seen


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
