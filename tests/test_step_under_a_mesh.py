"""Steps run under whatever mesh `jax.set_mesh` has set, each in a fresh process.

What was compiled before under another mesh hides the fault: JAX's caches answer.
"""

import contextlib
import io
import itertools
import subprocess
import sys

import pytest


PROGRAM = """
import contextlib, sys
import meshlayout as ml
ml.virtual_devices(8)
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
from jax.sharding import AxisType

state_axes, name = sys.argv[1:]
axis_types = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[state_axes]
mesh = ml.create_mesh({"batch": 2, "model": 4}, axis_types=axis_types)
others = {
    "none": None,
    "auto": jax.make_mesh((2, 4), ("batch", "model"), axis_types=(AxisType.Auto,) * 2),
    "explicit": jax.make_mesh((2, 4), ("batch", "model"),
                              axis_types=(AxisType.Explicit,) * 2),
    "another": jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,)),
}
ambient = others[name]
state = ml.TrainState.create(
    lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)), optax.adam(0.1), ml.LayoutMap(mesh, {})
)
x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
batch = ml.relayout({"x": x, "weight": np.ones(8, "float32")}, mesh.layout("batch", ...))

def loss_fn(model, batch):
    return jnp.square(model(batch["x"]) - 1)

options = {"accumulate": 2, "ema": 0.9, "on_nonfinite": "skip"}
train_step = ml.make_train_step(loss_fn, **options)
eval_step = ml.make_eval_step(loss_fn, metrics={"mse": ml.metrics.Mean()})
predict_step = ml.make_predict_step(lambda model, batch: model(batch["x"]))

@ml.compile_step
def own_step(state, batch):
    return jax.tree.map(lambda a: a * 2, state), batch["x"].sum()

weights = {"w": ml.relayout(np.ones((4, 4), "float32"), mesh.layout(None, "model"))}
values = []
for _ in range(2):
    with contextlib.nullcontext() if ambient is None else jax.set_mesh(ambient):
        state, metrics = train_step(state, batch)
        found = eval_step(state, batch)
        made = predict_step(state, batch)
        weights, total = own_step({"w": weights["w"]}, batch)
        train_step.lower(state, batch)
    values += [float(metrics["loss"]), float(found["mse"]), float(np.sum(made)), float(total)]
print(*(f"{value:.4f}" for value in values))
"""


def run(state_axes, ambient):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, state_axes, ambient],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "recompiles" not in done.stderr
    return done.stdout.split()


@pytest.fixture(scope="module")
def expected():
    """What the program prints in this process, where no mesh is set."""
    printed = io.StringIO()
    program = PROGRAM.replace("sys.argv[1:]", '("auto", "none")')
    with contextlib.redirect_stdout(printed):
        exec(program, {})
    return printed.getvalue().split()


AMBIENT = ["none", "auto", "explicit", "another"]
CASES = list(itertools.product(["auto", "explicit"], AMBIENT))


@pytest.mark.parametrize(
    ("state_axes", "ambient"),
    [
        # One of them shows whether anything is wrong; the rest show where.
        pytest.param(
            *case, marks=[pytest.mark.slow] * (case != ("explicit", "another"))
        )
        for case in CASES
    ],
)
def test_steps_compute_the_same_under_any_mesh(expected, state_axes, ambient):
    assert run(state_axes, ambient) == expected
