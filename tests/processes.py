"""Jobs of several real JAX processes on this machine, for tests.

A job runs a function of a module, by name, on every process; a test looks at what the
functions returned. Starting processes takes seconds, so that a module's tests share one
job, and jobs that leave nothing behind share processes.
"""

import atexit
import contextlib
import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
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
    shared: bool = False,
) -> list[Any]:
    """Runs a function on several JAX processes, and returns what each one returned.

    When a process fails or the time is over, all are killed, and what they printed is
    in the error.

    Args:
        num_processes: How many.
        function: A function at the top of a module, or `"module:name"`.
        *args: Its arguments, as JSON takes them, and gives back what it returns.
        devices_per_process: Virtual CPU devices of each process.
        timeout_s: How long it may take.
        initialize: Whether the processes are one program before the function is called;
            otherwise it is up to the function.
        shared: Whether the processes may have run other jobs and will run more: for
            functions that leave everything as it was, and patch nothing.
    """
    if not isinstance(function, str):
        function = f"{function.__module__}:{function.__name__}"
    deadline = time.monotonic() + timeout_s
    # What a test sets in the environment is for its own processes.
    env = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    key = (num_processes, devices_per_process, initialize, tuple(sorted(env.items())))
    group = _shared.pop(key, None) if shared else None
    group = group or _Group(num_processes, devices_per_process, initialize=initialize)
    try:
        results = group.run({"function": function, "args": args}, deadline)
        if shared:
            _shared[key] = group
        else:
            group.end(deadline)
    finally:
        if not shared or key not in _shared:
            group.close()
    return results


class _Group:
    """Processes that run one job after the other."""

    def __init__(
        self, num_processes: int, devices_per_process: int, *, initialize: bool
    ) -> None:
        self._folder = Path(tempfile.mkdtemp())
        self._num_jobs = 0
        env = {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
            "JAX_NUM_PROCESSES": str(num_processes),
        }
        args = [str(devices_per_process), "together" if initialize else "alone"]
        self._processes = [
            _start(index, self._folder, env, args) for index in range(num_processes)
        ]

    def run(self, job: dict[str, Any], deadline: float) -> list[Any]:
        self._num_jobs += 1
        files = []
        for index, process in enumerate(self._processes):
            files.append(self._folder / f"{self._num_jobs}-{index}.json")
            line = json.dumps({**job, "file": str(files[-1])})
            process.stdin.write(f"{line}\n".encode())
            process.stdin.flush()
        self._wait(deadline, [file.exists for file in files])
        return [json.loads(file.read_text()) for file in files]

    def end(self, deadline: float) -> None:
        for process in self._processes:
            process.stdin.close()
        ended = [lambda p=process: p.poll() is not None for process in self._processes]
        self._wait(deadline, ended)

    def _wait(self, deadline: float, tests: Sequence[Callable[[], bool]]) -> None:
        while True:
            # In this order: a process may end while the others are looked at.
            codes = [process.poll() for process in self._processes]
            waits = [index for index, is_done in enumerate(tests) if not is_done()]
            failed = [
                index
                for index, code in enumerate(codes)
                if code or (code == 0 and index in waits)
            ]
            if failed:
                what = f"process {failed[0]} ended with {codes[failed[0]]}"
            elif not waits:
                return
            elif time.monotonic() > deadline:
                what = f"processes {waits} hang"
            else:
                time.sleep(0.02)
                continue
            said = [
                f"process {index} printed:\n{_output(index, self._folder).read_text()}"
                for index in range(len(codes))
            ]
            raise AssertionError("\n".join([what, *said]))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)


# Those that wait for another job.
_shared: dict[Any, _Group] = {}


@atexit.register
def _close_shared() -> None:
    while _shared:
        _shared.popitem()[1].close()


def _start(index: int, folder: Path, job_env: dict[str, str], args: list[str]) -> Any:
    command = [sys.executable, "-m", "tests.processes", *args]
    env = {
        **os.environ,
        **job_env,
        "JAX_PROCESS_ID": str(index),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    options = {"cwd": ROOT, "env": env, "stderr": subprocess.STDOUT}
    with _output(index, folder).open("wb") as output:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, **options
        )


def _output(index: int, folder: Path) -> Path:
    return folder / f"{index}.txt"


def free_port() -> int:
    """Returns a port of this machine that nobody uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _main(devices: str, start: str) -> None:
    """Runs the jobs of one process, a line of input each."""
    jax.config.update("jax_num_cpu_devices", int(devices))
    _write_compilations()
    if start == "together":
        ml.initialize(timeout_s=60)
    for line in sys.stdin:
        job = json.loads(line)
        module, name = job["function"].split(":")
        result = getattr(importlib.import_module(module), name)(*job["args"])
        file = Path(job["file"])
        # Whole from the first moment that it exists.
        file.with_suffix(".part").write_text(json.dumps(result))
        file.with_suffix(".part").rename(file)
    ml.shutdown()


def _write_compilations() -> None:
    """Lets all processes write to JAX's compilation cache, as only process 0 does.

    The keys of the others are different, so that they would compile everything in each
    run. If JAX changes this, tests with processes only take longer.
    """
    from jax._src import compiler  # noqa: TID251

    state = SimpleNamespace(process_id=0)
    setattr(compiler, "distributed", SimpleNamespace(global_state=state))  # noqa: B010


if __name__ == "__main__":
    _main(*sys.argv[1:])
