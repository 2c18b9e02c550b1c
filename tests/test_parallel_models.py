"""The ready-made rules on every example model: one device's numbers, the least sent.

The models are those of `models/`, in NNX, in Linen and in JAX alone. What a step sends
is read off the program that the compiler made: for CPU devices, and for a slice of
eight TPU v5e chips, which nobody needs to have.
"""

import dataclasses
import functools
from collections import Counter
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
    """A model, what it is trained on, and how.

    Attributes:
        build: Makes an NNX module, or the parameters of a model in JAX alone.
        inputs: The shape and dtype of one example of its inputs.
        module: In Linen: the module.
        call: In JAX alone: the forward pass.
        hand_written: The file with the hand-written layout maps, if there are any.
        rows: Examples in a batch.
    """

    build: Callable[[], Any] = lambda: None
    inputs: tuple[tuple[int, ...], str] = ((28, 28, 1), "float32")
    module: nn.Module | None = None
    call: Callable[..., Any] | None = None
    hand_written: Any = None
    rows: int = ROWS

    @property
    def is_language_model(self) -> bool:
        return self.inputs[1] == "int32"

    def batch(self) -> dict[str, np.ndarray]:
        """A batch in host memory; that of a language model are its tokens alone."""
        shape, dtype = self.inputs
        random = np.random.default_rng(0)
        if self.is_language_model:
            return {"x": random.integers(0, 64, (self.rows, *shape)).astype(dtype)}
        labels = random.integers(0, 10, self.rows).astype("int32")
        return {"x": random.normal(size=(self.rows, *shape)).astype(dtype), "y": labels}

    def loss(self, model: Any, batch: Any, **mode: Any) -> Any:
        logits = model(batch["x"], **mode)
        if self.is_language_model:
            return transformer.next_token_losses(logits, batch["x"]).mean(axis=1)
        if "y" not in batch or logits.ndim < 2:  # a discriminator's
            return optax.sigmoid_binary_cross_entropy(logits, batch["y"] > 4)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

    def tensor_parallel(self, mesh: ml.Mesh) -> ml.LayoutMap:
        inputs = jax.ShapeDtypeStruct((self.rows, *self.inputs[0]), self.inputs[1])
        model = self.build if self.module is None else self.module
        return ml.parallel.tensor_parallel(mesh, model, inputs, call=self.call)

    def describe(self, layouts: ml.LayoutMap) -> Any:
        """Describes the state that a step of the model takes."""
        if self.call is not None:

            def build() -> Any:
                params = self.build()
                return {"params": params, "opt_state": OPTIMIZER.init(params)}

            return ml.describe(build, layouts)
        build, module = self.build, self.module
        if module is not None:
            sample = jnp.zeros((1, *self.inputs[0]), self.inputs[1])
            build = lambda: module.init(jax.random.key(0), sample)
        return ml.TrainState.describe(build, OPTIMIZER, layouts, module=module)

    def step(self, activations: ml.LayoutMap | None = None) -> Any:
        """Returns a compiled train step."""
        if self.call is None:
            return ml.make_train_step(self._flax_loss(), layouts=activations)
        call = self.call

        def step(state: Any, batch: Any) -> Any:
            def mean_loss(params: Any) -> Any:
                return self.loss(functools.partial(call, params), batch).mean()

            loss, grads = jax.value_and_grad(mean_loss)(state["params"])
            updates, opt_state = OPTIMIZER.update(grads, state["opt_state"])
            params = optax.apply_updates(state["params"], updates)
            return {"params": params, "opt_state": opt_state}, {"loss": loss}

        return ml.compile_step(step, layouts=activations)

    def _flax_loss(self) -> Callable[..., Any]:
        if isinstance(self.module, resnet.LinenResNet):
            return lambda model, batch, train: self.loss(model, batch, train=train)
        return lambda model, batch: self.loss(model, batch)


