"""Weights of other libraries: mappings, safetensors, msgpack, plain Orbax."""

import contextlib
import functools
import gc
import json
import resource
import struct
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn, nnx, serialization
from flax.training import train_state
from orbax.checkpoint import v1 as ocp1
from safetensors.numpy import load_file, save_file

import meshlayout as ml
from meshlayout import checkpoint
from tests.bad_values import refusal
from tests.error_messages import message_of


DTYPES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32"),
    *("float16", "bfloat16", "float32", "complex64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
]

error_of = functools.partial(message_of, error=ml.errors.CheckpointError)
damage_of = functools.partial(message_of, error=ml.errors.DamagedCheckpointError)


def equal(a, b):
    a, b = ml.to_numpy(a), ml.to_numpy(b)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert x.tobytes() == y.tobytes()


def values(shape, dtype="float32", seed=0):
    made = np.random.default_rng(seed).normal(size=shape) * 4
    return np.asarray(made).astype(jnp.dtype(dtype))


def sharded_state(mesh):
    return {
        "dense": {
            "kernel": ml.relayout(values((8, 16)), mesh.layout(None, "model")),
            "bias": ml.relayout(values(16, "bfloat16", 1), mesh.layout("model")),
        },
        "norm": {"scale": ml.relayout(values((16,), seed=2), mesh.layout(None))},
        "steps": ml.relayout(np.int32(7), mesh.layout()),
    }


class Counted:
    """An array that notes the shape of every slice that is taken of it."""

    def __init__(self, name, array, read):
        self.shape, self.dtype = array.shape, array.dtype
        self._name, self._array, self._read = name, array, read

    def __getitem__(self, index):
        part = self._array[index]
        self._read.append((self._name, part.shape))
        return part

    def transpose(self, dims):
        return Counted(self._name, self._array.transpose(dims), self._read)


def test_only_the_slices_that_devices_hold_are_read_each_once(mesh_2x4):
    state = {"w": values((16, 8)), "v": values((8, 4)), "left": values((64, 64))}
    read = []
    saved = {name: Counted(name, x.T, read) for name, x in state.items()}
    layouts = ml.LayoutMap(mesh_2x4, {"w": ("batch", "model"), "v": (None, "model")})
    like = {name: np.empty_like(state[name]) for name in ("w", "v")}
    options = {"transpose": {"": (1, 0)}, "layouts": layouts}
    got = checkpoint.load_arrays(saved, like, partial="left", **options)
    equal(got, {"v": state["v"], "w": state["w"]})
    # The replicas along `batch` of v share one reading.
    assert sorted(read) == [("v", (8, 1))] * 4 + [("w", (8, 2))] * 8


def test_restored_arrays_can_be_donated(mesh_2x4):
    # Many: a CPU device takes over memory that happens to be aligned.
    saved = {f"w{i}": values((256,), seed=i) for i in range(64)}
    before = jax.tree.map(np.copy, saved)
    got = checkpoint.load_arrays(saved, ml.LayoutMap(mesh_2x4))
    step = jax.jit(lambda tree: jax.tree.map(jnp.negative, tree), donate_argnums=0)
    got = step(step(step(got)))
    for name, array in got.items():
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), -before[name])
    equal(saved, before)


def test_nested_mappings_numbers_and_arrays_of_any_kind_are_loaded(tmp_path, mesh_2x4):
    path = tmp_path / "w"
    np.memmap(path, "float32", "w+", shape=(4, 2))[:] = values((4, 2))
    sharded = ml.relayout(values((8, 4)), mesh_2x4.layout("model", None))
    saved = {
        "layers": [{"w": sharded}, {"w": values((2, 2))}],
        "mapped": np.memmap(path, "float32", "r", shape=(4, 2)),
        "big": values(4).astype(">f4"),
        "key": np.asarray(jax.random.key_data(jax.random.key(3))),
        "step": 5,
        "none": None,
        "name": "text",
    }
    like = {
        "layers": [{"w": jnp.zeros((8, 4))}, {"w": np.zeros((2, 2), "float32")}],
        "mapped": jnp.zeros((4, 2)),
        "big": jnp.zeros(4),
        "key": jax.random.key(0),
        "step": 0,
    }
    got = checkpoint.load_arrays(saved, like)
    assert got.pop("step") == 5
    key = jax.random.key_data(got.pop("key"))
    np.testing.assert_array_equal(key, saved["key"])
    equal(got, {name: saved[name] for name in got} | {"big": values(4)})


