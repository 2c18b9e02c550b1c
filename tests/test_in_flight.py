"""Thousands of steps that read nothing neither dead-lock nor abort the process."""

import os
import subprocess
import sys


LOOP = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
import meshlayout as ml

mesh = ml.create_mesh({"batch": 8})

@ml.compile_step
def step(state, batch):
    grads = jax.grad(lambda w: (batch @ w).mean())(state)
    return state - 1e-6 * grads, None

batch = ml.arrays.ones((256, 256), mesh.layout("batch", None))
state = ml.arrays.ones((256, 128), mesh.layout(None, None))
for _ in range(2000):
    state, _ = step(state, batch)
jax.block_until_ready(state)
print("finished")
"""


def test_two_thousand_unread_steps_on_eight_devices_finish():
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"}
    run = subprocess.run(
        [sys.executable, "-c", LOOP],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "JAX_PLATFORMS": "cpu"},
        timeout=300,
    )
    assert run.stdout.strip() == "finished", run.stderr[-2000:]
