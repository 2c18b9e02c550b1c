"""One process at a time saves in a directory; the others are told who does."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest

import meshlayout as ml
from meshlayout.checkpoint import Checkpointer, lease


STATE = {"w": jnp.arange(4.0)}


def notes(directory):
    # A note that is being renewed also has a temporary file, `..owner-...`.
    return sorted(x.name for x in directory.iterdir() if x.name.startswith(".owner"))


def leave_note(directory, name="0123abcd", **changes):
    """The note of another process."""
    note = dataclasses.asdict(lease.Owner.of_this_process()) | changes
    (directory / f".owner-{name}.json").write_text(json.dumps(note))


OTHER = """
import sys, jax.numpy as jnp
from meshlayout.checkpoint import Checkpointer
ck = Checkpointer(sys.argv[1])
ck.save(1, {"w": jnp.arange(4.0)})
ck.wait()
print("saved", flush=True)
input()
"""


@pytest.mark.multiprocess
def test_a_second_process_reads_and_is_refused_when_it_saves(tmp_path):
    path = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "saved\n"
        before = notes(tmp_path)
        ck = Checkpointer(tmp_path)
        assert ck.restore_numpy()["w"].tolist() == [0, 1, 2, 3]
        with pytest.raises(ml.errors.CheckpointError) as caught:
            ck.save(2, STATE)
        assert re.sub("on .*, which", "on HOST, which", str(caught.value)) == (
            f"step 2 could not be saved in {tmp_path}: {tmp_path} belongs to process "
            f"{other.pid} on HOST, which is alive and saves there. One run at a time may save to a directory: use another directory for this one, or end that "
            "process. Earlier steps are unchanged; the next save starts anew."
        )
        assert notes(tmp_path) == before
        other.kill()
    assert ck.save(2, STATE)
    ck.close()
    assert (Checkpointer(tmp_path).all_steps(), notes(tmp_path)) == ([1, 2], [])


def test_a_lease_elsewhere_says_when_it_ends(tmp_path):
    leave_note(tmp_path, host="other", pid=7, renewed_at=time.time() - 240)
    with (
        Checkpointer(tmp_path) as ck,
        pytest.raises(ml.errors.CheckpointError) as caught,
    ):
        ck.save(1, STATE)
    assert "belongs to process 7 on other, which is alive and saves there" in str(
        caught.value
    )
    assert "If it has died, its lease ends in 6 minutes." in str(caught.value)


def test_a_container_of_the_same_name_and_process_number_is_another_owner(tmp_path):
    leave_note(tmp_path, namespace="another")
    ck = Checkpointer(tmp_path)
    with pytest.raises(ml.errors.CheckpointError, match="its lease ends in 10 minutes"):
        ck.save(1, STATE)
    assert notes(tmp_path) == [".owner-0123abcd.json"]


def test_the_lease_is_renewed_and_ends_with_the_last_checkpointer(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(lease, "_RENEWED_EVERY_S", 0.05)
    one, two = Checkpointer(tmp_path), Checkpointer(tmp_path)
    for step, ck in enumerate((one, two)):
        ck.save(step, STATE)
        ck.wait()
    (name,) = notes(tmp_path)

    def renewed_at():
        return lease.Owner.read(tmp_path / name).renewed_at

    first = renewed_at()
    deadline = time.monotonic() + 20
    while renewed_at() == first and time.monotonic() < deadline:
        time.sleep(0.02)
    assert renewed_at() > first
    one.close()
    assert notes(tmp_path) == [name]
    two.close()
    assert notes(tmp_path) == []


def test_a_checkpointer_that_is_gone_has_no_lease(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "_RENEWED_EVERY_S", 0.05)
    ck = Checkpointer(tmp_path)
    ck.save(1, STATE)
    ck.wait()
    del ck
    deadline = time.monotonic() + 20
    while notes(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert notes(tmp_path) == []


def test_a_lease_that_was_taken_away_is_noticed(tmp_path):
    with Checkpointer(tmp_path) as ck:
        ck.save(1, STATE)
        ck.wait()
        (tmp_path / notes(tmp_path)[0]).unlink()
        leave_note(tmp_path, host="other")
        with pytest.raises(
            ml.errors.CheckpointError, match="on other, which is alive and saves"
        ):
            ck.save(2, STATE)
        assert ck.all_steps() == [1]
        (tmp_path / ".owner-0123abcd.json").unlink()
        assert ck.save(2, STATE)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"host": 1}', b"\xff"])
def test_an_incomplete_note_belongs_to_no_process(tmp_path, content):
    (tmp_path / ".owner-0123abcd.json").write_bytes(content)
    with Checkpointer(tmp_path) as ck:
        assert notes(tmp_path) == []
        ck.save(1, STATE)


@pytest.mark.parametrize(
    "changes",
    [{"pid": "7"}, {"pid": -1}, {"pid": 2**70}, {"renewed_at": "now"}, {"pid": None}],
    ids=str,
)
def test_a_note_with_bad_values_belongs_to_no_process(tmp_path, changes):
    leave_note(tmp_path, **changes)
    with Checkpointer(tmp_path) as ck:
        assert notes(tmp_path) == []
        ck.save(1, STATE)


def test_of_two_that_start_together_not_both_save(tmp_path, monkeypatch):
    """The other one's note appears between our look and our note."""
    write = lease.Lease._write
    turns = []

    def slowly(self):
        turns.append(self.id)
        if len(turns) == 1:
            leave_note(tmp_path, host="other")
        write(self)

    monkeypatch.setattr(lease.Lease, "_write", slowly)
    with (
        Checkpointer(tmp_path) as ck,
        pytest.raises(
            ml.errors.CheckpointError, match="on other, which is alive and saves"
        ),
    ):
        ck.save(1, STATE)
    assert notes(tmp_path) == [".owner-0123abcd.json"]
