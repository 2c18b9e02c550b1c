"""What checkpoints promise, as a user can see it: one test for each sentence."""

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

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from flax import nnx

import meshlayout as ml
from tests.processes import run_processes
from tests.same_bits import assert_same_bits


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


def test_a_flipped_bit_in_any_file_is_an_error_and_never_a_wrong_number(tmp_path):
    where = (
        saved(tmp_path, state={"w": np.random.default_rng(0).normal(size=500)}) / "1"
    )
    ck, like = ml.Checkpointer(tmp_path), {"w": np.zeros(500)}
    expected = ck.restore(like)
    for path in files_of(where):
        content = bytearray(path.read_bytes())
        if not content:
            continue
        for place in {0, len(content) // 3, len(content) - 1}:
            content[place] ^= 8
            path.write_bytes(content)
            for restore in (lambda: ck.restore(like), ck.restore_numpy):
                with pytest.raises(ml.errors.DamagedCheckpointError, match=str(where)):
                    restore()
            content[place] ^= 8
        path.write_bytes(content[:-1])
        with pytest.raises(ml.errors.DamagedCheckpointError):
            ck.restore(like)
        path.write_bytes(content)
    assert_same_bits(ck.restore(like), expected)


def test_a_damaged_step_is_passed_over_where_that_is_asked_for(tmp_path):
    where = saved(tmp_path, 1, 2) / "2"
    max(files_of(where), key=lambda path: path.stat().st_size).unlink()
    with ml.Checkpointer(tmp_path) as ck, pytest.warns(ml.errors.CheckpointWarning):
        assert_same_bits(ck.resume(STATE), STATE)


def test_a_step_is_restored_onto_other_meshes_and_inspected(tmp_path, mesh_2x4):
    w = ml.relayout(np.ones((8, 4), "float32"), mesh_2x4.layout("batch", "model"))
    saved(tmp_path, 3, state={"w": w})
    ck = ml.Checkpointer(tmp_path)
    other = ml.create_mesh({"x": 8}).layout("x", None)
    like = {"w": jax.ShapeDtypeStruct((8, 4), "float32", sharding=other.sharding)}
    restored = ck.restore(like)
    assert restored["w"].sharding == other.sharding
    np.testing.assert_array_equal(restored["w"], w)
    assert "w     f32[8, 4]  [batch, model]" in str(ck.inspect(3))


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


def test_a_checkpoint_of_the_old_format_is_refused_with_a_way_out(tmp_path):
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "manifest.json").write_text('{"manifest": {"version": 3}}')
    for call in (lambda ck: ck.restore(STATE), lambda ck: ck.resume(STATE)):
        with (
            ml.Checkpointer(tmp_path) as ck,
            pytest.raises(ml.errors.CheckpointError) as caught,
        ):
            call(ck)
        assert not isinstance(caught.value, ml.errors.DamagedCheckpointError)
        assert re.search(r"commit .*\b[0-9a-f]{7,40}\b", str(caught.value))
        assert "safetensors" in str(caught.value)


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


# A run that ends and goes on.

LOOP = """
import os, signal, sys
import jax, jax.numpy as jnp, numpy as np, optax, meshlayout as ml
from flax import nnx
ml.virtual_devices(4)
directory, stop_at, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
rng = np.random.default_rng(0)
rows = {"x": rng.normal(size=(96, 8)).astype("float32")}

class Net(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
    def __call__(self, x):
        return self.b(self.dropout(nnx.relu(self.a(x))))

def loss_fn(model, batch):
    return ((model(batch["x"]) - batch["x"]) ** 2).mean(axis=-1)

layouts = ml.LayoutMap(ml.create_mesh({"batch": 4}))
state = ml.TrainState.create(lambda: Net(nnx.Rngs(0)), optax.adam(1e-2), layouts)
train_step = ml.make_train_step(loss_fn)
with ml.Checkpointer(directory, every=3) as ck:
    data = ml.distribute_dataset(
        rows, layouts.mesh, global_batch_size=16, shuffle=3, epochs=3)
    batches = iter(data)
    state = ck.resume(state, data=batches)
    print("from", int(state.step), flush=True)
    for batch in batches:
        state, metrics = train_step(state, batch)
        step = int(state.step)
        print(step, float(metrics["loss"]).hex(), flush=True)
        if step == stop_at:
            os.kill(os.getpid(), getattr(signal, how))
        ck.save(step, state, data=batches)
    ck.save(step, state, data=batches, force=True)
"""


def losses_of(found):
    rows = (line.split() for line in found.stdout.splitlines())
    return {int(row[0]): row[1] for row in rows if row[0].isdigit()}


