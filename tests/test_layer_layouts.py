"""Layouts given layer by layer, for NNX and Linen alike."""

import copy
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import meshlayout as ml
from tests.same_bits import assert_same_bits


MESH = ml.create_mesh({"batch": 2, "model": 4})
X = jnp.ones((2, 8))


def nnx_layer(layer=nnx.Linear, **layouts):
    return ml.with_layouts(layer, **layouts)(8, 16, rngs=nnx.Rngs(0))


class LinenNet(nn.Module):
    """The tutorial's way: every layer says how its parameters lie."""

    wrap: bool = True

    @nn.compact
    def __call__(self, x):
        dense = nn.Dense
        if self.wrap:
            dense = ml.with_layouts(nn.Dense, kernel=(None, "model"), bias=("model",))
        x = nn.relu(dense(16)(x))
        x = nn.relu(dense(8, name="named", use_bias=True)(x))
        return nn.Dense(4)(x)


class NnxNet(nnx.Module):
    def __init__(self, *, rngs):
        linear = ml.with_layouts(nnx.Linear, kernel=(None, "model"), bias=("model",))
        self.first = linear(8, 16, rngs=rngs)
        self.second = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


SPECS = [
    (None, "model"),
    [None, "model"],
    [ml.UNSHARDED, ("model",)],
    PartitionSpec(None, "model"),
    MESH.layout(None, "model"),
    MESH.layout(None, "model").sharding,
    (..., "model"),
]


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_a_spec_is_given_as_anywhere_else(spec):
    wanted = MESH.layout(None, "model")
    layouts = ml.LayoutMap(MESH)
    made = ml.create(lambda: nnx_layer(kernel=spec), layouts)
    assert ml.Layout.of(made.kernel[...]) == wanted
    dense = ml.with_layouts(nn.Dense, kernel=spec)(16)
    variables = ml.create(lambda: dense.init(jax.random.key(0), X), layouts)
    assert ml.Layout.of(variables["params"]["kernel"]) == wanted


def test_its_own_layout_wins_over_a_pattern_and_is_named_as_the_reason():
    layouts = ml.LayoutMap(MESH, {"first/kernel": ("batch", None), "bias": ("batch",)})
    resolved = layouts.resolve(nnx.eval_shape(lambda: NnxNet(rngs=nnx.Rngs(0))))
    kernel, other = resolved["first/kernel"], resolved["second/bias"]
    assert str(kernel.layout) == "[unsharded, model]"
    assert kernel.rule is None
    assert kernel.reason == "set on its layer"
    assert kernel.note == "its own layout wins over rule 'first/kernel'"
    assert (str(other.layout), other.rule) == ("[batch]", "bias")
    text = str(layouts.explain(nnx.eval_shape(lambda: NnxNet(rngs=nnx.Rngs(0)))))
    assert "set on its layer" in text


def test_linen_layers_keep_their_names_and_values():
    layouts = ml.LayoutMap(MESH)
    variables = ml.create(lambda: LinenNet().init(jax.random.key(0), X), layouts)
    assert_same_bits(variables, LinenNet(wrap=False).init(jax.random.key(0), X))
    found = jax.tree.map(lambda x: str(ml.Layout.of(x)), variables["params"])
    assert found == {
        "Dense_0": {"bias": "[model]", "kernel": "[unsharded, model]"},
        "named": {"bias": "[model]", "kernel": "[unsharded, model]"},
        "Dense_1": {"bias": "[unsharded]", "kernel": "[unsharded, unsharded]"},
    }
    plain = LinenNet(wrap=False).apply(variables, X)
    assert jnp.array_equal(LinenNet().apply(variables, X), plain)


def test_a_wrapped_layer_works_without_a_layout_map():
    layer = nnx_layer(kernel=(None, "model"))
    assert jnp.array_equal(layer(X), nnx.Linear(8, 16, rngs=nnx.Rngs(0))(X))
    dense = ml.with_layouts(nn.Dense, kernel=(None, "model"))(16)
    variables = dense.init(jax.random.key(0), X)
    out = dense.apply(variables, X)
    expected = nn.Dense(16)
    assert jnp.array_equal(out, expected.apply(expected.init(jax.random.key(0), X), X))


def test_the_optimizer_follows_a_parameters_own_layout():
    state = ml.TrainState.create(
        lambda: NnxNet(rngs=nnx.Rngs(0)), optax.adam(1e-3), ml.LayoutMap(MESH)
    )
    mu = state.layouts.opt_state[0].mu
    assert str(mu["first"]["kernel"]) == "[unsharded, model]"
    assert str(mu["second"]["kernel"]) == "[unsharded, unsharded]"
    net = LinenNet()
    state = ml.TrainState.create(
        lambda: net.init(jax.random.key(0), X),
        optax.adam(1e-3),
        ml.LayoutMap(MESH),
        module=net,
    )
    mu = state.layouts.opt_state[0].mu
    assert str(mu["named"]["kernel"]) == "[unsharded, model]"
    assert state.model(X).shape == (2, 4)


