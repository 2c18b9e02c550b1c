"""The job files of examples/: well-formed, and what they start is the same program."""

import os
import re
import subprocess
import sys

import pytest
import yaml

from tests.processes import ROOT


EXAMPLES = ROOT / "examples"

# Commands of a cluster, which write down how they were called.
STAND_IN = """#!/bin/bash
echo "$(basename "$0") $*" >> "$CALLS"
statuses="$CALLS-$(basename "$0")"
test -s "$statuses" || exit 0
status=$(head -n 1 "$statuses"); sed -i 1d "$statuses"; exit "$status"
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Runs a job file where some commands only pretend; returns status and calls."""

    def run(file, *arguments, commands, statuses, **environment):
        for name in commands:
            path = tmp_path / name
            path.write_text(STAND_IN)
            path.chmod(0o755)
        calls = tmp_path / "calls"
        calls.write_text("")
        for name, codes in statuses.items():
            (tmp_path / f"calls-{name}").write_text("".join(f"{x}\n" for x in codes))
        done = subprocess.run(
            ["bash", str(EXAMPLES / file), *arguments],
            cwd=ROOT,
            env={
                **os.environ,
                "PATH": f"{tmp_path}:{os.environ['PATH']}",
                "CALLS": str(calls),
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, calls.read_text().splitlines(), done

    return run


SLURM = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("status", "restarts", "is_requeued"),
    [(0, 0, False), (75, 0, True), (75, 9, True), (1, 2, True), (1, 3, False)],
)
def test_slurm_starts_again_what_was_preempted(status, restarts, is_requeued, cluster):
    code, calls, _ = cluster(
        "slurm.sbatch",
        *("--epochs", "5"),
        commands=["srun", "scontrol"],
        statuses={"srun": [status]},
        **SLURM,
        SLURM_RESTART_COUNT=str(restarts),
        CHECKPOINTS="/shared/run",
    )
    assert code == status
    assert calls[0] == (
        "srun --label --wait=60 --kill-on-bad-exit=0 python examples/train.py --mesh "
        "replica=2,fsdp=-1 --dcn replica --checkpoints /shared/run --epochs 5"
    )
    assert calls[1:] == ["scontrol requeue 17"] * is_requeued


def test_the_slice_is_made_and_trained_on_again_after_a_preemption(cluster):
    environment = {"ZONE": "z", "PROJECT": "p", "BUCKET": "gs://b", "NAME": "slice"}
    options = {"commands": ["gcloud", "git"], **environment}
    code, calls, _ = cluster("tpu_pod.sh", "create", statuses={}, **options)
    assert code == 0
    verbs = [call.partition(" slice ")[0] for call in calls if call.startswith("gc")]
    assert verbs[0] == "gcloud compute tpus tpu-vm create"
    assert "gcloud compute tpus tpu-vm scp" in calls[2]
    assert all(
        "--worker=all" in call for call in calls if " ssh " in call or " scp " in call
    )
    code, calls, _ = cluster(
        "tpu_pod.sh", "run", "--epochs", "5", statuses={"gcloud": [75, 3]}, **options
    )
    assert code == 3
    assert len([call for call in calls if call.startswith("gcloud")]) == 2
    assert calls[-1].split("train.py")[1].split() == [
        *("--checkpoints", "gs://b/slice", "--epochs", "5")
    ]
    code, calls, done = cluster("tpu_pod.sh", statuses={}, **options)
    assert (code, calls) == (2, [])
    assert "examples/tpu_pod.sh create" in done.stdout


@pytest.mark.parametrize("file", ["jobset.yaml", "jobset_tpu.yaml"])
def test_a_jobset_trains_again_after_a_preemption_and_leaves_time_to_save(file):
    spec = yaml.safe_load((EXAMPLES / file).read_text())["spec"]
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # which podFailurePolicy needs
    assert pod["terminationGracePeriodSeconds"] >= 60
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [75]
    (policy,) = spec["failurePolicy"]["rules"]
    assert policy["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    # The axis that crosses the slow network is as long as there are hosts or slices.
    slices = replicated["replicas"]
    slices = slices if slices > 1 else job["completions"]
    assert f"--mesh=replica={slices},fsdp=-1" in pod["containers"][0]["command"]


def run_program(*command, environments=({},)):
    """Runs commands at once; returns what each wrote to stdout."""
    base = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    runs = [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**base, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    try:
        outputs = [run.communicate(timeout=300) for run in runs]
    finally:
        for run in runs:
            run.kill()
    codes = [run.returncode for run in runs]
    assert codes == [0] * len(runs), [error for _, error in outputs]
    return [out for out, _ in outputs]


@pytest.fixture(scope="module")
def numbers():
    """The line with loss and accuracy of the program in one process."""
    (out,) = run_program("examples/train.py")
    return out.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_program_computes_the_same_under_the_launcher(numbers, tmp_path):
    launch = ["-m", "meshlayout.launch", "-n", "2", "--devices-per-process", "2"]
    command = [*launch, "examples/train.py", "--mesh", "replica=2,fsdp=-1"]
    command += ["--dcn", "replica", "--checkpoints", str(tmp_path / "run")]
    (out,) = run_program(*command, "--epochs", "1")
    (out,) = run_program(*command)  # resumes
    mesh = "Mesh(replica=2, fsdp=2; replica across 2 processes)"
    assert out.splitlines()[-2:] == [f"[0] 2 processes, {mesh}", f"[0] {numbers}"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_program_computes_the_same_as_srun_starts_it(numbers):
    environments = [
        {
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_STEP_NODELIST": "127.0.0.1",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": str(index),
            "SLURM_LOCALID": str(index),
        }
        for index in range(2)
    ]
    first, second = run_program("examples/train.py", environments=environments)
    assert first.splitlines()[-1] == numbers
    assert numbers not in second


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_program_of_the_page_on_scaling_computes_the_same_in_processes(tmp_path):
    page = (ROOT / "docs" / "scaling.md").read_text()
    files = set(re.findall(r"examples/[\w.]+\w", page))
    assert {path for path in files if not (ROOT / path).exists()} == set()
    script = tmp_path / "page.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    (alone,) = run_program(str(script))
    launch = ["-m", "meshlayout.launch", "-n", "2", "--devices-per-process", "4"]
    (out,) = run_program(*launch, str(script))
    # Sums over processes are made in another order. Gloo may write last.
    losses = [float(re.findall(r"Mesh\(.*\) (\S+)", x)[-1]) for x in (out, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
