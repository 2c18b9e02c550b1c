"""Any model on any mesh trains to the numbers of one device, to float tolerance.

The other side is raw JAX on one device, in `raw_steps`. Without
`MESHLAYOUT_EXHAUSTIVE=1` not every combination is run, but every model on every mesh,
in turn with 1 and 4 microbatches, and Linen's on one.
"""

import dataclasses
import functools
import itertools
import os
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from models import convnet, mlp, moe, resnet, transformer
from models.transformer import TransformerConfig
from tests import raw_steps
from tests.flax_versions import module_list
from tests.raw_steps import KINKED, SMOOTH, RawModel, Run, disagreements
from tests.small_states import assert_close, create, mesh_of, on


IS_EXHAUSTIVE = bool(os.environ.get("MESHLAYOUT_EXHAUSTIVE"))

CONFIG = TransformerConfig(
    vocab_size=16, max_length=8, features=8, num_heads=4, num_layers=1, mlp_features=16
)
KEY = 0


def linen(module, shape, dtype="float32", **options):
    """A Linen model with examples of this shape."""
    make = functools.partial(
        module.init, jax.random.key(KEY), jnp.zeros((1, *shape), dtype)
    )
    return RawModel(make, module, shape, **options)


MODELS = {
    "mlp": RawModel(
        lambda: mlp.MLP(hidden_features=16, in_features=64, rngs=nnx.Rngs(KEY))
    ),
    "convnet": RawModel(
        lambda: convnet.ConvNet(rngs=nnx.Rngs(KEY)), example_shape=(28, 28, 1)
    ),
    "resnet": RawModel(
        lambda: resnet.ResNet(width=8, rngs=nnx.Rngs(KEY)), example_shape=(6, 6, 1)
    ),
    # Each token has a weight of its own.
    "transformer": RawModel(
        lambda: transformer.Transformer(CONFIG, rngs=nnx.Rngs(KEY)),
        example_shape=(8,),
        weights_shape=(8,),
    ),
    "linen mlp": linen(mlp.LinenMLP(hidden_features=16), (8, 8, 1)),
    "linen convnet": linen(convnet.LinenConvNet(), (28, 28, 1)),
    "linen resnet": linen(
        resnet.LinenResNet(width=8), (6, 6, 1), keywords=(("train", True),)
    ),
    # Each sequence has one weight for all of its tokens.
    "linen transformer": linen(
        transformer.LinenTransformer(CONFIG), (8,), "int32", keywords=(("train", True),)
    ),
}
RING, HEADS = (
    functools.partial(attend, axis="seq", causal=True)
    for attend in (ml.parallel.ring_attention, ml.parallel.all_to_all_attention)
)
STAGED = dataclasses.replace(CONFIG, is_scanned=True, num_layers=4, microbatches=2)
MIXED = moe.MoEConfig(**vars(CONFIG))


class Mixture(nnx.Module):
    """Forgets the losses that the model records."""

    def __init__(self, config, *, rngs):
        self.model = moe.MoE(config, rngs=rngs)

    def __call__(self, tokens):
        logits = self.model(tokens)
        nnx.pop(self.model, nnx.Intermediate)
        return logits


def language_model(config):
    module = Mixture if config is MIXED else transformer.Transformer
    weights_shape = () if config is MIXED else (8,)
    make = lambda: module(config, rngs=nnx.Rngs(KEY))
    return RawModel(make, example_shape=(8,), weights_shape=weights_shape)


