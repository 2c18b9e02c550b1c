"""Programs of several JAX processes in which one fails, for tests and benchmarks.

Every process runs the same small program: it starts, creates a state, takes batches and
steps, saves and meets. One of them, the victim, commits a fault at one of these places.
The processes are forked from one that has imported everything (`python -m
tests.faults`); with `is_launched`, the launcher starts them.
"""

import ctypes
import functools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import meshlayout as ml
from meshlayout.checkpoint.save import Save
from tests.processes import ROOT, free_port


PLACES = ("start", "create", "batch", "step", "host", "save", "barrier", "end")
FAULTS = (
    *("kill", "stop", "exception", "exit 3", "SystemExit 3", "exit 0"),
    *("os._exit 0", "os._exit 5", "segfault", "abort", "Ctrl-C"),
)
# A shell's background job has it ignored, and so would all processes here.
signal.signal(signal.SIGINT, signal.default_int_handler)

STEPS, _FAULTY = 8, 5  # how many steps, and the one with the fault


@dataclass(frozen=True)
class Ended:
    """A process of a job, or the launcher.

    Attributes:
        status: As `subprocess` has it; None if it hung, and was killed by the test.
        output: What it printed.
        after_s: How long after the fault it ended.
    """

    status: int | None
    output: str
    after_s: float


def run_job(
    count, fault, place, victim, *, is_launched=False, directory="", **options
) -> list[Ended]:
    """Runs a job, and returns how its processes ended; only the launcher if launched.

    Args:
        count: The number of processes.
        fault: What the victim does: see `commit`.
        place: Where: one of `PLACES`, or another name in `train`.
        victim: Its index; None for all processes.
        is_launched: Whether the launcher starts the processes.
        directory: Where checkpoints are saved.
        **options: `step_timeout_s`, `heartbeat_timeout_s`; `timeout_s`, how long after
            the fault to wait before the rest are killed; `ends`, how the program ends.
    """
    timeout_s = options.pop("timeout_s", 40)
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "fault": fault,
            "place": place,
            "victim": victim,
            **options,
            "mark": f"{folder}/fault",
            "directory": directory or f"{folder}/saved",
        }
        variables = {"MESHLAYOUT_FAULT": json.dumps(job), "JAX_PLATFORMS": "cpu"}
        address = f"127.0.0.1:{free_port()}"
        others = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count)}
        runs = (
            [_Launched(count, f"{folder}/launch.txt", variables)]
            if is_launched
            else [
                _server().fork(
                    f"{folder}/{index}.txt",
                    {**variables, **others, "JAX_PROCESS_ID": str(index)},
                )
                for index in range(count)
            ]
        )
        start_s, mark = time.time(), Path(f"{folder}/fault")
        while any(run.status is None for run in runs):
            fault_s = float(mark.read_text() or 0) if mark.exists() else 0.0
            alive = [i for i, run in enumerate(runs) if run.status is None]
            is_late = time.time() > (fault_s or start_s + 60) + timeout_s
            if is_late or (fault == "stop" and not is_launched and alive == [victim]):
                for run in runs:
                    run.kill()
                break
            time.sleep(0.02)
        fault_s = float(mark.read_text() or 0) if mark.exists() else 0.0
        return [
            Ended(run.status, Path(run.output).read_text(), run.end_s - fault_s)
            for run in runs
        ]


class _Forked:
    """A process that the server has forked; `status` is None while it runs."""

    def __init__(self, output):
        self.output, self.status, self.end_s = output, None, time.time()
        self.pid = queue.SimpleQueue()

    def kill(self):
        if self.status is None:
            os.kill(self.pid.get(timeout=60), signal.SIGKILL)
            self.end_s = time.time()


class _Server:
    """A process that has imported everything, and forks."""

    def __init__(self):
        self._runs, self._lock = {}, threading.Lock()
        search_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults"],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": search_path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def fork(self, output, variables):
        """Forks a process, with its output in a file."""
        run = _Forked(output)
        Path(output).touch()
        with self._lock:
            number = len(self._runs)
            self._runs[number] = run
            line = json.dumps([number, output, variables])
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        return run

    def _listen(self):
        for line in self._process.stdout or ():
            kind, number, value = json.loads(line)
            run = self._runs[number]
            if kind == "pid":
                run.pid.put(value)
            elif run.end_s is not None:
                run.end_s, run.status = time.time(), value


@functools.cache
def _server():
    return _Server()


class _Launched:
    """A run of the launcher."""

    def __init__(self, count, output, variables):
        self.output, self._end_s = output, None
        search_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        with Path(output).open("wb") as file:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "meshlayout.launch", "-n", str(count)),
                    *("-m", "tests.faults"),
                ],
                cwd=ROOT,
                env={**os.environ, **variables, "PYTHONPATH": search_path},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    @property
    def status(self):
        status = self._process.poll()
        if status is not None:
            self._end_s = self._end_s or time.time()
        return status

    @property
    def end_s(self):
        return self._end_s or time.time()

    def kill(self):
        self._process.kill()


