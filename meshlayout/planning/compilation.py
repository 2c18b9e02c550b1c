"""Compilations in processes of their own, and what they found in a cache on disk.

libtpu wants a process for each compilation, which also can be ended at any time. A
process gets the lowered program and the names of its devices, and no code of the
user's. For devices that are here, programs are compiled here.
"""

import hashlib
import io
import os
import pickle
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import jax

from meshlayout import _jax
from meshlayout.planning.chips import describe_devices, memory_refusal


_PROGRAM = "import pickle, sys; f, *x = pickle.load(sys.stdin.buffer); f(*x)"


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
    bytecode, module = io.BytesIO(), lowered.compiler_ir("stablehlo")
    getattr(module, "operation").write_bytecode(file=bytecode)  # noqa: B009
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
    cache.mkdir(parents=True, exist_ok=True)
    running: dict[Future[Outcome], int] = {}
    processes: list[subprocess.Popen[bytes]] = []
    with ThreadPoolExecutor(workers) as threads:
        try:
            while True:
                while len(running) < workers and (next_job := next(jobs, None)):
                    index, job = next_job
                    target, process = cache / job.key, None
                    if job.topology and not target.exists():
                        process = _process()
                        processes.append(process)
                    future = threads.submit(_outcome, job, target, process)
                    running[future] = index
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        finally:
            for process in processes:
                process.kill()


def _process() -> "subprocess.Popen[bytes]":
    """Starts a process that calls a function of its input."""
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C ends the plan, which then ends these
    )


def _outcome(
    job: Compilation, target: Path, process: "subprocess.Popen[bytes] | None"
) -> Outcome:
    """Waits for what comes of a compilation, which may be known already."""
    if process is not None:
        _, log = process.communicate(pickle.dumps((_compile, job, target)))
        if not target.exists():
            status = f"the compiler ended with status {process.returncode}"
            return Outcome(error=": ".join([status, *log.decode().splitlines()[-1:]]))
    elif not target.exists():
        _compile(job, target)
    return pickle.loads(target.read_bytes())


def _compile(job: Compilation, target: Path) -> None:
    """Compiles in this process, and writes what came of it."""
    devices = {x.id: x for x in job.devices or describe_devices(job.topology)}
    start = time.monotonic()
    try:
        text, sizes = _jax.compile_module(job.module, [devices[x] for x in job.ids])
    except jax.errors.JaxRuntimeError as error:
        refusal, line = memory_refusal(error) or (0.0, 0.0), str(error).splitlines()[0]
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
