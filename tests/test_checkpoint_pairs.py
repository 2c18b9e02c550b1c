"""Which saved array goes where: names, shapes, dtypes, and what differs."""

import copy
import functools
import html
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from hypothesis import given, settings, strategies as st

import meshlayout as ml
from meshlayout import checkpoint
from meshlayout.checkpoint.difference import ArraySpec
from meshlayout.checkpoint.match import Request, match, renamed
from meshlayout.checkpoint.tree import Target
from tests.error_messages import message_of


F32 = np.dtype("float32")

ADVICE = (
    "rename={pattern: replacement} gives saved arrays other names. partial=True keeps "
    "the values of missing arrays and ignores extra ones; partial=[pattern] leaves all "
    "that it matches as it is. dtype= asks for another dtype of the same kind."
)


def leaf(path, shape=(2, 3), dtype="float32"):
    return ArraySpec(path, tuple(shape), np.dtype(dtype))


def restored(saved, like, **options):
    """Saves with Flax and restores into NumPy arrays or whatever `like` holds."""
    written = serialization.msgpack_serialize(saved)
    return checkpoint.load_msgpack(written, like, **options)


def numbered(*paths, shape=(2,), dtype="float32"):
    """A nested dict in which the array of each path holds its number."""
    tree = {}
    for at, path in enumerate(paths):
        *above, last = path.split("/")
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = np.full(shape, at, dtype)
    return tree


error_of = functools.partial(message_of, error=ml.errors.CheckpointError)


words = st.text("abcd", min_size=1, max_size=3)
paths = st.lists(words, min_size=1, max_size=3).map("/".join)
path_sets = st.lists(paths, unique=True, max_size=8)
kinds = st.sampled_from(["float32", "bfloat16", "int32", "int8", "bool", "complex64"])
leaves = st.builds(leaf, paths, st.sampled_from([(), (2,), (3, 2)]), kinds)
leaf_lists = st.lists(leaves, unique_by=lambda one: one.path, max_size=8)


# Pairs.


@settings(deadline=None)
@given(path_sets)
def test_renaming_there_and_back_finds_every_array(names):
    saved = [leaf(f"old.{name.replace('/', '.')}") for name in names]
    wanted = [Target(leaf(name)) for name in names]
    rename = {r"^old\.": ""} if names else None
    new_names = renamed([one.path for one in saved], rename, ".", "/")
    by_name = dict(zip(new_names, saved, strict=True))
    pairs, diff = match(by_name, wanted, Request())
    assert [pair.spec for pair in pairs] == [one.spec for one in wanted]
    assert [pair.saved for pair in pairs] == saved
    assert not diff


@settings(max_examples=200, deadline=None)
@given(leaf_lists, leaf_lists)
def test_everything_is_restored_or_in_the_difference(saved, wanted):
    by_path = {one.path: one for one in saved}
    filled = ()
    try:
        filled, diff = match(by_path, list(map(Target, wanted)), Request(partial=True))
    except ml.errors.RestoreDiffError as error:
        diff = error.diff
    expected = {
        "missing": {one.path for one in wanted if one.path not in by_path},
        "extra": set(by_path) - {one.path for one in wanted},
        "shapes": set(),
        "dtypes": set(),
    }
    same = []
    for one in wanted:
        other = by_path.get(one.path)
        if other is None:
            continue
        if other.shape != one.shape:
            expected["shapes"].add(one.path)
        elif other.dtype != one.dtype:
            expected["dtypes"].add(one.path)
        else:
            same.append(one.path)
    assert set(diff.missing) == expected["missing"]
    assert set(diff.extra) == expected["extra"]
    assert {change.path for change in diff.shapes} == expected["shapes"]
    assert {change.path for change in diff.dtypes} == expected["dtypes"]
    if filled:
        assert [one.spec for one in filled] == wanted
        assert [one.spec.path for one in filled if one.saved is not None] == same


