"""A layout map: what it holds, what it refuses, and which rule decides."""

import pickle
import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

import meshlayout as ml


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def text(layouts, path, *shape, dtype="float32"):
    resolution = layouts.match(path, shape, jnp.dtype(dtype))
    return resolution and str(resolution.layout)


def test_it_is_a_mapping(mesh):
    layouts = ml.LayoutMap(mesh, [("a", ("batch", None)), ("b", P("model"))])
    layouts["c.*d"] = ml.Layout([None], mesh)
    assert list(layouts) == ["a", "b", "c.*d"]
    assert "a" in layouts
    assert "cd" not in layouts
    assert layouts["a"] == ml.Layout(["batch", None], mesh)
    assert layouts.get("zz") is None
    del layouts["a"]
    assert layouts.pop("b") == ml.Layout(["model", ...], mesh)
    layouts.update({"e": [...]})
    assert list(layouts) == ["c.*d", "e"]
    merged = layouts | {"e": ("batch",), "f": (None,)}
    assert list(merged) == ["c.*d", "e", "f"]
    assert (merged["e"], layouts["e"]) == (mesh.layout("batch"), mesh.layout(...))


def test_equal_maps_pickles_and_copies(mesh):
    rules = {"a": ("batch",), "b": max, "c": ml.Rule(("model",), on_uneven="replicate")}
    options = {"default": ("batch", ...), "conflict": "first", "on_uneven": "replicate"}
    layouts = ml.LayoutMap(mesh.jax_mesh, rules, **options)
    assert ml.LayoutMap(mesh, dict(layouts), **options) == layouts == layouts | {}
    assert pickle.loads(pickle.dumps(layouts)) == layouts
    assert layouts != ml.LayoutMap(mesh, dict(layouts))


def test_any_spelling_of_a_layout(mesh):
    for value in (
        ["model", ...],
        NamedSharding(mesh.jax_mesh, P("model")),
        ml.Layout(["model", None], mesh),
        lambda path, shape, dtype: P("model"),
        ml.Rule(("model", None)),
    ):
        layouts = ml.LayoutMap(mesh, {"w": value})
        assert text(layouts, "w", 8, 4) == "[model, unsharded]"


def test_an_exact_path_wins_and_rules_that_agree_do_not_conflict(mesh):
    rules = {"a/kernel": ("batch",), "kernel": ("model",), "b": (..., "model")}
    layouts = ml.LayoutMap(mesh, rules)
    assert text(layouts, "a/kernel", 8) == "[batch]"
    assert text(layouts, "b/kernel", 8) == "[model]"
    assert layouts.match("a/kernel", (8,), "float32").reason == "exact path"


def test_a_function_without_an_opinion_leaves_the_leaf_to_others(mesh):
    def large(path, shape, dtype):
        return ("batch", ...) if shape[0] > 8 and dtype == "float32" else None

    layouts = ml.LayoutMap(mesh, {".*": large}, default=("model", ...))
    tree = {"a": array(16, 2), "b": array(16, dtype="bfloat16"), "c": array(4)}
    assert {k: str(v) for k, v in layouts.resolve(tree).layouts.items()} == {
        "a": "[batch, unsharded]",
        "b": "[model]",
        "c": "[model]",
    }


WORDS = st.text(alphabet="ab01/", min_size=1, max_size=8)
PATTERNS = st.one_of(
    WORDS,
    st.sampled_from(
        [
            r"a\d", r"a.b", r"a..", r"(\d)\1", r"[0-5]", r"[^1]a", r"b{2}", r"^0", r"1$",
            r"(?P<x>\d)/(?P=x)", r"\w/\w", r"a+b?", r"0|1/", r"[,-/]a", r"(?i)A", r"\x30",
            r".?b*a", r"a|b", r"\D\D",
        ]
    ),
)  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(st.lists(PATTERNS, unique=True, max_size=6), st.lists(WORDS, max_size=12))
def test_the_rules_found_are_those_that_re_search_finds(patterns, paths):
    mesh = ml.create_mesh({"batch": 2, "model": 4})
    rules = {pattern: [...] for pattern in patterns}
    layouts = ml.LayoutMap(mesh, rules, conflict="first")
    tree = {path.replace("/", "|"): array(2) for path in paths}
    resolved = layouts.resolve(tree)
    for path in tree:
        expected = next((p for p in patterns if re.search(p, path)), None)
        expected = path if path in patterns else expected
        assert resolved[path].rule == expected


