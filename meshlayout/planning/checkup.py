"""`doctor`: what this machine has, what is misconfigured, and how to fix it."""

import contextlib
import os
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias
from urllib.request import getproxies_environment, proxy_bypass

import jax

from meshlayout import _checks, _jax, _render
from meshlayout.cluster.environment import split_address


_EXTRAS = {  # what they install
    "data": ("grain", "cloudpickle"),
    "checkpoint": ("orbax-checkpoint",),
    "gcs": ("orbax-checkpoint", "gcsfs"),
    "safetensors": ("safetensors",),
    "tensorboard": ("tensorboardX",),
    "ray": ("ray", "cloudpickle"),
    "notebook": ("jupytext", "ipykernel"),
    "tpu": ("libtpu",),
    "cuda": ("jax-cuda12-plugin", "jax-cuda12-pjrt"),
}
_PLUGINS = [f"jax-cuda{x}-{part}" for x in (12, 13) for part in ("plugin", "pjrt")]
_NAMES = ["meshlayout", "jax", "jaxlib", "flax", "optax", "libtpu", *_PLUGINS]
# As "jaxlib<=0.10.2,>=0.10.2" and "libtpu==0.0.42.*; extra == 'tpu'".
_PIN = r"^(jaxlib(?=[^;\n]*$)|libtpu|jax-cuda\d+-\w+)[^<=>\n]*([<=>][^ ;\n]*)"

_Findings: TypeAlias = Iterator[tuple[object, str]]  # whether it holds, and a sentence


@dataclass(frozen=True, repr=False)
class Checkup:
    """The findings of `doctor`, with advice; a table if printed."""

    versions: Mapping[str, str]
    devices: Sequence[str]  # the kind of each device of this process
    memory_bytes: int  # of the first device, or of the machine for CPUs
    num_processes: int
    mesh: str  # the call that makes a mesh of all devices
    wrong: Sequence[str]  # what makes programs fail, hang or run elsewhere
    advice: Sequence[str]  # what could be better

    def to_dict(self) -> dict[str, Any]:
        """Returns values that JSON can hold."""
        return dict(vars(self))

    def __repr__(self) -> str:
        kinds = [f"{count} x {kind}" for kind, count in Counter(self.devices).items()]
        rows = [*self.versions.items(), ("devices", ", ".join(kinds) or "none")]
        rows += [("memory", _render.bytes_text(self.memory_bytes))]
        rows += [("processes", self.num_processes), ("mesh", self.mesh)]
        notes = [f"wrong: {x}" for x in self.wrong] or ["Nothing is wrong."]
        notes += [f"advice: {x}" for x in self.advice]
        return _render.text_table(["", "here"], rows, notes=notes)


@_checks.user_call
def doctor(*, needs: str | Sequence[str] = ()) -> Checkup:
    """Checks this machine, and says what is misconfigured and how to fix it.

    It starts JAX's devices. Use this when a program is slow, hangs or does not see its
    devices; `python -m meshlayout doctor` does the same. `needs` lists extras of this
    library that must be installed, as `["data"]`; an unknown one is an error.

    Examples:
        >>> import meshlayout as ml
        >>> ml.doctor().mesh
        'ml.create_mesh({"batch": 8})'
    """
    needs = [needs] if isinstance(needs, str) else needs
    for extra in needs:
        _checks.choice("needs", extra, _EXTRAS, where="doctor")
    devices, versions, count, mesh = [], {"Python": platform.python_version()}, 1, ""
    for name in [*_NAMES, *(x for extra in _EXTRAS.values() for x in extra)]:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    findings = [*_packages(versions, needs), *_network()]
    try:
        devices, count = jax.local_devices(), _jax.process_count()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that one has started
        fact = str(error).partition("\n")[0].rstrip(".") or "none that was asked for"
        fix = f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')!r}: unset it, or"
        fix = f"{fix} install what it asks for, and look at the log"
        findings.append((True, f"JAX starts no devices ({fact}); {fix}."))
    else:
        mesh = f'ml.create_mesh({{"batch": {len(devices) * count}}})'
        if devices[0].platform == "cpu":
            findings += _cpus(len(devices), versions)
        else:
            memory = int((devices[0].memory_stats() or {}).get("bytes_limit", 0))
    tables = findings, _advice(len(devices))
    texts = ([text for holds, text in table if holds] for table in tables)
    kinds = [device.device_kind for device in devices]
    return Checkup(versions, kinds, memory, count, mesh, *texts)


