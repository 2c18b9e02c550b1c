"""A rule that matches nothing is said, as the map's `unused` asks."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn, nnx

import meshlayout as ml
from models.mlp import MLP


MESH = ml.create_mesh({"batch": 2, "model": 4})
RULES = {
    "hidden/kernl": (None, "model"),
    "output/bias": (None,),
    "residual": ("batch",),
}
TEXT = """\
rule 'hidden/kernl' matches no path. Nearest: hidden/kernel, hidden/bias.
rule 'residual' matches no path.
Correct it. One for activations applies in a step that gets the map as layouts=; \
give that map unused='ignore' here."""


def mlp():
    return MLP(rngs=nnx.Rngs(0))


def in_scope(layouts):
    with ml.scope(layouts):
        mlp()


WAYS = {
    "create": lambda layouts: ml.create(mlp, layouts),
    "describe": lambda layouts: ml.describe(mlp, layouts),
    "train state": lambda layouts: ml.TrainState.create(mlp, optax.sgd(0.1), layouts),
    "scope": in_scope,
}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_a_warning_or_an_error_or_nothing_as_the_map_says(way):
    with pytest.warns(ml.errors.LayoutWarning) as caught:
        WAYS[way](ml.LayoutMap(MESH, RULES))
    assert [str(warning.message) for warning in caught] == [TEXT]
    assert caught[0].filename == __file__
    with pytest.raises(ml.errors.LayoutMapError) as error:
        WAYS[way](ml.LayoutMap(MESH, RULES, unused="error"))
    assert str(error.value) == TEXT
    with warnings.catch_warnings(action="error"):
        WAYS[way](ml.LayoutMap(MESH, RULES, unused="ignore"))


def test_a_step_warns_once_of_a_rule_for_neither_activations_nor_arguments():
    step = lambda state, x: (state, ml.constrain(x, "block/hiden"))
    rules = {"^w": ("model",), "hiden": ("batch",), "block/hidden": ("batch",)}
    how = {"layouts": ml.LayoutMap(MESH, rules), "on_recompile": "ignore"}
    compiled = ml.compile_step(step, **how)
    with pytest.warns(ml.errors.LayoutWarning) as caught:
        [compiled({"w": jnp.ones(8)}, jnp.ones(size)) for size in (2, 4)]
    assert [str(warning.message) for warning in caught] == [
        "rule 'block/hidden' matches no name that constrain was called with. Did you "
        "mean 'block/hiden'?"
    ]
    ignored = ml.LayoutMap(MESH, rules, unused="ignore")
    ml.compile_step(step, layouts=ignored)({"w": jnp.ones(8)}, jnp.ones(2))


@pytest.mark.parametrize("default", [None, ml.zero_rule(MESH)])
def test_a_name_that_is_no_axis_causes_a_warning(default):
    kernel_init = nn.with_partitioning(nn.initializers.ones, (None, "modle"))
    dense = nn.Dense(8, kernel_init=kernel_init)
    build = lambda: dense.init(jax.random.key(0), jnp.ones((1, 8)))
    with pytest.warns(ml.errors.LayoutWarning, match=r"'modle' .*, but 'model' has"):
        ml.create(build, ml.LayoutMap(MESH, default=default))
    with warnings.catch_warnings():  # a note of the user's is not about names
        warnings.simplefilter("error")
        rule = ml.Rule((None, "model"), note="its scale has no rule, but 'model' has")
        ml.create(lambda: jnp.ones((8, 8)), ml.LayoutMap(MESH, default=rule))


LOGICAL_AXES = {  # what is given, and what is said to match nothing
    "a typo": ({"mpl": "model"}, ["mpl"]),
    "beside a right one": ({"mpl": "model", "embed": None}, ["mpl"]),
    "a table for several models": (
        {"mlp": "model", "embed": None, "heads": "model"},
        [],
    ),
    "no table": ({}, []),
}


@pytest.mark.parametrize("case", LOGICAL_AXES)
def test_logical_axes_that_no_array_has_are_unused_rules(case):
    axes, dead = LOGICAL_AXES[case]
    kernel = nn.Partitioned(jnp.ones((8, 8)), ("embed", "mlp"))
    layouts = ml.LayoutMap(MESH, logical_axes=axes, unused="error")
    expected = {f"logical_axes[{name!r}]": ("mlp", "embed") for name in dead}
    assert layouts.explain({"kernel": kernel}).dead_rules == expected
    if dead:
        with pytest.raises(ml.errors.LayoutMapError, match=r"mpl.* matches no path"):
            ml.create(lambda: {"kernel": kernel}, layouts)


def test_names_of_axes_that_plain_arrays_have_lost_are_not_unused():
    layouts = ml.LayoutMap(MESH, logical_axes={"mlp": "model", "embed": None})
    kernel = nn.Partitioned(jnp.ones((8, 8)), ("embed", "mlp"))
    report = layouts.explain({"kernel": ml.create(lambda: kernel, layouts).value})
    assert not report.dead_rules
    assert report.notes == [
        "note: kernel: plain arrays have lost their axis names: explain the state",
        "placed: kernel: [unsharded, model], where this map gives [unsharded, "
        "unsharded] (default)",
    ]


def test_the_arrays_of_the_same_layer_are_near():
    layouts = ml.LayoutMap(MESH, {"hidden.weight": (None, "model")})
    (near,) = layouts.explain(nnx.state(mlp())).dead_rules.values()
    assert set(near) == {"hidden/kernel", "hidden/bias"}
