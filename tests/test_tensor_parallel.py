"""Tensor and expert parallelism, read off a model's traced program."""

import re
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import meshlayout as ml
from meshlayout.parallel import expert_parallel, tensor_parallel
from models import mlp, resnet, transformer
from models.transformer import TransformerConfig
from tests import parallel_models as pytrees
from tests.bad_values import BAD, refusal
from tests.same_bits import assert_same_bits


TOKENS = jax.ShapeDtypeStruct((2, 16), "int32")
IMAGES = jax.ShapeDtypeStruct((2, 28, 28, 1), "float32")
CONFIG = TransformerConfig(vocab_size=64, max_length=16, features=32, mlp_features=64)


def cut_dims(layouts, tree):
    """The dim along which each parameter is cut, by path; None for whole ones."""
    return {
        leaf.path: next((d for d, axes in enumerate(leaf.layout.specs) if axes), None)
        for leaf in layouts.resolve(tree).resolutions
    }


def only_cut(layouts, tree):
    found = cut_dims(layouts, tree)
    return {path: dim for path, dim in found.items() if dim is not None}


def cuts(mesh, build, forward):
    layouts = tensor_parallel(mesh, build, TOKENS, call=forward)
    return cut_dims(layouts, jax.eval_shape(build))


def note_of(layouts, tree, path):
    """The reason that `explain` shows for a leaf."""
    rule = layouts[layouts.resolve(tree)[path].rule]
    assert rule.note in str(layouts.explain(tree))
    return rule.note


# The example models.

EXAMPLES = {
    "transformer": (
        lambda: transformer.Transformer(CONFIG, rngs=nnx.Rngs(0)),
        transformer.LinenTransformer(CONFIG),
        TOKENS,
        transformer.MODEL_PARALLEL,
    ),
    "mlp": (
        lambda: mlp.MLP(rngs=nnx.Rngs(0)),
        mlp.LinenMLP(),
        IMAGES,
        mlp.MODEL_PARALLEL,
    ),
    "resnet": (
        lambda: resnet.ResNet(rngs=nnx.Rngs(0)),
        resnet.LinenResNet(),
        IMAGES,
        resnet.MODEL_PARALLEL,
    ),
}


@pytest.mark.parametrize("kind", ["nnx", "linen"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_rules_are_those_that_were_written_by_hand(mesh_2x4, name, kind):
    build, module, inputs, by_hand = EXAMPLES[name]
    if kind == "nnx":
        tree, model = nnx.eval_shape(build), build
    else:
        key, model = jax.random.key(0), module
        tree = jax.eval_shape(lambda: module.init(key, jnp.zeros(*_args(inputs))))
    layouts = tensor_parallel(mesh_2x4, model, inputs)
    expected = ml.LayoutMap(mesh_2x4, by_hand)
    assert cut_dims(layouts, tree) == cut_dims(expected, tree)


def _args(x):
    return x.shape, x.dtype


def test_an_instance_an_abstract_model_and_a_builder_give_the_same_rules(mesh_2x4):
    build = lambda: mlp.MLP(rngs=nnx.Rngs(0))
    maps = [
        tensor_parallel(mesh_2x4, model, inputs)
        for model in (build, build(), nnx.eval_shape(build))
        for inputs in (IMAGES, (IMAGES,), np.zeros(IMAGES.shape))
    ]
    module, key = mlp.LinenMLP(), jax.random.key(0)
    init = lambda: module.init(key, jnp.zeros(IMAGES.shape))
    maps += [
        tensor_parallel(mesh_2x4, module, IMAGES),
        tensor_parallel(mesh_2x4, init, IMAGES, call=module.apply),
        tensor_parallel(mesh_2x4, init(), IMAGES, call=module.apply),
    ]
    for layouts in maps:
        assert dict(layouts) == dict(maps[0])


def test_tracing_a_model_changes_nothing_of_it(mesh_2x4):
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(8, 16, rngs=rngs),
        nnx.BatchNorm(16, rngs=rngs),
        nnx.Dropout(0.5, rngs=rngs),
        nnx.Linear(16, 8, rngs=rngs),
    )
    before = nnx.clone(model)
    tensor_parallel(mesh_2x4, model, jnp.ones((4, 8)))
    assert_same_bits(model, before)


class Depthwise(nn.Module):
    """An inverted bottleneck with a depthwise convolution, and a pair without one."""

    @nn.compact
    def __call__(self, x):
        y = nn.Conv(64, (1, 1), name="expand")(x)
        y = nn.Conv(64, (3, 3), feature_group_count=64, name="depthwise")(y)
        x = x + nn.Conv(1, (1, 1), name="project")(nn.relu(y))
        return nn.Conv(8, (3, 3), name="b")(nn.relu(nn.Conv(32, (3, 3), name="a")(x)))


def test_channels_are_followed_through_depthwise_convolutions(mesh_2x4):
    module, images = Depthwise(), jnp.zeros(IMAGES.shape)
    tree = jax.eval_shape(lambda: module.init(jax.random.key(0), images))
    layouts = tensor_parallel(mesh_2x4, module, IMAGES)
    assert only_cut(layouts, tree) == {
        **{f"{name}/kernel": 3 for name in ("a", "expand", "depthwise")},
        **{f"{name}/bias": 0 for name in ("a", "expand", "depthwise")},
        **{f"{name}/kernel": 2 for name in ("b", "project")},
    }
    note = note_of(layouts, tree, "depthwise/kernel")
    assert note.startswith("columns; the results stay sharded; kernel of a grouped")
    assert "jax.jit of your own does not" in note


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution on the features between the blocks, and an MLP."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(32, (2, 2), strides=2, name="stem")(x)
        for n in range(2):
            y = nn.Conv(32, (3, 3), feature_group_count=32, name=f"dw{n}")(x)
            y = nn.LayerNorm(name=f"norm{n}")(y)
            y = nn.gelu(nn.Dense(128, name=f"up{n}")(y))
            x = x + nn.Dense(32, name=f"down{n}")(y)
        return nn.Dense(10, name="head")(x.mean((1, 2)))


@pytest.mark.parametrize("module", [Depthwise(), ConvNeXtBlock()])
def test_depthwise_kernels_are_sharded_so_that_their_gradients_are_right(
    mesh_2x4, module
):
    images = np.random.default_rng(0).normal(size=(8, 12, 12, 1)).astype("float32")
    init = lambda: module.init(jax.random.key(0), images)
    layouts = tensor_parallel(mesh_2x4, module, images)
    params = ml.create(init, layouts)
    grads = jax.jit(jax.grad(lambda p, x: (module.apply(p, x) ** 2).mean()))
    batch = ml.relayout(images, mesh_2x4.layout("batch", ...))
    on_mesh = grads(params, batch)
    one = jax.devices()[0]
    on_one = grads(*jax.device_put(jax.tree.map(np.asarray, (params, images)), one))
    for a, b in zip(jax.tree.leaves(on_mesh), jax.tree.leaves(on_one), strict=True):
        # Sums in another order: float32 rounds at 1e-7 of the largest term.
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()))


