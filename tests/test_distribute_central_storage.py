"""Variables in host memory: the numbers, where they are, and what devices hold."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax.experimental import topologies  # noqa: TID251
from jax.sharding import NamedSharding, PartitionSpec

import meshlayout as ml
from meshlayout.distribute import CentralStorageStrategy, OneDeviceStrategy, PerReplica
from meshlayout.errors import StrategyError
from tests.error_messages import message_of
from tests.replicas import total


OLD = jax.__version_info__ < (0, 8)
WIDTH = 16

needs_host_memory = pytest.mark.skipif(OLD, reason="jax 0.7 has none on CPUs")


class Blocks(nnx.Module):
    """Moves the parameters of its blocks to the device one after another, or not."""

    def __init__(self, rngs, length=2, width=WIDTH, *, is_streamed=True):
        kernels = 0.1 * jax.random.normal(rngs.params(), (length, width, width))
        self.kernels = nnx.Param(kernels, streamed=is_streamed)
        self.is_streamed = is_streamed

    def __call__(self, x):
        def call(x, kernel):
            if self.is_streamed:
                kernel = jax.device_put(kernel, jax.memory.Space.Device)
            return x + jnp.tanh(x @ kernel), None

        return jax.lax.scan(call, x, self.kernels[...])[0][:, :3]


def train_step(model, optimizer, x):
    def loss_fn(model):
        losses = ((model(x) - jnp.tanh(x[:, :3])) ** 2).mean(axis=-1)
        return ml.losses.compute_average_loss(losses)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def train(strategy, build, tx):
    """Returns the losses, and the model and optimizer after some steps."""
    with strategy.scope():
        model = build(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    x = np.random.default_rng(0).normal(size=(24, WIDTH)).astype("float32")
    losses = [
        total(strategy, strategy.run(train_step, (model, optimizer, rows)))
        for rows in strategy.distribute_dataset(x, 8)
    ]
    return losses, model, optimizer


@needs_host_memory
@pytest.mark.parametrize(
    ("is_streamed", "tx"), [(True, optax.adam(1e-2)), (False, optax.adafactor(1e-2))]
)
def test_training_from_host_memory_gives_the_numbers_of_one_device(is_streamed, tx):
    build = functools.partial(Blocks, is_streamed=is_streamed)
    strategy = CentralStorageStrategy(jax.devices()[:2])
    losses, model, optimizer = train(strategy, build, tx)
    expected, other, _ = train(OneDeviceStrategy("CPU:0"), build, tx)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    leaves = jax.tree.leaves(nnx.state((model, optimizer)))
    assert {x.sharding.memory_kind for x in leaves if x.ndim} == {"pinned_host"}
    # Outside of run it is called as any model; what is only read stays where it is.
    rows = jnp.ones((2, WIDTH))
    if not is_streamed:
        np.testing.assert_allclose(model(rows), other(rows), atol=1e-4)
    predicted = strategy.run(lambda: model(rows))
    np.testing.assert_allclose(predicted, other(rows), atol=1e-4)
    after = jax.tree.leaves(nnx.state((model, optimizer)))
    assert all(a is b for a, b in zip(leaves, after, strict=True))


@needs_host_memory
def test_arrays_in_host_memory_can_be_passed_as_arguments():
    strategy = CentralStorageStrategy(jax.devices()[:2])
    x = np.ones((2, WIDTH), "float32")
    with strategy.scope():
        variables = nn.Dense(512).init(jax.random.key(0), x)
    kernel = variables["params"]["kernel"]
    assert kernel.sharding.memory_kind == "pinned_host"
    result = strategy.run(nn.Dense(512).apply, args=(variables, x))
    np.testing.assert_allclose(result, x @ np.asarray(kernel), rtol=1e-5)


def test_devices_without_host_memory_are_refused(monkeypatch):
    kinds = lambda device: (("device",), "device")
    monkeypatch.setattr("meshlayout._jax.memory_kinds", kinds)
    assert message_of(CentralStorageStrategy, error=StrategyError) == (
        "CentralStorageStrategy keeps variables in pinned_host memory, which programs "
        f"on CPU devices cannot use with jax {jax.__version__}: it needs jax 0.8 or "
        "newer. Use MirroredStrategy."
    )


def device_bytes(fn, *, is_streamed, length=16):
    """Returns the bytes of arguments and temporaries on each of four chips of a TPU."""
    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    strategy = CentralStorageStrategy(chips.devices)

    def build():
        model = Blocks(nnx.Rngs(0), length, 1024, is_streamed=is_streamed)
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    rows = NamedSharding(strategy.mesh.jax_mesh, PartitionSpec("batch"))
    x = jax.ShapeDtypeStruct((4 * 32, 1024), "float32", sharding=rows)
    args = (*nnx.eval_shape(build), PerReplica(x, num_replicas=4))
    step, inputs = strategy._compiled_for(fn, args)
    memory = step.memory(*inputs)
    return memory.argument_bytes + memory.temporary_bytes


@pytest.mark.slow
@pytest.mark.skipif(OLD, reason="jax 0.7 warns that it cannot cache these programs")
def test_a_model_that_streams_its_blocks_never_has_all_of_them_on_a_tpu():
    pytest.importorskip("libtpu")
    layer = 1024 * 1024 * 4

    def predict(model, optimizer, x):
        return model(x)

    assert device_bytes(predict, is_streamed=False) > 16 * layer
    # Two layers: one that is used, and one that is on its way.
    assert device_bytes(predict, is_streamed=True) < 4 * layer
    # A train step has gradients and new parameters there, and no copy for its passes.
    whole = device_bytes(train_step, is_streamed=False)
    assert device_bytes(train_step, is_streamed=True) < whole - 15 * layer
