"""Arrays and states are made under any `jax.set_mesh`, in processes that are fresh.

What was compiled before hides an operation that is lowered under the caller's mesh.
"""

import os
import subprocess
import sys
import textwrap

import pytest


PROGRAM = """
import contextlib, jax, jax.numpy as jnp, numpy as np, optax
from flax import linen as nn, nnx
from jax.sharding import AxisType
import meshlayout as ml

ml.virtual_devices(8)
def mesh_of(kind, shape=(2, 4), names=("x", "y")):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))
auto, explicit = mesh_of(AxisType.Auto), mesh_of(AxisType.Explicit)
other = mesh_of(AxisType.Explicit, (8,), ("z",))
mesh = ml.Mesh({on})
around = {around}

key, sample = jax.random.key(0), np.ones((8, 16), np.float32)
layouts = ml.LayoutMap(mesh, {{"kernel": (None, "y")}})
both, rows = mesh.layout("x", "y"), mesh.layout("x")
dense = nn.Dense(32)
normal = jax.random.normal(key, (8, 8))
linen = dense.init(key, sample)
linear = nnx.Linear(16, 32, rngs=nnx.Rngs(0))

def same(x, y):
    np.testing.assert_array_equal(ml.to_numpy(x), np.asarray(y))
def in_scope(build):
    with ml.scope(layouts):
        return build()
with around:
    inner = jax.random.key(0)  # a key whose type names the mesh that is set
    same(ml.arrays.normal(key, (8, 8), both), normal)
    same(ml.arrays.normal(inner, (8, 8), both), normal)
    same(ml.arrays.uniform(key, (8, 8), both, minval=jnp.float32(2), maxval=3),
         jax.random.uniform(jax.random.key(0), (8, 8), minval=2, maxval=3))
    same(ml.arrays.zeros((8, 8), both), np.zeros((8, 8)))
    same(ml.arrays.full((8,), jnp.float32(2), rows), np.full(8, 2.0))
    same(ml.arrays.arange(1.0, 17.0, 2, layout=rows), np.arange(1.0, 17.0, 2))
    placed = ml.relayout(sample, mesh.layout("x", None))
    same(ml.relayout(placed, both), sample)
    same(ml.copy_to_mesh(placed, both), sample)
    columns = mesh.layout(None, "x")
    same(ml.relayout(ml.copy_to_mesh(sample, both), columns, donate=True), sample)
    same(ml.pack([np.ones((4, 2))] * 8, both), np.ones((8, 8)))
    for params in (ml.create(lambda: dense.init(key, sample), layouts),
                   ml.create(lambda: dense.init(inner, sample), layouts),
                   in_scope(lambda: dense.init(key, sample)),
                   in_scope(lambda: dense.init(inner, sample))):
        same(params["params"]["kernel"], linen["params"]["kernel"])
        ml.check_layout(params["params"]["kernel"], mesh.layout(None, "y"))
    make = lambda: nnx.Linear(16, 32, rngs=nnx.Rngs(0))
    for model in (ml.create(make, layouts), in_scope(make)):
        same(model.kernel[...], linear.kernel[...])
        ml.check_layout(model.kernel[...], mesh.layout(None, "y"))
    rngs = nnx.Rngs(0)
    drawn = in_scope(lambda: [nnx.Linear(16, 32, rngs=rngs) for _ in range(2)])
    same(drawn[0].kernel[...], linear.kernel[...])
    state = ml.TrainState.create(make, optax.adam(1e-3), layouts)
    same(state.params["kernel"], linear.kernel[...])
print("fine")
"""

CASES = {
    "no mesh": ("auto", "contextlib.nullcontext()"),
    "auto": ("auto", "jax.set_mesh(auto)"),
    "explicit": ("explicit", "jax.set_mesh(explicit)"),
    "auto in explicit": ("auto", "jax.set_mesh(explicit)"),
    "explicit in auto": ("explicit", "jax.set_mesh(auto)"),
    "auto in another": ("auto", "jax.set_mesh(other)"),
    "explicit in another": ("explicit", "jax.set_mesh(other)"),
}


@pytest.mark.slow  # test_create_under_a_mesh makes the same under two of them
@pytest.mark.parametrize("case", CASES)
def test_everything_is_created_under_any_mesh_that_is_set(case):
    on, around = CASES[case]
    program = textwrap.dedent(PROGRAM).format(on=on, around=around)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "XLA_FLAGS": ""},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "fine"
