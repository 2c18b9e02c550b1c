"""Mixtures of experts: `dispatch`, `expert_parallel` and the example model."""

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
from meshlayout.parallel import compose, dispatch, expert_parallel, fsdp
from models import moe
from tests.small_states import assert_close, mesh_of
from tests.tpu import create_slice_mesh, read_collectives


BATCH, LENGTH, FEATURES, HIDDEN = 8, 6, 5, 7


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def by_groups(params, rows, group_sizes):
    hidden = jnp.tanh(jax.lax.ragged_dot(rows, params["up"], group_sizes))
    return jax.lax.ragged_dot(hidden, params["down"], group_sizes)


def taken(index, capacity):
    """Which tokens their experts take: counted one by one, first choices first."""
    is_taken = np.ones(index.shape, bool)
    for row, experts in enumerate(index):
        counts = {}
        for choice, token in np.ndindex(experts.T.shape):
            expert = experts[token, choice]
            is_taken[row, token, choice] = counts.setdefault(expert, 0) < capacity
            counts[expert] += 1
    return is_taken


def by_all(x, weights, params, index, capacity):
    """Each token by each expert, and then a sum over those that were chosen."""
    hidden = jnp.tanh(jnp.einsum("blf,efh->belh", x, params["up"]))
    results = jnp.einsum("belh,ehf->belf", hidden, params["down"])
    is_taken = taken(np.asarray(index), capacity or math.inf)
    routes = jax.nn.one_hot(index, len(params["up"])) * (weights * is_taken)[..., None]
    return jnp.einsum("blke,belf->blf", routes, results)


def tokens(num_experts, choices, lead=(BATCH, LENGTH), skew=0.0, dtype="float32"):
    """Tokens, weights and parameters, and which experts they go to."""
    keys = jax.random.split(jax.random.key(num_experts + choices), 4)
    x = jax.random.normal(keys[0], (*lead, FEATURES), dtype)
    up = jax.random.normal(keys[1], (num_experts, FEATURES, HIDDEN), dtype)
    down = jax.random.normal(keys[2], (num_experts, HIDDEN, FEATURES), dtype)
    logits = jax.random.normal(keys[3], (*lead, num_experts))
    logits += jnp.broadcast_to(skew * jnp.arange(num_experts), logits.shape)
    weights, index = jax.lax.top_k(jax.nn.softmax(logits), choices)
    return (x, weights, {"up": up, "down": down}), index


def sum_and_gradients(function, arguments):
    total = lambda *given: jnp.square(function(*given)).mean()
    return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(*arguments)


ALL_TO_ONE = 100.0  # every token's first choice is the last expert, and so on
# Mesh axes, the experts' one, experts, choices, capacity and skew.
DISPATCHES = [
    ({}, "expert", 4, 2, None, 0.0),
    ({}, "expert", 4, 2, 2, 0.0),
    ({"expert": 8}, "expert", 16, 2, None, ALL_TO_ONE),
    ({"batch": 2, "expert": 4}, "expert", 8, 2, 2, 1.0),
    slow({"expert": 8}, "expert", 8, 1, None, 0.0),
    slow({"expert": 8}, "expert", 64, 2, 1, 0.0),
    slow({"batch": 8}, "batch", 32, 2, None, 1.0),
    slow({"batch": 4, "expert": 2}, "expert", 2, 1, 3, 1.0),
    slow({"batch": 2, "expert": 4}, "expert", 4, 2, None, ALL_TO_ONE),
    slow({"batch": 2, "fsdp": 2, "expert": 2}, "expert", 4, 1, None, 1.0),
    slow({"expert": 4, "model": 2}, "expert", 8, 2, 2, 1.0),
]


@pytest.mark.parametrize(
    ("axes", "axis", "experts", "choices", "capacity", "skew"), DISPATCHES
)
def test_tokens_meet_their_experts_wherever_these_are(
    axes, axis, experts, choices, capacity, skew
):
    arguments, index = tokens(experts, choices, skew=skew)

    def run(x, weights, params):
        options = {"axis": axis, "capacity": capacity}
        options |= {"mesh": mesh_of(**axes)} if axes else {}
        return dispatch(x, index, weights, by_groups, params, **options)

    naive = functools.partial(by_all, index=index, capacity=capacity)
    expected = sum_and_gradients(naive, arguments)
    assert_close(sum_and_gradients(run, arguments), expected, rtol=1e-5, atol=1e-6)