def test_unmatched_leaves_are_replicated_or_take_the_default(mesh):
    tree = {"w": array(8, 4), "s": array()}
    assert str(ml.LayoutMap(mesh).resolve(tree)["w"].layout) == "[unsharded, unsharded]"
    resolved = ml.LayoutMap(mesh, default=(..., "model")).resolve(tree)
    assert str(resolved["w"].layout) == "[unsharded, model]"
    assert resolved["w"].reason == "default"
    assert resolved["s"].reason == "scalar"
    ml.LayoutMap(mesh, {"w": [...]}, unmatched="error").resolve(tree)


def test_what_does_not_divide_is_left_unsharded_on_request_and_recorded(mesh):
    rule = ("batch", "model")
    layouts = ml.LayoutMap(mesh, {"w": rule}, on_uneven="replicate")
    resolution = layouts.match("w", (6, 10), "float32")
    assert str(resolution.layout) == "[batch, unsharded]"
    assert resolution.fallback == (
        "dim 1 left unsharded: size 10 does not divide into 4 shards over model"
    )
    assert resolution.bytes_per_device == 3 * 10 * 4
    one_rule = ml.LayoutMap(mesh, {"w": ml.Rule(rule, on_uneven="replicate")})
    assert one_rule.match("w", (6, 10), "float32") == resolution
    rules = {"w": ml.Rule(rule, on_uneven="error")}
    with pytest.raises(ml.errors.LayoutMapError):
        ml.LayoutMap(mesh, rules, on_uneven="replicate").match("w", (6, 10), "float32")


def dense_kernel(names, **options):
    """Resolves a Linen layer's kernel, which has these axis names, by a map."""
    partitioned = nn.with_partitioning(nn.initializers.ones, names)
    dense = nn.Dense(8, kernel_init=partitioned)
    variables = jax.eval_shape(lambda: dense.init(jax.random.key(0), jnp.ones((2, 4))))
    return ml.LayoutMap(**options).resolve(variables)["kernel"]


def test_a_pattern_wins_over_logical_axes_and_says_so(mesh):
    resolution = dense_kernel(("in", "out"), mesh=mesh, logical_axes={"out": "model"})
    assert str(resolution.layout) == "[unsharded, model]"
    assert resolution.reason == "logical axes ('in', 'out')"
    names = (None, "model")
    resolution = dense_kernel(names, mesh=mesh, rules={"kernel": ("batch", None)})
    assert str(resolution.layout) == "[batch, unsharded]"
    assert resolution.note == (
        "the rule wins over its logical axes (None, 'model'), which mean "
        "[unsharded, model]"
    )
    assert dense_kernel(names, mesh=mesh, rules={"kernel": names}).note is None


NAMES = st.lists(st.sampled_from("abcde"), unique=True, max_size=4)
AXES = st.sampled_from(["x", "y", "z", None, ("x", "y"), ("z",)])
AXIS_RULES = st.lists(st.tuples(st.sampled_from("abcdef"), AXES), max_size=8)


@settings(deadline=None, max_examples=200)
@given(NAMES, AXIS_RULES)
def test_logical_axes_are_read_as_flax_reads_them(names, rules):
    mesh = ml.create_mesh({"x": 2, "y": 2, "z": 2})
    names = tuple(names)
    leaf = nn.LogicallyPartitioned(array(*[8] * len(names)), names)
    resolved = ml.LayoutMap(mesh, logical_axes=rules).resolve({"w": leaf})["w"]
    axes = nn.logical_to_mesh_axes(names, rules) if names else ()
    expected = mesh.layout(*(axes or ()))
    assert resolved.layout == expected
    with nn.logical_axis_rules(rules):
        assert ml.LayoutMap(mesh).resolve({"w": leaf})["w"].layout == expected


