"""`TrainState`: a plain pytree that knows its model, its optimizer and its layouts."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from tests.bad_values import assert_refused, refusal
from tests.error_messages import message_of
from tests.same_bits import assert_same_bits
from tests.small_states import linear


MESH = ml.create_mesh({"batch": 2, "model": 4})
RULES = {"hidden/kernel": (None, "model"), "hidden/bias": ("model",)}
X = np.linspace(-1, 1, 16 * 8, dtype=np.float32).reshape(16, 8)
Y = np.arange(16) % 4
ADAM = optax.adam(1e-2)


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
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


LINEN = LinenNet()


def linen():
    return LINEN.init(jax.random.key(0), X)


def nnx_state(optimizer=ADAM, rules=RULES, **options):
    return ml.TrainState.create(Net, optimizer, ml.LayoutMap(MESH, rules), **options)


def linen_state(optimizer=ADAM, rules=RULES):
    layouts = ml.LayoutMap(MESH, rules)
    return ml.TrainState.create(linen, optimizer, layouts, module=LINEN)


@pytest.fixture(params=[nnx_state, linen_state], ids=["nnx", "linen"])
def make(request):
    return request.param


def loss(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, Y).mean()


def train_step(state):
    def loss_of(params):
        model = state.replace(params=params).model
        return loss(model(X)), state.model_state_of(model)

    value_and_grad = jax.value_and_grad(loss_of, has_aux=True)
    (value, model_state), grads = value_and_grad(state.params)
    return state.apply_gradients(grads).replace(model_state=model_state), value


def containers(tree):
    """The types of all nodes of a tree that are not leaves."""
    types = set()
    jax.tree.map(lambda _: None, tree, is_leaf=lambda node: types.add(type(node)))
    return types - {type(leaf) for leaf in jax.tree.leaves(tree)}


def test_a_state_is_one_pytree_of_plain_trees_with_readable_names(make):
    state = make()
    leaves, treedef = jax.tree.flatten(state)
    again = treedef.unflatten(leaves)
    assert type(again) is ml.TrainState
    assert list(map(id, jax.tree.leaves(again))) == list(map(id, leaves))
    # Equal states, made apart, are one structure: no call of a step recompiles.
    assert jax.tree.structure(make().replace(step=3)) == treedef
    keys = [keys for keys, _ in jax.tree.leaves_with_path(state)]
    paths = {jax.tree_util.keystr(x, simple=True, separator="/") for x in keys}
    assert {"params/hidden/kernel", "opt_state/0/mu/hidden/kernel", "rng"} <= paths
    assert (state.step, state.step.dtype) == (0, np.int32)
    for later in (state, ml.compile_step(train_step)(make())[0]):
        # An nnx.State would be flattened in Python, at each call.
        assert containers((later.params, later.model_state)) == {tuple, dict}
        assert containers(later.opt_state[0].mu) == {dict}
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(later))
        assert jax.tree.structure(later) == treedef


def test_every_array_has_the_maps_layout(make):
    layouts = make().layouts
    assert isinstance(layouts, ml.TrainState)
    for tree in (layouts.params, layouts.opt_state[0].mu, layouts.opt_state[0].nu):
        assert tree["hidden"]["kernel"] == MESH.layout(None, "model")
        assert tree["hidden"]["bias"] == MESH.layout("model")
        assert tree["output"]["kernel"] == MESH.layout(None, None)
    rest = (layouts.model_state, layouts.step, layouts.rng, layouts.opt_state[0].count)
    for layout in jax.tree.leaves(rest):
        assert layout.is_fully_replicated
        assert layout.mesh == MESH
    rules = {**RULES, "opt_state/0/nu/hidden/kernel": ("batch", "model")}
    slots = make(rules=rules).layouts.opt_state[0]
    assert slots.nu["hidden"]["kernel"] == MESH.layout("batch", "model")
    assert slots.mu["hidden"]["kernel"] == MESH.layout(None, "model")
    params = make().params
    with pytest.warns(ml.errors.LayoutWarning, match="without layouts every device"):
        ml.create(lambda: params)
    ml.create(lambda: params, ml.LayoutMap(MESH))  # on purpose


away = lambda x: ml.relayout(x, ml.create_mesh({"batch": 8}).layout(...))


@pytest.mark.parametrize("place", [np.array, lambda x: jnp.array(np.array(x)), away])
def test_values_from_elsewhere_take_the_place_of_the_old_ones(make, place):
    state = make()
    params, slots = jax.tree.map(place, (state.params, state.opt_state))
    new = state.replace(params=params, opt_state=slots, extra={"ema": params})
    assert new.replace(step=place(new.step)).layouts.step == state.layouts.step
    assert jax.tree.leaves(new.layouts.params) == jax.tree.leaves(state.layouts.params)
    old_layouts = jax.tree.leaves(state.layouts.opt_state)
    assert jax.tree.leaves(new.layouts.opt_state) == old_layouts
    assert new.layouts.extra["ema"] == new.layouts.params
    assert_same_bits(new.params, state.params)
    boxed = jax.tree.map(lambda x: nn.Partitioned(x, (None,)), params)
    assert_same_bits(state.replace(params=boxed).params, state.params)
    assert_same_bits(state.replace(extra={"ema": boxed}).extra["ema"], state.params)
    with pytest.raises(
        ml.errors.StateError, match=r"the new params and .*: hidden/bias, "
    ):
        state.replace(params=jax.tree.map(lambda x: x[:1], params))


def test_a_state_takes_a_trained_model_and_its_optimizer():
    state, net = nnx_state(), Net()
    net.hidden.kernel[...] += 1
    slots = nnx.Optimizer(net, ADAM, wrt=nnx.Param).opt_state
    new = state.replace(model=net, opt_state=slots)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert new.layouts.params == state.layouts.params
    assert_same_bits(new.params, nnx.to_pure_dict(nnx.state(net, nnx.Param)))
    with pytest.raises(
        ml.errors.StateError, match="takes an NNX module as model, got 3"
    ):
        state.replace(model=3)


def test_values_are_those_without_a_mesh():
    state, net = nnx_state(), Net()
    assert_same_bits(state.params, nnx.to_pure_dict(nnx.state(net, nnx.Param)))
    rest = nnx.to_pure_dict(nnx.state(net, nnx.Not(nnx.Param)))
    assert_same_bits(state.model_state, rest)
    state, variables = linen_state(), linen()
    assert_same_bits(state.params, variables["params"])
    assert_same_bits(state.model_state, {"batch_stats": variables["batch_stats"]})
    assert_same_bits(state.opt_state, ADAM.init(variables["params"]))


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


def test_rng_is_a_seed_or_a_key():
    key = jax.random.key(7)
    assert_same_bits(nnx_state(rng=7).rng, key)
    assert_same_bits(nnx_state(rng=key).rng, key)
    # The caller's key stays the caller's: donating the state must not delete it.
    used_up(nnx_state(rng=key))
    jax.random.split(key)


def test_nnx_gradients_are_taken_as_nnx_returns_them(caplog):
    state = nnx_state(optax.sgd(0.1))
    model = state.model
    grads = nnx.jit(nnx.grad(lambda model: loss(model(X))))(model)
    one = state.apply_gradients(grads, model=model)
    assert not caplog.messages
    ml.state.train_state._warn_once.cache_clear()  # another test may have been told
    for _ in range(2):
        two = state.apply_gradients(nnx.to_pure_dict(grads))
    (said,) = caplog.messages
    assert said.startswith("apply_gradients without model= leaves batch statistics")
    assert_same_bits(one.params, two.params)
    assert one.step == 1
    means = one.model_state["norm"]["mean"], state.model_state["norm"]["mean"]
    assert not np.array_equal(*means)
    assert_same_bits(two.model_state, state.model_state)


def with_missing_gradient(state):
    grads = dict(state.params)
    del grads["output"]
    return state.apply_gradients({**grads, "extra": {"w": 1}})


def used_up(state):
    jax.jit(lambda s: jax.tree.map(lambda x: x, s), donate_argnums=0)(state)
    return state


LAYOUTS = ml.LayoutMap(MESH)


def create(build=Net, optimizer=ADAM, layouts=LAYOUTS, **options):
    return ml.TrainState.create(build, optimizer, layouts, **options)


NO_MODEL = (
    "TrainState.create: the builder must return an NNX module; or, with module= the "
    "Linen module, what module.init(key, sample) returns. Got {} and module={}. For "
    "any other pytree use create(build, layouts)."
)
NO_PARAMETERS = (
    "TrainState.create: the model has no parameters to train: no nnx.Param, or nothing "
    "in the collection 'params' of what Linen's module.init returns."
)
REFUSED = {
    lambda: create(lambda: {"w": jnp.ones(3)}): NO_MODEL.format("a dict", "None"),
    lambda: create(module=LINEN): NO_MODEL.format("a Net", "a LinenNet"),
    lambda: create(lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0))): NO_PARAMETERS,
    lambda: create(lambda: linen()["params"], module=LINEN): NO_PARAMETERS,
    lambda: create(Net()): "TrainState.create: a Net is already built. Give a function "
    "that builds the state, such as lambda: Model(...).",
    lambda: used_up(nnx_state()).model: "a step has used up this state. Continue with "
    "what the step returned, or trainer.state, or give it a copy: "
    "jax.tree.map(jnp.copy, state).",
    lambda: create(optimizer=0.1): "TrainState.create takes an Optax optimizer, got "
    "0.1. Write TrainState.create(build, optax.adam(1e-3), layouts).",
    lambda: create(layouts={}): "TrainState.create takes a LayoutMap, got {}. "
    "Write LayoutMap(mesh, rules); LayoutMap(mesh) replicates.",
    lambda: with_missing_gradient(nnx_state()): "the gradients and state.params differ "
    "in structure or shapes: extra/w, output/bias, output/kernel. Pass what was derived "
    "from state.params, unchanged.",
    lambda: nnx_state().apply_gradients(nnx_state().params, model=linear()): "the "
    "model's state and state.model_state differ in structure or shapes: "
    "dropout/rngs/count, dropout/rngs/key, norm/mean. Pass what was derived from "
    "state.model_state, unchanged.",
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_does_not_fit_is_refused(call):
    assert message_of(call, error=ml.errors.StateError) == REFUSED[call]


# A call with one argument, and the values of the table that work there.
ARGUMENTS = {
    "create: build": (lambda x: ml.create(x, LAYOUTS), []),
    "create: layouts": (lambda x: ml.create(Net, x), [None]),
    "describe: build": (lambda x: ml.describe(x, LAYOUTS), []),
    "describe: layouts": (lambda x: ml.describe(Net, x), [None]),
    "TrainState: build": (create, []),
    "TrainState: optimizer": (lambda x: create(Net, x), []),
    "TrainState: layouts": (lambda x: create(Net, ADAM, x), [None]),
    "TrainState: module": (lambda x: create(module=x), [None]),
    "TrainState: rng": (lambda x: create(rng=x), [-1, 0]),
    "optimizer_by_path: optimizers": (ml.optimizer_by_path, []),
    "optimizer_by_path: optimizer": (lambda x: ml.optimizer_by_path({"k": x}), [None]),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_work_or_are_refused_with_a_sentence(name):
    assert_refused(*ARGUMENTS[name])


@pytest.mark.parametrize("value", [None, float("nan"), 0, object(), "a(", ("x",)])
def test_a_path_of_optimizer_by_path_must_be_a_regular_expression(value):
    assert refusal(ml.MeshLayoutError, ml.optimizer_by_path, {value: ADAM}) is not None


def test_a_pattern_of_optimizer_by_path_that_matches_nothing_is_warned_of():
    tx = ml.optimizer_by_path({"kernal": None, "": ADAM})
    with pytest.warns(
        UserWarning, match=r"'kernal' matches no path. Nearest: a/kernel\."
    ):
        tx.init({"a": {"kernel": jnp.ones(2), "bias": jnp.ones(2)}})
    tx = ml.optimizer_by_path({"hed": ADAM, "": None})
    assert message_of(tx.init, {"head": {"kernel": jnp.ones(2)}}) == (
        "optimizer_by_path: 'hed' matches no path. Nearest: head/kernel. All parameters "
        "would be frozen."
    )
