"""Patterns for layouts that were decided leaf by leaf, and maps as Python."""

import re

import flax.linen as nn
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings

import meshlayout as ml
from models import mlp, resnet, transformer


MESH = ml.create_mesh({"batch": 2, "model": 4})
SHAPE = (8, 16)
SPECS = [(None, None), ("batch", None), (None, "model"), ("model", "batch")]


def rules_for(specs):
    """Returns the entries of each rule by pattern, for entries by path."""
    layouts = {path: ml.Layout(spec, MESH) for path, spec in specs.items()}
    rules = ml.layout_map.rules_for(layouts)
    assert all(rule.is_generated for rule in rules.values())
    return {pattern: ml.Layout.of(x.layout).specs for pattern, x in rules.items()}


def run(code, mesh=MESH):
    """Returns the map that code creates where these two names are in scope."""
    return eval(code, {"ml": ml, "mesh": mesh})


def layouts_of(layouts, tree):
    return {leaf.path: leaf.layout for leaf in layouts.resolve(tree).resolutions}


def test_a_transformer_has_a_rule_for_each_kind_of_leaf():
    columns, rows = (None, "model"), ("model", None)
    specs = {"embed/embedding": rows, "positions/embedding": (None, None)}
    for layer in range(12):
        block = f"blocks/{layer}"
        for name in ("query", "key", "value"):
            specs[f"{block}/attention/{name}/kernel"] = columns
            specs[f"{block}/attention/{name}/bias"] = ("model",)
        specs[f"{block}/attention/output/kernel"] = rows
    specs["output/kernel"] = columns
    assert rules_for(specs) == {
        "(^|/)embed/embedding$": ("model", None),
        r"(^|/)blocks/\d+/attention/(query|key|value)/kernel$": (None, "model"),
        r"(^|/)blocks/\d+/attention/(query|key|value)/bias$": ("model",),
        r"(^|/)blocks/\d+/attention/output/kernel$": ("model", None),
        "^output/kernel$": (None, "model"),
    }


def test_a_leaf_that_the_model_gets_later_is_not_taken_for_another():
    names = [f"l/{n}/{name}" for n in range(4) for name in ("t", "u9")]
    specs = dict.fromkeys(names, ml.Layout([None, "model"], MESH))
    layouts = ml.LayoutMap(MESH, ml.layout_map.rules_for(specs))
    for path in ("l/0/adapt", "l/0/gate_t", "l/0/u91", "l/0/t/more", "al/0/t"):
        assert layouts.match(path, SHAPE, "float32") is None
    for path in ("l/0/t", "l/13/u9", "model/l/7/t"):  # more layers, and a tree around
        assert layouts.match(path, SHAPE, "float32") is not None


def test_numbers_that_tell_layouts_apart_are_listed():
    specs = {f"layers/{n}/w": (None, "model" if n % 2 else None) for n in range(12)}
    assert rules_for(specs) == {"(^|/)layers/(1|3|5|7|9|11)/w$": (None, "model")}
    specs = {
        f"stage{s}/block{n}/conv{k}": (None, "model") if k == 1 else ("model", None)
        for s in range(4)
        for n in range(s + 2)
        for k in (1, 2)
    }
    assert rules_for(specs) == {
        r"(^|/)stage\d+/block\d+/conv1$": (None, "model"),
        r"(^|/)stage\d+/block\d+/conv2$": ("model", None),
    }


def test_leaves_with_different_notes_have_different_rules_and_add_what_they_send():
    columns, whole = ml.Layout([None, "model"], MESH), ml.Layout([None, None], MESH)
    specs = {
        "query/w": ml.Rule(columns, note="heads", sends=3),
        "up/w": ml.Rule(columns, note="hidden", sends=5),
        "down/w": ml.Rule(columns, note="hidden", sends=6),
        "key/w": ml.Rule(whole, note="2 heads, 4 devices"),
    }
    rules = ml.layout_map.rules_for(specs)
    assert {pattern: (r.note, r.sends) for pattern, r in rules.items()} == {
        "(^|/)query/w$": ("heads", 3),
        "(^|/)(up|down)/w$": ("hidden", 11),
        "(^|/)key/w$": ("2 heads, 4 devices", None),
    }


keys = st.sampled_from(
    ["kernel", "bias", "kernel_norm", "a", "a1", "a2", "a12", "x.y", "b(", r"a\d+"]
)
paths = st.lists(
    st.one_of(keys, st.integers(0, 12).map(str)), min_size=1, max_size=4
).map("/".join)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(paths, st.sampled_from(SPECS), max_size=24))
def test_rules_for_random_trees_resolve_every_leaf_to_its_layout(specs):
    rules = rules_for(specs)
    layouts = ml.LayoutMap(MESH, rules)  # conflict="error"
    for path, spec in specs.items():
        found = layouts.match(path, SHAPE, "float32")
        assert (found and found.layout.specs) == (spec if any(spec) else None)
    for pattern in rules:
        assert any(re.search(pattern, path) for path in specs)


