"""Checkpoints of several real processes, and from any number of them to any other."""

import contextlib
import logging
import re
import signal
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.sharding_impls import GSPMDSharding  # noqa: TID251

import meshlayout as ml
from meshlayout.checkpoint import Checkpointer, orbax
from meshlayout.checkpoint.directory import read_facts
from meshlayout.cluster.replicas import replica_sums
from tests.processes import run_processes


pytestmark = pytest.mark.multiprocess

WHOLE = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)

MESHES = {
    "2x4": ({"batch": 2, "model": 4}, ("batch", "model")),
    "4x2": ({"batch": 4, "model": 2}, ("model", "batch")),
}


def place(value, layout):
    """Puts a value that every process has on the mesh of all."""
    if layout.sharding.is_fully_addressable:
        return jax.device_put(value, layout.sharding)
    cut = lambda index: value[index]  # noqa: E731
    return jax.make_array_from_callback(value.shape, layout.sharding, cut)


def state_on(name):
    axes, specs = MESHES[name]
    mesh = ml.create_mesh(axes)
    layout = mesh.layout(*specs)
    axis = next(iter(axes))
    keys = jax.jit(
        lambda: jax.random.split(jax.random.key(3), 8),
        out_shardings=mesh.layout(axis).sharding,
    )()
    return {
        "kernel": place(WHOLE, layout),
        "bias": place(WHOLE[0].astype(jnp.bfloat16), mesh.layout(None)),
        "keys": keys,
        "step": jnp.int32(7),
        "numpy": np.arange(3),
        "number": 5,
    }


class Position:
    """An input iterator whose place each process has for itself."""

    def __init__(self, at=None):
        self.at = at

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


