"""What checkpoints promise, as a user can see it: one test for each sentence."""

import concurrent.futures
import errno
import gc
import hashlib
import json
import logging
import multiprocessing
import os
import re
import runpy
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest

import meshlayout as ml
from tests import forked


STATE = {"params": {"w": np.arange(12, dtype="float32").reshape(3, 4)}, "step": 7}


def saved(directory, *steps, state=STATE, **options):
    with ml.Checkpointer(directory, **options) as ck:
        for step in steps or (1,):
            ck.save(step, state)
    return Path(directory)


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """The directory of a step, which nobody changes."""
    return saved(tmp_path_factory.mktemp("run")) / "1"


# A step is a plain directory of Orbax, whose files are all hashed.


def test_orbax_alone_loads_a_step_onto_a_mesh(step, mesh_2x4):
    tree = ocp.load_checkpointables(step)["state"]
    np.testing.assert_array_equal(tree["params"]["w"], STATE["params"]["w"])
    names = ocp.checkpointables_metadata(step).metadata["state"]
    assert names["params"]["w"].shape == (3, 4)
    sharding = mesh_2x4.layout(None, "model").sharding
    wanted = jax.ShapeDtypeStruct((3, 4), "float32", sharding=sharding)
    options = ocp.Context()
    options.pytree.loading.partial_load = True
    with options:
        tree = ocp.load_checkpointables(step, {"state": {"params": {"w": wanted}}})
    w = tree["state"]["params"]["w"]
    assert w.sharding == sharding
    np.testing.assert_array_equal(w, STATE["params"]["w"])


def test_every_file_is_hashed_in_the_thread_that_writes(tmp_path, monkeypatch):
    threads, digest = set(), hashlib.file_digest

    def noted(*args):
        threads.add(threading.current_thread())
        return digest(*args)

    monkeypatch.setattr(hashlib, "file_digest", noted)
    step = saved(tmp_path) / "1"
    assert threads
    assert threading.main_thread() not in threads
    listed = json.loads((step / "files.json").read_text())
    files = [x for x in step.rglob("*") if x.is_file() and x.name != "files.json"]
    assert sorted(listed) == sorted(str(path.relative_to(step)) for path in files)
    for path in files:
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        assert listed[str(path.relative_to(step))] == [path.stat().st_size, sha256]


# What it does on the disk and in the logs.


def test_reading_creates_no_directory(tmp_path):
    ck = ml.Checkpointer(tmp_path / "typo" / "run")
    assert (ck.all_steps(), ck.latest_step()) == ([], None)
    assert ck.resume(STATE) is STATE
    for call in (lambda: ck.restore(STATE), ck.restore_numpy, ck.inspect):
        with pytest.raises(ml.errors.CheckpointError, match="typo"):
            call()
    ck.close()
    assert not [*tmp_path.iterdir()]
    where = saved(tmp_path / "run")
    before = sorted(where.rglob("*"))
    ml.Checkpointer(where).restore(STATE)
    assert sorted(where.rglob("*")) == before


