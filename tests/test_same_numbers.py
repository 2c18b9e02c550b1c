"""Any model on any mesh trains to the numbers of one device, to float tolerance.

The other side is raw JAX on one device, in `raw_steps`. Without
`MESHLAYOUT_EXHAUSTIVE=1` not every combination is run, but every pair of a model, a
mesh, a number of microbatches and a kind of batches.
"""

import functools
import inspect
import itertools
import os
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from models import convnet, mlp, resnet, transformer
from models.transformer import TransformerConfig
from tests import raw_steps
from tests.raw_steps import KINDS, KINKED, SMOOTH, RawModel, Run, disagreements


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
MODULES = {
    "mlp": mlp,
    "convnet": convnet,
    "resnet": resnet,
    "transformer": transformer,
}
TOLERANCES = {
    "mlp": SMOOTH,
    "convnet": KINKED,
    "resnet": KINKED,
    "transformer": SMOOTH,
}

# Where tensor parallelism leaves a dim whole, `batch` shards it.
FSDP_MODEL_PARALLEL = {
    "mlp": {
        r"hidden/kernel": ("batch", "model"),
        r"hidden/bias": ("model",),
        r"output/kernel": (("model", "batch"), None),
    },
    "convnet": {
        r"conv1/kernel": (..., ("model", "batch")),
        r"(conv2|dense)/kernel": (..., "batch", "model"),
        r"(conv\d|dense)/bias": ("model",),
        r"output/kernel": (("model", "batch"), None),
    },
    "resnet": {
        r"conv1/kernel": (..., "batch", "model"),
        r"norm1/(scale|bias|mean|var)": ("model",),
        r"conv2/kernel": (..., "model", "batch"),
        r"(stem|projection)/kernel": (..., "batch"),
        r"output/kernel": ("batch", None),
    },
    "transformer": transformer.FSDP_MODEL_PARALLEL,
}
# Name -> axes, and the rules of a model's module.
MESHES = {
    "one device": ({"batch": 1}, "DATA_PARALLEL"),
    "batch=8": ({"batch": 8}, "DATA_PARALLEL"),
    "batch=2 x model=4": ({"batch": 2, "model": 4}, "MODEL_PARALLEL"),
    "fsdp=8": ({"batch": 8}, "FSDP"),
    "fsdp=4 x model=2": ({"batch": 4, "model": 2}, "FSDP_MODEL_PARALLEL"),
}
MICROBATCHES = (1, 4)
# What `make test` runs: models on a mesh that is hard for them.
# The convolutional and the residual network, which take longest to run unoptimized and to
# compile, are left to `make test-all`.
QUICK = [
    ("mlp", "batch=2 x model=4"),
    ("transformer", "fsdp=4 x model=2"),
    ("linen mlp", "batch=2 x model=4"),
]


def programs():
    """Every model on every mesh, Linen's on one, in turn with 1 and 4 microbatches."""
    chosen = []
    for (i, name), (j, mesh) in itertools.product(enumerate(MODELS), enumerate(MESHES)):
        accumulate = MICROBATCHES[(i + j + 1) % 2]
        if name in MODULES or mesh == "batch=2 x model=4":
            chosen.append((name, mesh, accumulate))
    return chosen


def combinations():
    """What is run: (model, mesh, microbatches, kinds of batches)."""
    if IS_EXHAUSTIVE:
        every = itertools.product(MODELS, MESHES, MICROBATCHES)
        return [(*program, KINDS) for program in every]
    return [
        # Of partial batches, four in five are full.
        (*program, ("partial",) if is_slow(*program) else KINDS)
        for program in programs()
    ]


def is_slow(name, mesh, accumulate):
    """Whether one kind of batches has to do."""
    is_large = kind_of(name) in ("convnet", "resnet")
    return is_large and (accumulate > 1 or name not in MODULES)


def program_id(value):
    """A parameter in a test's name."""
    return " and ".join(value) if isinstance(value, tuple) else str(value)


# What is compared.

OPTIMIZER = raw_steps.optimizer()


def kind_of(name):
    """The name without `linen`."""
    return name.rpartition(" ")[2]


def loss_fn_of(model):
    """A loss function as a user writes it."""
    keywords = dict(model.keywords)

    def loss_fn(model, batch):
        logits = model(batch["input"], **keywords)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses, {"logits": logits}

    return loss_fn


@functools.cache
def expected_run(name, kind, accumulate=1):
    """The run of raw JAX on one device; computed once."""
    has_statistics = accumulate > 1 and kind_of(name) == "resnet"
    loss = raw_steps.microbatch_loss if has_statistics else raw_steps.right_loss
    return raw_steps.train(MODELS[name], kind, loss)


