"""Jobs of several JAX processes in which one fails, for tests and benchmarks/faults.py.

Every process runs the same small program: batches, steps, saves and barriers. One of
them, the victim, commits a fault in the middle of one of these.
"""

import argparse
import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils  # noqa: TID251

import meshlayout as ml
from meshlayout.checkpoint.save import Save
from tests.processes import ROOT, free_port


PLACES = ("step", "save", "batch", "barrier")
FAULTS = ("kill", "stop", "crash", "stuck")

# The step before which the fault happens; two steps before it, a checkpoint is saved.
_STEP = 6


@dataclass(frozen=True)
class Ended:
    """A process of a job.

    Attributes:
        status: As `subprocess` has it: negative for a signal; None if it hung, and was
            killed by the test.
        output: What it printed.
        after_s: How long after the fault it ended.
    """

    status: int | None
    output: str
    after_s: float


def run_job(
    num_processes: int,
    fault: str,
    place: str,
    victim: int | None,
    *options: str,
    directory: Path | str = "",
    timeout_s: float = 60,
) -> list[Ended]:
    """Runs a job, and returns how each of its processes ended.

    Args:
        num_processes: How many.
        fault: What the victim does: see `commit`.
        place: Where: one of `PLACES`, or `"program"`, which the others wait to compile.
        victim: Its index; None for all processes.
        *options: More options of the program, as `--step-timeout=3`.
        directory: Where checkpoints are saved.
        timeout_s: How long after the fault to wait before the rest are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        address = f"127.0.0.1:{free_port()}"
        fault_file = Path(folder) / "fault"
        directory = directory or Path(folder) / "checkpoints"
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
        runs = []
        try:
            for index in range(num_processes):
                command = [
                    *(sys.executable, "-m", "tests.faults", address),
                    *(str(num_processes), str(index), fault, place),
                    *(f"--victim={-1 if victim is None else victim}",),
                    *(f"--directory={directory}", f"--file={fault_file}", *options),
                ]
                with (Path(folder) / f"{index}.txt").open("wb") as output:
                    runs.append(
                        subprocess.Popen(
                            command,
                            cwd=ROOT,
                            env=env,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                        )
                    )
            ends = _wait(runs, fault_file, timeout_s, waits_for_all=fault != "stop")
        finally:
            for run in runs:
                run.kill()
                run.wait()
        fault_s = _time_of(fault_file) or 0.0
        return [
            Ended(status, (Path(folder) / f"{index}.txt").read_text(), end_s - fault_s)
            for index, (status, end_s) in enumerate(ends)
        ]


def _time_of(file: Path) -> float | None:
    times = re.findall(r"[\d.]+\n", file.read_text() if file.exists() else "")
    return float(times[0]) if times else None


def _wait(
    runs: Sequence["subprocess.Popen[bytes]"],
    fault_file: Path,
    timeout_s: float,
    *,
    waits_for_all: bool,
) -> list[tuple[int | None, float]]:
    """Waits for the ends; for all but the victim if that is stopped."""
    ends: list[tuple[int | None, float]] = [(None, 0.0)] * len(runs)
    start_s = time.time()
    while True:
        for index, run in enumerate(runs):
            if ends[index][0] is None and run.poll() is not None:
                ends[index] = (run.returncode, time.time())
        missing = sum(status is None for status, _ in ends)
        fault_s = _time_of(fault_file) or start_s + 60  # a start takes some time
        is_late = time.time() > fault_s + timeout_s
        if not missing or is_late or (missing == 1 and not waits_for_all):
            return [(s, end_s or time.time()) for s, end_s in ends]
        time.sleep(0.02)


# The program.


def commit(fault: str, file: str) -> None:
    """Commits a fault.

    Args:
        fault: `"kill"`, by SIGKILL; `"stop"`, by SIGSTOP; `"crash"`, an exception;
            `"stuck"`, a process that is alive and does nothing; `"leave"`, status 3;
            `"preempt"`, status 75;
            `"abort"`, by SIGABRT in C; `"interrupt"`, KeyboardInterrupt;
            `"interrupts"`, a second one while it waits for the others. No faults:
            `"pause"`, which holds Python's lock for 4 seconds, and `"nap"`, which is
            stopped for 4 seconds; `"late"`, which takes 4 seconds longer.
        file: Where to write the time.
    """
    if fault in ("kill", "stop"):
        time.sleep(0.5)  # in the middle of it
    with Path(file).open("a") as output:
        output.write(f"{time.time()}\n")
    if fault in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        time.sleep(1)
    elif fault == "crash":
        raise ValueError("row 17 is not a number")
    elif fault == "stuck":
        time.sleep(10_000)
    elif fault == "late":
        time.sleep(4)
    elif fault == "leave":
        sys.exit(3)
    elif fault == "preempt":
        raise ml.checkpoint.Preempted(_STEP)
    elif fault == "abort":
        os.abort()
    elif fault == "interrupt":
        raise KeyboardInterrupt
    elif fault == "interrupts":
        command = f"sleep 2; kill -INT {os.getpid()}"
        subprocess.Popen(["/bin/sh", "-c", command])
        raise KeyboardInterrupt
    elif fault == "pause":
        ctypes.PyDLL(None).sleep(4)
    elif fault == "nap":
        command = f"sleep 4; kill -CONT {os.getpid()}"
        subprocess.Popen(["/bin/sh", "-c", command])
        os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    """Runs the program as one process of a job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("count", type=int)
    parser.add_argument("index", type=int)
    parser.add_argument("fault")
    parser.add_argument("place")
    parser.add_argument("--victim", type=int)
    parser.add_argument("--directory")
    parser.add_argument("--file")
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--heartbeat", type=float)
    parser.add_argument("--step-timeout", type=float)
    parser.add_argument("--catch", action="store_true")
    parser.add_argument("--shutdown", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    job = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 1)
    if job.bare:
        jax.distributed.initialize(
            job.address,
            job.count,
            job.index,
            cluster_detection_method="deactivate",
            coordinator_bind_address=job.address,
        )
    else:
        ml.initialize(
            job.address,
            job.count,
            job.index,
            heartbeat_timeout_s=job.heartbeat,
            step_timeout_s=job.step_timeout,
        )
    is_victim = job.victim in (-1, job.index)
    try:
        train(job, is_victim)
    except Exception:
        if job.shutdown:
            ml.shutdown()
        if not job.catch:
            raise
        sys.stdout.write("caught\n")
        time.sleep(3)


