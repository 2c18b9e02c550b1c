"""Compilations in processes of their own, and what they found in a cache on disk.

libtpu wants a process for each compilation, which also can be ended at any time. A
process gets the lowered program and the names of its devices, and no code of the
user's. For devices that are here, programs are compiled here.
"""

import hashlib
import io
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import jax

from meshlayout import _jax
from meshlayout.planning.chips import describe_devices, memory_refusal


# A number, a program, its devices in the order of the mesh, and the topology that
# describes them, or their platform if they are here.
Job: TypeAlias = tuple[int, tuple[jax.stages.Lowered, Sequence[_jax.Device], str]]

_PROGRAM = "import pickle, sys; f, *x = pickle.load(sys.stdin.buffer); f(*x)"


@dataclass(frozen=True)
class Outcome:
    """What a compiler said about a program."""

    text: str = ""
    peak_bytes: float = 0.0  # arguments, new results, temporaries and code
    memory_bytes: float = 0.0  # that there is, if it was refused for memory
    error: str = ""  # the compiler's first line


def compile_all(
    jobs: Iterator[Job], cache: Path, workers: int
) -> Iterator[tuple[int, Outcome]]:
    """Compiles programs, and yields what came of each, in their order.

    One is taken when there is room for it. If the caller stops, processes are ended.
    """
    cache.mkdir(parents=True, exist_ok=True)
    running: list[tuple[int, Path, subprocess.Popen[bytes] | None]] = []
    try:
        while True:
            while len(running) < workers and (job := next(jobs, None)):
                running.append((job[0], *_started(cache, *job[1])))
            if not running:
                return
            index, target, process = running[0]
            log = process.communicate()[1].decode() if process else ""
            del running[0]
            if target.exists():
                yield index, pickle.loads(target.read_bytes())
            elif process:
                status = f"the compiler ended with status {process.returncode}"
                yield index, Outcome(error=": ".join([status, *log.splitlines()[-1:]]))
    finally:
        for _, _, process in running:
            if process:
                process.kill()
                process.communicate()


def _started(
    cache: Path, lowered: jax.stages.Lowered, devices: Sequence[_jax.Device], place: str
) -> tuple[Path, "subprocess.Popen[bytes] | None"]:
    """Returns the file of a program's outcome, and the process that will write it."""
    ids, module = tuple(int(x.id) for x in devices), lowered.compiler_ir("stablehlo")
    flags = [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    version = devices[0].client.platform_version
    # The text has no lines of code, which would change with every edit.
    facts = repr([jax.__version__, version, flags, place, ids]) + lowered.as_text()
    target = cache / hashlib.sha256(facts.encode()).hexdigest()
    if target.exists():
        return target, None
    file, operation = io.BytesIO(), getattr(module, "operation")  # noqa: B009
    operation.write_bytecode(file=file)
    if ":" not in place:
        _compile(file.getvalue(), place, ids, target)
        return target, None
    path = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryFile() as source:
        pickle.dump((_compile, file.getvalue(), place, ids, target), source)
        source.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
            stdin=source,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C ends the plan, which then ends these
        )
    return target, process


def _compile(module: bytes, place: str, ids: Sequence[int], target: Path) -> None:
    """Compiles in this process, and writes what came of it."""
    every = describe_devices(place) if ":" in place else jax.devices(place)
    devices = {device.id: device for device in every}
    try:
        text, sizes = _jax.compile_module(module, [devices[x] for x in ids])
    except jax.errors.JaxRuntimeError as error:
        refusal = memory_refusal(error) or (0.0, 0.0)
        outcome = Outcome("", *refusal, str(error).splitlines()[0])
    else:
        names = ("argument", "output", "temp", "generated_code", "alias")
        *parts, alias = (getattr(sizes, f"{name}_size_in_bytes") for name in names)
        outcome = Outcome(text, sum(parts) - alias)
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    partial.write_bytes(pickle.dumps(outcome))
    partial.replace(target)
