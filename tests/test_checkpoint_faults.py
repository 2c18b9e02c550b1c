"""Breaks checkpoints, disks and writers, and sees that nothing is lost silently."""

import re
import resource
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import meshlayout as ml
from meshlayout.checkpoint import Checkpointer, orbax
from meshlayout.errors import CheckpointWarning, DamagedCheckpointError
from tests.error_messages import message_of
from tests.orbax_noise import quiet_orbax
from tests.test_checkpoint import Position
from tests.test_checkpoint_interrupts import names_in


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    quiet_orbax()


def state_of(step):
    """A state whose every value tells its step."""
    rng = np.random.default_rng(step)
    sharding = ml.create_mesh({"batch": 2, "model": 4}).layout("batch", "model")
    kernel = rng.normal(size=(64, 32)).astype("f4")
    return {
        "kernel": jax.device_put(kernel, sharding.sharding),
        "half": jnp.asarray(rng.normal(size=(16, 8)), "bfloat16"),
        "host": rng.normal(size=(9,)),
        "step": jnp.int32(step),
    }


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two")
    with Checkpointer(directory) as ck:
        for step in (1, 2):
            ck.save(step, state_of(step), data=Position(step))
    return directory


@pytest.fixture
def run(two_steps, tmp_path):
    """A directory with two steps."""
    return shutil.copytree(
        two_steps, tmp_path / "run", ignore=shutil.ignore_patterns(".lock")
    )


def is_state_of(step, state):
    found = jax.tree.map(lambda x: np.asarray(x).tobytes(), state)
    return found == jax.tree.map(lambda x: np.asarray(x).tobytes(), state_of(step))


def resumed(directory):
    """The step that a resumed run gets whole, and what it warned of."""
    position = Position()
    with (
        warnings.catch_warnings(record=True, action="always") as caught,
        Checkpointer(directory) as ck,
    ):
        found = ck.resume(state_of(0), data=position)
    said = [str(one.message) for one in caught if one.category is CheckpointWarning]
    return position.state if is_state_of(position.state, found) else None, said


def files_of(directory):
    return sorted(one for one in directory.rglob("*") if one.is_file())


