"""`doctor`: what this machine has, and what is set wrong, with the sentence to mend it.

What is seen here and what follows from it are apart: `findings_of` is a pure function.
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
_FITTING = ("jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt")  # versions as jax's
_PACKAGES = ("meshlayout", "jax", *_FITTING, "libtpu", "flax", "optax", "numpy")


@dataclass(frozen=True)
class Machine:
    """What is seen of this machine and this process."""

    python: str
    versions: Mapping[str, str]  # of the packages that are installed
    environment: Mapping[str, str]
    platform: str  # that JAX uses
    devices: Sequence[str]  # the kind of each local device
    libtpu_pin: str = ""  # what jax requires, as "==0.0.42.*"
    memory_bytes: int = 0  # of the first device, or of the machine for CPUs
    num_processes: int = 1
    hardware: Sequence[str] = ()  # that the system shows: "tpu", "gpu"
    asked_devices: int = 0  # virtual CPU devices, by JAX's setting
    cache: str = ""  # the directory of JAX's compilation cache
    importable: Sequence[str] = ()  # modules of extras
    data_directory: str = ""  # TFDS's
    cores: int = 1


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or could be better.

    Attributes:
        kind: `"wrong"` if programs fail, hang or run elsewhere for it, or `"advice"`.
        sentence: What is so, and how to mend it.
    """

    kind: Literal["wrong", "advice"]
    sentence: str


@dataclass(frozen=True, repr=False)
class Checkup:
    """The result of `doctor`: text if printed, a table in notebooks.

    Attributes:
        machine: What is seen.
        findings: What is wrong, and then what could be better.
    """

    machine: Machine
    findings: tuple[Finding, ...] = field(default=())

    @property
    def is_well(self) -> bool:
        """Whether nothing is wrong."""
        return not any(finding.kind == "wrong" for finding in self.findings)

    @property
    def mesh(self) -> str:
        """The call that makes a mesh of all devices."""
        machine, hosts = self.machine, self.machine.num_processes
        sizes = f'{{"batch": {len(machine.devices) * hosts}}}'
        if machine.platform == "gpu" and hosts > 1:
            sizes = f'{{"replica": {hosts}, "fsdp": -1}}, dcn="replica"'
        return f"ml.create_mesh({sizes})"

    def to_dict(self) -> dict[str, Any]:
        """Returns values that JSON can hold, without the environment variables."""
        facts = {**asdict(self), "is_well": self.is_well, "mesh": self.mesh}
        del facts["machine"]["environment"]
        return facts

    def __repr__(self) -> str:
        return _render.text_table(["", "here"], self._rows(), notes=self._notes())

    def _repr_html_(self) -> str:
        return _render.html_table(["", "here"], self._rows(), notes=self._notes())

    def _rows(self) -> list[list[str]]:
        machine = self.machine
        kinds = (
            f"{count} x {kind}" for kind, count in Counter(machine.devices).items()
        )
        memory = _render.bytes_text(machine.memory_bytes)
        rows = [["Python", machine.python], *map(list, machine.versions.items())]
        rows += [["devices", f"{', '.join(kinds)} ({machine.platform}), {memory}"]]
        return [*rows, ["processes", str(machine.num_processes)], ["mesh", self.mesh]]

    def _notes(self) -> list[str]:
        lines = [f"{x.kind}: {x.sentence}" for x in self.findings]
        return lines or ["Nothing is wrong."]


def doctor(*, needs: Sequence[str] = ()) -> Checkup:
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
        context: Any = {"where": "doctor", "error": MeshLayoutError}
        _checks.choice("needs", extra, _EXTRAS, **context)
    machine = _machine_here()
    findings = sorted(findings_of(machine, needs), key=lambda x: x.kind != "wrong")
    return Checkup(machine, tuple(findings))


def findings_of(machine: Machine, needs: Sequence[str] = ()) -> Iterator[Finding]:
    """Yields what is wrong with a machine, or could be better."""
    wrong = [*_of_versions(machine), *_of_devices(machine), *_of_network(machine)]
    wrong += [
        f"{module} is not installed: pip install 'meshlayout[{extra}]'."
        for extra in needs
        for module in _EXTRAS[extra]
        if module not in machine.importable
    ]
    yield from (Finding("wrong", sentence) for sentence in wrong)
    threads, cores = machine.environment.get("NPROC", ""), machine.cores
    if len(machine.devices) == 1 and threads.isdecimal() and int(threads) > cores:
        line = (
            f"NPROC={threads} on {cores} cores makes small products slower: unset it."
        )
        yield Finding("advice", line)
    if not machine.cache:
        line = (
            "every start compiles anew: set JAX_COMPILATION_CACHE_DIR to a directory."
        )
        yield Finding("advice", line)
    if not machine.data_directory:
        line = "there is no directory of TensorFlow Datasets: set TFDS_DATA_DIR."
        yield Finding("advice", line)