# Models of other shapes, as plain pytrees.

COLUMNS, ROWS = 1, 0
LLAMA = {
    "attn/q": COLUMNS,
    "attn/k": COLUMNS,
    "attn/v": COLUMNS,
    "attn/o": ROWS,
    "attn/norm": None,
    "ffn/gate": COLUMNS,
    "ffn/up": COLUMNS,
    "ffn/down": ROWS,
    "ffn/n": None,
}


def llama_cuts(before="blocks/0/", shift=0, **changes):
    blocks = {
        before + path: None if dim is None else dim + shift
        for path, dim in {**LLAMA, **changes}.items()
    }
    return {**blocks, "embed": 0, "head": 1, "norm": None}


def test_heads_are_cut_in_einsums_over_three_dims(mesh_2x4):
    expected = {
        **{f"layers/0/{name}": 1 for name in ("wq", "wk", "wv", "w1")},
        **{f"layers/0/{name}": 0 for name in ("wo", "w2", "b1")},
        **{f"layers/0/{name}": None for name in ("n1", "n2")},
        "n": None,
        "table": 0,
    }
    assert cuts(mesh_2x4, *pytrees.gpt()) == {**expected, "unembed": 1}
    assert cuts(mesh_2x4, *pytrees.gpt(tied=True)) == expected


WITHOUT_KEYS = dict.fromkeys(("attn/k", "attn/v"))
LLAMAS = {
    "grouped queries": ({}, {}),
    "remat": ({"remat": True}, {}),
    "repeated keys": ({"repeat": True, "remat": True}, {}),
    "one key head": ({"kv_heads": 1}, WITHOUT_KEYS),
    # The sums over the features between blocks would be small, too.
    "narrow": ({"kv_heads": 1, "hidden": 16, "vocab": 8}, WITHOUT_KEYS),
    "heads that do not divide with those of each key": (
        {"heads": 6, "kv_heads": 2},
        {**WITHOUT_KEYS, "attn/q": None, "attn/o": None},
    ),
}


@pytest.mark.parametrize("name", LLAMAS)
def test_attention_is_cut_by_key_heads_or_by_heads(mesh_2x4, name):
    options, changes = LLAMAS[name]
    assert cuts(mesh_2x4, *pytrees.llama(**options)) == llama_cuts(**changes)


def test_stacked_layers_are_cut_like_listed_ones_and_never_across_layers(mesh_2x4):
    # Four layers: their number would divide.
    model = pytrees.llama(layers=4, scanned=True)
    assert cuts(mesh_2x4, *model) == llama_cuts("blocks/", shift=1)