@settings(deadline=None)
@given(leaf_lists, leaf_lists, kinds)
def test_only_values_of_one_kind_are_ever_paired(saved, wanted, dtype):
    sorts = {"float32": "f", "bfloat16": "f", "int32": "i", "int8": "i"}

    def sort(one):
        return sorts.get(str(one), str(one))

    try:
        request = Request(partial=True, dtype=dtype)
        by_path = {one.path: one for one in saved}
        filled, _ = match(by_path, list(map(Target, wanted)), request)
    except ml.errors.CheckpointError:
        return
    for one in filled:
        if one.saved is None:
            continue
        assert sort(one.saved.dtype) == sort(one.dtype)
        if one.saved.dtype != one.spec.dtype:
            assert one.dtype == np.dtype(dtype)


def test_an_empty_state_matches_an_empty_one():
    pairs, diff = match({}, [], Request())
    assert pairs == []
    assert not diff


# Renaming.


def test_a_table_of_patterns_renames_with_groups():
    saved = numbered("h/0/w", "h/1/w", "wte")
    like = numbered("layers/0/kernel", "layers/1/kernel", "embed")
    table = {r"^h/(\d+)/w$": r"layers/\1/kernel", "^wte$": "embed"}
    got = restored(saved, like, rename=table)
    assert got["layers"]["1"]["kernel"].tolist() == [1, 1]
    assert got["embed"].tolist() == [2, 2]


def test_the_first_pattern_that_matches_a_path_renames_it():
    table = {"^a/": "b/", "w$": "v"}
    got = restored(numbered("a/w", "c/w"), numbered("b/w", "c/v"), rename=table)
    assert (got["b"]["w"].tolist(), got["c"]["v"].tolist()) == ([0, 0], [1, 1])


def test_a_pattern_that_matches_nothing_is_named_with_near_paths():
    saved = numbered("encoder/kernel", "decoder/kernel")
    message = error_of(restored, saved, saved, rename={"encodr/kernel": "x"})
    assert message == (
        "the pattern 'encodr/kernel' of rename= matches none of the 2 paths. Nearest: "
        "encoder/kernel, decoder/kernel. Correct it or remove it."
    )


def test_two_arrays_that_become_one_are_named():
    saved = numbered("a/w", "b/w")
    assert error_of(restored, saved, saved, rename={"^[ab]/": "c/"}) == (
        "the saved arrays 'a/w' and 'b/w' both become 'c/w'. Change rename= so that "
        "they differ."
    )


def test_a_renamed_array_may_not_take_the_place_of_another():
    saved = numbered("a/w", "b/w")
    assert error_of(restored, saved, saved, rename={"^a/": "b/"}) == (
        "the saved arrays 'a/w' and 'b/w' both become 'b/w'. Change rename= so that "
        "they differ."
    )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"(": "b"},
            "rename='(' is not a regular expression: missing ), unterminated "
            "subpattern at position 0.",
        ),
        (
            {"a": r"\1"},
            r"rename= replaces 'a' by '\\1': invalid group reference 1 at position 1.",
        ),
        (
            {"a": None},
            "rename= replaces 'a' by None: decoding to str: need a bytes-like object, "
            "NoneType found.",
        ),
        (["a"], "rename= must be a dict from patterns, got ['a']."),
    ],
)
def test_a_table_that_is_none_says_so(table, message):
    assert error_of(restored, numbered("a"), numbered("a"), rename=table) == message


# Differences.


def test_all_differences_stand_side_by_side_with_near_names():
    saved = {
        **numbered("heads/kernel", "old", shape=(8,)),
        "w": np.zeros((2, 3), "float32"),
        "n": np.zeros(3, "float32"),
    }
    like = {
        **numbered("head/kernel", shape=(8,)),
        "w": np.zeros((3, 2), "float32"),
        "n": np.zeros(3, "int32"),
    }
    assert error_of(restored, saved, like) == (
        "the msgpack data does not fit the state to restore: 1 missing, 2 extra, "
        "1 of another shape, 1 of another dtype.\n"
        "differs  wanted              saved\n"
        "───────  ──────────────────  ───────────────────────────\n"
        "missing  head/kernel f32[8]  (near: heads/kernel f32[8])\n"
        "shape    w f32[3, 2]         w f32[2, 3]\n"
        "dtype    n i32[3]            n f32[3]\n"
        "extra                        heads/kernel f32[8]\n"
        "extra                        old f32[8]\n"
        f"{ADVICE}"
    )


