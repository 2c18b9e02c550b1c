"""What users hand in by mistake, and files made to do harm: a sentence, or it works."""

import copy
import functools
import gc
import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization

import meshlayout as ml
from meshlayout import checkpoint
from tests.error_messages import message_of


BAD = [None, float("nan"), -1, 0, "x", "", "a\0b", object(), ["x"], {"x": 1}]
STATE = {"w": np.ones((2, 3), "float32")}


error_of = functools.partial(message_of, error=ml.errors.CheckpointError)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with a state in every format."""
    path = tmp_path_factory.mktemp("saved")
    with ml.Checkpointer(path / "own") as ck:
        ck.save(1, STATE)
    checkpoint.save_safetensors(path / "w.safetensors", STATE)
    (path / "w.msgpack").write_bytes(serialization.to_bytes(STATE))
    with ocp.StandardCheckpointer() as saver:
        saver.save(path / "orbax", STATE)
    return path


OPTIONS = ["layouts", "rename", "transpose", "partial", "dtype"]
LOADERS = {
    "load_safetensors": ("w.safetensors", ["path", "like", "separator", *OPTIONS]),
    "load_msgpack": ("w.msgpack", ["path", "like", *OPTIONS]),
    "load_orbax": ("orbax", ["directory", "like", "item", *OPTIONS]),
}
CASES = [(name, option) for name, (_, all_) in LOADERS.items() for option in all_]


def outcome(call, arguments):
    """Returns what a call returned; a sentence if it was refused."""
    try:
        return call(**arguments)
    except ml.MeshLayoutError as error:
        return str(error)


def is_sentence(value):
    return isinstance(value, str) and value.endswith((".", "?"))


@pytest.mark.parametrize(("name", "option"), CASES)
def test_every_option_of_a_loader_works_or_is_refused_in_a_sentence(
    saved, name, option
):
    file, (path, *_) = LOADERS[name]
    for value in BAD:
        arguments = {path: saved / file, "like": STATE} | {option: value}
        result = outcome(getattr(checkpoint, name), arguments)
        if not is_sentence(result):
            np.testing.assert_array_equal(result["w"], STATE["w"])
            assert value in (None, "") or option == "like", (option, value)


RESTORE = ["like", "step", "layouts", "data", "partial", "rename"]


@pytest.mark.parametrize("option", [*RESTORE, "dtype", "verify", "fallback"])
def test_every_option_of_restore_works_or_is_refused_in_a_sentence(saved, option):
    ck = ml.Checkpointer(saved / "own")
    for value in BAD:
        result = outcome(ck.restore, {"like": STATE} | {option: value})
        if not is_sentence(result):
            np.testing.assert_array_equal(result["w"], STATE["w"])
            assert value in (None, "") or option == "like", (option, value)


SAVE = ["path", "state", "rename", "transpose", "separator"]


@pytest.mark.parametrize("option", [*SAVE, "metadata", "overwrite"])
def test_every_option_of_saving_weights_works_or_is_refused(
    tmp_path, monkeypatch, option
):
    monkeypatch.chdir(tmp_path)
    for value in BAD:
        arguments = {"path": tmp_path / "a.safetensors", "state": STATE}
        result = outcome(checkpoint.save_safetensors, arguments | {option: value})
        if not is_sentence(result):
            result.unlink()
            assert value in (None, "x") or isinstance(value, dict), (option, value)


@pytest.mark.parametrize("flag", ["yes", "no", 1, None])
def test_flags_are_true_or_false(saved, tmp_path, flag):
    shown = repr(flag)
    ck = ml.Checkpointer(saved / "own")
    for name in ("verify", "fallback"):
        message = f"restore: {name} must be True or False, got {shown}."
        assert error_of(ck.restore, STATE, **{name: flag}) == message
        assert error_of(ck.restore_numpy, **{name: flag}) == message
    assert error_of(checkpoint.save_safetensors, tmp_path, STATE, overwrite=flag) == (
        f"overwrite must be True or False, got {shown}."
    )


@pytest.mark.parametrize("state", [None, {}, [], {"a": {}}])
def test_a_tree_without_arrays_is_not_written(tmp_path, state):
    message = error_of(checkpoint.save_safetensors, tmp_path / "a.safetensors", state)
    assert message == f"state must hold arrays by name, got {state!r}."
    with ml.Checkpointer(tmp_path / "ck") as ck:
        assert error_of(ck.save, 1, state) == (
            f"save: state holds no arrays, got {state!r}. A function that ends without "
            "`return` gives None."
        )
        assert ck.all_steps() == []


def test_no_path_is_not_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path, shown in (("", "''"), (None, "None"), (b"a", "b'a'"), (3, "3")):
        message = f"path must be a path, got {shown}."
        assert error_of(checkpoint.save_safetensors, path, STATE) == message
        assert error_of(checkpoint.load_safetensors, path, STATE) == message
        assert error_of(checkpoint.load_orbax, path, STATE) == (
            f"directory must be a path, got {shown}."
        )
    assert error_of(checkpoint.load_msgpack, None, STATE) == (
        "path must be a path, got None."
    )
    assert not [*tmp_path.iterdir()]


# Files made to do harm.


def safetensors_file(path, header, data=b""):
    text = header.encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(begin, end):
    return f'{{"dtype":"F32","shape":[{(end - begin) // 4}],"data_offsets":[{begin},{end}]}}'


def nested(depth):
    tree = np.ones(2, "float32")
    for _ in range(depth):
        tree = {"a": tree}
    return tree


def test_names_of_very_many_keys_are_refused_and_the_process_lives(
    saved, tmp_path, mesh_2x4
):
    layouts = ml.LayoutMap(mesh_2x4)
    name = ".".join("a" * 1500)
    deep = safetensors_file(
        tmp_path / "deep.safetensors", f'{{"{name}":{entry(0, 8)}}}', bytes(8)
    )
    tail = (
        "has more than 100 keys, or is the beginning of another name. Change rename=."
    )
    message = error_of(checkpoint.load_safetensors, deep, layouts)
    assert message.endswith(tail)
    for depth in (101, 900):
        written = serialization.msgpack_serialize(nested(depth))
        error_of(checkpoint.load_msgpack, written, layouts)
    ck = ml.Checkpointer(saved / "own")
    message = error_of(ck.restore, rename={"w": "/".join("a" * 1500)})
    assert message.endswith(tail)
    # JAX still takes trees apart.
    loaded = checkpoint.load_safetensors(deep, layouts, separator="/")
    assert list(loaded) == [name]
    np.testing.assert_array_equal(ck.restore(STATE)["w"], STATE["w"])


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, "[]"],
)
def test_an_index_that_is_not_one_is_damage(tmp_path, text):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    message = error_of(
        checkpoint.load_safetensors,
        index,
        STATE,
        error=ml.errors.DamagedCheckpointError,
    )
    assert message.startswith(f"{index} is not an index of the files beside it: ")


def json_places(node, place=()):
    yield place
    if isinstance(node, (dict, list)):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, child in items:
            yield from json_places(child, (*place, key))


def json_with(node, place, value):
    """A copy of parsed JSON with another value at one place."""
    if not place:
        return value
    changed = copy.copy(node)
    changed[place[0]] = json_with(node[place[0]], place[1:], value)
    return changed


WRONG_JSON = [None, 3, -1, "x", [], {}, [1, 2], {"a": 1}, 2**64, [0, 2**63]]


# Orbax leaves reads behind when one of them fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_changed_json_of_another_library_raises_anything_but_sentences(
    tmp_path, mesh_2x4
):
    layouts = ml.LayoutMap(mesh_2x4)
    # Orbax's metadata of the tree and, with its PRNG keys, of its arrays.
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "orbax", {"w": jnp.ones(2), "k": jax.random.key(0)})
    files = [tmp_path / "orbax" / "_METADATA"]
    files += (tmp_path / "orbax").glob("array_metadatas/*")
    for file in files:
        text = file.read_text()
        for place in json_places(json.loads(text)):
            for value in WRONG_JSON:
                file.write_text(json.dumps(json_with(json.loads(text), place, value)))
                outcome(
                    checkpoint.load_orbax,
                    {"directory": tmp_path / "orbax", "like": layouts},
                )
        file.write_text(text)
    gc.collect()  # what Orbax left behind complains when it is collected
    # The header of a safetensors file.
    arrays = {"w": np.ones((2, 3), "float32"), "e": np.ones((0, 4), "float32")}
    file = checkpoint.save_safetensors(tmp_path, arrays, metadata={"a": "b"})
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    for place in json_places(header):
        for value in [*WRONG_JSON, "F64", "I4", [2, 3, 1], [0, 24], [6]]:
            text = json.dumps(json_with(header, place, value))
            safetensors_file(file, text, content[8 + size :])
            outcome(checkpoint.load_safetensors, {"path": file, "like": layouts})


# What a state to restore may hold.


def test_restoring_inside_jit_is_a_sentence(saved):
    ck = ml.Checkpointer(saved / "own")
    message = error_of(jax.jit(lambda w: ck.restore({"w": w})), STATE["w"])
    assert message == ("like= is inside jit. Restore outside of it.")


def test_a_number_that_no_array_can_hold_is_named(tmp_path):
    with ml.Checkpointer(tmp_path) as ck:
        ck.save(1, {"n": 2**70, "w": 0.5})
        assert ck.restore({"n": 0, "w": 0.0}) == {"n": 2**70, "w": 0.5}
        for like in (jnp.int32(0), np.int64(0)):
            assert error_of(ck.restore, {"n": like, "w": 0.0}) == (
                f"n int[] holds {2**70}, which {like.dtype} cannot represent."
            )


def test_another_byte_order_is_never_restored(saved):
    ck = ml.Checkpointer(saved / "own")
    for like in (STATE, {"w": jnp.zeros((2, 3))}, {"w": np.zeros((2, 3), ">f4")}):
        for dtype in (None, ">f4", np.dtype(">f4")):
            result = ck.restore(like, dtype=dtype)["w"]
            assert result.dtype.isnative
            np.testing.assert_array_equal(result, STATE["w"])


# Messages.


def test_a_key_of_another_generator_is_refused(tmp_path):
    with ml.Checkpointer(tmp_path) as ck:
        ck.save(1, {"key": jax.random.key(0, impl="rbg"), "w": jnp.ones(2)})
        message = error_of(ck.restore, {"key": jax.random.key(0), "w": jnp.ones(2)})
        assert message == (
            "step 1 does not fit the state to restore: 1 of another dtype.\n"
            "differs  wanted          saved\n"
            "───────  ──────────────  ──────────────\n"
            "dtype    key key<fry>[]  key key<rbg>[]\n"
            "rename={pattern: replacement} gives saved arrays other names. partial=True "
            "keeps the values of missing arrays and ignores extra ones; "
            "partial=[pattern] leaves all that it matches as it is. dtype= asks for "
            "another dtype of the same kind."
        )
        like = {"key": jax.random.key(0, impl="rbg"), "w": jnp.ones(2)}
        assert jnp.array_equal(
            jax.random.key_data(ck.restore(like)["key"]),
            jax.random.key_data(jax.random.key(0, impl="rbg")),
        )


def test_optimizer_states_are_refused_by_name_where_arrays_are_wanted(tmp_path):
    state = {"opt": optax.adam(1e-3).init(STATE), "n": 3}
    assert error_of(checkpoint.save_safetensors, tmp_path, state).startswith(
        "n: safetensors files hold arrays of common dtypes, and this is 3. "
    )
