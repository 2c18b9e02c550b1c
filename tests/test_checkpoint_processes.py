"""Checkpoints of several real processes, and from any number of them to any other."""

import contextlib
import functools
import json
import resource
import signal
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax._src.sharding_impls import GSPMDSharding  # noqa: TID251
from safetensors.numpy import load_file

import meshlayout as ml
from meshlayout import checkpoint
from meshlayout.arrays.parts import replica_sums
from meshlayout.checkpoint import Checkpointer, checkpointer, orbax
from tests.error_messages import outcome_of
from tests.processes import run_processes
from tests.test_checkpoint import WHOLE, Position
from tests.test_checkpoint_foreign import Counted
from tests.test_checkpoint_interrupts import interrupt, slowed


pytestmark = pytest.mark.multiprocess

MESHES = {
    "2x2": ({"batch": 2, "model": 2}, ("batch", "model")),
    "4x1": ({"batch": 4, "model": 1}, ("model", "batch")),
}


def mesh_of(axes):
    return ml.create_mesh(axes, devices=jax.devices()[:4])


def place(value, layout):
    """Puts a value that every process has on the mesh of all."""
    cut = lambda index: value[index]
    return jax.make_array_from_callback(value.shape, layout.sharding, cut)


def state_on(name):
    axes, specs = MESHES[name]
    mesh = mesh_of(axes)
    split = functools.partial(jax.random.split, jax.random.key(3), 8)
    return {
        "kernel": place(WHOLE, mesh.layout(*specs)),
        "bias": place(WHOLE[0].astype(jnp.bfloat16), mesh.layout(None)),
        "keys": jax.jit(split, out_shardings=mesh.layout("batch").sharding)(),
        "step": jnp.int32(7),
        "numpy": np.arange(3),
        "number": 5,
    }


def shards(state):
    """What this process holds of a state, as text that can be compared."""
    found = {}
    for name, x in state.items():
        if not isinstance(x, jax.Array):
            found[name] = repr(x)
            continue
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        parts = {
            repr(s.index): np.asarray(s.data).tobytes().hex()
            for s in (x.addressable_shards)
        }
        found[name] = f"{x.dtype} {x.shape} {sorted(parts.items())}"
    return found


def save_all(directory):
    """Saves on every mesh, one directory each."""
    for name in MESHES:
        with Checkpointer(Path(directory) / name, keep=2) as ck:
            state = state_on(name)
            for step in (1, 2, 3):
                ck.save(step, state, data=Position(4))
            ck.wait()
            assert ck.all_steps() == [2, 3]


def restore_all(directory):
    """Restores what was saved on each mesh on the other one; returns how many."""
    names = list(MESHES)
    for name, other in zip(names, names[::-1], strict=True):
        like, position = state_on(other), Position()
        made = Checkpointer(Path(directory) / name).restore(like, data=position)
        assert shards(made) == shards(like), (name, other)
        assert position.state == 4
    return len(names)


def visit(own, others):
    save_all(own)
    return sum(map(restore_all, others))


def test_two_processes_restore_what_one_saved_and_one_what_two_saved(tmp_path):
    one, two = (str(tmp_path / str(count)) for count in (1, 2))
    save_all(one)
    run_processes(2, visit, two, [one], shared=True)
    restore_all(two)


@pytest.mark.slow
def test_any_number_of_processes_restores_what_any_other_saved(tmp_path):
    one, two, four, other = (str(tmp_path / name) for name in "124x")
    save_all(one)
    assert run_processes(2, visit, two, [two, one]) == [4] * 2
    found = run_processes(4, visit, four, [one, two], devices_per_process=1)
    assert found == [4] * 4
    assert run_processes(2, visit, other, [four]) == [2] * 2
    assert restore_all(two) + restore_all(four) == 4


KERNEL = np.arange(128, dtype="float32").reshape(8, 16)
BIAS = np.arange(16, dtype="float32")


def check(got):
    """Returns the shapes of this process's shards, which have the right values."""
    shapes = []
    for key, whole in (("kernel", KERNEL), ("bias", BIAS)):
        for shard in got[key].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])
            shapes.append(list(shard.data.shape))
    return shapes


