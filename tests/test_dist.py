"""The wheel and the source archive, as `make dist` makes them and a user installs them."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive."""
    pytest.importorskip("hatchling", reason="make dist installs hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def test_the_wheel_and_the_source_archive_have_the_library(dist):
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "meshlayout/__init__.py"} <= names
    (wheel,) = dist.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert folders == {"meshlayout"}
    assert "meshlayout/py.typed" in names
    modules = {str(path.relative_to(ROOT)) for path in ROOT.glob("meshlayout/**/*.py")}
    assert modules <= {*names}
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_the_readme_program_runs_where_only_the_wheel_is_installed(dist, tmp_path):
    environment = tmp_path / "env"
    python = environment / "bin" / "python"
    (wheel,) = dist.glob("*.whl")
    tag = f"py{sys.version_info.major}{sys.version_info.minor}"
    constraints = ROOT / "constraints" / f"{tag}.txt"
    pip = [python, "-m", "pip", "install", "-q", "-c", constraints, wheel]
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    program = "\n".join(blocks)
    (tmp_path / "program.py").write_text(f"{program}print(ml.__file__)\n")
    for command in ([sys.executable, "-m", "venv", environment], pip):
        subprocess.run(command, check=True, capture_output=True)
    run = subprocess.run(
        [python, "-I", "program.py"],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        env={"JAX_PLATFORMS": "cpu", "PATH": ""},
    )
    assert run.returncode == 0, run.stderr
    *_, where = run.stdout.split()
    assert Path(where).is_relative_to(environment)