def _of_versions(machine: Machine) -> Iterator[str]:
    versions, jax_version = machine.versions, machine.versions.get("jax", "")
    for name in _FITTING:
        other = versions.get(name, jax_version)
        if other.split(".")[:2] != jax_version.split(".")[:2]:
            package = "jax[cuda12]" if "cuda" in name else "jaxlib"
            fix = f"pip install '{package}=={jax_version}'"
            yield f"jax {jax_version} and {name} {other} do not fit: {fix}."
    libtpu, pin = versions.get("libtpu", ""), machine.libtpu_pin.strip("=.* ")
    if machine.platform == "tpu" and pin and not f"{libtpu}.".startswith(f"{pin}."):
        fix = f"pip install 'jax[tpu]=={jax_version}'"
        yield f"jax {jax_version} is made for libtpu {pin}, not {libtpu}: {fix}."


def _of_devices(machine: Machine) -> Iterator[str]:
    if machine.platform != "cpu":
        return
    environment, version = machine.environment, machine.versions.get("jax", "")
    for kind in machine.hardware:
        plugin, extra = (*_EXTRAS["tpu"], "tpu")
        if kind == "gpu":
            plugin, extra = (*_EXTRAS["cuda"], "cuda12")
        if setting := environment.get("JAX_PLATFORMS"):
            fix = f"JAX_PLATFORMS={setting} asks for it: unset that variable"
        elif plugin not in machine.importable:
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
    # jaxlib 0.12 has no such deadlock.
    is_old = [int(x) for x in re.findall(r"\d+", version)[:2]] < [0, 12]
    if count > 1 and is_old and threads.isdecimal() and int(threads) < 2 * count:
        text = f"{count} CPU devices share {threads} threads, and can deadlock: set "
        yield f"{text}NPROC={2 * count} before JAX starts, or call ml.virtual_devices."


def _of_network(machine: Machine) -> Iterator[str]:
    environment = machine.environment
    address = split_address(environment.get("JAX_COORDINATOR_ADDRESS"))
    names = ("grpc_proxy", "https_proxy", "http_proxy", "HTTPS_PROXY", "HTTP_PROXY")
    proxies = [name for name in names if environment.get(name)]
    direct = ",".join(environment.get(x, "") for x in ("no_grpc_proxy", "no_proxy"))
    if address and proxies and address[0] not in re.split(r"[\s,]+", direct):
        text = f"{proxies[0]} is a proxy before the coordinator: add {address[0]} to "
        yield f"{text}no_proxy, or start with ml.initialize(), which does."


def _machine_here() -> Machine:
    device, *_ = devices = jax.local_devices()
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    pins = re.findall(
        r"^libtpu *\(?(==[\w.*]+)",
        "\n".join(importlib.metadata.requires("jax") or []),
        re.MULTILINE,
    )
    flags = re.findall(r"device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    setting = getattr(jax.config, "jax_num_cpu_devices", -1)
    asked = [setting if setting > 0 else 0, *map(int, flags)]
    folder = os.environ.get("TFDS_DATA_DIR") or str(Path.home() / "tensorflow_datasets")
    patterns = {"gpu": "nvidia[0-9]*", "tpu": "accel[0-9]*"}
    if device.platform == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        memory = int((device.memory_stats() or {}).get("bytes_limit", 0))
    return Machine(
        python=platform.python_version(),
        versions=versions,
        environment=dict(os.environ),
        platform=device.platform,
        devices=[device.device_kind for device in devices],
        libtpu_pin="".join(pins[:1]),
        memory_bytes=memory,
        num_processes=_jax.process_count(),
        hardware=[x for x, glob in patterns.items() if any(Path("/dev").glob(glob))],
        asked_devices=asked[-1],
        cache=str(getattr(jax.config, "jax_compilation_cache_dir", None) or ""),
        importable=[x for y in _EXTRAS.values() for x in y if is_importable(x)],
        data_directory=folder if Path(folder).is_dir() else "",
        cores=os.cpu_count() or 1,
    )


def is_importable(module: str) -> bool:
    """Returns whether a module of an extra is installed."""
    with contextlib.suppress(ModuleNotFoundError):  # of the package around it
        return importlib.util.find_spec(module) is not None
    return False