def _packages(versions: Mapping[str, str], needs: Sequence[str]) -> _Findings:
    """Yields what does not fit, and what is missing for the extras."""
    for owner in [x for x in ("jax", *_PLUGINS) if x in versions]:
        lines = "\n".join(metadata.requires(owner) or ())
        for name, pin in re.findall(_PIN, lines, re.MULTILINE):
            bounds, version = sorted(map(_numbers, pin.split(","))), versions.get(name)
            numbers = _numbers(version or pin)[: len(bounds[0])]
            fact = f"jax {versions['jax']} and {name} {version} do not fit"
            fits = bounds[0] <= numbers <= bounds[-1]
            yield not fits, f"{fact}: pip install '{name}{pin}'."
    for extra in needs:
        fix = f"pip install 'meshlayout[{extra}] @ git+{_checks.HOME}'"
        for name in _EXTRAS[extra]:
            yield name not in versions, f"{name} is not installed: {fix}."


def _cpus(count: int, versions: Mapping[str, str]) -> _Findings:
    """Yields what may be wrong where JAX uses so many CPU devices."""
    flags, number, setting, nproc = (
        os.environ.get(name, "")
        for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS", "NPROC")
    )
    idle = next(iter(_jax.visible_accelerators()), "").upper()
    extra, plugins = ("tpu", ["libtpu"]) if idle == "TPU" else ("cuda12", _PLUGINS)
    fix = "another process may hold it: end that, or look at what JAX logs"
    if setting:
        fix = f"JAX_PLATFORMS={setting} asks for it: unset that variable"
    elif idle == "GPU" and os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        fix = "CUDA_VISIBLE_DEVICES hides it: unset that variable"
    elif versions.keys().isdisjoint(plugins):
        fix = f"it has no plugin: pip install 'jax[{extra}]=={versions['jax']}'"
    yield idle, f"this machine has a {idle}, but JAX uses the CPU; {fix}."
    counts = re.findall(r"device_count=(\d+)", f"{flags} device_count={number}")
    asked = max(map(int, counts), default=0)
    fix = f"restart, and call ml.virtual_devices({asked}) before any other use of JAX"
    yield asked > count, f"{asked} virtual devices came too late: {fix}."
    threads = int(nproc) if nproc.isdecimal() else os.cpu_count() or 1
    is_few = threads < 2 * count > 2 and _numbers(versions["jax"]) < [0, 12]
    fix = f"set NPROC={2 * count} before JAX starts, or call ml.virtual_devices"
    yield is_few, f"{count} CPU devices can deadlock on {threads} threads: {fix}."


def _network() -> _Findings:
    """Yields what may be wrong on the way to the coordinator."""
    host, _ = split_address(os.environ.get("JAX_COORDINATOR_ADDRESS")) or ("", 0)
    proxy = min({"grpc", "https", "http"} & getproxies_environment().keys(), default="")
    fix = f"add {host} to no_proxy, or call ml.initialize(), which does"
    is_between = proxy and host and not proxy_bypass(host)
    yield is_between, f"{proxy}_proxy is a proxy before the coordinator: {fix}."


def _advice(count: int) -> _Findings:
    """Yields what could be better on so many devices."""
    nproc, config = os.environ.get("NPROC", ""), vars(jax)["config"]
    is_slow = count == 1 and nproc.isdecimal() and int(nproc) > (os.cpu_count() or 1)
    yield is_slow, f"NPROC={nproc} makes small products slow: unset it."
    cache = config.jax_enable_compilation_cache and config.jax_compilation_cache_dir
    yield not cache, "nothing compiled is kept: set JAX_COMPILATION_CACHE_DIR."
    data = Path(os.environ.get("TFDS_DATA_DIR") or Path.home() / "tensorflow_datasets")
    fix = "TensorFlow Datasets has no directory: set TFDS_DATA_DIR."
    yield not data.is_dir(), fix


def _numbers(version: str) -> list[int]:
    return [int(x) for x in re.findall(r"\d+", version)]