def shards(state):
    """What this process holds of a state, as text that can be compared."""
    found = {}
    for path, x in jax.tree.leaves_with_path(state):
        name = jax.tree_util.keystr(path)
        if not isinstance(x, jax.Array):
            found[name] = repr(x)
            continue
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        parts = {
            repr(one.index): np.asarray(one.data).tobytes().hex()
            for one in x.addressable_shards
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
    """Restores what was saved on every mesh on the next one; returns the directories."""
    names = list(MESHES)
    for name, other in zip(names, names[1:] + names[:1], strict=True):
        like, position = state_on(other), Position()
        with Checkpointer(Path(directory) / name) as ck:
            made = ck.restore(like, data=position)
        assert shards(made) == shards(like), (name, other)
        assert position.at == 4
    return [str(Path(directory) / name) for name in names]


def visit(own, others):
    save_all(own)
    return [name for other in others for name in restore_all(other)]


def test_two_processes_restore_what_one_saved_and_one_what_two_saved(tmp_path):
    one, two = (str(tmp_path / str(count)) for count in (1, 2))
    save_all(one)
    run_processes(2, visit, two, [one], devices_per_process=4, shared=True)
    restore_all(two)


@pytest.mark.slow
def test_any_number_of_processes_restores_what_any_other_saved(tmp_path, counts):
    one, two, four = (str(tmp_path / str(count)) for count in (1, 2, 4))
    save_all(one)
    restored = run_processes(2, visit, two, [two, one], devices_per_process=4)
    restored += run_processes(4, visit, four, [one, two], devices_per_process=2)
    restored += run_processes(
        2, visit, str(tmp_path / "x"), [four], devices_per_process=4
    )
    restored.append(restore_all(two) + restore_all(four))
    assert [len(names) for names in restored] == [4] * 2 + [4] * 4 + [2] * 2 + [4]
    jobs = (restored[0], restored[2], restored[6], restored[8])
    counts(
        f"{sum(map(len, jobs))} restores on 1, 2 and 4 processes of what 1, 2 and 4 "
        "saved: all equal"
    )


# What goes wrong on one of them.


def message(call):
    try:
        call()
    except ml.errors.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def share_read(directory):
    """Returns the share of a large array's files that this process reads."""
    mesh = ml.create_mesh({"model": 8})
    x = np.random.default_rng(0).normal(size=(4096, 1024)).astype("float32")
    state = {"x": place(x, mesh.layout("model", None))}
    with Checkpointer(directory) as ck:
        ck.save(1, state)
        ck.wait()
        files = [x for x in Path(directory, "1").rglob("*") if x.is_file()]
        before = bytes_read()
        ck.restore(state)
        return (bytes_read() - before) / sum(x.stat().st_size for x in files)


def bytes_read():
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(lines[0].removeprefix("rchar: "))


def faults(directory):
    """Lets things go wrong on one process; returns what each one was told."""
    first = jax.process_index() == 0
    told = {"share": share_read(f"{directory}-large")}
    state = state_on("2x4")
    ck = Checkpointer(directory)
    ck.save(1, state, data=Position(10 + jax.process_index()))
    ck.wait()

    # The files of process 1 cannot be written.
    start = orbax.start_writing

    class Failing:
        def __init__(self, *args):
            self.response = start(*args)

        def result(self, timeout=None):
            if not first:
                raise OSError("the cable is out")
            return self.response.result(timeout)

    orbax.start_writing = Failing
    ck.save(2, state)
    told["background"] = message(ck.wait)
    orbax.start_writing = start

    # Process 0 cannot make the directory.
    if first:
        (Path(directory) / "3").write_text("in the way")
    told["directory"] = message(lambda: ck.save(3, state))
    if first:
        (Path(directory) / "3").unlink()

    # Process 1 has an iterator that cannot be saved.
    bad = Position(1 if first else {1, 2})
    told["data"] = message(lambda: ck.save(4, state, data=bad))

    ck.save(4, state)
    ck.wait()
    told["all_steps"] = ck.all_steps()

    # Process 1 looks into another directory.
    other = Checkpointer(directory if first else f"{directory}-other")
    told["other"] = message(lambda: other.restore(state))

    # A file is damaged.
    if first:
        (Path(directory) / "4" / "orbax.checkpoint").write_text("?")
    told["damaged"] = message(lambda: ck.restore(state))
    position = Position()
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = ck.resume(state, data=position)
    told["fallback"] = [str(one.message).partition(".")[0] for one in caught]
    told["same"] = shards(made) == shards(state)
    told["position"] = position.at
    ck.close()
    told |= disagreements(f"{directory}-disagreements")
    told["Ctrl-C"] = interrupts(f"{directory}-interrupts")
    return told


def interrupts(directory):
    """Presses Ctrl-C on process 1 in three moments of a save; returns what came of it."""
    start, begin = orbax.start_writing, threading.Thread.start
    state, told = state_on("2x4"), []
    ck = Checkpointer(directory, keep=None)

    def pressed(call):
        if jax.process_index():
            main = threading.main_thread().ident
            threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
        try:
            call()
        except KeyboardInterrupt:
            told.append("Ctrl-C")

    def slowly(*args):
        time.sleep(1.0)
        return start(*args)

    class Slow:
        def __init__(self, *args):
            self.response = start(*args)

        def result(self, timeout=None):
            time.sleep(1.0)
            return self.response.result(timeout)

    orbax.start_writing = slowly
    pressed(lambda: ck.save(1, state))  # while the state is copied
    ck.wait()
    orbax.start_writing = Slow
    ck.save(2, state)
    pressed(ck.wait)  # while files are written
    ck.wait()
    orbax.start_writing = start

    def never(thread):
        threading.Thread.start = begin
        raise KeyboardInterrupt

    if jax.process_index():  # before the thread of the save begins
        threading.Thread.start = never
    try:
        ck.save(3, state)
    except KeyboardInterrupt:
        told.append("Ctrl-C")
    ck.close()
    return told, ck.all_steps()


def disagreements(directory):
    """Saves what is not the same on both processes; returns what each was told."""
    first, told = jax.process_index() == 0, {}
    state = state_on("2x4")
    lines = []
    logger = logging.getLogger("meshlayout.cluster.channel")
    logger.addFilter(lambda record: lines.append(record.getMessage()))
    elsewhere = f"{directory}-x" if first else "/x"
    with Checkpointer(directory) as ck, Checkpointer(elsewhere) as x:
        own = 1 if first else 2
        told["steps"] = message(lambda: ck.save(own, state))
        told["directories"] = message(lambda: x.save(1, state))
        other = state if first else state | {"more": jnp.ones(2)}
        told["states"] = message(lambda: ck.save(1, other))
        # One bit differs in an array that all devices hold, or of which each process
        # holds all shards.
        half = WHOLE.astype(jnp.bfloat16)
        half.view(np.uint16)[7, 7] ^= 0 if first else 1
        mesh = ml.create_mesh({"batch": 2, "model": 4})
        for name, specs in ("copies", (None, None)), ("shards", (None, "model")):
            flipped = state | {"half": place(half, mesh.layout(*specs))}
            told[name] = message(lambda flipped=flipped: ck.save(1, flipped))
        sums = []
        for layout in mesh.layout(None, None), mesh.layout(None, "model"):
            hlo = layout.sharding._to_xla_hlo_sharding(2)
            sharding = GSPMDSharding(tuple(mesh.jax_mesh.devices.flat), hlo)
            arrays = [
                jax.make_array_from_callback(
                    half.shape, where, lambda index: half[index]
                )
                for where in (sharding, layout.sharding)
            ]
            sums.append([repr(replica_sums([array])) for array in arrays])
        told["of any sharding"] = sums

        def metadata():
            return {} if first else {}["not here"]

        with contextlib.suppress(KeyError):
            told["metadata"] = message(lambda: ck.save(1, state, metadata=metadata))
        time.sleep(0 if first else 13)  # as if process 0 saved alone
        ck.save(1, state)
        ck.wait()
        told["whole"] = ck.all_steps()
    told["lines"] = lines
    return told


def test_all_processes_raise_what_went_wrong_on_one(tmp_path):
    told = run_processes(2, faults, str(tmp_path), devices_per_process=4)
    end = "Earlier steps are unchanged; the next save starts anew."
    for index, one in enumerate(told):
        assert one["Ctrl-C"] == [["Ctrl-C"] * 3 * index, [1, 2, 3]]
        # Half of the files are hashed here, and half of the array is read.
        assert 0.9 < one["share"] < 1.1
        assert one["background"] == (
            f"CheckpointError: step 2 could not be saved in {tmp_path}: the cable is "
            f"out. {end}"
        )
        assert one["directory"] == (
            f"CheckpointError: {tmp_path}/3 is in the way: it is not an intact step of this "
            "version. Remove it."
        )
        assert one["data"] == (
            "CheckpointError: data.get_state()['at'] is {1, 2}, which cannot be written "
            "as JSON."
        )
        assert one["all_steps"] == [1, 4]
        assert one["other"].startswith(
            f"DamagedCheckpointError: {tmp_path}-other/4/_CHECKPOINT_METADATA is not as "
            "it was saved: [Errno 2] No such file"
        )
        assert one["damaged"].startswith(
            f"DamagedCheckpointError: {tmp_path}/4/orbax.checkpoint is not as it was saved: "
            "size and SHA-256 are [1, "
        )
        assert one["fallback"] == ["restored step 1, the newest that is intact"]
        assert one["same"]
        assert one["position"] == 10 + index
        begin = "CheckpointError: nothing is saved, as the processes differ: "
        ending = "."
        assert one["steps"] == (
            f"{begin}the step is 2 on process 1, and 1 on process 0{ending}"
        )
        assert one["directories"] == (
            "CheckpointError: process 1 and process 0 do not share the directory /x: "
            "all of them have to."
        )
        for general, named in one["of any sharding"]:
            assert general == named != "{}"
        for name in ("copies", "shards"):
            assert one[name].startswith(
                f"{begin}the sum of the arrays and numbers that processes share is "
            )
        assert one.get("metadata", "KeyError: 'not here'").endswith("'not here'")
        assert one["states"].startswith(
            f"{begin}the digest of paths, shapes and dtypes is "
        )
        assert one["whole"] == [1]
    (line, *_) = told[0]["lines"]
    assert re.fullmatch(
        r"process 0 has waited \d+ s for process 1 to come to the same save or "
        r"restore, and waits up to 1200 s\. All processes have to save and restore the "
        r"same steps in one order\.",
        line,
    )
    assert ["metadata" in one for one in told] == [True, False]
    left = sorted(one.name for one in tmp_path.iterdir())
    assert left == [".lock", ".shared", "1", "4"]
    with (
        Checkpointer(tmp_path) as ck,
        pytest.raises(ml.errors.CheckpointError) as caught,
    ):
        ck.restore(data=Position(), step=1)
    assert str(caught.value) == (
        "the data were at other positions on each of 2 processes: restore on 2 "
        "processes."
    )
    assert read_facts(tmp_path / "1")["data"] == [{"at": 10}, {"at": 11}]