def weights(where):
    """Loads weights of every kind; returns what this process holds, read and heard."""
    mesh = mesh_of({"batch": 2, "model": 2})
    state = {
        "kernel": place(KERNEL, mesh.layout("batch", "model")),
        "bias": place(BIAS, mesh.layout("model")),
        "scale": place(np.ones(4, "float32"), mesh.layout(None)),
        "local": np.full(3, 5, "float32"),
    }
    save = checkpoint.save_safetensors
    save(f"{where}/plain", state)
    places = f"{where}/plain", f"{where}/{jax.process_index()}"  # not shared
    said = [outcome_of(save, place, state) for place in places]
    specs = {"kernel": ("model", "batch"), "bias": (("batch", "model"),)}
    other = ml.LayoutMap(mesh, specs)
    parts = [check(checkpoint.load_safetensors(f"{where}/plain", other))]
    read = []  # the name and shape of every slice
    counted = {"kernel": KERNEL, "bias": BIAS}
    counted = {name: Counted(name, x, read) for name, x in counted.items()}
    parts.append(check(checkpoint.load_arrays(counted, other)))
    tree = {name: state[name] for name in ("kernel", "bias")}
    with ocp.StandardCheckpointer() as saver:
        saver.save(f"{where}/orbax", tree)
    parts.append(check(checkpoint.load_orbax(f"{where}/orbax", other)))
    return {"said": said, "shards": parts, "read": read}


def test_two_processes_write_one_file_and_read_their_own_slices(tmp_path):
    for one in run_processes(2, weights, str(tmp_path), shared=True):
        assert one["shards"] == [[[4, 8], [4, 8], [4], [4]]] * 3
        # Half of each array: what the two devices of a process hold.
        slices = [["bias", [4]], ["kernel", [4, 8]]]
        assert sorted(one["read"]) == sorted(slices * 2)
        exists, unseen = one["said"]
        assert exists.endswith("exists. Give another name, or overwrite=True.")
        assert f"{tmp_path}/1/.model.safetensors.incomplete'" in unseen
    assert not [*tmp_path.glob("[01]/*")]
    (file,) = (tmp_path / "plain").iterdir()
    expected = {"kernel": KERNEL, "bias": BIAS}
    expected |= {"local": np.full(3, 5), "scale": np.ones(4)}
    for name, array in load_file(file).items():
        np.testing.assert_array_equal(array, expected.pop(name))
    assert not expected


def share_read(directory):
    """Returns the shares of files that this process reads to save and to restore."""

    def bytes_read():
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(lines[0].removeprefix("rchar: "))

    x = np.random.default_rng(0).normal(size=(2048, 1024)).astype("float32")
    state = {"x": place(x, mesh_of({"model": 4}).layout("model", None))}
    with Checkpointer(directory) as ck:
        before = bytes_read()
        ck.save(1, state)
        ck.wait()
        middle = bytes_read()
        ck.restore(state)
        read = middle - before, bytes_read() - middle
    files = [x for x in Path(directory, "1").rglob("*") if x.is_file()]
    return [part / sum(x.stat().st_size for x in files) for part in read]


def test_each_process_hashes_and_reads_its_share(tmp_path):
    for saved, restored in run_processes(2, share_read, str(tmp_path), shared=True):
        assert 0.4 < saved < 0.6
        # Half of the files are hashed here, and half of the array is read.
        assert 0.9 < restored < 1.1