@pytest.mark.parametrize("repeat", [False, True])
def test_queries_are_sharded_where_key_heads_do_not_divide(mesh_2x4, repeat):
    build, forward = pytrees.llama(kv_heads=2, repeat=repeat)
    layouts = tensor_parallel(mesh_2x4, build, TOKENS, call=forward)
    tree = jax.eval_shape(build)
    assert cut_dims(layouts, tree) == llama_cuts(**WITHOUT_KEYS)
    assert note_of(layouts, tree, "blocks/0/attn/k") == (
        "whole; dim 1 of 16 (2 x 8): 2 does not divide into 4 shards"
    )
    assert note_of(layouts, tree, "blocks/0/attn/q") == (
        "columns, 2 x 4 together; the results stay sharded"
    )


def test_sizes_that_do_not_divide_stay_whole_and_say_so(mesh_2x4):
    build, forward = pytrees.gpt(d=36, heads=3, vocab=61)
    layouts = tensor_parallel(mesh_2x4, build, TOKENS, call=forward)
    tree = jax.eval_shape(build)
    assert {*only_cut(layouts, tree)} == {f"layers/0/{x}" for x in ("w1", "b1", "w2")}
    assert "dim 0 of 61: 61 does not divide into 4 shards" in note_of(
        layouts, tree, "table"
    )
    assert "dim 1 of 3: 3 does not divide into 4 shards" in note_of(
        layouts, tree, "layers/0/wq"
    )


@pytest.mark.parametrize(
    ("order", "dim"), [("three heads", None), ("heads three", 1), ("stacked", 2)]
)
def test_a_fused_kernel_is_cut_only_where_whole_heads_are_together(
    mesh_2x4, order, dim
):
    build, forward = pytrees.fused(order=order)
    found = cuts(mesh_2x4, build, forward)
    assert (found["qkv"], found["out"]) == (dim, None if dim is None else 0)
    if dim is None:
        layouts = tensor_parallel(mesh_2x4, build, TOKENS, call=forward)
        note = note_of(layouts, jax.eval_shape(build), "qkv")
        assert "dim 1 of 96: split takes parts of it" in note


def test_every_attention_of_a_translator_is_cut_by_heads(mesh_2x4):
    found = cuts(mesh_2x4, *pytrees.translator())
    assert found.pop("embed") == 0
    assert len(found) == 16
    for path, dim in found.items():
        assert dim == (0 if path.endswith(("/o", "/w2")) else 1), path


@pytest.mark.parametrize("capacity", [None, 4])
def test_experts_are_cut_inside_each_expert(mesh_2x4, capacity):
    found = cuts(mesh_2x4, *pytrees.mixture(capacity=capacity))
    assert (found["up"], found["bias"], found["down"]) == (2, 1, 1)
    assert found["router"] is None


class ScannedBlock(nn.Module):
    """An MLP with dropout, for `nn.scan`."""

    @nn.compact
    def __call__(self, x, _):
        y = nn.gelu(nn.Dense(64, name="up")(nn.LayerNorm(name="norm")(x)))
        y = nn.Dropout(0.1, deterministic=False)(y)
        return x + nn.Dense(32, name="down")(y), None


class ScannedLinen(nn.Module):
    """Four layers in `nn.scan` with remat; the embedding is tied."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(64, 32, name="embed")
        layers = nn.scan(
            nn.remat(ScannedBlock),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=4,
        )(name="layers")
        return embed.attend(layers(embed(tokens), None)[0])


class NnxBlock(nnx.Module):
    """`ScannedBlock` in NNX, behind attention."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.down(self.dropout(nnx.gelu(self.up(x))))


