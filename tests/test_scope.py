"""`with ml.scope(layouts):` unchanged code, the same bits, the final paths' layouts."""

import cProfile
import threading
import traceback
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from models.mlp import MLP
from tests.error_messages import message_of
from tests.flax_versions import module_list
from tests.same_bits import assert_same_bits, plain


MESH = ml.create_mesh({"batch": 2, "model": 4})


def kernels(spec=(..., "model"), **options):
    options = {"on_uneven": "replicate", **options}
    return ml.LayoutMap(MESH, {"kernel": spec}, **options)


class Head(nnx.Module):
    """Takes one layer that exists, makes another one, and keeps its Rngs."""

    def __init__(self, base, *, rngs):
        self.base = base
        self.head = nnx.Linear(8, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.rngs = rngs


class Configured(nnx.Module):
    def __init__(self, config, *, rngs, dtype, function, array):
        self.config = config
        self.linear = nnx.Linear(config["in"], 8, rngs=rngs, param_dtype=dtype)
        self.function = function
        self.array = nnx.Variable(array)
        if array.shape[0] > 3 and float(array[0]) == 1.0:
            self.extra = nnx.Param(jnp.zeros((8, 8)))


def nested():
    rngs = nnx.Rngs(0)
    first = nnx.Sequential(nnx.Linear(8, 16, rngs=rngs), nnx.relu)
    layers = [nnx.Linear(16, 16, rngs=rngs) for _ in range(3)]
    layers[2].kernel = layers[0].kernel
    return nnx.Sequential(first, nnx.Sequential(*layers))


def mixed():
    rngs = nnx.Rngs(params=1, dropout=2)
    base = nnx.Linear(8, 8, rngs=rngs)
    model = Head(base, rngs=rngs)
    assert (model.base, model.rngs) == (base, rngs)
    return model


def configured():
    options = {"dtype": jnp.bfloat16, "function": nnx.relu, "array": np.ones(8)}
    return Configured({"in": 8, "text": "x"}, rngs=nnx.Rngs(0), **options)


# Whole models, of most layers that Flax has, are in test_create.
@pytest.mark.parametrize(
    "build", [nested, mixed, pytest.param(configured, marks=pytest.mark.slow)]
)
def test_models_are_born_as_the_map_says_with_the_same_bits(build):
    layouts, expected = kernels(), build()
    with ml.scope(layouts):
        model = build()
    assert type(model) is type(expected)
    assert_same_bits(model, expected)
    wanted = plain(layouts.resolve(model).layouts)
    assert jax.tree.map(ml.Layout.of, plain(model)) == wanted


def test_layers_made_first_get_the_layouts_of_their_final_paths():
    rules = {
        r"layers/0/layers/0/kernel": (None, "model"),
        r"layers/1/.*kernel": ("model", None),
        "bias": ("batch",),
    }
    with ml.scope(ml.LayoutMap(MESH, rules, unmatched="error")):
        model: Any = nested()
    layers = [model.layers[0].layers[0], *model.layers[1].layers]
    rows = "[model, unsharded]"
    assert list(map(lies, layers)) == ["[unsharded, model]", rows, rows, rows]


def test_metadata_of_a_layer_is_read():
    ones = nnx.with_partitioning(nnx.initializers.ones, ("model",))
    with ml.scope(kernels(("batch", None))):
        layer = nnx.Linear(8, 8, bias_init=ones, rngs=nnx.Rngs(0))
    assert ml.Layout.of(layer.bias[...]) == MESH.layout("model")
    assert ml.Layout.of(layer.kernel[...]) == MESH.layout("batch", None)


def test_a_layer_with_no_rule_yet_is_never_whole_on_a_device():
    with ml.scope(ml.LayoutMap(MESH, {"layers/0/kernel": ("model", None)})):
        layer = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
        shape = layer.kernel[...].addressable_shards[0].data.shape
        assert np.prod(shape) == 64 * 64 // 8
        nnx.Sequential(layer)
    assert ml.Layout.of(layer.kernel[...]) == MESH.layout("model", None)


def test_the_callers_rngs_advance_as_without_a_scope():
    def draws():
        rngs = nnx.Rngs(0, dropout=3)
        Head(nnx.Linear(8, 8, rngs=rngs), rngs=rngs)
        MLP(rngs=rngs)
        nnx.Linear(8, 8, rngs=rngs.fork())
        return [jax.random.key_data(rngs[name]()) for name in ("params", "dropout")]

    expected = draws()
    with ml.scope(kernels()):
        assert_same_bits(draws(), expected)


def test_rngs_that_are_not_among_the_arguments_are_refused():
    rngs = nnx.Rngs(0)

    class Drawing(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(8, 8, rngs=rngs)

    assert "give it as an argument" in message_of(in_scope, kernels(), Drawing)


class Normed(nnx.Module):
    """Holds more than parameters, so that its state is not shaped as they are."""

    def __init__(self, *, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def test_optimizers_made_in_a_scope_follow_their_model():
    with ml.scope(kernels((None, "model"), unused="error")):
        model = Normed(rngs=nnx.Rngs(0))
        both = nnx.ModelAndOptimizer(model, optax.adam(1e-3))
        alone = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    assert lies(model.dense) == "[unsharded, model]"
    for optimizer in (both, alone):
        slots = optimizer.opt_state[0]
        for moment in (slots.mu, slots.nu):
            assert lies(moment["dense"]) == "[unsharded, model]"
        assert str(ml.Layout.of(optimizer.step[...])) == "[]"
    assert_same_bits(model, Normed(rngs=nnx.Rngs(0)))


def test_describing_takes_time_in_proportion_to_the_layers():
    def calls_of_functions(count):
        def build():
            return module_list([linear() for _ in range(count)])

        profile = cProfile.Profile()
        profile.runcall(ml.describe, build, kernels())
        return sum(entry.callcount for entry in profile.getstats())

    calls_of_functions(2)
    # 4 times as many; if each layer looked at all before it, 16 times.
    assert calls_of_functions(160) < 6 * calls_of_functions(40)


def lies(layer):
    """The layout of the kernel of a layer, or of what an optimizer keeps for it."""
    kernel = layer.kernel if isinstance(layer, nnx.Module) else layer["kernel"]
    return str(ml.Layout.of(kernel[...]))


def linear():
    return nnx.Linear(8, 8, rngs=nnx.Rngs(0))


SINGLE = jax.sharding.SingleDeviceSharding


def is_plain(model):
    return isinstance(model.kernel[...].sharding, SINGLE)


def test_a_state_that_is_created_in_a_scope_follows_its_map():
    with ml.scope(kernels()):
        state = ml.TrainState.create(linear, optax.adam(0.1))
        other = ml.create(linear, kernels((None, "batch")))
    assert str(state.layouts.opt_state[0].mu["kernel"]) == "[unsharded, model]"
    assert lies(other) == "[unsharded, batch]"


def test_scopes_nest_and_are_of_their_thread():
    models = []

    def in_another_thread():
        models.append(linear())
        with ml.scope(kernels((None, "batch"))):
            models.append(linear())

    with ml.scope(kernels()):
        models.append(linear())
        with ml.scope(kernels(("batch", None))):
            models.append(linear())
            thread = threading.Thread(target=in_another_thread)
            thread.start()
            thread.join()
        models.append(linear())
    outer, inner, plain_one, other, after = models
    assert is_plain(plain_one)
    assert is_plain(linear())
    assert lies(outer) == lies(after) == "[unsharded, model]"
    assert (lies(inner), lies(other)) == ("[batch, unsharded]", "[unsharded, batch]")


def flax_methods():
    """Flax's constructors, and whether their classes have them themselves."""
    methods = [(type(nnx.Module), "__call__"), (nn.Module, "init")]
    methods.append((nnx.Optimizer, "__init__"))
    return [(getattr(owner, name), name in vars(owner)) for owner, name in methods]


METHODS_BEFORE = flax_methods()


def test_flax_is_its_own_before_a_scope_is_entered_and_after_the_last_is_left():
    outer, inner = ml.scope(kernels()), ml.scope(kernels())
    assert flax_methods() == METHODS_BEFORE
    with outer:
        linear()
        with inner:
            linear()
        assert flax_methods() != METHODS_BEFORE
    assert flax_methods() == METHODS_BEFORE
    with pytest.raises(ml.errors.LayoutMapError), ml.scope(kernels(unmatched="error")):
        linear()
    assert flax_methods() == METHODS_BEFORE


EMPTY = (
    "nothing was made in this scope: it lays out NNX modules and the variables of "
    "Linen's init that are made inside it. For Equinox and other pytrees, write "
    "create(lambda: Model(...), layouts)."
)


@pytest.mark.parametrize("rules", [{}, {"kernel": (..., "model")}])
def test_a_scope_in_which_nothing_is_made_says_so(rules):
    def scope(unused):
        with ml.scope(ml.LayoutMap(MESH, rules, unused=unused)):
            assert jnp.ones((8, 8)).shape  # as of Equinox: no module of Flax

    with pytest.warns(ml.errors.LayoutWarning) as caught:
        scope("warn")
    assert [str(warning.message) for warning in caught] == [EMPTY]
    assert caught[0].filename == __file__
    assert message_of(scope, "error") == EMPTY
    scope("ignore")
    assert flax_methods() == METHODS_BEFORE


def test_a_scope_for_activations_alone_is_not_empty():
    layouts = ml.LayoutMap(MESH, {"hidden": ("batch", ...)}, unused="error")
    step = jax.jit(lambda x: ml.constrain(x, "hidden"))
    for _ in range(2):  # the second time, JAX has the program
        with ml.scope(layouts):
            step(jnp.ones((8, 8)))
    with ml.scope(layouts):
        nnx.eval_shape(linear)


def in_scope(layouts, build):
    with ml.scope(layouts):
        build()


def test_mistakes_are_named_by_the_final_path_at_the_end():
    start = "layers/0/layers/0/bias f32[16]: no rule matches"
    with pytest.raises(ml.MeshLayoutError) as error:
        in_scope(kernels(unmatched="error"), nested)
    assert str(error.value).startswith(start)
    assert {x.filename for x in traceback.extract_tb(error.tb)} == {__file__}
    with pytest.raises(ml.errors.StateError, match="LayoutMap, got a Mesh"):
        ml.scope(MESH)
    layouts = kernels()
    layouts["layers"] = (..., "batch")
    start = "layers/0/kernel f32[8, 8]: rules 'kernel' and 'layers' both match and"
    said = message_of(in_scope, layouts, lambda: nnx.Sequential(linear()))
    assert said.startswith(start)
