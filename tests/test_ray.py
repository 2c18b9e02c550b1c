"""examples/ray_train.py on a local Ray; needs the extra `ray`."""

import os
import subprocess
import sys

import pytest

from examples import train
from tests.processes import ROOT


pytest.importorskip("ray")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ray_train_computes_what_one_process_does():
    metrics = train.main([])
    expected = f"loss {metrics['loss']:.4f}, accuracy {metrics['accuracy']:.4f}"
    search_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "examples/ray_train.py", "--workers", "2", "--cpu"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": search_path, "RAY_DEDUP_LOGS": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    output = run.stdout + run.stderr
    assert run.returncode == 0, output
    assert "2 processes, Mesh(batch=4; batch across 2 processes)" in output
    assert expected in output
