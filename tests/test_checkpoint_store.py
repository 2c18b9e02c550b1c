"""Checkpoints in Google Cloud Storage: a store on loopback that keeps its rules."""

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshlayout as ml
from meshlayout.checkpoint import Checkpointer, step_writer
from meshlayout.errors import CheckpointWarning
from tests.object_store import ObjectStore, serving
from tests.orbax_noise import quiet_orbax
from tests.processes import run_processes


if importlib.util.find_spec("gcsfs") is None:
    pytest.skip("gcsfs is not installed", allow_module_level=True)

ROOT = Path(__file__).parent.parent

_numbers = itertools.count()


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
    """The store, with a new bucket of its own for every test, `bucket`."""
    served.buckets.clear()
    served.buckets["bucket"] = {}
    served.history.clear()
    served.refuse = lambda *_: None
    yield served
    served.refuse = lambda *_: None


@pytest.fixture
def run():
    """A directory that no other test has used."""
    return f"gs://bucket/run-{next(_numbers)}"


def values(step):
    """A state whose every array tells its step."""
    rng = np.random.default_rng(step)
    return {
        "kernel": rng.normal(size=(16, 8)).astype("f4"),
        "half": rng.normal(size=(8, 4)).astype(jnp.bfloat16),
        "step": np.int32(step),
    }


def placed(step, mesh, *dims):
    found = values(step)
    layout = mesh.layout(*dims)
    return {
        "kernel": jax.device_put(found["kernel"], layout.sharding),
        "half": jnp.asarray(found["half"]),
        "step": jnp.int32(step),
    }


def step_of(state):
    """The step of which every value is, bit for bit."""
    step = int(state["step"])
    for name, wanted in values(step).items():
        assert np.asarray(state[name]).tobytes() == wanted.tobytes(), name
    return step


def save_steps(directory, *steps, **options):
    with Checkpointer(directory, **{"keep": None} | options) as ck:
        for step in steps:
            ck.save(step, values(step))


def error_of(function, *args, **options):
    with pytest.raises(ml.MeshLayoutError) as caught:
        function(*args, **options)
    return type(caught.value), str(caught.value)


def inside(directory):
    return directory.removeprefix("gs://bucket/")


def files_of(store, directory, step):
    return store.names("bucket", f"{inside(directory)}/{step}/")


class Position:
    """An input iterator."""

    def __init__(self, at=None):
        self.at = at

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


# Saving and restoring.


@pytest.mark.parametrize("async_save", [True, False], ids=["async", "sync"])
def test_what_is_saved_in_a_bucket_is_restored_on_another_mesh(
    store, run, mesh_2x4, async_save
):
    with Checkpointer(run, keep=None, async_save=async_save) as ck:
        for step in (1, 2, 3):
            saved = placed(step, mesh_2x4, "batch", "model")
            assert ck.save(step, saved, data=Position(10 * step), metadata={"a": step})
            if not async_save:
                assert ck.latest_step() == step
        ck.wait()
        assert ck.all_steps() == [1, 2, 3]
    other = ml.create_mesh({"batch": 4, "model": 2})
    like, position = placed(0, other, "model", "batch"), Position()
    with Checkpointer(run) as ck:
        made = ck.restore(like, data=position)
        assert step_of(made) == 3
        assert made["kernel"].sharding == like["kernel"].sharding
        assert position.at == 30
        assert step_of(ck.restore(like, step=2, data=position)) == 2
        assert position.at == 20
        numpy = ck.restore_numpy(step=1)
        assert {type(one) for one in numpy.values()} <= {np.ndarray, np.int32}
        assert step_of(numpy) == 1
        found = ck.inspect(2)
        assert (found.step, found.metadata) == (2, {"a": 2})
        assert [leaf.path for leaf in found.leaves] == ["half", "kernel", "step"]


