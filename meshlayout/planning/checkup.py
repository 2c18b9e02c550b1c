"""`doctor`: what this machine has, and what is set wrong, with the sentence to mend it.

What is wrong follows from what was seen alone.
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


# The distributions that each extra of this library needs.
_EXTRAS = {
    "data": ["grain", "cloudpickle"],
    "checkpoint": ["orbax-checkpoint"],
    "gcs": ["orbax-checkpoint", "gcsfs"],
    "safetensors": ["safetensors"],
    "tensorboard": ["tensorboardX"],
    "ray": ["ray", "cloudpickle"],
    "notebook": ["jupytext", "ipykernel"],
    "tpu": ["libtpu"],
    "cuda": ["jax-cuda12-plugin"],
}
_PLUGINS = [f"jax-cuda{x}-{part}" for x in (12, 13) for part in ("plugin", "pjrt")]
# As "jaxlib<=0.10.2,>=0.10.2" and "libtpu==0.0.42.*; extra == 'tpu'".
_PIN = r"^(jaxlib(?=[^;\n]*$)|libtpu|jax-cuda\d+-\w+)[^<=>\n]*([<=>][^ ;\n]*)"


@dataclass(frozen=True, repr=False)
class Checkup:
    """What `doctor` has seen, and what follows from it; a table if printed."""

    versions: Mapping[str, str]  # of the distributions that are installed
    environment: Mapping[str, str]
    platform: str  # that JAX uses
    devices: Sequence[str]  # the kind of each local device
    failure: str = ""  # what JAX said instead of giving devices
    pins: Mapping[str, str] = field(default_factory=dict)  # what jax requires
    memory_bytes: int = 0  # of the first device, or of the machine for CPUs
    num_processes: int = 1
    hardware: Sequence[str] = ()  # that the system shows: "tpu", "gpu"
    asked_devices: int = 0  # virtual CPU devices, by JAX's settings
    cache: str | None = None  # the directory of JAX's compilation cache
    data: str = ""  # of TensorFlow Datasets
    cores: int = 1
    needs: Sequence[str] = ()  # extras that must be installed

    @property
    def wrong(self) -> list[str]:
        """What makes programs fail, hang or run elsewhere, and how to mend it."""
        return [*self._wrong()]

    @property
    def advice(self) -> list[str]:
        """What could be better."""
        threads, count = self.environment.get("NPROC", ""), len(self.devices)
        is_slow = count == 1 and threads.isdecimal() and int(threads) > self.cores
        lines = {
            f"NPROC={threads} makes small products slow: unset it.": is_slow,
            "nothing compiled is kept: set JAX_COMPILATION_CACHE_DIR.": not self.cache,
            "TensorFlow Datasets has no directory: set TFDS_DATA_DIR.": not self.data,
        }
        return [line for line, is_so in lines.items() if is_so]

    @property
    def mesh(self) -> str:
        """The call that makes a mesh of all devices."""
        count = len(self.devices) * self.num_processes
        return f'ml.create_mesh({{"batch": {count}}})' if count else ""

    def to_dict(self) -> dict[str, Any]:
        """Returns values that JSON can hold; proxies may have passwords."""
        facts = {name: x for name, x in vars(self).items() if name != "environment"}
        return {**facts, "wrong": self.wrong, "advice": self.advice, "mesh": self.mesh}

    def __repr__(self) -> str:
        kinds = Counter(self.devices)
        devices = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        devices = f"{devices} ({self.platform})" if kinds else "none"
        size = _render.bytes_text(self.memory_bytes)
        rows = [*self.versions.items(), ("devices", devices), ("memory", size)]
        rows += [("processes", self.num_processes), ("mesh", self.mesh)]
        wrong = [f"wrong: {x}" for x in self.wrong] or ["Nothing is wrong."]
        notes = [*wrong, *(f"advice: {x}" for x in self.advice)]
        return _render.text_table(["", "here"], rows, notes=notes)

    def _wrong(self) -> Iterator[str]:
        versions, current = self.versions, self.versions.get("jax", "")
        for name, pin in self.pins.items():
            bounds = sorted(map(_numbers, pin.split(",")))
            number = _numbers(versions.get(name, pin))[: len(bounds[0])]
            if not bounds[0] <= number <= bounds[-1]:
                extra = {"jaxlib": "", "libtpu": "[tpu]"}.get(name, f"[{name[4:10]}]")
                fix = f"pip install 'jax{extra}=={current}'"
                fact = f"jax {current} and {name} {versions[name]} do not fit"
                yield f"{fact}: it takes {name}{pin}; {fix}."
        for extra in self.needs:
            for name in (x for x in _EXTRAS[extra] if x not in versions):
                yield f"{name} is not installed: pip install 'meshlayout[{extra}]'."
        environment = self.environment
        variables = {name.lower(): x for name, x in environment.items() if x}
        address = split_address(environment.get("JAX_COORDINATOR_ADDRESS"))
        proxies = "grpc_proxy", "https_proxy", "http_proxy"
        names = [name for name in proxies if name in variables]
        direct = [variables.get(x, "") for x in ("no_grpc_proxy", "no_proxy")]
        if address and names and address[0] not in re.split("[ ,]+", ",".join(direct)):
            fix = f"add {address[0]} to no_proxy, or call ml.initialize(), which does"
            yield f"{names[0]} is a proxy before the coordinator: {fix}."
        setting = environment.get("JAX_PLATFORMS", "")
        if self.failure:
            fix = f"asked for by JAX_PLATFORMS={setting}: unset it, or install them"
            fix = fix if setting else "look at what JAX logs, and restart the process"
            yield f"JAX starts no devices ({self.failure.rstrip('.')}); {fix}."
        if self.platform != "cpu":
            return
        hidden = environment.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
        for kind in self.hardware:
            extra, names = {"tpu": ("tpu", ["libtpu"])}.get(kind, ("cuda12", _PLUGINS))
            fix = "another process may hold it: end that, or look at what JAX logs"
            if setting:
                fix = f"JAX_PLATFORMS={setting} asks for it: unset that variable"
            elif kind == "gpu" and hidden:
                fix = "CUDA_VISIBLE_DEVICES hides it: unset that variable"
            elif versions.keys().isdisjoint(names):
                fix = f"it has no plugin: pip install 'jax[{extra}]=={current}'"
            yield f"this machine has a {kind.upper()}, but JAX uses the CPU; {fix}."
        count, asked = len(self.devices), self.asked_devices
        if asked not in (0, count):
            call = f"ml.virtual_devices({asked}) before any other use of JAX"
            yield f"{asked} virtual devices came too late: restart, and call {call}."
        threads = environment.get("NPROC", "") or str(self.cores)
        is_old = _numbers(current)[:2] < [0, 12]  # jaxlib 0.12 has no such deadlock
        if count > 1 and is_old and threads.isdecimal() and int(threads) < 2 * count:
            fix = f"set NPROC={2 * count} before JAX starts, or call ml.virtual_devices"
            yield f"{count} CPU devices can deadlock on {threads} threads: {fix}."


@_checks.user_call
def doctor(*, needs: str | Sequence[str] = ()) -> Checkup:
    """Looks at this machine, and says what is set wrong and how to mend it.

    It starts JAX's devices. Use this when a program is slow, hangs or does not see its
    devices; `python -m meshlayout doctor` does the same.

    Args:
        needs: The extras of this library that must be installed, as `["data"]`.

    Raises:
        MeshLayoutError: If there is no such extra.

    Examples:
        >>> import meshlayout as ml
        >>> ml.doctor().mesh
        'ml.create_mesh({"batch": 8})'
    """
    needs = [needs] if isinstance(needs, str) else needs
    for extra in needs:
        _checks.choice("needs", extra, _EXTRAS, where="doctor", error=MeshLayoutError)
    devices, failure = [], ""
    try:
        devices = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that one has started
        failure = next(iter(str(error).splitlines()), "no platform that was asked for")
    versions, required = {"Python": platform.python_version()}, list[str]()
    extras = sorted({name for names in _EXTRAS.values() for name in names})
    for name in ("meshlayout", "jax", "jaxlib", "flax", "optax", *extras, *_PLUGINS):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
            if name in ("jax", *_PLUGINS):
                required += importlib.metadata.requires(name) or []
    flags = os.environ.get("XLA_FLAGS", ""), os.environ.get("JAX_NUM_CPU_DEVICES", "")
    counts = re.findall(r"device_count=(\d+)", "{} device_count={}".format(*flags))
    config: Any = jax.config
    folder = os.environ.get("TFDS_DATA_DIR") or Path.home() / "tensorflow_datasets"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if devices and devices[0].platform != "cpu":
        memory = int((devices[0].memory_stats() or {}).get("bytes_limit", 0))
    return Checkup(
        *(versions, dict(os.environ), devices[0].platform if devices else ""),
        devices=[device.device_kind for device in devices],
        failure=failure,
        pins=dict(re.findall(_PIN, "\n".join(required), re.MULTILINE)),
        memory_bytes=memory,
        num_processes=1 if failure else _jax.process_count(),
        hardware=_jax.visible_accelerators(),
        asked_devices=max(config.jax_num_cpu_devices, *map(int, ["0", *counts])),
        cache=config.jax_enable_compilation_cache and config.jax_compilation_cache_dir,
        data=str(folder) if Path(folder).is_dir() else "",
        cores=os.cpu_count() or 1,
        needs=needs,
    )


def _numbers(version: str) -> list[int]:
    return [int(x) for x in re.findall(r"\d+", version)]
