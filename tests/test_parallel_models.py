"""The ready-made rules on every example model: one device's numbers, the least sent.

The models are those of `models/`, in NNX, in Linen and in JAX alone. What a step sends
is read off the program that the compiler made: for CPU devices, and for a slice of
eight TPU v5e chips, which nobody needs to have.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

import meshlayout as ml
from models import convnet, gan, gpt, mlp, resnet, transformer
from tests.tpu import create_slice_mesh


ROWS = 16
LENGTH = 16
FLOAT = 4  # bytes
TRANSFORMER = transformer.TransformerConfig(
    vocab_size=64,
    max_length=LENGTH,
    features=32,
    num_heads=4,
    num_layers=1,
    mlp_features=64,
)
GPT = gpt.GPTConfig(
    vocab_size=64, features=32, head_features=4, num_layers=1, mlp_features=64
)
SCANNED = dataclasses.replace(GPT, num_layers=2, is_scanned=True)
OPTIMIZER = optax.adam(1e-3)


@dataclass(frozen=True)
class Model:
    """A model, what it is trained on, and how."""

    build: Callable[[], Any] = lambda: None  # an NNX module, or parameters
    inputs: tuple[tuple[int, ...], str] = ((28, 28, 1), "float32")  # of one example
    module: nn.Module | None = None  # in Linen
    call: Callable[..., Any] | None = None  # in JAX alone
    rows: int = ROWS

    def batch(self) -> dict[str, np.ndarray]:
        """A batch in host memory; that of a language model are its tokens alone."""
        shape, dtype = self.inputs
        random = np.random.default_rng(0)
        if dtype == "int32":
            return {"x": random.integers(0, 64, (self.rows, *shape)).astype(dtype)}
        labels = random.integers(0, 10, self.rows).astype("int32")
        return {"x": random.normal(size=(self.rows, *shape)).astype(dtype), "y": labels}

    def loss(self, model: Any, batch: Any) -> Any:
        logits = model(batch["x"])
        if "y" not in batch:
            return transformer.next_token_losses(logits, batch["x"]).mean(axis=1)
        if logits.ndim < 2:  # a discriminator's
            return optax.sigmoid_binary_cross_entropy(logits, batch["y"] > 4)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

    def tensor_parallel(self, mesh: ml.Mesh) -> ml.LayoutMap:
        inputs = jax.ShapeDtypeStruct((self.rows, *self.inputs[0]), self.inputs[1])
        model = self.build if self.module is None else self.module
        return ml.parallel.tensor_parallel(mesh, model, inputs, call=self.call)

    def describe(self, layouts: ml.LayoutMap) -> Any:
        """Describes the state that a step of the model takes."""
        build, module = self.build, self.module
        if self.call is not None:
            params = lambda: {"params": build(), "opt_state": OPTIMIZER.init(build())}
            return ml.describe(params, layouts)
        if module is not None:
            sample = jnp.zeros((1, *self.inputs[0]), self.inputs[1])
            build = lambda: module.init(jax.random.key(0), sample)
        return ml.TrainState.describe(build, OPTIMIZER, layouts, module=module)

    def step(self, activations: ml.LayoutMap | None = None) -> Any:
        """Returns a compiled train step."""
        if self.call is None:
            return ml.make_train_step(self.loss, layouts=activations)
        call = self.call

        def step(state: Any, batch: Any) -> Any:
            def mean_loss(params: Any) -> Any:
                return self.loss(functools.partial(call, params), batch).mean()

            loss, grads = jax.value_and_grad(mean_loss)(state["params"])
            updates, opt_state = OPTIMIZER.update(grads, state["opt_state"])
            params = optax.apply_updates(state["params"], updates)
            return {"params": params, "opt_state": opt_state}, {"loss": loss}

        return ml.compile_step(step, layouts=activations)


TOKENS = ((LENGTH,), "int32")
MODELS = {
    "mlp, nnx": Model(lambda: mlp.MLP(rngs=nnx.Rngs(0))),
    "mlp, linen": Model(module=mlp.LinenMLP()),
    "convnet, nnx": Model(lambda: convnet.ConvNet(rngs=nnx.Rngs(0))),
    "resnet, nnx": Model(
        lambda: resnet.ResNet(width=8, rngs=nnx.Rngs(0)), ((8, 8, 1), "float32")
    ),
    "transformer, nnx": Model(
        lambda: transformer.Transformer(TRANSFORMER, rngs=nnx.Rngs(0)), TOKENS
    ),
    "transformer, linen": Model(
        inputs=TOKENS, module=transformer.LinenTransformer(TRANSFORMER)
    ),
    "discriminator, nnx": Model(lambda: gan.Discriminator(rngs=nnx.Rngs(0))),
    "gpt, listed": Model(
        lambda: gpt.init(GPT, jax.random.key(0)), TOKENS, call=gpt.apply
    ),
    "gpt, scanned": Model(
        lambda: gpt.init(SCANNED, jax.random.key(0)), TOKENS, call=gpt.apply
    ),
}

AXES = {
    "data_parallel": {"batch": 8},
    "fsdp": {"batch": 8},
    "tensor": {"batch": 2, "model": 4},
    "fsdp+tensor": {"batch": 4, "model": 2},
}


def layouts_by(rule: str, model: Model) -> ml.LayoutMap:
    """Returns what a ready-made rule gives for a model."""
    mesh = ml.create_mesh(AXES[rule])
    if rule == "data_parallel":
        return ml.parallel.data_parallel(mesh)
    parts = [model.tensor_parallel(mesh)] if "tensor" in rule else []
    parts += [ml.parallel.fsdp(mesh, min_bytes=0)] if "fsdp" in rule else []
    return ml.parallel.compose(*parts) if len(parts) > 1 else parts[0]


QUICK = [("mlp, nnx", "fsdp+tensor"), ("mlp, linen", "tensor")]
EVERY = [
    pytest.param(name, rule, marks=[pytest.mark.slow] * ((name, rule) not in QUICK))
    for name in MODELS
    for rule in AXES
]


@pytest.mark.parametrize(("name", "rule"), EVERY)
def test_a_step_on_a_mesh_computes_what_it_does_on_one_device(name, rule):
    model = MODELS[name]
    layouts = layouts_by(rule, model)
    state = model.describe(layouts).create()
    batch = ml.relayout(model.batch(), layouts.mesh.layout("batch", ...))
    report = ml.testing.verify(model.step(), state, batch)
    assert any("loss" in leaf.path for leaf in report.differences)


def sent(
    model: Model, layouts: ml.LayoutMap, activations: ml.LayoutMap | None = None
) -> Any:
    """Returns what a step sends, compiled for the mesh of the layouts."""
    layout = layouts.mesh.layout("batch", ...)
    batch = {
        name: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=layout.with_rank(x.ndim).sharding
        )
        for name, x in model.batch().items()
    }
    step = model.step(activations)
    return step.communication(model.describe(layouts).abstract, batch)


def num_bytes(model: Model) -> int:
    """Returns the bytes of a model's parameters, whole and in float32."""
    layouts = ml.parallel.data_parallel(ml.create_mesh({"batch": 8}))
    state = model.describe(layouts).abstract
    params = state["params"] if isinstance(state, dict) else state.params
    return sum(FLOAT * x.size for x in jax.tree.leaves(params))


