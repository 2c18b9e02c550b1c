"""Which saved array goes where: names, shapes, dtypes, and what differs."""

import copy
import functools
import html

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import meshlayout as ml
from meshlayout import checkpoint
from meshlayout.checkpoint.load import ArraySpec, Request, match, renamed
from tests.error_messages import message_of


ADVICE = (
    "rename={pattern: replacement} gives saved arrays other names. partial=True keeps "
    "the values of missing arrays and ignores extra ones; partial=[pattern] leaves all "
    "that it matches as it is. dtype= asks for another dtype of the same kind."
)

error_of = functools.partial(message_of, error=ml.errors.CheckpointError)
restored = checkpoint.load_arrays


def numbered(*names, shape=(2,), dtype="float32"):
    """A flat dict in which the array of each name holds its number."""
    return {name: np.full(shape, i, dtype) for i, name in enumerate(names)}


words = st.text("abcd", min_size=1, max_size=3)
paths = st.lists(words, min_size=1, max_size=3).map("/".join)
shapes = st.sampled_from([(), (2,), (3, 2)])
kinds = st.sampled_from(["float32", "bfloat16", "int32", "int8", "bool", "complex64"])
specs = st.builds(ArraySpec, paths, shapes, kinds.map(np.dtype))
spec_lists = st.lists(specs, unique_by=lambda spec: spec.path, max_size=8)


@settings(max_examples=30, deadline=None)
@given(st.lists(paths, unique=True, max_size=8))
def test_renaming_there_and_back_finds_every_array(paths):
    table = {r"^old\.": ""} if paths else None
    saved = [f"old.{path.replace('/', '.')}" for path in paths]
    names = renamed(saved, table, ".", "/")
    specs = [ArraySpec(path, (2,), np.dtype("float32")) for path in paths]
    by_name = dict(zip(names, specs, strict=True))
    pairs, diff = match(by_name, specs, Request(), "x")
    assert pairs == {path: (path, np.dtype("float32")) for path in paths}
    assert not diff


@settings(max_examples=100, deadline=None)
@given(spec_lists, spec_lists, st.none() | kinds)
def test_everything_is_restored_or_in_the_difference(saved, wanted, dtype):
    sorts = {"float32": "f", "bfloat16": "f", "int32": "i", "int8": "i"}

    def sort(dtype):
        return sorts.get(str(dtype), str(dtype))

    if dtype is not None and sort(dtype) not in {sort(x.dtype) for x in wanted}:
        dtype = None  # refused: there is nothing that it is for
    by_path, pairs = {spec.path: spec for spec in saved}, None
    try:
        pairs, diff = match(by_path, wanted, Request(partial=True, dtype=dtype), "x")
    except ml.errors.RestoreDiffError as error:
        diff = error.diff
    both = [(by_path[spec.path], spec) for spec in wanted if spec.path in by_path]
    is_cast = {new.path for _, new in both if dtype and sort(new.dtype) == sort(dtype)}
    alike = {
        new.path: (old.dtype == new.dtype)
        or (new.path in is_cast and sort(old.dtype) == sort(new.dtype))
        for old, new in both
    }
    assert set(diff.missing) == {spec.path for spec in wanted} - by_path.keys()
    assert set(diff.extra) == by_path.keys() - {spec.path for spec in wanted}
    assert {x.path for x in diff.dtypes} == {path for path in alike if not alike[path]}
    assert {x.path for x in diff.shapes} == {
        new.path for old, new in both if alike[new.path] and old.shape != new.shape
    }
    if pairs is not None:
        assert pairs == {
            new.path: (new.path, np.dtype(dtype) if new.path in is_cast else new.dtype)
            for _, new in both
        }


# Renaming.


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
            {"^en": "de"},
            "the saved arrays 'decoder.kernel' and 'encoder.kernel' both become "
            "'decoder/kernel'. Change rename= so that they differ.",
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


# Differences.


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
        f"{ADVICE}"
    )
    for diff in (caught.value.diff, copy.copy(caught.value).diff):
        assert diff.missing == ("head/kernel",)
        assert diff.extra == ("heads/kernel", "old")
        ((shape,), (dtype,)) = diff.shapes, diff.dtypes
        assert (shape.path, shape.saved.shape, shape.wanted.shape) == (
            *("w", (2, 3)),
            (3, 2),
        )
        assert (dtype.path, dtype.saved.dtype) == ("n", np.dtype("float32"))
    with pytest.raises(AttributeError):
        diff.missing = ()


