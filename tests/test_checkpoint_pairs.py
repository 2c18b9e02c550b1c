"""Which saved array goes where: names, shapes, dtypes, and what differs."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshlayout as ml
from meshlayout import checkpoint
from tests.error_messages import message_of


ADVICE = (
    "restore takes rename={pattern: replacement} for saved arrays of other names, "
    "partial=True to keep the values of missing arrays and ignore extra ones or "
    "partial=[pattern] to leave what it matches as it is, and dtype= for another dtype "
    "of the same kind; load_arrays also takes transpose={pattern: (1, 0)}, for square "
    "arrays, too. train_step.prepare(state) has what a step keeps in `extra`."
)

error_of = functools.partial(message_of, error=ml.errors.CheckpointError)
restored = checkpoint.load_arrays


def numbered(*names, shape=(2,), dtype="float32"):
    """A flat dict in which the array of each name holds its number."""
    return {name: np.full(shape, i, dtype) for i, name in enumerate(names)}


def test_the_first_pattern_that_matches_a_name_renames_it():
    saved = numbered("h.0.w", "h.1.w", "wte", "ln.w")
    like = {
        "layers": numbered("0", "1"),
        "embed": np.zeros(2, "f4"),
        "ln": numbered("scale"),
    }
    table = {r"^h\.(\d+)\.w$": r"layers/\1", "^wte$": "embed", r"\.w$": ".scale"}
    got = restored(saved, like, rename=table)
    assert got["layers"]["1"].tolist() == [1, 1]
    assert got["embed"].tolist() == [2, 2]
    assert got["ln"]["scale"].tolist() == [3, 3]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"encodr.kernel": "x"},
            "the pattern 'encodr.kernel' of rename= matches none of the 2 paths. "
            "Nearest: encoder.kernel, decoder.kernel. Correct it or remove it.",
        ),
        (
            {"^(en|de)": "x"},
            "the saved arrays 'decoder.kernel' and 'encoder.kernel' both become "
            "'xcoder/kernel'. Change rename= so that they differ.",
        ),
        (
            {"(": "b"},
            "rename='(' is not a regular expression: missing ), unterminated "
            "subpattern at position 0.",
        ),
        (["a"], "rename= must be a dict from patterns, got ['a']."),
    ],
)
def test_a_table_that_does_not_work_says_so(table, message):
    saved = numbered("encoder.kernel", "decoder.kernel")
    assert error_of(restored, saved, saved, rename=table) == message


def test_all_differences_stand_side_by_side_with_near_names():
    saved = {
        **numbered("heads.kernel", "old", shape=(8,)),
        "w": np.zeros((2, 3), "float32"),
        "n": np.zeros(3, "float32"),
    }
    like = {
        "head": numbered("kernel", shape=(8,)),
        "w": np.zeros((3, 2), "float32"),
        "n": np.zeros(3, "int32"),
    }
    with pytest.raises(ml.errors.RestoreDiffError) as caught:
        restored(saved, like)
    assert str(caught.value) == (
        "the mapping does not fit the state to restore: 1 missing, 2 extra, "
        "1 of another shape, 1 of another dtype.\n"
        "differs  wanted              saved\n"
        "───────  ──────────────────  ───────────────────────────\n"
        "missing  head/kernel f32[8]  (near: heads/kernel f32[8])\n"
        "shape    w f32[3, 2]         w f32[2, 3]\n"
        "dtype    n i32[3]            n f32[3]\n"
        "extra                        heads/kernel f32[8]\n"
        "extra                        old f32[8]\n"
        r"Some names match with rename={'^heads\\.': 'head/'}. "
        f"{ADVICE}"
    )
    diff = copy.copy(caught.value).diff
    assert (diff.missing, diff.extra) == (("head/kernel",), ("heads/kernel", "old"))
    ((shape,), (dtype,)) = diff.shapes, diff.dtypes
    assert (shape.saved.shape, shape.wanted.shape) == ((2, 3), (3, 2))
    assert (dtype.path, dtype.saved.dtype) == ("n", np.dtype("float32"))


def test_another_optimizer_is_named():
    saved = numbered("params/w", "opt_state/0/mu/w", "opt_state/1/count")
    like = numbered("params/w", "opt_state/0/mu/w")
    assert "The optimizer is not the saved one" in error_of(restored, saved, like)
    got = restored(saved, like, partial="^opt_state/")
    assert got["params/w"].tolist() == [0, 0]


def test_a_model_is_taken_from_a_dict_with_its_optimizer():
    saved = numbered("model/a/w", "optimizer/opt_state/0/count", "optimizer/step")
    got = restored(saved, {"model/a/w": np.ones(2, "float32")})
    assert got["model/a/w"].tolist() == [0, 0]
    got = restored(saved, numbered("a/w"), rename={"^model/": ""})
    assert got["a/w"].tolist() == [0, 0]
    saved = numbered("params/w", "model_state/batch_stats/w", "opt_state/m", "step")
    linen = numbered("batch_stats/w", "params/w")
    got = restored(saved, linen)
    assert (got["params/w"][0], got["batch_stats/w"][0]) == (0, 1)


def test_averages_and_random_streams_that_differ_are_named():
    like = numbered("params/w", "extra/ema/w")
    said = error_of(restored, numbered("params/w"), like)
    assert "prepare the state after you have restored it" in said
    like = numbered("params/w", "model_state/drop/rngs/count")
    assert "partial='rngs'" in error_of(restored, numbered("params/w"), like)


def test_partial_keeps_what_is_missing_and_leaves_out_what_is_extra(caplog):
    like = {"a": np.full(2, 7, "float32"), "c": np.full(2, 8, "float32")}
    got = restored(numbered("a", "b"), like, partial=True)
    assert "missing  c f32[2]" in caplog.text
    assert (got["a"].tolist(), got["c"].tolist()) == ([0, 0], [8, 8])
    assert sorted(got) == ["a", "c"]
    other = numbered("a", "b", shape=(3,))
    message = error_of(restored, numbered("a", "b"), other, partial=True)
    assert "2 of another shape" in message
    message = error_of(restored, numbered("a"), numbered("b"), partial=True)
    assert "fit the state to restore: 1 missing, 1 extra.\n" in message
    nested = {"net": {"d": numbered("w")}, "mu": {"d": numbered("w")}}
    message = error_of(restored, nested, {"d": numbered("w")}, partial=True)
    assert "\nSome names match with rename={'^mu\\\\.': ''}. " in message
    # The number of a step is in any state.
    states = [numbered(name) | {"step": np.int32(3)} for name in "ab"]
    assert "1 missing, 1 extra.\n" in error_of(restored, *states, partial=True)
    assert error_of(restored, numbered("a"), numbered("a"), partial=".") == (
        "the mapping: partial='.' leaves every array as it is."
    )
    like = {"a": np.zeros(2, "float32"), "c": jax.ShapeDtypeStruct((2,), "float32")}
    assert error_of(restored, numbered("a"), like, partial=True) == (
        "c: not restored from the mapping, and like= holds only its shape. Give a "
        "created state."
    )


def test_only_what_partial_names_may_differ_and_is_left_as_it_is():
    saved, like = numbered("a", "b", "c"), numbered("a", "d")
    got = restored(saved, like, partial=["^[bc]$", "^d$"])
    assert got["a"].tolist() == [0, 0]
    message = error_of(restored, saved, like, partial=["^b$", "^d$"])
    assert message.startswith("the mapping does not fit the state to restore: 1 extra.")
    # A head of another shape, and what would fit, too.
    saved = {"body": np.ones(4), "head": np.ones((2, 10)), "step": 9}
    like = {"body": np.zeros(4), "head": np.full((2, 3), 5.0), "step": 3}
    got = restored(saved, like, partial=["^head$", "step"])
    assert got["body"].tolist() == [1] * 4
    assert (got["head"].tolist(), got["step"]) == ([[5] * 3] * 2, 3)
    for pattern, text in (
        ("heed", "the pattern 'heed' of partial= matches none of the 3 paths. "),
        (["("], "partial='(' is not a regular expression"),
        (3, "partial must be True, False, or patterns of paths that stay, got 3."),
    ):
        assert error_of(restored, saved, like, partial=pattern).startswith(text)


def test_another_dtype_of_the_same_kind_is_taken_if_it_is_asked_for():
    saved = {"w": np.full(2, 1.5, "float32"), "n": np.full(2, 3, "int32")}
    like = jax.tree.map(jnp.asarray, saved)
    got = restored(saved, like, dtype="bfloat16")
    assert (got["w"].dtype, got["n"].dtype) == (jnp.bfloat16, jnp.int32)
    like["w"] = like["w"].astype("bfloat16")
    assert "1 of another dtype" in error_of(restored, saved, like)
    assert restored(saved, like, dtype="bfloat16")["w"].dtype == jnp.bfloat16
    # Floating point never becomes integer.
    floats, integers = numbered("a"), numbered("a", dtype="int32")
    for options in ({}, {"dtype": "int32"}):
        message = error_of(restored, floats, integers, **options)
        assert "1 of another dtype" in message
    for dtype in ("int32", "float33"):
        assert error_of(restored, integers, floats, dtype=dtype) == (
            f"dtype= must be a dtype of floating arrays, as are in the state, got "
            f"{dtype!r}."
        )


def test_values_that_do_not_fit_the_dtype_are_named(mesh_2x4):
    where = mesh_2x4.layout("batch").sharding
    for values, to, text in (
        (np.array([1, 300], "int32"), "int8", "holds 300, which int8"),
        (np.array([-1, 1], "int32"), "uint32", "holds -1, which uint32"),
        (np.array([2**31, 1], "uint32"), "int32", f"holds {2**31}, which int32"),
        (np.array([1, 9], "int32"), "int4", "holds 9, which int4"),
        (np.array([1, 1e6], "float32"), "float16", "holds 1000000.0, which float16"),
    ):
        like = jax.ShapeDtypeStruct((2,), values.dtype, sharding=where)
        for target in (np.zeros_like(values), like):
            message = error_of(restored, {"n": values}, {"n": target}, dtype=to)
            assert message.endswith(f"[2] {text} cannot represent.")
    saved = {"w": np.array([np.inf, -np.inf, np.nan], "float32")}
    got = restored(saved, {"w": np.zeros(3, "float16")}, dtype="float16")
    np.testing.assert_array_equal(got["w"], saved["w"].astype("float16"))