class ScannedNnx(nnx.Module):
    """`ScannedLinen` in NNX."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 32, rngs=rngs)
        make = nnx.vmap(NnxBlock, in_axes=(0,), out_axes=0)
        self.layers = nnx.split_rngs(splits=4)(make)(rngs)

    def __call__(self, tokens):
        scan = nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        x = scan(lambda x, layer: layer(x))(self.embed(tokens), self.layers)
        return self.embed.attend(x)


def test_scanned_modules_are_cut_by_heads_and_hidden_features(mesh_2x4):
    mlp_cuts = {"up/kernel": 2, "up/bias": 1, "down/kernel": 1}
    expected = {f"layers/{path}": dim for path, dim in mlp_cuts.items()}
    expected["embed/embedding"] = 0
    model, tokens = ScannedLinen(), jnp.zeros(TOKENS.shape, TOKENS.dtype)
    tree = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens))
    assert only_cut(tensor_parallel(mesh_2x4, model, TOKENS), tree) == expected
    build = lambda: ScannedNnx(nnx.Rngs(0))
    layouts = tensor_parallel(mesh_2x4, build, TOKENS)
    heads = [f"layers/attn/{part}" for part in ("query", "key", "value")]
    assert only_cut(layouts, nnx.eval_shape(build)) == {
        **expected,
        **{f"{part}/kernel": 2 for part in heads},
        **{f"{part}/bias": 1 for part in heads},
        "layers/attn/out/kernel": 1,
    }


# Operations.


X = jax.ShapeDtypeStruct((2, 8), "float32")


def decide(mesh, shapes, forward, x=X):
    """The rules for a function of parameters of some shapes, and the parameters."""
    tree = {k: jax.ShapeDtypeStruct(shape, "float32") for k, shape in shapes.items()}
    return tensor_parallel(mesh, tree, x, call=forward), tree


PAIR = {"a": (8, 16), "b": (16, 8)}


@pytest.mark.parametrize(
    "between",
    [
        jax.nn.relu,
        lambda h: h / (1 + jnp.abs(h)),
        lambda h: h.astype("bfloat16").astype("float32"),
        lambda h: h.reshape(2, 4, 4).swapaxes(1, 2).swapaxes(1, 2).reshape(2, 16),
        lambda h: h[:, None, :].repeat(3, axis=1).sum(1),
        lambda h: jax.lax.fori_loop(0, 3, lambda _, h: jnp.sin(h), h),
        lambda h: jax.lax.cond(h.sum() > 0, jnp.sin, jnp.cos, h),
        lambda h: jax.vmap(jnp.tanh)(h),
        lambda h: jax.checkpoint(jnp.sin)(h),
        lambda h: jnp.where(h > 0, h, 0),
        lambda h: h - jax.lax.stop_gradient(h.max(-1, keepdims=True)),
        lambda h: h * jax.random.bernoulli(jax.random.key(0), 0.5, h.shape),
        lambda h: h + jnp.cumsum(h, axis=0),
        lambda h: jnp.concatenate([h, h], axis=0)[:2],
        lambda h: jax.lax.optimization_barrier(h),
        lambda h: jnp.stack([h, -h], axis=1)[:, 0],
        lambda h: jnp.tile(h, (2, 1))[:2],
        lambda h: jnp.stack(jnp.unstack(h)),
        lambda h: jnp.tile(h[:, None], (1, 3, 1)).sum(1),
    ],
)
def test_hidden_features_are_followed_through(mesh_2x4, between):
    def forward(params, x):
        return between(x @ params["a"]) @ params["b"]

    assert cut_dims(*decide(mesh_2x4, PAIR, forward)) == {"a": 1, "b": 0}


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda h: jnp.cumsum(h, axis=1), "cumsum works along it"),
        (lambda h: jnp.sort(h), "sort works along it"),
        (lambda h: h[:, ::-1], "rev works along it"),
        (lambda h: jnp.roll(h, 1, axis=1), "slice takes parts of it"),
        (lambda h: jnp.pad(h, ((0, 0), (1, 0)))[:, 1:], "pad works along it"),
        (lambda h: h.reshape(4, 8).T.reshape(2, 16), "below a factor"),
        (lambda h: jnp.fft.fft(h).real, "fft is not followed"),
        (lambda h: h.at[:, 0].set(0), "a scatter writes parts of it"),
        (
            lambda h: jnp.tile(h, (1, 2))[:, :16],
            "slice takes parts of it|below a factor",
        ),
        (
            lambda h: jnp.stack(jnp.unstack(h, axis=1), 1),
            "taken apart|split takes parts",
        ),
    ],
)
def test_hidden_features_that_are_mixed_stay_whole_and_say_so(
    mesh_2x4, between, reason
):
    def forward(params, x):
        return between(x @ params["a"]) @ params["b"]

    layouts, tree = decide(mesh_2x4, PAIR, forward)
    assert cut_dims(layouts, tree)["a"] is None
    # In older versions of JAX they are made of others.
    assert re.search(reason, note_of(layouts, tree, "a"))


def one_hot(tokens):
    return jax.nn.one_hot(tokens, 64)


def tower(params, h):
    """A residual MLP on features, between an embedding and a head."""
    return h + jax.nn.relu(h @ params["up"]) @ params["down"]


TOWER = {"up": (32, 64), "down": (64, 32)}
PARTS = {
    # name: parameters, function, dims that are cut (in the order of the names)
    "kernels as (out, in)": (
        {"a": (16, 8), "b": (8, 16)},
        lambda p, x: jax.nn.relu(x @ p["a"].T) @ p["b"].T,
        {"a": 0, "b": 1},
    ),
    "the first matrix in two low-rank factors": (
        {"a": (8, 16), "down": (8, 4), "up": (4, 16), "b": (16, 8)},
        lambda p, x: jax.nn.relu(x @ p["a"] + x @ p["down"] @ p["up"]) @ p["b"],
        {"a": 1, "up": 1, "b": 0},
    ),
    "a low-rank update of the weights": (
        {"a": (8, 16), "down": (8, 4), "up": (4, 16), "b": (16, 8)},
        lambda p, x: jax.nn.relu(x @ (p["a"] + p["down"] @ p["up"])) @ p["b"],
        {"a": 1, "up": 1, "b": 0},
    ),
    "an MLP of four matrices": (
        {"a": (8, 128), "b": (128, 64), "c": (64, 128), "d": (128, 8)},
        lambda p, x: jax.nn.relu(jax.nn.relu(x @ p["a"]) @ p["b"] @ p["c"]) @ p["d"],
        {"a": 1, "b": 0, "c": 1, "d": 0},
    ),
    "a gate in the same kernel, side by side": (
        {"up": (8, 32), "down": (16, 6)},
        lambda p, x: (x @ p["up"])[:, :16] * (x @ p["up"])[:, 16:] @ p["down"],
        {},
    ),
    "a gate in the same kernel, in a dim of its own": (
        {"up": (8, 2, 16), "down": (16, 6)},
        lambda p, x: jnp.einsum("bd,dsf->sbf", x, p["up"]).prod(0) @ p["down"],
        {"up": 2, "down": 0},
    ),
    "rows that are grouped by expert": (
        {"up": (4, 8, 16), "down": (4, 16, 8)},
        lambda p, x: jax.lax.ragged_dot(
            jax.lax.ragged_dot(x, p["up"], jnp.ones(4, "int32")),
            p["down"],
            jnp.ones(4, "int32"),
        ),
        {"up": 2, "down": 1},
    ),
    "a recurrent matrix": (
        {"i": (8, 16), "h": (16, 16), "o": (16, 6)},
        lambda p, x: (
            jax.lax.scan(
                lambda h, x: (jnp.tanh(x @ p["i"] + h @ p["h"]), None),
                jnp.zeros(16),
                x,
            )[0]
            @ p["o"]
        ),
        {},
    ),
    "a matrix and a vector that nothing uses": (
        {"a": (8, 16), "b": (16, 8), "matrix": (8, 8), "vector": (8,)},
        lambda p, x: jnp.sin(x @ p["a"]) @ p["b"],
        {"a": 1, "b": 0},
    ),
    "an unknown derivative": (
        {"a": (8, 16), "b": (16, 8)},
        lambda p, x: with_its_own_gradient(x @ p["a"]) @ p["b"],
        {"a": 1, "b": 0},
    ),
}


def counted(p, x, layer):
    """Layers of a stack, with a counter and the stack in what a loop carries."""
    step = lambda carry, _: ((layer(*carry[:2]), carry[1] + 1, carry[2]), None)
    return jax.lax.scan(step, (x, 0, p), None, length=4)[0][0]


STACKS = {
    "fori_loop": lambda p, x, layer: jax.lax.fori_loop(
        0, 4, lambda n, x: layer(x, n), x
    ),
    "a counter of its own": counted,
    "scan over numbers": lambda p, x, layer: jax.lax.scan(
        lambda x, n: (layer(x, n), None), x, jnp.arange(4)
    )[0],
    "while_loop": lambda p, x, layer: jax.lax.while_loop(
        lambda carry: carry[1] < 4, lambda c: (layer(*c), c[1] + 1), (x, 0)
    )[0],
    "scan over the stack": lambda p, x, layer: jax.lax.scan(
        lambda x, w: (x + jax.nn.relu(x @ w["a"]) @ w["b"], None), x, p
    )[0],
}


@pytest.mark.parametrize("name", STACKS)
def test_stacks_are_sharded_however_a_loop_reads_its_layers(mesh_2x4, name):
    layer = lambda x, w: x + jax.nn.relu(x @ w["a"]) @ w["b"]

    def forward(p, x):
        of_stack = lambda x, n: layer(x, jax.tree.map(lambda w: w[n], p))
        return STACKS[name](p, x, of_stack)

    shapes = {"a": (4, 8, 16), "b": (4, 16, 8)}
    assert cut_dims(*decide(mesh_2x4, shapes, forward)) == {"a": 2, "b": 1}


def test_quantized_weights_are_sharded_as_others(mesh_2x4):
    tree = {key: jax.ShapeDtypeStruct(shape, "int8") for key, shape in PAIR.items()}
    tree["scale"] = jax.ShapeDtypeStruct((16,), "float32")

    def forward(p, x):
        a, b = (p[name].astype("float32") for name in "ab")
        return jax.nn.relu((x @ a) * p["scale"][None]) @ b

    layouts = tensor_parallel(mesh_2x4, tree, X, call=forward)
    assert cut_dims(layouts, tree) == {"a": 1, "b": 0, "scale": 0}


@jax.custom_vjp
def with_its_own_gradient(x):
    return jnp.sin(x)


with_its_own_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g,))


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_models_are_cut_where_they_pair(mesh_2x4, name):
    shapes, forward, expected = PARTS[name]
    assert only_cut(*decide(mesh_2x4, shapes, forward)) == expected


REFUSED = {
    "features that two activations sum over": (
        {"q": (8, 16), "k": (8, 16)},
        lambda p, x: (x @ p["q"]) @ (x @ p["k"]).T,
        "q",
        "dim 1 of 16: a product of two activations sums over it",
    ),
    "differences between all features": (
        {"w": (8, 16)},
        lambda p, x: (x @ p["w"])[:, None] - (x @ p["w"])[..., None],
        "w",
        "dim 1 of 16: it is on two dims of one array",
    ),
    "a small pair on many rows, beside a large one on a few": (
        {"a": (8, 4096), "b": (4096, 8), "c": (8, 8), "d": (8, 8)},
        lambda p, x: (
            jnp.sin(x[:1] @ p["a"]) @ p["b"] + jnp.sin(jnp.sin(x @ p["c"]) @ p["d"])
        ),
        "c",
        "dim 1 of 8: it would send more than ten times as much per byte as the others",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_send_more_than_it_is_worth_stays_whole(mesh_2x4, name):
    shapes, forward, path, reason = REFUSED[name]
    x = jax.ShapeDtypeStruct((64, 8), "float32")
    layouts, tree = decide(mesh_2x4, shapes, forward, x)
    assert cut_dims(layouts, tree)[path] is None
    assert reason in note_of(layouts, tree, path)


EMBEDDINGS = {
    "positions that are looked up": (
        {"positions": (16, 32), "table": (64, 32)},
        lambda p, t: p["table"][t] + p["positions"][jnp.arange(16)][None],
    ),
    "positions that are given": (
        {"positions": (16, 32), "table": (64, 32)},
        lambda p, t: p["table"][t] * 3 + p["positions"][t],
    ),
    "positions that are added": (
        {"positions": (1, 16, 32), "table": (64, 32)},
        lambda p, t: p["table"][t] + p["positions"],
    ),
    "rows that are sliced one by one": (
        {"table": (64, 32)},
        lambda p, t: jax.vmap(jax.vmap(lambda n: p["table"][n]))(t),
    ),
    "a product with one-hot rows": (
        {"table": (64, 32)},
        lambda p, t: one_hot(t) @ p["table"],
    ),
}


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_the_vocabulary_is_cut_and_positions_stay_whole(mesh_2x4, name):
    shapes, embed = EMBEDDINGS[name]
    forward = lambda p, t: tower(p, tower(p, embed(p, t)))
    layouts, tree = decide(mesh_2x4, {**shapes, **TOWER}, forward, TOKENS)
    assert only_cut(layouts, tree) == {"table": 0, "up": 1, "down": 0}
    reasons = {
        "positions that are looked up": "dim 0 of 16: it is looked up at fixed places",
        "positions that are given": "added to those of a larger table",
    }
    if name in reasons:
        assert reasons[name] in note_of(layouts, tree, "positions")


def test_a_loss_of_a_batch_will_do_for_the_call(mesh_2x4):
    def loss(model, batch):
        logits = model(batch["tokens"], batch["segments"])
        accuracy = (logits.argmax(-1) == batch["tokens"]).mean()
        losses = transformer.next_token_losses(logits, batch["tokens"])
        return losses.mean(-1), {"accuracy": accuracy}

    batch = {"tokens": TOKENS, "segments": TOKENS}
    build, module, _, by_hand = EXAMPLES["transformer"]
    tree = nnx.eval_shape(build)
    expected = cut_dims(ml.LayoutMap(mesh_2x4, by_hand), tree)
    for model in (build, module):
        layouts = tensor_parallel(mesh_2x4, model, batch, call=loss)
        assert cut_dims(layouts, tree) == expected


# What compiled programs send.


def gradient_program(mesh, layouts, build, forward):
    """The compiled loss and gradients of a model, with the parameters and tokens."""
    loss = pytrees.losses(forward)
    params = ml.create(build, layouts)
    tokens = np.random.default_rng(0).integers(0, 60, (8, 16)).astype("int32")
    batch = ml.copy_to_mesh(tokens, mesh.layout("batch", None))
    compute = jax.jit(
        jax.value_and_grad(lambda params, batch: loss(params, batch).mean())
    )
    return compute, params, batch


def sent(program, params, batch):
    """Collectives of activations by kind, without sums over rows and over the batch.

    The gradients of data parallelism are one all-reduce, with the mean loss, and those
    of a loop one inside of it; the softmax and the label's logit are small.
    """
    found = ml.testing.expect_communication(program, params, batch)
    features = params["table" if "table" in params else "embed"].shape[1]
    return [
        (each.kind, each.in_loop)
        for each in found.collectives
        if all(text == f"f32[4, 16, {features}]" for text in each.arrays)
    ], found


def test_a_block_sends_one_all_reduce_per_half_and_nothing_else(mesh_2x4):
    model = pytrees.gpt(layers=2)
    layouts = tensor_parallel(mesh_2x4, model[0], TOKENS, call=model[1])
    large, found = sent(*gradient_program(mesh_2x4, layouts, *model))
    # Two layers of two halves, forward and backward; the embedding, and the gradient of
    # the last features.
    assert large == [("all_reduce", False)] * (2 * 4 + 2)
    # The softmax's maximum and sum, the label's logit, the gradients over the batch.
    assert found["all_reduce"] == len(large) + 4
    assert {kind for kind, count in found.items() if count} == {"all_reduce"}


MODELS = {
    "few key heads": pytrees.llama(kv_heads=2),
    "gpt": pytrees.gpt(),
    "tied": pytrees.gpt(tied=True),
    "llama": pytrees.llama(),
    "one key head": pytrees.llama(kv_heads=1),
    "scanned": pytrees.llama(layers=2, scanned=True),
    "fused": pytrees.fused(order="heads three"),
    "translator": pytrees.translator(),
    "experts": pytrees.mixture(capacity=4),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "few key heads"))
        for name in MODELS
    ],
)
def test_gradients_are_those_of_one_device(mesh_2x4, name):
    model = MODELS[name]
    layouts = tensor_parallel(mesh_2x4, model[0], TOKENS, call=model[1])
    program, params, batch = gradient_program(mesh_2x4, layouts, *model)
    on_mesh = program(params, batch)
    whole = jax.tree.map(np.asarray, (params, batch))
    on_one = program(*jax.device_put(whole, jax.devices()[0]))
    for a, b in zip(jax.tree.leaves(on_mesh), jax.tree.leaves(on_one), strict=True):
        # Sums in another order: float32 rounds at 1e-7 of the largest term.
        np.testing.assert_allclose(a, b, atol=2e-6, rtol=1e-4)


# Scale.


@pytest.mark.parametrize("scanned", [False, True])
def test_seventy_billion_parameters_take_seconds_and_no_memory(mesh_2x4, scanned):
    build, forward = pytrees.llama(
        8192, 64, 8, 80, 32000, 28672, head=128, scanned=scanned
    )
    tree = jax.eval_shape(build)
    # Held, or what other tests left might be collected meanwhile.
    start, arrays = time.process_time(), jax.live_arrays()
    layouts = tensor_parallel(
        mesh_2x4, tree, jax.ShapeDtypeStruct((8, 4096), "int32"), call=forward
    )
    resolved = layouts.resolve(tree)
    composed = ml.parallel.compose(layouts, ml.parallel.fsdp(mesh_2x4))
    in_eighths = composed.resolve(tree).bytes_per_device
    code = composed.to_code(tree)
    assert time.process_time() - start < 10
    assert len(jax.live_arrays()) == len(arrays)
    assert resolved.nbytes > 4 * 65e9
    assert resolved.bytes_per_device < 1.001 * resolved.nbytes / 4
    assert in_eighths < 1.001 * resolved.nbytes / 8
    # As many patterns for eighty layers as for one.
    assert len(layouts) <= 8
    assert code.count(": (") <= 10


# Experts.


@pytest.mark.parametrize(
    "options", [{"capacity": None}, {"capacity": 4}, {"experts": 6}]
)
def test_stacked_experts_are_found_in_the_program(options):
    mesh = ml.create_mesh({"batch": 2, "expert": 4})
    build, forward = pytrees.mixture(**options)
    layouts = expert_parallel(mesh, "expert", build, TOKENS, call=forward)
    tree = jax.eval_shape(build)
    if "experts" in options:
        assert only_cut(layouts, tree) == {}
        note = "whole; 6 experts do not divide into 4 shards"
        assert note_of(layouts, tree, "up") == note
    else:
        assert only_cut(layouts, tree) == {"up": 0, "bias": 0, "down": 0}


def test_stacked_experts_are_found_behind_stacked_layers():
    mesh = ml.create_mesh({"batch": 2, "expert": 4})
    shapes = {"up": (3, 8, 4, 16), "down": (3, 8, 16, 4), "router": (3, 4, 8)}

    def layer(x, p):
        gates = jax.nn.softmax(x @ p["router"])
        y = jnp.einsum("bd,edh->ebh", x, p["up"])
        y = jnp.einsum("ebh,ehd->ebd", jax.nn.relu(y), p["down"])
        return jnp.einsum("ebd,be->bd", y, gates), None

    tree = {k: jax.ShapeDtypeStruct(shape, "float32") for k, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((2, 4), "float32")
    call = lambda params, x: jax.lax.scan(layer, x, params)[0]
    layouts = expert_parallel(mesh, "expert", tree, x, call=call)
    assert only_cut(layouts, tree) == {"up": 1, "down": 1}


def test_a_model_without_stacked_experts_is_refused(mesh_2x4):
    build, forward = pytrees.gpt()
    arguments = (mesh_2x4, "model", build, TOKENS)
    message = refusal(ml.MeshLayoutError, expert_parallel, *arguments, call=forward)
    assert message == (
        "expert_parallel: no parameter is a stack of matrices of which each has its own "
        "inputs: multiply with all at once, not in a loop, as by jnp.einsum or "
        "ragged_dot, or write LayoutMap(mesh, {'experts': ('model', ...)})."
    )


@pytest.mark.slow
def test_experts_on_devices_of_their_own_send_one_all_reduce_each_way():
    mesh = ml.create_mesh({"batch": 2, "expert": 4})
    model = pytrees.mixture(capacity=4)
    layouts = expert_parallel(mesh, "expert", model[0], TOKENS, call=model[1])
    program, params, batch = gradient_program(mesh, layouts, *model)
    found = ml.testing.expect_communication(program, params, batch)
    # The gradients over the batch are the third.
    assert found["all_reduce"] == 3


# With other rules.


def test_experts_and_matrices_inside_them_go_on_different_axes():
    mesh = ml.create_mesh({"batch": 2, "expert": 2, "model": 2})
    build, forward = pytrees.mixture(capacity=4)
    layouts = ml.parallel.compose(
        expert_parallel(mesh, "expert", build, TOKENS, call=forward),
        tensor_parallel(mesh, build, TOKENS, call=forward),
    )
    resolved = layouts.resolve(jax.eval_shape(build))
    assert resolved["up"].layout.specs == ("expert", None, "model")
    assert resolved["down"].layout.specs == ("expert", "model", None)


# Wrong calls.


BAD_CALLS = {
    "model": lambda mesh, bad: tensor_parallel(mesh, bad, IMAGES),
    "inputs": lambda mesh, bad: tensor_parallel(mesh, mlp.LinenMLP(), bad),
    "axis": lambda mesh, bad: tensor_parallel(mesh, mlp.LinenMLP(), IMAGES, bad),
    "call": lambda mesh, bad: tensor_parallel(
        mesh, mlp.LinenMLP(), IMAGES, call=_bad_call(bad)
    ),
    "expert axis": lambda mesh, bad: expert_parallel(mesh, bad, TOKENS, TOKENS),
    "fsdp mesh": lambda mesh, bad: ml.parallel.fsdp(bad),
    "fsdp axes": lambda mesh, bad: ml.parallel.fsdp(mesh, axes=bad),
    "fsdp bytes": lambda mesh, bad: ml.parallel.fsdp(mesh, min_bytes=bad),
    "memory": lambda mesh, bad: ml.zero_rule(mesh, memory_kind=bad),
}
WORKS = {("fsdp axes", None), ("fsdp bytes", 0), ("memory", None)}


def _bad_call(bad):
    return object() if bad is None else bad


@pytest.mark.parametrize("name", BAD_CALLS)
@pytest.mark.parametrize("bad", BAD, ids=lambda bad: type(bad).__name__)
def test_bad_arguments_are_refused_in_a_sentence(mesh_2x4, name, bad):
    message = refusal(ml.MeshLayoutError, BAD_CALLS[name], mesh_2x4, bad)
    if isinstance(bad, np.ndarray):
        assert (message is None) == (name == "inputs")
    else:
        works = any(name == known and bad is value for known, value in WORKS)
        assert (message is None) == works


def test_messages_say_what_to_write(mesh_2x4):
    def message(*args, **options):
        return refusal(ml.MeshLayoutError, tensor_parallel, mesh_2x4, *args, **options)

    assert message({"w": jnp.zeros(3)}, IMAGES) == (
        "tensor_parallel: a dict does not say how it is called. Give call=, a function "
        "of the model and the inputs, such as call=module.apply."
    )
    assert message(mlp.LinenMLP(), IMAGES, "batch") == (
        "tensor_parallel: axis 'batch' shards the rows of batches, which would all be "
        'gathered. Give an axis of another name, as of create_mesh({"batch": 2, '
        '"model": 4}).'
    )


def test_an_exception_of_the_model_names_the_shapes_it_was_called_with(mesh_2x4):
    with pytest.raises(TypeError) as caught:
        tensor_parallel(mesh_2x4, {"w": jnp.zeros((3, 4))}, IMAGES, call=_product)
    assert caught.value.__notes__[-1] == (
        "while tensor_parallel traces the model for inputs of f32[2, 28, 28, 1]"
    )


def _product(params, x):
    return x @ params["w"]