def test_a_bucket_keeps_the_last_steps_the_best_and_every_so_many(store, run):
    losses = {1: 0.9, 2: 0.1, 3: 0.5, 4: 0.4, 5: 0.3, 6: 0.6, 7: 0.7}
    with Checkpointer(run, keep=2, keep_every=4, best=("loss", "min")) as ck:
        for step, loss in losses.items():
            ck.save(step, values(step), metrics={"loss": loss})
        ck.wait()
        assert ck.all_steps() == [2, 4, 6, 7]
        assert ck.best_step() == 2
        assert step_of(ck.restore_numpy(step="best")) == 2
    names = store.names("bucket", f"{inside(run)}/")
    assert {name.split("/")[1] for name in names} == {"2", "4", "6", "7"}


def test_a_step_that_is_saved_again_is_the_new_one(store, run):
    reader = Checkpointer(run)
    for values in ([1.0], [2.0, 3.0], [4.0, 5.0]):
        with Checkpointer(run) as ck:
            for value in values:
                ck.save(5, {"w": np.full(3, value)}, force=True)
        # The files have the same times, names and sizes as those it read before.
        assert reader.restore_numpy()["w"].tolist() == [values[-1]] * 3
        assert reader.all_steps() == [5]


def test_large_files_are_compared_by_size_and_fingerprint(store, run, monkeypatch):
    monkeypatch.setattr(step_writer, "_HASHED_BYTES", 0)
    save_steps(run, 1, 2)
    sizes = {
        n: len(store.buckets["bucket"][n].content) for n in files_of(store, run, 2)
    }
    largest = max((n for n in sizes if "/d/" in n), key=sizes.__getitem__)
    content = bytearray(store.buckets["bucket"][largest].content)
    ck = Checkpointer(run)
    assert step_of(ck.restore_numpy()) == 2
    store.put("bucket", largest, bytes(content[:-1]))
    with pytest.raises(ml.errors.DamagedCheckpointError, match="bytes, but"):
        ck.restore_numpy()
    content[len(content) // 2] ^= 1
    store.put("bucket", largest, bytes(content))
    with pytest.raises(ml.errors.DamagedCheckpointError):
        ck.restore_numpy()


def test_the_bucket_itself_may_be_the_directory(store):
    save_steps("gs://bucket/", 1)
    assert store.names("bucket", "1/manifest.json") == ["1/manifest.json"]
    assert Checkpointer("gs://bucket").all_steps() == [1]


def test_arrays_in_a_bucket_can_be_read_as_orbax_wrote_them(store, run, mesh_2x4):
    save_steps(run, 1)
    like = {"000002": jax.ShapeDtypeStruct((), "int32")}
    made = ml.checkpoint.load_orbax(f"{run}/1/state", like, partial=True)
    assert int(made["000002"]) == 1


# Other machines.


def copy(store, old, new, step):
    """Has another machine save a step, without this process's clients."""
    for name in files_of(store, old, step):
        content = store.buckets["bucket"][name].content
        store.put("bucket", name.replace(inside(old), inside(new), 1), content)


def test_what_another_machine_saves_and_deletes_is_seen_at_once(store, run):
    save_steps(run, 1, 2)
    save_steps(f"{run}-elsewhere", 3)
    ck = Checkpointer(run)
    assert (ck.all_steps(), step_of(ck.restore_numpy())) == ([1, 2], 2)
    copy(store, f"{run}-elsewhere", run, 3)
    assert (ck.all_steps(), step_of(ck.restore_numpy())) == ([1, 2, 3], 3)
    for name in files_of(store, run, 3):
        store.drop("bucket", name)
    assert (ck.all_steps(), step_of(ck.restore_numpy())) == ([1, 2], 2)


def test_a_save_in_progress_is_left_alone(store, run):
    save_steps(run, 1)
    arrived, go = threading.Event(), threading.Event()

    def hold(method, _, name):
        if method != "GET" and name.endswith("/2/manifest.json"):
            arrived.set()
            assert go.wait(30)

    store.refuse = hold
    writer = Checkpointer(run)
    writer.save(2, values(2))
    try:
        assert arrived.wait(30)
        before = files_of(store, run, 2)
        reader = Checkpointer(run)
        assert reader.all_steps() == [1]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert step_of(reader.restore_numpy()) == 1
        assert files_of(store, run, 2) == before
    finally:
        go.set()
    writer.close()
    assert (reader.all_steps(), step_of(reader.restore_numpy())) == ([1, 2], 2)


# Writers that die.


def check_no_leftovers(store, bucket):
    """Sees that all there is belongs to a step, by the names in the manifests."""
    wanted = set()
    for name in store.names(bucket):
        if name.endswith("/manifest.json"):
            folder = name.removesuffix("manifest.json")
            content = json.loads(store.buckets[bucket][name].content)
            wanted |= {name, *(folder + one for one in content["manifest"]["files"])}
    assert set(store.names(bucket)) == wanted


@pytest.mark.slow
def test_a_writer_may_die_before_any_write_or_deletion(store, counts):
    with Checkpointer("gs://bucket/run", keep=1) as ck:
        for turn, step in enumerate((1, 2, 2)):
            ck.save(step, {"turn": np.full(3, turn), "step": np.int32(step)})
            ck.wait()
    moments = [one["bucket"] for one in [*store.history, store.buckets]]
    newest = -1
    for number, moment in enumerate(moments):
        store.buckets = {f"moment-{number}": dict(moment)}
        ck = Checkpointer(f"gs://moment-{number}/run", keep=1)
        check_no_leftovers(store, f"moment-{number}")
        steps = ck.all_steps()
        turns = [int(ck.restore_numpy(step=step)["turn"][0]) for step in steps]
        assert [(1, 2, 2)[turn] for turn in turns] == steps
        assert max(turns, default=-1) in (newest, newest + 1), number
        newest = max(turns, default=-1)
        if number % 10 == 0:  # and the same step can be saved after all
            ck.save(2, {"turn": np.full(3, 9)}, force=True)
            ck.wait()
            assert ck.restore_numpy()["turn"].tolist() == [9, 9, 9]
            ck.close()
            check_no_leftovers(store, f"moment-{number}")
    assert newest == 2
    counts(f"{len(moments)} moments at which a writer may die")


def test_objects_that_stand_for_directories_are_not_files(store, run):
    # TensorFlow's files make them, and so does the store's own web page.
    save_steps(run, 1, 2)
    top = inside(run)
    for name in store.names("bucket"):
        for place in itertools.accumulate(name.split("/")[:-1], "{}/{}".format):
            store.put("bucket", f"{place}/", b"")
    for name in (f"{top}/3/state/", f"{top}/4/"):
        store.put("bucket", name, b"")
    store.put("bucket", f"{top}/3/.writer-0.json", b"{}")
    with Checkpointer(run, keep=1) as ck:
        assert ck.all_steps() == [1, 2]
        assert step_of(ck.restore_numpy(step=1)) == 1
        for step in (3, 4):
            assert ck.save(step, values(step))
        ck.wait()
        assert ck.all_steps() == [4]
        assert step_of(ck.restore_numpy()) == 4
    found = {name.split("/")[1] for name in store.names("bucket", f"{top}/")}
    assert found == {"", "4"}


WRITER = """
import sys
from meshlayout.checkpoint import Checkpointer
from tests.test_checkpoint_store import save_steps, take_no_tensorflow
import pytest

with pytest.MonkeyPatch.context() as patch:
    take_no_tensorflow(patch)
    save_steps(sys.argv[1], 1, 2)
"""


@pytest.mark.multiprocess
def test_a_killed_process_leaves_the_steps_before_and_nothing_else(store, run):
    started = []

    def kill(method, _, name):
        if method == "POST" and "/2/state/arrays/d/" in name:
            os.kill(started[0].pid, signal.SIGKILL)
            return 503
        return None

    store.refuse = kill
    search = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": search}
    with subprocess.Popen([sys.executable, "-c", WRITER, run], env=env) as child:
        started.append(child)
        assert child.wait(60) == -signal.SIGKILL
    store.refuse = lambda *_: None
    assert len(files_of(store, run, 2)) > 2
    ck = Checkpointer(run)
    assert files_of(store, run, 2) == []
    assert (ck.all_steps(), step_of(ck.restore_numpy())) == ([1], 1)


# Damage.


@pytest.mark.parametrize("kind", ["flipped", "cut", "deleted", "emptied"])
def test_damage_is_seen_and_an_older_step_taken(store, run, mesh_2x4, kind):
    save_steps(run, 1, 2)
    ck = Checkpointer(run)
    like = placed(0, mesh_2x4, "batch", "model")
    some = files_of(store, run, 2)
    assert len(some) > 8
    for number, name in enumerate(some):
        content = store.buckets["bucket"][name].content
        if not content and kind != "deleted":
            continue
        if kind == "deleted":
            store.drop("bucket", name)
        else:
            at = number * 7 % len(content)
            flipped = bytearray(content)
            flipped[at] ^= 1 << number % 8
            damaged = {"flipped": bytes(flipped), "cut": content[:-1], "emptied": b""}
            store.put("bucket", name, damaged[kind])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = ck.restore(like, fallback=True)
        assert step_of(made) == 1, name
        assert [one.category for one in caught] == [CheckpointWarning], name
        assert "gs://bucket" in str(caught[0].message)
        store.put("bucket", name, content)
    assert step_of(ck.restore(like)) == 2


def test_damage_is_named(store, run):
    save_steps(run, 1)
    name = next(n for n in files_of(store, run, 1) if n.endswith("manifest.ocdbt"))
    size = len(store.buckets["bucket"][name].content)
    way_out = (
        "Restore another step, or the newest intact one with fallback=True; "
        "verify=False reads whatever is there."
    )
    ck = Checkpointer(run)
    store.put("bucket", name, b"x" * (size + 3))
    assert error_of(ck.restore_numpy) == (
        ml.errors.DamagedCheckpointError,
        f"gs://bucket/{name} has {size + 3} bytes, but {size} were saved. {way_out}",
    )
    store.drop("bucket", name)
    assert error_of(ck.restore_numpy) == (
        ml.errors.DamagedCheckpointError,
        f"gs://bucket/{name} is missing. {way_out}",
    )


# A store that refuses.

SAYS_NOTHING = "That says nothing about the checkpoints there. Make sure that this process may use the bucket, and try again."


def test_a_store_that_refuses_is_not_an_empty_one(store, run):
    save_steps(run, 1)
    ck = Checkpointer(run)
    store.refuse = lambda *_: 403
    refused = f"{run} cannot be listed: Forbidden: b/bucket/o refused by the test."
    for ask in (ck.all_steps, ck.latest_step, ck.inspect, ck.restore_numpy):
        assert error_of(ask)[1] == f"{refused} {SAYS_NOTHING}"
    assert error_of(Checkpointer, run) == (
        ml.errors.CheckpointError,
        f"{refused} {SAYS_NOTHING}",
    )
    store.refuse = lambda *_: None
    assert (ck.all_steps(), step_of(ck.restore_numpy())) == ([1], 1)


@pytest.mark.parametrize(
    ("part", "verify"),
    [
        *itertools.product(["/manifest.json", "/d/", "manifest.ocdbt"], [True, False]),
        ("/_METADATA", True),  # not read otherwise
    ],
)
def test_a_file_that_the_store_refuses_is_not_a_damaged_one(store, run, part, verify):
    save_steps(run, 1, 2)
    ck = Checkpointer(run)
    store.refuse = lambda _, __, name: 403 if "/2/" in name and part in name else None
    kind, words = error_of(ck.restore_numpy, fallback=True, verify=verify)
    assert kind is not ml.errors.DamagedCheckpointError
    assert "Forbidden" in words
    assert words.endswith(SAYS_NOTHING)


def test_a_large_file_that_the_store_refuses_is_not_a_damaged_one(
    store, run, monkeypatch
):
    monkeypatch.setattr(step_writer, "_HASHED_BYTES", 0)
    save_steps(run, 1, 2)
    ck = Checkpointer(run)

    part = "/2/state/arrays/d/"
    store.refuse = lambda _, __, name: 403 if part in name else None
    kind, words = error_of(ck.restore_numpy, fallback=True)
    assert kind is not ml.errors.DamagedCheckpointError
    assert words.startswith(f"{run}/2 cannot be read: PERMISSION_DENIED: ")
    assert words.endswith(SAYS_NOTHING)


@pytest.mark.parametrize("part", ["/.saving-2-", "/d/", "/manifest.json"])
def test_a_save_that_the_store_refuses_leaves_the_steps_before(store, run, part):
    with Checkpointer(run) as ck:
        ck.save(1, values(1))
        ck.wait()
        before = store.names("bucket")

        def refuse(method, _, name):
            return 403 if method == "POST" and "/2/" in name and part in name else None

        store.refuse = refuse

        def save():
            ck.save(2, values(2))
            ck.wait()

        kind, words = error_of(save)
        assert kind is ml.errors.CheckpointError
        assert words.startswith(f"step 2 could not be saved in {run}: ")
        assert words.endswith(
            "refused by the test. Earlier steps are unchanged; the next save starts anew."
        )
        assert store.names("bucket") == before
        store.refuse = lambda *_: None
        save()
        assert ck.all_steps() == [1, 2]


def test_a_step_that_cannot_be_deleted_is_named(store, run):
    save_steps(run, 1)
    old = f"{inside(run)}/1/"
    store.refuse = lambda how, _, name: (
        403 if (how, name[: len(old)]) == ("DELETE", old) else None
    )
    ck = Checkpointer(run, keep=1)
    ck.save(2, values(2))
    kind, words = error_of(ck.wait)
    assert kind is ml.errors.CheckpointError
    assert words.startswith(
        "step 2 is saved, but step 1, which retention does not keep, could not be "
        f"deleted: {run}/1/manifest.json cannot be deleted: Forbidden: "
    )
    assert words.endswith(" refused by the test.")
    store.refuse = lambda *_: None
    assert ck.all_steps() == [1, 2]
    ck.save(3, values(3))
    ck.wait()
    assert ck.all_steps() == [3]
    ck.close()
    check_no_leftovers(store, "bucket")


# What is no directory.


def test_a_bucket_that_does_not_exist_is_refused_when_it_is_opened(store):
    assert error_of(Checkpointer, "gs://another/run") == (
        ml.errors.CheckpointError,
        "gs://another/run: the bucket 'another' does not exist. Create it, or use another one.",
    )
    assert list(store.buckets) == ["bucket"]


@pytest.mark.parametrize(
    ("directory", "message"),
    [
        ("gs://", "'gs://' names no bucket. Write 'gs://bucket/run'."),
        (
            Path("gs://bucket/run"),
            "'gs:/bucket/run' has lost a slash, as pathlib.Path takes it for a local path. Give the string 'gs://bucket/run'.",
        ),
        (
            "gs://bucket/lr=[0.1]",
            "'gs://bucket/lr=[0.1]' contains '[', which has a special meaning for some clients of the store. Use a path without any of * ? [ ] #.",
        ),
        (
            "s3://bucket/run",
            "'s3://bucket/run' is in a store that checkpoints cannot be written to. "
            "Give a local path, or 'gs://bucket/run' in Google Cloud Storage.",
        ),
    ],
)
def test_what_is_not_a_directory_is_refused(directory, message):
    assert error_of(Checkpointer, directory) == (ml.errors.CheckpointError, message)


def test_gcsfs_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert error_of(Checkpointer, "gs://bucket/run") == (
        ml.MeshLayoutError,
        "A path of Google Cloud Storage needs gcsfs, which is not installed: "
        "pip install 'meshlayout[gcs]'.",
    )


# Several processes.


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
            made = ck.restore(like)["w"]
        parts = [np.asarray(one.data).tolist() for one in made.addressable_shards]
        return steps, sorted(parts)


@pytest.mark.multiprocess
def test_two_processes_save_in_a_bucket_and_one_restores(store, run, mesh_2x4):
    said = run_processes(2, save_together, run)
    whole = np.arange(16.0, dtype="f4") + 3
    parts = whole.reshape(4, 4).tolist()
    assert said == [[[2, 3], parts[:2]], [[2, 3], parts[2:]]]
    check_no_leftovers(store, "bucket")
    sharding = mesh_2x4.layout("model").sharding
    like = {"w": jax.ShapeDtypeStruct((16,), "f4", sharding=sharding)}
    with Checkpointer(run) as ck:
        assert ck.inspect().num_processes == 2
        made = ck.restore(like)["w"]
    assert made.sharding == sharding
    np.testing.assert_array_equal(made, whole)
