"""Jobs of several real JAX processes on this machine, for tests.

A job runs a function of a module, by name, on every process; a test looks at what the
functions returned. One job takes seconds, so that a module's tests share one.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

import meshlayout as ml


ROOT = Path(__file__).parent.parent


def run_processes(
    num_processes: int,
    function: Callable[..., Any] | str,
    *args: Any,
    devices_per_process: int = 2,
    timeout_s: float = 120,
    initialize: bool = True,
) -> list[Any]:
    """Runs a function on several JAX processes, and returns what each one returned.

    When a process fails or the time is over, all are killed, and what they printed is
    in the error.

    Args:
        num_processes: How many.
        function: A function at the top of a module, or `"module:name"`.
        *args: Its arguments, as JSON takes them.
        devices_per_process: Virtual CPU devices of each process.
        timeout_s: How long it may take.
        initialize: Whether the processes are one program before the function is called;
            otherwise it is up to the function.

    Returns:
        What the function returned on each process, as JSON gives it back.

    Raises:
        AssertionError: If a process fails, or the time is over.
    """
    if not isinstance(function, str):
        function = f"{function.__module__}:{function.__name__}"
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        job = {
            "devices": devices_per_process,
            "initialize": initialize,
            "function": function,
            "args": args,
        }
        (where / "job.json").write_text(json.dumps(job))
        job_env = {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
            "JAX_NUM_PROCESSES": str(num_processes),
        }
        runs = [_start(index, where, job_env) for index in range(num_processes)]
        try:
            _wait(runs, where, time.monotonic() + timeout_s)
        finally:
            for run in runs:
                run.kill()
                run.wait()
        return [
            json.loads((where / f"{index}.json").read_text())
            for index in range(num_processes)
        ]


def _start(
    index: int, where: Path, job_env: dict[str, str]
) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tests.processes", str(index), str(where)]
    env = {
        **os.environ,
        **job_env,
        "JAX_PROCESS_ID": str(index),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": _search_path(),
    }
    with (where / f"{index}.txt").open("wb") as output:
        return subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT
        )


def _search_path() -> str:
    return os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


def _wait(
    runs: Sequence["subprocess.Popen[bytes]"], where: Path, deadline: float
) -> None:
    """Waits until all processes are done; raises AssertionError if that fails."""
    while True:
        codes = [run.poll() for run in runs]
        failed = [index for index, code in enumerate(codes) if code]
        if failed:
            what = f"process {failed[0]} ended with {codes[failed[0]]}"
        elif None not in codes:
            return
        elif time.monotonic() > deadline:
            what = (
                f"processes {[i for i, code in enumerate(codes) if code is None]} hang"
            )
        else:
            time.sleep(0.02)
            continue
        said = [
            f"process {index} printed:\n{(where / f'{index}.txt').read_text()}"
            for index in range(len(runs))
        ]
        raise AssertionError("\n".join([what, *said]))


def free_port() -> int:
    """Returns a port of this machine that nobody uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _main(index: int, where: Path) -> None:
    """Runs one process of a job."""
    job = json.loads((where / "job.json").read_text())
    jax.config.update("jax_num_cpu_devices", job["devices"])
    if job["initialize"]:
        ml.initialize(timeout_s=60)
    module, name = job["function"].split(":")
    result = getattr(importlib.import_module(module), name)(*job["args"])
    (where / f"{index}.json").write_text(json.dumps(result))
    ml.shutdown()


if __name__ == "__main__":
    _main(int(sys.argv[1]), Path(sys.argv[2]))