TOKENS = ((LENGTH,), "int32")
MODELS = {
    "mlp, nnx": Model(lambda: mlp.MLP(rngs=nnx.Rngs(0)), hand_written=mlp),
    "mlp, linen": Model(module=mlp.LinenMLP(), hand_written=mlp),
    "convnet, nnx": Model(
        lambda: convnet.ConvNet(rngs=nnx.Rngs(0)), hand_written=convnet
    ),
    "convnet, linen": Model(module=convnet.LinenConvNet(), hand_written=convnet),
    "resnet, nnx": Model(
        lambda: resnet.ResNet(width=8, rngs=nnx.Rngs(0)),
        ((8, 8, 1), "float32"),
        hand_written=resnet,
    ),
    "resnet, linen": Model(
        inputs=((8, 8, 1), "float32"),
        module=resnet.LinenResNet(width=8),
        hand_written=resnet,
    ),
    "transformer, nnx": Model(
        lambda: transformer.Transformer(TRANSFORMER, rngs=nnx.Rngs(0)),
        TOKENS,
        hand_written=transformer,
    ),
    "transformer, linen": Model(
        inputs=TOKENS,
        module=transformer.LinenTransformer(TRANSFORMER),
        hand_written=transformer,
    ),
    "discriminator, nnx": Model(lambda: gan.Discriminator(rngs=nnx.Rngs(0))),
    "gpt, listed": Model(
        lambda: gpt.init(GPT, jax.random.key(0)), TOKENS, call=gpt.apply
    ),
    "gpt, scanned": Model(
        lambda: gpt.init(SCANNED, jax.random.key(0)),
        TOKENS,
        call=gpt.apply,
    ),
}

RULES: dict[str, tuple[dict[str, int], Callable[[ml.Mesh, Model], ml.LayoutMap]]] = {
    "data_parallel": (
        {"batch": 8},
        lambda mesh, model: ml.parallel.data_parallel(mesh),
    ),
    "fsdp": (
        {"batch": 8},
        lambda mesh, model: ml.parallel.fsdp(mesh, min_bytes=0),
    ),
    "tensor": (
        {"batch": 2, "model": 4},
        lambda mesh, model: model.tensor_parallel(mesh),
    ),
    "fsdp+tensor": (
        {"batch": 4, "model": 2},
        lambda mesh, model: ml.parallel.compose(
            model.tensor_parallel(mesh), ml.parallel.fsdp(mesh, min_bytes=0)
        ),
    ),
}
HAND_WRITTEN = {
    "data_parallel": "DATA_PARALLEL",
    "fsdp": "FSDP",
    "tensor": "MODEL_PARALLEL",
    "fsdp+tensor": "FSDP_MODEL_PARALLEL",
}
QUICK = [("mlp, nnx", "fsdp+tensor"), ("mlp, linen", "tensor")]
FSDP_SOON = [
    pytest.param(rule, marks=[pytest.mark.slow] * ("fsdp" not in rule))
    for rule in RULES
]
EVERY = [
    pytest.param(name, rule, marks=[pytest.mark.slow] * ((name, rule) not in QUICK))
    for name in MODELS
    for rule in RULES
]


@pytest.mark.parametrize(("name", "rule"), EVERY)
def test_a_step_on_a_mesh_computes_what_it_does_on_one_device(name, rule):
    model = MODELS[name]
    axes, layouts_of = RULES[rule]
    mesh = ml.create_mesh(axes)
    state = model.describe(layouts_of(mesh, model)).create()
    batch = ml.relayout(model.batch(), mesh.layout("batch", ...))
    report = ml.testing.verify(model.step(), state, batch)
    assert any("loss" in leaf.path for leaf in report.differences)


# What the rules are.


LAYERED = ("mlp, nnx", "transformer, nnx", "gpt, scanned")


@pytest.mark.parametrize("rule", FSDP_SOON)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in LAYERED))
        for name in MODELS
        if name.endswith(("nnx", "scanned"))
    ],
)
def test_the_code_of_a_rule_gives_the_same_layouts(name, rule):
    model = MODELS[name]
    axes, layouts_of = RULES[rule]
    mesh = ml.create_mesh(axes)
    layouts = layouts_of(mesh, model)
    state = model.describe(layouts).abstract
    code = layouts.to_code(state)
    again = eval(code, {"ml": ml, "mesh": mesh})
    expected = {leaf.path: leaf.layout for leaf in layouts.resolve(state).resolutions}
    found = {leaf.path: leaf.layout for leaf in again.resolve(state).resolutions}
    assert found == expected
    again.resolve(state).check_lock(layouts.resolve(state).to_lock())


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rule, marks=[pytest.mark.slow] * (rule != "fsdp+tensor"))
        for rule in RULES
    ],
)
@pytest.mark.parametrize(
    "name", ["gpt, listed", pytest.param("transformer, nnx", marks=pytest.mark.slow)]
)
def test_the_code_is_as_long_for_many_layers_as_for_few(name, rule):
    axes, layouts_of = RULES[rule]
    mesh = ml.create_mesh(axes)
    codes = []
    for num_layers in (2, 11):
        model = with_layers(name, num_layers)
        layouts = layouts_of(mesh, model)
        codes.append(layouts.to_code(model.describe(layouts).abstract))
    assert codes[0] == codes[1]


