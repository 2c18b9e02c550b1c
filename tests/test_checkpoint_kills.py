"""Processes killed while they save and delete lose nothing that was acknowledged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


KILLS, RETENTION_KILLS = 60, 20


@pytest.mark.slow
def test_kills_lose_nothing(tmp_path, counts):
    # Two at a time, each with its own directory.
    jobs = [start(tmp_path / str(seed), seed) for seed in range(2)]
    reports = [finish(job) for job in jobs]
    total = {
        mode: {
            name: sum((report[mode][name] for report in reports), type(value)())
            for name, value in reports[0][mode].items()
        }
        for mode in reports[0]
    }
    for mode, report in total.items():
        counts(f"{mode}: {report}")
    for report in total.values():
        assert report["problems"] == []
        assert (report["bad"], report["lost"], report["leftovers"]) == (0, 0, 0)
    assert total["saves"]["during_saves"] >= KILLS
    assert total["retention"]["during_deletions"] >= RETENTION_KILLS


def start(directory, seed):
    directory.mkdir()
    counts = [str(count // 2) for count in (KILLS, RETENTION_KILLS)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoint_kills", directory, *counts, str(seed)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(job):
    try:
        out, said = job.communicate(timeout=400)
    finally:
        job.kill()
    assert job.returncode == 0, said[-3000:]
    return json.loads(out.splitlines()[-1])