def train(job: argparse.Namespace, is_victim: bool) -> None:
    """Trains, with the fault on the victim."""
    mesh = ml.create_mesh({"batch": job.count})
    step = 0

    def fault_at(place: str) -> None:
        if is_victim and place == job.place and step in (_STEP, job.steps):
            commit(job.fault, job.file)

    class Rows:
        def __len__(self) -> int:
            return job.steps * job.count

        def __getitem__(self, row: int) -> Any:
            fault_at("batch")
            return np.ones(4, np.float32)

    await_response = Save._await

    def faulty_await(save: Any, response: Any) -> Any:
        fault_at("save")
        return await_response(save, response)

    Save._await = faulty_await

    @ml.compile_step
    def train_step(state: Any, batch: Any) -> Any:
        return {"w": state["w"] + batch.sum()}, jnp.sum(batch)

    @ml.compile_step
    def other_step(state: Any, batch: Any) -> Any:
        return state, jnp.max(batch)

    state = {"w": jax.device_put(jnp.zeros(4), ml.Layout.replicated(mesh, 1).sharding)}
    data = ml.distribute_dataset(
        Rows(), mesh, global_batch_size=job.count, prefetch=0, batched=False
    )
    with ml.Checkpointer(job.directory) as checkpointer:
        for batch in data:
            step += 1
            if job.place == "raw":
                fault_at("raw")
                float(jax.jit(jnp.sum)(batch))
            fault_at("step")
            state, total = train_step(state, batch)
            assert float(total) == 4 * job.count
            if step == _STEP - 2:
                checkpointer.save(step, state)
                checkpointer.wait()
            if step == _STEP and job.place == "program":
                fault_at("program")
                state, _ = other_step(state, batch)
            if step == _STEP:
                fault_at("barrier")
                if job.bare:
                    multihost_utils.sync_global_devices("test")
                else:
                    ml.cluster.barrier("test")
                checkpointer.save(step, state)
                checkpointer.wait()
    fault_at("end")
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main()
