"""`doctor`: what this machine has, and what is set wrong, with how to mend it."""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import jax

from meshlayout import _checks, _jax, _render
from meshlayout.cluster.environment import split_address


_EXTRAS = "data checkpoint gcs safetensors tensorboard ray notebook tpu cuda"
# As "grain>=0.2; extra == 'data'"; as "jaxlib<=0.10.2,>=0.10.2" and "libtpu==0.0.42.*".
_PART = r"(?m)^([\w-]+).*extra == .(\w+)"
_PIN = r"(?m)^(jaxlib(?=[^;\n]*$)|libtpu|jax-cuda\d+-\w+)[^<=>\n]*([<=>][^ ;\n]*)"


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
        _checks.choice("needs", extra, _EXTRAS.split(), where="doctor")
    devices, platform, failure = [], "", ""
    try:
        devices = jax.local_devices()
        platform = devices[0].platform
    except (RuntimeError, AssertionError) as error:  # JAX asserts that one has started
        failure = str(error).partition("\n")[0].rstrip(".") or "none that was asked for"
    on_cpu, count = platform == "cpu", len(devices)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if devices and not on_cpu:
        memory = int((devices[0].memory_stats() or {}).get("bytes_limit", 0))
    processes = 1 if failure else _jax.process_count()
    mesh = f'ml.create_mesh({{"batch": {count * processes}}})' if count else ""

    found = {x.name.lower().replace("_", "-"): x for x in metadata.distributions()}
    versions = {name: distribution.version for name, distribution in found.items()}
    plugins = {name for name in found if re.match(r"jax-cuda\d+-p|libtpu", name)}
    requires = {x: "\n".join(found[x].requires or ()) for x in ("jax", *plugins)}
    pins = dict(re.findall(_PIN, "\n".join(requires.values())))
    current, own = versions["jax"], "\n".join(metadata.requires("meshlayout") or ())
    parts = [x for x in re.findall(_PART, own) if x[1] in _EXTRAS.split()]
    parts += [("libtpu", "tpu"), ("jax-cuda12-plugin", "cuda")]
    wrong = {
        f"jax {current} and {x} {versions[x]} do not fit: pip install '{x}{pin}'.": (
            not _fits(versions[x], pin)
        )
        for x, pin in pins.items()
        if x in versions
    }
    for name, extra in parts:
        fix = f"pip install 'meshlayout[{extra}] @ git+{_checks.HOME}'"
        fails = extra in needs and name not in found
        wrong[f"{name} is not installed: {fix}."] = fails

    given = {name.lower(): value for name, value in os.environ.items() if value}
    setting, nproc = given.get("jax_platforms", ""), given.get("nproc", "")
    cores = os.cpu_count() or 1
    threads = int(nproc) if nproc.isdecimal() else cores
    is_old = _numbers(current) < [0, 12]  # later ones have no such deadlock
    host, _ = split_address(given.get("jax_coordinator_address")) or ("", 0)
    direct = f"{given.get('no_grpc_proxy')},{given.get('no_proxy')}"
    proxy = min({"grpc_proxy", "https_proxy", "http_proxy"} & given.keys(), default="")
    flags = f"{given.get('xla_flags')} count={given.get('jax_num_cpu_devices')}"
    asked = max(map(int, re.findall(r"count=(\d+)", flags)), default=0)
    config = vars(jax)["config"]
    cache = config.jax_enable_compilation_cache and config.jax_compilation_cache_dir
    data = Path(given.get("tfds_data_dir") or Path.home() / "tensorflow_datasets")

    idle = next(iter(_jax.visible_accelerators() if on_cpu else ()), "").upper()
    why = "another process may hold it: end that, or look at what JAX logs"
    if setting:
        why = f"JAX_PLATFORMS={setting} asks for it: unset that variable"
    elif idle == "GPU" and os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        why = "CUDA_VISIBLE_DEVICES hides it: unset that variable"
    elif not plugins:
        kind = {"TPU": "tpu"}.get(idle, "cuda12")
        why = f"it has no plugin: pip install 'jax[{kind}]=={current}'"
    wrong |= {
        f"{proxy} is a proxy before the coordinator: add {host} to no_proxy, or call "
        "ml.initialize(), which does.": host and proxy and host not in direct,
        f"JAX starts no devices ({failure}); JAX_PLATFORMS={setting!r}: unset it, or "
        "install what it asks for, and look at what JAX logs.": failure,
        f"this machine has a {idle}, but JAX uses the CPU; {why}.": idle,
        f"{asked} virtual devices came too late: restart, and call ml.virtual_devices("
        f"{asked}) before any other use of JAX.": on_cpu and asked > count,
        f"{count} CPU devices can deadlock on {threads} threads: set NPROC={2 * count} "
        "before JAX starts, or call ml.virtual_devices.": (
            on_cpu and threads < 2 * count > 2 and is_old
        ),
    }
    advice = {
        f"NPROC={nproc} makes small products slow: unset it.": threads > cores
        and count == 1,
        "nothing compiled is kept: set JAX_COMPILATION_CACHE_DIR.": not cache,
        "TensorFlow Datasets has no directory: set TFDS_DATA_DIR.": not data.is_dir(),
    }
    names = ["meshlayout", "jax", "jaxlib", "flax", "optax", *dict(parts), *plugins]
    shown = {name: versions[name] for name in names if name in found}
    kinds = [device.device_kind for device in devices]
    facts = shown, kinds, memory, processes, mesh
    return Checkup(*facts, *([x for x in y if y[x]] for y in (wrong, advice)))


def _fits(version: str | None, pin: str) -> bool:
    """Returns whether a version, if any, is in "<=0.10.2,>=0.10.1" or "==0.0.42.*"."""
    bounds = sorted(map(_numbers, pin.split(",")))
    return bounds[0] <= _numbers(version or pin)[: len(bounds[0])] <= bounds[-1]


def _numbers(version: str) -> list[int]:
    return [int(x) for x in re.findall(r"\d+", version)]