# The program.


def commit(job) -> None:
    """Commits a fault, and writes down when."""
    fault = job["fault"]
    with Path(job["mark"]).open("w") as file:
        file.write(str(time.time()))
    name, _, number = fault.partition(" ")
    if name == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif name == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1)
    elif name == "exception":
        raise ValueError("row 17 is not a number")
    elif name == "connection":
        raise ConnectionError("Connection refused by my database")
    elif name == "exit":
        sys.exit(int(number))
    elif name == "SystemExit":
        raise SystemExit(int(number))
    elif name == "os._exit":
        os._exit(int(number))
    elif name == "preempt":
        raise ml.checkpoint.Preempted(_FAULTY)
    elif name == "segfault":
        ctypes.string_at(0)
    elif name == "abort":
        os.abort()
    elif name == "Ctrl-C":
        is_launched = "MESHLAYOUT_LAUNCHER" in os.environ
        os.kill(os.getppid() if is_launched else os.getpid(), signal.SIGINT)
        time.sleep(5)
    elif name == "lock":  # a PyDLL does not release Python's lock
        ctypes.PyDLL(None).sleep(int(number))
    elif name == "sleep":
        time.sleep(int(number))


def main() -> None:
    """Runs the program as one process of a job."""
    job = json.loads(os.environ["MESHLAYOUT_FAULT"])
    jax.config.update("jax_num_cpu_devices", 1)
    timeouts = {k: v for k, v in job.items() if k.endswith("_timeout_s")}
    ml.initialize(timeout_s=120, **timeouts)
    ends = job.get("ends")
    if ends == "finally":
        try:
            train(job)
        finally:
            ml.shutdown()
        return
    train(job)
    {None: lambda: None, "ml": ml.shutdown, "jax": jax.distributed.shutdown}[ends]()


def train(job) -> None:
    """Trains, with the fault on the victim."""
    is_victim = job["victim"] in (None, ml.cluster.process_index())
    step = 0

    def fault_at(place):
        if (
            is_victim
            and place == job["place"]
            and (step in (0, _FAULTY, STEPS) or place == "trace")
        ):
            job["place"] = ""  # once
            commit(job)

    fault_at("start")
    mesh, count = ml.create_mesh(), jax.process_count()

    def build():
        fault_at("create")
        return {"w": jnp.zeros(4)}

    class Rows:
        def __len__(self):
            return STEPS * count

        def __getitem__(self, row):
            if step:
                fault_at("batch")
            return np.ones(4, np.float32)

    write = Save._write

    def faulty_write(save):
        fault_at("save thread")
        write(save)

    Save._write = faulty_write

    @ml.compile_step
    def train_step(state, batch):
        fault_at("trace")
        return {"w": state["w"] + batch.sum()}, jnp.sum(batch)

    state = ml.create(build, ml.LayoutMap(mesh, default=(...,)))
    raw = jax.jit(lambda x: jnp.sum(x))
    data = ml.distribute_dataset(
        Rows(), mesh, global_batch_size=count, prefetch=0, batched=False
    )
    with ml.Checkpointer(job["directory"]) as checkpointer:
        for batch in data:
            step += 1
            if job["place"] == "raw":
                fault_at("raw")
                float(raw(batch["x"] if isinstance(batch, dict) else batch))
            fault_at("step")
            state, total = train_step(state, batch)
            assert float(total) == 4 * count
            fault_at("host")
            if step in (_FAULTY - 2, _FAULTY):
                checkpointer.save(step, state)
                fault_at("save")
                checkpointer.wait()
            if step == _FAULTY:
                fault_at("barrier")
                ml.cluster.barrier("test")
    if job["fault"] == "early":  # the victim ends, and the others go on alone
        if not is_victim:
            time.sleep(15)
    elif job["fault"] == "needed" and not is_victim:
        time.sleep(4)
        Path(job["mark"]).write_text(str(time.time()))
        ml.cluster.barrier("the last")
    fault_at("end")
    print(f"done {ml.cluster.process_index()}", flush=True)  # noqa: T201


def _serve() -> None:
    """Forks a process for each line of input; returns in it."""
    warnings.filterwarnings("ignore", "os.fork")
    for line in sys.stdin:
        number, output, variables = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.environ.update(variables)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            file = os.open(output, os.O_WRONLY | os.O_APPEND)
            os.dup2(file, 1)
            os.dup2(file, 2)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return
        os.write(1, f'["pid", {number}, {pid}]\n'.encode())

        def reap(number=number, pid=pid):
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.write(1, f'["end", {number}, {status}]\n'.encode())

        threading.Thread(target=reap, daemon=True).start()
    os._exit(0)


if __name__ == "__main__":
    if "MESHLAYOUT_FAULT" not in os.environ:
        _serve()
    main()