def test_the_wrapper_is_one_class_and_survives_copies():
    one = ml.with_layouts(nn.Dense, kernel=(None, "model"))
    assert one is ml.with_layouts(nn.Dense, kernel=[None, "model"])
    assert pickle.loads(pickle.dumps(one)) is one
    assert copy.deepcopy(one(16)) == one(16)
    assert isinstance(one(16), nn.Dense)
    layer = nnx_layer(kernel=(None, "model"))
    again = nnx.clone(layer)
    resolved = ml.LayoutMap(MESH).resolve(again)
    assert str(resolved["kernel"].layout) == "[unsharded, model]"


def test_a_wrapped_class_can_be_stacked():
    @nnx.split_rngs(splits=4)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def stacked(rngs):
        linear = ml.with_layouts(nnx.Linear, kernel=(..., "model"))
        return linear(8, 16, rngs=rngs)

    made = ml.create(lambda: stacked(nnx.Rngs(0)), ml.LayoutMap(MESH))
    assert made.kernel.shape == (4, 8, 16)
    assert str(ml.Layout.of(made.kernel[...])) == "[unsharded, unsharded, model]"


def make_nnx(**layouts):
    return lambda: ml.create(lambda: nnx_layer(**layouts), ml.LayoutMap(MESH))


def make_linen(layer=nn.Dense, **layouts):
    dense = ml.with_layouts(layer, **layouts)(16)
    return lambda: ml.create(
        lambda: dense.init(jax.random.key(0), X), ml.LayoutMap(MESH)
    )


REFUSED = [
    (
        lambda: ml.with_layouts(nnx.relu, kernel=(None, "model")),
        ml.errors.StateError,
        f"with_layouts takes an NNX or Linen layer class, got {nnx.relu!r}. Write "
        "with_layouts(nnx.Linear, kernel=(None, 'model'))(in_features, ...).",
    ),
    (
        lambda: ml.with_layouts(3, kernel=(None, "model")),
        ml.errors.StateError,
        "with_layouts takes an NNX or Linen layer class, got 3. Write "
        "with_layouts(nnx.Linear, kernel=(None, 'model'))(in_features, ...).",
    ),
    (
        lambda: ml.with_layouts(nnx.Linear),
        ml.errors.StateError,
        "with_layouts(Linear) has no layouts; give a parameter's.",
    ),
    (
        lambda: nnx_layer(kernl=(None, "model")),
        ml.errors.StateError,
        "Linear has no parameter 'kernl'; it has 'kernel', 'bias'. Did you mean "
        "'kernel'?",
    ),
    (
        make_linen(kernl=(None, "model")),
        ml.errors.StateError,
        "Dense has no parameter 'kernl'; it has 'kernel', 'bias'. Did you mean "
        "'kernel'?",
    ),
    (
        make_nnx(kernel=(None, "modle")),
        ml.errors.LayoutMapError,
        "kernel f32[8, 16]: the layout set on its layer does not fit: mesh axis "
        "'modle' of [unsharded, modle] is not in Mesh(batch=2, model=4). Did you mean "
        "'model'?",
    ),
    (
        make_linen(kernel=(None, "modle")),
        ml.errors.LayoutMapError,
        "kernel f32[8, 16]: the layout set on its layer does not fit: mesh axis "
        "'modle' of [unsharded, modle] is not in Mesh(batch=2, model=4). Did you mean "
        "'model'?",
    ),
    (
        make_nnx(kernel=("model",)),
        ml.errors.LayoutMapError,
        "kernel f32[8, 16]: the layout set on its layer does not fit: "
        "Layout([model], Mesh(batch=2, model=4)) is for arrays of rank 1, but this one "
        "has rank 2. Use `...` for any number of unsharded dims.",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED)
def test_what_does_not_fit_is_refused(call, kind, message):
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == message


def test_what_does_not_divide_is_refused_with_its_source():
    def build():
        return ml.with_layouts(nnx.Linear, kernel=(None, "model"))(
            8, 10, rngs=nnx.Rngs(0)
        )

    with pytest.raises(ml.errors.LayoutMapError) as error:
        ml.create(build, ml.LayoutMap(MESH))
    assert str(error.value) == (
        "kernel f32[8, 10]: dim 1 has size 10, which does not divide into 4 shards over "
        "mesh axis 'model' (set on its layer, Layout([unsharded, model], "
        "Mesh(batch=2, model=4))). Nearest sizes that fit: 8 and 12. To keep the size, "
        "leave dim 1 UNSHARDED, or give the rule on_uneven='replicate'."
    )
    made = ml.create(build, ml.LayoutMap(MESH, on_uneven="replicate"))
    assert str(ml.Layout.of(made.kernel[...])) == "[unsharded, unsharded]"
