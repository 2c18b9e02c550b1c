"""The pages of docs/: their programs run, and name what exists."""

import functools
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import meshlayout as ml
from tests.processes import ROOT


DOCS = ROOT / "docs"
FOLDERS = ("coming_from", "guides")
PAGES = [DOCS / "index.md", DOCS / "scaling.md"]
PAGES += [page for name in FOLDERS for page in sorted((DOCS / name).glob("*.md"))]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_programs_of_a_page_run(page: Path, tmp_path: Path):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    script = tmp_path / f"page_{page.stem}.py"
    script.write_text("\n".join(blocks))
    run = subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        env=None,
        check=False,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_names_in_a_table_exist(page: Path):
    names = set(re.findall(r"\bml((?:\.\w+)+)", page.read_text()))
    assert names
    for name in names:
        functools.reduce(getattr, name[1:].split("."), ml)


def test_the_reference_has_every_public_name():
    text = "".join(path.read_text() for path in DOCS.glob("reference/*.md"))
    listed = set(re.findall(r"^::: meshlayout\.(\S+)", text, re.MULTILINE))
    modules = {name for name in ml.__all__ if inspect.ismodule(getattr(ml, name))}
    assert {name for name in listed if "." not in name} == {*ml.__all__} - modules
    for name in listed:
        functools.reduce(getattr, name.split("."), ml)
    # Every module that users import has its page.
    assert modules <= {*(path.stem for path in DOCS.glob("reference/*.md"))} | {
        name.split(".")[0] for name in listed
    }
