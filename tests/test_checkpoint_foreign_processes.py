"""Weights in and out on two real processes; each reads what its devices hold."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file

import meshlayout as ml
from meshlayout import checkpoint
from tests.processes import run_processes


KERNEL = np.arange(128, dtype="float32").reshape(8, 16)
BIAS = np.arange(16, dtype="float32")


def placed(array, layout):
    place = jax.make_array_from_callback
    return place(array.shape, layout.sharding, array.__getitem__)


def error_of(call, *args, **options):
    try:
        call(*args, **options)
    except ml.errors.CheckpointError as error:
        return str(error)
    return None


class Counted:
    """An array that counts the elements that are taken of it."""

    def __init__(self, array):
        self.shape, self.dtype, self.num_read = array.shape, array.dtype, 0
        self._array = array

    def __getitem__(self, index):
        part = self._array[index]
        self.num_read += part.size
        return part


def check(got, dtype="float32"):
    """Returns the shapes of this process's shards, which have the right values."""
    shapes = []
    for key, whole in (("kernel", KERNEL), ("bias", BIAS)):
        for shard in got[key].addressable_shards:
            expected = whole.astype(dtype)[shard.index]
            np.testing.assert_array_equal(np.asarray(shard.data), expected)
            shapes.append(list(shard.data.shape))
    return shapes


def save_and_load(where):
    """Runs on every process."""
    mesh = ml.create_mesh({"batch": 2, "model": 2})
    state = {
        "kernel": placed(KERNEL, mesh.layout("batch", "model")),
        "bias": placed(BIAS, mesh.layout("model")),
        "scale": placed(np.ones(4, "float32"), mesh.layout(None)),
        "local": np.full(3, 5, "float32"),
    }
    checkpoint.save_safetensors(f"{where}/plain", state)
    own = f"{where}/{jax.process_index()}"  # not shared
    said = [
        error_of(checkpoint.save_safetensors, x, state) for x in (f"{where}/plain", own)
    ]
    specs = {"kernel": ("model", "batch"), "bias": (("batch", "model"),)}
    other = ml.LayoutMap(mesh, specs)
    shards = [check(checkpoint.load_safetensors(f"{where}/plain", other))]
    # Of arrays that count, from a directory of plain Orbax, and from a step.
    counted = {"kernel": Counted(KERNEL), "bias": Counted(BIAS)}
    shards.append(check(checkpoint.load_arrays(counted, other)))
    read = [array.num_read for array in counted.values()]
    tree = {name: state[name] for name in ("kernel", "bias")}
    with ocp.StandardCheckpointer() as saver:
        saver.save(f"{where}/orbax", tree)
    shards.append(check(checkpoint.load_orbax(f"{where}/orbax", other)))
    with ml.Checkpointer(f"{where}/own") as ck:
        ck.save(1, tree)
        shards.append(check(ck.restore(other)))
        shards.append(check(ck.restore(other, dtype="float16"), "float16"))
    words = np.asarray(jax.random.key_data(jax.random.key(5)))
    dtype, everywhere = jax.random.key(0).dtype, mesh.layout().sharding
    like = {"key": jax.ShapeDtypeStruct((), dtype, sharding=everywhere)}
    key = checkpoint.load_arrays({"key": words}, like)["key"]
    parts = [shard.data for shard in key.addressable_shards]
    assert key.sharding == everywhere
    found = [jax.random.key_data(part).tolist() for part in parts]
    return {"said": said, "shards": shards, "keys": found, "read": read}


@pytest.mark.multiprocess
def test_two_processes_write_one_file_and_read_their_own_slices(tmp_path):
    found = run_processes(2, save_and_load, str(tmp_path), shared=True)
    words = jax.random.key_data(jax.random.key(5)).tolist()
    said = (
        f"{tmp_path}/plain/model.safetensors exists. Give another name, or "
        "overwrite=True."
    )
    for one in found:
        assert one["keys"] == [words, words]
        assert one["shards"] == [[[4, 8], [4, 8], [4], [4]]] * 5
        # Half of each array: what the two devices of a process hold.
        assert one["read"] == [KERNEL.size // 2, BIAS.size // 2]
        assert one["said"][0] == said
        assert f"{tmp_path}/1/.model.safetensors.incomplete'" in one["said"][1]
    assert not [*tmp_path.glob("[01]/*")]
    (file,) = (tmp_path / "plain").iterdir()
    arrays = load_file(file)
    np.testing.assert_array_equal(arrays["kernel"], KERNEL)
    np.testing.assert_array_equal(arrays["bias"], BIAS)
    np.testing.assert_array_equal(arrays["local"], np.full(3, 5))
    np.testing.assert_array_equal(arrays["scale"], np.ones(4))
