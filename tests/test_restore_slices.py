"""Arrays too large to be read whole: each device's slices, verified all the same."""

import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshlayout as ml
from meshlayout.checkpoint import Checkpointer, saved_step, step_writer
from tests.processes import run_processes
from tests.same_bits import assert_same_bits


# 512 KiB each, where up to 256 KiB are read whole.
KERNEL = np.random.default_rng(0).normal(size=(256, 512)).astype("float32")
HALF = np.concatenate([KERNEL, -KERNEL]).astype("bfloat16").reshape(1024, 2, 128)
KEYS = 65_536


# Meshes, and the specs of each array on them.
WAYS = [
    ({"a": 2, "b": 4}, {"kernel": ("a", "b"), "half": ("b", None, "a"), "keys": "b"}),
    ({"a": 2, "b": 4}, {"kernel": (None, "b")}),
    ({"a": 8}, {"kernel": ("a", None), "half": (None, None, "a"), "keys": "a"}),
]


def create(way):
    axes, specs = way
    layouts = ml.LayoutMap(ml.create_mesh(axes), specs | {"keys": (specs.get("keys"),)})

    def build():
        return {
            "kernel": jnp.asarray(KERNEL),
            "half": jnp.asarray(HALF),
            "keys": jax.random.split(jax.random.key(1), KEYS),
        }

    return ml.create(build, layouts)


@pytest.mark.parametrize("saved", range(len(WAYS)))
def test_large_arrays_come_back_on_any_mesh(tmp_path, saved):
    expected = create(WAYS[saved])
    with Checkpointer(tmp_path) as ck:
        ck.save(1, expected)
        for way in WAYS:
            restored = ck.restore(create(way))
            assert_same_bits(restored, expected)
            assert restored["kernel"].sharding == create(way)["kernel"].sharding
        assert_same_bits(ck.restore_numpy()["kernel"], KERNEL)


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_damage_in_one_slice_of_a_large_array_is_found(tmp_path, monkeypatch, way):
    monkeypatch.setattr(step_writer, "_HASHED_BYTES", 0)
    other = create(WAYS[0])
    other["kernel"] = other["kernel"].at[200, 400].add(1)
    with Checkpointer(tmp_path) as ck:
        ck.save(1, other)
        ck.save(2, create(WAYS[0]))
    # Files of another save of the same sizes: only the values can tell.
    shutil.rmtree(tmp_path / "2" / "state")
    shutil.copytree(tmp_path / "1" / "state", tmp_path / "2" / "state")
    ck = Checkpointer(tmp_path)
    monkeypatch.setattr(saved_step, "check_files", lambda folder, manifest: None)
    monkeypatch.setattr("meshlayout.checkpoint.steps.check_files", lambda *_: None)
    like = create(WAYS[way])
    with pytest.raises(ml.errors.DamagedCheckpointError) as caught:
        ck.restore(like, step=2)
    assert str(caught.value).startswith(
        f"kernel f32[256, 512]: the values in {tmp_path / '2'} are not the ones that were saved;"
    )
    assert_same_bits(ck.restore(like, step=2, verify=False), other)


# Several processes, none of which reads a whole array.


def restore_shards(directory, misread):
    """Restores on two processes; process 1 reads a bit wrongly where asked."""
    mesh = ml.create_mesh({"a": 2, "b": 2})
    sums = saved_step.slice_sums
    calls = []

    def misreading(x, starts, shape):
        calls.append(tuple(x.shape))
        if misread and jax.process_index() == 1 and len(calls) == 1:
            x = x.copy()
            x.reshape(-1)[0] += 1
        return sums(x, starts, shape)

    saved_step.slice_sums = misreading
    logging.disable()
    found = []
    # Cut over processes, and inside of each process with a copy on both.
    for specs in (("a", "b"), ("b", None), (None, ("a", "b"))):
        calls.clear()
        sharding = mesh.layout(*specs).sharding
        like = {
            "kernel": jax.ShapeDtypeStruct((256, 512), "float32", sharding=sharding)
        }
        ck = Checkpointer(directory)
        try:
            restored = ck.restore(like)["kernel"]
        except ml.errors.DamagedCheckpointError as error:
            found.append(str(error).partition(":")[0])
            continue
        for shard in restored.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), KERNEL[shard.index])
        found.append(sorted(set(calls)))
    return found


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("misread", [False, True])
def test_processes_verify_arrays_that_none_of_them_has(tmp_path, misread):
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {"kernel": KERNEL})
    found = run_processes(2, restore_shards, str(tmp_path), misread)
    if misread:
        assert found == [["kernel f32[256, 512]"] * 3] * 2
    else:
        assert found == [[[[128, 256]], [[128, 512]], [[256, 128]]]] * 2
