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


# A number, a program, its devices in the order of the mesh, and their topology, which
# is empty if they are here.
Job: TypeAlias = tuple[int, jax.stages.Lowered, Sequence[_jax.Device], str]

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
    """Compiles programs as they come, and yields what came of each, in any order.

    One is taken when there is room for it. If the caller stops, processes are ended.
    """
    cache.mkdir(parents=True, exist_ok=True)
    running: dict[int, tuple[Path, subprocess.Popen[bytes]]] = {}
    try:
        while True:
            while len(running) < workers and (job := next(jobs, None)):
                index, lowered, devices, topology = job
                call = _arguments(lowered, devices, topology, cache)
                target = call[0]
                if topology and not target.exists():
                    running[index] = target, _process(call)
                    continue
                if not target.exists():
                    _compile(*call)
                yield index, pickle.loads(target.read_bytes())
            if not running:
                return
            for index, (target, process) in [*running.items()]:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    _, log = process.communicate(timeout=0.1)
                    del running[index]
                    if target.exists():
                        yield index, pickle.loads(target.read_bytes())
                    else:
                        status = f"the compiler ended with status {process.returncode}"
                        lines = [status, *log.decode().splitlines()[-1:]]
                        yield index, Outcome(error=": ".join(lines))
    finally:
        for _, process in running.values():
            process.kill()
            process.communicate()


def _arguments(
    lowered: jax.stages.Lowered,
    devices: Sequence[_jax.Device],
    topology: str,
    cache: Path,
) -> tuple[Path, str, tuple[int, ...], bytes]:
    """Returns the arguments of `_compile`; the file is named by text and compiler."""
    ids, module = tuple(int(x.id) for x in devices), lowered.compiler_ir("stablehlo")
    flags = [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    version = devices[0].client.platform_version
    # The text has no lines of code, which would change with every edit.
    facts = repr([jax.__version__, version, flags, topology, ids]) + lowered.as_text()
    target = cache / hashlib.sha256(facts.encode()).hexdigest()
    getattr(module, "operation").write_bytecode(file=(file := io.BytesIO()))  # noqa: B009
    return target, topology or devices[0].platform, ids, file.getvalue()


def _process(call: tuple[object, ...]) -> "subprocess.Popen[bytes]":
    """Starts a process that compiles."""
    path = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryFile() as source:
        pickle.dump((_compile, *call), source)
        source.seek(0)
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
            stdin=source,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C ends the plan, which then ends these
        )


def _compile(target: Path, place: str, ids: Sequence[int], module: bytes) -> None:
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
