"""Programs of JAX under the launcher: killed or told to end, they go on as if not."""

import textwrap

import pytest

from tests.resuming_runs import STEPS, result_of, rows_of
from tests.test_launcher import Launch


pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

OPTIONS = ("-n", 2, "--devices-per-process", 2)
CPU = {"JAX_PLATFORMS": "cpu"}

# Process `victim` kills itself after a step of the first run. The other one may be a step
# behind, or in the save.
TRAINER = """
import os, signal, sys
from pathlib import Path
import meshlayout as ml
from tests.resuming_runs import run

ml.initialize()
folder, victim, step_to_die = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
signal_to_send = signal.Signals[sys.argv[4]]

def say(step):
    if ml.cluster.is_main():
        print("step", step)
    marker = folder / "killed"
    if ml.cluster.process_index() == victim and step == step_to_die:
        if not marker.exists():
            marker.write_text("")
            os.kill(os.getpid(), signal_to_send)

run(folder, seconds=0.1 if victim >= 0 else 0, every=2, say=say)
ml.shutdown()
"""

LOOP = """
import json, os, signal, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
import meshlayout as ml

ml.initialize()
folder, victim, step_to_die = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
mesh = ml.create_mesh()
x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
data = ml.distribute_dataset({"x": x}, mesh, global_batch_size=8, shuffle=1, epochs=3)
replicated = mesh.layout(None)
state = {"w": ml.relayout(np.ones(3, "float32"), replicated), "step": 0}

@ml.compile_step
def train_step(state, batch):
    grads = jax.grad(lambda w: jnp.mean(jnp.square(batch["x"] @ w)))(state["w"])
    return {**state, "w": state["w"] - 0.1 * grads}, {}

with ml.Checkpointer(folder / "checkpoints", every=1) as ck:
    batches = iter(data)
    state = ck.resume(state, data=batches)
    for batch in batches:
        step = state.pop("step") + 1
        state, _ = train_step(state, batch)
        state["step"] = step
        ck.save(step, state, data=batches)
        print("step", step)
        is_first = not (folder / "killed").exists()
        if ml.cluster.process_index() == victim and is_first:
            if step == step_to_die:
                (folder / "killed").write_text("")
                os.kill(os.getpid(), signal.SIGKILL)
if ml.cluster.is_main():
    result = {"w": ml.to_numpy(state["w"]).tobytes().hex(), "step": state["step"]}
    (folder / "result.json").write_text(json.dumps(result))
ml.shutdown()
"""


def program(folder, text):
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory):
    """The folders of runs that are left alone, by program."""
    folders = {}
    for text in (TRAINER, LOOP):
        folder = folders[text] = tmp_path_factory.mktemp("whole")
        path = program(folder, text)
        run = Launch(folder, *OPTIONS, path, folder, -1, 0, "SIGKILL", **CPU)
        assert run.wait() == 0, run.err
    return folders


def steps_in(run):
    words = [line.split() for line in run.out.splitlines()]
    return [int(line[2]) for line in words if line[1] == "step"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_fit_goes_on_from_its_checkpoint(victim, whole_runs, tmp_path):
    path = program(tmp_path, TRAINER)
    arguments = [path, tmp_path, victim, 7, "SIGKILL"]
    run = Launch(tmp_path, *OPTIONS, "--max-restarts", 1, *arguments, **CPU)
    assert run.wait() == 0, run.err
    assert f"process {victim} was killed by SIGKILL, which ended" in run.err
    assert "launch: starting again (1 of 1)." in run.err
    steps = steps_in(run)
    start = next(n for n, step in enumerate(steps[1:], 1) if step <= steps[n - 1])
    assert 1 < steps[start] <= 8  # not from the beginning
    assert steps[-1] == STEPS
    assert result_of(tmp_path) == result_of(whole_runs[TRAINER])
    assert rows_of(tmp_path) == rows_of(whole_runs[TRAINER])


def test_a_killed_loop_goes_on_from_its_checkpoint(whole_runs, tmp_path):
    path = program(tmp_path, LOOP)
    run = Launch(tmp_path, *OPTIONS, "--max-restarts", 1, path, tmp_path, 1, 7, **CPU)
    assert run.wait() == 0, run.err
    assert "launch: starting again (1 of 1)." in run.err
    assert steps_in(run).count(2) == 2  # each process once: then not from the start
    assert result_of(tmp_path) == result_of(whole_runs[LOOP])


def test_sigterm_to_the_launcher_saves_and_ends_with_75(whole_runs, tmp_path):
    path = program(tmp_path, TRAINER)
    arguments = [*OPTIONS, "--max-restarts", 3, path, tmp_path, 5, 0, "SIGTERM"]
    run = Launch(tmp_path, *arguments, **CPU)
    run.wait_for("step 3")
    run.process.terminate()
    assert run.wait() == 75, run.err
    assert "starting again" not in run.err
    assert "Traceback" not in run.err
    last = steps_in(run)[-1]
    assert last < STEPS
    run = Launch(tmp_path, *arguments, **CPU)
    assert run.wait() == 0, run.err
    assert steps_in(run)[0] == last + 1
    assert result_of(tmp_path) == result_of(whole_runs[TRAINER])


def test_sigterm_to_one_process_starts_the_job_again(whole_runs, tmp_path):
    path = program(tmp_path, TRAINER)
    arguments = [path, tmp_path, 1, 4, "SIGTERM"]
    run = Launch(tmp_path, *OPTIONS, "--max-restarts", 1, *arguments, **CPU)
    assert run.wait() == 0, run.err
    assert "launch: starting again (1 of 1)." in run.err
    assert result_of(tmp_path) == result_of(whole_runs[TRAINER])
