"""Checkpoints in Google Cloud Storage: a store on loopback that keeps its rules."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshlayout as ml
from meshlayout.checkpoint import Checkpointer
from tests.object_store import ObjectStore, serving
from tests.orbax_noise import quiet_orbax
from tests.processes import run_processes


if importlib.util.find_spec("gcsfs") is None:
    pytest.skip("gcsfs is not installed", allow_module_level=True)


def take_no_tensorflow(patch):
    """Has Orbax use gcsfs: TensorFlow's files, which it prefers, know no other host."""
    patch.setattr("etils.epath.gpath._is_tf_installed", lambda: False)


@pytest.fixture(scope="module")
def served():
    store = ObjectStore()
    with serving(store), pytest.MonkeyPatch.context() as patch:
        take_no_tensorflow(patch)
        quiet_orbax()
        yield store


@pytest.fixture
def store(served):
    """The store, with one bucket."""
    served.buckets.clear()
    served.buckets["bucket"] = {}
    served.history.clear()
    return served


@pytest.fixture
def run(tmp_path):
    """A directory that no other test has used."""
    return f"gs://bucket/{tmp_path.name}"


def values(step):
    """A state whose every array tells its step."""
    rng = np.random.default_rng(step)
    return {
        "kernel": rng.normal(size=(16, 8)).astype("f4"),
        "half": rng.normal(size=(8, 4)).astype(jnp.bfloat16),
        "step": np.int32(step),
    }


def step_of(state):
    """The step of which every value is, bit for bit."""
    step = int(state["step"])
    for name, wanted in values(step).items():
        assert np.asarray(state[name]).tobytes() == wanted.tobytes(), name
    return step


def test_what_is_saved_in_a_bucket_is_restored_on_a_mesh(store, run, mesh_2x4, caplog):
    losses = {1: 0.9, 2: 0.1, 3: 0.5, 4: 0.4}
    with Checkpointer(run, keep=1, best=("loss", "min")) as ck:
        for step, loss in losses.items():
            ck.save(step, values(step), metadata={"a": step}, metrics={"loss": loss})
        ck.wait()
        assert (ck.all_steps(), ck.best_step()) == ([2, 4], 2)
    (line,) = (one.getMessage() for one in caplog.records if "guards" in one.msg)
    assert line.endswith(": nothing guards it from other runs")
    names = store.names("bucket")
    assert {name.split("/")[1] for name in names} == {"2", "4"}
    kernel = jax.device_put(np.zeros((16, 8), "f4"), mesh_2x4.layout("batch").sharding)
    reader = Checkpointer(run)
    restored = reader.restore({**values(0), "kernel": kernel})
    assert step_of(restored) == 4
    assert restored["kernel"].sharding == kernel.sharding
    assert step_of(reader.restore_numpy(step=2)) == 2
    assert reader.inspect(2).metadata == {"a": 2}
    with Checkpointer(run) as ck:  # a step that is saved again is the new one
        for value in (1.0, 2.0):
            ck.save(5, {"w": np.full(3, value)})
            ck.wait()
            assert reader.restore_numpy()["w"].tolist() == [value] * 3


def test_what_another_machine_saves_and_deletes_is_seen_at_once(store, run):
    for directory, step in ((run, 1), (f"{run}-elsewhere", 3)):
        with Checkpointer(directory) as ck:
            ck.save(step, values(step))
    ck = Checkpointer(run)
    assert (ck.all_steps(), step_of(ck.restore_numpy())) == ([1], 1)
    elsewhere = f"{run}-elsewhere".removeprefix("gs://bucket/")
    for name in store.names("bucket", f"{elsewhere}/3/"):
        content = store.buckets["bucket"][name].content
        store.put("bucket", name.replace("-elsewhere", "", 1), content)
    assert (ck.all_steps(), step_of(ck.restore_numpy())) == ([1, 3], 3)
    for name in store.names("bucket", f"{run.removeprefix('gs://bucket/')}/3/"):
        store.put("bucket", name, None)
    assert (ck.all_steps(), step_of(ck.restore_numpy())) == ([1], 1)


@pytest.mark.slow
def test_a_writer_may_die_before_any_write_or_deletion(store, counts):
    with Checkpointer("gs://bucket/run", keep=1) as ck:
        for turn, step in enumerate((1, 2, 3)):
            ck.save(step, {"turn": np.full(3, turn), "step": np.int32(step)})
            ck.wait()
    moments = [moment["bucket"] for moment in [*store.history, store.buckets]]
    for number, moment in enumerate(moments):
        store.buckets = {f"moment-{number}": dict(moment)}
        ck = Checkpointer(f"gs://moment-{number}/run", keep=1)
        for step in ck.all_steps():
            assert ck.restore_numpy(step=step)["turn"].tolist() == [step - 1] * 3
        if number % 10 == 0:  # and any step can be saved after all
            for step in (1, 2, 3):
                ck.save(step, {"turn": np.full(3, 9)})
            ck.wait()
            assert ck.restore_numpy()["turn"].tolist() == [9, 9, 9]
        ck.close()
    counts(f"{len(moments)} moments at which a writer may die")


def test_what_is_not_a_directory_is_refused():
    for directory in ("gs:/bucket/run", "s3://bucket/run"):
        words = f"^'{directory}' is neither a local path nor 'gs://bucket/run' as a"
        with pytest.raises(ml.errors.CheckpointError, match=words):
            Checkpointer(directory)


def save_together(directory):
    """Saves on the devices of all processes, and restores what was saved."""
    with pytest.MonkeyPatch.context() as patch:
        take_no_tensorflow(patch)
        layout = ml.create_mesh({"batch": 4}).layout("batch")
        whole = np.arange(16.0, dtype="f4")
        with Checkpointer(directory, keep=2) as ck:
            for step in (1, 2, 3):
                w = jax.make_array_from_callback(
                    (16,), layout.sharding, lambda index, step=step: whole[index] + step
                )
                ck.save(step, {"w": w})
            ck.wait()
            steps = ck.all_steps()
            like = {"w": jax.ShapeDtypeStruct((16,), "f4", sharding=layout.sharding)}
            restored = ck.restore(like)["w"]
        parts = [np.asarray(one.data).tolist() for one in restored.addressable_shards]
        return steps, sorted(parts)


@pytest.mark.multiprocess
def test_two_processes_save_in_a_bucket(store, run):
    told = run_processes(2, save_together, run)
    parts = (np.arange(16.0, dtype="f4") + 3).reshape(4, 4).tolist()
    assert told == [[[2, 3], parts[:2]], [[2, 3], parts[2:]]]
