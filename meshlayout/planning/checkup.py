"""`doctor`: what this machine has, and what is set wrong, with how to mend it."""

import contextlib
import os
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from meshlayout import _checks, _jax, _render
from meshlayout.cluster.environment import split_address


_EXTRAS = (
    *("data", "checkpoint", "gcs", "safetensors", "tensorboard", "ray"),
    *("notebook", "tpu", "cuda"),
)
_PLUGINS = [f"jax-cuda{x}-{part}" for x in (12, 13) for part in ("plugin", "pjrt")]
# As "grain>=0.2; extra == 'data'"; as "jaxlib<=0.10.2,>=0.10.2" and "libtpu==0.0.42.*".
_PART = r"([\w-]+).*extra == .(\w+)"
_PIN = r"(jaxlib(?=[^;\n]*$)|libtpu|jax-cuda\d+-\w+)[^<=>\n]*([<=>][^ ;\n]*)"


@dataclass(frozen=True, repr=False)
class Checkup:
    """What `doctor` has seen, and what follows from that; a table if printed."""

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
    """Looks at this machine, and says what is set wrong and how to mend it.

    It starts JAX's devices. Use this when a program is slow, hangs or does not see its
    devices; `python -m meshlayout doctor` does the same. `needs` are the extras of this
    library that must be installed, as `["data"]`; another is a MeshLayoutError.

    Examples:
        >>> import meshlayout as ml
        >>> ml.doctor().mesh
        'ml.create_mesh({"batch": 8})'
    """
    needs = [needs] if isinstance(needs, str) else needs
    for extra in needs:
        _checks.choice("needs", extra, _EXTRAS, where="doctor")
    devices, failure = [], ""
    try:
        devices = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that one has started
        failure = str(error).partition("\n")[0].rstrip(".") or "none that was asked for"
    kinds = [device.device_kind for device in devices]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if devices and devices[0].platform != "cpu":
        memory = int((devices[0].memory_stats() or {}).get("bytes_limit", 0))
    processes = 1 if failure else _jax.process_count()
    mesh = f'ml.create_mesh({{"batch": {len(devices) * processes}}})' if devices else ""
    versions, wrong = _packages(needs)
    if not devices:
        setting = f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')!r}"
        fix = f"{setting}: unset it, or install what it asks for, and look at the log"
        wrong[f"JAX starts no devices ({failure}); {fix}."] = True
    elif devices[0].platform == "cpu":
        wrong |= _cpu_faults(len(devices), versions)
    more, advice = _settings(len(devices))
    tables = wrong | more, advice
    found = ([text for text, fails in x.items() if fails] for x in tables)
    return Checkup(versions, kinds, memory, processes, mesh, *found)


def _packages(needs: Sequence[str]) -> tuple[dict[str, str], dict[str, object]]:
    """Returns versions, and by sentence whether one does not fit or is missing."""
    parts = [x for x in _requirements("meshlayout", _PART) if x[1] in _EXTRAS]
    parts += [("libtpu", "tpu"), ("jax-cuda12-plugin", "cuda")]
    parts += [("meshlayout", extra) for extra in needs]  # which knows the others
    names = ["meshlayout", "jax", "jaxlib", "flax", "optax", *_PLUGINS, *dict(parts)]
    versions = {"Python": platform.python_version(), "jax": jax.__version__}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    pins = dict(x for name in ("jax", *_PLUGINS) for x in _requirements(name, _PIN))
    table: dict[str, object] = {
        f"jax {versions['jax']} and {name} {version} do not fit: "
        f"pip install '{name}{pins[name]}'.": not _fits(version, pins[name])
        for name, version in versions.items()
        if name in pins
    }
    table |= {
        f"{name} is not installed: "
        f"pip install 'meshlayout[{extra}] @ git+{_checks.HOME}'.": name not in versions
        for name, extra in parts
        if extra in needs
    }
    return versions, table


def _cpu_faults(count: int, versions: Mapping[str, str]) -> dict[str, object]:
    """Returns by sentence whether it holds where JAX uses so many CPU devices."""
    flags, number, setting, nproc = (
        os.environ.get(name, "")
        for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS", "NPROC")
    )
    counts = re.findall(r"device_count=(\d+)", f"{flags} device_count={number}")
    asked = max(map(int, counts), default=0)
    threads = int(nproc) if nproc.isdecimal() else os.cpu_count() or 1
    is_old = _numbers(versions["jax"]) < [0, 12]  # later ones have no such deadlock
    idle = next(iter(_jax.visible_accelerators()), "").upper()
    extra, plugins = ("tpu", ["libtpu"]) if idle == "TPU" else ("cuda12", _PLUGINS)
    fix = "another process may hold it: end that, or look at what JAX logs"
    if setting:
        fix = f"JAX_PLATFORMS={setting} asks for it: unset that variable"
    elif idle == "GPU" and os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        fix = "CUDA_VISIBLE_DEVICES hides it: unset that variable"
    elif versions.keys().isdisjoint(plugins):
        fix = f"it has no plugin: pip install 'jax[{extra}]=={versions['jax']}'"
    return {
        f"this machine has a {idle}, but JAX uses the CPU; {fix}.": idle,
        f"{asked} virtual devices came too late: restart, and call ml.virtual_devices("
        f"{asked}) before any other use of JAX.": asked > count,
        f"{count} CPU devices can deadlock on {threads} threads: set NPROC={2 * count} "
        "before JAX starts, or call ml.virtual_devices.": (
            threads < 2 * count > 2 and is_old
        ),
    }


def _settings(count: int) -> tuple[dict[str, object], dict[str, object]]:
    """Returns by sentence whether a setting is wrong, or could be better."""
    given = {name.lower(): value for name, value in os.environ.items() if value}
    host, _ = split_address(given.get("jax_coordinator_address")) or ("", 0)
    proxy = min({"grpc_proxy", "https_proxy", "http_proxy"} & given.keys(), default="")
    direct = f"{given.get('no_grpc_proxy')},{given.get('no_proxy')}".replace(" ", ",")
    nproc, config = given.get("nproc", ""), vars(jax)["config"]
    is_slow = count == 1 and nproc.isdecimal() and int(nproc) > (os.cpu_count() or 1)
    cache = config.jax_enable_compilation_cache and config.jax_compilation_cache_dir
    data = Path(given.get("tfds_data_dir") or Path.home() / "tensorflow_datasets")
    wrong: dict[str, object] = {
        f"{proxy} is a proxy before the coordinator: add {host} to no_proxy, or call "
        "ml.initialize(), which does.": proxy
        and host
        and host not in direct.split(","),
    }
    advice: dict[str, object] = {
        f"NPROC={nproc} makes small products slow: unset it.": is_slow,
        "nothing compiled is kept: set JAX_COMPILATION_CACHE_DIR.": not cache,
        "TensorFlow Datasets has no directory: set TFDS_DATA_DIR.": not data.is_dir(),
    }
    return wrong, advice


def _requirements(name: str, pattern: str) -> list[tuple[str, str]]:
    """Returns what a pattern finds in the requirements of a distribution, if any."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        lines = "\n".join(metadata.requires(name) or ())
        return re.findall(f"^{pattern}", lines, re.MULTILINE)
    return []


def _fits(version: str | None, pin: str) -> bool:
    """Returns whether a version, if any, is in "<=0.10.2,>=0.10.1" or "==0.0.42.*"."""
    bounds = sorted(map(_numbers, pin.split(",")))
    return bounds[0] <= _numbers(version or pin)[: len(bounds[0])] <= bounds[-1]


def _numbers(version: str) -> list[int]:
    return [int(x) for x in re.findall(r"\d+", version)]