IN_CONTEXT = (
    {"batch": 2, "seq": 4},
    lambda mesh: ml.LayoutMap(mesh, transformer.FSDP_CONTEXT, unused="ignore"),
    ("batch", "seq"),
)
IN_STAGES = ({"batch": 2, "stage": 4}, ml.parallel.stages, ("batch", None))
LINEN_STAGES = linen(
    *(transformer.LinenTransformer(STAGED), (8,), "int32"),
    weights_shape=(8,),
    keywords=(("train", True),),
)
# Way -> a model, axes, the layouts of its parameters, and those of its inputs.
WAYS = {
    "space": (
        MODELS["convnet"],
        {"batch": 2, "height": 2, "width": 2},
        lambda mesh: ml.LayoutMap(mesh, convnet.DATA_PARALLEL),
        convnet.SPATIAL,
    ),
    "context": (
        language_model(dataclasses.replace(CONFIG, attention=RING)),
        *IN_CONTEXT,
    ),
    "context by heads": (
        language_model(dataclasses.replace(CONFIG, attention=HEADS)),
        *IN_CONTEXT,
    ),
    "sequence": (
        language_model(CONFIG),
        {"batch": 2, "model": 4},
        lambda mesh: ml.parallel.tensor_parallel(
            mesh, language_model(CONFIG).make, jnp.zeros((8, 8), "int32"), sequence=True
        ),
        ("batch", None),
    ),
    "experts": (
        language_model(MIXED),
        {"batch": 2, "expert": 4},
        lambda mesh: ml.LayoutMap(mesh, moe.EXPERT_PARALLEL),
        (("batch", "expert"), None),
    ),
    "pipeline": (language_model(STAGED), *IN_STAGES),
    "linen pipeline": (LINEN_STAGES, *IN_STAGES),
}
MODELS |= {way: model for way, (model, *_) in WAYS.items() if way != "space"}
MODULES = {
    m.__name__.rpartition(".")[2]: m for m in (mlp, convnet, resnet, transformer)
}
TOLERANCES = {"convnet": KINKED, "resnet": KINKED, "space": KINKED, "experts": KINKED}

# Name -> axes, and the rules of a model's module. FSDP shards what tensor parallelism
# leaves whole.
MESHES = {
    "one device": ({"batch": 1}, ["DATA_PARALLEL"]),
    "batch=8": ({"batch": 8}, ["DATA_PARALLEL"]),
    "batch=2 x model=4": ({"batch": 2, "model": 4}, ["MODEL_PARALLEL"]),
    "fsdp=8": ({"batch": 8}, ["FSDP"]),
    "fsdp=4 x model=2": ({"batch": 4, "model": 2}, ["MODEL_PARALLEL", "fsdp"]),
}
MICROBATCHES = (1, 4)
# What `make test` runs: models on a mesh that is hard for them. The convolutional and the
# residual network, which take longest to compile and to run unoptimized, are left to
# `make test-all`.
QUICK = [
    ("mlp", "batch=2 x model=4"),
    ("transformer", "fsdp=4 x model=2"),
    ("linen mlp", "batch=2 x model=4"),
]


def programs():
    """What is run: (model, mesh, microbatches); of the costly models, few are quick."""
    chosen = []
    names = [name for name in MODELS if kind_of(name) in MODULES]
    for (i, name), (j, mesh) in itertools.product(enumerate(names), enumerate(MESHES)):
        in_turn = [MICROBATCHES[(i + j + 1) % 2]]
        marks = [pytest.mark.slow] * ((name, mesh) not in QUICK)
        if IS_EXHAUSTIVE or name in MODULES or mesh == "batch=2 x model=4":
            for accumulate in MICROBATCHES if IS_EXHAUSTIVE else in_turn:
                chosen.append(pytest.param(name, mesh, accumulate, marks=marks))
    return chosen


OPTIMIZER = raw_steps.optimizer()


def kind_of(name):
    """The name without `linen`."""
    return name.rpartition(" ")[2]


def loss_fn_of(model):
    """A loss function as a user writes it."""
    keywords = dict(model.keywords)

    def loss_fn(model, batch):
        logits = model(batch["input"], **keywords)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])

    return loss_fn


@functools.cache
def expected_run(name, accumulate=1):
    """The run of raw JAX on one device; computed once."""
    model = MODELS[name]
    return raw_steps.train(
        model.build(),
        loss_fn_of(model),
        raw_steps.batches_of(model),
        OPTIMIZER,
        module=model.module,
        # Each microbatch has statistics of its own; without them it makes no difference.
        accumulate=accumulate if kind_of(name) == "resnet" else 1,
    )


