"""Any model on any mesh trains to the numbers of one device, to float tolerance.

The other side is raw JAX on one device, in `raw_steps`. Without
`MESHLAYOUT_EXHAUSTIVE=1` not every combination is run, but every pair of a model, a
mesh, a number of microbatches and a kind of batches.
"""

import functools
import itertools
import os

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


def programs():
    """Every model on every mesh, Linen's on one, in turn with 1 and 4 microbatches.

    Exact batch statistics of microbatches take many passes: they are computed once.
    """
    chosen = []
    for (i, name), (j, mesh) in itertools.product(enumerate(MODELS), enumerate(MESHES)):
        accumulate = MICROBATCHES[(i + j + 1) % 2]
        if kind_of(name) == "resnet":
            accumulate = 4 if (name, mesh) == ("resnet", "batch=2 x model=4") else 1
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
    return accumulate > 1 and kind_of(name) in ("convnet", "resnet")


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
def expected_run(name, kind):
    """What raw JAX on one device gives; computed once."""
    return raw_steps.train(MODELS[name], kind)


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
        "cross_entropy": ml.metrics.CrossEntropy(),
    }
    step = ml.make_train_step(loss_fn_of(MODELS[name]), metrics=metrics, **options)
    state, mesh = initial_state(name, mesh_name)
    tolerance = TOLERANCES[kind_of(name)]
    return {
        kind: disagreements(
            train(name, kind, step, state, mesh), expected_run(name, kind), tolerance
        )
        for kind in kinds
    }


@pytest.mark.parametrize(
    ("name", "mesh_name", "accumulate", "kinds"), combinations(), ids=program_id
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


def test_metrics_added_on_the_device_are_those_of_the_steps_merged():
    state, mesh = initial_state("mlp", "fsdp=8")
    step = ml.make_train_step(
        loss_fn_of(MODELS["mlp"]), metrics={"accuracy": ml.metrics.Accuracy()}
    )
    metrics = None
    for batch in raw_steps.batches_of(MODELS["mlp"], "partial"):
        placed = {
            k: ml.relayout(x, mesh.layout("batch", ...)) for k, x in batch.items()
        }
        state, metrics = step(state, placed, metrics)
    found, expected = metrics.to_host(), expected_run("mlp", "partial").metrics
    assert found["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-6)
    assert found["loss"] == pytest.approx(expected["loss"], rel=SMOOTH.values)


# What is compared tells wrong programs from right ones.

LEARNED = {"losses", "first gradients", "gradients", "params"}


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_a_denominator_that_counts_padding_is_found(name):
    found = disagreements_on(name, "batch=8", denominator="global_batch_size")
    assert found["full"] == {}
    assert {*found["partial"]} >= LEARNED


@pytest.mark.parametrize(
    "loss", [raw_steps.mean_of_microbatch_means, raw_steps.mean_of_shards]
)
def test_an_average_of_averages_is_found(loss):
    found = {
        kind: disagreements(
            raw_steps.train(MODELS["mlp"], kind, loss),
            expected_run("mlp", kind),
            KINKED,  # even so
        )
        for kind in KINDS
    }
    assert found["full"] == {}
    assert {*found["partial"]} >= LEARNED


def test_batch_statistics_of_shards_are_found():
    wrong = raw_steps.train(MODELS["resnet"], "full", raw_steps.mean_of_shards)
    found = disagreements(wrong, expected_run("resnet", "full"), KINKED)
    assert {*found} >= LEARNED | {"statistics"}


def test_batch_statistics_that_count_padding_are_found():
    wrong = raw_steps.train(MODELS["resnet"], "partial", raw_steps.padded_statistics)
    found = disagreements(wrong, expected_run("resnet", "partial"), KINKED)
    assert {*found} >= LEARNED | {"statistics"}
