"""What train steps send on eight GPUs: programs of the CUDA compiler, with no GPU.

`make test-gpu-programs` installs the compiler, which is JAX's plugin for CUDA.
"""

import pytest

import meshlayout as ml
from benchmarks import fsdp_rules
from tests.gpu import create_gpu_mesh
from tests.test_tpu_programs import (
    EIGHT,
    FLOAT,
    assert_fsdp_sends_little,
    gradient_bytes,
    train_step,
)


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
    assert (gradients.axes, gradients.num_devices) == (("batch",), 8)
    assert gradients.wire_bytes == 2 * 7 * gradients.nbytes // 8
    # With the sum of the weights, and which microbatches hold more than padding.
    assert 0 <= gradients.nbytes - gradient_bytes(state) <= FLOAT * 2


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


def test_what_runs_alone_is_not_called_asynchronous(gpu_mesh):
    _, every = sent("transformer", "FSDP", gpu_mesh)
    assert {one.kind: one.is_async for one in every} == {
        "all_gather": False,  # before anything else
        "reduce_scatter": True,
        "all_reduce": True,
    }


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", fsdp_rules.WORKS)
def test_fsdp_sends_no_more_than_the_hand_written_map(gpu_mesh, name, precision):
    assert_fsdp_sends_little(gpu_mesh, name, precision, 37.2e6)
