"""`pipeline`: equal to the layers one by one, and what its programs send and hold."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from meshlayout.hlo import read_communication
from models import transformer
from models.runs import token_loss
from tests.bad_values import refusal
from tests.tpu import abstract, create_slice_mesh, read_collectives


LAYERS, FEATURES, ROWS = 8, 16, 24
SHAPES = {"up": (8, 16, 32), "bias": (8, 32), "down": (8, 32, 16)}
run = functools.partial(ml.parallel.pipeline, axis="stage")
# Sums of other orders: float32 rounds at 1e-7 of numbers up to 30.
assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def block(params, x):
    """A layer that also reads a number of each row; of rows of zeros it makes NaN."""
    x, scale = x
    norm = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    hidden = jax.nn.gelu(norm @ params["up"] + params["bias"][None])
    return x + hidden @ params["down"] * scale[:, None], scale


def one_by_one(params, x):
    for i in range(LAYERS):
        x = block({name: p[i] for name, p in params.items()}, x)
    return x


def with_gradients(function):
    def loss(params, x):
        y, scale = function(params["blocks"], x)
        return jnp.sum(jnp.sin(y) * scale[:, None]), (y, scale)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def make_params(rounds=None):
    normal = np.random.default_rng(0).normal
    lead = (LAYERS,) if rounds is None else (rounds, LAYERS // rounds)
    layers = {name: normal(size=shape) / 5 for name, shape in SHAPES.items()}
    layers = {name: p.reshape(*lead, *p.shape[1:]) for name, p in layers.items()}
    return {
        "blocks": jax.tree.map(functools.partial(jnp.asarray, dtype="float32"), layers)
    }


def make_layouts(mesh, schedule="gpipe"):
    """Stages, and what else the mesh has axes for."""
    layouts = ml.parallel.stages(mesh, schedule=schedule)
    if "model" in mesh:
        columns = {"up|bias": (..., "model"), "down": (..., "model", None)}
        layouts = ml.parallel.compose(layouts, ml.LayoutMap(mesh, columns))
    if "fsdp" in mesh:
        layouts = ml.parallel.compose(layouts, ml.parallel.fsdp(mesh, min_bytes=0))
    return layouts


def create_mesh(axes):
    return ml.create_mesh(axes, devices=jax.devices()[: math.prod(axes.values())])


@pytest.mark.parametrize(
    ("axes", "count", "rounds", "trips"),
    [
        # rounds: None for gpipe, 0 for circular ones of one layer in a flat stack
        ({"stage": 4}, 4, None, 7),
        ({"stage": 4, "batch": 2}, 6, None, 9),
        ({"batch": 2, "stage": 2, "model": 2}, 4, None, 5),
        ({"stage": 4, "fsdp": 2}, 12, None, 15),
        ({"stage": 4}, 4, 0, 11),
        ({"stage": 2, "batch": 4}, 6, 2, 13),
        ({"stage": 2, "fsdp": 2}, 3, 4, 16),  # a last group of one microbatch
        ({"stage": 4}, 1, 0, 8),
    ],
)
def test_stages_compute_what_layers_do_in_as_many_steps_as_published(
    axes, count, rounds, trips
):
    x = jax.random.normal(jax.random.key(1), (ROWS, FEATURES)), jnp.arange(ROWS) / ROWS
    expected, (by_params, by_x) = with_gradients(one_by_one)(make_params(), x)
    mesh = create_mesh(axes)
    schedule = "gpipe" if rounds is None else "circular"
    layouts = make_layouts(mesh, "circular" if rounds else "gpipe")
    params = ml.create(lambda: make_params(rounds or None), layouts)
    rows = [name for name in ("batch", "fsdp") if name in mesh]
    x = ml.relayout(x, mesh.layout(rows[0] if rows else None, ...))
    options = {"microbatches": count, "schedule": schedule, "rounds": rounds or None}
    step = with_gradients(functools.partial(run, block, **options))
    with jax.set_mesh(mesh.jax_mesh):
        program = step.lower(params, x).compile()
    got = program(params, x)
    by_params = jax.tree.map(lambda p, q: p.reshape(q.shape), by_params, params)
    jax.tree.map(assert_close, got, (expected, (by_params, by_x)))
    sent = read_communication(program, mesh).collectives
    turns = [x for x in sent if x.axes == ("stage",) and x.in_loop]
    assert {(x.kind, x.times) for x in turns} == {("collective_permute", trips)}
    # Layers move only if they lie otherwise; microbatches if they do not divide.
    gathers = [x for x in sent if x.kind == "all_gather" and "stage" in x.axes]
    assert not gathers or rounds == 0 or count % axes["stage"]


def compile_step(mesh, rows, **options):
    """Compiles a step of larger layers, two for each of four stages."""

    def described(*shape, **axes):
        layout = mesh.layout(*[axes.get(f"dim{i}") for i in range(len(shape))])
        return abstract(shape, "float32", layout)

    lead = (LAYERS,) if "rounds" not in options else (2, LAYERS // 2)
    place = {f"dim{len(lead) - 1}": "stage"}
    shapes = {"up": (128, 512), "bias": (512,), "down": (512, 128)}
    layers = {name: described(*lead, *x, **place) for name, x in shapes.items()}
    x = (described(rows, 128, dim0="batch"), described(rows, dim0="batch"))
    function = functools.partial(run, block, mesh=mesh, microbatches=8, **options)
    return with_gradients(function).lower({"blocks": layers}, x).compile()


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"schedule": "circular", "rounds": 2}, marks=pytest.mark.slow)],
)
def test_on_tpu_layers_stay_and_their_gradients_are_summed_once(options):
    pytest.importorskip("libtpu")
    program = compile_step(create_slice_mesh(batch=2, stage=4), 256, **options)
    sent = read_collectives(program.as_text())
    assert {x.kind for x in sent if x.in_loop} == {"collective_permute"}
    assert {x.kind for x in sent} == {"collective_permute", "all_reduce"}


def test_stages_that_are_computed_again_store_their_inputs_alone():
    mesh = create_mesh({"batch": 2, "stage": 4})
    bound, stored = (
        compile_step(mesh, 2048, remat=x).memory_analysis().temp_size_in_bytes
        for x in (True, False)
    )
    # In 11 steps of 2 layers, at least 512 hidden features of 128 rows each.
    assert stored - bound > 11 * 2 * 128 * 512 * 4


def call(**changes):
    """A call of `pipeline` on 8 layers and 24 rows over 4 stages, with other arguments."""
    arguments = {"x": jnp.ones((ROWS, FEATURES)), "microbatches": 4} | changes
    params = arguments.pop("params", jnp.ones((LAYERS, FEATURES, FEATURES)))
    function = arguments.pop("block", lambda params, x: x @ params)
    return run(function, params, mesh=create_mesh({"stage": 4}), **arguments)


REFUSED = [
    ({"block": 3}, "block must be a function of (params, x), got 3."),
    (
        {"params": jnp.ones((6, FEATURES, FEATURES))},
        "6 layers do not divide into 4 stages over 'stage'. Nearest that would: 4 and 8.",
    ),
    (
        {"microbatches": 5},
        "24 rows do not divide into microbatches=5. Nearest that would: 4 and 6.",
    ),
    (
        {"schedule": "gpip"},
        "schedule must be 'gpipe' or 'circular', got 'gpip'. Did you mean 'gpipe'?",
    ),
    ({"rounds": 8}, "rounds=8 is for schedule='circular': leave it out."),
    (
        {"rounds": 2, "schedule": "circular"},
        "rounds=2, but the leading dims of stacked_params are (8, 16), not (rounds, "
        "layers of a round).",
    ),
    (
        {"block": lambda params, x: (x @ params).astype("bfloat16")},
        "the block got float32[6,16] and returned bfloat16[6,16]. A layer returns what "
        "the next one takes: cast or reshape it.",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_cannot_be_divided_is_refused_with_what_could(changes, message):
    assert refusal(ml.MeshLayoutError, call, **changes) == f"pipeline: {message}"


def test_without_such_an_axis_layers_are_scanned():
    params, x = make_params()["blocks"], (jnp.ones((5, FEATURES)), jnp.ones(5))
    expected = one_by_one(params, x)
    for axes in ({"batch": 8}, {"batch": 8, "stage": 1}):
        with jax.set_mesh(create_mesh(axes).jax_mesh):
            got = jax.jit(functools.partial(run, block, microbatches=3))(params, x)
        jax.tree.map(assert_close, got, expected)


def test_layers_that_are_not_stacked_are_not_sharded():
    mesh, layer = create_mesh({"stage": 4}), jax.ShapeDtypeStruct((8, 8), "float32")
    layouts = ml.parallel.stages(mesh, "stage", pattern="blocks/")
    found = layouts.resolve(
        {"blocks": [{"up": layer}], "more": {"blocks": {"up": layer}}}
    )
    assert found["blocks/0/up"].layout == mesh.layout(None, None)
    assert found["more/blocks/up"].layout == mesh.layout("stage", None)


def test_a_transformer_in_stages_learns_what_it_learns_on_one_device():
    sizes = {"vocab_size": 32, "max_length": 8, "features": 16, "num_layers": 4}
    config = transformer.TransformerConfig(**sizes, is_scanned=True, microbatches=4)
    module = transformer.LinenTransformer(config)
    tokens = np.arange(16 * 8, dtype="int32").reshape(16, 8) * 7 % 32
    build = lambda: module.init(jax.random.key(0), jnp.zeros((1, 8), "int32"))

    def losses(axes, *rules):
        mesh = create_mesh(axes)
        layouts = functools.reduce(ml.parallel.compose, [rule(mesh) for rule in rules])
        state = ml.TrainState.create(build, optax.adam(1e-2), layouts, module=module)
        step = ml.make_train_step(token_loss)
        batch = {"tokens": ml.relayout(tokens, mesh.layout("batch", None))}
        for _ in range(3):
            state, metrics = step(state, batch)
            yield float(metrics["loss"])

    # float32, in other orders; Adam makes it more.
    close = functools.partial(pytest.approx, rel=1e-4)
    expected = [*losses({"batch": 1}, ml.parallel.data_parallel)]
    stages, fsdp = ml.parallel.stages, functools.partial(ml.parallel.fsdp, min_bytes=0)
    assert [*losses({"batch": 2, "stage": 2}, stages, fsdp)] == close(expected)


def test_scanned_blocks_compute_what_they_do_one_by_one():
    sizes = transformer.TransformerConfig(vocab_size=32, max_length=8, features=16)
    model = transformer.Transformer(sizes, rngs=nnx.Rngs(0))
    scanned = dataclasses.replace(sizes, is_scanned=True)
    other = transformer.Transformer(scanned, rngs=nnx.Rngs(0))
    layers = [nnx.state(block, nnx.Param) for block in model.blocks]
    nnx.update(other.blocks, jax.tree.map(lambda *x: jnp.stack(x), *layers))
    for name in ("embed", "positions", "norm", "output"):
        nnx.update(getattr(other, name), nnx.state(getattr(model, name), nnx.Param))
    tokens, segments = jnp.arange(16).reshape(2, 8), jnp.arange(16).reshape(2, 8) // 3
    expected = model(tokens, segments)
    assert_close(other(tokens, segments), expected)
    variables = {"params": nnx.to_pure_dict(nnx.state(other, nnx.Param))}
    got = transformer.LinenTransformer(scanned).apply(variables, tokens, segments)
    assert_close(got, expected)
