"""The compiled program is the one that a hand-written `jax.jit` makes."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import meshlayout as ml
from models.convnet import MODEL_PARALLEL as CONVNET_RULES, ConvNet
from models.mlp import MLP, MODEL_PARALLEL as MLP_RULES
from tests.small_states import on


def facts(compiled):
    """What a program costs: collectives, FLOPs and bytes per device."""
    collectives = collections.Counter(
        (kind, shape)
        for shape, kind in re.findall(
            r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|"
            r"collective-permute)(?:-start)?\(",
            re.sub(r"\{[\d,]*\}", "", compiled.as_text()),
        )
    )
    memory = compiled.memory_analysis()
    cost = compiled.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    return {
        "collectives": collectives,
        "flops": cost["flops"],
        "argument": memory.argument_size_in_bytes,
        "output": memory.output_size_in_bytes,
        "alias": memory.alias_size_in_bytes,
        "temp": memory.temp_size_in_bytes,
    }


def mean_loss(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


def by_hand(build, axes, rules, images, labels):
    """The program that an expert writes, in plain JAX, Flax and Optax."""
    mesh = jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes)
    )
    graphdef, params, rest = nnx.split(nnx.eval_shape(build), nnx.Param, ...)
    params, rest = nnx.to_pure_dict(params), nnx.to_pure_dict(rest)

    def sharding(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = next((s for p, s in rules.items() if re.search(p, name)), ())
        if ... in spec:  # in these maps it always comes first
            spec = (None,) * (leaf.ndim - len(spec) + 1) + tuple(spec[1:])
        return NamedSharding(mesh, P(*spec))

    whole = NamedSharding(mesh, P())
    layouts = jax.tree_util.tree_map_with_path(sharding, params)
    tx = optax.adam(1e-3)
    opt_state = jax.eval_shape(tx.init, params)
    adam = opt_state[0]._replace(count=whole, mu=layouts, nu=layouts)
    state_layouts = (layouts, (adam, *opt_state[1:]), whole, whole)
    state = (params, opt_state, jnp.int32(0), jax.random.key(0))

    def step(state, batch):
        params, opt_state, count, key = state

        def loss_fn(params):
            return mean_loss(nnx.merge(graphdef, params, rest)(batch[0]), batch[1])

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state, count + 1, key), loss

    rows = NamedSharding(mesh, P("batch"))
    jitted = jax.jit(
        step,
        in_shardings=(state_layouts, rows),
        out_shardings=(state_layouts, None),
        donate_argnums=0,
    )
    return jitted.lower(state, (images, labels)).compile()


def by_meshlayout(build, axes, rules, images, labels):
    mesh = ml.create_mesh(axes)
    layouts = ml.LayoutMap(mesh, rules)
    # Shapes are enough to compile, and cost nothing to make.
    state = ml.TrainState.describe(build, optax.adam(1e-3), layouts).abstract

    @ml.compile_step
    def step(state, batch):
        def loss_fn(params):
            return mean_loss(state.replace(params=params).model(batch[0]), batch[1])

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), loss

    return step.lower(state, on(mesh, (images, labels))).compile()


@pytest.mark.parametrize(
    ("build", "rules", "axes"),
    [
        (MLP, MLP_RULES, {"batch": 1, "model": 8}),
        (ConvNet, {}, {"batch": 8}),
        (ConvNet, CONVNET_RULES, {"batch": 2, "model": 4}),
    ],
)
def test_the_program_is_the_hand_written_one(build, rules, axes):
    images, labels = np.ones((16, 28, 28, 1), np.float32), np.zeros(16, np.int32)
    setting = (lambda: build(rngs=nnx.Rngs(0)), axes, rules, images, labels)
    ours, hand = facts(by_meshlayout(*setting)), facts(by_hand(*setting))
    assert ours == hand
    assert ours["collectives"]
    assert ours["alias"] > 0


def test_a_train_step_is_the_hand_written_program_but_for_its_metrics():
    """Weights are added up with the gradients, and not in a round of their own."""
    build = lambda: MLP(rngs=nnx.Rngs(0))
    images, labels = np.ones((16, 28, 28, 1), np.float32), np.zeros(16, np.int32)

    def loss_fn(model, batch):
        logits = model(batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])

    mesh = ml.create_mesh({"batch": 8})
    layouts = ml.LayoutMap(mesh, {})
    state = ml.TrainState.describe(build, optax.adam(1e-3), layouts).abstract
    batch = on(mesh, {"image": images, "label": labels})
    ours = facts(ml.make_train_step(loss_fn).lower(state, batch).compile())
    hand = facts(by_hand(build, {"batch": 8}, {}, images, labels))
    assert ours["collectives"] == hand["collectives"]
    # Of the metrics: a few operations on scalars.
    assert abs(ours["flops"] - hand["flops"]) < 0.002 * hand["flops"]
    batch["weight"] = on(mesh, np.ones(16, np.float32))
    weighted = facts(ml.make_train_step(loss_fn).lower(state, batch).compile())
    assert [kind for kind, _ in weighted["collectives"].elements()] == ["all-reduce"]