def test_rows_are_padded_and_tokens_of_no_expert_add_nothing():
    (x, weights, params), index = tokens(8, 2, lead=(11,), dtype="bfloat16")
    index = index.at[3].set(-1).at[4, 0].set(8)
    mesh = mesh_of(batch=2, expert=4)
    y = dispatch(x, index, weights, by_groups, params, axis="expert", mesh=mesh)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    kept = jnp.where((index < 0) | (index > 7), 0, weights)
    batch = (x[None], kept[None], params, index[None])
    expected = by_all(*jax.tree.map(lambda a: a * 1.0, batch[:3]), batch[3], None)[0]
    assert_close(y.astype("float32"), expected, rtol=0.05, atol=0.05)
    assert not y[3].any()


def test_experts_see_true_rows_alone_as_gradients_of_zeros_may_be_nan():
    def normalized(scale, rows, group_sizes):
        rows = rows / jnp.linalg.norm(rows, axis=-1, keepdims=True)
        scales = jnp.repeat(scale, group_sizes, total_repeat_length=len(rows))
        return rows * scales[:, None]

    x, index = tokens(8, 2, lead=(11, 6))[0][0], jnp.arange(132).reshape(11, 6, 2) % 3
    run = functools.partial(dispatch, axis="expert", mesh=mesh_of(batch=2, expert=4))
    total = lambda scale: run(x, index, index + 1.0, normalized, scale).sum()
    norms = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    expected = jnp.einsum(
        "blf,blke->e", norms, jax.nn.one_hot(index, 8) * (index + 1.0)[..., None]
    )
    assert_close(jax.jit(jax.grad(total))(jnp.ones(8)), expected, rtol=1e-5, atol=1e-5)


def test_wrong_calls_are_refused_in_sentences():
    (x, weights, params), index = tokens(6, 2)
    shapes = "x f32[8, 6, 5], expert_index {}, weights {}."
    calls = {
        "6 experts do not divide among the 4 devices of mesh axis 'expert'. Nearest "
        "that would: 4 and 8.": (index, weights, by_groups, params),
        "all params must be stacked over the experts in their first dim, got (3,), "
        "(6, 5, 7).": (index, weights, by_groups, params | {"down": jnp.ones(3)}),
        "expert_index must hold integers; lax.top_k returns them after weights, got "
        + shapes.format("f32[8, 6, 2]", "i32[8, 6, 2]"): (weights, index, by_groups),
        "expert_index and weights must have the shape (batch, length, choices), got "
        + shapes.format("i32[6, 2]", "f32[8, 6, 2]"): (index[0], weights, by_groups),
        "expert_fn must return (96, features) for rows (96, 5), got (2, 5).": (
            *(index, weights, lambda params, rows, sizes: rows[:2]),
        ),
    }
    for fact, arguments in calls.items():
        mesh = mesh_of(batch=2, expert=4) if len(arguments) > 3 else None
        arguments = (*arguments, params)[:4]
        with pytest.raises(ml.MeshLayoutError) as error:
            dispatch(x, *arguments, axis="expert", mesh=mesh)
        assert str(error.value) == f"dispatch: {fact}"
    for shape, capacity in {(2, 2): 2, (8, 6, 2): 0}.items():
        index, x = jnp.zeros(shape, "int32"), jnp.zeros((*shape[:-1], 5))
        with pytest.raises(ml.MeshLayoutError, match="dispatch: capacity "):
            dispatch(x, index, index, by_groups, params, axis="b", capacity=capacity)


CONFIG = moe.MoEConfig(
    vocab_size=16, max_length=8, features=8, num_heads=2, num_layers=2, mlp_features=16
)
INPUTS = jax.ShapeDtypeStruct((8, 8), "int32")
TOKENS = np.random.default_rng(0).integers(0, 16, (8, 8)).astype("int32")
WEIGHTS = np.arange(8, dtype="float32") / 4  # the first row is padding


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("choices=9: a token is sent to 1 to num_experts=8", {"choices": 9}),
        ("dropout_rate are of the Transformer", {"dropout_rate": 0.5}),
        ("capacity_factor=nan: it is positive", {"capacity_factor": math.nan}),
    ],
)
def test_sizes_that_would_be_ignored_are_refused(words, sizes):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CONFIG, **sizes)


def model_of(kind, config):
    """What makes a state, the keywords for it, and what is traced."""
    if kind == "nnx":
        build = lambda: moe.MoE(config, rngs=nnx.Rngs(0))
        return build, {}, build
    module = moe.LinenMoE(config)
    build = lambda: module.init(jax.random.key(0), TOKENS)
    return build, {"module": module}, module


