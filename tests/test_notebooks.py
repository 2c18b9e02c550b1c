"""The tutorials run from top to bottom, and are committed without outputs."""

from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient


ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def read(path):
    return nbformat.read(path, as_version=4)


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return request.param


def test_there_is_a_notebook():
    assert NOTEBOOKS


@pytest.mark.slow
def test_every_cell_runs_without_errors_and_warnings(notebook, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # Without kernel directories, `python3` is the interpreter that runs this test.
    kernels = KernelSpecManager(kernel_dirs=[])
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=kernels)
    read_notebook = read(notebook)
    client = NotebookClient(
        read_notebook,
        km=manager,
        timeout=600,
        resources={"metadata": {"path": str(notebook.parent)}},
    )
    client.execute(cleanup_kc=True)
    said = [
        output.text
        for cell in read_notebook.cells
        for output in cell.get("outputs", [])
        if output.get("name") == "stderr"
    ]
    assert said == []


def test_outputs_and_metadata_are_stripped(notebook):
    content = read(notebook)
    assert set(content.metadata) <= {"kernelspec", "language_info"}
    for cell in content.cells:
        assert not cell.metadata
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def test_it_is_a_valid_notebook_with_a_badge_that_opens_this_file(notebook):
    content = read(notebook)
    nbformat.validate(content)
    assert content.cells[0].cell_type == "markdown"
    assert content.cells[0].source.startswith("# ")
    badge = "https://colab.research.google.com/github/"
    assert badge in content.cells[0].source
    assert f"/notebooks/{notebook.name})" in content.cells[0].source


def test_it_ends_in_assertions(notebook):
    code = [cell for cell in read(notebook).cells if cell.cell_type == "code"]
    assert "assert" in code[-1].source