@pytest.mark.parametrize("kind", ["cut off", "deleted", "emptied", "zeroed"])
def test_every_damaged_file_is_found(run, kind):
    files = files_of(run / "2")
    assert len(files) >= 8
    for file in files:
        content = file.read_bytes()
        new = {"cut off": content[: len(content) // 2], "zeroed": bytes(len(content))}
        file.write_bytes(new.get(kind, b""))
        if kind == "deleted":
            file.unlink()
        if content or kind == "deleted":
            with pytest.raises(DamagedCheckpointError, match=file.name):
                Checkpointer(run).restore_numpy()
        file.write_bytes(content)
    files[-1].write_bytes(content[:-1])
    step, (said,) = resumed(run)
    assert step == 1
    assert said.startswith("restored step 1, the newest that is intact. ")
    assert str(files[-1]) in said


def test_verify_can_be_left_out(run):
    file = run / "2" / "commit_success.txt"
    file.write_bytes(bytes(file.stat().st_size))
    ck = Checkpointer(run)
    assert re.fullmatch(
        rf"{file} is not as it was saved: size and SHA-256 are \[\d+, '\w+'\], and "
        r"were \[\d+, '\w+'\]\. Restore another step, or `resume`, which takes the newest "
        "intact one; verify=False reads whatever is there.",
        message_of(ck.restore, state_of(0), error=DamagedCheckpointError),
    )
    assert is_state_of(2, ck.restore(state_of(0), verify=False))


def test_without_an_intact_step_nothing_is_read(run):
    for step in (1, 2):
        (run / str(step) / "files.json").write_text("{")
    words = message_of(Checkpointer(run).resume, {"x": 1}, error=DamagedCheckpointError)
    assert words.startswith(f"{run} has no intact step. ")
    assert all(f"{run}/{step}/files.json is not as" in words for step in (1, 2))


def test_the_older_format_is_refused_with_the_way_out(run):
    (run / "5").mkdir()
    (run / "5" / "manifest.json").write_text("{}")
    with Checkpointer(run, keep=1) as ck:
        assert message_of(ck.resume, {"x": 1}, error=ml.errors.CheckpointError) == (
            f"{run}/5 has an older format, which commit bb727a3 of meshlayout reads. "
            "There, write ml.checkpoint.save_safetensors(file, checkpointer."
            "restore_numpy()); here, ml.checkpoint.load_safetensors(file, state)."
        )
        ck.save(6, state_of(1))
        ck.wait()
        assert ck.all_steps() == [5, 6]  # nothing deletes it


def check_save_works_after(ck):
    ck.wait()
    for step in (1, 2):
        assert step == 1 or ck.save(2, state_of(2))
        ck.wait()
        assert ck.all_steps() == [1, 2][:step]
        assert is_state_of(step, ck.restore(state_of(0)))
    assert names_in(ck.directory) == [".lock", "1", "2"]


@pytest.fixture
def one(tmp_path):
    with Checkpointer(tmp_path / "one") as ck:
        ck.save(1, state_of(1))
        ck.wait()
        yield ck


@pytest.mark.parametrize("limit", [1000, 20_000], ids=["small files too", "arrays"])
def test_files_that_cannot_grow_are_reported_once(one, limit):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        one.save(2, {"x": np.random.default_rng(0).normal(size=100_000)})
        with pytest.raises(ml.errors.CheckpointError, match="step 2 could not be"):
            one.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    check_save_works_after(one)


@pytest.mark.parametrize("call", ["save", "wait", "close", "inspect", "restore_numpy"])
def test_the_next_call_that_waits_raises_what_went_wrong_once(one, monkeypatch, call):
    start = orbax.start_writing

    def fails_once(*args):
        monkeypatch.undo()
        response = start(*args)

        def result():
            response.result()
            raise OSError("the cable is out")

        return SimpleNamespace(result=result)

    monkeypatch.setattr(orbax, "start_writing", fails_once)
    one.save(2, state_of(2))
    args = (3, state_of(2)) if call == "save" else ()
    message = message_of(getattr(one, call), *args, error=ml.errors.CheckpointError)
    assert message == (
        f"step 2 could not be saved in {one.directory}: the cable is out. Earlier "
        "steps are unchanged; the next save starts anew."
    )
    check_save_works_after(one)


def test_an_old_step_that_cannot_be_deleted_is_reported(tmp_path, monkeypatch, caplog):
    rename = Path.rename

    def refuse(path, target):
        if "/1.deleting" in str(target):
            raise OSError("busy")
        return rename(path, target)

    with Checkpointer(tmp_path, keep=1) as ck:
        ck.save(1, {"x": 1})
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", refuse)
            ck.save(2, {"x": 2})
            ck.wait()
        (line,) = (x.getMessage() for x in caplog.records if x.levelno >= 30)
        assert line == f"{tmp_path}/1 is no longer needed, but remains: busy"
        assert ck.all_steps() == [1, 2]
        ck.save(3, {"x": 3})
        ck.wait()
        assert ck.all_steps() == [3]


def test_what_no_checkpointer_wrote_is_left_alone(run):
    (run / "2" / "config.yaml").write_text("mine")
    (run / "9").symlink_to(run / "away")
    (run / "2024").mkdir()
    (run / "2024" / "thesis.txt").write_text("mine")
    with ocp.StandardCheckpointer() as saver:
        saver.save(run / "7", {"w": np.ones(3)})
    before = files_of(run)
    with Checkpointer(run, keep=1) as ck:
        for step in (2024, 7):
            args = step, state_of(1)
            assert message_of(ck.save, *args, error=ml.errors.CheckpointError) == (
                f"{run}/{step} is in the way: it is not an intact step of this "
                "version. Remove it."
            )
    assert {*files_of(run)} == {*before, run / ".lock"}
    assert resumed(run) == (2, [])


def test_a_sealed_copy_stands_in_for_its_step_until_it_takes_its_name(run):
    (run / "2").rename(run / "2.new")
    shutil.copytree(run / "1", run / "1.deleting-123")
    shutil.copytree(run / "1", run / "5.new")
    (run / "5.new" / "files.json").unlink()
    (run / "7.new.orbax-checkpoint-tmp").mkdir()
    assert Checkpointer(run).all_steps() == [1, 2]
    assert resumed(run) == (2, [])
    with Checkpointer(run) as ck:
        ck.save(3, {"x": 1})
    assert names_in(run) == [".lock", "1", "2", "3"]
