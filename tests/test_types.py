"""A user's program keeps its types: pyright on `tests/typed/user_program.py`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


PROGRAM = Path(__file__).parent / "typed" / "user_program.py"


@pytest.mark.slow
def test_types_go_through_a_users_program():
    pytest.importorskip("pyright")
    command = [sys.executable, "-m", "pyright", "--outputjson"]
    done = subprocess.run(
        [*command, "--pythonpath", sys.executable, str(PROGRAM)],
        capture_output=True,
        text=True,
        check=False,
        cwd=PROGRAM.parents[2],
    )
    report = json.loads(done.stdout)
    problems = report["generalDiagnostics"]
    assert [(p["range"]["start"]["line"] + 1, p["message"]) for p in problems] == []
    assert report["summary"]["filesAnalyzed"] == 1