def test_a_loop_of_ones_own_resumes_to_the_bit_and_sigterm_saves(tmp_path):
    whole = run_program(LOOP, tmp_path / "whole", 0, "")
    assert whole.returncode == 0, whole.stderr
    for how, status, begins_at in (("SIGTERM", 75, [8]), ("SIGKILL", -9, [3, 6])):
        first = run_program(LOOP, tmp_path / how, 8, how)
        assert first.returncode == status, first.stderr
        second = run_program(LOOP, tmp_path / how, 0, "")
        assert second.returncode == 0, second.stderr
        assert second.stdout.split()[:2] in [["from", str(n)] for n in begins_at]
        assert losses_of(first) | losses_of(second) == losses_of(whole)
        assert_same_bits(
            ml.Checkpointer(tmp_path / how).restore_numpy(),
            ml.Checkpointer(tmp_path / "whole").restore_numpy(),
        )


ENDS = """
import os, signal, sys, threading, jax.numpy as jnp, meshlayout as ml
ck = ml.Checkpointer(sys.argv[1])
ck.save(1, {"w": jnp.ones((2048, 2048))})
if sys.argv[2] == "error":
    raise RuntimeError("of the program")
if sys.argv[2] == "ctrl-c":
    threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    ck.wait()
    ck.wait()
"""


@pytest.mark.parametrize("how", ["exit", "error", "ctrl-c"])
def test_a_process_that_ends_in_a_save_finishes_it(tmp_path, how):
    found = run_program(ENDS, tmp_path, how)
    if how == "exit":
        assert found.returncode == 0, found.stderr
    ck = ml.Checkpointer(tmp_path)
    assert ck.all_steps() == [1]
    assert ck.restore_numpy()["w"].sum() == 2048 * 2048


# Several processes.


def of_two(shared, own):
    """Runs on both processes, in directories of their own."""
    mesh = ml.create_mesh({"batch": -1})
    index = jax.process_index()

    def array(value):
        return jax.make_array_from_callback(
            (4,), mesh.layout(None).sharding, lambda _: np.full(4, value, "float32")
        )

    def error_of(directory, state, **options):
        try:
            with ml.Checkpointer(directory) as ck:
                ck.save(1, state, **options)
        except ml.errors.CheckpointError as error:
            return str(error)
        return None

    def fails():
        if index == 1:
            raise OSError("no metadata here")
        return {}

    said = {
        # Two directories under one name.
        "apart": error_of("/proc/self/cwd/run", {"w": array(1)}),
        "differ": error_of(f"{shared}/differ", {"w": array(1 + index)}),
        "equal": error_of(f"{shared}/equal", {"w": array(1)}),
    }
    try:
        said["metadata"] = error_of(f"{shared}/meta", {"w": array(1)}, metadata=fails)
    except OSError as error:
        said["metadata"] = str(error)
    return said


def in_own_directory(shared):
    own = Path(shared) / str(jax.process_index())
    own.mkdir()
    before = Path.cwd()
    os.chdir(own)
    try:
        return of_two(shared, own)
    finally:
        os.chdir(before)


@pytest.mark.multiprocess
def test_processes_that_do_not_fit_are_told_at_once(tmp_path):
    (tmp_path / "shared").mkdir()
    where = str(tmp_path / "shared")
    for said in run_processes(2, in_own_directory, where, timeout_s=60):
        assert "share" in said["apart"]
        assert "process 1" in said["differ"]
        assert said["equal"] is None
        assert "no metadata here" in said["metadata"]
    for name in ("differ", "meta"):
        assert ml.Checkpointer(tmp_path / "shared" / name).all_steps() == []
    assert ml.Checkpointer(tmp_path / "shared" / "equal").all_steps() == [1]


def test_the_public_names_are_these():
    options = inspect.signature(ml.Checkpointer).parameters
    assert {"directory", "keep", "every"} <= options.keys()
    assert not hasattr(ml.checkpoint, "Loop")
    for name in (
        *("load_safetensors", "save_safetensors", "load_orbax", "load_msgpack"),
        *("load_arrays", "RestoreDiff"),
    ):
        assert hasattr(ml.checkpoint, name)
    for name in ("restore", "restore_numpy", "resume", "save", "wait", "all_steps"):
        assert inspect.getdoc(getattr(ml.Checkpointer, name))
    parameters = inspect.signature(ml.Checkpointer.restore).parameters
    assert {"rename", "partial", "dtype"} <= parameters.keys()
    assert not {"only", "allow"} & parameters.keys()
