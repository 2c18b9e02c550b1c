"""A small run that is killed, or told to end, and started again; for other tests.

Run as `python -m tests.resuming_runs` it serves jobs: each line of its input is a job as
JSON, for which it forks a process, and says its number; it says how each ended. It has
imported everything and started no backend, so that a start takes little.
"""

import contextlib
import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshlayout as ml
from meshlayout.checkpoint import orbax


ROOT = Path(__file__).parent.parent
FEATURES, ROWS, BATCH, EPOCHS = 4, 46, 8, 3
STEPS = EPOCHS * -(-ROWS // BATCH)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(FEATURES, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.hidden(x))))[:, 0]


def loss_fn(model, batch):
    out = model(batch["x"])
    return jnp.square(out - batch["y"]), {"out": out}


def source():
    x = np.random.default_rng(0).normal(size=(ROWS, FEATURES)).astype("float32")
    y = x @ np.arange(1, FEATURES + 1).astype("float32")
    return {"x": x, "y": y, "row": np.arange(ROWS, dtype=np.int32)}


class Slow:
    """Data whose batches take some time, and which says what it gave."""

    def __init__(self, data, seconds):
        self.data, self.seconds = data, seconds

    def __iter__(self):
        return SlowIterator(iter(self.data), self.seconds)


class SlowIterator:
    def __init__(self, iterator, seconds):
        self.iterator, self.seconds = iterator, seconds

    def __iter__(self):
        return self

    def __next__(self):
        time.sleep(self.seconds)
        return next(self.iterator)

    def get_state(self):
        return self.iterator.get_state()

    def set_state(self, state):
        self.iterator.set_state(state)


class Rows(ml.callbacks.Callback):
    """Writes down the rows of every step, a line each."""

    def __init__(self, path, say):
        self.path, self.say = path, say

    def on_step_end(self, trainer, step, metrics):
        if jax.process_index() == 0:
            with self.path.open("a") as file:
                file.write(f"{step} {SEEN[-1]}\n")
        self.say(step)


SEEN = []


class Trainer(ml.Trainer):
    def train_step(self, state, batch, metrics):
        rows = ml.to_numpy(batch["row"]) * (ml.to_numpy(batch["weight"]) > 0)
        SEEN.append(" ".join(map(str, rows)))
        return super().train_step(state, batch, metrics)


def run(directory, seconds=0.0, every=1, resume=True, say=lambda step: None):
    """Runs, or goes on, and writes what came of it."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    mesh = ml.create_mesh({"batch": jax.device_count()})
    state = ml.TrainState.create(
        lambda: Net(nnx.Rngs(0)), optax.adam(0.05), ml.LayoutMap(mesh, {}), rng=1
    )
    data = ml.distribute_dataset(source(), mesh, global_batch_size=BATCH, shuffle=3)
    trainer = Trainer(state, loss_fn, metrics={"error": ml.metrics.Mean("out")})
    with ml.Checkpointer(directory / "checkpoints", keep=2) as ck:
        trainer.fit(
            Slow(data, seconds),
            EPOCHS,
            callbacks=[
                ml.callbacks.Checkpoint(ck, every=every),
                Rows(directory / "rows.txt", say),
            ],
            progress=False,
            resume=resume,
        )
    leaves = {
        jax.tree_util.keystr(path): ml.to_numpy(leaf).tobytes().hex()
        for path, leaf in jax.tree.leaves_with_path(trainer.state)
    }
    history = {
        name: [float(one).hex() for one in values]
        for name, values in trainer.history.to_dict().items()
    }
    result = {"leaves": leaves, "history": history, "step": trainer.position.step}
    if jax.process_index() == 0:
        (directory / "result.json").write_text(json.dumps(result))
    return result


def child(job, events):
    """One process of a run."""
    jax.config.update("jax_num_cpu_devices", job["devices"])
    if job["processes"] > 1:
        jax.distributed.initialize(
            job["address"],
            job["processes"],
            job["index"],
            cluster_detection_method="deactivate",
            coordinator_bind_address=job["address"],
            heartbeat_timeout_seconds=10,
            initialization_timeout=30,
        )

    def say(step):
        os.write(events, f"step {job['number']} {step}\n".encode())

    run(job["directory"], job["seconds"], job["every"], say=say)
    if job["processes"] > 1:
        jax.distributed.shutdown()


def fork(job):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with Path(job["log"]).open("ab") as log:
                events = os.dup(1)
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            child(job, events)
            code = 0
        except SystemExit as error:
            code = error.code
            # As the interpreter would: what runs at exit runs.
            if job["processes"] > 1:
                jax.distributed.shutdown()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def serve():
    """Forks a process for every job, and says what becomes of it."""
    warnings.filterwarnings("ignore", "os.fork")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    orbax.quiet("orbax.checkpoint")
    for line in sys.stdin:
        job = json.loads(line)
        pid = fork(job)
        os.write(1, f"pid {job['number']} {pid}\n".encode())
        threading.Thread(target=reap, args=(job["number"], pid), daemon=True).start()


def reap(number, pid):
    _, status = os.waitpid(pid, 0)
    os.write(1, f"end {number} {os.waitstatus_to_exitcode(status)}\n".encode())


class Server:
    """Starts runs, in the test's process; the processes are forked by another one."""

    def __enter__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.resuming_runs"],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.numbers = itertools.count()
        self.events = {}
        self.listener = threading.Thread(target=self.listen, daemon=True)
        self.listener.start()
        return self

    def __exit__(self, *error):
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()
        self.listener.join()
        self.process.stdout.close()

    def listen(self):
        for line in self.process.stdout or ():
            kind, number, value = line.decode().split(" ")
            self.events[int(number)].put((kind, int(value)))

    def start(self, directory, processes=1, seconds=0.01, every=1):
        """Starts a run; returns its processes."""
        directory.mkdir(parents=True, exist_ok=True)
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{one.getsockname()[1]}"
        found = []
        for index in range(processes):
            number = next(self.numbers)
            self.events[number] = queue.Queue()
            job = {
                "number": number,
                "directory": str(directory),
                "log": str(directory / f"log{index}.txt"),
                "processes": processes,
                "index": index,
                "devices": 2 // processes,
                "address": address,
                "seconds": seconds,
                "every": every,
            }
            self.process.stdin.write((json.dumps(job) + "\n").encode())
            self.process.stdin.flush()
            found.append(Process(self.events[number], directory / f"log{index}.txt"))
        return found


class Process:
    """One process of a run."""

    def __init__(self, events, log):
        self.events, self.log = events, log
        self.pid, self.code, self.steps = None, None, []

    def next_event(self, timeout_s=90):
        kind, value = self.events.get(timeout=timeout_s)
        if kind == "pid":
            self.pid = value
        elif kind == "step":
            self.steps.append(value)
        else:
            self.code = value

    def wait_for_step(self, step):
        """Waits until it has made a step, or has ended."""
        while self.code is None and step > max(self.steps, default=0):
            self.next_event()

    def wait(self):
        """Waits for its end, and returns its status."""
        while self.code is None:
            self.next_event()
        return self.code

    def kill(self, number=signal.SIGKILL):
        while self.pid is None:
            self.next_event()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def result_of(directory):
    return json.loads((directory / "result.json").read_text())


def rows_of(directory):
    """The rows of every step; a step that was made twice has to see the same ones."""
    found = {}
    for line in (directory / "rows.txt").read_text().splitlines():
        step, *rows = map(int, line.split())
        assert found.setdefault(step, rows) == rows, step
    return found


if __name__ == "__main__":
    serve()