def initial_state(name, mesh):
    """A state with the layouts that are meant by a mesh of this name."""
    axes, rules = MESHES[mesh]
    mesh = mesh_of(**axes)
    layouts = ml.LayoutMap(mesh, getattr(MODULES[kind_of(name)], rules[0]))
    if rules[1:]:
        layouts = ml.parallel.compose(layouts, ml.parallel.fsdp(mesh, min_bytes=0))
    model = MODELS[name]
    return ml.TrainState.create(model.build, OPTIMIZER, layouts, module=model.module)


def disagreements_on(name, mesh, **options):
    """What a step on a mesh does not agree in with raw JAX; layouts are kept."""
    return disagreements_of(name, initial_state(name, mesh), **options)


def disagreements_of(name, state, inputs=(), **options):
    """The same for a state, and inputs in layouts of their own."""
    step = ml.make_train_step(loss_fn_of(MODELS[name]), **options)
    layouts = jax.tree.leaves(state.layouts)
    mesh = layouts[0].mesh
    losses, gradients = [], []
    for batch in raw_steps.batches_of(MODELS[name]):
        placed = on(mesh, batch)
        if inputs:
            placed["input"] = ml.relayout(batch["input"], mesh.layout(*inputs))
        state, metrics = step(state, placed)
        losses.append(metrics["loss"])
        gradients.append(raw_steps.by_path(state.opt_state[0]))
    assert jax.tree.leaves(state.layouts) == layouts
    found = Run(np.array(losses), gradients, state.params, state.model_state)
    expected = expected_run(name, options.get("accumulate", 1))
    return disagreements(found, expected, TOLERANCES.get(kind_of(name), SMOOTH))


@pytest.mark.parametrize(("name", "mesh", "accumulate"), programs())
def test_twenty_steps_agree_with_raw_jax_on_one_device(name, mesh, accumulate):
    assert disagreements_on(name, mesh, accumulate=accumulate) == {}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_twenty_steps_agree_however_a_model_is_split(way):
    model, axes, rules, inputs = WAYS[way]
    layouts = rules(mesh_of(**axes))
    state = ml.TrainState.create(model.build, OPTIMIZER, layouts, module=model.module)
    options = {"layouts": layouts} if way.startswith(("context", "sequence")) else {}
    name = "convnet" if way == "space" else way
    assert disagreements_of(name, state, inputs, **options) == {}


def test_a_denominator_that_counts_padding_is_found():
    """What is compared tells wrong programs from right ones."""
    found = disagreements_on("mlp", "batch=8", denominator="global_batch_size")
    assert {*found} >= {"losses", "first gradients", "gradients", "params"}


# Models that look at themselves, and losses in which examples meet: compared with Flax
# and Optax as one writes them by hand, on one device.


class Dropped(nnx.Module):
    """A block that is handed its random numbers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.drop = nnx.Dropout(0.5)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs, *, scale: float) -> jax.Array:
        return scale * self.drop(self.linear(x), rngs=rngs)


REGISTRY = {}


class Registered(nnx.Module):
    """Lists its subclasses."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        REGISTRY[cls.__name__] = cls


class Parent(Registered):
    """A block of a layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


class Block(Parent):
    """Asks for its own type, and for its parent's call."""

    def __call__(self, x: jax.Array) -> jax.Array:
        assert pickle.loads(pickle.dumps(type(self))) is type(self)
        return super().__call__(x) if type(self) in (Block, Inherited) else 0 * x


class Inherited(Block):
    """Has no call of its own."""