def test_what_is_no_array_is_refused_by_name():
    load, like = checkpoint.load_arrays, {"w": np.zeros(2, "float32")}
    assert error_of(load, {"a": {"w": {1, 2}}}, like) == (
        "the mapping: a.w is {1, 2}, which is neither an array nor a number."
    )
    assert error_of(load, {}, like).startswith("the mapping holds no arrays by name: ")
    assert error_of(load, {"a": values(2), "a.b": values(2)}, None) == (
        "'a/b': one name is a prefix of another. Change rename=."
    )


def test_what_is_kept_goes_where_it_is_wanted(mesh_2x4, caplog):
    like = {"w": jnp.zeros((4, 4)), "head": jnp.ones((4, 8)), "key": jax.random.key(1)}
    layouts = ml.LayoutMap(mesh_2x4, {"head": (None, "model")})
    saved = {"w": values((4, 4))}
    with caplog.at_level("INFO", "meshlayout.checkpoint"):
        got = checkpoint.load_arrays(saved, like, layouts=layouts, partial=True)
    assert caplog.messages[0].startswith("the mapping differs: 2 missing\n")
    assert str(ml.fetch_layout(got["head"])) == "[unsharded, model]"
    equal(got, {**like, "w": values((4, 4))})
    assert len(got["key"].sharding.device_set) == 8
    assert like["head"].tolist() == np.ones((4, 8)).tolist()
    layouts = ml.LayoutMap(mesh_2x4, {"v": (None, "model")})
    with pytest.warns(ml.errors.LayoutWarning, match="rule 'v' matches no path"):
        checkpoint.load_arrays(saved, layouts)


@pytest.mark.parametrize("shape", [(), (0, 4), (8, 4)], ids=str)
def test_every_dtype_and_shape_comes_back_from_safetensors(tmp_path, shape):
    saved = {dtype: jnp.asarray(values(shape, dtype)) for dtype in DTYPES}
    like = {name: np.zeros(x.shape, x.dtype) for name, x in saved.items()}
    checkpoint.save_safetensors(tmp_path, saved)
    equal(checkpoint.load_safetensors(tmp_path, like), saved)


def test_sharded_states_come_back_on_any_mesh(tmp_path, mesh_2x4):
    state = sharded_state(mesh_2x4)
    file = checkpoint.save_safetensors(tmp_path, state, metadata={"format": "pt"})
    assert b'"__metadata__":{"format":"pt"}' in file.read_bytes()
    for axes in ({"batch": 2, "model": 4}, {"batch": 4, "model": 2}, {"model": 8}):
        specs = {"kernel": ("model", None), "bias": ("model",)}
        layouts = ml.LayoutMap(ml.create_mesh(axes), specs)
        got = checkpoint.load_safetensors(tmp_path, state, layouts=layouts)
        equal(got, state)
        layout = layouts.mesh.layout("model", None)
        assert got["dense"]["kernel"].sharding == layout.sharding
    found = load_file(file)  # by the reference library
    dense = {f"dense.{name}": array for name, array in state["dense"].items()}
    names = {"norm.scale": state["norm"]["scale"], "steps": state["steps"]}
    equal(found, dense | names)


def save_set(directory, saved):
    """Several files with an index, as published models come; returns all of them."""
    directory.mkdir(exist_ok=True)
    names = [f"model-{i}-of-{len(saved)}.safetensors" for i in range(len(saved))]
    files = dict(zip(sorted(saved), names, strict=True))
    for name, file in files.items():
        save_file({name: saved[name]}, directory / file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))
    return [*(directory / file for file in names), index]


class Published(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 4, (2, 2), padding="VALID", rngs=rngs)
        self.h = nnx.Sequential(*(nnx.Linear(8, 8, rngs=rngs) for _ in range(2)))
        self.norm = nnx.LayerNorm(8, rngs=rngs)


