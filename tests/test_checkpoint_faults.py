"""Breaks checkpoints, disks and writers, and sees that nothing is lost silently."""

import os
import re
import resource
import shutil
import subprocess
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshlayout as ml
from meshlayout.checkpoint import Checkpointer, directory as steps, orbax
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


def restored(ck, mesh):
    """The step that a resumed run gets whole, and what it warned of."""
    position = Position()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = ck.resume(state_of(0, mesh), data=position)
    ck.close()
    said = [str(one.message) for one in caught if one.category is CheckpointWarning]
    return whose(found, position.at, mesh), said


def files_of(directory):
    return sorted(one for one in directory.rglob("*") if one.is_file())


# Files that change.


@pytest.mark.parametrize("flips", [14, pytest.param(100, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_noticed(tmp_path, mesh_2x4, counts, flips):
    write_two_steps(tmp_path, mesh_2x4)
    rng = np.random.default_rng(0)
    some = [one for one in files_of(tmp_path / "2") if one.stat().st_size]
    ck = Checkpointer(tmp_path)
    for turn in range(flips):
        file = some[turn % len(some)]
        content = before = file.read_bytes()
        bit = int(rng.integers(8 * len(content)))
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        found, said = restored(ck, mesh_2x4)
        assert (found, len(said)) == (1, 1), f"{file.name}, bit {bit}"
        file.write_bytes(before)
    assert restored(ck, mesh_2x4) == (2, [])
    counts(f"{flips} flipped bits in {len(some)} files: all found")


SLOW = [pytest.param(x, marks=pytest.mark.slow) for x in ("emptied", "zeroed")]


@pytest.mark.parametrize("kind", ["cut off", "deleted", *SLOW])
def test_every_damaged_file_is_found(tmp_path, mesh_2x4, kind):
    write_two_steps(tmp_path, mesh_2x4)
    ck = Checkpointer(tmp_path)
    damaged = 0
    for file in files_of(tmp_path / "2"):
        content = file.read_bytes()
        new = {"cut off": content[: len(content) // 2], "zeroed": bytes(len(content))}
        new = new.get(kind, b"")
        if kind == "deleted":
            file.unlink()
        elif new == content:
            continue
        else:
            file.write_bytes(new)
        damaged += 1
        with pytest.raises(ml.errors.DamagedCheckpointError, match=file.name):
            ck.restore(state_of(0, mesh_2x4))
        found, said = restored(ck, mesh_2x4)
        assert (found, len(said)) == (1, 1), file
        assert str(file) in said[0]
        file.write_bytes(content)
    assert damaged >= 8
    assert restored(ck, mesh_2x4) == (2, [])


def test_verify_can_be_left_out(tmp_path, mesh_2x4):
    write_two_steps(tmp_path, mesh_2x4)
    file = tmp_path / "2" / "commit_success.txt"
    file.write_bytes(bytes(file.stat().st_size))
    ck = Checkpointer(tmp_path)
    with pytest.raises(ml.errors.DamagedCheckpointError) as caught:
        ck.restore(state_of(0, mesh_2x4))
    assert re.fullmatch(
        rf"{file} is not as it was saved: size and SHA-256 are \[\d+, '\w+'\], and "
        r"were \[\d+, '\w+'\]\. Restore another step, or `resume`, which takes the newest "
        "intact one; verify=False reads whatever is there.",
        str(caught.value),
    )
    found = ck.restore(state_of(0, mesh_2x4), verify=False)
    assert whose(found, 2, mesh_2x4) == 2


def test_without_an_intact_step_a_fallback_says_so(tmp_path, mesh_2x4):
    write_two_steps(tmp_path, mesh_2x4)
    for step in (1, 2):
        (tmp_path / str(step) / "files.json").write_text("{")
    with pytest.raises(ml.errors.DamagedCheckpointError) as caught:
        Checkpointer(tmp_path).resume({"x": 1})
    words = str(caught.value)
    assert words.startswith(f"{tmp_path} has no intact step. ")
    assert all(f"{tmp_path}/{step}/files.json is not as" in words for step in (1, 2))


def test_the_older_format_is_refused_with_the_way_out(tmp_path, mesh_2x4):
    write_two_steps(tmp_path, mesh_2x4)
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "manifest.json").write_text("{}")
    with Checkpointer(tmp_path, keep=1) as ck:
        with pytest.raises(ml.errors.CheckpointError) as caught:
            ck.resume({"x": 1})
        assert str(caught.value) == (
            f"{tmp_path}/5 is a checkpoint of an older format, which this version does "
            "not read. The last commit of meshlayout that reads it is bb727a3: there, "
            "ml.checkpoint.save_safetensors(file, checkpointer.restore_numpy()) exports "
            "it, and ml.checkpoint.load_safetensors loads that file here."
        )
        ck.save(6, state_of(1, mesh_2x4))
        ck.wait()
        assert ck.all_steps() == [5, 6]  # nothing deletes it


# Writing that fails.


def check_save_works_after(ck, mesh):
    """The failure is told once, the old step is whole, and the next save works."""
    assert ck.all_steps() == [1]
    assert whose(ck.restore(state_of(0, mesh)), 1, mesh) == 1
    assert ck.save(2, state_of(2, mesh))
    ck.wait()
    assert ck.all_steps() == [1, 2]
    assert whose(ck.restore(state_of(0, mesh)), 2, mesh) == 2
    assert names_in(ck.directory) == [".lock", "1", "2"]


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("limit", [1000, 20_000], ids=["small files too", "arrays"])
def test_files_that_cannot_grow_are_reported_once(tmp_path, mesh_2x4, limit):
    big = {"x": np.random.default_rng(0).normal(size=100_000)}
    with Checkpointer(tmp_path) as ck:
        ck.save(1, state_of(1, mesh_2x4))
        ck.wait()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            ck.save(2, big)
            with pytest.raises(ml.errors.CheckpointError, match="step 2 could not be"):
                ck.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        check_save_works_after(ck, mesh_2x4)


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


def test_a_directory_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ml.errors.CheckpointError) as caught:
        Checkpointer(tmp_path / "file").save(1, {"x": 1})
    assert str(caught.value) == (
        f"step 1 could not be saved in {tmp_path}/file: [Errno 17] File exists: "
        f"'{tmp_path}/file'. Earlier steps are unchanged; the next save starts anew."
    )


class Failing:
    """Orbax's response to a save, whose files could not be written."""

    def __init__(self, response):
        self.response = response

    def result(self):
        self.response.result()
        raise OSError("the cable is out")


def fail_next_save(monkeypatch):
    start = orbax.start_writing

    def once(*args):
        monkeypatch.setattr(orbax, "start_writing", start)
        return Failing(start(*args))

    monkeypatch.setattr(orbax, "start_writing", once)


@pytest.mark.parametrize(
    "call",
    ["save", "wait", "close", "inspect", "restore_numpy"],
)
def test_the_next_call_that_waits_raises_what_went_wrong_once(
    tmp_path, mesh_2x4, monkeypatch, call
):
    ck = Checkpointer(tmp_path)
    ck.save(1, state_of(1, mesh_2x4))
    ck.wait()
    fail_next_save(monkeypatch)
    ck.save(2, state_of(2, mesh_2x4))
    args = (3, state_of(2, mesh_2x4)) if call == "save" else ()
    with pytest.raises(ml.errors.CheckpointError) as caught:
        getattr(ck, call)(*args)
    assert str(caught.value) == (
        f"step 2 could not be saved in {tmp_path}: the cable is out. Earlier steps are "
        "unchanged; the next save starts anew."
    )
    ck = Checkpointer(tmp_path) if call == "close" else ck
    check_save_works_after(ck, mesh_2x4)
    ck.close()


def test_an_old_step_that_cannot_be_deleted_is_reported(
    tmp_path, mesh_2x4, monkeypatch, caplog
):
    with Checkpointer(tmp_path, keep=1) as ck:
        ck.save(1, state_of(1, mesh_2x4))
        ck.wait()
        rename = Path.rename

        def refuse(path, target):
            if "/1.deleting" in str(target):
                raise OSError("busy")
            return rename(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", refuse)
            ck.save(2, state_of(2, mesh_2x4))
            ck.wait()
        (line,) = (x.getMessage() for x in caplog.records if x.levelno >= 30)
        assert line == f"{tmp_path}/1, which is not needed any more, stays: busy"
        assert ck.all_steps() == [1, 2]
        ck.save(3, state_of(1, mesh_2x4))
        ck.wait()
        assert ck.all_steps() == [3]


# Whose directory it is.


def test_what_no_checkpointer_wrote_is_left_alone(tmp_path, mesh_2x4):
    """Directories with numbers for names: somebody's notes, and a run of plain Orbax."""
    library = pytest.importorskip("orbax.checkpoint")
    write_two_steps(tmp_path, mesh_2x4)
    (tmp_path / "2" / "config.yaml").write_text("mine")
    (tmp_path / "9").symlink_to(tmp_path / "away")
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024" / "thesis.txt").write_text("mine")
    with library.CheckpointManager(tmp_path / "plain") as manager:
        item = library.args.Composite(
            state=library.args.StandardSave({"w": np.ones(3)})
        )
        manager.save(7, args=item)
    (tmp_path / "plain" / "7").rename(tmp_path / "7")
    before = files_of(tmp_path)
    with Checkpointer(tmp_path, keep=1) as ck:
        for step in (2024, 7):
            with pytest.raises(ml.errors.CheckpointError) as caught:
                ck.save(step, state_of(1, mesh_2x4))
            assert str(caught.value) == (
                f"{tmp_path}/{step} is in the way: it is not an intact step of this "
                "version. Remove it."
            )
    assert files_of(tmp_path) == before
    assert restored(Checkpointer(tmp_path), mesh_2x4)[0] == 2


def test_a_sealed_copy_stands_in_for_its_step_until_it_takes_its_name(
    tmp_path, mesh_2x4
):
    write_two_steps(tmp_path, mesh_2x4)
    (tmp_path / "2").rename(tmp_path / "2.new")
    shutil.copytree(tmp_path / "1", tmp_path / "1.deleting-123")
    shutil.copytree(tmp_path / "1", tmp_path / "5.new")
    (tmp_path / "5.new" / "files.json").unlink()
    (tmp_path / "7.new.orbax-checkpoint-tmp").mkdir()
    ck = Checkpointer(tmp_path)
    assert ck.all_steps() == [1, 2]
    assert restored(ck, mesh_2x4) == (2, [])
    ck.save(3, state_of(1, mesh_2x4))
    ck.close()
    assert names_in(tmp_path) == [".lock", "1", "2", "3"]
    assert steps.is_whole(tmp_path / "2")