def test_plain_rules_are_written_as_they_are_with_their_options_and_notes():
    layouts = ml.LayoutMap(
        MESH,
        {
            r"conv\d/kernel": (..., ("batch", "model")),
            'a"b': ml.Rule(("model",), on_uneven="replicate", note="Odd\nsizes."),
            "moments": ml.Layout(["model"], MESH, memory_kind="pinned_host"),
        },
        default=[...],
        conflict="first",
        logical_axes={"embed": "model", "batch": None},
    )
    code = layouts.to_code()
    assert code == (
        "ml.LayoutMap(\n"
        "    mesh,\n"
        "    {\n"
        '        r"conv\\d/kernel": (..., ["batch", "model"]),\n'
        "        # Odd\n"
        "        # sizes.\n"
        "        'a\"b': ml.Rule((\"model\",), on_uneven='replicate'),\n"
        '        r"moments": ml.Layout(("model",), mesh, '
        "memory_kind='pinned_host'),\n"
        "    },\n"
        "    default=(...,),\n"
        "    conflict='first',\n"
        "    logical_axes=(('embed', 'model'), ('batch', None)),\n"
        ")"
    )
    again = run(code)
    assert again.to_code() == code.replace("        # Odd\n        # sizes.\n", "")
    del again['a"b'], layouts['a"b']  # its note is a comment
    assert again == layouts


MODELS = {
    "mlp": lambda: mlp.MLP(rngs=nnx.Rngs(0)),
    "resnet": lambda: resnet.ResNet(rngs=nnx.Rngs(0)),
    "transformer": lambda: transformer.Transformer(
        transformer.TransformerConfig(), rngs=nnx.Rngs(0)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_code_for_a_function_resolves_a_model_to_the_same_layouts(name):
    model = nnx.eval_shape(MODELS[name])
    rule = ml.zero_rule(MESH)
    for layouts in (
        ml.LayoutMap(MESH, {"kernel$": rule, "embed": rule}),
        ml.LayoutMap(MESH, {"bias$": [...]}, default=rule, unused="ignore"),
    ):
        code = layouts.to_code(model)
        assert layouts_of(run(code), model) == layouts_of(layouts, model)
        assert code.count(": (") <= 12


def test_the_code_of_a_train_state_leaves_its_optimizer_to_follow():
    def layouts_and_code(rules):
        layouts = ml.LayoutMap(MESH, rules)
        described = ml.TrainState.describe(MODELS["mlp"], optax.adam(1e-3), layouts)
        code = layouts.to_code(described.abstract)
        assert layouts_of(run(code), described.abstract) == layouts_of(
            layouts, described.abstract
        )
        return code

    rule = ml.zero_rule(MESH)
    assert "opt_state" not in layouts_and_code({"kernel": rule})
    assert "kernel" in layouts_and_code({"^opt_state/": rule})


def test_metadata_that_would_win_over_a_missing_rule_is_overruled():
    tree = {"w": nn.Partitioned(jnp.zeros((8, 8)), ("model", None))}
    layouts = ml.LayoutMap(MESH, {"w": lambda *_: [...]})
    again = run(layouts.to_code(tree))
    assert layouts_of(again, tree) == layouts_of(layouts, tree)
    assert layouts_of(again, tree)["w"].is_fully_replicated


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("names", [(None, "model"), (None, None)])
def test_what_a_layer_sets_itself_is_left_to_the_layer(place, names):
    tree = [{"w": jnp.zeros((64, 64))} for _ in range(3)]
    tree[place] = {"w": nn.Partitioned(jnp.zeros((64, 64)), names)}
    layouts = ml.LayoutMap(MESH, default=ml.zero_rule(MESH))
    again = run(layouts.to_code(tree))
    assert layouts_of(again, tree) == layouts_of(layouts, tree)
    assert again.match(f"{place}/w", (64, 64), "float32") is None


def test_rules_for_activations_stay_in_the_code_of_a_tree():
    rules = {"^hidden$": ("batch", None), "kernel": lambda *_: (None, "model")}
    layouts = ml.LayoutMap(MESH, rules, unused="ignore")
    again = run(layouts.to_code({"kernel": np.ones((4, 4))}))
    assert again["^hidden$"] == layouts["^hidden$"]
    assert again["(^|/)kernel$"].specs == (None, "model")


def test_functions_need_the_tree():
    with pytest.raises(ml.errors.LayoutMapError) as error:
        ml.LayoutMap(MESH, {"w": max}).to_code()
    assert str(error.value) == (
        "rule 'w' is <built-in function max>, a function, which cannot be written as a "
        "layout. Pass the model, to_code(model), to write the layouts it chooses."
    )


def test_a_rule_says_why_in_the_resolution_and_once_in_the_report():
    note = "Heads are on the last dim."
    layouts = ml.LayoutMap(MESH, {"query": ml.Rule((None, "model"), note=note)})
    tree = {"layers": [{"query": np.ones((4, 8))} for _ in range(3)]}
    assert {leaf.note for leaf in layouts.resolve(tree).resolutions} == {note}
    assert layouts.explain(tree).notes == [f"note: layers/0/query and 2 more: {note}"]
