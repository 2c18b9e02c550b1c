"""Runs the notebooks: `python -m tests.notebook_runs` writes their outputs.

Outputs are committed, so that whoever looks at a notebook on a page sees its tables and
pictures. What would differ from run to run (how long it took) is left out, and pictures
are kept as images: pages remove SVG from the HTML of a notebook.

The images come from a small dataset in TFDS's format, made here of those in `models/`,
so that a run needs no internet.
"""

import os
import re
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from models.data import prepare_carried_part
from tests.processes import ROOT


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

# Seconds, speed and remaining time in the progress lines of a fit.
_TIMES = re.compile(r"  \([\d.]+ s(, [\d:]+ left)?(, [\d,.e+]+ examples/s)?\)")

Notebook = Any
"""A `nbformat.NotebookNode`, whose attributes are dynamic."""


def repository() -> str:
    """Returns the address of the repository, which pyproject.toml has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["urls"]["Repository"]


def with_address(source: str, address: str) -> str:
    """Returns the source of a cell with the address of the repository."""
    source = re.sub(r"(?<=git\+)https://[^'\s]+", address, source)
    in_colab = "https://colab.research.google.com/github"
    _, _, name = address.partition("https://github.com")
    return re.sub(
        rf"{re.escape(in_colab)}/[^/]+/[^/]+(?=/blob/)", in_colab + name, source
    )


def read(path: Path) -> Notebook:
    return nbformat.read(path, as_version=4)


def run(
    path: Path, *, folder: Path, python: str = sys.executable, **environment: str
) -> Notebook:
    """Runs a notebook from top to bottom; returns it with its outputs.

    Args:
        path: The notebook.
        folder: The directory in which it runs.
        python: The interpreter of its kernel.
        **environment: Variables on top of this process's.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell fails.
    """
    notebook = read(path)
    # Without kernel directories, `python3` is the interpreter that runs this.
    kernels = KernelSpecManager(kernel_dirs=[])
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=kernels)
    manager.kernel_spec.argv[0] = python
    client = NotebookClient(
        notebook,
        km=manager,
        timeout=600,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(cleanup_kc=True, env={**os.environ, **environment})
    return notebook


def tidy(notebook: Notebook) -> Notebook:
    """Leaves out of the outputs what pages do not show, and how long things took."""
    for cell in notebook.cells:
        cell.source = with_address(cell.source, repository())
    notebook.metadata = {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        },
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(_code_cells(notebook), 1):
        folded = cell.metadata.get("jupyter")  # the cell that installs
        cell.metadata = {"jupyter": folded} if folded else {}
        cell.execution_count = number
        cell.outputs = _joined(cell.outputs)
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = number
            data = output.get("data", {})
            if "image/svg+xml" in data:
                data.pop("text/html", None)
            if "image/png" in data:
                data.pop("image/jpeg", None)
            for kind in {"text/html", "text/plain"} & {*data}:
                data[kind] = _lasting(data[kind])
            if "text" in output:
                output.text = _lasting(output.text)
    return notebook


def _lasting(text: str) -> str:
    """Returns a text without times, and without the names of temporary folders."""
    text = re.sub(rf"{re.escape(tempfile.gettempdir())}/tmp\w+", "...", text)
    return _TIMES.sub("", text)


def _joined(outputs: list[Any]) -> list[Any]:
    """Joins printed text, which comes in as many pieces as chance would have it."""
    joined: list[Any] = []
    for output in outputs:
        is_text = output.output_type == "stream" and bool(joined)
        if is_text and joined[-1].get("name") == output.name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def errors(notebook: Notebook) -> list[str]:
    """Returns what the cells wrote to standard error, and their exceptions."""
    outputs = [output for cell in _code_cells(notebook) for output in cell.outputs]
    return [
        output.get("text") or output.get("evalue", "")
        for output in outputs
        if output.get("name") == "stderr" or output.output_type == "error"
    ]


def _code_cells(notebook: Notebook) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def main(names: list[str]) -> None:
    """Runs the notebooks whose names begin so, or all, and writes their outputs."""
    with tempfile.TemporaryDirectory() as data_dir:
        prepare_carried_part(Path(data_dir))
        for path in NOTEBOOKS:
            if not names or path.name.startswith(tuple(names)):
                print(path.name, flush=True)  # noqa: T201
                environment = {"TFDS_DATA_DIR": data_dir, "PYTHONPATH": ""}
                notebook = tidy(run(path, folder=path.parent, **environment))
                if said := errors(notebook):
                    sys.exit(
                        "\n".join([f"{path.name} wrote to standard error:", *said])
                    )
                nbformat.write(notebook, path)


if __name__ == "__main__":
    main(sys.argv[1:])
