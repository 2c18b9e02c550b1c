"""Compilations in processes of their own, and what they found in a cache on disk.

libtpu wants a process for each compilation, which also can be ended at any time. A
process gets the lowered program and the names of its devices, and no code of the
user's. For devices that are here, programs are compiled here.
"""

import contextlib
import hashlib
import io
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from meshlayout import _jax
from meshlayout.planning.chips import describe_devices, memory_refusal


@dataclass(frozen=True)
class Compilation:
    """A lowered program to compile, for a topology or for devices that are here."""

    module: bytes
    topology: str  # empty for devices that are here
    ids: tuple[int, ...]  # of the devices, in the order of the mesh
    key: str  # of its outcome, by text and compiler
    devices: tuple[_jax.Device, ...] = ()  # that are here


@dataclass(frozen=True)
class Outcome:
    """What a compiler said about a program."""

    text: str = ""
    peak_bytes: float = 0.0  # arguments, new results, temporaries and code
    memory_bytes: float = 0.0  # that there is, if it was refused for memory
    error: str = ""  # the compiler's first line
    compile_s: float = 0.0
    host_bytes: int = 0  # that the process took at the most


def job_of(
    lowered: jax.stages.Lowered, devices: Sequence[_jax.Device], topology: str
) -> Compilation:
    """Returns what there is to know about a compilation."""
    bytecode = io.BytesIO()
    module: Any = lowered.compiler_ir("stablehlo")
    module.operation.write_bytecode(file=bytecode)
    ids = tuple(int(device.id) for device in devices)
    version = devices[0].client.platform_version
    flags = [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    # The text has no lines of code, which would change with every edit.
    facts = repr([jax.__version__, version, flags, topology, ids]) + lowered.as_text()
    key = hashlib.sha256(facts.encode()).hexdigest()
    here = () if topology else tuple(devices)
    return Compilation(bytecode.getvalue(), topology, ids, key, here)


def compile_all(
    jobs: Iterator[tuple[int, Compilation]], cache: Path, workers: int
) -> Iterator[tuple[int, Outcome]]:
    """Compiles jobs as they come, and yields what came of each, in any order.

    A job is taken when there is room for it. If the caller stops, processes are ended.
    """
    running: list[tuple[int, Path, subprocess.Popen[bytes]]] = []
    cache.mkdir(parents=True, exist_ok=True)
    is_more = True
    with tempfile.TemporaryDirectory(prefix="meshlayout-plan-") as folder:
        try:
            while is_more or running:
                while is_more and len(running) < workers:
                    index, job = next(jobs, (-1, None))
                    is_more = job is not None
                    if job is None:
                        break
                    target = cache / job.key
                    if not target.exists() and job.topology:
                        path = Path(folder) / job.key
                        path.write_bytes(pickle.dumps((job, target)))
                        running.append((index, target, _process(path)))
                        continue
                    if not target.exists():
                        _compile(job, target)
                    yield index, pickle.loads(target.read_bytes())
                for each in [*running]:
                    index, target, process = each
                    if process.poll() is not None:
                        running.remove(each)
                        if target.exists():
                            yield index, pickle.loads(target.read_bytes())
                            continue
                        log = (Path(folder) / f"{target.name}.log").read_text()
                        line = "".join(log.splitlines()[-1:])
                        status = f"the compiler ended with status {process.returncode}"
                        yield index, Outcome(error=f"{status}: {line}")
                time.sleep(0.05 if running else 0)
        finally:
            for *_, process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _process(path: Path) -> "subprocess.Popen[bytes]":
    """Starts a process that compiles the job in a file."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    program = "from meshlayout.planning import compilation; compilation.main()"
    with Path(f"{path}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", program, str(path)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,  # Ctrl-C ends the plan, which then ends these
        )


def main() -> None:
    """Compiles the job in a file, in a process of its own."""
    _compile(*pickle.loads(Path(sys.argv[1]).read_bytes()))


def _compile(job: Compilation, target: Path) -> None:
    """Compiles in this process, and writes what came of it."""
    known = job.devices or describe_devices(job.topology)
    by_id = {device.id: device for device in known}
    start = time.monotonic()
    try:
        text, sizes = _jax.compile_module(job.module, [by_id[x] for x in job.ids])
    except jax.errors.JaxRuntimeError as error:
        refusal = memory_refusal(error) or (0.0, 0.0)
        line = str(error).splitlines()[0]
        outcome = Outcome("", *refusal, line, time.monotonic() - start)
    else:
        names = ("argument", "output", "temp", "generated_code", "alias")
        *parts, alias = (getattr(sizes, f"{name}_size_in_bytes") for name in names)
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        seconds = time.monotonic() - start
        outcome = Outcome(text, sum(parts) - alias, 0.0, "", seconds, host)
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    partial.write_bytes(pickle.dumps(outcome))
    partial.replace(target)