def test_the_error_holds_the_difference_as_a_value():
    with pytest.raises(ml.errors.CheckpointError) as caught:
        restored(numbered("a", "b"), numbered("a", "c", shape=(3,)))
    for diff in (caught.value.diff, copy.copy(caught.value).diff):
        assert diff.missing == ("c",)
        assert diff.extra == ("b",)
        assert [(one.saved.shape, one.wanted.shape) for one in diff.shapes] == [
            ((2,), (3,))
        ]
        assert diff.dtypes == ()
        assert diff.near("a") is None
    with pytest.raises(AttributeError):
        diff.missing = ()


def test_a_difference_shows_in_notebooks_and_escapes_names():
    diff = checkpoint.RestoreDiff(missing=("<b>/w",))
    assert html.escape("<b>/w") in diff._repr_html_()
    assert "<b>" not in diff._repr_html_()
    assert str(checkpoint.RestoreDiff()) == "nothing differs"
    assert not checkpoint.RestoreDiff()


def test_an_error_shows_the_first_of_many_differences():
    many = numbered(*(f"layer{at}/w" for at in range(100)))
    message = error_of(restored, {**many, "a": np.zeros(2, "float32")}, numbered("a"))
    assert "100 extra" in message
    assert "... and 60 more" in message


def test_partial_keeps_what_is_missing_and_leaves_out_what_is_extra():
    like = {"a": np.full(2, 7, "float32"), "c": np.full(2, 8, "float32")}
    got = restored(numbered("a", "b"), like, partial=True)
    assert got["a"].tolist() == [0, 0]
    assert got["c"].tolist() == [8, 8]
    assert sorted(got) == ["a", "c"]


def test_partial_alone_does_not_hide_another_shape():
    message = error_of(
        restored, numbered("a", "b"), numbered("a", "b", shape=(3,)), partial=True
    )
    assert "2 of another shape" in message


def test_a_new_head_is_left_as_initialized_when_it_is_named():
    saved = {"body": np.ones((4, 2), "float32"), "head": np.ones((2, 10), "float32")}
    like = {"body": np.zeros((4, 2), "float32"), "head": np.full((2, 3), 5, "float32")}
    got = restored(saved, like, partial="^head$")
    assert got["body"].tolist() == np.ones((4, 2)).tolist()
    assert got["head"].tolist() == np.full((2, 3), 5).tolist()


def test_partial_where_nothing_fits_is_an_error():
    message = error_of(restored, numbered("a"), numbered("b"), partial=True)
    assert message == (
        "the msgpack data does not fit the state to restore: 1 missing, 1 extra.\n"
        "differs  wanted    saved\n"
        "───────  ────────  ────────\n"
        "missing  b f32[2]\n"
        "extra              a f32[2]\n"
        f"{ADVICE}"
    )


def test_only_what_is_named_may_differ():
    saved, like = numbered("a", "b", "c"), numbered("a", "d")
    got = restored(saved, like, partial=["^[bc]$", "^d$"])
    assert got["a"].tolist() == [0, 0]
    message = error_of(restored, saved, like, partial=["^b$", "^d$"])
    assert message.startswith(
        "the msgpack data does not fit the state to restore: 1 extra.\n"
    )


def test_what_is_named_is_left_as_it_is_even_where_it_fits():
    like = {"net": {"w": np.full(2, 7, "float32")}, "step": 3}
    saved = {"net": {"w": np.zeros(2, "float32")}, "step": 9, "opt": np.ones(3)}
    got = restored(saved, like, partial="^(?!net/)")
    assert (got["net"]["w"].tolist(), got["step"]) == ([0, 0], 3)


@pytest.mark.parametrize("rows", [("params/w", "b/value"), ("b/value", "params/w")])
def test_patterns_mean_paths_of_the_state_and_saved_names(rows):
    saved = numbered(*rows, "c")
    like = numbered("x", "w", "b")
    got = restored(saved, like, partial=["^w$", "^x$", "^c$"])
    assert got["w"].tolist() == [1, 1]
    assert got["b"].tolist() == [rows.index("b/value")] * 2


