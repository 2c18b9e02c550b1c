"""Ctrl-C, exceptions, signals and the end of a process while a save is under way."""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from meshlayout.checkpoint import Checkpointer, Preemption, orbax
from tests import forked


STATE = {"w": jnp.arange(4.0)}


class Response:
    """Orbax's response to a save, with work before it, which may return an error."""

    def __init__(self, response, work):
        self.response, self.work = response, work

    def result(self, timeout=None):
        error = self.work()
        self.response.result()
        if isinstance(error, OSError):
            raise error


def slowed(patch, work):
    start = orbax.start_writing
    patch.setattr(orbax, "start_writing", lambda *args: Response(start(*args), work))


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


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("end", ["wait", "close", "save", "restore_numpy"])
def test_what_follows_an_interrupted_wait_waits(tmp_path, held, end):
    ck = Checkpointer(tmp_path)
    ck.save(1, STATE)
    interrupt(ck.wait)
    interrupt(ck.close)  # as often as somebody presses it
    assert ck.all_steps() == []
    threading.Timer(0.5, held.set).start()
    begin = time.monotonic()
    args = (2, STATE) if end == "save" else ()
    getattr(ck, end)(*args)
    assert time.monotonic() - begin > 0.3
    assert 1 in Checkpointer(tmp_path).all_steps()
    ck.close()
    assert names_in(tmp_path) == [".lock", "1", *(["2"] if end == "save" else [])]


def test_ctrl_c_while_the_state_is_copied_comes_after_the_copy(tmp_path, monkeypatch):
    start = orbax.start_writing

    def slowly(*args):
        time.sleep(1.0)
        return start(*args)

    monkeypatch.setattr(orbax, "start_writing", slowly)
    ck = Checkpointer(tmp_path)
    state = {"w": jnp.arange(4.0)}
    interrupt(lambda: ck.save(1, state))
    state["w"].delete()  # as if it were donated
    ck.close()
    assert Checkpointer(tmp_path).restore_numpy()["w"].tolist() == [0, 1, 2, 3]


def program(directory, how, seconds):
    """Ends while it saves, which takes some seconds."""
    logging.basicConfig()

    def work():
        time.sleep(seconds)
        return OSError("the cable is out") if how == "failure" else None

    patch = pytest.MonkeyPatch()
    slowed(patch, work)
    ck = Checkpointer(directory, every=None if how != "SIGTERM" else 1000)
    if how == "SIGTERM":
        ck.resume(STATE)
        signal.raise_signal(signal.SIGTERM)
    ck.save(1, {"w": jnp.ones((64, 2048))})
    if how == "fork":
        warnings.simplefilter("ignore")  # JAX has threads, as it has in a data loader
        worker = multiprocessing.get_context("fork").Process(target=ck.all_steps)
        worker.start()
        worker.join(20)
        if worker.exitcode is None:
            worker.kill()
        sys.exit(worker.exitcode != 0)
    if how == "exception":
        raise ValueError("training died")
    if how == "Ctrl-C":
        os.kill(os.getpid(), signal.SIGINT)
        ck.wait()


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("how", "seconds", "code"),
    [
        ("end", 1, 0),
        ("exception", 1, 1),
        ("Ctrl-C", 1, -signal.SIGINT),
        ("SIGTERM", 1, 75),
        ("fork", 3, 0),  # whose child does not wait for it
    ],
)
def test_a_process_that_ends_finishes_its_save(tmp_path, how, seconds, code):
    run, log = tmp_path / "run", tmp_path / "log"
    job = forked.start(log, program, str(run), how, seconds)
    assert job.wait() == code, log.read_text()
    assert ("training died" in log.read_text()) == (how == "exception")
    assert names_in(run) == [".lock", "1"]
    whole = Checkpointer(run).restore_numpy()
    np.testing.assert_array_equal(whole["w"], np.ones((64, 2048)))


@pytest.mark.multiprocess
def test_a_failure_that_no_call_raised_is_logged_at_the_end(tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    forked.start(log, program, str(run), "failure", 0).wait()
    (told,) = [x for x in log.read_text().splitlines() if "could not be" in x]
    assert told.startswith(
        f"ERROR:meshlayout.checkpoint:step 1 could not be saved in {run}"
    )
    assert Checkpointer(run).all_steps() == []


@pytest.fixture
def heard():
    """The SIGTERMs that came to the handler of whoever called the library."""
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    yield came
    signal.signal(signal.SIGTERM, before)


def test_a_second_sigterm_and_one_that_nobody_looked_at_do_what_they_did_before(heard):
    with Preemption() as preemption:
        assert not preemption.is_due()
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.is_due()
        assert heard == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        assert preemption.is_due()
    assert heard == [signal.SIGTERM]
    with Preemption():
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    assert heard == [signal.SIGTERM] * 2
