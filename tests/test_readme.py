"""The README's program runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path


README = Path(__file__).parents[1] / "README.md"


def test_the_readme_program_trains(tmp_path: Path):
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    script = tmp_path / "program.py"
    script.write_text(program)
    run = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(README.parent)},
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.strip().splitlines()
    assert any(line.startswith("up/kernel") for line in lines)
    (loss,) = [float(line.split()[1]) for line in lines if line.startswith("loss")]
    assert 0 < loss < 5
