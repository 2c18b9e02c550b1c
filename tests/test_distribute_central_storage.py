"""Variables in host memory: the numbers, where they are, and what devices hold."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax.experimental import topologies  # noqa: TID251
from jax.sharding import NamedSharding, PartitionSpec

import meshlayout as ml
from meshlayout.distribute import (
    CentralStorageStrategy,
    MirroredStrategy,
    OneDeviceStrategy,
    PerReplica,
)
from meshlayout.errors import MeshLayoutError, StrategyError
from tests.error_messages import message_of


OLD = jax.__version_info__ < (0, 8)
WIDTH = 64  # kernels of two blocks, (2, 64, 128), are large enough to be stored once

needs_host_memory = pytest.mark.skipif(OLD, reason="jax 0.7 has none on CPUs")


class Block(nnx.Module):
    def __init__(self, width, rngs, dtype=None):
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.inner = nnx.Linear(width, 2 * width, dtype=dtype, rngs=rngs)
        self.outer = nnx.Linear(2 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return x + self.outer(nnx.relu(self.inner(self.norm(x))))


class Scanned(nnx.Module):
    """Blocks with stacked variables, called in a scan."""

    def __init__(self, rngs, length=2, width=WIDTH, dtype=None, remat=False):
        @nnx.split_rngs(splits=length)
        @nnx.vmap
        def stack(rngs):
            return Block(width, rngs, dtype)

        self.blocks = stack(rngs)
        self.head = nnx.Linear(width, 3, rngs=rngs)
        self.remat = remat

    def __call__(self, x):
        def call(x, block):
            return block(x)

        body = nnx.remat(call) if self.remat else call
        x = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        return self.head(x)


class Listed(nnx.Module):
    """Blocks one after another, each with its own variables."""

    def __init__(self, rngs):
        self.first, self.second = Block(WIDTH, rngs), Block(WIDTH, rngs)
        self.head = nnx.Linear(WIDTH, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.second(self.first(x)))


class Stacked(nnx.Module):
    """Stacked arrays in a plain `jax.lax.scan`, normalized before it."""

    def __init__(self, rngs):
        shape = (2, WIDTH, 2 * WIDTH)
        self.first = nnx.Param(jax.random.normal(rngs.params(), shape))
        self.second = nnx.Param(0.1 * jax.random.normal(rngs.params(), shape))
        self.head = nnx.Linear(WIDTH, 3, rngs=rngs)

    def __call__(self, x):
        norm = jnp.sqrt(jnp.sum(self.first[...] ** 2, (1, 2), keepdims=True))

        def call(x, kernels):
            return x + jnp.tanh(x @ kernels[0]) @ kernels[1].T, None

        x, _ = jax.lax.scan(call, x, (self.first[...] / norm, self.second[...]))
        return self.head(x)


def batches(strategy, rows=8, width=WIDTH, steps=3):
    for seed in range(steps):
        x = np.random.default_rng(seed).normal(size=(rows, width)).astype("float32")
        if strategy.num_replicas_in_sync == 1:
            yield x
        else:
            parts = iter(np.split(x, strategy.num_replicas_in_sync))
            yield strategy.distribute_values_from_function(lambda _, p=parts: next(p))


def train_step(model, optimizer, x):
    def loss_fn(model):
        losses = ((model(x) - jnp.tanh(x[:, :3])) ** 2).mean(axis=-1)
        return ml.losses.compute_average_loss(losses.astype("float32"))

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def train(strategy, build, optimizer):
    """Returns the losses, the model and the optimizer after some steps."""
    with strategy.scope():
        model = build(nnx.Rngs(0))
        state = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    losses = [
        strategy.reduce("SUM", strategy.run(train_step, (model, state, x)), axis=None)
        for x in batches(strategy)
    ]
    return np.array(losses), model, state


def on_host(*objects):
    """Returns all arrays of rank 1 or more, by path."""
    flat = nnx.to_flat_state(nnx.state(objects))
    arrays = {"/".join(map(str, path)): value[...] for path, value in flat}
    return {path: x for path, x in arrays.items() if x.ndim}


# Updates by Adam are of 1e-2; sums in another order differ in 1e-6 of the gradients.
def check_same(strategy, reference, build, optimizer, atol=1e-5):
    losses, *objects = train(strategy, build, optimizer)
    other_losses, *others = train(reference, build, optimizer)
    np.testing.assert_allclose(losses, other_losses, rtol=1e-5)
    expected = on_host(*others)
    for path, x in on_host(*objects).items():
        np.testing.assert_allclose(x, expected[path], atol=atol, err_msg=path)
        assert x.sharding.memory_kind == "pinned_host", path


ADAM = optax.adam(1e-2)
CLIPPED = optax.chain(
    optax.clip_by_global_norm(0.1),
    optax.adamw(optax.cosine_decay_schedule(1e-2, 10), weight_decay=0.1),
)


@needs_host_memory
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_training_from_host_memory_gives_the_numbers_of_one_device(replicas):
    strategy = CentralStorageStrategy(jax.devices()[:replicas])
    check_same(strategy, OneDeviceStrategy("CPU:0"), Scanned, CLIPPED)


@needs_host_memory
@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "optimizer"),
    [
        (Stacked, ADAM),
        (Listed, ADAM),
        (lambda rngs: Scanned(rngs, remat=True), ADAM),
        (lambda rngs: Scanned(rngs, dtype=jnp.bfloat16), CLIPPED),
        (Scanned, optax.MultiSteps(ADAM, 2)),
        (Scanned, optax.lamb(1e-2)),
        (Scanned, optax.sgd(0.1, momentum=0.9, nesterov=True)),
    ],
)
def test_training_from_host_memory_gives_the_numbers_of_mirrored_variables(
    build, optimizer
):
    devices = jax.devices()[:2]
    # Of bfloat16, a sum in another order may differ in its last bit of eight.
    atol = 2e-2 if build not in (Stacked, Listed, Scanned) else 1e-5
    check_same(
        CentralStorageStrategy(devices),
        MirroredStrategy(devices),
        build,
        optimizer,
        atol,
    )


@needs_host_memory
def test_large_variables_are_stored_once_for_all_devices():
    strategy = CentralStorageStrategy(jax.devices()[:4])
    with strategy.scope():
        model = Scanned(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    num_copies = {
        path: sum(shard.data.nbytes for shard in x.addressable_shards) / x.nbytes
        for path, x in on_host(model, optimizer).items()
    }
    large = {path for path, count in num_copies.items() if count == 1}
    kernels = {path for path in num_copies if "er/kernel" in path}  # inner and outer
    assert large == kernels
    assert len(large) == 6
    assert {count for path, count in num_copies.items() if path not in large} == {4}


@needs_host_memory
def test_variables_are_moved_to_host_memory_one_by_one_as_they_are_created():
    strategy = CentralStorageStrategy(jax.devices()[:1])
    memory = ml.describe(
        lambda: [jnp.full((64, 256), float(i)) for i in range(8)], strategy.layouts
    ).memory()
    assert memory.state_bytes == 8 * 2**16
    assert memory.peak_bytes < 2 * 2**16


@needs_host_memory
def test_the_report_tells_scanned_variables_from_those_held_whole():
    strategy = CentralStorageStrategy(jax.devices()[:2])
    model = nnx.eval_shape(lambda: Scanned(nnx.Rngs(0)))
    optimizer = nnx.eval_shape(lambda: nnx.Optimizer(model, CLIPPED, wrt=nnx.Param))
    (x,) = batches(strategy, steps=1)
    report = strategy.memory(train_step, args=(model, optimizer, x))
    held = {variable.path: variable.held for variable in report.variables}
    sliced = {path for path, what in held.items() if what == "one slice"}
    assert sliced == {path for path in held if "blocks" in path}
    assert {held[path] for path in held.keys() - sliced} == {"all"}
    reasons = {variable.path: variable.reason for variable in report.variables}
    assert reasons["model/head/kernel"].startswith("dot_general at linear.py")
    assert report.gradients == ()
    num_elements = 3 * 2 * (2 * WIDTH * 2 * WIDTH + 5 * WIDTH)  # with Adam's moments
    assert report.sliced_bytes == 4 * num_elements
    lines = repr(report).splitlines()
    row = next(line for line in lines if line.startswith("model/blocks/inner/kernel"))
    assert " ".join(row.split()) == (
        "model/blocks/inner/kernel f32[2, 64, 128] pinned_host x 1 one slice"
    )
    assert "a device holds one slice at a time of 391.5 KiB of variables" in repr(
        report
    )
    assert message_of(strategy.run, train_step, (model, optimizer, x)) == (
        "run: the variable model/blocks/inner/bias has a shape and no values, as "
        "nnx.eval_shape makes it. That is enough to look at a program, not to run it: "
        "create the object in the strategy's scope."
    )


@needs_host_memory
@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (lambda kernel, x: x @ kernel[0] @ kernel[1], "slice at"),
        (lambda kernel, x: _scan(jnp.cumsum(kernel, 0), x), "cumsum at"),
        (lambda kernel, x: _scan(kernel, x) + kernel.mean(0), "reduce_sum at"),
    ],
)
def test_what_needs_all_slices_is_named_in_the_report(use, reason):
    strategy = CentralStorageStrategy(jax.devices()[:2])
    x = jnp.ones((WIDTH, WIDTH))
    with strategy.scope():
        kernel = nnx.Param(jnp.ones((2, WIDTH, WIDTH)))
    report = strategy.memory(lambda: use(kernel[...], x))
    (variable,) = report.variables
    assert variable.held == "all"
    assert variable.reason.startswith(reason)
    result = strategy.run(lambda: use(kernel[...], x))
    expected = use(jnp.ones((2, WIDTH, WIDTH)), x)
    np.testing.assert_allclose(result.values[1], expected, rtol=1e-6)


def _scan(kernels, x):
    return jax.lax.scan(lambda x, kernel: (x @ kernel, None), x, kernels)[0]


@pytest.mark.slow
@needs_host_memory
def test_variables_that_a_function_only_reads_stay_in_host_memory():
    strategy = CentralStorageStrategy(jax.devices()[:2])
    with strategy.scope():
        model = Scanned(nnx.Rngs(0))
    before = on_host(model)
    (x,) = batches(strategy, steps=1)
    y = strategy.gather(strategy.run(lambda x: model(x), args=(x,)), axis=0)
    after = on_host(model)
    assert all(after[path] is array for path, array in before.items())
    reference = Scanned(nnx.Rngs(0))
    expected = reference(strategy.gather(x, axis=0))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@needs_host_memory
def test_arrays_in_host_memory_can_be_passed_as_arguments():
    strategy = CentralStorageStrategy(jax.devices()[:2])
    x = np.ones((2, WIDTH), "float32")
    with strategy.scope():
        variables = nn.Dense(512).init(jax.random.key(0), x)
    kernel = variables["params"]["kernel"]
    assert kernel.sharding.memory_kind == "pinned_host"
    result = strategy.run(nn.Dense(512).apply, args=(variables, x))
    np.testing.assert_allclose(result.values[1], x @ np.asarray(kernel), rtol=1e-5)


@needs_host_memory
def test_replicas_drop_different_features_in_scanned_blocks():
    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def stack(rngs):
        return nnx.Dropout(0.5, rngs=rngs)

    strategy = CentralStorageStrategy(jax.devices()[:2])
    with strategy.scope():
        layers = stack(nnx.Rngs(0))

    def call():
        scan = nnx.scan(
            lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        return scan(jnp.ones(256), layers)

    first, second = (strategy.run(call) for _ in range(2))
    different = [*first.values, *second.values]
    assert len({np.asarray(x).tobytes() for x in different}) == 4


@needs_host_memory
def test_variables_of_other_strategies_are_refused():
    devices = jax.devices()[:2]
    strategy, mirrored = CentralStorageStrategy(devices), MirroredStrategy(devices)
    with mirrored.scope():
        layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    assert message_of(strategy.run, lambda: layer.bias[...]) == (
        "the variable layer/bias is on Layout([unsharded], Mesh(batch=2)), and "
        "CentralStorageStrategy(2 replicas) needs it on Layout([unsharded], "
        "Mesh(batch=2), memory_kind='pinned_host'). Create it in this strategy's scope."
    )
    with strategy.scope():
        layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with pytest.raises(StrategyError, match="the variable layer/bias is on"):
        mirrored.run(lambda: layer.bias[...])


def test_devices_without_host_memory_are_refused(monkeypatch):
    kinds = lambda device: (("device",), "device")  # noqa: E731
    monkeypatch.setattr("meshlayout._jax.memory_kinds", kinds)
    assert message_of(CentralStorageStrategy) == (
        "CentralStorageStrategy keeps variables in pinned_host memory, which programs "
        f"on CPU devices cannot use with jax {jax.__version__} (memories: device). Use "
        "MirroredStrategy."
    )


@pytest.mark.parametrize("devices", [float("nan"), -1, 0, "x", object(), [], [None]])
def test_what_is_not_a_list_of_devices_is_refused(devices):
    with pytest.raises(MeshLayoutError):
        CentralStorageStrategy(devices)


@needs_host_memory
@pytest.mark.parametrize("fn", [None, float("nan"), -1, 0, "x", object()])
def test_memory_refuses_what_is_not_a_function(fn):
    with pytest.raises(StrategyError, match="fn must be a function"):
        CentralStorageStrategy(jax.devices()[:1]).memory(fn)


class Mixed(nnx.Module):
    """Stacked variables of all ranks, of which a TPU cannot move slices of some."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (2, 256, 256)))
        self.bias = nnx.Param(jnp.zeros((2, 256), "bfloat16"))
        self.shift = nnx.Param(jnp.zeros((2, 256)))
        self.scale = nnx.Param(jnp.ones(2))

    def __call__(self, x):
        def call(x, variables):
            kernel, bias, shift, scale = variables
            return x + scale * jnp.tanh(x @ kernel + (bias + shift)[None]), None

        stacks = (self.kernel, self.bias, self.shift, self.scale)
        return jax.lax.scan(call, x, tuple(stack[...] for stack in stacks))[0][:, :3]