def initial_state(name, mesh_name):
    """A state on a mesh of this name."""
    axes, rules = MESHES[mesh_name]
    mesh = ml.create_mesh(axes, devices=jax.devices()[: np.prod([*axes.values()])])
    family = kind_of(name)
    patterns = (
        FSDP_MODEL_PARALLEL[family]
        if rules == "FSDP_MODEL_PARALLEL"
        else getattr(MODULES[family], rules)
    )
    model = MODELS[name]
    return ml.TrainState.create(
        model.build, OPTIMIZER, ml.LayoutMap(mesh, patterns), module=model.module
    ), mesh


@jax.jit
def copied(state):
    """A state of its own, which a step may use up."""
    return jax.tree.map(jnp.copy, state)


@jax.jit
def merged(one, other):
    """Metrics of what both have counted."""
    return one.merge(other)


def train(name, kind, step, state, mesh) -> Run:
    """Trains on a mesh; the state is not used up, and its layouts are kept."""
    layouts = jax.tree.leaves(state.layouts)
    state = copied(state)
    rows = mesh.layout("batch", ...)
    losses, gradients, every = [], [], []
    for batch in raw_steps.batches_of(MODELS[name], kind):
        placed = {key: ml.relayout(x, rows) for key, x in batch.items()}
        state, metrics = step(state, placed)
        losses.append(metrics["loss"])
        gradients.append(raw_steps.by_path(state.opt_state[0]))
        every.append(metrics)
    assert jax.tree.leaves(state.layouts) == layouts
    return Run(
        np.array(losses),
        gradients,
        raw_steps.by_path(state.params),
        raw_steps.by_path(state.model_state),
        functools.reduce(merged, every).to_host(),
    )


def disagreements_on(name, mesh_name, kinds=KINDS, **options):
    """Kind of batches -> what a step on a mesh does not agree in with raw JAX."""
    metrics = {
        "accuracy": ml.metrics.Accuracy(),
        "perplexity": ml.metrics.Perplexity(),
    }
    step = ml.make_train_step(loss_fn_of(MODELS[name]), metrics=metrics, **options)
    state, mesh = initial_state(name, mesh_name)
    tolerance = TOLERANCES[kind_of(name)]
    accumulate = options.get("accumulate", 1)
    return {
        kind: disagreements(
            train(name, kind, step, state, mesh),
            expected_run(name, kind, accumulate),
            tolerance,
        )
        for kind in kinds
    }


def marked():
    """The combinations; of the costly models, few are quick."""
    return [
        pytest.param(*one, marks=[pytest.mark.slow] * (one[:2] not in QUICK))
        for one in combinations()
    ]


@pytest.mark.parametrize(
    ("name", "mesh_name", "accumulate", "kinds"), marked(), ids=program_id
)
def test_twenty_steps_agree_with_raw_jax_on_one_device(
    name, mesh_name, accumulate, kinds
):
    found = disagreements_on(name, mesh_name, kinds, accumulate=accumulate)
    assert found == {kind: {} for kind in kinds}


def test_what_is_run_covers_every_pair():
    run = [
        {"model": name, "mesh": mesh, "microbatches": accumulate, "kind": kind}
        for name, mesh, accumulate, kinds in combinations()
        for kind in kinds
        if name in MODULES
    ]
    values = {
        "model": MODULES,
        "mesh": MESHES,
        "microbatches": MICROBATCHES,
        "kind": KINDS,
    }
    for one, other in itertools.combinations(values, 2):
        found = {(row[one], row[other]) for row in run}
        missing = {*itertools.product(values[one], values[other])} - found
        assert missing == set(), (one, other)


# What is compared tells wrong programs from right ones.

LEARNED = {"losses", "first gradients", "gradients", "params"}


@pytest.mark.parametrize(
    "name", ["mlp", pytest.param("transformer", marks=pytest.mark.slow)]
)
def test_a_denominator_that_counts_padding_is_found(name):
    found = disagreements_on(name, "batch=8", denominator="global_batch_size")
    assert found["full"] == {}
    assert {*found["partial"]} >= LEARNED


def test_an_average_of_averages_is_found():
    found = {
        kind: disagreements(
            raw_steps.train(MODELS["mlp"], kind, raw_steps.mean_of_microbatch_means),
            expected_run("mlp", kind),
            KINKED,  # even so
        )
        for kind in KINDS
    }
    assert found["full"] == {}
    assert {*found["partial"]} >= LEARNED


def normalized():
    """A network with batch statistics that compiles fast."""
    rngs = nnx.Rngs(KEY)
    return nnx.Sequential(
        nnx.Conv(1, 8, (3, 3), rngs=rngs),
        nnx.BatchNorm(8, rngs=rngs),
        lambda images: nnx.relu(images).mean((1, 2)),
        nnx.Linear(8, raw_steps.NUM_CLASSES, rngs=rngs),
    )


def test_batch_statistics_of_padding_are_found():
    model = RawModel(normalized, example_shape=(6, 6, 1))
    wrong, expected = (
        raw_steps.train(model, "partial", loss)
        for loss in (raw_steps.padded_statistics, raw_steps.right_loss)
    )
    found = disagreements(wrong, expected, KINKED)
    assert {*found} >= LEARNED | {"statistics"}