def test_what_a_logical_axis_could_not_have_is_noted():
    mesh = ml.create_mesh({"x": 2, "y": 2, "z": 2})
    rules = [("embed", "x"), ("mlp", "x"), ("mlp", ("y", "x")), ("mlp", "y")]
    layouts = ml.LayoutMap(mesh, logical_axes=[*rules, ("heads", "y")])
    names = ("embed", "mlp", "heads", "mpl")
    leaf = nn.LogicallyPartitioned(array(8, 8, 8, 8), names)
    resolved = layouts.resolve({"w": leaf})["w"]
    assert str(resolved.layout) == "[x, y, unsharded, unsharded]"
    assert resolved.note == (
        "'mlp' is on axis 'y', not on axis 'x'; 'heads' is on no axis, not on axis 'y'; "
        "'mpl' has no rule, but 'mlp' has"
    )
    assert f"note: w: {resolved.note}" in str(layouts.explain({"w": leaf}))


def test_constrain_follows_the_map_in_force_also_when_it_changes(mesh):
    layouts = ml.LayoutMap(mesh, {"hidden": ("batch", ..., "model")})
    traced = jax.jit(lambda x: ml.constrain(x * 2, "block/hidden"))
    x = jnp.ones((4, 3, 8))
    assert len(traced(x).devices()) == 1
    with ml.scope(layouts):
        for constrained in (traced(x), ml.constrain(x, "hidden")):
            assert ml.Layout.of(constrained) == mesh.layout("batch", None, "model")
        assert ml.constrain(x, "other") is x
    del layouts["hidden"]
    layouts["hidden"] = ("model", ...)
    with ml.scope(layouts):
        assert ml.Layout.of(traced(x)) == mesh.layout("model", None, None)
    assert len(traced(x).devices()) == 1
    assert ml.constrain(x, "hidden") is x


@pytest.mark.parametrize("args", [(jnp.ones(8), P("batch")), ("hidden", jnp.ones(8))])
def test_constrain_takes_a_name(args):
    with pytest.raises(ml.errors.LayoutMapError, match=r"write ml\.relayout\(x, layo"):
        ml.constrain(*args)


def test_what_an_activation_cannot_follow_is_said(mesh):
    layouts = ml.LayoutMap(mesh, {"u": ("batch", ...)}, on_uneven="replicate")
    constrain = lambda x: ml.constrain(x, "u")
    with ml.scope(layouts), pytest.warns(ml.errors.LayoutWarning) as caught:
        constrain(jnp.ones((3, 8)))
    assert [str(warning.message) for warning in caught] == [
        "u f32[3, 8]: dim 0 left unsharded: size 3 does not divide into 2 shards over "
        "batch (rule 'u')."
    ]
    options = {"mesh": mesh.jax_mesh, "in_specs": P("model"), "out_specs": P("model")}
    with ml.scope(layouts), pytest.raises(ml.errors.LayoutMapError) as caught:
        jax.shard_map(constrain, **options)(jnp.ones(8))
    assert str(caught.value) == (
        "u f32[2]: inside shard_map every device works on its own shard, which "
        "constrain cannot move. Call it outside shard_map."
    )


def test_a_report_on_placed_arrays_says_where_they_are(mesh):
    layouts = ml.LayoutMap(mesh)
    report = layouts.explain({"w": ml.arrays.ones((8, 16), mesh.layout(None, "model"))})
    assert report.bytes_per_device == 8 * 16 * 4 // 4
    assert report.notes == [
        "placed: w: [unsharded, model], where this map gives [unsharded, unsharded] "
        "(default)"
    ]
    assert "[unsharded, model]  (placed)" in str(report)
    assert report["w"].placed == mesh.layout(None, "model")
    assert report["w"].layout == mesh.layout(None, None)  # what the map says
    described = ml.LayoutMap(mesh, {"w": (None, "model")}).resolve({"w": array(8, 16)})
    assert report.to_lock() == described.to_lock()


def test_arrays_that_are_where_the_map_says_or_elsewhere_are_not_placed(mesh):
    layouts = ml.LayoutMap(mesh, {"w": ("batch", None)})
    here = ml.relayout(jnp.ones((8, 8)), mesh.layout("batch", None))
    elsewhere = ml.relayout(here, ml.create_mesh({"x": 8}).layout("x", None))
    for x in (here, elsewhere, jnp.ones((8, 8)), array(8, 8)):
        assert layouts.resolve({"w": x})["w"].placed is None
        assert bool(layouts.explain({"w": x}).notes) == (x is elsewhere)