class Looking(nnx.Module):
    """Finds what to do by the classes of its layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        layers = [nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)]
        self.layers = module_list(layers)
        self.blocks = module_list([Block(rngs), Block(rngs), Inherited(rngs)])
        self.dropped = module_list([Dropped(rngs) for _ in range(2)])

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        handlers = {nnx.Linear: jnp.tanh, nnx.BatchNorm: lambda x: 2 * x}
        for layer in self.layers:
            x = handlers[type(layer)](layer(x))
        for block in self.blocks:
            assert REGISTRY[type(block).__name__] is type(block)
            x = x + block(x)
        for block in self.dropped:
            x = x if rngs is None else block(x, rngs, scale=0.5)
        # Blocks that are alike stay so, for models that stack them.
        first, second = (nnx.split(block)[0] for block in self.blocks[:2])
        assert first == second
        return x if type(self) is Looking else 0 * x


def squares(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"]).mean(1)


def contrastive(model, batch):
    z = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(len(z)))


def mixup(model, batch, rngs):
    order = jax.random.permutation(rngs(), len(batch["x"]))
    mixed = {name: 0.7 * x + 0.3 * x[order] for name, x in batch.items()}
    return squares(model, {"x": mixed["x"], "y": mixed["y"]})


def dropped(model, batch, rngs):
    return jnp.square(model(batch["x"], rngs) - batch["y"]).mean(1)


def own_batch_norm(model, batch):
    h = model(batch["x"])
    h = (h - h.mean(0)[None]) / jnp.sqrt(h.var(0) + 1e-3)[None]
    return jnp.square(h - 1).mean(1)


def rolled(model, batch):
    made = model(batch["x"] + 0.5 * jnp.roll(batch["x"], 1, 0))
    return jnp.square(made).mean(1)


def scalar(model, batch):
    """Away from zero: a mean that is nearly zero would make rounding large."""
    made = model(batch["x"])
    return jnp.square(made).mean() / (1 + jnp.square(made.mean()))


KINDS = Parent, Block, Inherited, Dropped, nnx.BatchNorm
FLOATS = ml.PrecisionPolicy("float32", "float32")
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
LOOKING = [
    # A loss in which examples meet would see the padding, and has none.
    (squares, True, {"accumulate": 2, "precision": FLOATS}),
    (contrastive, False, {"accumulate": 2}),
    slow(mixup, False, {"accumulate": 2}),
    slow(own_batch_norm, False, {"accumulate": 4}),
    slow(rolled, False, {"accumulate": 4}),
    (scalar, False, {"accumulate": 4}),
    (dropped, True, {"accumulate": 2, "remat": "blocks"}),
    slow(dropped, False, {"remat": jax.checkpoint_policies.dots_saveable}),
    *(
        itertools.product(
            (squares, contrastive, mixup, dropped),
            (False,),
            ({}, {"accumulate": 4}, {"remat": "full"}, {"precision": FLOATS}),
        )
        if IS_EXHAUSTIVE
        else ()
    ),
]


@pytest.mark.parametrize(("loss_fn", "with_weights", "options"), LOOKING)
def test_steps_agree_with_flax_and_optax_written_by_hand(
    loss_fn, with_weights, options
):
    rng, tx = np.random.default_rng(0), optax.sgd(0.1, momentum=0.9)
    batches = []
    for _ in range(2):
        x, y = rng.normal(size=(2, 32, 4)).astype("float32")
        weights = {"weight": np.float32(np.arange(32) < 21)} if with_weights else {}
        batches.append({"x": x, "y": y, **weights})
    build = lambda: Looking(nnx.Rngs(0))
    calls = [vars(kind).get("__call__") for kind in KINDS]
    count = options.get("accumulate", 1)
    plain = raw_steps.train(build(), loss_fn, batches, tx, accumulate=count)
    for name in ("batch=8", "batch=2 x model=4")[0 if IS_EXHAUSTIVE else 1 :]:
        mesh = mesh_of(**MESHES[name][0])
        state, step = create(mesh, build, tx), ml.make_train_step(loss_fn, **options)
        for batch, loss in zip(batches, plain.losses, strict=True):
            state, metrics = step(state, on(mesh, batch))
            np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
        assert [vars(kind).get("__call__") for kind in KINDS] == calls
        # Of two steps of sums in another order.
        found = state.params, state.model_state["layers"]
        expected = plain.params, plain.state["layers"]
        assert_close(found, expected, rtol=1e-4, atol=1e-5)
