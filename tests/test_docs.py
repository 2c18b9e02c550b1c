"""The programs on the pages of docs/ run, one page after the other's example."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import meshlayout as ml
from tests.processes import ROOT


PAGES = sorted((ROOT / "docs" / "coming_from").glob("*.md"))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_programs_of_a_page_run(page: Path, tmp_path: Path):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    script = tmp_path / f"coming_from_{page.stem}.py"
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
        value = ml
        for part in name[1:].split("."):
            value = getattr(value, part)
