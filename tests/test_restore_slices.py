"""Arrays in shards: each process restores its own, whatever mesh wrote them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshlayout as ml
from meshlayout.checkpoint import Checkpointer
from tests.processes import run_processes
from tests.same_bits import assert_same_bits


KERNEL = np.random.default_rng(0).normal(size=(256, 512)).astype("float32")
HALF = np.concatenate([KERNEL, -KERNEL]).astype("bfloat16").reshape(1024, 2, 128)

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
            "keys": jax.random.split(jax.random.key(1), 1024),
        }

    return ml.create(build, layouts)


@pytest.mark.parametrize("saved", range(len(WAYS)))
def test_large_arrays_come_back_on_any_mesh(tmp_path, saved):
    expected = create(WAYS[saved])
    with Checkpointer(tmp_path) as ck:
        ck.save(1, expected)
        for way in WAYS:
            like = create(way)
            restored = ck.restore(like)
            assert_same_bits(restored, expected)
            for name, array in restored.items():
                assert array.sharding == like[name].sharding
        cast = ck.restore(create(WAYS[2]), dtype="bfloat16")["kernel"]
        assert_same_bits(cast, KERNEL.astype("bfloat16"))
        assert cast.sharding == create(WAYS[2])["kernel"].sharding
        assert_same_bits(ck.restore_numpy()["kernel"], KERNEL)


def restore_shards(directory):
    """Restores on two processes: cut over them, and with a copy on each."""
    mesh = ml.create_mesh({"a": 2, "b": 2})
    shapes = []
    for specs in (("a", "b"), ("b", None), (None, ("a", "b"))):
        sharding = mesh.layout(*specs).sharding
        like = {
            "kernel": jax.ShapeDtypeStruct((256, 512), "float32", sharding=sharding)
        }
        for dtype in ("float32", "float16"):
            restored = Checkpointer(directory).restore(like, dtype=dtype)["kernel"]
            assert restored.sharding == sharding
            for shard in restored.addressable_shards:
                expected = KERNEL[shard.index].astype(dtype)
                np.testing.assert_array_equal(np.asarray(shard.data), expected)
        shapes.append(list(restored.addressable_shards[0].data.shape))
    return shapes


@pytest.mark.multiprocess
def test_processes_restore_what_their_devices_hold(tmp_path):
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {"kernel": KERNEL})
    found = run_processes(2, restore_shards, str(tmp_path))
    assert found == [[[128, 256], [128, 512], [256, 128]]] * 2