@pytest.mark.parametrize("name", ["transformer, linen", "resnet, nnx", "gpt, scanned"])
@pytest.mark.parametrize("rule", FSDP_SOON)
def test_optimizer_state_follows_its_parameters(name, rule):
    model = MODELS[name]
    axes, layouts_of = RULES[rule]
    state = model.describe(layouts_of(ml.create_mesh(axes), model)).abstract
    is_dict = isinstance(state, dict)
    params = state["params"] if is_dict else state.params
    adam = (state["opt_state"] if is_dict else state.opt_state)[0]
    for moments in (adam.mu, adam.nu):
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(moments), strict=True)
        assert all(param.sharding == moment.sharding for param, moment in pairs)


# What is sent.


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


def sent_by(name: str, rule: str, mesh: ml.Mesh | None = None) -> Any:
    """Returns what a step of a model in the table sends under a ready-made rule."""
    axes, layouts_of = RULES[rule]
    mesh = mesh or ml.create_mesh(axes)
    return sent(MODELS[name], layouts_of(mesh, MODELS[name]))


def kinds(communication: Any) -> dict[str, int]:
    """Counts collectives by kind."""
    return {kind: count for kind, count in communication.items() if count}


def num_bytes(model: Model) -> int:
    """Returns the bytes of a model's parameters, whole and in float32."""
    layouts = ml.parallel.data_parallel(ml.create_mesh({"batch": 8}))
    state = model.describe(layouts).abstract
    params = state["params"] if isinstance(state, dict) else state.params
    return sum(FLOAT * x.size for x in jax.tree.leaves(params))


@pytest.mark.parametrize(
    "name",
    [
        "mlp, nnx",
        pytest.param("convnet, linen", marks=pytest.mark.slow),
        pytest.param("transformer, linen", marks=pytest.mark.slow),
        pytest.param("gpt, listed", marks=pytest.mark.slow),
        pytest.param("gpt, scanned", marks=pytest.mark.slow),
    ],
)
def test_data_parallel_sends_its_gradients_once(name):
    mesh = ml.create_mesh({"batch": 8})
    found = sent_by(name, "data_parallel", mesh)
    assert set(kinds(found)) == {"all_reduce"}
    # Layers in a loop are added layer by layer, and all others at the end.
    assert bool(found.in_loops.collectives) == (name == "gpt, scanned")
    # With the loss, and a few numbers that the step counts.
    in_all = sum(one.nbytes * one.times for one in found.collectives)
    assert 0 < in_all - num_bytes(MODELS[name]) <= 8 * FLOAT


def with_layers(name: str, num_layers: int, **sizes: int) -> Model:
    """Returns a language model of the table with other sizes."""
    config = dataclasses.replace(TRANSFORMER, num_layers=num_layers, **sizes)
    listed = dataclasses.replace(GPT, num_layers=num_layers, **sizes)
    scanned = dataclasses.replace(listed, is_scanned=True)
    small = MODELS[name]
    if small.module is not None:
        return dataclasses.replace(small, module=transformer.LinenTransformer(config))
    build = {
        "transformer, nnx": lambda: transformer.Transformer(config, rngs=nnx.Rngs(0)),
        "gpt, listed": lambda: gpt.init(listed, jax.random.key(0)),
        "gpt, scanned": lambda: gpt.init(scanned, jax.random.key(0)),
    }[name]
    return dataclasses.replace(small, build=build)


def large(name: str, num_layers: int = 2) -> Model:
    """Returns a model with batches and matrices of which TPUs scatter the sums."""
    model = MODELS[name]
    if model.is_language_model:
        sizes = {"vocab_size": 512, "features": 128, "mlp_features": 256}
        model = with_layers(name, num_layers, **sizes)
    return dataclasses.replace(model, rows=128)


def runs_over(communication: Any, axis: str) -> Counter[str]:
    """Counts the collectives along an axis, each as often as it runs, by kind."""
    counts: Counter[str] = Counter()
    for one in communication.collectives:
        if axis in one.axes:
            counts[one.kind] += one.times
    return counts


