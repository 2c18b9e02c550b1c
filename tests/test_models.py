"""The example models: two interfaces, one function; any layout, the same numbers."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from models import convnet, data, mlp
from models.data import Split, batches
from models.runs import image_loss, make_steps, one_pass


MODELS = {
    "mlp": (mlp, mlp.MLP, mlp.LinenMLP),
    "convnet": (convnet, convnet.ConvNet, convnet.LinenConvNet),
}
NUM_PARAMS = {
    "mlp": (784 + 1) * 128 + (128 + 1) * 10,
    "convnet": (9 + 1) * 32 + (9 * 32 + 1) * 64 + (1600 + 1) * 64 + (64 + 1) * 10,
}
LAYOUTS = ("DATA_PARALLEL", "MODEL_PARALLEL", "FSDP")
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


def examples(num_examples):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (num_examples, 28, 28, 1), np.uint8)
    return Split(images, rng.integers(0, 10, num_examples).astype(np.int32))


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
    images = jnp.asarray(examples(3).images) / 255.0
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
    [
        (2, 4, 6, 3),
        (1, 5, 7, 2),
        pytest.param((1, 11, 11, 4), marks=pytest.mark.slow),
    ],
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


def test_ties_after_a_relu_pass_no_gradient_either_way():
    x = -jnp.ones((1, 4, 4, 1))
    for pool in (
        convnet.max_pool_2x2,
        lambda x: nnx.max_pool(x, (2, 2), strides=(2, 2)),
    ):
        gradient = jax.grad(lambda x, pool=pool: pool(nnx.relu(x)).sum())(x)
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("flax", ["nnx", "linen"])
@pytest.mark.parametrize("rules", LAYOUTS)
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


def initial_state(name, flax, layouts):
    _, nnx_type, linen_type = MODELS[name]
    optimizer = optax.adam(1e-3)
    if flax == "nnx":
        build = lambda: nnx_type(rngs=nnx.Rngs(KEY))
        return ml.TrainState.create(build, optimizer, layouts)
    model, sample = linen_type(), jnp.zeros((1, 28, 28, 1))
    build = lambda: model.init(jax.random.key(KEY), sample)
    return ml.TrainState.create(build, optimizer, layouts, module=model)


def losses_on_one_device(name, flax, split, size):
    """Mean loss of each step, in plain JAX, with a last batch that is just short."""
    _, nnx_type, linen_type = MODELS[name]
    mean, deviation = split.pixel_statistics()
    if flax == "nnx":
        graph, params = nnx.split(nnx_type(rngs=nnx.Rngs(KEY)))
        apply = lambda params, x: nnx.merge(graph, params)(x)
    else:
        sample = jnp.zeros((1, 28, 28, 1))
        params = linen_type().init(jax.random.key(KEY), sample)
        apply = linen_type().apply
    optimizer = optax.adam(1e-3)
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, images, labels):
        def mean_loss(params):
            logits = apply(params, (images.astype(jnp.float32) - mean) / deviation)
            picked = jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels]
            return -picked.mean()

        loss, grads = jax.value_and_grad(mean_loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for start in range(0, len(split), size):
        rows = slice(start, start + size)
        params, opt_state, loss = step(
            params, opt_state, split.images[rows], split.labels[rows]
        )
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("flax", ["nnx", pytest.param("linen", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["mlp", pytest.param("convnet", marks=pytest.mark.slow)]
)
def test_any_layout_learns_what_one_device_learns(name, flax):
    split = examples(3 * 16 + 5)
    expected = losses_on_one_device(name, flax, split, 16)
    for rules, axes in (
        ("DATA_PARALLEL", {"batch": 8}),
        ("MODEL_PARALLEL", {"batch": 2, "model": 4}),
        ("FSDP", {"batch": 8}),
    ):
        mesh = ml.create_mesh(axes)
        layouts = ml.LayoutMap(mesh, getattr(MODELS[name][0], rules))
        train_step, _ = make_steps(image_loss(*split.pixel_statistics()))
        state = initial_state(name, flax, layouts)
        _, totals = one_pass(train_step, state, batches(split, 16), mesh)
        assert totals.weight == len(split)
        # Sums are split differently over the devices; Adam's first steps multiply the
        # rounding where a gradient is near zero.
        np.testing.assert_allclose(totals.step_losses, expected, atol=1e-4)
        assert totals.mean_loss == pytest.approx(
            np.average(expected, weights=[16, 16, 16, 5]), abs=1e-4
        )


@pytest.mark.parametrize(
    "limit",
    [
        1,
        pytest.param(15, marks=pytest.mark.slow),
        pytest.param(16, marks=pytest.mark.slow),
        21,
    ],
)
def test_testing_counts_every_example_once(limit, mesh_2x4):
    split = examples(limit)
    layouts = ml.LayoutMap(mesh_2x4, mlp.MODEL_PARALLEL)
    mean, deviation = examples(50).pixel_statistics()
    _, test_step = make_steps(image_loss(mean, deviation))
    state = initial_state("mlp", "nnx", layouts)
    _, totals = one_pass(test_step, state, batches(split, 16), mesh_2x4)
    model = mlp.MLP(rngs=nnx.Rngs(KEY))
    guesses = np.argmax(model(jnp.asarray((split.images - mean) / deviation)), axis=-1)
    assert totals.weight == limit
    assert totals.correct == (guesses == split.labels).sum()
