"""One grammar names the leaves of every kind of tree."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn, nnx
from flax.core import freeze

import meshlayout as ml


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.value = nnx.Linear(2, 2, rngs=rngs)  # a name that looks like noise
        self.norm = nnx.BatchNorm(2, rngs=rngs)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        blocks = [Block(rngs), Block(rngs)]
        self.blocks = nnx.List(blocks) if hasattr(nnx, "List") else blocks
        self.tied = self.blocks[0].value


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(2, name="value")(x)
        return nn.BatchNorm(use_running_average=False, name="norm")(x)


def paths(tree: Any) -> list[str]:
    layouts = ml.LayoutMap(ml.create_mesh({"batch": 8}))
    return [found.path for found in layouts.resolve(tree).resolutions]


BLOCK = [
    "norm/bias",
    "norm/mean",
    "norm/scale",
    "norm/var",
    "value/bias",
    "value/kernel",
]


@pytest.fixture
def variables():
    return LinenModel().init(jax.random.key(0), jnp.ones((2, 2)))


def test_nnx_modules_and_states():
    model = Model(nnx.Rngs(0))
    expected = [f"blocks/{at}/{path}" for at in (0, 1) for path in BLOCK]
    # A shared module is named once, by the first of its paths.
    assert paths(model) == expected
    assert paths(nnx.state(model)) == expected
    assert paths(nnx.eval_shape(lambda: Model(nnx.Rngs(0)))) == expected
    trainable = [
        path for path in expected if path.split("/")[-1] not in ("mean", "var")
    ]
    assert paths(nnx.state(model, nnx.Param)) == trainable
    assert paths(nnx.to_pure_dict(nnx.state(model, nnx.Param))) == trainable


def test_linen_variables_with_and_without_the_params_collection(variables):
    params = ["norm/bias", "norm/scale", "value/bias", "value/kernel"]
    stats = ["batch_stats/norm/mean", "batch_stats/norm/var"]
    assert paths(variables) == [*stats, *params]
    assert paths(freeze(variables)) == [*stats, *params]
    assert paths(variables["params"]) == params
    assert paths({"params": variables["params"]}) == params


def test_boxes_are_not_part_of_a_path():
    dense = nn.Dense(
        2, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "batch"))
    )
    layouts = ml.LayoutMap(ml.create_mesh({"batch": 8}), {"kernel": [...]})
    variables = dense.init(jax.random.key(0), jnp.ones((2, 2)))
    found = [one.path for one in layouts.resolve(variables).resolutions]
    assert found == ["bias", "kernel"]


def test_optax_states(variables):
    params = variables["params"]
    slots = ["norm/bias", "norm/scale", "value/bias", "value/kernel"]
    assert paths(optax.adam(1e-3).init(params)) == [
        "0/count",
        *(f"0/mu/{path}" for path in slots),
        *(f"0/nu/{path}" for path in slots),
    ]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Carry:
    weight: Any
    steps: Any


def test_plain_pytrees():
    tree = {"b": [jnp.ones(2), (jnp.ones(3), None)], "a": Carry(jnp.ones(1), 3), 7: 1.0}
    with pytest.raises(TypeError):
        sorted(tree)
    tree = {"b": tree["b"], "a": tree["a"]}
    assert paths(tree) == ["a/weight", "a/steps", "b/0", "b/1/0"]
    assert paths(jnp.ones(2)) == [""]
    assert paths({}) == []


def test_leaves_that_are_not_arrays_have_no_layout():
    layouts = ml.LayoutMap(ml.create_mesh({"batch": 8}))
    tree = {"f": len, "s": "text", "x": jnp.ones(2), "n": None, "i": 3}
    resolved = layouts.resolve(tree)
    assert [one.path for one in resolved.resolutions] == ["i", "x"]
    assert resolved.layouts["f"] is None
    assert resolved.layouts["s"] is None
    assert resolved.layouts["i"] == ml.Layout([], layouts.mesh)


def test_params_stays_where_leaving_it_out_would_make_two_paths_one():
    assert paths({"params": {"a": jnp.ones(1)}, "a": jnp.ones(1)}) == ["a", "params/a"]


def test_two_leaves_with_one_path_are_refused():
    with pytest.raises(ml.MeshLayoutError) as caught:
        paths({"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}})
    assert str(caught.value) == (
        "two leaves have the path 'a/b': a key that contains '/' reads like two keys, and "
        "1 like '1'. Rename one of them."
    )