@pytest.mark.slow  # test_tensor_parallel counts them for a block of its own
@pytest.mark.parametrize(
    "name",
    ["gpt, listed", "gpt, scanned", "transformer, nnx", "transformer, linen"],
)
def test_a_tensor_parallel_layer_sends_one_all_reduce_per_half_each_way(name):
    mesh = ml.create_mesh({"batch": 2, "model": 4})
    two, three = (
        runs_over(sent(model, model.tensor_parallel(mesh)), "model")
        for model in (with_layers(name, 2), with_layers(name, 3))
    )
    # Two halves, forward and backward.
    assert three - two == {"all_reduce": 2 * 2}
    assert set(three) == {"all_reduce"}


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("mlp, nnx", "tensor"),
        pytest.param("convnet, nnx", "tensor", marks=pytest.mark.slow),
        pytest.param("resnet, nnx", "tensor", marks=pytest.mark.slow),
        pytest.param("transformer, nnx", "tensor", marks=pytest.mark.slow),
    ],
)
def test_tensor_parallel_sends_no_more_than_a_hand_written_map(name, rule):
    model = MODELS[name]
    mesh = ml.create_mesh(RULES[rule][0])
    by_hand = ml.LayoutMap(mesh, getattr(model.hand_written, HAND_WRITTEN[rule]))
    assert sent_by(name, rule, mesh).wire_bytes <= sent(model, by_hand).wire_bytes


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        # Soon in test_tpu_programs.
        pytest.param("mlp, nnx", "fsdp", marks=pytest.mark.slow),
        pytest.param("convnet, nnx", "fsdp", marks=pytest.mark.slow),
        pytest.param("resnet, nnx", "fsdp", marks=pytest.mark.slow),
        pytest.param("transformer, nnx", "fsdp", marks=pytest.mark.slow),
        pytest.param("transformer, nnx", "fsdp+tensor", marks=pytest.mark.slow),
    ],
)
def test_on_a_tpu_slice_fsdp_sends_no_more_than_a_hand_written_map(name, rule):
    pytest.importorskip("libtpu")
    model = large(name)
    mesh = create_slice_mesh(**RULES[rule][0])
    layouts = ml.parallel.fsdp(mesh)
    if rule == "fsdp+tensor":
        layouts = ml.parallel.compose(model.tensor_parallel(mesh), layouts)
    by_hand = ml.LayoutMap(mesh, getattr(model.hand_written, HAND_WRITTEN[rule]))
    assert sent(model, layouts).wire_bytes <= sent(model, by_hand).wire_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt, listed", "transformer, linen"])
def test_on_a_tpu_slice_fsdp_sends_each_layers_weights_three_times_at_most(name):
    """Gathers them forward and backward, and scatters the sums of their gradients."""
    pytest.importorskip("libtpu")
    assert_weights_are_sent_three_times(
        name, ml.parallel.fsdp(create_slice_mesh(batch=8))
    )


@pytest.mark.slow
def test_scanned_layers_do_so_where_what_the_loop_carries_is_constrained(monkeypatch):
    """Else XLA shards it as the weights' features, and moves every activation."""
    pytest.importorskip("libtpu")
    apply_layer = gpt.apply_layer

    def constrained(params, x):
        x = apply_layer(params, ml.constrain(x, "residual"))
        return ml.constrain(x, "residual")

    monkeypatch.setattr(gpt, "apply_layer", constrained)
    mesh = create_slice_mesh(batch=8)
    activations = ml.LayoutMap(mesh, {"residual": ("batch", ...)})
    assert_weights_are_sent_three_times(
        "gpt, scanned", ml.parallel.fsdp(mesh), activations
    )


def assert_weights_are_sent_three_times(
    name: str, layouts: ml.LayoutMap, activations: ml.LayoutMap | None = None
) -> None:
    two, three = (sent(large(name, n), layouts, activations) for n in (2, 3))
    weights = num_bytes(large(name, 3)) - num_bytes(large(name, 2))
    assert three.wire_bytes - two.wire_bytes <= 3 * 7 / 8 * weights
    assert three["reduce_scatter"]
    assert not three["all_to_all"]
    gathers = [one for one in three.collectives if one.kind == "all_gather"]
    assert any(one.is_async for one in gathers)
