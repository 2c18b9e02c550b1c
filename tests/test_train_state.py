"""`TrainState`: a plain pytree that knows its model, its optimizer and its layouts."""

import dataclasses
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from tests.same_bits import assert_same_bits


MESH = ml.create_mesh({"batch": 2, "model": 4})
RULES = {"hidden/kernel": (None, "model"), "hidden/bias": ("model",)}
X = np.linspace(-1, 1, 16 * 8, dtype=np.float32).reshape(16, 8)
Y = np.arange(16) % 4


class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.hidden = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.output = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.output(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, name="hidden")(x)
        x = nn.BatchNorm(use_running_average=False, name="norm")(x)
        return nn.Dense(4, name="output")(nn.relu(x))


def nnx_state(optimizer=None, rules=RULES, **options):
    return ml.TrainState.create(
        lambda: Net(rngs=nnx.Rngs(0)),
        optimizer or optax.adam(1e-2),
        ml.LayoutMap(MESH, rules),
        **options,
    )


def linen_state(optimizer=None, rules=RULES, **options):
    net = LinenNet()
    return ml.TrainState.create(
        lambda: net.init(jax.random.key(0), X),
        optimizer or optax.adam(1e-2),
        ml.LayoutMap(MESH, rules),
        module=net,
        **options,
    )


STATES = {"nnx": nnx_state, "linen": linen_state}


@pytest.fixture(params=list(STATES))
def make(request):
    return STATES[request.param]


def loss(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, Y).mean()


def train_step(state):
    def loss_of(params):
        model = state.replace(params=params).model
        return loss(model(X)), state.model_state_of(model)

    (value, model_state), grads = jax.value_and_grad(loss_of, has_aux=True)(
        state.params
    )
    return state.apply_gradients(grads).replace(model_state=model_state), value


def test_the_fields_are_plain_trees_with_readable_names(make):
    state = make()
    names = [field.name for field in dataclasses.fields(state)]
    assert names == [
        "params",
        "opt_state",
        "model_state",
        "step",
        "rng",
        "extra",
        "program",
    ]
    assert sorted(state.params) == ["hidden", "norm", "output"]
    assert sorted(state.params["hidden"]) == ["bias", "kernel"]
    assert sorted(state.opt_state[0].mu["hidden"]) == ["bias", "kernel"]
    assert (state.step, state.step.dtype) == (0, np.int32)
    assert jnp.issubdtype(state.rng.dtype, jax.dtypes.prng_key)


def test_every_array_has_the_maps_layout(make):
    state = make()
    layouts = state.layouts
    assert isinstance(layouts, ml.TrainState)
    for tree in (layouts.params, layouts.opt_state[0].mu, layouts.opt_state[0].nu):
        assert tree["hidden"]["kernel"] == MESH.layout(None, "model")
        assert tree["hidden"]["bias"] == MESH.layout("model")
        assert tree["output"]["kernel"] == MESH.layout(None, None)
    rest = (layouts.model_state, layouts.step, layouts.rng, layouts.opt_state[0].count)
    for layout in jax.tree.leaves(rest):
        assert layout.is_fully_replicated
        assert layout.mesh == MESH


def test_a_rule_for_a_slot_overrides(make):
    rules = {**RULES, "opt_state/0/nu/hidden/kernel": ("batch", "model")}
    layouts = make(rules=rules).layouts
    assert layouts.opt_state[0].nu["hidden"]["kernel"] == MESH.layout("batch", "model")
    assert layouts.opt_state[0].mu["hidden"]["kernel"] == MESH.layout(None, "model")


def test_values_are_those_without_a_mesh():
    state = nnx_state()
    net = Net(rngs=nnx.Rngs(0))
    assert_same_bits(state.params, nnx.to_pure_dict(nnx.state(net, nnx.Param)))
    assert_same_bits(
        state.model_state, nnx.to_pure_dict(nnx.state(net, nnx.Not(nnx.Param)))
    )
    state = linen_state()
    variables = LinenNet().init(jax.random.key(0), X)
    assert_same_bits(state.params, variables["params"])
    assert_same_bits(state.model_state, {"batch_stats": variables["batch_stats"]})
    assert_same_bits(state.opt_state, optax.adam(1e-2).init(variables["params"]))


