"""Weights in and out on two real processes."""

import jax
import numpy as np
import pytest
from flax import serialization
from safetensors.numpy import load_file

import meshlayout as ml
from meshlayout import checkpoint
from tests.processes import run_processes


pytestmark = pytest.mark.multiprocess

KERNEL = np.arange(128, dtype="float32").reshape(8, 16)
BIAS = np.arange(16, dtype="float32")


def placed(array, layout):
    place = jax.make_array_from_callback
    return place(array.shape, layout.sharding, array.__getitem__)


def save_and_load(where):
    """Runs on every process."""
    mesh = ml.create_mesh({"batch": 2, "model": 2})
    state = {
        "kernel": placed(KERNEL, mesh.layout("batch", "model")),
        "bias": placed(BIAS, mesh.layout("model")),
        "scale": placed(np.ones(4, "float32"), mesh.layout(None)),
        "local": np.full(3, 5, "float32"),
    }
    sets = {"one": 2**20, "many": 1}
    for name, most in sets.items():
        checkpoint.save_safetensors(f"{where}/{name}", state, max_shard_bytes=most)
    said = []
    for overwrite in (False, True):
        try:
            checkpoint.save_safetensors(f"{where}/many", state, overwrite=overwrite)
        except ml.errors.CheckpointError as error:
            said.append(str(error))
    other = ml.LayoutMap(
        mesh, {"kernel": ("model", "batch"), "bias": (("batch", "model"),)}
    )
    shards = []
    for name in sets:
        got = checkpoint.load_safetensors(f"{where}/{name}", other)
        for key, whole in (("kernel", KERNEL), ("bias", BIAS)):
            for shard in got[key].addressable_shards:
                np.testing.assert_array_equal(
                    np.asarray(shard.data), whole[shard.index]
                )
                shards.append(list(shard.data.shape))
    words = np.asarray(jax.random.key_data(jax.random.key(5)))
    dtype, everywhere = jax.random.key(0).dtype, mesh.layout().sharding
    like = {"key": jax.ShapeDtypeStruct((), dtype, sharding=everywhere)}
    key = checkpoint.load_msgpack(serialization.to_bytes({"key": words}), like)["key"]
    parts = [shard.data for shard in key.addressable_shards]
    assert key.sharding == everywhere
    found = [jax.random.key_data(part).tolist() for part in parts]
    return {"said": said, "shards": shards, "keys": found}


def test_two_processes_write_one_set_of_files_and_read_their_own_slices(tmp_path):
    found = run_processes(2, save_and_load, str(tmp_path), shared=True)
    for one in found:
        words = jax.random.key_data(jax.random.key(5)).tolist()
        assert one["keys"] == [words, words]
        assert one["shards"] == [[4, 8], [4, 8], [4], [4]] * 2
    exists = (
        f"{tmp_path}/many/model.safetensors.index.json exists. Give another name, or "
        "overwrite=True."
    )
    assert found[0]["said"] == [exists]
    assert found[1]["said"] == [exists]
    for name in ("one", "many"):
        (file,) = (tmp_path / name).iterdir()
        arrays = load_file(file)
        np.testing.assert_array_equal(arrays["kernel"], KERNEL)
        np.testing.assert_array_equal(arrays["bias"], BIAS)
        np.testing.assert_array_equal(arrays["local"], np.full(3, 5))
        np.testing.assert_array_equal(arrays["scale"], np.ones(4))
