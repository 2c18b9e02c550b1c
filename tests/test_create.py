"""States born sharded: the same bits as without a mesh, and never whole on a device."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from meshlayout.state.operations import Operations
from models.convnet import ConvNet, LinenConvNet
from models.mlp import MLP, LinenMLP
from tests.same_bits import assert_same_bits


MESHES = {
    "8": lambda: ml.create_mesh({"model": 8}),
    "2x4": lambda: ml.create_mesh({"batch": 2, "model": 4}),
    "2x2x2": lambda: ml.create_mesh({"batch": 2, "fsdp": 2, "model": 2}),
    "1": lambda: ml.create_mesh({"model": 1}, devices=jax.devices()[3:4]),
    "last 4": lambda: ml.create_mesh(
        {"batch": 2, "model": 2}, devices=jax.devices()[4:]
    ),
}


@pytest.fixture(params=list(MESHES))
def mesh(request):
    return MESHES[request.param]()


def first_dim(path, shape, dtype):
    return ("model", *[None] * (len(shape) - 1)) if shape else None


def last_dim(path, shape, dtype):
    return (..., "model") if shape else None


def every_axis_on_the_last_dim(mesh):
    return lambda path, shape, dtype: (..., mesh.axis_names) if shape else None


def every_axis_on_the_first_dim(mesh):
    return lambda path, shape, dtype: (mesh.axis_names, ...) if shape else None


def maps(mesh):
    """Layout maps of all kinds; what does not divide stays whole."""
    rules = {
        "replicated": {},
        "first": {".*": first_dim},
        "last": {".*": last_dim},
        "all on the last": {".*": every_axis_on_the_last_dim(mesh)},
        "all on the first": {".*": every_axis_on_the_first_dim(mesh)},
    }
    return {
        name: ml.LayoutMap(mesh, rule, on_uneven="replicate")
        for name, rule in rules.items()
    }


class Block(nnx.Module):
    def __init__(self, features, *, rngs):
        self.norm = nnx.LayerNorm(features, rngs=rngs)
        self.dense = nnx.Linear(features, features, rngs=rngs)

    def __call__(self, x):
        return x + self.dense(self.norm(x))


class Everything(nnx.Module):
    """Most layers that NNX has, a list of blocks, tied parameters, other attributes."""

    def __init__(self, *, rngs):
        self.embed = nnx.Embed(64, 32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=4, in_features=32, decode=False, rngs=rngs
        )
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.lora = nnx.LoRA(32, 4, 32, rngs=rngs)
        self.blocks = nnx.List([Block(32, rngs=rngs) for _ in range(3)])
        self.tied = self.blocks[0].dense.kernel
        self.lstm = nnx.LSTMCell(32, 16, rngs=rngs)
        self.name = "everything"
        self.sizes = (1, 2, 3)


class Expressions(nnx.Module):
    """Parameters that a compiler would like to fuse."""

    def __init__(self, *, rngs):
        a = jax.random.normal(rngs.params(), (64, 48))
        b = jax.random.uniform(rngs.params(), (64, 48), minval=-3.0)
        self.fused = nnx.Param(a * b + 0.1)
        self.chained = nnx.Param((a * 1.7 + b) * 0.3 - a / 3.0)
        self.sin = nnx.Param(jnp.sin(a) * jnp.exp(b) / jnp.sqrt(48.0))
        self.shuffled = nnx.Param(jax.random.permutation(rngs.params(), a))
        self.sum = nnx.Param(a.sum(axis=0))
        self.product = nnx.Param(a @ b.T)
        self.mean = nnx.Param((a - a.mean(0, keepdims=True)) / a.std())
        self.orthogonal = nnx.Param(
            jax.nn.initializers.orthogonal()(rngs.params(), (64, 32))
        )
        self.truncated = nnx.Param(
            jax.nn.initializers.truncated_normal(0.02)(rngs.params(), (32, 64))
        )
        self.he = nnx.Param(jax.nn.initializers.he_normal()(rngs.params(), (128, 64)))
        self.categorical = nnx.Variable(
            jax.random.categorical(rngs.params(), a, axis=-1)
        )
        self.bernoulli = nnx.Variable(jax.random.bernoulli(rngs.params(), 0.3, (64,)))
        self.cumulative = nnx.Variable(jnp.cumsum(a, axis=0))
        self.sorted = nnx.Variable(jnp.sort(a, axis=0))
        self.angles = nnx.Variable(
            jnp.outer(jnp.arange(64), 1.0 / 10000 ** (jnp.arange(0, 32, 2) / 32))
        )
        self.mask = nnx.Variable(jnp.tril(jnp.ones((64, 64), bool)))
        self.table = nnx.Variable(jnp.linspace(-1, 1, 64)[jnp.arange(64) % 7])


class Stacked(nnx.Module):
    def __init__(self, *, rngs):
        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return Block(16, rngs=rngs)

        self.layers = make(rngs)

        @nnx.split_rngs(splits=8)
        @nnx.scan(in_axes=(0,), out_axes=0)
        def more(rngs):
            return Block(16, rngs=rngs)

        self.scanned = more(rngs)


class LinenEverything(nn.Module):
    """Linen layers with other collections, automatic names and a scanned block."""

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return nn.Dense(16)(nn.LayerNorm()(x)), None

        x = nn.Dense(16)(x)
        x = nn.BatchNorm(use_running_average=False)(x)
        x, _ = nn.scan(
            Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=4,
        )()(x, None)
        self.variable("cache", "seen", lambda: jnp.zeros((8,), jnp.int32))
        return nn.Dense(8, kernel_init=nn.initializers.orthogonal())(x)


def pytree():
    key = jax.random.key(3)
    return {
        "key": key,
        "keys": jax.random.split(key, 8),
        "legacy": jax.random.PRNGKey(3),
        "rbg": jax.random.key(1, impl="rbg"),
        "half": jax.random.normal(key, (16, 8)).astype(jnp.bfloat16) * 3,
        "numpy": np.arange(48.0).reshape(8, 6),
        "tiny": np.arange(8).astype(ml_dtypes.bfloat16),
        "scalar": np.float32(3.5),
        "int": 3,
        "float": 2.5,
        "bool": True,
        "text": "hello",
        "none": None,
        "nested": [jnp.arange(8), (jnp.ones((0, 8)), jnp.zeros(())), []],
        "complex": jnp.ones((8,)) * 1j,
        "small": jnp.arange(16, dtype=jnp.uint8),
    }


def optimiser_state():
    params = {"a": jax.random.normal(jax.random.key(0), (16, 24)), "b": jnp.ones(8)}
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1, 9))
    )
    return {"params": params, "opt": optimizer.init(params)}


BUILDERS = {
    "mlp": lambda: MLP(rngs=nnx.Rngs(1)),
    "convnet": lambda: ConvNet(rngs=nnx.Rngs(2)),
    "everything": lambda: Everything(rngs=nnx.Rngs(0)),
    "expressions": lambda: Expressions(rngs=nnx.Rngs(params=5, dropout=7)),
    "stacked": lambda: Stacked(rngs=nnx.Rngs(0)),
    "linen mlp": lambda: LinenMLP().init(jax.random.key(0), jnp.ones((1, 28, 28, 1))),
    "linen convnet": lambda: LinenConvNet().init(
        jax.random.key(0), jnp.ones((1, 28, 28, 1))
    ),
    "linen everything": lambda: LinenEverything().init(
        jax.random.key(4), jnp.ones((2, 4))
    ),
    "pytree": pytree,
    "optimiser": optimiser_state,
    "one array": lambda: jnp.linspace(0.0, 1.0, 64),
    "pair": lambda: (MLP(rngs=nnx.Rngs(1)), {"step": jnp.zeros(()), "n": 3}),
}


@pytest.mark.parametrize("name", list(BUILDERS))
def test_values_are_those_of_building_without_a_mesh(mesh, name):
    expected = BUILDERS[name]()
    for layouts in maps(mesh).values():
        assert_same_bits(ml.create(BUILDERS[name], layouts), expected)