def test_own_rules_win_over_those_that_were_generated(mesh):
    rules = ml.layout_map.rules_for({"a/kernel": mesh.layout(None, "model")})
    layouts = ml.LayoutMap(mesh, rules) | {"kernel": ("batch", None)}
    code = eval(layouts.to_code(), {"ml": ml, "mesh": mesh})
    for twin in (layouts, layouts | {}, pickle.loads(pickle.dumps(layouts)), code):
        assert text(twin, "a/kernel", 8, 8) == "[batch, unsharded]"
    exact = ml.LayoutMap(mesh, {"a/kernel": next(iter(rules.values())), "a": [...]})
    assert text(exact, "a/kernel", 8, 8) == "[unsharded, model]"


MESH = "Mesh(batch=2, model=4)"
BAD = {
    "ml.LayoutMap(mesh, [('w', ('batch',)), ('w', ('model',))])": "the map already has "
    f"the pattern 'w', with Layout([batch], {MESH}). Delete it first to change it.",
    "ml.LayoutMap(mesh, {'w': ('modle', None)})": "rule 'w': mesh axis 'modle' of [modle, "
    f"unsharded] is not in {MESH}. Did you mean 'model'?",
    "ml.LayoutMap(mesh, {'w': 'model'})": "rule 'w': expected a Layout, a tuple or list "
    "with one entry per dim, a PartitionSpec, or a function (path, shape, dtype) -> spec, "
    "got 'model'. Write (..., 'model') to shard the last dim, [...] for replicated. Rules "
    "for logical axis names go into logical_axes=.",
    "ml.LayoutMap(mesh, {'w': ml.create_mesh({'x': 8}).layout('x')})": "rule 'w': "
    f"Layout([x], Mesh(x=8)) is on another mesh than the map, {MESH}. Give the spec "
    "alone, or a layout on the mesh of the map.",
    "ml.LayoutMap(mesh, {'w': lambda path: None})": "rule 'w': function is called as "
    "function(path, shape, dtype), but takes (path).",
    "ml.LayoutMap(mesh, {'there': [...]})['ther']": "no rule has the pattern 'ther'. Did "
    "you mean 'there'? To find the layout of a path, use match(path, shape, dtype).",
    "resolve({'dense': ('batch', None), 'kernel': (None, 'model')}, 8, 8)": "dense/kernel "
    "f32[8, 8]: rules 'dense' and 'kernel' both match and disagree: [batch, unsharded] "
    "against [unsharded, model]. Make the patterns exclusive, add a rule for the exact "
    "path, or use conflict='first', for which the order counts.",
    "resolve({'kernel': (None, 'model')}, 8)": "dense/kernel f32[8]: rule 'kernel': "
    f"Layout([unsharded, model], {MESH}) is for arrays of rank 2, but this one has rank "
    "1. Use `...` for any number of unsharded dims.",
    "resolve({'k': (None, 'model')}, 512, 10)": "dense/kernel f32[512, 10]: dim 1 has "
    "size 10, which does not divide into 4 shards over mesh axis 'model' (rule 'k', "
    f"Layout([unsharded, model], {MESH})). Nearest sizes that fit: 8 and 12. To keep the "
    "size, leave dim 1 UNSHARDED, or write ml.Rule(..., on_uneven='replicate') or, for "
    "all rules, LayoutMap(..., on_uneven='replicate').",
    "resolve({'bias': ('model',)}, 8, 8, unmatched='error')": "dense/kernel f32[8, 8]: no "
    "rule matches, and the map has unmatched='error'. Add a rule, such as "
    "layouts['dense/kernel'] = [...] for replicated.",
}


@pytest.mark.parametrize("code", BAD)
def test_mistakes_are_refused_with_the_way_out(code, mesh):
    def resolve(rules, *shape, **options):
        layouts = ml.LayoutMap(mesh, rules, **options)
        return layouts.resolve({"dense": {"kernel": array(*shape)}})

    with pytest.raises(ml.errors.LayoutMapError) as caught:
        eval(code, {"ml": ml, "mesh": mesh, "resolve": resolve})
    assert str(caught.value) == BAD[code]


def test_an_exception_in_a_rule_names_the_rule_and_the_path(mesh):
    layouts = ml.LayoutMap(mesh, {"kernel": lambda path, shape, dtype: 1 / 0})
    with pytest.raises(ZeroDivisionError) as caught:
        layouts.resolve({"dense": {"kernel": array(8, 8)}})
    assert caught.value.__notes__ == [
        "in the function of rule 'kernel', called for dense/kernel f32[8, 8]"
    ]
