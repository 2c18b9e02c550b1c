"""ResNet-50: the known sizes, two interfaces, and one function on any mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from models import resnet
from models.resnet import Bottleneck, LinenResNet50, ResNet50, synchronize_norms
from tests.test_models import (
    assert_all_but_are_sharded,
    assert_variants_agree,
    by_path,
    convolved,
    filled_variables,
    path_text,
    randomized,
)


# As torchvision states for its weights ResNet50_Weights.IMAGENET1K_V1: "num_params",
# and "_ops" of an image of 224x224, which is 4.089 in units of 10^9.
NUM_PARAMS = 25_557_032
MULTIPLY_ADDS = 4_089_184_256
SIBLINGS = {(3, 4, 23, 3): 44_549_160, (3, 8, 36, 3): 60_192_808}

# Two stages of one block: each kind of block, and few programs to compile.
NARROW = {"num_classes": 10, "width": 8, "depths": (1, 1)}
RULES = ("DATA_PARALLEL", "MODEL_PARALLEL", "FSDP")
PHOTO = jax.ShapeDtypeStruct((1, 224, 224, 3), "float32")


@functools.cache
def shapes(depths=(3, 4, 6, 3)):
    """The full-sized network without arrays."""
    return nnx.eval_shape(lambda: ResNet50(depths=depths, rngs=nnx.Rngs(0)))


def narrow():
    return randomized(lambda: ResNet50(**NARROW, rngs=nnx.Rngs(0)))


def photos(rows, size=32):
    random = np.random.default_rng(1)
    return random.normal(size=(rows, size, size, 3)).astype("float32")


@pytest.mark.parametrize(
    ("depths", "expected"),
    [
        ((3, 4, 6, 3), NUM_PARAMS),
        *(
            pytest.param(*sibling, marks=pytest.mark.slow)
            for sibling in SIBLINGS.items()
        ),
    ],
)
def test_it_has_the_known_number_of_parameters(depths, expected):
    params = nnx.state(shapes(depths), nnx.Param)
    assert sum(x.size for x in jax.tree.leaves(params)) == expected


@functools.cache
def forward():
    """Logits of abstract variables in evaluation mode, and those variables."""
    linen = LinenResNet50()
    variables = jax.eval_shape(
        lambda: linen.init(jax.random.key(0), jnp.zeros(PHOTO.shape))
    )
    return linen.apply, variables


def test_it_takes_the_known_number_of_multiply_adds():
    apply, variables = forward()
    traced = jax.jit(apply).trace(variables, PHOTO)
    assert ml.hlo.read_cost(traced).flops == 2 * MULTIPLY_ADDS


def normalized(x, norm):
    """Batch normalization with the statistics of the batch, in NumPy."""
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    x = (x - mean) / np.sqrt(variance + 1e-5)
    return x * np.asarray(norm.scale[...]) + np.asarray(norm.bias[...])


@pytest.mark.parametrize(("in_features", "strides"), [(4, 2), (8, 1)])
def test_a_bottleneck_is_what_numpy_computes(in_features, strides):
    """With the stride in the 3x3 convolution, and in the projection."""
    build = lambda: Bottleneck(in_features, 8, strides=strides, rngs=nnx.Rngs(0))
    block = randomized(build)
    x = np.random.default_rng(1).normal(size=(2, 6, 6, in_features))
    kernel = lambda name: getattr(block, name).kernel[...]
    y = np.maximum(normalized(convolved(x, kernel("conv1"), 1), block.norm1), 0)
    y = np.maximum(normalized(convolved(y, kernel("conv2"), strides), block.norm2), 0)
    y = normalized(convolved(y, kernel("conv3"), 1), block.norm3)
    shortcut = x
    if strides == 2:
        shortcut = convolved(x, kernel("projection"), 2)
        shortcut = normalized(shortcut, block.projection_norm)
    found = nnx.jit(lambda block, x: block(x))(block, jnp.asarray(x, "float32"))
    np.testing.assert_allclose(found, np.maximum(shortcut + y, 0), atol=1e-5)


def test_max_pooling_takes_symmetric_windows():
    x = jnp.arange(36.0).reshape(1, 6, 6, 1)
    expected = [[7, 9, 11], [19, 21, 23], [31, 33, 35]]
    np.testing.assert_array_equal(resnet.max_pool_3x3(x)[0, ..., 0], expected)
    padded = resnet.max_pool_3x3(-1 - x)[0, ..., 0]  # no zeros from the padding
    np.testing.assert_array_equal(padded[0], [-1, -2, -4])


@pytest.mark.parametrize("train", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_both_variants_compute_the_same(train):
    model, images = narrow(), photos(4)
    linen = LinenResNet50(**NARROW)
    variables = filled_variables(lambda: linen.init(jax.random.key(0), images), model)
    assert_variants_agree(model, linen, variables, images, train)


WHOLE = {
    "DATA_PARALLEL": r".*",
    "MODEL_PARALLEL": r"stem|^output|norm[23]/|conv3|projection",
    "FSDP": r"norm\w*/(scale|bias|mean|var)$|^output/bias$",
}


@pytest.mark.parametrize("rules", RULES)
def test_every_rule_places_parameters(rules, mesh_2x4):
    state = nnx.state(shapes(), nnx.Any(nnx.Param, nnx.BatchStat))
    layouts = ml.LayoutMap(mesh_2x4, getattr(resnet, rules))
    assert_all_but_are_sharded(WHOLE[rules], layouts.explain(state))


def losses_of(model, batch):
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


@pytest.fixture(scope="module")
def batch():
    labels = np.random.default_rng(2).integers(0, 10, 8).astype("int32")
    return {"image": photos(8), "label": labels}


@pytest.fixture(scope="module")
def step_on_one_device(batch):
    """The loss, gradients and statistics of plain Flax."""
    model = narrow()
    mean_loss = lambda model, batch: losses_of(model, batch).mean()
    loss, grads = nnx.jit(nnx.value_and_grad(mean_loss))(model, batch)
    flat = nnx.to_flat_state(grads)
    grads = {path_text(path): np.asarray(leaf[...]) for path, leaf in flat}
    return float(loss), grads, by_path(model, nnx.BatchStat)


def mirrored_step(strategy, batch, *, synchronized):
    """The loss, the step of SGD and the new statistics, by `Strategy.run`."""
    with strategy.scope():
        model = narrow()
        optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    if synchronized:
        synchronize_norms(model)
    before = {path: np.asarray(leaf) for path, leaf in by_path(model).items()}

    def replica_step(batch):
        def loss_of(model):
            return ml.losses.compute_average_loss(losses_of(model, batch))

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    [rows] = strategy.distribute_dataset(batch, global_batch_size=8)
    loss = strategy.reduce("SUM", strategy.run(replica_step, (rows,)), axis=None)
    change = {path: before[path] - leaf for path, leaf in by_path(model).items()}
    return float(loss), change, by_path(model, nnx.BatchStat)


def assert_same_step(step, expected):
    (loss, change, statistics), (known_loss, grads, known_statistics) = step, expected
    # Sums are split over the replicas, and rounded in another order.
    assert loss == pytest.approx(known_loss, abs=1e-5)
    assert change.keys() == grads.keys()
    for path, grad in grads.items():
        np.testing.assert_allclose(change[path], grad, atol=3e-5, err_msg=path)
    for path, statistic in known_statistics.items():
        np.testing.assert_allclose(statistics[path], statistic, atol=1e-5)


@pytest.mark.slow
def test_replicas_with_synchronized_norms_take_the_step_of_one_device(
    batch, step_on_one_device
):
    strategy = ml.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    step = mirrored_step(strategy, batch, synchronized=True)
    assert_same_step(step, step_on_one_device)


def test_synchronized_norms_are_for_replicas_until_they_are_undone():
    model = nnx.eval_shape(narrow)
    call = lambda: nnx.eval_shape(lambda model, x: model(x), model, photos(2))
    synchronize_norms(model)
    with pytest.raises(NameError, match="unbound axis name: batch"):
        call()
    synchronize_norms(model, None)
    assert call().shape == (2, 10)
