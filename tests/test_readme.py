"""The README's programs run as they stand, and the tour names files that exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import meshlayout


README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """The lines that the programs print."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    script = tmp_path_factory.mktemp("readme") / "program.py"
    script.write_text("\n".join(blocks))
    run = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(README.parent)},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip().splitlines()


def test_the_readme_program_prints_what_it_shows(lines):
    shown = re.findall(r"```text\n(.*?)```", README.read_text(), re.DOTALL)
    shown = [re.sub(r" +\(.*", "", line) for line in shown[0].splitlines()]
    assert len(shown) == 3
    if jax.__version_info__[:2] == (0, 10):  # with which README was written
        assert shown == [re.sub(r" +\(.*", "", line) for line in lines[:3]]
    assert any(line.startswith("up/kernel") for line in lines)
    loss, accuracy = (float(line.split()[-1]) for line in lines[-2:])
    assert 0 < loss < 2
    assert accuracy > 0.3


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 120


def test_the_citation_names_this_version():
    text = (README.parent / "CITATION.cff").read_text()
    assert f"\nversion: {meshlayout.__version__}\n" in text


def test_the_tour_names_files_that_exist():
    root = README.parent
    tour = (root / "docs" / "tour.md").read_text()
    names = set(re.findall(r"[\w/]+\.py\b", tour))
    files = [f"/{path.relative_to(root)}" for path in root.glob("[a-z]*/**/*.py")]
    missing = [
        name for name in names if not any(file.endswith(f"/{name}") for file in files)
    ]
    assert names
    assert sorted(missing) == []


def test_the_tour_names_functions_that_exist():
    root = README.parent
    tour = (root / "docs" / "tour.md").read_text()
    code = "\n".join(path.read_text() for path in root.glob("meshlayout/**/*.py"))
    names = {
        name.split(".")[-1]
        for name in re.findall(r"`([A-Za-z_.]+)`", tour)
        if not name.endswith((".py", ".toml")) and (name.lower() != name or "." in name)
    }
    missing = [name for name in names if not re.search(rf"\b{name}\b", code)]
    assert sorted(missing) == []