def trained(kind, config, axes):
    """The state and the metrics after two steps."""
    build, keywords, model = model_of(kind, config)
    mesh = mesh_of(**axes)
    layouts = ml.parallel.data_parallel(mesh)
    if "expert" in axes:
        layouts = expert_parallel(mesh, "expert", model, INPUTS)
        layouts = compose(layouts, fsdp(mesh, min_bytes=0))
    state = ml.TrainState.create(build, optax.sgd(0.1), layouts, **keywords)
    step = ml.make_train_step(moe.token_loss, metrics=moe.metrics(config))
    batch = {"tokens": TOKENS, "weight": WEIGHTS}
    batch = ml.relayout(batch, mesh.layout(tuple(axes), ...))
    for _ in range(2):
        state, metrics = step(state, batch)
    return state, metrics


@pytest.mark.parametrize(
    ("kind", "capacity_factor"), [("nnx", 1.0), slow("nnx", None), slow("linen", None)]
)
def test_the_model_trains_as_on_one_device(kind, capacity_factor):
    sizes = {"capacity_factor": capacity_factor, "num_layers": 1}
    config = dataclasses.replace(CONFIG, **sizes)
    state, metrics = trained(kind, config, {"batch": 2, "expert": 4})
    stacks = [leaf for leaf in jax.tree.leaves(state.params) if leaf.ndim == 3]
    layouts = {str(ml.Layout.of(leaf)) for leaf in stacks}
    assert layouts == {"[expert, unsharded, batch]", "[expert, batch, unsharded]"}
    expected, expected_metrics = trained(kind, config, {"batch": 1})
    assert_close(metrics.to_host(), expected_metrics.to_host(), rtol=1e-5, atol=1e-6)
    assert_close(state.params, expected.params, rtol=1e-4, atol=1e-6)


def test_metrics_count_the_load_of_each_expert_and_what_was_dropped():
    config = dataclasses.replace(CONFIG, capacity_factor=1.0)
    model, batch = moe.MoE(config, rngs=nnx.Rngs(0)), {"tokens": TOKENS}
    _, outputs = nnx.jit(moe.token_loss)(model, batch)
    metrics = ml.metrics.Metrics(moe.metrics(config))
    got = metrics.update_from(outputs=outputs, batch=batch, weights=WEIGHTS).to_host()
    load = np.asarray(outputs["load"])  # (batch, layers, experts), of 16 each
    assert (load.sum(-1) == 2 * 8).all()
    assert_close(got["load"], np.average(load, axis=0, weights=WEIGHTS) / 16)
    above = np.maximum(load - 2, 0).sum(-1) / 16  # 8 tokens x 2 choices / 8 experts
    mean = np.average(above, axis=0, weights=WEIGHTS).mean()
    assert 0 < mean == pytest.approx(float(got["dropped"]))


ROWS, WIDTH, NUM_EXPERTS = 16, 128, 16


@pytest.mark.parametrize(
    ("axes", "capacity_factor"),
    [({"expert": 8}, 1.0), slow({"batch": 2, "expert": 4}, None)],
)
def test_tokens_are_exchanged_on_a_tpu_and_nothing_is_gathered(axes, capacity_factor):
    pytest.importorskip("libtpu")
    config = moe.MoEConfig(
        vocab_size=256,
        features=WIDTH,
        mlp_features=2 * WIDTH,
        num_layers=1,
        num_experts=NUM_EXPERTS,
        capacity_factor=capacity_factor,
    )
    build, _, _ = model_of("nnx", config)
    mesh = create_slice_mesh(**axes)
    inputs = jax.ShapeDtypeStruct((ROWS, WIDTH), "int32")
    layouts = expert_parallel(mesh, "expert", build, inputs)
    state = ml.TrainState.describe(build, optax.sgd(0.1), layouts).abstract
    rows = mesh.layout(tuple(axes), None).sharding
    batch = {"tokens": jax.ShapeDtypeStruct(inputs.shape, "int32", sharding=rows)}
    step = ml.make_train_step(moe.token_loss)
    sent = read_collectives(step.lower(state, batch).compile().as_text())
    assert not any(one.kind in ("all_gather", "collective_permute") for one in sent)
    exchanges = [one for one in sent if one.kind == "all_to_all"]
    # Each device's tokens, to two experts each: there, back, and both backward.
    least = 4 * ROWS * config.max_length * 2 * WIDTH // 8
    slack = 1 if capacity_factor else 1.25
    large = [one.nbytes for one in exchanges if one.nbytes > 64]
    assert large == [slack * least] * (4 if capacity_factor else 10)