def test_a_pattern_of_partial_that_is_nowhere_is_an_error():
    message = error_of(restored, numbered("a", "b"), numbered("a"), partial="heed")
    assert message == (
        "the pattern 'heed' of partial= matches none of the 2 paths. Correct it or "
        "remove it."
    )


def test_what_is_kept_needs_a_value():
    like = {"a": np.zeros(2, "float32"), "c": jax.ShapeDtypeStruct((2,), F32)}
    message = error_of(restored, numbered("a"), like, partial=True)
    assert message == (
        "c: not restored from the msgpack data, and like= holds only its shape. Give a "
        "created state."
    )


# Dtypes.


def test_another_dtype_is_refused_unless_it_is_named():
    saved, like = numbered("a"), {"a": jnp.zeros(2, jnp.bfloat16)}
    assert "1 of another dtype" in error_of(restored, saved, like)
    assert restored(saved, like, dtype="bfloat16")["a"].dtype == jnp.bfloat16


def test_floating_point_never_becomes_integer():
    saved, like = numbered("a"), numbered("a", dtype="int32")
    for options in ({}, {"dtype": "int32"}):
        assert "1 of another dtype" in error_of(restored, saved, like, **options)
    assert "1 of another dtype" in error_of(restored, like, saved)
    assert error_of(restored, like, saved, dtype="int32") == (
        "dtype= must be a dtype of floating arrays, as are in the state, got 'int32'."
    )


def test_a_dtype_is_for_the_arrays_of_its_kind():
    saved = {"w": np.full(2, 1.5, "float32"), "n": np.full(2, 3, "int32")}
    got = restored(saved, jax.tree.map(jnp.asarray, saved), dtype="bfloat16")
    assert (got["w"].dtype, got["n"].dtype) == (jnp.bfloat16, jnp.int32)


def test_values_that_do_not_fit_the_dtype_are_named():
    saved = {"n": np.array([1, 300], "int32"), "w": np.array([1, 1e6], "float32")}
    like = {"n": np.zeros(2, "int32"), "w": np.zeros(2, "float32")}
    assert error_of(restored, saved, like, dtype="int8") == (
        "n i32[2] holds 300, which int8 cannot represent."
    )
    assert error_of(restored, saved, like, dtype="float16") == (
        "w f32[2] holds 1000000.0, which float16 cannot represent."
    )


def test_infinities_and_nans_are_cast_as_they_are():
    saved = {"w": np.array([np.inf, -np.inf, np.nan], "float32")}
    got = restored(saved, {"w": np.zeros(3, "float16")}, dtype="float16")
    np.testing.assert_array_equal(got["w"], saved["w"].astype("float16"))


def test_a_signed_value_does_not_become_an_unsigned_one():
    saved = {"n": np.array([-1], "int32")}
    like = {"n": np.zeros(1, "uint32")}
    assert error_of(restored, saved, like, dtype="uint32") == (
        "n i32[1] holds -1, which uint32 cannot represent."
    )


def test_python_numbers_stay_python_numbers():
    saved = {"step": 3, "rate": 0.5, "on": True}
    got = restored(saved, {"step": 0, "rate": 0.0, "on": False})
    assert got == saved
    assert [type(got[name]) for name in saved] == [int, float, bool]
    assert "1 of another dtype" in error_of(restored, {"a": 0.5}, {"a": 1})
    as_array = restored(saved, {**saved, "step": jnp.int32(0)})["step"]
    assert (int(as_array), as_array.dtype) == (3, jnp.int32)


def test_a_python_fraction_never_becomes_an_integer():
    message = error_of(restored, {"rate": 0.5}, {"rate": jnp.int32(0)})
    assert "1 of another dtype" in message
    like = {"rate": jnp.float32(0)}
    assert restored({"rate": 0.5}, like, dtype="bfloat16")["rate"] == 0.5


def test_a_dtype_that_is_none_says_so():
    assert error_of(restored, numbered("a"), numbered("a"), dtype="float33") == (
        "dtype= must be a dtype of floating arrays, as are in the state, got 'float33'."
    )


def test_a_pattern_in_the_options_is_compiled_before_anything_is_read():
    message = error_of(restored, numbered("a"), numbered("a"), partial=["("])
    assert re.match(r"partial='\(' is not a regular expression", message)
