"""The README's programs run as they stand, and the tour names files that exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import meshlayout


README = Path(__file__).parents[1] / "README.md"


def run_readme_program(folder, *command, first="", **environment):
    """Runs the programs with Python and its options; returns the lines they printed."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    program = first + "\n".join(blocks)
    script = folder / "program.py"
    script.write_text(program)
    run = subprocess.run(
        [sys.executable, *command, str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(README.parent),
            **environment,
        },
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip().splitlines()


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    return run_readme_program(
        tmp_path_factory.mktemp("one"),
        *("-W", "error"),
    )


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


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_readme_program_prints_the_same_numbers_in_two_processes(lines, tmp_path):
    # The line that a program of several processes begins with.
    first = "import meshlayout as ml\n\nml.initialize()\n"
    options = ["-n", "2", "--devices-per-process", "4"]
    command = ["-m", "meshlayout.launch", *options]
    printed = run_readme_program(tmp_path, *command, first=first)
    for index in range(2):
        prefix = f"[{index}] "
        own = [x.removeprefix(prefix) for x in printed if x.startswith(prefix)]
        own = untimed(own)
        assert any(line.startswith("accuracy") for line in own[-3:])
        expected = untimed(lines)
        is_last = [line.startswith("accuracy") for line in expected]
        expected = expected[: len(expected) - is_last[::-1].index(True)]
        title = expected.index("Mesh(batch=2, model=4)")
        expected[title] = "Mesh(batch=2, model=4; batch across 2 processes)"
        # Gloo writes into the same stream, wherever it is; and processes add up in
        # another order, which may round the last digit otherwise.
        for line in expected:
            parts = map(re.escape, NUMBER.split(line))
            found = re.search(f"({NUMBER.pattern})".join(parts), "\n".join(own))
            assert found, line
            numbers = np.float64(found.groups()), np.float64(NUMBER.findall(line))
            np.testing.assert_allclose(*numbers, rtol=1e-3)


NUMBER = re.compile(r"\d+\.\d+")


def untimed(lines):
    """The lines without Gloo's, and without those that say how long an epoch took."""
    noise = r"^epoch \d+/\d+ |\[Gloo\]|peer ranks"
    return [line for line in lines if not re.search(noise, line)]


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
