"""Breaks checkpoints, disks and writers, and sees that nothing is lost silently."""

import dataclasses
import json
import logging
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
import warnings
from concurrent import futures
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshlayout as ml
from meshlayout.checkpoint import Checkpointer, lease, orbax, step_writer
from meshlayout.checkpoint.orbax_arrays import OrbaxArrays
from meshlayout.errors import CheckpointWarning
from tests.orbax_noise import quiet_orbax


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    quiet_orbax()


def state_of(step, mesh):
    """A state whose every value tells its step."""
    rng = np.random.default_rng(step)
    sharding = mesh.layout("batch", "model").sharding
    return {
        "kernel": jax.device_put(rng.normal(size=(64, 32)).astype("f4"), sharding),
        "half": jnp.asarray(rng.normal(size=(16, 8)), "bfloat16"),
        "host": rng.normal(size=(9,)),
        "step": jnp.int32(step),
    }


class Position:
    """An input iterator."""

    def __init__(self, at=None):
        self.at = at

    def get_state(self):
        return {"at": self.at, "seed": 7}

    def set_state(self, state):
        assert state["seed"] == 7
        self.at = state["at"]


def write_two_steps(directory, mesh):
    with Checkpointer(directory) as ck:
        for step in (1, 2):
            ck.save(step, state_of(step, mesh), data=Position(step))


def whose(state, at, mesh):
    """The step whose values these are, all of them, or None."""
    for step in (1, 2):
        wanted = jax.tree.map(np.asarray, state_of(step, mesh))
        found = jax.tree.map(np.asarray, state)
        same = jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), found, wanted)
        if at == step and all(jax.tree.leaves(same)):
            return step
    return None


def restored(ck, mesh, **options):
    """The step that a restore gives whole, and what it warned of."""
    position = Position()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        like = state_of(0, mesh)
        made = ck.restore(like, data=position, **options)
    said = [str(one.message) for one in caught if one.category is CheckpointWarning]
    return whose(made, position.at, mesh), said


def files_of(directory):
    return sorted(one for one in directory.rglob("*") if one.is_file())


