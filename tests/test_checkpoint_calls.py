"""Every call of the file system that a save makes fails, or is the last one."""

import contextlib
import errno
import os
import shutil
import warnings

import jax
import numpy as np
import pytest

import meshlayout as ml
from meshlayout.checkpoint import Checkpointer, attempt, files, lease
from tests.orbax_noise import quiet_orbax


CALLS = ("rename", "mkdir", "unlink", "rmdir", "fsync", "open")


@contextlib.contextmanager
def failing(directory, first, last=None):
    """Fails the calls on a directory from the first to the last, by their numbers."""
    count = [0]

    def watched(call):
        def run(path, *args, **options):
            is_ours = isinstance(path, int) or str(directory) in os.fspath(path)
            if is_ours:
                number, count[0] = count[0], count[0] + 1
                if first is not None and first <= number <= (last or number):
                    raise OSError(errno.EIO, "Input/output error", str(path))
            return call(path, *args, **options)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, watched(getattr(os, name)))
        yield count


def state(value, mesh):
    layout = mesh.layout("batch", None)
    x = np.full((8, 4), value, np.float32)
    return {"w": jax.device_put(x, layout.sharding), "n": np.full(3, value)}


def value_of(ck, step):
    """The value of which all that was saved is."""
    saved = ck.restore_numpy(step=step)
    (value,) = {*saved["w"].ravel().tolist(), *saved["n"].tolist()}
    return value


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A directory with the steps 1 and 2."""
    quiet_orbax()
    directory = tmp_path_factory.mktemp("run")
    mesh = ml.create_mesh({"batch": 2, "model": 4})
    with Checkpointer(directory) as ck:
        for step in (1, 2):
            ck.save(step, state(step, mesh))
    return directory


def copied(two_steps, directory):
    """A checkpointer of a copy of the two steps."""
    shutil.copytree(two_steps, directory, dirs_exist_ok=True)
    return Checkpointer(directory, keep=2, async_save=False)


def saved(ck, step, mesh):
    """Saves the value 9, and returns what was told."""
    try:
        ck.save(step, state(9, mesh), force=True)
    except ml.errors.CheckpointError as error:
        return str(error)
    return ""


def num_calls(two_steps, directory, step, mesh):
    ck = copied(two_steps, directory)
    with failing(directory, None) as count:
        assert saved(ck, step, mesh) == ""
    ck.close()
    return count[0]


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3], ids=["replaced", "new"])
def test_any_call_may_fail_once(tmp_path, two_steps, mesh_2x4, step, counts):
    total = num_calls(two_steps, tmp_path / "all", step, mesh_2x4)
    told = 0
    for number in range(total):
        directory = tmp_path / str(number)
        ck = copied(two_steps, directory)
        with failing(directory, number, number), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Orbax leaves open what failed
            words = saved(ck, step, mesh_2x4)
        told += bool(words)
        steps = ck.all_steps()
        values = {one: value_of(ck, one) for one in steps}
        is_new = values.get(step) == 9
        if "could not be saved" in words:
            assert values == {1: 1, 2: 2}, (number, words)
        else:
            assert is_new, (number, words)
            assert {**values, 1: 1} == {1: 1, 2: 2, step: 9}, (number, words)
        assert saved(ck, 4, mesh_2x4) == "", (number, words)
        assert 4 in ck.all_steps()
        ck.close()
        hidden = [one.name for one in directory.iterdir() if one.name.startswith(".")]
        with Checkpointer(directory) as again:
            assert not [one for one in directory.iterdir() if one.name[0] == "."]
            assert again.all_steps() == ck.all_steps(), (number, hidden)
    counts(f"{total} calls failed, of which {told} were told")


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3], ids=["replaced", "new"])
def test_any_call_may_be_the_last_one(tmp_path, two_steps, mesh_2x4, step, counts):
    total = num_calls(two_steps, tmp_path / "all", step, mesh_2x4)
    for number in range(total):
        directory = tmp_path / str(number)
        ck = copied(two_steps, directory)
        with failing(directory, number, 10**9), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saved(ck, step, mesh_2x4)
        # From here on nobody knows of it any more, as after the end of a process.
        lease._leases.clear()
        attempt._at_work.clear()
        with Checkpointer(directory, async_save=False) as again:
            left = [one.name for one in files.names_in(directory) if one[0] == "."]
            assert left == [], number
            values = {one: value_of(again, one) for one in again.all_steps()}
            assert values in (
                {1: 1, 2: 2},
                {1: 1, 2: 2, step: 9},
                {2: 2, step: 9},
            ), number
            assert saved(again, 4, mesh_2x4) == "", number
    counts(f"{total} calls that may be the last one")


def test_a_step_that_may_not_survive_a_power_cut_is_reported(
    tmp_path, two_steps, mesh_2x4, monkeypatch
):
    ck = copied(two_steps, tmp_path)
    sync = files.sync_directory

    def fail(path):
        if path == tmp_path and (tmp_path / "3").exists():
            raise OSError(errno.EIO, "Input/output error")
        sync(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync_directory", fail)
        words = saved(ck, 3, mesh_2x4)
    assert words == (
        f"step 3 is written to {tmp_path}, but may not survive a power cut: [Errno 5] "
        "Input/output error."
    )
    # Nothing older is deleted for it.
    assert {one: value_of(ck, one) for one in ck.all_steps()} == {1: 1, 2: 2, 3: 9}
    ck.save(4, state(4, mesh_2x4))
    assert ck.all_steps() == [3, 4]
    ck.close()


def test_a_process_that_dies_while_it_replaces_a_step_loses_neither(
    tmp_path, two_steps, mesh_2x4
):
    for has_new, expected in ((True, 9), (False, 2)):
        directory = tmp_path / str(has_new)
        copied(two_steps, directory).close()
        (directory / "2").rename(directory / ".replaced-2-0123abcd-00000000")
        new = directory / ".saving-2-0123abcd-00000001"
        new.mkdir()
        if has_new:
            with Checkpointer(directory / "other", async_save=False) as ck:
                ck.save(2, state(9, mesh_2x4))
            new.rmdir()
            (directory / "other" / "2").rename(new)
            (directory / "other").rmdir()
        ck = Checkpointer(directory)
        assert {one: value_of(ck, one) for one in ck.all_steps()} == {1: 1, 2: expected}
        assert sorted(one.name for one in directory.iterdir()) == ["1", "2"]
