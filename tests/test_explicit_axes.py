"""Exchange on the Explicit axes that `jax.make_mesh` makes: numbers of one device."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import meshlayout as ml


INDEX = np.arange(8 * 4 * 2, dtype="int32").reshape(8, 4, 2) % 8
KV, ROWS = (2, 2, 16, 4, 4), P(("batch", "x"))


def experts(x, weights, kernels, **options):
    multiply = lambda kernels, rows, sizes: jax.lax.ragged_dot(rows, kernels, sizes)
    return ml.parallel.dispatch(x, INDEX, weights, multiply, kernels, **options)


def attention(name):
    attend = functools.partial(getattr(ml.parallel, name), causal=True)
    return attend, [(2, 2, 16, 8, 4), KV, KV], [P("batch", None, "x", "model")] * 3


def stack(schedule):
    layer, options = lambda p, x: jnp.tanh(x @ p), {"schedule": schedule}
    run = functools.partial(ml.parallel.pipeline, layer, microbatches=4, **options)
    return run, [(4, 16, 16), (16, 16)], [P("x"), P("batch", "model")]


CASES = {
    "ring": attention("ring_attention"),
    "heads": attention("all_to_all_attention"),
    "experts": (experts, [(8, 4, 16), (8, 4, 2), (8, 16, 8)], [ROWS, ROWS, P("x")]),
    "gpipe": stack("gpipe"),
    "circular": stack("circular"),
}


@pytest.mark.parametrize(
    "is_placed", [True, pytest.param(False, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "case",
    [
        *("ring", "experts", "gpipe"),
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("heads", "circular")),
    ],
)
def test_values_and_gradients_are_those_of_one_device(case, is_placed):
    function, shapes, specs = CASES[case]
    random, names = np.random.default_rng(0), ("batch", "x", "model")
    arrays = [random.normal(size=s).astype("float32") / 2 for s in shapes]

    def graded(*arrays, **options):
        loss = lambda *a: jnp.square(function(*a, axis="x", **options)).sum()
        return jax.value_and_grad(loss, range(len(arrays)))(*arrays)

    expected = jax.jit(graded)(*arrays)
    mesh = jax.make_mesh((2, 2, 2), names, axis_types=(AxisType.Explicit,) * 3)
    if is_placed:
        shardings = [NamedSharding(mesh, spec) for spec in specs]
        arrays = [*map(jax.device_put, arrays, shardings)]
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    with jax.set_mesh(mesh) if is_placed else contextlib.nullcontext():
        options = {} if is_placed else {"mesh": mesh}
        found = jax.jit(functools.partial(graded, **options))(*arrays)
        jax.tree.map(close, found, expected)
