"""The small example models: two interfaces, one function, and layouts for all of it."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import meshlayout as ml
from models import convnet, data, mlp


MODELS = {
    "mlp": (mlp, mlp.MLP, mlp.LinenMLP),
    "convnet": (convnet, convnet.ConvNet, convnet.LinenConvNet),
}
NUM_PARAMS = {
    "mlp": (784 + 1) * 128 + (128 + 1) * 10,
    "convnet": (9 + 1) * 32 + (9 * 32 + 1) * 64 + (1600 + 1) * 64 + (64 + 1) * 10,
}
KEY = 0


def nnx_params(name):
    """Path -> array, of the NNX variant."""
    state = nnx.state(MODELS[name][1](rngs=nnx.Rngs(KEY)), nnx.Param)
    return {
        "/".join(map(str, path)): variable[...]
        for path, variable in nnx.to_flat_state(state)
    }


def linen_params(name):
    """Path -> array, of the Linen variant."""
    model = MODELS[name][2]()
    params = model.init(jax.random.key(KEY), jnp.zeros((1, 28, 28, 1)))["params"]
    return {
        f"{a}/{b}": leaf for a, layer in params.items() for b, leaf in layer.items()
    }


@pytest.mark.parametrize("module", [convnet, data])
def test_the_examples_in_docstrings_hold(module):
    failed, attempted = doctest.testmod(module)
    assert attempted
    assert not failed


@pytest.mark.parametrize("name", MODELS)
def test_both_variants_have_the_same_parameters(name):
    ours, theirs = nnx_params(name), linen_params(name)
    assert {path: leaf.shape for path, leaf in ours.items()} == {
        path: leaf.shape for path, leaf in theirs.items()
    }
    assert sum(leaf.size for leaf in ours.values()) == NUM_PARAMS[name]


@pytest.mark.parametrize("name", MODELS)
def test_both_variants_compute_the_same(name):
    _, nnx_type, linen_type = MODELS[name]
    images = jax.random.uniform(jax.random.key(1), (3, 28, 28, 1))
    model = nnx_type(rngs=nnx.Rngs(KEY))
    nested = {}
    for path, leaf in nnx_params(name).items():
        layer, leaf_name = path.split("/")
        nested.setdefault(layer, {})[leaf_name] = leaf
    logits = linen_type().apply({"params": nested}, images)
    assert logits.shape == (3, 10)
    # The same operations in the same order: only fused differently.
    np.testing.assert_allclose(model(images), logits, atol=1e-5)


@pytest.mark.parametrize(
    "shape",
    [(2, 4, 6, 3), (1, 5, 7, 2)],
)
def test_max_pooling_is_flax_max_pooling(shape):
    x = jax.random.normal(jax.random.key(0), shape)  # continuous: no ties

    def flax_pool(x):
        return nnx.max_pool(x, (2, 2), strides=(2, 2))

    np.testing.assert_array_equal(convnet.max_pool_2x2(x), flax_pool(x))
    weights = jax.random.normal(jax.random.key(1), flax_pool(x).shape)
    gradients = [
        jax.grad(lambda x, pool=pool: (pool(x) * weights).sum())(x)
        for pool in (convnet.max_pool_2x2, flax_pool)
    ]
    np.testing.assert_array_equal(*gradients)


@pytest.mark.parametrize("flax", ["nnx", "linen"])
@pytest.mark.parametrize("rules", ["DATA_PARALLEL", "MODEL_PARALLEL", "FSDP"])
@pytest.mark.parametrize("name", MODELS)
def test_every_rule_places_a_parameter(name, rules, flax, mesh_2x4):
    module, nnx_type, linen_type = MODELS[name]
    if flax == "nnx":
        tree = nnx_type(rngs=nnx.Rngs(KEY))
    else:
        tree = linen_type().init(jax.random.key(KEY), jnp.zeros((1, 28, 28, 1)))
    patterns = getattr(module, rules)
    report = ml.LayoutMap(mesh_2x4, patterns).explain(tree)
    assert not report.dead_rules
    whole = {r.path for r in report.resolutions if r.layout.is_fully_replicated}
    # Only the output bias, ten numbers, stays whole.
    assert whole == ({"output/bias"} if patterns else set(nnx_params(name)))
