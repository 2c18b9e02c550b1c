"""Rules of the house that no linter knows: names, files and types of the package."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import meshlayout as ml


ROOT = Path(ml.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


@pytest.fixture(scope="module")
def trees():
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def test_one_class_name_means_one_thing(trees):
    places = defaultdict(list)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_files_are_named_by_nouns():
    # What ends so is a gerund or a participle: it says what is done, not what is there.
    endings = ("ing", "ed")
    words = {path: path.stem.split("_")[-1] for path in FILES}
    found = [
        str(path.relative_to(ROOT))
        for path, word in words.items()
        if word.endswith(endings)
    ]
    assert found == []


def test_attributes_of_the_package_go_down_the_layers_as_imports_do(trees):
    # They load a module at first use, and import-linter does not see them.
    settings = tomllib.loads((ROOT.parent / "pyproject.toml").read_text("utf-8"))
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    level = {x: i for i, layer in enumerate(layers) for x in layer.split(" | ")}
    used = set()
    for path, tree in trees.items():
        home = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == ROOT.name:
                used.add((home, node.attr))
    upward = {(x, y) for x, y in used if level.get(y, 99) <= level.get(x, -1)}
    # The methods of steps that compile for other devices, save and load.
    assert upward == {("step", "planning")}


def test_few_parameters_are_of_any_type(trees):
    counts = Counter()
    for tree in trees.values():
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            arguments = node.args
            plain = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            annotated = [x.annotation for x in plain if x.annotation is not None]
            counts["all"] += len(annotated)
            counts["Any"] += sum(ast.unparse(x) == "Any" for x in annotated)
    assert counts["Any"] < counts["all"] / 10


def test_a_reader_has_few_files_to_open():
    # In a process of its own: what other tests leave, such as hooks that a strategy has
    # on Variables, passes through files of its own.
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.files_passed"],
        cwd=ROOT.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    counts = dict(re.findall(r"(\w+): (\d+) files", run.stdout))
    limits = {"train_step": 12, "restore": 8, "batch": 14}
    assert {way: int(counts[way]) <= limit for way, limit in limits.items()} == (
        dict.fromkeys(limits, True)
    ), counts
