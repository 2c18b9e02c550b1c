"""Compilations in processes of their own, and what they found in a cache on disk.

libtpu wants a process for each compilation, which also can be ended at any time. A
process gets the lowered program and the names of its devices, and no code of the
user's. For devices that are here, programs are compiled here.
"""

import contextlib
import hashlib
import io
import itertools
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
    """What a compiler said about a program.

    `peak_bytes` are arguments, new results, temporaries and code; of a program that was
    refused for memory, what it needs, and `memory_bytes` what there is.
    """

    text: str = ""
    peak_bytes: float = 0.0
    memory_bytes: float = 0.0
    error: str = ""  # the compiler's first line
    seconds: float = 0.0
    host_bytes: int = 0  # that the process took at the most


_PROGRAM = "from meshlayout.planning import compilation; compilation.main()"
_ENDED = "the compiler ended with status"


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
    running: dict[int, tuple[Compilation, Path, subprocess.Popen[bytes]]] = {}
    numbers, is_more = itertools.count(), True
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="meshlayout-plan-") as folder:
        try:
            while is_more or running:
                while is_more and len(running) < workers:
                    index, job = next(jobs, (-1, None))
                    is_more = job is not None
                    if job is None:
                        break
                    if (cache / job.key).exists():
                        yield index, pickle.loads((cache / job.key).read_bytes())
                    elif not job.topology:
                        yield index, _compiled(job, cache / job.key)
                    else:
                        path = Path(folder) / str(next(numbers))
                        running[index] = job, path, _started(job, path)
                for index, (job, path, process) in [*running.items()]:
                    if process.poll() is not None:
                        del running[index]
                        yield index, _outcome(path, cache / job.key, process.returncode)
                time.sleep(0.05 if running else 0)
        finally:
            for *_, process in running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _started(job: Compilation, path: Path) -> "subprocess.Popen[bytes]":
    path.write_bytes(pickle.dumps(job))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with path.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(path)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,  # Ctrl-C ends the plan, which then ends these
        )


def _outcome(path: Path, target: Path, status: int) -> Outcome:
    if path.with_suffix(".outcome").exists():
        outcome: Outcome = pickle.loads(path.with_suffix(".outcome").read_bytes())
        _write(target, outcome)
        return outcome
    lines = path.with_suffix(".log").read_text(errors="replace").splitlines()
    return Outcome(error=f"{_ENDED} {status}: {''.join(lines[-1:])}")


def _write(path: Path, outcome: Outcome) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_bytes(pickle.dumps(outcome))
    partial.replace(path)


def _compiled(job: Compilation, path: Path) -> Outcome:
    """Compiles in this process, and writes what came of it."""
    known = job.devices or describe_devices(job.topology)
    by_id = {device.id: device for device in known}
    start = time.monotonic()
    try:
        text, memory = _jax.compile_module(job.module, [by_id[x] for x in job.ids])
    except jax.errors.JaxRuntimeError as error:
        refusal = memory_refusal(error) or (0.0, 0.0)
        line = str(error).splitlines()[0]
        outcome = Outcome("", *refusal, line, time.monotonic() - start)
    else:
        names = ("argument", "output", "temp", "generated_code", "alias")
        *sizes, alias = (getattr(memory, f"{name}_size_in_bytes") for name in names)
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        seconds = time.monotonic() - start
        peak = sum(sizes) - alias
        outcome = Outcome(text, peak, seconds=seconds, host_bytes=host)
    _write(path, outcome)
    return outcome


def main() -> None:
    """Compiles the job in a file, in a process of its own."""
    path = Path(sys.argv[1])
    _compiled(pickle.loads(path.read_bytes()), path.with_suffix(".outcome"))
