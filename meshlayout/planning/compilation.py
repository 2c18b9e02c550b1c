"""Compilations in processes of their own, and what they found in a cache on disk.

libtpu wants a process for each compilation, which also can be ended at any time. What
JAX would hand to the compiler is caught on its way there: the module and its options,
which say all there is to know; a process gets no code of the user's.
"""

# pyright: reportPrivateImportUsage=false

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
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax._src import compiler  # noqa: TID251
from jax._src.interpreters import mlir  # noqa: TID251
from jax._src.lib import xla_client  # noqa: TID251

from meshlayout.mesh import Mesh
from meshlayout.planning.chips import describe_devices, memory_refusal


@dataclass(frozen=True)
class Compilation:
    """What a process is to compile."""

    module: bytes
    options: bytes
    topology: str  # or a number of CPU devices
    ids: tuple[int, ...]
    key: str  # the name of its outcome in a cache


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


class _CaughtError(Exception):
    """Ends a compilation that is to go on elsewhere."""


def job_of(lowered: jax.stages.Lowered, mesh: Mesh, topology: str) -> Compilation:
    """Returns what JAX would give to the compiler for a lowered program."""
    caught: list[Any] = []
    original, thread = compiler.compile_or_get_cached, threading.get_ident()

    def catch(*arguments: Any, **named: Any) -> Any:
        if threading.get_ident() != thread:
            return original(*arguments, **named)
        module, options = arguments[1], arguments[3]
        caught.extend([mlir.module_to_bytecode(module), options.SerializeAsString()])
        raise _CaughtError

    caught_here = contextlib.suppress(_CaughtError)
    with mock.patch.object(compiler, "compile_or_get_cached", catch), caught_here:
        lowered.compile()
    module, options = caught
    ids = tuple(int(device.id) for device in mesh.devices.flat)
    versions = [jax.__version__, topology, ids]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions.append(importlib.metadata.version("libtpu"))
    # The text has no lines of code, which would change with every edit.
    parts = lowered.as_text().encode(), options, repr(versions).encode()
    key = hashlib.sha256(b"".join(parts)).hexdigest()
    return Compilation(module, options, topology, ids, key)


def compile_anew(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles without JAX's caches: XLA cannot save what a CPU program was read from.

    tests/test_planning.py notices if it can.
    """

    def anew(*arguments: Any, **named: Any) -> Any:
        del named  # a profiler
        client, module, _, options, callbacks, devices = arguments[:6]
        load = compiler.backend_compile_and_load
        return load(client, module, devices, options, callbacks)

    # An option, with its default, is a program of its own to the cache in memory.
    with mock.patch.object(compiler, "compile_or_get_cached", anew):
        return lowered.compile({"xla_dump_hlo_as_text": False})


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
                        continue
                    path = Path(folder) / str(next(numbers))
                    running[index] = job, path, _started(job, path)
                for index, (job, path, process) in [*running.items()]:
                    if process.poll() is not None:
                        del running[index]
                        outcome = _outcome(path, process.returncode)
                        if not outcome.error.startswith(_ENDED):
                            _write(cache / job.key, outcome)
                        yield index, outcome
                time.sleep(0.05)
        finally:
            for *_, process in running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _started(job: Compilation, path: Path) -> "subprocess.Popen[bytes]":
    path.write_bytes(pickle.dumps(job))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    if job.topology.isdecimal():
        environment["JAX_NUM_CPU_DEVICES"] = job.topology
    with path.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(path)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,  # Ctrl-C ends the plan, which then ends these
        )


def _outcome(path: Path, status: int) -> Outcome:
    if path.with_suffix(".outcome").exists():
        return pickle.loads(path.with_suffix(".outcome").read_bytes())
    lines = path.with_suffix(".log").read_text(errors="replace").splitlines()
    return Outcome(error=f"{_ENDED} {status}: {''.join(lines[-1:])}")


def _write(path: Path, outcome: Outcome) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_bytes(pickle.dumps(outcome))
    partial.replace(path)


def outcome_of(compile_program: Callable[[], tuple[str, Any]]) -> Outcome:
    """Returns what comes of a compilation in this process: a text, and the memory."""
    start = time.monotonic()
    try:
        text, memory = compile_program()
    except jax.errors.JaxRuntimeError as error:
        line = str(error).splitlines()[0]
        refusal = memory_refusal(error) or (0.0, 0.0)
        return Outcome("", *refusal, line, time.monotonic() - start)
    names = ("argument", "output", "temp", "generated_code", "alias")
    *sizes, alias = (getattr(memory, f"{name}_size_in_bytes") for name in names)
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = time.monotonic() - start
    return Outcome(text, sum(sizes) - alias, seconds=seconds, host_bytes=host)


def main() -> None:
    """Compiles the job in a file, in a process of its own; writes what came of it."""
    path = Path(sys.argv[1])
    job: Compilation = pickle.loads(path.read_bytes())
    is_here = job.topology.isdecimal()
    known = jax.devices() if is_here else describe_devices(job.topology)
    by_id = {device.id: device for device in known}
    devices = tuple(by_id[number] for number in job.ids)
    options = xla_client.CompileOptions.ParseFromString(job.options)

    def compile_program() -> tuple[str, Any]:
        with mlir.make_ir_context():
            module = mlir.ir.Module.parse(job.module)
            client, those = devices[0].client, xla_client.DeviceList(devices)
            arguments = client, module, those, options, []
            program = compiler.backend_compile_and_load(*arguments)
        text = "\n\n".join(part.to_string() for part in program.hlo_modules())
        return text, program.get_compiled_memory_stats()

    _write(path.with_suffix(".outcome"), outcome_of(compile_program))