@pytest.mark.parametrize("hashed_bytes", [0, 4 * 2**20], ids=["prints", "hashes"])
def test_every_flipped_bit_is_noticed(
    tmp_path, mesh_2x4, monkeypatch, hashed_bytes, counts
):
    # Without hashes, the fingerprints alone have to find what is wrong.
    monkeypatch.setattr(step_writer, "_HASHED_BYTES", hashed_bytes)
    write_two_steps(tmp_path, mesh_2x4)
    rng = np.random.default_rng(hashed_bytes)
    some = [one for one in files_of(tmp_path / "2") if one.stat().st_size]
    ck = Checkpointer(tmp_path)
    seen = harmless = 0
    for turn in range(100):
        file = some[turn % len(some)]
        content = bytearray(file.read_bytes())
        bit = int(rng.integers(8 * len(content)))
        content[bit // 8] ^= 1 << bit % 8
        before = file.read_bytes()
        file.write_bytes(content)
        found, said = restored(ck, mesh_2x4, fallback=True)
        where = f"{file.relative_to(tmp_path)}, bit {bit}"
        if found == 2:
            harmless += 1
            assert hashed_bytes == 0, where
        else:
            seen += 1
            assert found == 1, where
            assert len(said) == 1, where
        file.write_bytes(before)
    assert seen + harmless == 100
    assert restored(ck, mesh_2x4) == (2, [])
    counts(
        f"{seen + harmless} flipped bits: {seen} found, {harmless} without effect, "
        "0 silent"
    )


def damage(file, kind):
    """Damages a file; tells whether its content is another one now."""
    content = file.read_bytes()
    if kind == "deleted":
        file.unlink()
        return True
    new = {
        "cut off": content[: len(content) // 2],
        "emptied": b"",
        "zeroed": bytes(len(content)),
    }[kind]
    file.write_bytes(new)
    return new != content


@pytest.mark.parametrize("kind", ["cut off", "emptied", "zeroed", "deleted"])
def test_every_damaged_file_is_found(tmp_path, mesh_2x4, kind):
    write_two_steps(tmp_path / "run", mesh_2x4)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    ck = Checkpointer(tmp_path / "run")
    damaged = 0
    for name in [
        one.relative_to(tmp_path / "run") for one in files_of(tmp_path / "run" / "2")
    ]:
        file = tmp_path / "run" / name
        if damage(file, kind):
            damaged += 1
            if name.name != "manifest.json" or kind != "deleted":
                with pytest.raises(ml.errors.DamagedCheckpointError, match=file.name):
                    ck.restore(state_of(0, mesh_2x4))
            found, said = restored(ck, mesh_2x4, fallback=True)
            assert (found, len(said)) == (1, 1), name
            assert str(file) in said[0] or name.name == "manifest.json"
        shutil.copy(tmp_path / "copy" / name, file)
    assert damaged >= 8
    assert restored(ck, mesh_2x4) == (2, [])


def test_a_damaged_array_is_named(tmp_path, mesh_2x4, monkeypatch):
    monkeypatch.setattr(step_writer, "_HASHED_BYTES", 0)
    state = {"net": {"kernel": jnp.arange(4096.0), "bias": jnp.ones(3)}}
    other = {"net": {"kernel": jnp.arange(4096.0) + 1, "bias": jnp.ones(3)}}
    with Checkpointer(tmp_path) as ck:
        ck.save(1, state)
        ck.save(2, other)
        ck.wait()
        shutil.rmtree(tmp_path / "2" / "state")
        shutil.copytree(tmp_path / "1" / "state", tmp_path / "2" / "state")
        one, two = (ck._steps.manifest(step) for step in (1, 2))
        monkeypatch.setattr(type(two), "files", {}, raising=False)
        object.__setattr__(two, "files", one.files)
        with pytest.raises(ml.errors.DamagedCheckpointError) as caught:
            ck.restore(state)
    assert str(caught.value).startswith(
        f"net/kernel f32[4096]: the values in {tmp_path / '2'} are not the ones that were saved; the damage is in state/"
    )


def test_verify_can_be_left_out(tmp_path, mesh_2x4):
    write_two_steps(tmp_path, mesh_2x4)
    (tmp_path / "2" / "state" / "orbax.checkpoint").write_bytes(b"?")
    ck = Checkpointer(tmp_path)
    with pytest.raises(ml.errors.DamagedCheckpointError) as caught:
        ck.restore(state_of(0, mesh_2x4))
    assert str(caught.value) == (
        f"{tmp_path}/2/state/orbax.checkpoint has 1 bytes, but 0 were saved. Restore "
        "another step, or the newest intact one with fallback=True; verify=False reads whatever is there."
    )
    assert restored(ck, mesh_2x4, verify=False) == (2, [])


def test_without_an_intact_step_a_fallback_says_so(tmp_path, mesh_2x4):
    write_two_steps(tmp_path, mesh_2x4)
    for step in (1, 2):
        (tmp_path / str(step) / "manifest.json").write_text("{")
    ck = Checkpointer(tmp_path)
    assert ck.all_steps() == []
    with pytest.raises(ml.errors.DamagedCheckpointError) as caught:
        ck.restore_numpy(fallback=True)
    assert str(caught.value) == (
        f"no intact step is left in {tmp_path}: all 2 are damaged. Step 2: "
        f"{tmp_path}/2/manifest.json is not as it was saved: the file is truncated or "
        "changed. Restore another step, or the newest intact one with fallback=True."
    )


def test_a_step_under_another_name_is_refused(tmp_path, mesh_2x4):
    write_two_steps(tmp_path, mesh_2x4)
    (tmp_path / "2").rename(tmp_path / "9")
    ck = Checkpointer(tmp_path)
    with pytest.raises(
        ml.errors.DamagedCheckpointError, match="is the manifest of step 2"
    ):
        ck.restore_numpy()
    assert ck.all_steps() == [1]


# Writing that fails.


def save_and_wait(ck, step, state):
    ck.save(step, state)
    ck.wait()


def check_save_works_after(ck, mesh):
    """The failure is told once, the old step is whole, and the next save works."""
    assert ck.all_steps() == [1]
    found = ck.restore(state_of(0, mesh))
    assert whose(found, 1, mesh) == 1
    assert ck.save(2, state_of(2, mesh))
    ck.wait()
    assert ck.all_steps() == [1, 2]
    assert whose(ck.restore(state_of(0, mesh)), 2, mesh) == 2
    hidden = [one.name for one in ck.directory.rglob(".*")]
    assert all(map(re.compile(r"\.owner-\w{8}\.json").fullmatch, hidden)), hidden


@pytest.mark.parametrize("limit", [1000, 20_000], ids=["small files too", "arrays"])
def test_files_that_cannot_grow_are_reported_once(tmp_path, mesh_2x4, limit):
    big = {"x": np.random.default_rng(0).normal(size=100_000)}
    with Checkpointer(tmp_path) as ck:
        ck.save(1, state_of(1, mesh_2x4))
        ck.wait()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(
                ml.errors.CheckpointError, match="step 2 could not be saved"
            ):
                save_and_wait(ck, 2, big)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        check_save_works_after(ck, mesh_2x4)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["1", "2"]


@pytest.fixture
def small_disk(tmp_path):
    """A disk of four megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_reported_once(small_disk, mesh_2x4):
    big = {"x": np.random.default_rng(0).normal(size=1_000_000)}
    with Checkpointer(small_disk / "run") as ck:
        ck.save(1, state_of(1, mesh_2x4))
        for _ in range(2):
            ck.save(2, big)
            with pytest.raises(ml.errors.CheckpointError, match="No space left"):
                ck.wait()
            ck.wait()
        check_save_works_after(ck, mesh_2x4)


def test_a_directory_that_cannot_be_written_is_reported(tmp_path, mesh_2x4):
    with Checkpointer(tmp_path / "run") as ck:
        ck.save(1, state_of(1, mesh_2x4))
        ck.wait()
        user = os.geteuid()
        tmp_path.chmod(0o755)
        (tmp_path / "run").chmod(0o555)
        if user == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(ml.errors.CheckpointError) as caught:
                save_and_wait(ck, 2, state_of(2, mesh_2x4))
        finally:
            os.seteuid(user)
            (tmp_path / "run").chmod(0o755)
        assert "step 2 could not be saved" in str(caught.value)
        assert "Permission denied" in str(caught.value)
        check_save_works_after(ck, mesh_2x4)


def test_a_directory_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ml.errors.CheckpointError) as caught:
        Checkpointer(tmp_path / "file")
    assert str(caught.value) == (
        f"the checkpoint directory {tmp_path}/file cannot be used: [Errno 17] File "
        f"exists: '{tmp_path}/file'. Give a directory that this process may write to."
    )


def failing(monkeypatch):
    """Makes the next save fail in the background."""
    start = orbax.start_writing

    def once(directory, arrays):
        wait = start(directory, arrays)
        monkeypatch.setattr(orbax, "start_writing", start)

        def fail():
            wait()
            raise OSError("the cable is out")

        return fail

    monkeypatch.setattr(orbax, "start_writing", once)


@pytest.mark.parametrize(
    "call",
    ["save", "wait", "close", "all_steps", "latest_step", "inspect", "restore_numpy"],
)
def test_the_next_call_of_any_kind_raises_what_went_wrong_once(
    tmp_path, mesh_2x4, monkeypatch, call
):
    ck = Checkpointer(tmp_path)
    ck.save(1, state_of(1, mesh_2x4))
    ck.wait()
    failing(monkeypatch)
    ck.save(2, state_of(2, mesh_2x4))
    ck._saving.wait()
    args = (3, state_of(2, mesh_2x4)) if call == "save" else ()
    with pytest.raises(ml.errors.CheckpointError) as caught:
        getattr(ck, call)(*args)
    assert str(caught.value) == (
        f"step 2 could not be saved in {tmp_path}: the cable is out. Earlier steps are unchanged; the next save starts anew."
    )
    ck = Checkpointer(tmp_path) if call == "close" else ck
    check_save_works_after(ck, mesh_2x4)
    ck.close()


def test_an_error_in_the_block_is_not_hidden(tmp_path, mesh_2x4, monkeypatch):
    failing(monkeypatch)

    def train():
        with Checkpointer(tmp_path) as ck:
            ck.save(1, state_of(1, mesh_2x4))
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        train()
    assert caught.value.__notes__[0].startswith("Moreover, step 1 could not be saved")


def test_an_old_step_that_cannot_be_deleted_is_reported(
    tmp_path, mesh_2x4, monkeypatch
):
    ck = Checkpointer(tmp_path, keep=1)
    ck.save(1, state_of(1, mesh_2x4))
    ck.wait()
    rename = Path.rename

    def refuse(path, target):
        if ".deleting" in str(target):
            raise OSError("busy")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        ck.save(2, state_of(2, mesh_2x4))
        with pytest.raises(ml.errors.CheckpointError) as caught:
            ck.wait()
    assert str(caught.value) == (
        "step 2 is saved, but step 1, which retention does not keep, could not be "
        "deleted: busy."
    )
    assert ck.all_steps() == [1, 2]
    ck.save(3, state_of(1, mesh_2x4))
    ck.wait()
    assert ck.all_steps() == [3]


# What is left over.


def begin(directory, step, owner, **changes):
    """A save that was begun: files, and the note of the owner who writes them."""
    folder = directory / f".saving-{step}-{owner}-12345678"
    (folder / "state.orbax-checkpoint-tmp").mkdir(parents=True)
    (folder / "state.orbax-checkpoint-tmp" / "x").write_text("x")
    note = dataclasses.asdict(lease.Owner.of_this_process()) | changes
    (directory / f".owner-{owner}.json").write_text(json.dumps(note))


HOUR_S = 3600.0


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": 0},
        {"pid": os.getpid(), "started": "0"},  # its number was given to another one
        {"boot": "another", "renewed_at": time.time()},  # started again since
        {"host": "another", "renewed_at": time.time() - HOUR_S},
        {"host": "another", "renewed_at": time.time() + 10 * 365 * 24 * HOUR_S},
        {"namespace": "another", "renewed_at": 0.0},  # a container before this one
    ],
    ids=["dead", "recycled", "rebooted", "elsewhere", "future", "container"],
)
def test_what_dead_writers_left_is_removed_at_the_start(
    tmp_path, mesh_2x4, caplog, changes
):
    write_two_steps(tmp_path, mesh_2x4)
    if changes.get("pid") == 0:
        dead = subprocess.Popen([sys.executable, "-c", ""])
        dead.wait()
        changes = {"pid": dead.pid}
    begin(tmp_path, 7, "0123abcd", **changes)
    (tmp_path / ".saving-2-0123abcd-12345678").mkdir()
    (tmp_path / ".deleting-0-12345678").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    caplog.set_level(logging.INFO, "meshlayout.checkpoint")
    ck = Checkpointer(tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["1", "2", "notes.txt"]
    assert restored(ck, mesh_2x4) == (2, [])
    assert any("of unfinished saves from" in one.message for one in caplog.records)
    ck.save(7, state_of(1, mesh_2x4))
    ck.close()


def test_what_an_orbax_left_never_blocks_a_step(tmp_path, mesh_2x4):
    for step, name in (
        (5, "state.orbax-checkpoint-tmp"),
        (6, "state-3.orbax-checkpoint-tmp"),
    ):
        (tmp_path / str(step) / name / "x").mkdir(parents=True)
    (tmp_path / "7").mkdir()
    with Checkpointer(tmp_path) as ck:
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "9" / "state.orbax-checkpoint-tmp").mkdir(parents=True)
        ck.save(9, state_of(1, mesh_2x4))
        ck.wait()
        assert ck.all_steps() == [9]
    assert sorted(one.name for one in (tmp_path / "9").iterdir()) == [
        "manifest.json",
        "state",
    ]


def test_what_no_checkpointer_wrote_is_left_alone(tmp_path, mesh_2x4):
    """Directories with numbers for names: somebody's notes, and a run of plain Orbax."""
    library = pytest.importorskip("orbax.checkpoint")
    write_two_steps(tmp_path, mesh_2x4)
    (tmp_path / "2" / "config.yaml").write_text("mine")
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024" / "thesis.txt").write_text("mine")
    with library.CheckpointManager(tmp_path / "plain") as manager:
        item = library.args.Composite(
            state=library.args.StandardSave({"w": np.ones(3)})
        )
        manager.save(7, args=item)
    (tmp_path / "plain" / "7").rename(tmp_path / "7")
    before = files_of(tmp_path)
    ck = Checkpointer(tmp_path)
    assert files_of(tmp_path) == before
    theirs = "_CHECKPOINT_METADATA, commit_success.txt, state"
    for step, names in ((2024, "thesis.txt"), (7, theirs)):
        with pytest.raises(ml.errors.CheckpointError) as caught:
            ck.save(step, state_of(1, mesh_2x4))
        assert str(caught.value) == (
            f"step {step} could not be saved in {tmp_path}: {tmp_path}/{step} holds "
            f"{names}, which no Checkpointer wrote. Save in another directory, or remove that one. Earlier steps are unchanged; the next save starts anew."
        )
    ck.close()
    assert files_of(tmp_path) == before
    assert restored(Checkpointer(tmp_path), mesh_2x4)[0] == 2


def test_a_step_whose_manifest_was_deleted_is_reported_after_a_restart(
    tmp_path, mesh_2x4
):
    write_two_steps(tmp_path, mesh_2x4)
    (tmp_path / "2" / "manifest.json").unlink()
    ck = Checkpointer(tmp_path)
    found, said = restored(ck, mesh_2x4)
    assert found == 1
    assert said == [
        f"{tmp_path}/2 has no manifest: the save of that step was not completed, or the "
        "file was deleted. Restoring step 1."
    ]
    ck.save(2, state_of(2, mesh_2x4), data=Position(2))
    ck.wait()
    assert restored(ck, mesh_2x4) == (2, [])
    names = sorted(one.name for one in (tmp_path / "2").iterdir())
    assert names == ["data.json", "manifest.json", "state"]


def test_a_manifest_that_is_not_a_file_does_not_keep_the_others_from_being_read(
    tmp_path, mesh_2x4
):
    write_two_steps(tmp_path, mesh_2x4)
    (tmp_path / "2" / "manifest.json").unlink()
    (tmp_path / "2" / "manifest.json").mkdir()
    ck = Checkpointer(tmp_path)
    with pytest.raises(
        ml.errors.DamagedCheckpointError, match=r"manifest\.json cannot be read"
    ):
        ck.restore_numpy()
    assert restored(ck, mesh_2x4, fallback=True)[0] == 1


def test_reading_continues_while_another_checkpointer_saves_and_deletes(tmp_path):
    """All at once: the steps that are read are those that retention deletes."""
    with Checkpointer(tmp_path, keep=1) as writing:
        writing.save(0, {"w": np.zeros(1000, np.float32)})
        writing.wait()
        reading = Checkpointer(tmp_path)
        seen, stop = [], threading.Event()

        def read():
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                while not stop.is_set():
                    (value,) = set(reading.restore_numpy()["w"].tolist())
                    seen.append(value)

        with futures.ThreadPoolExecutor(1) as pool:
            result = pool.submit(read)
            for step in range(1, 31):
                writing.save(step, {"w": np.full(1000, step, np.float32)})
            writing.wait()
            stop.set()
            result.result()
    assert seen == sorted(seen)
    assert len(set(seen)) > 3


def test_a_step_that_is_deleted_while_it_is_read_is_reported(
    tmp_path, mesh_2x4, monkeypatch
):
    write_two_steps(tmp_path, mesh_2x4)
    ck = Checkpointer(tmp_path)
    read = OrbaxArrays.start

    def too_late(self, name, index):
        shutil.rmtree(tmp_path / "2", ignore_errors=True)
        return read(self, name, index)

    monkeypatch.setattr(OrbaxArrays, "start", too_late)
    with pytest.raises(ml.errors.CheckpointError) as caught:
        ck.restore_numpy(step=2)
    assert str(caught.value) == f"{tmp_path} has no step 2; it has 1."
    assert caught.type is ml.errors.CheckpointError
    write_two_steps(tmp_path, mesh_2x4)
    assert restored(ck, mesh_2x4) == (1, [])


def test_what_live_writers_are_at_work_on_stays(tmp_path, mesh_2x4):
    def left():
        return sorted(one.name[:10] for one in tmp_path.iterdir())

    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
    ) as other:
        started = lease._start_time(other.pid)
        begin(tmp_path, 7, "0000000a", pid=other.pid, started=started)
        begin(tmp_path, 8, "0000000b", host="other")
        Checkpointer(tmp_path)
        assert left() == [".owner-000", ".owner-000", ".saving-7-", ".saving-8-"]
        other.communicate(b"\n")
    Checkpointer(tmp_path)
    assert left() == [".owner-000", ".saving-8-"]


def test_two_checkpointers_of_one_process_leave_each_other_alone(tmp_path, mesh_2x4):
    with Checkpointer(tmp_path) as one:
        for step in range(1, 6):
            one.save(step, state_of(1, mesh_2x4))
            assert Checkpointer(tmp_path).restore is not None
        one.wait()
        assert one.all_steps() == [3, 4, 5]


def test_an_unfinished_newer_step_is_reported(tmp_path, mesh_2x4):
    ck = Checkpointer(tmp_path)
    ck.save(1, state_of(1, mesh_2x4), data=Position(1))
    ck.wait()
    (tmp_path / "2" / "state").mkdir(parents=True)
    found, said = restored(ck, mesh_2x4)
    assert (found, said) == (
        1,
        [
            f"{tmp_path}/2 has no manifest: the save of that step was not completed, or the "
            "file was deleted. Restoring step 1."
        ],
    )