def reference_nnx(steps):
    net = Net(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    losses = []

    @nnx.jit
    def step(net, optimizer):
        value, grads = nnx.value_and_grad(lambda model: loss(model(X)))(net)
        optimizer.update(net, grads)
        return value

    for _ in range(steps):
        losses.append(step(net, optimizer))
    return losses, nnx.to_pure_dict(nnx.state(net, nnx.BatchStat))["norm"]["mean"]


def test_training_is_that_of_a_plain_loop():
    # Adam would make updates of what is rounding: a bias before a normalization.
    state, losses = nnx_state(optax.sgd(0.1, momentum=0.9)), []
    layouts = state.layouts
    step = ml.compile_step(train_step)
    for _ in range(4):
        state, value = step(state)
        losses.append(value)
    expected, expected_mean = reference_nnx(4)
    # Sums of a few hundred float32 in another order, through four updates.
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    mean = state.model_state["norm"]["mean"]
    np.testing.assert_allclose(mean, expected_mean, atol=1e-5)
    assert state.step == 4
    assert jax.tree.leaves(state.layouts) == jax.tree.leaves(layouts)


def test_a_state_is_one_pytree_and_round_trips(make):
    state = make()
    leaves, treedef = jax.tree.flatten(state)
    again = treedef.unflatten(leaves)
    assert type(again) is ml.TrainState
    assert jax.tree.structure(again) == treedef
    assert all(
        one is other for one, other in zip(jax.tree.leaves(again), leaves, strict=True)
    )
    doubled = jax.tree.map(lambda x: x, state)
    assert_same_bits(doubled, state)
    # Equal states, made apart, are one structure: no call of a step recompiles.
    assert jax.tree.structure(state.replace(step=3)) == treedef
    paths = [
        jax.tree_util.keystr(keys, simple=True, separator="/")
        for keys, _ in jax.tree_util.tree_leaves_with_path(state)
    ]
    assert "params/hidden/kernel" in paths
    assert "opt_state/0/mu/hidden/kernel" in paths


def test_a_described_state_has_every_layout_and_no_memory():
    layouts = ml.LayoutMap(MESH, RULES)
    plan = ml.TrainState.describe(
        lambda: Net(rngs=nnx.Rngs(0)), optax.adam(1e-2), layouts
    )
    made = nnx_state()
    assert jax.tree.map(ml.Layout.of, plan.abstract).params == made.layouts.params
    for one, other in zip(
        jax.tree.leaves(plan.abstract), jax.tree.leaves(made), strict=True
    ):
        assert isinstance(one, jax.ShapeDtypeStruct)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


def test_its_text_shows_paths_arrays_and_layouts(make):
    text = repr(make())
    assert text.startswith("TrainState(step=0, 244 parameters)\n")
    (line,) = (one for one in text.splitlines() if " params/hidden/kernel" in f" {one}")
    assert line.split(maxsplit=1)[1] == "f32[8, 16]  [unsharded, model]"
    text = repr(make().layouts)
    assert text.startswith("TrainState(step=?, ? parameters)\n")
    assert re.search(r"\nparams/hidden/kernel .*  \[unsharded, model\]\n", text)
    jax.eval_shape(lambda state: repr(state) and state, make())
    assert repr(used_up(make())).startswith(
        "TrainState(used up by a step, 244 parameters)"
    )


def test_multi_steps_is_an_optimizer_too(make):
    state = make(optax.MultiSteps(optax.sgd(1.0), 2))
    grads = jax.tree.map(jnp.ones_like, state.params)
    one = state.apply_gradients(grads)
    assert_same_bits(one.params, state.params)
    two = one.apply_gradients(grads)
    expected = jax.tree.map(lambda x: x - 1, state.params)
    assert_same_bits(two.params, expected)
    acc = state.layouts.opt_state.acc_grads
    assert acc["hidden"]["kernel"] == MESH.layout(None, "model")


def test_rng_is_a_seed_or_a_key():
    key = jax.random.key(7)
    assert_same_bits(nnx_state(rng=7).rng, key)
    assert_same_bits(nnx_state(rng=key).rng, key)
    # The caller's key stays the caller's: donating the state must not delete it.
    state = nnx_state(rng=key)
    jax.jit(lambda tree: tree, donate_argnums=0)(state)
    assert key.shape == ()
    jax.random.split(key)


def test_nnx_gradients_are_taken_as_nnx_returns_them():
    state = nnx_state(optax.sgd(0.1))
    model = state.model
    grads = nnx.jit(nnx.grad(lambda model: loss(model(X))))(model)
    one = state.apply_gradients(grads, model=model)
    two = state.apply_gradients(nnx.to_pure_dict(grads))
    assert_same_bits(one.params, two.params)
    assert one.step == 1
    means = one.model_state["norm"]["mean"], state.model_state["norm"]["mean"]
    assert not np.array_equal(*means)
    assert_same_bits(two.model_state, state.model_state)


# What is refused, and how.


def with_missing_gradient(state):
    grads = dict(state.params)
    del grads["output"]
    return state.apply_gradients({**grads, "extra": {"w": 1}})


LINEN = LinenNet()
ADAM = optax.adam(1e-3)


def create(build, optimizer=ADAM, **options):
    return ml.TrainState.create(build, optimizer, ml.LayoutMap(MESH), **options)


def used_up(state):
    jax.jit(lambda s: jax.tree.map(lambda x: x, s), donate_argnums=0)(state)
    return state


NO_MODEL = (
    "TrainState.create: the builder must return an NNX module; or, with module= the "
    "Linen module, what module.init(key, sample) returns. Got {} and module={}. For "
    "any other pytree use create(build, layouts)."
)
NO_PARAMETERS = (
    "TrainState.create: the model has no parameters to train: no nnx.Param, or nothing "
    "in Linen's collection 'params'. Use create(build, layouts)."
)


def net():
    return Net(rngs=nnx.Rngs(0))


REFUSED = [
    (
        lambda: create(lambda: {"w": jnp.ones(3)}),
        NO_MODEL.format("a dict", "None"),
    ),
    (lambda: create(net, module=LINEN), NO_MODEL.format("a Net", "a LinenNet")),
    (lambda: create(lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0))), NO_PARAMETERS),
    (
        lambda: create(
            lambda: LINEN.init(jax.random.key(0), X)["params"], module=LINEN
        ),
        NO_PARAMETERS,
    ),
    (
        lambda: create(Net(rngs=nnx.Rngs(0))),
        "TrainState.create: build is called as build(), but takes (x). Give a function "
        "that builds the state, such as lambda: Model(...).",
    ),
    (
        lambda: used_up(nnx_state()).model,
        "a step has used up this state: it reused its memory. Continue with the state "
        "that the step returned, or pass the step a copy: jax.tree.map(jnp.copy, state).",
    ),
    (
        lambda: create(net, 0.1),
        "TrainState.create takes an Optax optimizer, got 0.1. Write "
        "TrainState.create(build, optax.adam(1e-3), layouts).",
    ),
    (
        lambda: ml.TrainState.create(net, ADAM, {}),
        "TrainState.create takes a LayoutMap, got {}. To replicate everything, give "
        "LayoutMap(mesh).",
    ),
    (
        lambda: with_missing_gradient(nnx_state()),
        "the gradients and state.params differ in structure or shapes: extra/w, "
        "output/bias, output/kernel. Pass what was derived from state.params, unchanged.",
    ),
    (
        lambda: nnx_state().apply_gradients(
            nnx_state().params, model=nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        ),
        "the model's state and state.model_state differ in structure or shapes: "
        "dropout/rngs/count, dropout/rngs/key, norm/mean. Pass what was derived from "
        "state.model_state, unchanged.",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ml.errors.StateError) as error:
        call()
    assert str(error.value) == message