# Models that look at themselves, and losses in which examples meet: compared with Flax
# and Optax as one writes them by hand, on one device.


class Layer(nnx.Module):
    """A layer that finds what to do by its own class."""

    registry: ClassVar[dict[type, str]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Layer.registry[cls] = cls.__name__


class Normalized(Layer):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List(
            [nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        handlers = {nnx.Linear: jnp.tanh, nnx.BatchNorm: lambda x: 2 * x}
        for layer in self.layers:
            x = handlers[type(layer)](layer(x))
        is_itself = (
            type(self) is Normalized and Layer.registry[type(self)] == "Normalized"
        )
        is_norm = type(self.layers[1]) is nnx.BatchNorm
        return x if is_itself and is_norm else 0 * x


class Dropped(Layer):
    """A block that is handed its random numbers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.drop = nnx.Dropout(0.5)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        return self.drop(self.linear(x), rngs=rngs)


class Looking(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = Normalized(rngs)
        self.blocks = nnx.List([Dropped(rngs) for _ in range(2)])

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        x = self.first(x)
        for block in self.blocks:
            x = x if rngs is None else block(x, rngs)
        return x


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


def rows(step, with_weights):
    rng = np.random.default_rng(step)
    batch = {name: rng.normal(size=(16, 4)).astype("float32") for name in "xy"}
    if with_weights:
        batch["weight"] = np.float32(np.arange(16) < 11)
    return batch


def by_hand(loss_fn, count, with_weights):
    """Losses and parameters of two steps; padding is cut off, not masked."""

    @nnx.jit
    @nnx.value_and_grad
    def value_and_gradients(model, part, key, total):
        asks = "rngs" in inspect.signature(loss_fn).parameters
        extras = {"rngs": nnx.Rngs(key)} if asks else {}
        return loss_fn(model, part, **extras).sum() / total

    model = Looking(nnx.Rngs(0))
    model.train()
    tx = optax.sgd(0.1, momentum=0.9)
    params = nnx.state(model, nnx.Param)
    opt_state, losses = tx.init(params), []
    for step in range(2):
        batch = rows(step, with_weights)
        total = batch["weight"].sum() if with_weights else 16.0
        key = jax.random.fold_in(jax.random.key(0), step)
        grads, loss = None, 0.0
        for index in range(count):
            part = {name: x[index::count] for name, x in batch.items()}
            if with_weights:
                part = {name: x[part["weight"] > 0] for name, x in part.items()}
            part_key = key if count == 1 else jax.random.fold_in(key, index)

            value, slope = value_and_gradients(model, part, part_key, total)
            loss += float(value)
            grads = slope if grads is None else jax.tree.map(jnp.add, grads, slope)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        nnx.update(model, params)
        losses.append(loss)
    return np.array(losses), nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState)))


LOOKING = [
    # A loss in which examples meet would see the padding, and has none.
    pytest.param(squares, False, {}, marks=pytest.mark.slow),
    pytest.param(
        *(squares, False, {"accumulate": 2, "remat": "full"}),
        marks=pytest.mark.slow,
    ),
    (squares, True, {"accumulate": 2}),
    (contrastive, False, {"accumulate": 2}),
    (mixup, False, {"accumulate": 2}),
    pytest.param(dropped, False, {"remat": "blocks"}, marks=pytest.mark.slow),
    (dropped, True, {"accumulate": 2}),
    *(
        itertools.product(
            (squares, contrastive, mixup, dropped),
            (False,),
            ({}, {"accumulate": 4}, {"remat": "full"}),
        )
        if IS_EXHAUSTIVE
        else ()
    ),
]


@pytest.mark.parametrize(("loss_fn", "with_weights", "options"), LOOKING)
def test_steps_agree_with_flax_and_optax_written_by_hand(
    loss_fn, with_weights, options
):
    count = options.get("accumulate", 1)
    losses, state_by_hand = by_hand(loss_fn, count, with_weights)
    names = ["batch=8", "batch=2 x model=4"] if IS_EXHAUSTIVE else ["batch=2 x model=4"]
    for name in names:
        mesh = ml.create_mesh(MESHES[name][0])
        layouts = ml.LayoutMap(mesh, {})
        state = ml.TrainState.create(
            lambda: Looking(nnx.Rngs(0)), optax.sgd(0.1, momentum=0.9), layouts
        )
        step = ml.make_train_step(loss_fn, **options)
        found = []
        for number in range(2):
            batch = ml.relayout(rows(number, with_weights), mesh.layout("batch", ...))
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        model_state = nnx.to_pure_dict(nnx.state(state.model, nnx.Not(nnx.RngState)))
        jax.tree.map(
            # Of two steps of sums in another order.
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
            model_state,
            state_by_hand,
        )