def faults(directory):
    """Lets things go wrong on one process; returns what each one was told."""
    first, told = jax.process_index() == 0, {}
    state = state_on("2x2")
    ck = Checkpointer(directory)
    ck.save(1, state, data=Position({"at": 10 + jax.process_index()}))
    ck.wait()

    # The files of process 1 cannot be written, and it does not wait for the others.
    def fail():
        if not first:
            raise OSError("the cable is out")

    with pytest.MonkeyPatch.context() as patch:
        slowed(patch, fail)
        ck.save(2, state)
        told["background"] = outcome_of(ck.wait)

    # Process 0 cannot make the directory.
    if first:
        (Path(directory) / "3").write_text("in the way")
    told["directory"] = outcome_of(ck.save, 3, state)
    if first:
        (Path(directory) / "3").unlink()

    # The step is not a number on process 1.
    told["step"] = outcome_of(ck.save, 4 if first else "4", state)

    # Process 1 has an iterator, or a function, that fails.
    bad = Position({"at": 1 if first else {1, 2}})
    told["data"] = outcome_of(ck.save, 4, state, data=bad)

    def metadata():
        return {} if first else {}["not here"]

    told["metadata"] = outcome_of(ck.save, 1, state, metadata=metadata)
    ck.save(4, state)
    ck.wait()
    told["all_steps"] = ck.all_steps()

    # Process 1 looks into another directory.
    other = Checkpointer(directory if first else f"{directory}-other")
    told["other"] = outcome_of(other.restore, state)

    # A file is damaged.
    if first:
        (Path(directory) / "4" / "orbax.checkpoint").write_text("?")
    told["damaged"] = outcome_of(ck.restore, state)
    position = Position()
    with warnings.catch_warnings(record=True, action="always") as caught:
        made = ck.resume(state, data=position)
    told["warned"] = [str(one.message).partition(".")[0] for one in caught]
    told["same"] = shards(made) == shards(state)
    told["position"] = position.state
    ck.close()
    return told


def test_all_processes_raise_what_went_wrong_on_one(tmp_path):
    run, is_not = tmp_path / "run", "is not as it was saved:"
    for index, one in enumerate(run_processes(2, faults, str(run), shared=True)):
        why = f"CheckpointError: step 2 could not be saved in {run}: the cable is out. "
        assert one["background"].startswith(why)
        assert one["directory"].startswith(f"CheckpointError: {run}/3 is in the way: ")
        assert one["step"].endswith("step must be a non-negative integer, got '4'.")
        assert one["data"] == (
            "CheckpointError: data.get_state()['at'] is {1, 2}, which cannot be written "
            "as JSON."
        )
        assert one["metadata"].endswith("'not here'")
        assert one["all_steps"] == [1, 4]
        assert one["other"].startswith(
            f"DamagedCheckpointError: {run}-other/4/_CHECKPOINT_METADATA {is_not} [Errno"
        )
        assert one["damaged"].startswith(
            f"DamagedCheckpointError: {run}/4/orbax.checkpoint {is_not} size and SHA-256"
        )
        assert one["warned"] == ["restored step 1, the newest that is intact"]
        assert (one["same"], one["position"]) == (True, {"at": 10 + index})
    left = sorted(path.name for path in run.iterdir())
    assert left == [".lock", ".shared", "1", "4"]
    assert outcome_of(Checkpointer(run).restore, data=Position(), step=1) == (
        "CheckpointError: the data positions of 2 processes differed: "
        "restore on 2 processes."
    )
    facts = json.loads((run / "1" / "_CHECKPOINT_METADATA").read_text())
    assert facts["custom_metadata"]["data"] == [{"at": 10}, {"at": 11}]


def disagreements(directory):
    """Saves what is not the same on both processes; returns what each was told."""
    first, told = jax.process_index() == 0, {}
    state, mesh = state_on("2x2"), mesh_of({"batch": 2, "model": 2})
    elsewhere = f"{directory}-x" if first else "/x"
    with Checkpointer(directory) as ck, Checkpointer(elsewhere) as x:
        begin_s = time.monotonic()
        told["directories"] = outcome_of(x.save, 1, state)
        told["seconds"] = time.monotonic() - begin_s
        told["steps"] = outcome_of(ck.save, 1 if first else 2, state)
        other = state if first else state | {"more": jnp.ones(2)}
        told["states"] = outcome_of(ck.save, 1, other)
        # One bit differs in an array that all devices hold, or of which each process
        # holds all shards.
        half = WHOLE.astype(jnp.bfloat16)
        half.view(np.uint16)[7, 7] ^= 0 if first else 1
        for name, specs in ("copies", (None, None)), ("shards", (None, "model")):
            flipped = state | {"half": place(half, mesh.layout(*specs))}
            told[name] = outcome_of(ck.save, 1, flipped)
        told["sums"] = []
        for layout in mesh.layout(None, None), mesh.layout(None, "model"):
            hlo = layout.sharding._to_xla_hlo_sharding(2)
            other = GSPMDSharding(tuple(mesh.jax_mesh.devices.flat), hlo)
            both = [place(half, SimpleNamespace(sharding=other)), place(half, layout)]
            told["sums"].append([[*replica_sums([array]).values()] for array in both])
        ck.save(1, state)
        ck.wait()
        told["whole"] = ck.all_steps()
    return told