def test_a_difference_shows_in_notebooks_and_escapes_names():
    diff = checkpoint.RestoreDiff(missing=("<b>/w",))
    assert html.escape("<b>/w") in diff._repr_html_()
    assert "<b>" not in diff._repr_html_()
    assert str(checkpoint.RestoreDiff()) == "nothing differs"
    assert not checkpoint.RestoreDiff()


def test_an_error_shows_the_first_of_many_differences():
    many = numbered(*(f"layer{i}" for i in range(100)))
    message = error_of(restored, {**many, "a": np.zeros(2, "float32")}, numbered("a"))
    assert "100 extra" in message
    assert "... and 60 more" in message


def test_partial_keeps_what_is_missing_and_leaves_out_what_is_extra():
    like = {"a": np.full(2, 7, "float32"), "c": np.full(2, 8, "float32")}
    got = restored(numbered("a", "b"), like, partial=True)
    assert (got["a"].tolist(), got["c"].tolist()) == ([0, 0], [8, 8])
    assert sorted(got) == ["a", "c"]
    other = numbered("a", "b", shape=(3,))
    message = error_of(restored, numbered("a", "b"), other, partial=True)
    assert "2 of another shape" in message
    message = error_of(restored, numbered("a"), numbered("b"), partial=True)
    assert message == (
        "the mapping does not fit the state to restore: 1 missing, 1 extra.\n"
        "differs  wanted    saved\n"
        "───────  ────────  ────────\n"
        "missing  b f32[2]\n"
        "extra              a f32[2]\n"
        f"{ADVICE}"
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


@pytest.mark.parametrize("rows", [("params.w", "b.value"), ("b.value", "params.w")])
def test_patterns_mean_paths_of_the_state_and_saved_names(rows):
    got = restored(
        numbered(*rows, "c"), numbered("x", "w", "b"), partial=["^w$", "^x$", "^c$"]
    )
    assert got["w"].tolist() == [1, 1]
    assert got["b"].tolist() == [rows.index("b.value")] * 2


# Dtypes.


def test_another_dtype_of_the_same_kind_is_taken_if_it_is_asked_for():
    saved = {"w": np.full(2, 1.5, "float32"), "n": np.full(2, 3, "int32")}
    like = jax.tree.map(jnp.asarray, saved)
    got = restored(saved, like, dtype="bfloat16")
    assert (got["w"].dtype, got["n"].dtype) == (jnp.bfloat16, jnp.int32)
    like["w"] = like["w"].astype("bfloat16")
    assert "1 of another dtype" in error_of(restored, saved, like)
    assert restored(saved, like, dtype="bfloat16")["w"].dtype == jnp.bfloat16


def test_floating_point_never_becomes_integer():
    saved, like = numbered("a"), numbered("a", dtype="int32")
    for options in ({}, {"dtype": "int32"}):
        assert "1 of another dtype" in error_of(restored, saved, like, **options)
    assert "1 of another dtype" in error_of(restored, like, saved)
    for dtype in ("int32", "float33"):
        assert error_of(restored, like, saved, dtype=dtype) == (
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


def test_python_numbers_stay_python_numbers():
    saved = {"step": 3, "rate": 0.5, "on": True}
    got = restored(saved, {"step": 0, "rate": 0.0, "on": False})
    assert got == saved
    assert [type(got[name]) for name in saved] == [int, float, bool]
    as_array = restored(saved, {**saved, "step": jnp.int32(0)})["step"]
    assert (int(as_array), as_array.dtype) == (3, jnp.int32)
    for like in (1, jnp.int32(0)):
        assert "1 of another dtype" in error_of(restored, {"rate": 0.5}, {"rate": like})
    like = {"rate": jnp.float32(0)}
    assert restored({"rate": 0.5}, like, dtype="bfloat16")["rate"] == 0.5


def test_a_pattern_of_what_stays_means_whole_paths(tmp_path):
    saved = {
        "params": {"a": np.ones(2, "f"), "b": np.ones(3, "f")},
        "step": np.int32(7),
    }
    fresh = jax.tree.map(jnp.zeros_like, saved)
    with ml.Checkpointer(tmp_path / "run") as ck:
        ck.save(1, saved)
        found = ck.restore(fresh, partial=["^(?!params/)", "^params/b"])
    assert found["params"]["a"].tolist() == [1, 1]
    assert found["params"]["b"].tolist() == [0, 0, 0]
    assert found["step"] == 0