# What a PyTorch model of the same layers is published as.
SHAPES = {
    "net.conv.weight": (4, 3, 2, 2),
    "net.conv.bias": (4,),
    **{f"net.h.{i}.fc.weight": (8, 8) for i in range(2)},
    **{f"net.h.{i}.fc.bias": (8,) for i in range(2)},
    "net.ln.weight": (8,),
    "net.ln.bias": (8,),
    "net.ln.num_batches": (),
}
RENAMED = {
    r"^net\.conv\.weight$": "conv.kernel",
    r"^net\.conv\.bias$": "conv.bias",
    r"^net\.h\.(\d+)\.fc\.weight$": r"h/layers/\1/kernel",
    r"^net\.h\.(\d+)\.fc\.bias$": r"h/layers/\1/bias",
    r"^net\.ln\.weight$": "norm/scale",
    r"^net\.ln\.bias$": "norm/bias",
}
BACK = {
    "conv/kernel": "net.conv.weight",
    "conv/bias": "net.conv.bias",
    r"h/layers/(\d+)/kernel": r"net.h.\1.fc.weight",
    r"h/layers/(\d+)/bias": r"net.h.\1.fc.bias",
    "norm/scale": "net.ln.weight",
    "norm/bias": "net.ln.bias",
}


def test_published_weights_land_on_a_layout_map_and_go_back(tmp_path, mesh_2x4):
    saved = {name: values(SHAPES[name], seed=i) for i, name in enumerate(SHAPES)}
    *_, index = save_set(tmp_path / "x", saved)
    kernels = {r"layers/\d/kernel": ("batch", "model"), "conv/kernel": (..., "model")}
    plan = ml.describe(lambda: Published(nnx.Rngs(0)), ml.LayoutMap(mesh_2x4, kernels))
    turned = {"conv/kernel": (2, 3, 1, 0), r"layers/\d+/kernel": (1, 0)}
    options = {"rename": RENAMED, "transpose": turned, "partial": "num_batches"}
    for where in (tmp_path / "x", str(index)):
        model = checkpoint.load_safetensors(where, plan, **options)
    assert isinstance(model, Published)
    dense: Any = model.h.layers[1]
    assert str(ml.fetch_layout(dense.kernel[...])) == "[batch, model]"
    equal(dense.kernel[...], saved["net.h.1.fc.weight"].T)
    equal(model.conv.kernel[...], saved["net.conv.weight"].transpose(2, 3, 1, 0))
    turn = jax.tree_util.Partial(np.transpose, axes=(3, 2, 0, 1))
    state = jax.tree.map(
        lambda x: turn(x) if x.ndim == 4 else x.T, nnx.to_pure_dict(nnx.state(model))
    )
    file = checkpoint.save_safetensors(tmp_path, state, rename=BACK)
    del saved["net.ln.num_batches"]
    equal(load_file(file), saved)


