"""The tutorials run from top to bottom, here and as on Colab, and show their outputs."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest

from models.data import prepare_carried_part
from tests.notebook_runs import NOTEBOOKS, errors, read, repository, run, with_address
from tests.processes import ROOT


# Its interpreter has the packages of Colab's TPU machines; `make test-colab` sets it.
COLAB = os.environ.get("MESHLAYOUT_COLAB", "")
# What Grain logs about Colab's jaxlib when it is imported.
OF_GRAIN = r"WARNING:absl:Grain multiprocess worker profiling requires jaxlib .*\n"


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return request.param


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A TFDS directory with some of the images of Fashion-MNIST."""
    folder = tmp_path_factory.mktemp("images")
    prepare_carried_part(folder)
    return folder


def code_cells(content):
    return [cell for cell in content.cells if cell.cell_type == "code"]


@pytest.mark.slow
def test_every_cell_runs_without_errors_and_warnings(notebook, images):
    environment = {"TFDS_DATA_DIR": str(images), "PYTHONPATH": ""}
    assert errors(run(notebook, folder=notebook.parent, **environment)) == []


@pytest.fixture(scope="module")
def git_address(tmp_path_factory):
    """Variables with which git finds the library as it is here at its address."""
    clone = tmp_path_factory.mktemp("clone")
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(listing, cwd=ROOT, text=True).splitlines()
    for name in filter(lambda name: (ROOT / name).is_file(), names):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    author = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for command in (["init", "-q"], ["add", "-A"], [*author, "commit", "-qm", "All"]):
        subprocess.run(["git", *command], cwd=clone, check=True)
    return {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{clone}.insteadOf",
        "GIT_CONFIG_VALUE_0": repository(),
    }


@pytest.mark.slow
@pytest.mark.skipif(not COLAB, reason="run by `make test-colab`")
def test_it_runs_on_a_fresh_colab_outside_of_a_checkout(
    notebook, images, git_address, tmp_path
):
    subprocess.run(
        [COLAB, "-m", "pip", "uninstall", "-q", "-y", "meshlayout"], check=True
    )
    content = run(
        notebook,
        folder=tmp_path,
        python=COLAB,
        TFDS_DATA_DIR=str(images),
        PYTHONPATH="",
        PYTHONNOUSERSITE="1",
        **git_address,
    )
    # What pip and Grain have to say is not the notebook's.
    for cell in code_cells(content):
        if "%pip" in cell.source:
            cell.outputs = []
    written = [re.sub(OF_GRAIN, "", text) for text in errors(content)]
    assert [text for text in written if text] == []
    where = "import importlib.util as i; print(i.find_spec('meshlayout').origin)"
    origin = subprocess.check_output([COLAB, "-c", where], cwd=tmp_path, text=True)
    assert Path(origin).is_relative_to(Path(COLAB).parents[1])
    assert not subprocess.check_output(
        [COLAB, "-m", "pip", "list", "--format=freeze"], text=True
    ).count("tensorflow==")


def test_every_cell_is_committed_with_what_it_prints_and_without_errors(notebook):
    content = read(notebook)
    assert set(content.metadata) == {"kernelspec", "language_info"}
    assert errors(content) == []
    numbers = [cell.execution_count for cell in code_cells(content)]
    assert numbers == list(range(1, len(numbers) + 1))
    first, *others = code_cells(content)
    assert first.metadata == {"jupyter": {"source_hidden": True}}
    assert not any(cell.metadata for cell in others)
    for cell in code_cells(content):
        assert cell.outputs or "print(" not in re.sub(r"(?m)^ .*", "", cell.source)
    assert "All " in code_cells(content)[-1].outputs[0].text


def test_what_is_committed_is_small_and_says_nothing_of_the_machine(notebook):
    assert notebook.stat().st_size < 300_000
    content = read(notebook)
    for cell in code_cells(content):
        for output in cell.outputs:
            output.get("data", {}).pop("image/png", None)
    text = nbformat.writes(content)
    for name in (str(ROOT), str(Path.home()), os.uname().nodename, "examples/s"):
        assert not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)
    assert not re.search(r"/tmp/\w|0x[0-9a-f]{8}", text)


def test_it_is_a_valid_notebook_with_a_badge_that_opens_this_file(notebook):
    content = read(notebook)
    nbformat.validate(content)
    assert content.cells[0].cell_type == "markdown"
    assert content.cells[0].source.startswith("# ")
    path = repository().removeprefix("https://github.com")
    badge = f"https://colab.research.google.com/github{path}/blob/main/notebooks/"
    assert f"{badge}{notebook.name})" in content.cells[0].source


def test_the_first_cell_installs_from_the_address_of_the_repository(notebook):
    first, *others = code_cells(read(notebook))
    assert f" @ git+{repository()}'" in first.source
    assert first.source.startswith(
        '# @title Install the library { display-mode: "form" }'
    )
    assert not any("%pip" in cell.source for cell in others)
    assert "tfds.load" not in notebook.read_text()
    other = "https://github.com/someone/fork"
    moved = with_address(first.source, other)
    assert moved.count(f"git+{other}'") == 1
    assert with_address(moved, repository()) == first.source


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_a_page_installs_from_the_address_of_the_repository(page):
    text = (ROOT / page).read_text()
    addresses = set(re.findall(r"git\+(https://[\w./-]+\w)", text))
    assert addresses == {repository()}
