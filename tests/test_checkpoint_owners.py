"""One run at a time saves in a directory; any number of runs read."""

import gc
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest

import meshlayout as ml
from meshlayout.checkpoint import Checkpointer


STATE = {"w": jnp.arange(4.0)}

OTHER = """
import sys, jax.numpy as jnp
from meshlayout.checkpoint import Checkpointer
ck = Checkpointer(sys.argv[1])
ck.save(1, {"w": jnp.arange(4.0)})
ck.wait()
print("saved", flush=True)
input()
"""


def start_other(directory):
    """Starts a process that has saved step 1, and keeps its checkpointer open."""
    path = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(directory)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout.readline() == "saved\n"
    return other


@pytest.mark.multiprocess
def test_a_second_process_reads_and_is_refused_when_it_saves(tmp_path):
    with start_other(tmp_path) as other:
        ck = Checkpointer(tmp_path)
        assert ck.restore_numpy()["w"].tolist() == [0, 1, 2, 3]
        with pytest.raises(
            ml.errors.CheckpointError, match="another run or Checkpointer saves"
        ):
            ck.save(2, STATE)
        # Looking at the lock again, also from another Checkpointer, does not free it.
        with pytest.raises(
            ml.errors.CheckpointError, match="another run or Checkpointer saves"
        ):
            Checkpointer(tmp_path).save(2, STATE)
        other.kill()
    assert ck.save(2, STATE)
    ck.close()
    assert Checkpointer(tmp_path).all_steps() == [1, 2]


@pytest.mark.multiprocess
@pytest.mark.filterwarnings("ignore")  # JAX warns of any fork
def test_a_child_that_is_forked_neither_holds_nor_frees_the_lock(tmp_path):
    ck = Checkpointer(tmp_path)
    ck.save(1, STATE)
    ck.wait()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    lines = "from meshlayout.checkpoint import Checkpointer; import sys\n"
    lines += "Checkpointer(sys.argv[1]).save(2, {'w': 1.0})"
    path = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        [sys.executable, "-c", lines, str(tmp_path)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "another run or Checkpointer saves" in found.stderr
    ck.close()


def test_two_checkpointers_of_one_process_do_not_save_in_one_directory(tmp_path):
    one = Checkpointer(tmp_path / "run")
    one.save(1, STATE)
    one.wait()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for spelling in ("run", "link", "run/../run"):
        two = Checkpointer(tmp_path / spelling)
        assert two.restore_numpy(step=1)["w"].tolist() == [0, 1, 2, 3]
        with pytest.raises(ml.errors.CheckpointError):
            two.save(2, STATE)
    one.close()
    assert two.save(2, STATE)
    two.close()
    assert two.all_steps() == [1, 2]


def test_a_checkpointer_that_is_gone_holds_nothing(tmp_path):
    ck = Checkpointer(tmp_path)
    ck.save(1, STATE)
    ck.wait()
    del ck
    deadline = time.monotonic() + 20
    with Checkpointer(tmp_path) as other:
        while True:
            gc.collect()
            try:
                assert other.save(2, STATE)
            except ml.errors.CheckpointError:  # the thread of the save is about to end
                assert time.monotonic() < deadline
                time.sleep(0.1)
            else:
                break


def test_one_line_says_that_nobody_guards_a_directory_without_locks(
    tmp_path, monkeypatch, caplog
):
    def no_locks(*args):
        raise OSError(95, "Operation not supported")

    import fcntl

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with caplog.at_level(logging.WARNING), Checkpointer(tmp_path) as ck:
        ck.save(1, STATE)
        ck.save(2, STATE)
    (line,) = caplog.messages
    assert str(tmp_path) in line
    assert ck.all_steps() == [1, 2]
