"""FLOPs, bytes and memory of compiled programs against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from meshlayout.hlo import read_cost


def cost_of(function, *arguments):
    return read_cost(jax.jit(function).trace(*arguments))


def test_a_matrix_multiplication_counts_two_per_product():
    q, k = jnp.ones((2, 8, 4, 16)), jnp.ones((2, 12, 4, 16))
    cost = cost_of(lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), q, k)
    assert (cost.flops, cost.is_exact) == (2 * (2 * 4 * 8 * 12 * 16), True)


@pytest.mark.parametrize(("holes", "groups"), [(1, 1), (1, 4), (2, 1)])
def test_a_convolution_counts_its_windows(holes, groups):
    x, w = jnp.ones((2, 9, 11, 8)), jnp.ones((3, 2, 8 // groups, 12))

    def convolution(x, w):
        return jax.lax.conv_general_dilated(
            *(x, w, (1, 1), ((1, 1), (1, 0))),
            lhs_dilation=(holes, 1),
            feature_group_count=groups,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    outputs = jax.eval_shape(convolution, x, w).size
    products = outputs * 3 * 2 * (8 // groups) // holes
    assert cost_of(convolution, x, w).flops == 2 * products


def test_loops_are_counted_in_full_and_recomputation_twice():
    def loss(ws, x):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jax.lax.scan(layer, x, ws)[0].sum()

    arguments = jnp.ones((6, 64, 64)), jnp.ones((32, 64))
    layers = 6 * 2 * 32 * 64 * 64
    assert cost_of(loss, *arguments).flops == layers
    # Forward, again while going back, and two products per layer for the gradients.
    assert cost_of(jax.value_and_grad(loss), *arguments).flops == 4 * layers


def test_the_program_of_a_shard_counts_on_every_device(mesh):
    @jax.shard_map(
        mesh=mesh.jax_mesh,
        in_specs=jax.sharding.PartitionSpec("batch"),
        out_specs=jax.sharding.PartitionSpec("batch"),
    )
    def program(x):
        return x @ x.T

    assert cost_of(program, jnp.ones((4, 16))).flops == 8 * 2 * 2 * 2 * 16


@pytest.mark.parametrize(
    "program",
    [
        lambda x: jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: x @ x, x),
        lambda x: jax.lax.cond(x.sum() > 0, lambda x: x @ x, lambda x: x, x),
        lambda x: jax.pure_callback(np.sin, x, x @ x),
    ],
)
def test_a_cost_with_unknown_loops_branches_or_kernels_is_not_exact(program):
    cost = cost_of(program, jnp.ones((8, 8)))
    assert (cost.flops, cost.is_exact) == (2 * 8**3, False)


def squares(model, batch):
    return jnp.square(model(batch["x"])).mean(-1)


def state_on(mesh, optimizer, spec):
    layouts = ml.LayoutMap(mesh, {"kernel": spec})
    return ml.TrainState.create(
        lambda: nnx.Linear(64, 128, use_bias=False, rngs=nnx.Rngs(0)),
        optimizer,
        layouts,
    )


@pytest.mark.parametrize("spec", [(("batch", "model"), None), (None, None)])
def test_memory_is_divided_as_the_layouts_say(mesh, spec):
    state = state_on(mesh, optax.adam(0.1), spec)
    batch = {"x": ml.arrays.ones((32, 64), mesh.layout("batch", None))}
    step = ml.make_train_step(squares, ema=0.9)
    memory = step.memory(state, batch)
    axes = [axis for entry in spec if entry for axis in np.atleast_1d(entry)]
    kernel = 64 * 128 * 4 // (mesh.axis_size(axes) if axes else 1)
    assert memory.parameter_bytes == memory.gradient_bytes == kernel
    assert memory.optimizer_bytes == 2 * kernel + 4  # and the count of updates
    assert 0 <= memory.other_state_bytes - kernel < 64  # the moving average
    assert 0 <= memory.batch_bytes - 32 // 2 * 64 * 4 < 64
    assert memory.host_bytes == 0
    # On CPUs nothing is padded.
    own = (memory.parameter_bytes, memory.optimizer_bytes, memory.other_state_bytes)
    assert memory.argument_bytes == sum(own) + memory.batch_bytes
    assert memory.donated_bytes >= 4 * kernel
    assert memory.peak_bytes >= memory.argument_bytes + memory.temporary_bytes
    assert "parameter" in str(memory)
    assert "peak" in memory._repr_html_()
    assert not state.params["kernel"].is_deleted()


@pytest.mark.skipif(
    jax.__version_info__ < (0, 8), reason="jax moves arrays to no other memory in jit"
)
def test_what_is_in_host_memory_counts_apart(mesh):
    @ml.compile_step
    def step(state, batch):
        slots = jax.device_put(state["slots"], state_layout.sharding)
        slots = jax.device_put(slots + batch.sum(), host_layout.sharding)
        return {"kernel": state["kernel"], "slots": slots}, None

    state_layout = mesh.layout("model", None)
    host_layout = mesh.layout("model", None, memory_kind="pinned_host")
    state = {
        name: jax.ShapeDtypeStruct((64, 64), "float32", sharding=layout.sharding)
        for name, layout in (("kernel", state_layout), ("slots", host_layout))
    }
    memory = step.memory(state, ml.arrays.ones((4,), mesh.layout("batch")))
    shard = 64 * 64 * 4 // 4
    assert (memory.other_state_bytes, memory.host_bytes) == (shard, shard)
    assert "host  " in str(memory)


def test_every_kind_of_step_reports(mesh):
    state = state_on(mesh, optax.adam(0.1), ("model", None))
    batch = {"x": ml.arrays.ones((32, 64), mesh.layout("batch", None))}
    train, evaluate = ml.make_train_step(squares), ml.make_eval_step(squares)
    predict = ml.make_predict_step(lambda model, batch: model(batch["x"]))
    kernel, forward = 64 * 128 * 4 // 4, 2 * 32 * 64 * 128
    memory = evaluate.memory(state, batch)
    assert (memory.parameter_bytes, memory.optimizer_bytes) == (kernel, 0)
    assert (memory.gradient_bytes, memory.donated_bytes) == (0, 0)
    # The first layer's input needs no gradient.
    flops = [step.cost(state, batch).flops for step in (train, evaluate, predict)]
    assert flops == [2 * forward, forward, forward]
    sent = evaluate.communication(state, batch)
    # The kernel's rows are on four devices: sums of 16 x 128 floats, and of the loss.
    sums = [one for one in sent.collectives if one.axes == ("model",)]
    assert sum(one.wire_bytes for one in sums) == 2 * 3 / 4 * 16 * 128 * 4

    plain = ml.compile_step(lambda w, x: (w - (x @ w).sum(), None))
    memory = plain.memory(state.params["kernel"], batch["x"])
    assert (memory.parameter_bytes, memory.other_state_bytes) == (0, kernel)


def test_reports_of_shapes_are_those_of_the_batch_that_a_call_would_place(mesh):
    state = state_on(mesh, optax.sgd(0.1), (None, None))
    host = {"x": np.ones((32, 64), "float32")}
    for count, dims in ((1, (32, 64)), (2, (2, 32, 64))):
        step = ml.make_train_step(squares, steps_per_call=count)
        batch = host if count == 1 else [host] * count
        abstract = {"x": jax.ShapeDtypeStruct(dims, "float32")}
        expected = step.communication(state, batch)
        assert expected["all_reduce"] > 0
        assert str(step.communication(state, abstract)) == str(expected)
    placed = ml.arrays.ones(dims, mesh.layout(None, "batch", None))
    shape = jax.ShapeDtypeStruct(dims, "float32", sharding=placed.sharding)
    assert str(step.communication(state, {"x": shape})) == str(expected)


def test_memory_counts_the_metrics_that_a_call_would_continue(mesh):
    state, batch = state_on(mesh, optax.sgd(0.1), (None, None)), np.ones((32, 64), "f4")
    step = ml.make_train_step(squares)
    state, metrics = step(state, {"x": batch})
    memory = step.memory(state, {"x": batch}, metrics)
    assert str(memory) == str(step.memory(state, {"x": batch}))