def _tpu_report(build, width):
    """Returns the report of a training step on four chips of a TPU."""
    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    strategy = CentralStorageStrategy(chips.devices)
    model = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    optimizer = nnx.eval_shape(lambda: nnx.Optimizer(model, CLIPPED, wrt=nnx.Param))
    rows = NamedSharding(strategy.mesh.jax_mesh, PartitionSpec("batch"))
    x = jax.ShapeDtypeStruct((4 * 32, width), "float32", sharding=rows)
    args = (model, optimizer, PerReplica(x, num_replicas=4))
    return strategy.memory(train_step, args=args)


@pytest.mark.slow
def test_a_tpu_never_holds_the_scanned_variables():
    pytest.importorskip("libtpu")
    short, long = (
        _tpu_report(lambda rngs: Scanned(rngs, length, 1024, jnp.bfloat16), 1024)  # noqa: B023
        for length in (4, 16)
    )
    nbytes = short.sliced_bytes
    assert long.sliced_bytes == 4 * nbytes
    assert nbytes > 190 * 2**20
    peaks = [x.memory.argument_bytes + x.memory.temporary_bytes for x in (short, long)]
    # One layer's parameter, gradient and moments, in float32, are a quarter of `short`.
    assert peaks[0] < nbytes / 3
    # More layers add their activations: of 32 rows, 2 * 1024 to 4 * 1024 features.
    assert peaks[1] - peaks[0] < 12 * 32 * 16 * 1024
    # Each chip's part of the host has a quarter of everything, and of gradients.
    assert long.memory.host_bytes < 1.01 * long.sliced_bytes / 4


@pytest.mark.slow
def test_what_a_tpu_cannot_slice_is_held_whole():
    pytest.importorskip("libtpu")
    report = _tpu_report(Mixed, 256)
    held = {variable.path: variable.held for variable in report.variables}
    assert held["model/kernel"] == held["model/shift"] == "one slice"
    assert held["model/bias"] == held["model/scale"] == "all"
