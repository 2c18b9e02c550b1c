"""Before the first call of a program, its processes find out whether it is the same."""

import functools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from meshlayout.cluster import channel
from tests.error_messages import outcome_of
from tests.processes import run_processes


pytestmark = pytest.mark.multiprocess

SAME = (
    "All must run the same program, with the same arguments, made from the same seed."
)


def placed(layout, value):
    """A global array of what this process says, as raw JAX makes it."""
    return jax.make_array_from_callback(
        value.shape, layout.sharding, lambda index: value[index]
    )


def state_of(mesh, value=0.0):
    return {"w": placed(mesh.layout(None, None), np.full((8, 8), value, "f4"))}


def batch_of(mesh, rows=8):
    return placed(mesh.layout("batch", None), np.ones((rows, 3), "f4"))


def step_of():
    @ml.compile_step
    def train_step(state, batch, scale=1.0):
        total = scale * jnp.sum(batch)
        return {"w": state["w"] + total}, total

    return train_step


def callbacks(state, batch):
    """What puts ids of this process into the program's text."""
    jax.debug.print("{}", batch.sum())
    jax.debug.callback(lambda x: None, state["w"])
    jax.debug.inspect_array_sharding(batch, callback=lambda sharding: None)
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    total = jax.pure_callback(lambda x: np.asarray(2 * x), shape, batch.sum())
    return {"w": state["w"] + total}, total


def linear(seed=0):
    return nnx.Linear(4, 4, rngs=nnx.Rngs(seed))


def differences(mesh, index):
    """What is not the same on all processes; for each, the error on this one."""
    told, state, batch = {}, state_of(mesh), batch_of(mesh)
    rules = ml.LayoutMap(mesh, {"kernel": ("batch", None)})
    told["rows"] = outcome_of(step_of(), state, batch_of(mesh, [8, 4][index]))
    told["number"] = outcome_of(step_of(), state, batch, float(index))
    told["params"] = outcome_of(step_of(), state_of(mesh, index), batch)
    turned = ml.Mesh(
        jax.sharding.Mesh(np.array(jax.devices())[:: 1 - 2 * index], "batch")
    )
    told["mesh"] = outcome_of(step_of(), state_of(turned), batch_of(turned))
    told["key"] = outcome_of(
        ml.compile_step(lambda state, batch: (state, batch.sum())),
        {"key": ml.create(lambda: jax.random.key(3)), **state} | key_of(mesh, index),
        batch,
    )
    told["create"] = outcome_of(ml.create, lambda: linear(index), rules)
    told["constant"] = outcome_of(ml.create, jitted_constant(index), rules)
    with ml.scope(rules):
        told["scope"] = outcome_of(linear, index)
    return told


def key_of(mesh, index):
    words = np.array([0, index], np.uint32)
    return {"key": jax.random.wrap_key_data(placed(mesh.layout(None), words))}


def jitted_constant(index):
    """A builder whose text does not show what it makes."""
    value = np.full(3, index, "f4")
    inner = jax.jit(lambda: jnp.zeros(3) + value)
    return lambda: {"w": inner()}


def harmless(mesh, index):
    """What differs without harm."""
    state, batch = state_of(mesh), batch_of(mesh)
    told = {"callbacks": outcome_of(ml.compile_step(callbacks), state_of(mesh), batch)}
    step = step_of()
    if index == 0:
        step.lower(state, batch)
        step.memory(state, batch_of(mesh, 4))
        local = ml.create_mesh({"batch": 2}, devices=jax.local_devices())
        told["local"] = outcome_of(step_of(), state_of(local), batch_of(local))
    told["lowered on one"] = outcome_of(step, state_of(mesh), batch)
    told["lowered for others"] = outcome_of(step, state_of(mesh), batch_of(mesh, 4))
    rules = ml.LayoutMap(mesh, {"kernel": ("batch", None)})
    state = ml.TrainState.create(linear, optax.adam(1.0), rules)
    rows = {"x": np.ones((5 + index, 4), np.float32)}
    data = ml.distribute_dataset(rows, mesh, global_batch_size=8, per_process=True)
    train_step = ml.make_train_step(lambda model, batch: model(batch["x"]).mean(-1))
    (batch, *_) = data
    told["train step"] = outcome_of(train_step, state, batch)
    return told


def job():
    index = jax.process_index()
    mesh = ml.create_mesh({"batch": 4})
    told = {"harmless": harmless(mesh, index), "differences": differences(mesh, index)}
    told["exchanges"] = exchanges_of_a_step(mesh)
    step = step_of()
    step(state_of(mesh), batch_of(mesh))
    exchange = channel.Channel.exchange
    channel.Channel.exchange = functools.partialmethod(exchange, timeout_s=0.6)
    time.sleep(1.5 * index)
    told["recompiles"] = outcome_of(step, state_of(mesh), batch_of(mesh, 4))
    return told


