"""Ctrl-C, exceptions and the end of a process while a save is under way."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from meshlayout.checkpoint import Checkpointer, orbax


STATE = {"w": jnp.arange(4.0)}


class Response:
    """Orbax's response to a save, with work before it is complete."""

    def __init__(self, response, work):
        self.response, self.work = response, work

    def result(self, timeout=None):
        self.work()
        return self.response.result()


def slowed(monkeypatch, work):
    start = orbax.start_writing
    monkeypatch.setattr(
        orbax, "start_writing", lambda *args: Response(start(*args), work)
    )


@pytest.fixture
def held(monkeypatch):
    """Keeps saves from being finished until it is set."""
    go = threading.Event()
    slowed(monkeypatch, lambda: go.wait(60))
    yield go
    go.set()


def interrupt(call):
    """Calls something, and presses Ctrl-C while it waits."""
    main = threading.main_thread().ident
    threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        call()


@pytest.mark.parametrize("end", ["wait", "close", "save", "restore_numpy"])
def test_what_follows_an_interrupted_wait_waits(tmp_path, held, end):
    ck = Checkpointer(tmp_path)
    ck.save(1, STATE)
    for _ in range(2):  # as often as somebody presses it
        interrupt(ck.wait)
    assert ck.all_steps() == []
    threading.Timer(0.5, held.set).start()
    begin = time.monotonic()
    args = (2, STATE) if end == "save" else ()
    getattr(ck, end)(*args)
    assert time.monotonic() - begin > 0.3
    assert 1 in Checkpointer(tmp_path).all_steps()
    ck.close()


def test_an_interrupted_close_leaves_the_save_to_be_waited_for(tmp_path, held):
    ck = Checkpointer(tmp_path)
    ck.save(1, STATE)
    interrupt(ck.close)
    held.set()
    ck.close()
    assert names_in(tmp_path) == [".lock", "1"]


def test_ctrl_c_while_the_state_is_copied_comes_after_the_copy(tmp_path, monkeypatch):
    start = orbax.start_writing

    def slowly(*args):
        time.sleep(1.0)
        return start(*args)

    monkeypatch.setattr(orbax, "start_writing", slowly)
    ck = Checkpointer(tmp_path)
    state = {"w": np.arange(4.0)}
    interrupt(lambda: ck.save(1, state))
    state["w"] += 1
    ck.close()
    assert Checkpointer(tmp_path).restore_numpy()["w"].tolist() == [0, 1, 2, 3]


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


# The end of a process.

PROGRAM = """
import os, signal, sys, time
import jax.numpy as jnp
import meshlayout as ml
from meshlayout.checkpoint import orbax

start = orbax.start_writing

class Response:
    def __init__(self, *args):
        self.response = start(*args)
    def result(self):
        time.sleep(3.0 if "slow" in sys.argv else 1.0)
        self.response.result()
        if "fails" in sys.argv:
            raise OSError("the cable is out")

orbax.start_writing = Response
ck = ml.Checkpointer(sys.argv[1])
ck.save(1, {"w": jnp.ones((64, 2048))})
if sys.argv[2] == "fork":
    import multiprocessing, warnings
    warnings.simplefilter("ignore")  # JAX has threads, as it has in a data loader
    def work():
        assert ml.Checkpointer(sys.argv[1]).all_steps() in ([], [1])
    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()
    worker.join(20)
    if worker.exitcode is None:
        worker.kill()
    sys.exit(worker.exitcode != 0)
if sys.argv[2] == "exception":
    raise ValueError("training died")
if sys.argv[2] == "Ctrl-C":
    os.kill(os.getpid(), signal.SIGINT)
    ck.wait()
if sys.argv[2] == "exit":
    sys.exit(3)
"""


def run(*args):
    root = Path(__file__).parent.parent
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, args)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
        timeout=180,
    )


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("how", "code"),
    [
        pytest.param("end", 0, marks=pytest.mark.slow),
        ("exception", 1),
        ("Ctrl-C", -signal.SIGINT),
        pytest.param("exit", 3, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_ends_finishes_its_save(tmp_path, how, code):
    job = run(tmp_path, how)
    assert job.returncode == code, job.stderr
    assert ("training died" in job.stderr) == (how == "exception")
    assert names_in(tmp_path) == [".lock", "1"]
    whole = Checkpointer(tmp_path).restore_numpy()
    np.testing.assert_array_equal(whole["w"], np.ones((64, 2048)))


@pytest.mark.multiprocess
def test_a_forked_child_leaves_saves_to_its_parent(tmp_path):
    job = run(tmp_path, "fork", "slow")
    assert job.returncode == 0, job.stderr
    assert names_in(tmp_path) == [".lock", "1"]


@pytest.mark.multiprocess
def test_a_failure_that_no_call_raised_is_logged_at_the_end(tmp_path):
    job = run(tmp_path, "end", "fails")
    told = [line for line in job.stderr.splitlines() if "could not be saved" in line]
    assert told == [
        f"ERROR:meshlayout.checkpoint:step 1 could not be saved in {tmp_path}: the cable is out. Earlier steps are unchanged; the next save starts anew."
    ]
    assert Checkpointer(tmp_path).all_steps() == []
