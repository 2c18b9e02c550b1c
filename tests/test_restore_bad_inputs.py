"""What users hand in by mistake, and files made to do harm: a sentence, or it works."""

import copy
import functools
import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
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


def outcome(call, *args, **options):
    """Returns what a call returned; a sentence if it was refused."""
    try:
        return call(*args, **options)
    except ml.MeshLayoutError as error:
        message = str(error)
    assert message.endswith((".", "?"))
    return message


OPTIONS = ["like", "layouts", "rename", "partial", "dtype"]


@pytest.mark.parametrize("option", [*OPTIONS, "transpose"])
@pytest.mark.parametrize("name", ["w.safetensors", "w.msgpack", "orbax"])
def test_every_option_of_a_loader_works_or_is_refused_in_a_sentence(
    saved, name, option
):
    call = getattr(checkpoint, f"load_{name.removeprefix('w.')}")
    for value in BAD:
        result = outcome(call, saved / name, **({"like": STATE} | {option: value}))
        if not isinstance(result, str):
            np.testing.assert_array_equal(result["w"], STATE["w"])
            assert value in (None, "") or option == "like", (option, value)


@pytest.mark.parametrize("option", [*OPTIONS, "step", "data"])
def test_every_option_of_restore_works_or_is_refused_in_a_sentence(saved, option):
    ck = ml.Checkpointer(saved / "own")
    for value in BAD:
        result = outcome(ck.restore, **({"like": STATE} | {option: value}))
        if not isinstance(result, str):
            np.testing.assert_array_equal(result["w"], STATE["w"])
            assert value in (None, "") or option == "like", (option, value)


@pytest.mark.parametrize("option", ["state", "rename", "overwrite"])
def test_every_option_of_saving_weights_works_or_is_refused(tmp_path, option):
    for value in BAD:
        arguments = {"path": tmp_path / "a.safetensors", "state": STATE}
        result = outcome(checkpoint.save_safetensors, **(arguments | {option: value}))
        if not isinstance(result, str):
            result.unlink()
            assert value in (None, "x") or isinstance(value, dict), (option, value)


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


def test_no_changed_header_raises_anything_but_sentences(tmp_path, mesh_2x4):
    layouts = ml.LayoutMap(mesh_2x4)
    arrays = {"w": np.ones((2, 3), "float32"), "e": np.ones((0, 4), "float32")}
    file = checkpoint.save_safetensors(tmp_path, arrays, metadata={"a": "b"})
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    wrong = [None, 3, -1, "x", [], {}, [1, 2], {"a": 1}, 2**64, [0, 2**63]]
    for place in json_places(header):
        for value in [*wrong, "F64", "I4", [2, 3, 1], [0, 24], [6]]:
            text = json.dumps(json_with(header, place, value)).encode()
            length = struct.pack("<Q", len(text))
            file.write_bytes(length + text + content[8 + size :])
            outcome(checkpoint.load_safetensors, file, layouts)


def test_a_name_of_very_many_keys_is_a_sentence(mesh_2x4):
    name = "a." * 1500 + "w"
    message = error_of(checkpoint.load_arrays, {name: STATE["w"]}, None)
    assert message.endswith("... has more than 200 keys.")
    got = checkpoint.load_arrays({name: STATE["w"]}, STATE, rename={"^a.*": "w"})
    np.testing.assert_array_equal(got["w"], STATE["w"])


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


def test_arrays_of_any_byte_order_come_back_in_the_native_one(tmp_path):
    with ml.Checkpointer(tmp_path) as ck:
        ck.save(1, {"w": np.ones((2, 3), ">f4")})
        for like in (STATE, {"w": jnp.zeros((2, 3))}, {"w": np.zeros((2, 3), ">f4")}):
            for dtype in (None, ">f4", np.dtype(">f4")):
                result = ck.restore(like, dtype=dtype)["w"]
                assert result.dtype.isnative
                np.testing.assert_array_equal(result, STATE["w"])


def test_a_key_of_another_generator_is_refused(tmp_path):
    state = {"key": jax.random.key(0, impl="rbg"), "w": jnp.ones(2)}
    with ml.Checkpointer(tmp_path) as ck:
        ck.save(1, state)
        message = error_of(ck.restore, {"key": jax.random.key(0), "w": jnp.ones(2)})
        assert message.startswith(
            f"{tmp_path}/1 does not fit the state to restore: 1 of another dtype.\n"
            "differs  wanted          saved\n"
            "───────  ──────────────  ──────────────\n"
            "dtype    key key<fry>[]  key key<rbg>[]\n"
        )
        words = [jax.random.key_data(x["key"]) for x in (ck.restore(state), state)]
        assert jnp.array_equal(*words)