def large(name: str, num_layers: int) -> Model:
    """Returns a language model with matrices of which TPUs scatter the sums."""
    sizes = {"vocab_size": 512, "features": 128, "mlp_features": 256}
    small = GPT if name == "gpt, listed" else SCANNED
    config = dataclasses.replace(small, num_layers=num_layers, **sizes)
    build = lambda: gpt.init(config, jax.random.key(0))
    return dataclasses.replace(MODELS[name], build=build, rows=128)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt, listed", "gpt, scanned"])
def test_on_a_tpu_slice_fsdp_sends_each_layers_weights_three_times(name, monkeypatch):
    """Gathers them forward and backward, and scatters the sums of their gradients.

    Where nothing constrains what a loop carries, XLA shards it as the weights' features.
    """
    pytest.importorskip("libtpu")
    apply_layer = gpt.apply_layer

    def constrained(params, x):
        return ml.constrain(apply_layer(params, ml.constrain(x, "carry")), "carry")

    mesh = create_slice_mesh(batch=8)
    layouts, activations = ml.parallel.fsdp(mesh), None
    if name == "gpt, scanned":
        monkeypatch.setattr(gpt, "apply_layer", constrained)
        activations = ml.LayoutMap(mesh, {"carry": ("batch", ...)})
    two, three = (sent(large(name, n), layouts, activations) for n in (2, 3))
    weights = num_bytes(large(name, 3)) - num_bytes(large(name, 2))
    assert three.wire_bytes - two.wire_bytes <= 3 * 7 / 8 * weights
    assert three["reduce_scatter"]
    assert not three["all_to_all"]
    gathers = [one for one in three.collectives if one.kind == "all_gather"]
    assert any(one.is_async for one in gathers)
