"""Compilations in processes of their own, and what they found in a cache on disk.

libtpu wants a process for each compilation, which also can be ended at any time. What
JAX would hand to the compiler is caught on its way there: the module and its options,
which say all there is to know; a process gets no code of the user's.
"""

import contextlib
import hashlib
import importlib.metadata
import itertools
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jaxlib
from jax._src import compiler  # noqa: TID251
from jax._src.interpreters import mlir  # noqa: TID251
from jax._src.lib import xla_client  # noqa: TID251

from meshlayout.mesh import Mesh
from meshlayout.planning.chips import describe_devices, memory_refusal


@dataclass(frozen=True)
class Job:
    """What a process is to compile."""

    module: bytes
    options: bytes
    topology: str  # or a number of CPU devices
    ids: tuple[int, ...]
    key: str  # the name of its result in a cache


@dataclass(frozen=True)
class Outcome:
    """What a compiler said about a program.

    Attributes:
        text: The compiled program, or empty.
        peak_bytes: Arguments, new results, temporaries and code, by the compiler; what
            the program would need, if it was refused.
        memory_bytes: What there is, if it was refused for memory.
        error: The compiler's first line, if it failed.
        seconds: That it took.
        host_bytes: Of memory that the process took at the most.
    """

    text: str = ""
    peak_bytes: float = 0.0
    memory_bytes: float = 0.0
    error: str = ""
    seconds: float = 0.0
    host_bytes: int = 0


_PROGRAM = "from meshlayout.planning import compilation; compilation.main()"


class _CaughtError(Exception):
    """Ends a compilation that is to go on elsewhere."""


def job_of(lowered: jax.stages.Lowered, mesh: Mesh, topology: str) -> Job:
    """Returns what JAX would give to the compiler for a lowered program."""
    caught: list[Any] = []

    def catch(backend: Any, module: Any, devices: Any, options: Any, *_: Any) -> Any:
        data = mlir.module_to_bytecode(module), options.SerializeAsString()
        caught.extend(data)
        raise _CaughtError

    caught_here = contextlib.suppress(_CaughtError)
    with mock.patch.object(compiler, "compile_or_get_cached", catch), caught_here:
        lowered.compile()
    module, options = caught
    ids = tuple(int(device.id) for device in mesh.devices.flat)
    # The text has no lines of code, which would change with every edit.
    version = (jaxlib.__version__, _libtpu_version(), topology, ids)
    parts = lowered.as_text().encode(), options, repr(version).encode()
    return Job(
        module, options, topology, ids, hashlib.sha256(b"".join(parts)).hexdigest()
    )


def _libtpu_version() -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("libtpu")
    return ""


def compile_all(
    jobs: Iterator[tuple[Any, Job]], cache: Path | None, workers: int
) -> Iterator[tuple[Any, Outcome]]:
    """Compiles jobs as they come, and yields what came of each, in any order.

    Nothing is taken from the jobs until there is room for it. If the caller stops, the
    processes are ended.
    """
    numbers = itertools.count()
    running: dict[Any, tuple[Any, Job, Path, subprocess.Popen[bytes], float]] = {}
    with tempfile.TemporaryDirectory(prefix="meshlayout-plan-") as folder:
        try:
            is_more = True
            while is_more or running:
                while is_more and len(running) < workers:
                    name, job = next(jobs, (None, None))
                    is_more = job is not None
                    if job is None:
                        break
                    saved = cache and cache / f"{job.key}.pickle"
                    if saved and saved.exists():
                        yield name, pickle.loads(saved.read_bytes())
                        continue
                    path = Path(folder) / str(next(numbers))
                    path.write_bytes(pickle.dumps(job))
                    process = _started(job, path)
                    running[process.pid] = name, job, path, process, time.monotonic()
                for pid, (name, job, path, process, start) in [*running.items()]:
                    if process.poll() is None:
                        continue
                    del running[pid]
                    outcome = _outcome(path, process, time.monotonic() - start)
                    if cache and not outcome.error.startswith("the compiler ended"):
                        _save(cache / f"{job.key}.pickle", outcome)
                    yield name, outcome
                time.sleep(0.05)
        finally:
            for *_, process, _ in running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _started(job: Job, path: Path) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    if job.topology.isdecimal():
        environment["JAX_NUM_CPU_DEVICES"] = job.topology
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(path)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=path.with_suffix(".log").open("wb"),
        start_new_session=True,  # Ctrl-C ends the plan, which then ends these
    )


def _outcome(path: Path, process: Any, seconds: float) -> Outcome:
    result = path.with_suffix(".result")
    if result.exists():
        return pickle.loads(result.read_bytes())
    lines = path.with_suffix(".log").read_text(errors="replace").splitlines()
    last = lines[-1] if lines else ""
    error = f"the compiler ended with status {process.returncode}: {last}"
    return Outcome(error=error, seconds=seconds)


def _save(path: Path, outcome: Outcome) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(pickle.dumps(outcome))
    partial.replace(path)


def compiled(lower: Callable[[], jax.stages.Compiled]) -> Outcome:
    """Returns what came of a compilation in this process."""
    start = time.monotonic()
    try:
        program = lower()
        return _read(program.as_text() or "", program.memory_analysis(), start)
    except jax.errors.JaxRuntimeError as error:
        return _refused(error, start)


def _read(text: str, memory: Any, start: float) -> Outcome:
    names = ("argument", "output", "temp", "generated_code", "alias")
    sizes = [getattr(memory, f"{name}_size_in_bytes") for name in names]
    peak = sum(sizes[:-1]) - sizes[-1]
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = time.monotonic() - start
    return Outcome(text, peak, seconds=seconds, host_bytes=host)


def _refused(error: BaseException, start: float) -> Outcome:
    line = str(error).splitlines()[0]
    needed, available = memory_refusal(error) or (0.0, 0.0)
    seconds = time.monotonic() - start
    return Outcome("", needed, available, line, seconds)


def main() -> None:
    """Compiles the job in a file, and writes what came of it beside."""
    path = Path(sys.argv[1])
    job: Job = pickle.loads(path.read_bytes())
    start = time.monotonic()
    is_here = job.topology.isdecimal()
    known = jax.devices() if is_here else describe_devices(job.topology)
    by_id = {device.id: device for device in known}
    devices = tuple(by_id[number] for number in job.ids)
    options = xla_client.CompileOptions.ParseFromString(job.options)
    with mlir.make_ir_context():
        module = mlir.ir.Module.parse(job.module)
        try:
            program = compiler.backend_compile_and_load(
                devices[0].client, module, xla_client.DeviceList(devices), options, []
            )
            text = "\n\n".join(part.to_string() for part in program.hlo_modules())
            outcome = _read(text, program.get_compiled_memory_stats(), start)
        except jax.errors.JaxRuntimeError as error:
            outcome = _refused(error, start)
    partial = path.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(outcome))
    partial.replace(path.with_suffix(".result"))
