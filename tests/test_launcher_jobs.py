"""Programs of JAX under the launcher: killed or told to end, they go on as if not."""

import signal
import textwrap
import time

import pytest

from tests.launches import Launcher
from tests.resuming_runs import STEPS, result_of, rows_of


pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

OPTIONS = ("-n", 2, "--devices-per-process", 2)

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


@pytest.fixture(scope="module")
def launcher():
    with Launcher() as started:
        yield started


def program(folder, text):
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture(scope="module")
def whole_runs(launcher, tmp_path_factory):
    """The folders of runs that are left alone, by program."""
    folders = {}
    for text in (TRAINER, LOOP):
        folder = folders[text] = tmp_path_factory.mktemp("whole")
        path = program(folder, text)
        run = launcher.run(folder, *OPTIONS, path, folder, -1, 0, "SIGKILL")
        assert run.wait() == 0, run.err
    return folders


def steps_in(launch):
    words = [line.split() for line in launch.out.splitlines()]
    return [int(line[2]) for line in words if line[1] == "step"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_fit_goes_on_from_its_checkpoint(
    victim, launcher, whole_runs, tmp_path
):
    path = program(tmp_path, TRAINER)
    arguments = [path, tmp_path, victim, 7, "SIGKILL"]
    launch = launcher.run(tmp_path, *OPTIONS, "--max-restarts", 1, *arguments)
    assert launch.wait() == 0, launch.err
    assert f"process {victim} (pid " in launch.err
    assert "was killed by SIGKILL, before any other." in launch.err
    assert "launch: starting again (1 of 1)." in launch.err
    steps = steps_in(launch)
    start = next(n for n, step in enumerate(steps[1:], 1) if step <= steps[n - 1])
    assert 1 < steps[start] <= 8  # not from the beginning
    assert steps[-1] == STEPS
    assert result_of(tmp_path) == result_of(whole_runs[TRAINER])
    assert rows_of(tmp_path) == rows_of(whole_runs[TRAINER])


def test_a_killed_loop_goes_on_from_its_checkpoint(launcher, whole_runs, tmp_path):
    path = program(tmp_path, LOOP)
    arguments = [path, tmp_path, 1, 7]
    launch = launcher.run(tmp_path, *OPTIONS, "--max-restarts", 1, *arguments)
    assert launch.wait() == 0, launch.err
    assert "launch: starting again (1 of 1)." in launch.err
    assert steps_in(launch).count(2) == 2  # each process once: then not from the start
    assert result_of(tmp_path) == result_of(whole_runs[LOOP])


def test_sigterm_to_the_launcher_saves_and_ends_with_75(launcher, whole_runs, tmp_path):
    path = program(tmp_path, TRAINER)
    arguments = [*OPTIONS, "--max-restarts", 3, path, tmp_path, 5, 0, "SIGTERM"]
    launch = launcher.start(tmp_path, *arguments)
    launch.wait_for("step 3")
    launch.kill(signal.SIGTERM)
    assert launch.wait() == 75, launch.err
    assert "starting again" not in launch.err
    assert "Traceback" not in launch.err
    last = steps_in(launch)[-1]
    assert last < STEPS
    launch = launcher.run(tmp_path, *arguments)
    assert launch.wait() == 0, launch.err
    assert steps_in(launch)[0] == last + 1
    assert result_of(tmp_path) == result_of(whole_runs[TRAINER])


def test_sigterm_to_one_process_starts_the_job_again(launcher, whole_runs, tmp_path):
    path = program(tmp_path, TRAINER)
    arguments = [path, tmp_path, 1, 4, "SIGTERM"]
    launch = launcher.run(tmp_path, *OPTIONS, "--max-restarts", 1, *arguments)
    assert launch.wait() == 0, launch.err
    assert "launch: starting again (1 of 1)." in launch.err
    assert result_of(tmp_path) == result_of(whole_runs[TRAINER])


def test_a_program_that_does_not_join_the_others_ends_with_the_line_to_add(
    launcher, tmp_path
):
    path = program(tmp_path, "import meshlayout as ml\nml.create_mesh()\n")
    launch = launcher.run(tmp_path, "-n", 2, path)
    assert launch.wait() == 1
    *_, last = launch.err.splitlines()
    assert "Add ml.initialize() at the top of the program" in last


FAULT = """
import os, signal, sys, time
import jax, numpy as np
import meshlayout as ml

ml.initialize()
mesh = ml.create_mesh()
x = ml.relayout(np.ones((6, 4), "float32"), mesh.layout("batch", ...))
total = jax.jit(lambda x: x.sum())
for step in range(1000):
    float(total(x))
    time.sleep(0.02)
    if step == 50 and ml.cluster.process_index() == int(sys.argv[1]):
        os.kill(os.getpid(), signal.Signals[sys.argv[2]])
"""


@pytest.mark.parametrize(
    ("victim", "name", "status"),
    [
        (0, "SIGKILL", 137),
        (1, "SIGKILL", 137),
        (0, "SIGSTOP", 147),
        (2, "SIGSTOP", 147),
    ],
)
def test_the_others_name_the_process_that_the_launcher_saw_fail(
    victim, name, status, launcher, tmp_path
):
    path = program(tmp_path, FAULT)
    launch = launcher.run(tmp_path, "-n", 3, path, victim, name)
    assert launch.wait() == status
    for index in {0, 1, 2} - {victim}:
        own = [x for x in launch.err.splitlines() if x.startswith(f"[{index}] ")]
        at = next(n for n, x in enumerate(own) if f"meshlayout: process {victim} " in x)
        assert own[at + 1].startswith(f"[{index}]   It was last doing: ")
    *_, last = launch.err.splitlines()
    assert "It was last doing: " in last


@pytest.mark.parametrize("victim", [0, 1])
def test_an_error_that_looks_like_a_lost_connection_ends_all_soon(
    victim, launcher, tmp_path
):
    text = FAULT.replace(
        "os.kill(os.getpid(), signal.Signals[sys.argv[2]])",
        "print('failing', flush=True); raise ConnectionRefusedError('no label server')",
    )
    launch = launcher.start(tmp_path, "-n", 2, program(tmp_path, text), victim)
    launch.wait_for("failing")
    start_s = time.monotonic()
    assert launch.wait() == 1
    # Two seconds and what a busy machine takes; a lost process is silent for six.
    assert time.monotonic() - start_s < 5
    other = [x for x in launch.err.splitlines() if x.startswith(f"[{1 - victim}] ")]
    assert any(
        f"meshlayout: process {victim} (" in line
        and "failed: ConnectionRefusedError: no label server" in line
        for line in other
    )
    assert launch.err.endswith(f"[{victim}] ConnectionRefusedError: no label server\n")


def test_a_process_that_leaves_with_status_0_is_named(launcher, tmp_path):
    text = FAULT.replace(
        "os.kill(os.getpid(), signal.Signals[sys.argv[2]])", "os._exit(0)"
    )
    launch = launcher.run(tmp_path, "-n", 2, program(tmp_path, text), 1)
    assert launch.wait() == 1
    assert "[0] meshlayout: process 1 (" in launch.err
