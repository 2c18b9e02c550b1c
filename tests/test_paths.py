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
    return [leaf.path for leaf in layouts.resolve(tree).resolutions]


NAMES = ("norm/bias", "norm/mean", "norm/scale", "norm/var", "value/bias")
BLOCK = [*NAMES, "value/kernel"]
PARAMS = ["norm/bias", "norm/scale", "value/bias", "value/kernel"]


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
    trainable = [f"blocks/{at}/{path}" for at in (0, 1) for path in PARAMS]
    assert paths(nnx.state(model, nnx.Param)) == trainable
    assert paths(nnx.to_pure_dict(nnx.state(model, nnx.Param))) == trainable


def test_linen_variables_with_and_without_the_params_collection(variables):
    stats = ["batch_stats/norm/mean", "batch_stats/norm/var"]
    assert paths(variables) == [*stats, *PARAMS]
    assert paths(freeze(variables)) == [*stats, *PARAMS]
    assert paths(variables["params"]) == PARAMS
    assert paths({"params": variables["params"]}) == PARAMS
    assert paths({"kernel": nn.Partitioned(jnp.ones(2), (None,))}) == ["kernel"]


def test_optax_states(variables):
    slots = [f"0/{name}/{path}" for name in ("mu", "nu") for path in PARAMS]
    state = optax.adam(1e-3).init(variables["params"])
    assert paths(state) == ["0/count", *slots]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Carry:
    weight: Any
    steps: Any


def test_plain_pytrees():
    tree = {"b": [jnp.ones(2), (jnp.ones(3), None)], "a": Carry(jnp.ones(1), 3)}
    assert paths(tree) == ["a/weight", "a/steps", "b/0", "b/1/0"]
    assert paths(jnp.ones(2)) == [""]
    assert paths({}) == []


def test_leaves_that_are_not_arrays_have_no_layout():
    layouts = ml.LayoutMap(ml.create_mesh({"batch": 8}))
    tree = {"f": len, "s": "text", "x": jnp.ones(2), "n": None, "i": 3}
    resolved = layouts.resolve(tree)
    assert [leaf.path for leaf in resolved.resolutions] == ["i", "x"]
    assert resolved.layouts["f"] is None
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