def test_files_and_names_are_durable_before_a_step_takes_its_name(
    tmp_path, monkeypatch
):
    done, sync, rename = [], os.fsync, Path.rename

    def noted_sync(descriptor):
        done.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        sync(descriptor)
        if Path(done[-1]).is_dir():  # as on mounts that cannot sync directories
            raise OSError(errno.EINVAL, "Invalid argument")

    def noted_rename(path, target):
        done.append(f"{path.name} -> {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    where = saved(tmp_path / "run") / "1"
    paths = {str(x).replace("run/1", "run/1.new") for x in (*where.rglob("*"), where)}
    sealed = done.index("files.json.tmp -> files.json")
    assert paths - {f"{where}.new/files.json"} <= {*done[:sealed]}
    named = done.index("1.new -> 1")
    assert (done[named - 1], done[named + 1]) == (f"{where}.new", str(tmp_path / "run"))


def saves_and_restores(directory):
    """Logs all that is said at level INFO."""
    form = "%(levelname)s %(name)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, force=True)
    with ml.Checkpointer(directory, keep=1) as ck:
        for step in (1, 2, 2):
            ck.save(step, {"w": jnp.ones(3), "n": 1})
        ck.wait()
        ck.restore({"w": jnp.zeros(3), "n": 0})
        ck.restore_numpy()
        ck.inspect()


@pytest.mark.multiprocess
def test_a_healthy_save_or_restore_logs_nothing_of_orbax(tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    assert forked.start(log, saves_and_restores, str(run)).wait() == 0, log.read_text()
    lines = [x for x in log.read_text().splitlines() if not x.startswith("INFO jax")]
    told = [rf"saved step {step}: \d+ B in \d+\.\d\d s" for step in (1, 2, 2)]
    told += [f"restored step 2 of {run}"] * 2
    for line, expected in zip(lines, told, strict=True):
        assert re.fullmatch(f"INFO meshlayout.checkpoint {expected}", line)


def memory_held(directory):
    state = {f"layer{i}": {"w": np.ones(2, "float32")} for i in range(100)}
    # TensorStore itself loses 280 bytes per array each time that Orbax asks it for the
    # text of a place (`KvStore.Spec.to_json`), which no caller can prevent.
    others = tracemalloc.Filter(False, "*/orbax/*/tensorstore_utils.py")
    held = []
    with ml.Checkpointer(directory, keep=1) as ck:
        for step in range(24):
            ck.save(step, state)
            ck.wait()
            if step == 7:
                tracemalloc.start()
            if step in (11, 23):
                gc.collect()
                snapshot = tracemalloc.take_snapshot().filter_traces([others])
                held.append(sum(trace.size for trace in snapshot.traces))
    return held


@pytest.mark.slow
def test_nothing_is_kept_in_memory_per_saved_step(tmp_path):
    # In a process of its own: threads that other tests have left would count.
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
        before, after = pool.submit(memory_held, tmp_path).result()
    # Of 100 leaves and 12 saves, 1 KB for each would be 1.2 MB.
    assert after - before < 100_000


def test_a_step_that_is_saved_again_is_there_at_every_moment(tmp_path):
    saved(tmp_path, 1, state={"w": np.full(1000, 0)}, keep=1)
    done, seen = threading.Event(), set()

    def look():
        while not done.is_set():
            (value,) = {*ml.Checkpointer(tmp_path).restore_numpy()["w"].tolist()}
            seen.add(value)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        with ml.Checkpointer(tmp_path, keep=1) as ck:
            for value in range(1, 6):
                ck.save(1, {"w": np.full(1000, value)}, metadata={"value": value})
            assert ck.inspect(1).metadata == {"value": 5}
    finally:
        done.set()
        thread.join()
    assert seen <= {*range(6)}
    assert seen
    assert sorted(x.name for x in tmp_path.iterdir()) == [".lock", "1"]


# One run at a time saves in a directory; any number of runs read.


BUSY = "another process saves to"


def saves_and_stays(directory):
    with ml.Checkpointer(directory) as ck:
        ck.save(1, STATE)
        ck.wait()
        forked.say("saved")
        time.sleep(1000)


@pytest.mark.multiprocess
def test_a_second_process_reads_and_is_refused_when_it_saves(tmp_path):
    run = tmp_path / "run"
    other = forked.start(tmp_path / "log", saves_and_stays, str(run))
    other.wait_until(lambda said: said)
    ck = ml.Checkpointer(run)
    assert ck.restore_numpy()["step"] == 7
    # Looking at the lock again, also from another Checkpointer, does not free it.
    for each in (ck, ck, ml.Checkpointer(run)):
        with pytest.raises(ml.errors.CheckpointError, match=BUSY):
            each.save(2, STATE)
    other.kill()
    other.wait()
    assert ck.save(2, STATE)
    ck.close()
    assert ml.Checkpointer(run).all_steps() == [1, 2]


def test_a_checkpointer_takes_the_directory_over_from_one_of_its_process(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    kept = [ml.Checkpointer(tmp_path / name) for name in ("run", "link", "run/../run")]
    for step, ck in enumerate([*kept, kept[0]], 1):  # the save before is under way
        assert ck.save(step, STATE)
    kept[0].close()
    assert kept[1].all_steps() == [2, 3, 4]
    assert all(kept[1].restore_numpy(step=step)["step"] == 7 for step in (2, 3, 4))


def test_a_checkpointer_that_is_gone_holds_nothing(tmp_path):
    for step in range(1, 6):  # as in a notebook's cell that is run again
        ck = ml.Checkpointer(tmp_path)
        assert ck.save(step, STATE)
    ck.close()
    assert repr(ck) == f"Checkpointer({str(tmp_path)!r})"


@pytest.mark.parametrize("system", ["Windows", "a mount without locks"])
def test_one_line_says_that_nothing_guards_a_directory_without_locks(
    tmp_path, monkeypatch, caplog, system
):
    def no_locks(*args):
        raise OSError(95, "Operation not supported")

    if system == "Windows":
        monkeypatch.setitem(sys.modules, "fcntl", None)
        runpy.run_path("meshlayout/checkpoint/directory.py")  # nor at its import
    else:
        monkeypatch.setattr("fcntl.lockf", no_locks)
    with caplog.at_level(logging.WARNING), ml.Checkpointer(tmp_path) as ck:
        ck.save(1, STATE)
        ck.save(2, STATE)
    (line,) = caplog.messages
    assert str(tmp_path) in line
    assert "nothing guards it" in line
    assert ck.all_steps() == [1, 2]