def exchanges_of_a_step(mesh):
    """How often a step, or a relayout, asks other processes, in each of its calls."""
    step, asked, counts = step_of(), [], []
    exchange = channel.Channel.exchange

    def counted(*args, **kwargs):
        asked.append(args)
        return exchange(*args, **kwargs)

    channel.Channel.exchange = counted
    for rows in (8, 8, 8, 4, 4, 8):
        step(state_of(mesh), batch_of(mesh, rows))
        counts.append(len(asked))
    for rows in (8, 8, 4, 8):
        ml.relayout({"x": np.ones((rows, 3))}, mesh.layout("batch", None))
        counts.append(len(asked))
    channel.Channel.exchange = exchange
    return counts


def majority():
    """Four processes of which one differs; and two of them with a mesh of their own."""
    index, told = jax.process_index(), {}
    mesh = ml.create_mesh({"batch": 4})
    rows = [8, 8, 4, 8][index]
    told["rows"] = outcome_of(step_of(), state_of(mesh), batch_of(mesh, rows))
    if index in (1, 3):
        devices = [d for d in jax.devices() if d.process_index in (1, 3)]
        pair = ml.create_mesh({"batch": 2}, devices=devices)
        told["pair"] = outcome_of(step_of(), state_of(pair), batch_of(pair))
        scale = 1.0 * (index == 3)
        told["pair differs"] = outcome_of(
            step_of(), state_of(pair), batch_of(pair), scale
        )
    return told


@pytest.fixture(scope="module")
def told():
    return run_processes(2, job)


def test_programs_that_are_the_same_run_on_all_processes(told):
    assert set(told[0]["harmless"].values()) == {"worked"}
    assert set(told[1]["harmless"].values()) == {"worked"}


DIFFERENCES = {
    "create": "the program is one of digest {} on process 1, and one of digest {} on "
    "process 0",
    "rows": "batch is f32[4, 3] P('batch', None) device on process 1, and f32[8, 3] "
    "P('batch', None) device on process 0",
    "number": "the value of scale is f64[] 1.0 on process 1, and f64[] 0.0 on process 0",
    "mesh": "the mesh is {{'batch': 4}} of devices 2049,2048,1,0 on process 1, and "
    "{{'batch': 4}} of devices 0-1,2048-2049 on process 0",
    "key": "the value of state/key is u32[2] [0, 1] on process 1, and u32[2] [0, 0] on "
    "process 0",
    "constant": "the value of constant 0 is f32[3] [1.0, 1.0, 1.0] on process 1, and "
    "f32[3] [0.0, 0.0, 0.0] on process 0",
    "scope": "the value of input 1 is u32[2] [0, 1] on process 1, and u32[2] [0, 0] on "
    "process 0",
    "params": "the value of state/w is f32[8, 8] (digest {}) on process 1, and f32[8, 8] "
    "(digest {}) on process 0",
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_a_process_that_differs_is_named_on_all(told, case):
    for process in told:
        text = process["differences"][case].replace("PartitionSpec(", "P(")
        digests = re.findall(r"digest (\w+)", text)
        expected = DIFFERENCES[case].format(*digests)
        assert " is not the same program on all processes: " in text
        assert expected in text, text
        assert len({*digests}) == len(digests)
        assert text.endswith(SAME)


def test_a_process_that_alone_needs_another_program_does_not_wait_for_ever(told):
    program = "a new program of train_step (batch changed from f32[8, 3] to f32[4, 3])"
    waited = (
        f"process 0 waited 1 s for process 1, which did not come to {program}. All "
        "processes must compile the same programs, in the same order."
    )
    # Process 1 comes too late, but not in vain: process 0 is not there any more.
    assert [x["recompiles"] for x in told] == [f"ClusterError: {waited}"] * 2


def test_only_the_first_call_with_some_shapes_asks_the_other_processes(told):
    for process in told:
        assert process["exchanges"] == [1, 1, 1, 2, 2, 2, 3, 3, 4, 4]


@pytest.mark.slow
def test_of_several_processes_the_one_that_differs_from_most_is_named():
    told = run_processes(4, majority, devices_per_process=1)
    start = "ClusterError: train_step is not the same program on all processes:"
    for index, process in enumerate(told):
        assert process["rows"].startswith(f"{start} batch is f32[4, 3] ")
        assert " on process 2, and f32[8, 3] " in process["rows"]
        assert " on processes 0-1,3; " in process["rows"]
        if index in (1, 3):
            assert process["pair"] == "worked"
            text = "the value of scale is f64[] 1.0 on process 3, and f64[] 0.0 on "
            assert f"{text}process 1" in process["pair differs"]
