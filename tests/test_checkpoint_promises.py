"""What checkpoints promise, as a user can see it: one test for each sentence."""

import errno
import gc
import hashlib
import inspect
import json
import logging
import os
import re
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from flax import nnx

import meshlayout as ml


STATE = {"params": {"w": np.arange(12, dtype="float32").reshape(3, 4)}, "step": 7}


def saved(directory, *steps, state=STATE, **options):
    with ml.Checkpointer(directory, **options) as ck:
        for step in steps or (1,):
            ck.save(step, state)
    return Path(directory)


def files_of(step):
    return sorted(path for path in step.rglob("*") if path.is_file())


def run_program(text, *args):
    """Runs a program in a process of its own, and returns what came of it."""
    path = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", text, *map(str, args)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


# A step is a plain directory of Orbax, whose files are all hashed.


def test_orbax_alone_loads_a_step(tmp_path):
    where = saved(tmp_path) / "1"
    tree = ocp.load_checkpointables(where)["state"]
    np.testing.assert_array_equal(tree["params"]["w"], STATE["params"]["w"])
    names = ocp.checkpointables_metadata(where).metadata["state"]
    assert names["params"]["w"].shape == (3, 4)


def test_every_file_is_hashed(tmp_path):
    where = saved(tmp_path) / "1"
    listed = json.loads((where / "files.json").read_text())
    files = [path for path in files_of(where) if path.name != "files.json"]
    assert sorted(listed) == sorted(str(path.relative_to(where)) for path in files)
    for path in files:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert listed[str(path.relative_to(where))] == [path.stat().st_size, digest]


# What it does on the disk and in the logs.


def test_reading_creates_no_directory(tmp_path):
    ck = ml.Checkpointer(tmp_path / "typo" / "run")
    assert ck.all_steps() == []
    assert ck.latest_step() is None
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
    synced, sync, rename = [], os.fsync, Path.rename

    def noted_sync(descriptor):
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        sync(descriptor)
        if Path(synced[-1]).is_dir():  # as on mounts that cannot sync directories
            raise OSError(errno.EINVAL, "Invalid argument")

    def noted_rename(path, target):
        synced.append(f"{path.name} -> {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    where = saved(tmp_path / "run") / "1"
    new = [*where.rglob("*"), where]
    paths = {str(path).replace("run/1", "run/1.new") for path in new}
    paths.remove(f"{where}.new/files.json")
    first, last = (
        synced.index(name) for name in ("files.json.tmp -> files.json", "1.new -> 1")
    )
    assert paths <= {*synced[:first]}
    assert synced[last - 1] == f"{where}.new"
    assert synced[last + 1] == str(tmp_path / "run")


NOISE = """
import logging, sys
logging.basicConfig(level=int(sys.argv[2]))
import jax.numpy as jnp, meshlayout as ml
with ml.Checkpointer(sys.argv[1], keep=1) as ck:
    for step in (1, 2, 2):
        ck.save(step, {"w": jnp.ones(3), "n": 1})
    ck.wait()
    ck.restore({"w": jnp.zeros(3), "n": 0})
    ck.restore_numpy()
    ck.inspect()
"""


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_a_healthy_save_or_restore_logs_nothing_of_orbax(tmp_path, level):
    found = run_program(NOISE, tmp_path, level)
    assert found.returncode == 0, found.stderr
    lines = [line for line in found.stderr.splitlines() if "jax" not in line]
    assert not re.search("absl|orbax|tensorstore", "\n".join(lines), re.IGNORECASE)
    if level == logging.WARNING:
        assert not lines


@pytest.mark.slow
def test_nothing_is_kept_in_memory_per_saved_step(tmp_path):
    state = {f"layer{i}": {"w": np.ones(2, "float32")} for i in range(100)}
    # TensorStore itself loses 280 bytes per array each time that Orbax asks it for the
    # text of a place (`KvStore.Spec.to_json`), which no caller can prevent.
    others = tracemalloc.Filter(False, "*/orbax/*/tensorstore_utils.py")
    held = []
    with ml.Checkpointer(tmp_path, keep=1) as ck:
        for step in range(24):
            ck.save(step, state)
            ck.wait()
            if step == 7:
                tracemalloc.start()
            if step in (11, 23):
                gc.collect()
                found = tracemalloc.take_snapshot().filter_traces([others])
                held.append(sum(trace.size for trace in found.traces))
    tracemalloc.stop()
    # Of 100 leaves, 1 KB for each would be 1.2 MB.
    assert held[1] - held[0] < 100_000


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
            for value in range(1, 8):
                ck.save(1, {"w": np.full(1000, value)})
    finally:
        done.set()
        thread.join()
    assert seen <= {*range(8)}
    assert seen
    assert sorted(x.name for x in tmp_path.iterdir() if x.name != ".lock") == ["1"]


# A new state is returned.


def test_restore_returns_a_new_model_and_says_so(tmp_path):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    saved(tmp_path, state=model)
    other = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
    before = np.asarray(other.kernel[...])
    restored = ml.Checkpointer(tmp_path).restore(other)
    assert restored is not other
    np.testing.assert_array_equal(other.kernel[...], before)
    np.testing.assert_array_equal(restored.kernel[...], model.kernel[...])
    assert "new model" in inspect.getdoc(ml.Checkpointer.restore)
    guide = Path("docs/guides/checkpoints.md").read_text(encoding="utf-8")
    assert re.search(r"new\s+(state|model)", guide)