@pytest.mark.parametrize("kind", ["safetensors", "msgpack"])
def test_a_damaged_file_is_an_error_and_no_flipped_bit_of_a_header_is_silent(
    tmp_path, monkeypatch, kind
):
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 8)
    like = {"w": values((3, 4)), "b": values(3, "bfloat16")}
    file, load = tmp_path / "x.safetensors", getattr(checkpoint, f"load_{kind}")
    if kind == "safetensors":
        checkpoint.save_safetensors(file, like)
    else:
        file.write_bytes(serialization.to_bytes(like))
    whole = bytearray(file.read_bytes())
    for size in range(0, len(whole), 3):
        file.write_bytes(whole[:size])
        assert damage_of(load, file, like).startswith(f"{file} cannot be read: ")
    file.write_bytes(whole + b"x")
    assert f"{file} cannot be read: " in damage_of(load, file, like)
    has_header = kind == "safetensors"
    size = 8 + struct.unpack("<Q", whole[:8])[0] if has_header else len(whole)
    for i in range(8 * size):
        whole[i // 8] ^= 1 << i % 8
        file.write_bytes(whole)
        with contextlib.suppress(ml.errors.CheckpointError):
            got = load(file, like)
            if has_header:  # msgpack has no hash
                equal(got, like)
        whole[i // 8] ^= 1 << i % 8
    away = tmp_path / "away.safetensors"
    assert "No such file or directory: " in error_of(load, away, like)


def test_a_set_of_shards_that_is_not_one_is_an_error(tmp_path):
    like = {"w": values((3, 4)), "b": values(3)}
    load = checkpoint.load_safetensors
    first, second, index = save_set(tmp_path, like)
    text, start = index.read_text(), f"{index} cannot be read: "
    second.unlink()
    assert second.name in error_of(load, tmp_path, like)
    second.write_bytes(first.read_bytes())
    assert damage_of(load, tmp_path, like) == f"{start}KeyError 'w'."
    for bad in ("", "{}", "[]", text[:-9], '{"weight_map": {"w": 3}}', "[" * 100_000):
        index.write_text(bad)
        assert damage_of(load, tmp_path, like).startswith(start)
    index.unlink()
    assert error_of(load, tmp_path, like) == (
        f"{tmp_path} must hold one safetensors file or index, and it holds: "
        f"{first.name}, {second.name}."
    )
    assert error_of(load, "gs://bucket/x.safetensors", like) == (
        "gs://bucket/x.safetensors is not on a disk of this machine. Give a local path."
    )


def test_what_safetensors_cannot_hold_is_refused(tmp_path):
    def save(state, **options):
        message = error_of(checkpoint.save_safetensors, tmp_path, state, **options)
        assert not list(tmp_path.iterdir())
        return message

    for value, what in (
        (jax.random.key(0), "dtype key<fry>"),
        (3, "3"),
        (jnp.zeros(2, "int4"), "dtype int4"),
        (jax.ShapeDtypeStruct((2,), "float32"), "an array of shape (2,)"),
    ):
        assert save({"a": values(2), "x": value}) == (
            f"x: safetensors files cannot hold {what}. Save parameters and batch "
            "statistics alone, as nnx.state(model, (nnx.Param, nnx.BatchStat)), and of "
            "PRNG keys jax.random.key_data."
        )
    for state in (values(2), None, {}, {"a": {}}):
        assert save(state).startswith("state must hold arrays by name, got ")
    assert save({"a.b": values(2), "a": {"b": values(2)}}) == (
        "the saved arrays 'a/b' and 'a.b' both become 'a.b'. Change rename= so that "
        "they differ."
    )


def test_nothing_is_replaced_unless_asked_nor_before_the_new_file_is_whole(tmp_path):
    save, load = checkpoint.save_safetensors, checkpoint.load_safetensors
    old, new = {"w": values((64, 64))}, {"w": values((64, 64), seed=1)}
    file = save(tmp_path, old)
    assert error_of(save, tmp_path, new) == (
        f"{file} exists. Give another name, or overwrite=True."
    )
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        message = error_of(save, tmp_path, new, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert message == f"{file} cannot be written: [Errno 27] File too large."

    equal(load(tmp_path, old), old)
    assert save(tmp_path, new, overwrite=True) == file
    assert [*tmp_path.iterdir()] == [file]
    equal(load(tmp_path, new), new)
    (tmp_path / "file").write_text("")
    where = tmp_path / "file" / "x.safetensors"
    assert error_of(save, where, old).startswith(f"{where} cannot be written: [Errno")


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=True)(nn.Dense(8)(x))
        return nn.Dense(2)(x)


def linen_variables(seed=0):
    return Net().init(jax.random.key(seed), jnp.ones((1, 4)))


def test_flax_states_come_from_msgpack(tmp_path, mesh_2x4, monkeypatch):
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 64)
    variables, file = linen_variables(), tmp_path / "net.msgpack"
    file.write_bytes(serialization.to_bytes(variables))
    assert b"__msgpack_chunked_array__" in file.read_bytes()
    layouts = ml.LayoutMap(mesh_2x4, {"Dense_0/kernel": (None, "model")})
    got = checkpoint.load_msgpack(file, ml.describe(linen_variables, layouts))
    equal(got, variables)
    kernel = got["params"]["Dense_0"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (4, 2)

    def create(seed):
        params = linen_variables(seed)["params"]
        return train_state.TrainState.create(
            apply_fn=Net().apply, params=params, tx=optax.adam(1e-3)
        )

    first = create(0)
    first = first.apply_gradients(grads=first.params)
    file.write_bytes(serialization.to_bytes(first))
    got = checkpoint.load_msgpack(file, create(1))
    assert type(got) is train_state.TrainState
    assert (got.step, type(got.step)) == (1, int)
    equal(got.params, first.params)
    equal(got.opt_state, first.opt_state)


def orbax_state(mesh):
    return {
        "params": sharded_state(mesh),
        "opt": optax.adam(1e-3).init({"w": jnp.ones((4, 2))}),
        "step": jnp.int32(5),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(0, impl="rbg"), 8),
        "a b": {"100%": jnp.ones(3), "x?y#z": jnp.zeros(2), "c.d": jnp.ones(1)},
        "count": 4,
        "rate": 0.25,
    }


def save_standard(path, state):
    with ocp.StandardCheckpointer() as saver:
        saver.save(path, state)
    return path


def save_pytree(path, state):
    ocp.PyTreeCheckpointer(use_ocdbt=False).save(path, state)
    return path


def save_manager(path, args):
    with ocp.CheckpointManager(path) as manager:
        manager.save(3, args=args)
    return path / "3"


def named(**items):
    return ocp.args.Composite(
        **{name: ocp.args.StandardSave(x) for name, x in items.items()}
    )


def save_new(path, state):
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        ocp1.save_pytree(path, state)
    return path


WRITERS = {
    "standard": save_standard,
    "no ocdbt": save_pytree,
    "manager": lambda path, x: save_manager(path, ocp.args.StandardSave(x)),
    "named": lambda path, x: save_manager(path, named(state=x)),
    "new": save_new,
}


@pytest.mark.parametrize("name", WRITERS)
def test_orbax_directories_come_onto_any_mesh(tmp_path, mesh_2x4, monkeypatch, name):
    state = orbax_state(mesh_2x4)
    where = WRITERS[name](tmp_path / "my dir 5%20", state)
    mesh = ml.create_mesh({"batch": 4, "model": 2})
    specs = {"kernel": ("model", "batch"), "bias": ("batch",), "keys": ("batch",)}
    like = jax.eval_shape(lambda: orbax_state(mesh_2x4)) | {"count": 0, "rate": 0.0}
    monkeypatch.chdir(tmp_path)
    got = checkpoint.load_orbax(
        where.relative_to(tmp_path), like, layouts=ml.LayoutMap(mesh, specs)
    )
    assert (got.pop("count"), got.pop("rate")) == (4, 0.25)
    del state["count"], state["rate"]
    equal(got, state)
    assert got["key"].dtype == state["key"].dtype
    assert len(got["keys"].sharding.device_set) == 8
    assert str(ml.fetch_layout(got["params"]["dense"]["kernel"])) == "[model, batch]"
    # Renamed, turned, cast and left out, without a mesh.
    like = {
        "new": {"kernel": np.zeros((16, 8), "float32"), "bias": jnp.zeros(16)},
        "head": jnp.full(2, 7.0),
    }
    options = {"rename": {"^params/dense/": "new/"}, "transpose": {"kernel": (1, 0)}}
    options |= {"partial": True, "dtype": "bfloat16"}
    got = checkpoint.load_orbax(str(where), like, **options)
    assert isinstance(got["new"]["kernel"], np.ndarray)
    equal(got["new"]["kernel"], values((8, 16)).T.astype(jnp.bfloat16))
    equal(got["new"]["bias"], values(16, "bfloat16", 1))
    assert got["head"].tolist() == [7, 7]
    like = {"keys": jax.random.split(jax.random.key(0), 8)}
    message = error_of(checkpoint.load_orbax, where, like, partial=["^(?!keys)"])
    assert message.startswith(f"{where}")
    assert "shape    keys key<fry>[8]  keys u32[8, 4]" in message


def test_orbax_directories_with_several_trees_ask_which(tmp_path):
    path, like = tmp_path / "x", {"w": jnp.ones(3)}
    step = save_manager(path, named(a=like, b=like))
    for where, names in ((path, "none"), (step, "a, b"), (tmp_path / "away", "none")):
        assert error_of(checkpoint.load_orbax, where, like) == (
            f"{where} must hold one tree that Orbax wrote, and it holds: {names}."
        )
    equal(checkpoint.load_orbax(step / "b", like), {"w": np.ones(3, "float32")})


@pytest.mark.parametrize("name", ["standard", "new"])
def test_nnx_states_that_orbax_wrote_come_back_as_modules(tmp_path, mesh_2x4, name):
    def build(seed):
        rngs = nnx.Rngs(seed)
        layers = nnx.Linear(4, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        model = nnx.Sequential(*layers)
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        return {"model": model, "optimizer": optimizer}

    model = build(0)
    where = WRITERS[name](tmp_path / "x", nnx.state(model))
    (names,) = where.rglob("_METADATA")
    assert '"value"' in names.read_text()
    layouts = ml.LayoutMap(mesh_2x4, {"model/layers/0/kernel": (None, "model")})
    plan = ml.describe(lambda: build(1), layouts)
    abstract = nnx.eval_shape(lambda: build(1))
    for like, shape in ((plan, (4, 2)), (build(1), (4, 8)), (abstract, (4, 8))):
        got = checkpoint.load_orbax(where, like)
        assert isinstance(got["optimizer"], nnx.Optimizer)
        equal(nnx.to_pure_dict(nnx.state(got)), nnx.to_pure_dict(nnx.state(model)))
        kernel = got["model"].layers[0].kernel[...]
        assert kernel.addressable_shards[0].data.shape == shape


# Orbax leaves reads behind when one of them fails, and they find its loop closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
@pytest.mark.parametrize("name", ["no ocdbt", "new"])
def test_no_lost_file_of_orbax_is_silent(tmp_path, name):
    state = {"w": jnp.asarray(values((64, 64))), "n": jnp.ones(3)}
    where = WRITERS[name](tmp_path / "x", state)
    errors = []
    for file in sorted(path for path in where.rglob("*") if path.is_file()):
        data = file.read_bytes()
        for content in (None, b"", data[: len(data) // 2]):
            file.unlink()
            if content is not None:
                file.write_bytes(content)
            try:
                equal(checkpoint.load_orbax(where, state), state)
            except ml.errors.CheckpointError as error:
                errors.append(type(error))
            file.write_bytes(data)
    gc.collect()  # what Orbax left behind complains when it is collected
    assert errors.count(ml.errors.DamagedCheckpointError) >= 5
    equal(checkpoint.load_orbax(where, state), state)


BAD = [None, float("nan"), -1, 0, "x", "", "a\0b", object(), ["x"], {"x": 1}]
STATE = {"w": np.ones((2, 3), "float32")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with a state in every format."""
    path = tmp_path_factory.mktemp("saved")
    with ml.Checkpointer(path / "own") as ck:
        ck.save(1, STATE)
    checkpoint.save_safetensors(path / "w.safetensors", STATE)
    (path / "w.msgpack").write_bytes(serialization.to_bytes(STATE))
    save_standard(path / "orbax", STATE)
    return path


OPTIONS = ["like", "layouts", "rename", "partial", "dtype"]
CALLS = [
    *(("own", option) for option in [*OPTIONS, "step", "data"]),
    *(
        (name, option)
        for name in ("w.safetensors", "w.msgpack", "orbax")
        for option in [*OPTIONS, "transpose"]
    ),
]


@pytest.mark.parametrize(("name", "option"), CALLS)
def test_every_option_works_or_is_refused_in_a_sentence(saved, name, option):
    if name == "own":
        call = ml.Checkpointer(saved / name).restore
    else:
        load = getattr(checkpoint, f"load_{name.removeprefix('w.')}")
        call = functools.partial(load, saved / name)
    for value in BAD:
        options, found = {"like": STATE} | {option: value}, []
        load = lambda: found.append(call(**options))  # noqa: B023
        if refusal(ml.MeshLayoutError, load) is None:
            np.testing.assert_array_equal(found[0]["w"], STATE["w"])
            assert value in (None, "") or option == "like", (option, value)


def test_numbers_byte_orders_and_keys_are_not_mistaken(tmp_path):
    key = jax.random.key(0, impl="rbg")
    saved = {"n": 2**70, "w": np.ones(3, ">f4"), "key": key}
    with ml.Checkpointer(tmp_path) as ck:
        ck.save(1, saved)
        for like in (np.zeros(3, "f4"), jnp.zeros(3), np.zeros(3, ">f4")):
            for dtype in (None, ">f4", np.dtype(">f4")):
                found = ck.restore(saved | {"n": 0, "w": like}, dtype=dtype)
                assert found["w"].dtype.isnative
                assert (found["w"] == 1).all()
        equal(jax.random.key_data(found["key"]), jax.random.key_data(key))
        for like in (jnp.int32(0), np.int64(0)):
            assert error_of(ck.restore, saved | {"n": like}) == (
                f"n int[] holds {2**70}, which {like.dtype} cannot represent."
            )
        message = error_of(ck.restore, saved | {"key": jax.random.key(0)})
        assert "dtype    key key<fry>[]  key key<rbg>[]\n" in message
