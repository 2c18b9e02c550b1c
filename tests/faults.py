"""Programs of several JAX processes in which one fails, for tests and benchmarks.

Every process runs the same small program: it starts, creates a state, takes batches and
steps, saves and meets. One of them, the victim, commits a fault at one of these places.
The processes are forked, or the launcher starts them.
"""

import contextlib
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import meshlayout as ml
from tests import forked
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
    """A process of a job, or the launcher, and how long after the fault it ended."""

    status: int | None  # as `subprocess` has it; None if it hung, and was killed
    output: str
    after_s: float


def run_job(
    count, fault, place, victim, *, is_launched=False, directory="", **options
) -> list[Ended]:
    """Runs a job, and returns how its processes ended; only the launcher if launched.

    `fault` is what the victim does (see `commit`), or all do if it is None, at a place of
    `PLACES` or another in `train`. `ends` is how the program ends.
    """
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder, "fault")
        job = {"fault": fault, "place": place, "victim": victim, "mark": str(mark)}
        job |= {"directory": directory or f"{folder}/saved", **options}
        if is_launched:
            runs = [_Launched(count, f"{folder}/launch.txt", job)]
        else:
            address = f"127.0.0.1:{free_port()}"
            runs = [
                forked.start(f"{folder}/{index}.txt", main, job, address, count, index)
                for index in range(count)
            ]
        start_s, ends = time.time(), dict[int, float]()
        while len(ends) < len(runs):
            time.sleep(0.02)
            for index, run in enumerate(runs):
                with contextlib.suppress(queue.Empty):
                    while run.code is None:
                        run.next_event(0)
                    ends.setdefault(index, time.time())
            fault_s = float(mark.read_text() or 0) if mark.exists() else 0.0
            is_late = time.time() > (fault_s or start_s + 60) + 40
            left = {*range(len(runs))} - {*ends}
            if is_late or (fault == "stop" and not is_launched and left == {victim}):
                for index in left:
                    runs[index].kill()
                    ends[index] = time.time()
        return [
            Ended(run.code, Path(run.log).read_text(), ends[i] - fault_s)
            for i, run in enumerate(runs)
        ]


class _Launched:
    """A run of the launcher, with what is used of `forked.Program`."""

    def __init__(self, count, log, job):
        self.log, self.code = log, None
        search_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = f"-m meshlayout.launch -n {count} -m tests.faults".split()
        with Path(log).open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, *command, json.dumps(job)],
                cwd=ROOT,
                env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": search_path},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def next_event(self, timeout_s):
        self.code = self._process.poll()
        if self.code is None:
            raise queue.Empty

    def kill(self):
        self._process.kill()


# The program.


def _raise(error):
    raise error


def _press_ctrl_c():
    is_launched = "MESHLAYOUT_LAUNCHER" in os.environ
    os.kill(os.getppid() if is_launched else os.getpid(), signal.SIGINT)
    time.sleep(5)


_ACTIONS = {  # by the first word of a fault, called with the number after it
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP) or time.sleep(1),
    "exception": lambda: _raise(ValueError("row 17 is not a number")),
    "connection": lambda: _raise(ConnectionError("Connection refused by my database")),
    "exit": sys.exit,
    "SystemExit": lambda status: _raise(SystemExit(status)),
    "os._exit": os._exit,
    "preempt": lambda: _raise(ml.checkpoint.Preempted(_FAULTY)),
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "Ctrl-C": _press_ctrl_c,
    "meet": lambda: ml.cluster.barrier("extra"),
    "lock": lambda s: ctypes.PyDLL(None).sleep(s),  # it does not release Python's lock
    "sleep": time.sleep,
}


def commit(job) -> None:
    """Commits a fault, and writes down when."""
    with Path(job["mark"]).open("w") as file:
        file.write(str(time.time()))
    name, _, number = job["fault"].partition(" ")
    _ACTIONS.get(name, int)(*map(int, number.split()))


def main(job, address=None, count=None, index=None) -> None:
    """Runs the program as one process of a job."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    jax.config.update("jax_num_cpu_devices", 1)
    timeouts = {k: v for k, v in job.items() if k.endswith("_timeout_s")}
    ml.initialize(address, count, index, timeout_s=120, **timeouts)
    with contextlib.ExitStack() as stack:
        if job.get("ends") == "finally":
            stack.callback(ml.shutdown)
        train(job)
    {"ml": ml.shutdown, "jax": jax.distributed.shutdown}.get(job.get("ends"), int)()


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

    @ml.compile_step
    def train_step(state, batch):
        fault_at("trace")
        return {"w": state["w"] + batch.sum()}, jnp.sum(batch)

    state = ml.create(build, ml.LayoutMap(mesh, default=(...,)))
    data = ml.distribute_dataset(
        Rows(), mesh, global_batch_size=count, prefetch=0, batched=False
    )
    with ml.Checkpointer(job["directory"]) as checkpointer:
        for batch in data:
            step += 1
            fault_at("step")
            state, total = train_step(state, batch)
            assert float(total) == 4 * count
            fault_at("host")
            if job["fault"] == "gather" and is_victim and step == _FAULTY:
                ml.to_numpy(batch)
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


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
