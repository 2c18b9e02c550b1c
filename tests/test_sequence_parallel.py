"""`tensor_parallel(..., sequence=True)`: residuals in shards along the sequence."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from models import transformer
from tests.tpu import abstract, create_slice_mesh


ROWS, LENGTH, LAYERS, WIDTH = 4, 128, 1, 512
CONFIG = transformer.TransformerConfig(
    vocab_size=1024,
    max_length=LENGTH,
    features=WIDTH,
    mlp_features=4 * WIDTH,
    num_heads=8,
    num_layers=LAYERS,
)
SMALL = transformer.TransformerConfig(
    vocab_size=64, max_length=16, features=32, num_layers=2
)
SCANNED = dataclasses.replace(SMALL, is_scanned=True, microbatches=2)
NNX, LINEN, PLAIN = transformer.Transformer, transformer.LinenTransformer, "plain"
COMPOSE, FSDP = ml.parallel.compose, ml.parallel.fsdp


def parameters(config):
    """Returns a pytree: grouped queries and gated MLPs, with names that say nothing."""
    width, heads, hidden = config.features, config.num_heads, config.mlp_features
    size, keys = width // heads, iter(range(100))
    block = {"q": (width, heads, size), "o": (heads, size, width)}
    block |= dict.fromkeys(("k", "v"), (width, heads // 2, size))
    block |= dict.fromkeys(("gate", "up"), (width, hidden)) | {"down": (hidden, width)}
    shapes = {"blocks": [block] * config.num_layers, "out": (width, config.vocab_size)}
    shapes["tokens"] = config.vocab_size, width
    init = lambda shape: jax.random.normal(jax.random.key(next(keys)), shape) / 16
    return jax.tree.map(init, shapes, is_leaf=lambda x: isinstance(x, tuple))


def logits_of(params, tokens):
    def norm(x):
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)

    x = ml.constrain(jnp.take(params["tokens"], tokens, axis=0), "residual")
    for block in params["blocks"]:
        h = norm(x)
        q, k, v = (jnp.einsum("bld,dhs->blhs", h, block[name]) for name in "qkv")
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        y = jnp.einsum("blhs,hsd->bld", y, block["o"])
        x = ml.constrain(x + y, "residual")
        h = norm(x)
        y = jax.nn.silu(h @ block["gate"]) * (h @ block["up"])
        x = ml.constrain(x + y @ block["down"], "residual")
    return norm(x) @ params["out"]


def create(method, module, config, layouts):
    if module is PLAIN:
        method = ml.create if method == ml.TrainState.create else ml.describe
        return method(functools.partial(parameters, config), layouts)
    optimizer, tokens = optax.sgd(1e-2), np.zeros((1, config.max_length), "int32")
    if module is NNX:
        return method(lambda: NNX(config, rngs=nnx.Rngs(0)), optimizer, layouts)
    model = module(config)
    init = lambda: model.init(jax.random.key(0), tokens)
    return method(init, optimizer, layouts, module=model)


def make_step(module, layouts, precision="float32"):
    if module is not PLAIN:
        return ml.make_train_step(loss_fn, layouts=layouts, precision=precision)

    def loss(params, batch):
        params = jax.tree.map(lambda x: x.astype(precision), params)
        model = functools.partial(logits_of, params)
        return loss_fn(model, batch).mean()

    @functools.partial(ml.compile_step, layouts=layouts)
    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        new = jax.tree.map(lambda x, grad: x - 1e-2 * grad, params, grads)
        return new, {"loss": value}

    return step


def rules(mesh, module, config, tokens, *, sequence=True):
    options = {"sequence": sequence}
    if module is PLAIN:
        options["call"], model = logits_of, functools.partial(parameters, config)
    else:
        build = lambda: NNX(config, rngs=nnx.Rngs(0))
        model = build if module is NNX else module(config)
    return ml.parallel.tensor_parallel(mesh, model, tokens, **options)


def loss_fn(model, batch):
    logits = model(batch["tokens"])
    return transformer.next_token_losses(logits, batch["tokens"]).mean(-1)


@pytest.mark.parametrize(
    ("module", "config", "axes"),
    [
        (NNX, SMALL, {"batch": 2, "model": 4}),
        (PLAIN, SMALL, {"batch": 4, "model": 2}),
        pytest.param(
            *(NNX, SCANNED, {"batch": 1, "stage": 2, "model": 4}),
            marks=pytest.mark.slow,
        ),
        pytest.param(LINEN, SMALL, {"fsdp": 2, "model": 4}, marks=pytest.mark.slow),
    ],
)
def test_it_trains_as_on_one_device(module, config, axes):
    tokens = np.random.default_rng(0).integers(0, 64, (4, 16)).astype("int32")

    def losses(mesh, layouts):
        state = create(ml.TrainState.create, module, config, layouts)
        step = make_step(module, layouts)
        layout = mesh.layout(next(iter(mesh.axis_names)), None)
        batch = ml.copy_to_mesh({"tokens": tokens}, layout)
        for _ in range(2):
            state, metrics = step(state, batch)
            yield float(metrics["loss"])

    one = ml.create_mesh({"batch": 1}, devices=jax.devices()[:1])
    expected = [*losses(one, ml.LayoutMap(one))]
    mesh = ml.create_mesh(axes)
    layouts = COMPOSE(rules(mesh, module, config, tokens), FSDP(mesh, min_bytes=0))
    np.testing.assert_allclose([*losses(mesh, layouts)], expected, 1e-5)


def test_tokens_in_shards_over_two_axes_are_gathered_over_one():
    mesh = ml.create_mesh({"batch": 2, "context": 2, "model": 2})
    tokens = np.zeros((4, 16), "int32")
    rule = ml.Rule(("batch", ("context", "model"), ...), yields="model")
    layouts = rules(mesh, PLAIN, SMALL, tokens) | {"^residual$": rule}
    state = create(ml.TrainState.create, PLAIN, SMALL, layouts)
    step = make_step(PLAIN, layouts)
    batch = ml.copy_to_mesh({"tokens": tokens}, mesh.layout("batch", None))
    collectives = step.communication(state, batch).collectives
    axes = {frozenset(x.axes) for x in collectives if x.kind == "all_gather"}
    assert frozenset(["model"]) in axes
    assert frozenset(["context", "model"]) not in axes


def test_a_model_without_residuals_and_another_word_are_refused():
    mesh, x = ml.create_mesh({"batch": 2, "model": 4}), np.ones((4, 16, 8), "float32")
    model, tensor_parallel = (
        nnx.Linear(8, 32, rngs=nnx.Rngs(0)),
        ml.parallel.tensor_parallel,
    )
    with pytest.raises(ml.MeshLayoutError, match=r"ml.constrain\(x, 'residual'\)"):
        tensor_parallel(mesh, model, x, sequence=True)
    with pytest.raises(ml.MeshLayoutError, match="sequence must be True or False"):
        tensor_parallel(mesh, model, x, sequence="length")


@pytest.mark.parametrize(
    "module", [NNX, pytest.param(LINEN, marks=pytest.mark.slow), PLAIN]
)
def test_a_tpu_scatters_and_gathers_what_it_would_all_reduce(module):
    pytest.importorskip("libtpu")
    mesh = create_slice_mesh(batch=2, model=4)
    tokens = abstract((ROWS, LENGTH), "int32", mesh.layout("batch", None))

    def sent(*, sequence):
        layouts = rules(mesh, module, CONFIG, tokens, sequence=sequence)
        layouts = eval(layouts.to_code(), {"ml": ml, "mesh": mesh})  # as a user has it
        layouts = COMPOSE(layouts, FSDP(mesh)) if module is PLAIN else layouts
        state = create(ml.TrainState.describe, module, CONFIG, layouts).abstract
        step = make_step(module, layouts, "bfloat16")
        program = step.lower(state, {"tokens": tokens}).compile()
        report = ml.hlo.read_communication(program)
        sent = [x for x in report.collectives if "model" in x.axes]
        return [x for x in sent if "_take" not in x.op_name]  # but for the embedding

    def of_blocks(collectives, kind):
        """Returns what the half blocks and the head send."""
        nbytes = residual // 4 if kind == "reduce_scatter" else residual
        kinds = [x for x in collectives if (x.kind, x.nbytes) == (kind, nbytes)]
        return len(kinds), {x.wire_bytes for x in kinds}

    residual = ROWS // 2 * LENGTH * WIDTH * 2  # bytes, in bfloat16
    whole, sharded = sent(sequence=False), sent(sequence=True)
    # Forward and backward, each half of a block; backward, the head.
    count, one_way = 4 * LAYERS + 1, residual * 3 // 4
    assert of_blocks(whole, "all_reduce") == (count, {2 * one_way})
    assert of_blocks(sharded, "all_reduce") == (0, set())
    assert of_blocks(sharded, "reduce_scatter") == (count, {one_way})
    # At most Megatron's gathers: as many, and the inputs of half blocks again for the
    # gradients of their matrices, where they are not kept; and gradients of positions.
    gathers, wire_bytes = of_blocks(sharded, "all_gather")
    assert wire_bytes == {one_way}
    assert count <= gathers <= count + 2 * LAYERS + 1
    # Nothing else is sent that is as large.
    others = [x for x in sharded if x.nbytes >= residual and x.kind != "all_gather"]
    assert not others
    assert sum(x.nbytes > residual for x in sharded) == 0
