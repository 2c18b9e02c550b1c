"""The example models: two interfaces, one function, and layouts for all of it."""

import dataclasses
import doctest
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import meshlayout as ml
from models import convnet, data, gpt, mlp, resnet, transformer
from models.resnet import LinenResNet, ResNet
from models.transformer import (
    LinenTransformer,
    Transformer,
    TransformerConfig,
    next_token_losses,
)


SMALL = TransformerConfig(
    vocab_size=16, max_length=8, features=8, num_heads=4, num_layers=2, mlp_features=16
)
NARROW = 8  # a ResNet's width, where it is run
KEY = 0

MODULES = {"mlp": mlp, "convnet": convnet, "resnet": resnet, "transformer": transformer}
EVERY_LAYOUT = [
    (name, rules)
    for name, module in MODULES.items()
    for rules in ("DATA_PARALLEL", "MODEL_PARALLEL", "FSDP", "FSDP_MODEL_PARALLEL")
    if hasattr(module, rules)
]


def random_tokens(shape, seed=0, vocab_size=SMALL.vocab_size):
    return np.random.default_rng(seed).integers(0, vocab_size, shape).astype("int32")


def random_images(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def nnx_model(name, sizes=None):
    rngs = nnx.Rngs(KEY)
    if name == "resnet":
        return ResNet(width=sizes or 16, rngs=rngs)
    if name == "transformer":
        return Transformer(sizes or TransformerConfig(), rngs=rngs)
    return mlp.MLP(rngs=rngs) if name == "mlp" else convnet.ConvNet(rngs=rngs)


def linen_model(name, sizes=None):
    """The module, and a function that makes its variables."""
    if name == "resnet":
        module, sample = LinenResNet(width=sizes or 16), jnp.zeros((1, 8, 8, 1))
    elif name == "transformer":
        module = LinenTransformer(sizes or TransformerConfig())
        sample = jnp.zeros((1, 8), "int32")
    else:
        module = mlp.LinenMLP() if name == "mlp" else convnet.LinenConvNet()
        sample = jnp.zeros((1, 28, 28, 1))
    return module, lambda: module.init(jax.random.key(KEY), sample)


def a_model(name, sizes=None):
    return randomized(lambda: nnx_model(name, sizes))


def randomized(build):
    """An NNX model with random parameters from NumPy, none of a special value."""
    graphdef, state = nnx.split(nnx.eval_shape(build))
    random = np.random.default_rng(KEY)

    def filled(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(KEY)
        if len(leaf.shape) < 2:  # biases, scales, statistics; and counts of keys
            return jnp.asarray(1 + 0.1 * random.normal(size=leaf.shape), leaf.dtype)
        spread = np.sqrt(np.prod(leaf.shape[:-1]))
        return jnp.asarray(random.normal(size=leaf.shape) / spread, leaf.dtype)

    return nnx.merge(graphdef, jax.tree.map(filled, nnx.to_pure_dict(state)))


@nnx.jit
def run(model, *args, **kwargs):
    """Calls a model, compiled."""
    return model(*args, **kwargs)


def shapes_of(name):
    """An NNX model of the default sizes, without arrays."""
    return nnx.eval_shape(lambda: nnx_model(name))


def path_text(keys):
    return "/".join(str(getattr(key, "key", key)) for key in keys)


def by_path(model, kind=nnx.Param):
    """Path -> array, of an NNX model's variables of one kind."""
    flat = nnx.to_flat_state(nnx.state(model, kind))
    return {path_text(path): variable[...] for path, variable in flat}


def copied(tree, arrays):
    """A nested dict with the arrays that have its paths."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, _: arrays.pop(path_text(keys)), tree
    )


def linen_variables(name, model, sizes=None):
    """A Linen variant, with variables that hold the arrays of an NNX model."""
    module, init = linen_model(name, sizes)
    return module, filled_variables(init, model)


def filled_variables(init, model):
    """Linen's variables, with the arrays of an NNX model."""
    variables = jax.eval_shape(init)
    params, statistics = by_path(model), by_path(model, nnx.BatchStat)
    variables["params"] = copied(variables["params"], params)
    if "batch_stats" in variables:
        variables["batch_stats"] = copied(variables["batch_stats"], statistics)
    assert not params
    assert not statistics
    return variables


@pytest.mark.parametrize("module", [convnet, data, gpt, resnet, transformer])
def test_the_examples_in_docstrings_hold(module):
    failed, attempted = doctest.testmod(module)
    assert attempted
    assert not failed


def convolutions(width, in_features=1):
    norm = lambda features: 2 * features
    stem = 9 * in_features * width + norm(width)
    total, features = stem, width
    for out in (width, 2 * width, 4 * width):
        total += 9 * features * out + norm(out) + 9 * out * out + norm(out)
        total += features * out + norm(out) if out != features else 0
        features = out
    return total


def num_params(name):
    if name == "mlp":
        return (784 + 1) * 128 + (128 + 1) * 10
    if name == "convnet":
        return (9 + 1) * 32 + (9 * 32 + 1) * 64 + (1600 + 1) * 64 + (64 + 1) * 10
    if name == "resnet":
        return convolutions(16) + (64 + 1) * 10
    vocab, length, d, layers, hidden = 256, 128, 64, 2, 256
    attention = 4 * (d + 1) * d
    mlp = (d + 1) * hidden + (hidden + 1) * d
    block = 2 * d + attention + 2 * d + mlp
    return vocab * d + length * d + layers * block + 2 * d + d * vocab


def shapes_by_path(tree, mesh):
    """Path -> shape, as layout maps see a tree of parameters."""
    found = ml.LayoutMap(mesh, {}).resolve(tree).resolutions
    return {leaf.path: leaf.shape for leaf in found}


@pytest.mark.parametrize("name", MODULES)
def test_both_variants_have_the_same_parameters(name, mesh_2x4):
    _, init = linen_model(name)
    linen = {"params": jax.eval_shape(init)["params"]}
    ours = shapes_by_path(nnx.state(shapes_of(name), nnx.Param), mesh_2x4)
    assert ours == shapes_by_path(linen, mesh_2x4)
    assert sum(map(np.prod, ours.values())) == num_params(name)


@pytest.mark.parametrize("name", ["mlp", "convnet"])
def test_both_variants_of_small_networks_compute_the_same(name):
    model, images = a_model(name), random_images(3, 28, 28, 1)
    module, variables = linen_variables(name, model)
    # The same operations in the same order: only fused differently.
    np.testing.assert_allclose(
        model(images), module.apply(variables, images), atol=1e-5
    )


def test_max_pooling_is_flax_max_pooling():
    x = jax.random.normal(jax.random.key(0), (2, 5, 6, 3))  # continuous: no ties

    def flax_pool(x):
        return nnx.max_pool(x, (2, 2), strides=(2, 2))

    np.testing.assert_array_equal(convnet.max_pool_2x2(x), flax_pool(x))
    weights = jax.random.normal(jax.random.key(1), flax_pool(x).shape)
    gradients = [
        jax.grad(lambda x, pool=pool: (pool(x) * weights).sum())(x)
        for pool in (convnet.max_pool_2x2, flax_pool)
    ]
    np.testing.assert_array_equal(*gradients)


@pytest.mark.parametrize("train", [True, False])
def test_both_variants_of_the_resnet_compute_the_same(train):
    model = a_model("resnet", NARROW)
    images = random_images(4, 10, 8, 1)
    run(model, images)  # so that the running statistics are not the initial ones
    assert_variants_agree(
        model, *linen_variables("resnet", model, NARROW), images, train
    )


def assert_variants_agree(model, module, variables, images, train):
    """Compares the logits and the statistics of a call, in training or not."""
    model.train() if train else model.eval()
    apply = jax.jit(module.apply, static_argnames=("train", "mutable"))
    logits, changed = apply(variables, images, train=train, mutable="batch_stats")
    # The same operations in the same order: only fused differently.
    np.testing.assert_allclose(run(model, images), logits, atol=1e-5)
    after = by_path(model, nnx.BatchStat)
    for keys, theirs in jax.tree_util.tree_leaves_with_path(changed["batch_stats"]):
        np.testing.assert_allclose(after[path_text(keys)], theirs, atol=1e-5)


def convolved(images, kernel, strides=1):
    """A convolution with symmetric zero padding, in NumPy."""
    size = kernel.shape[:2]
    around = [(n // 2, n // 2) for n in size]
    padded = np.pad(images.astype("float64"), ((0, 0), *around, (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, size, axis=(1, 2))
    windows = windows[:, ::strides, ::strides]
    return np.einsum("bhwcij,ijcf->bhwf", windows, np.asarray(kernel, "float64"))


def layer_norm(x, params):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-6) * params["scale"] + params["bias"]


def linear(x, params):
    return x @ params["kernel"] + params["bias"]


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def one_head(query, key, value):
    scores = query @ key.T / np.sqrt(query.shape[-1])
    scores[np.triu_indices(len(scores), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value


def numpy_logits(params, tokens, num_heads):
    """The language model on one sequence, in NumPy and float64."""
    x = params["embed"]["embedding"][tokens]
    x = x + params["positions"]["embedding"][: len(tokens)]
    for layer in range(len(params["blocks"])):
        block = params["blocks"][str(layer)]
        y = layer_norm(x, block["attention_norm"])
        projected = (
            np.split(linear(y, block["attention"][part]), num_heads, axis=-1)
            for part in ("query", "key", "value")
        )
        heads = [one_head(*head) for head in zip(*projected, strict=True)]
        x = x + linear(np.concatenate(heads, -1), block["attention"]["output"])
        y = layer_norm(x, block["mlp_norm"])
        x = x + linear(gelu(linear(y, block["mlp"]["up"])), block["mlp"]["down"])
    return layer_norm(x, params["norm"]) @ params["output"]["kernel"]


@pytest.fixture
def model():
    return a_model("transformer", SMALL)


def test_the_language_model_is_what_numpy_computes(model):
    tokens = random_tokens((2, 8))
    _, variables = linen_variables("transformer", model, SMALL)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, "float64"), variables["params"])
    expected = [numpy_logits(params, row, SMALL.num_heads) for row in tokens]
    # float32's rounding
    np.testing.assert_allclose(run(model, tokens), expected, atol=2e-5)


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_both_variants_of_the_language_model_compute_the_same(packed, model):
    rows = {}
    if packed:
        rows["segment_ids"] = np.array([[0, 0, 0, 1, 1, 1, 2, 2]] * 2, "int32")
        rows["positions"] = np.array([[0, 1, 2, 0, 1, 2, 0, 1]] * 2, "int32")
    tokens = random_tokens((2, 8))
    module, variables = linen_variables("transformer", model, SMALL)
    np.testing.assert_allclose(
        run(model, tokens, **rows),
        jax.jit(module.apply)(variables, tokens, **rows),
        atol=1e-5,
    )


def test_the_losses_are_the_cross_entropies_of_the_next_tokens():
    logits = random_images(2, 5, 16)
    tokens = random_tokens((2, 5))
    shares = np.exp(logits.astype("float64"))
    shares /= shares.sum(-1, keepdims=True)
    expected = [
        [-np.log(shares[row, at, tokens[row, at + 1]]) for at in range(4)]
        for row in range(2)
    ]
    np.testing.assert_allclose(next_token_losses(logits, tokens), expected, rtol=1e-5)


def test_dropout_is_for_training():
    plain = dataclasses.replace(SMALL, num_layers=1)
    config = dataclasses.replace(plain, dropout_rate=0.5)
    tokens = random_tokens((2, 8))
    model = a_model("transformer", config)
    first, second = run(model, tokens), run(model, tokens)
    assert not np.array_equal(first, second)
    model.eval()
    whole = run(a_model("transformer", plain), tokens)
    np.testing.assert_array_equal(run(model, tokens), whole)

    module, variables = linen_variables("transformer", model, config)
    apply = jax.jit(module.apply, static_argnames="train")
    np.testing.assert_allclose(apply(variables, tokens), whole, atol=1e-5)
    keys = {"dropout": jax.random.key(1)}
    dropped = apply(variables, tokens, train=True, rngs=keys)
    assert not np.allclose(dropped, whole, atol=1e-2)


@pytest.mark.parametrize("flax", ["nnx", "linen"])
def test_sizes_that_do_not_fit_are_refused(flax):
    tokens = jnp.zeros((2, 9), "int32")
    build = lambda: Transformer(SMALL, rngs=nnx.Rngs(KEY))(tokens)
    if flax == "linen":
        build = lambda: LinenTransformer(SMALL).init(jax.random.key(KEY), tokens)
    with pytest.raises(ValueError, match="the tokens have the shape") as refused:
        jax.eval_shape(build)
    assert str(refused.value).partition("\n")[0] == (  # JAX adds lines to it
        "the tokens have the shape (2, 9), and the model has positions for 8 tokens. "
        "Give shorter sequences, or make the model with max_length=9."
    )
    with pytest.raises(
        ValueError, match=r"^features=64 does not divide by num_heads=5"
    ):
        TransformerConfig(num_heads=5)


def whole_patterns(name, rules):
    """What stays whole on every device, as the layout maps say."""
    if rules == "DATA_PARALLEL":
        return r".*"
    if name in ("mlp", "convnet"):
        return r"^output/bias$"
    norms = r"norm\w*/(scale|bias|mean|var)$"
    if name == "transformer":
        if rules == "FSDP":
            return rf"{norms}|(query|key|value|output|up|down)/bias$"
        positions = "|^positions/" if rules == "MODEL_PARALLEL" else ""
        return rf"{norms}|(output|down)/bias$" + positions
    if rules == "FSDP":
        return rf"{norms}|^output/bias$"
    return r"(^|^batch_stats/)stem|^output|norm2/|projection"


@pytest.mark.parametrize("flax", ["nnx", pytest.param("linen", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "rules"), EVERY_LAYOUT)
def test_every_rule_places_parameters(name, rules, flax, mesh_2x4):
    if flax == "nnx":
        tree = nnx.state(shapes_of(name), nnx.Any(nnx.Param, nnx.BatchStat))
    else:
        tree = jax.eval_shape(linen_model(name)[1])
    layouts = ml.LayoutMap(mesh_2x4, getattr(MODULES[name], rules))
    assert_all_but_are_sharded(whole_patterns(name, rules), layouts.explain(tree))


def assert_all_but_are_sharded(pattern, report):
    assert not report.dead_rules
    assert not report.shadowed_rules
    whole = {r.path for r in report.resolutions if r.layout.is_fully_replicated}
    assert whole == {r.path for r in report.resolutions if re.search(pattern, r.path)}
