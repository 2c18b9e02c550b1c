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

import meshlayout as ml
from meshlayout.checkpoint import Checkpointer, orbax


STATE = {"w": jnp.arange(4.0)}


@pytest.fixture
def held(monkeypatch):
    """Keeps saves from being finished until it is set."""
    go = threading.Event()
    start = orbax.start_writing

    def slowly(directory, arrays):
        wait = start(directory, arrays)

        def result():
            assert go.wait(60)
            wait()

        return result

    monkeypatch.setattr(orbax, "start_writing", slowly)
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
    assert sorted(one.name for one in tmp_path.iterdir()) == ["1"]


def test_a_save_that_is_interrupted_at_its_start_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(directory, arrays):
        raise KeyboardInterrupt

    with Checkpointer(tmp_path) as ck:
        with monkeypatch.context() as patch:
            patch.setattr(orbax, "start_writing", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ck.save(1, STATE)
        assert ck.all_steps() == []
        assert [one.name[:7] for one in tmp_path.iterdir()] == [".owner-"]
        ck.save(1, STATE)
    assert Checkpointer(tmp_path).all_steps() == [1]


def test_a_failure_in_the_background_is_reported_once(tmp_path, monkeypatch, caplog):
    def failing(directory, arrays):
        def fail():
            raise OSError("the cable is out")

        return fail

    monkeypatch.setattr(orbax, "start_writing", failing)
    ck = Checkpointer(tmp_path)
    ck.save(1, STATE)
    with pytest.raises(ml.errors.CheckpointError, match="the cable is out"):
        ck.wait()
    ck.close()
    assert [one.levelname for one in caplog.records if one.levelno > 20] == []


# The end of a process.

PROGRAM = """
import os, signal, sys, time
import jax.numpy as jnp
import meshlayout as ml
from meshlayout.checkpoint import orbax

start = orbax.start_writing

def slowly(directory, arrays):
    wait = start(directory, arrays)
    def result():
        time.sleep(3.0 if "slow" in sys.argv else 1.0)
        wait()
        if "fails" in sys.argv:
            raise OSError("the cable is out")
    return result

orbax.start_writing = slowly
ck = ml.Checkpointer(sys.argv[1])
ck.save(1, {"w": jnp.ones((64, 2048))})
if sys.argv[2] == "fork":
    import multiprocessing, threading, warnings
    from meshlayout.checkpoint import lease
    warnings.simplefilter("ignore")  # JAX has threads, as it has in a data loader
    def work():
        ck.close()
        assert ml.Checkpointer(sys.argv[1]).all_steps() in ([], [1])
    held, go = threading.Event(), threading.Event()
    def hold():
        with lease._lock:
            held.set()
            go.wait()
    threading.Thread(target=hold).start()
    held.wait()
    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()
    worker.join(20)
    go.set()
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
        timeout=60,
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
    assert sorted(one.name for one in tmp_path.iterdir()) == ["1"]
    whole = Checkpointer(tmp_path).restore_numpy()
    np.testing.assert_array_equal(whole["w"], np.ones((64, 2048)))


@pytest.mark.multiprocess
def test_a_forked_child_leaves_saves_to_its_parent(tmp_path):
    job = run(tmp_path, "fork", "slow")
    assert job.returncode == 0, job.stderr
    assert sorted(one.name for one in tmp_path.iterdir()) == ["1"]


@pytest.mark.multiprocess
def test_a_failure_that_no_call_raised_is_logged_at_the_end(tmp_path):
    job = run(tmp_path, "end", "fails")
    told = [line for line in job.stderr.splitlines() if "could not be saved" in line]
    assert told == [
        f"ERROR:meshlayout.checkpoint:step 1 could not be saved in {tmp_path}: the cable is out. Earlier steps are unchanged; the next save starts anew."
    ]
    assert list(tmp_path.iterdir()) == []
