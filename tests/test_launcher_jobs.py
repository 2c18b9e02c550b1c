"""Programs of JAX under the launcher: killed or told to end, they go on as if not."""

import pytest

from tests.resuming_runs import STEPS, result_of, rows_of
from tests.test_launcher import Launch


pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

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


def launched(folder, *arguments, restarts=0):
    (folder / "train.py").write_text(TRAINER)
    options = ["-n", 2, "--devices-per-process", 2, "--max-restarts", restarts]
    arguments = [folder / "train.py", folder, *arguments]
    return Launch(folder, *options, *arguments, JAX_PLATFORMS="cpu")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that is left alone."""
    folder = tmp_path_factory.mktemp("whole")
    run = launched(folder, -1, 0, "SIGKILL")
    assert run.wait() == 0, run.err
    return folder


def steps_in(run):
    words = [line.split() for line in run.out.splitlines()]
    return [int(line[2]) for line in words if line[1] == "step"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_fit_goes_on_from_its_checkpoint(victim, whole, tmp_path):
    run = launched(tmp_path, victim, 7, "SIGKILL", restarts=1)
    assert run.wait() == 0, run.err
    assert f"process {victim} was killed by SIGKILL, which ended" in run.err
    assert "launch: starting again (1 of 1)." in run.err
    steps = steps_in(run)
    start = next(n for n, step in enumerate(steps[1:], 1) if step <= steps[n - 1])
    assert 1 < steps[start] <= 8  # not from the beginning
    assert steps[-1] == STEPS
    assert result_of(tmp_path) == result_of(whole)
    assert rows_of(tmp_path) == rows_of(whole)


def test_sigterm_to_the_launcher_saves_and_ends_with_75(whole, tmp_path):
    arguments = [5, 0, "SIGTERM"]
    run = launched(tmp_path, *arguments, restarts=3)
    run.wait_for("step 3")
    run.process.terminate()
    assert run.wait() == 75, run.err
    assert "starting again" not in run.err
    assert "Traceback" not in run.err
    last = steps_in(run)[-1]
    assert last < STEPS
    run = launched(tmp_path, *arguments)
    assert run.wait() == 0, run.err
    assert steps_in(run)[0] == last + 1
    assert result_of(tmp_path) == result_of(whole)


def test_sigterm_to_one_process_starts_the_job_again(whole, tmp_path):
    run = launched(tmp_path, 1, 4, "SIGTERM", restarts=1)
    assert run.wait() == 0, run.err
    assert "launch: starting again (1 of 1)." in run.err
    assert result_of(tmp_path) == result_of(whole)
