"""What train steps send on eight GPUs: programs of the CUDA compiler, with no GPU.

`make test-gpu-programs` installs the compiler, which is JAX's plugin for CUDA.
"""

import dataclasses

import pytest
from flax import nnx

import meshlayout as ml
from benchmarks import fsdp_rules
from meshlayout.hlo import read_communication
from models import transformer
from tests.gpu import create_gpu_mesh
from tests.test_tpu_programs import EIGHT, FLOAT, gradient_bytes, train_step


pytest.importorskip("jax_plugins.xla_cuda12")


@pytest.fixture(scope="module")
def gpu_mesh():
    """A mesh over one host's eight GPUs."""
    return create_gpu_mesh(EIGHT)


def sent(name, layouts, mesh, **options):
    """Returns a model's abstract state and the collectives of its step."""
    step, state, batch = train_step(name, layouts, EIGHT, mesh=mesh, **options)
    compiled = step.lower(state, batch).compile()
    return state, ml.testing.expect_communication(compiled).collectives


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("name", ["mlp", "convnet", "transformer"])
def test_data_parallel_adds_the_gradients_once_per_update(gpu_mesh, name, accumulate):
    options = {"accumulate": accumulate, "has_weights": True}
    state, [gradients] = sent(name, "DATA_PARALLEL", gpu_mesh, **options)
    assert (gradients.kind, gradients.in_loop) == ("all_reduce", False)
    # With the sum of the weights, and which microbatches hold more than padding.
    assert 0 <= gradients.nbytes - gradient_bytes(state) <= FLOAT * 2


def test_microbatches_of_batch_normalization_send_their_statistics_each(gpu_mesh):
    state, every = sent("resnet", "DATA_PARALLEL", gpu_mesh, accumulate=4)
    [gradients] = [one for one in every if not one.in_loop]
    assert 0.99 * gradient_bytes(state) < gradients.nbytes <= gradient_bytes(state)
    assert {one.kind for one in every} == {"all_reduce"}
    assert all(one.nbytes <= 4 * 64 * FLOAT for one in every if one.in_loop)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_fsdp_gathers_weights_and_scatters_gradients_per_microbatch(
    gpu_mesh, accumulate
):
    _, every = sent("transformer", "FSDP", gpu_mesh, accumulate=accumulate)
    in_loop = {one.kind: one.in_loop for one in every}
    per_microbatch = accumulate > 1
    assert in_loop == {
        "all_gather": per_microbatch,
        "reduce_scatter": per_microbatch,
        "all_reduce": False,  # what is replicated: scales and biases
    }


def test_the_report_reads_groups_and_bytes(gpu_mesh):
    step, state, batch = train_step("convnet", "DATA_PARALLEL", EIGHT, mesh=gpu_mesh)
    [gradients] = step.communication(state, batch).collectives
    assert (gradients.axes, gradients.num_devices) == (("batch",), 8)
    assert gradients.wire_bytes == 2 * 7 * gradients.nbytes // 8


def test_what_runs_alone_is_not_called_asynchronous(gpu_mesh):
    _, every = sent("transformer", "FSDP", gpu_mesh)
    assert {one.kind: one.is_async for one in every} == {
        "all_gather": False,  # before anything else
        "reduce_scatter": True,
        "all_reduce": True,
    }


# The rule of `fsdp`, against the hand-written maps.


def wire_bytes(mesh, name, layouts, precision):
    """Returns what a step with accuracy sends from each device."""
    compiled = fsdp_rules.compiled_step(fsdp_rules.WORKS[name], layouts, precision)
    return read_communication(compiled, mesh).wire_bytes


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", fsdp_rules.WORKS)
def test_fsdp_sends_no_more_than_the_hand_written_map(gpu_mesh, name, precision):
    by_hand = ml.LayoutMap(gpu_mesh, fsdp_rules.WORKS[name].module.FSDP)
    ready_made = ml.parallel.fsdp(gpu_mesh)
    sent = wire_bytes(gpu_mesh, name, ready_made, precision)
    assert sent <= wire_bytes(gpu_mesh, name, by_hand, precision)
    if (name, precision) == ("transformer", "float32"):
        assert sent <= 37.2e6


@pytest.mark.slow
def test_an_odd_vocabulary_stays_whole_rather_than_shard_activations(gpu_mesh):
    work = fsdp_rules.WORKS["transformer"]
    config = dataclasses.replace(fsdp_rules.CONFIG, vocab_size=8191)
    odd = dataclasses.replace(
        work, build=lambda: transformer.Transformer(config, rngs=nnx.Rngs(0))
    )
    step = fsdp_rules.compiled_step(odd, ml.parallel.fsdp(gpu_mesh), "float32")
    assert read_communication(step, gpu_mesh).wire_bytes < 52e6  # by features: 450 MB