def test_processes_that_differ_save_nothing(tmp_path):
    begin = "CheckpointError: nothing was saved, because the processes differ: "
    for one in run_processes(2, disagreements, str(tmp_path / "run"), shared=True):
        assert one["directories"] == (
            "CheckpointError: process 1 and process 0 do not share the directory /x: "
            "all of them must."
        )
        assert one["seconds"] < 10
        assert one["steps"] == f"{begin}the step is 2 on process 1, and 1 on process 0."
        assert one["states"].startswith(
            f"{begin}the digest of paths, shapes and dtypes is "
        )
        for name in ("copies", "shards"):
            assert one[name].startswith(
                f"{begin}the sum of the arrays and numbers that processes share is "
            )
        assert all(other == named != [] for other, named in one["sums"])
        assert one["whole"] == [1]


def interrupts(directory):
    """Presses Ctrl-C on process 1 in the copy, the wait, the exchange and the start."""
    state, ck = state_on("2x2"), Checkpointer(directory)
    is_it, main = jax.process_index() == 1, threading.main_thread().ident
    start, go = orbax.start_writing, threading.Event()

    def slowly(*args):
        if is_it:
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.5)
        return start(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orbax, "start_writing", slowly)
        with pytest.raises(KeyboardInterrupt) if is_it else contextlib.nullcontext():
            ck.save(1, state)
        ck.wait()
    with pytest.MonkeyPatch.context() as patch:
        slowed(patch, lambda: go.wait(60) and None)
        ck.save(2, state)
        if is_it:
            interrupt(ck.wait)
        go.set()
        ck.wait()
    sums = checkpointer.replica_sums

    def late(arrays):
        time.sleep(0.5)
        return sums(arrays)

    with pytest.MonkeyPatch.context() as patch:  # while it waits for process 0
        if is_it:
            interrupt(lambda: ck.save(3, state))
        else:
            patch.setattr(checkpointer, "replica_sums", late)
            ck.save(3, state)
        ck.wait()
    begin = threading.Thread.start

    def never(thread):  # before the thread of the save begins
        if threading.current_thread() is not threading.main_thread():
            return begin(thread)  # the library watches the other processes
        threading.Thread.start = begin
        raise KeyboardInterrupt

    if is_it:
        threading.Thread.start = never
    with pytest.raises(KeyboardInterrupt) if is_it else contextlib.nullcontext():
        ck.save(4, state)
    ck.close()
    assert shards(ck.restore(state)) == shards(state)
    return ck.all_steps()


def test_ctrl_c_on_one_of_two_processes_loses_nothing(tmp_path):
    found = run_processes(2, interrupts, str(tmp_path / "run"), shared=True)
    assert found == [[2, 3, 4], [2, 3, 4]]


def ends(directory):
    """Cannot write on process 1; then both end without having been shut down."""
    ml.shutdown = lambda: None
    rows = np.random.default_rng(0).random((512, 512), np.float32)
    state = {"w": place(rows, mesh_of({"batch": 4}).layout("batch", None))}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if jax.process_index() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    ck = Checkpointer(directory)
    ck.save(1, state)
    told = outcome_of(ck.wait)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return told


def test_programs_end_after_a_save_that_failed_on_one_process(tmp_path):
    # Orbax waits for process 1 for minutes, in a pool that Python waits for.
    for told in run_processes(2, ends, str(tmp_path), timeout_s=60):
        assert "File too large" in told
