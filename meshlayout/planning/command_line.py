"""The sub-commands of `python -m meshlayout`; `__main__` takes `launch` out before."""

import argparse
import json
import runpy
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from meshlayout.checkpoint import Checkpointer
from meshlayout.errors import MeshLayoutError, did_you_mean
from meshlayout.planning.checkup import doctor
from meshlayout.planning.search import plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a sub-command; returns its exit status, 1 where something is wrong."""
    parser = argparse.ArgumentParser(prog="meshlayout")
    parsers = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run: Any, text: str) -> Any:
        sub = parsers.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="print JSON")
        return sub.add_argument

    add = command("plan", _plan, "rank meshes and layouts for a slice or GPUs")
    text = "package.module:function or file.py:function; it returns a dict of the "
    add("problem", help=f"{text}arguments of ml.plan: build, loss_fn, batch ...")
    add("--topology", action="append", help="as v5e:4x4; several are compared")
    add("--budget-s", type=float, help="for how long compilations may be started")
    add("--workers", type=int, help="how many compilations go at once")
    add = command("doctor", _doctor, "say what is set wrong on this machine")
    add("--needs", default="", help="extras that must be installed: data,checkpoint")
    add = command("inspect", _inspect, "print what a checkpoint holds")
    add("checkpoint", help="a checkpointer's directory")
    add("--step", type=int, help="the latest by default")
    parsers.add_parser("launch", help="start several processes on this machine")
    options = vars(parser.parse_args(arguments))
    name, run, is_json = (options.pop(x) for x in ("command", "run", "json"))
    try:
        is_wrong, text, facts = run(**options)
    except MeshLayoutError as error:
        sys.stderr.write(f"meshlayout {name}: {error}\n")
        return 1
    if is_json:  # which has neither infinity nor NaN
        text = json.dumps(facts, default=str)
        facts = json.loads(text, parse_constant=lambda _: None)
        text = json.dumps(facts, indent=2)
    sys.stdout.write(f"{text}\n")
    return int(is_wrong)


def _plan(problem: str, **options: Any) -> tuple[bool, object, dict[str, Any]]:
    name, _, function = problem.rpartition(":")
    sys.path.insert(0, "")  # as `python -m` does; the console script does not
    try:
        is_file = name.endswith(".py")
        values = runpy.run_path(name) if is_file else vars(import_module(name))
    except (FileNotFoundError, ModuleNotFoundError, ValueError) as error:
        msg = f"{problem!r} is not module:function or file.py:function"
        raise MeshLayoutError(f"{msg}: {error}.") from error
    if function not in values:
        hint = did_you_mean(function, values)
        raise MeshLayoutError(f"{name} has no {function!r}.{hint}")
    arguments = dict(values[function]())
    given = {name: value for name, value in options.items() if value is not None}
    ranking = plan(**(arguments | given))
    return not (ranking.fits or ranking.changes), ranking, ranking.to_dict()


def _doctor(needs: str) -> tuple[bool, object, dict[str, Any]]:
    checkup = doctor(needs=[x for x in needs.split(",") if x])
    return bool(checkup.wrong), checkup, checkup.to_dict()


def _inspect(checkpoint: str, step: Any) -> tuple[bool, object, dict[str, Any]]:
    with Checkpointer(checkpoint) as checkpointer:
        contents = checkpointer.inspect("latest" if step is None else step)
        steps = checkpointer.all_steps()
    text = f"steps: {', '.join(map(str, steps))}\n{contents!r}"
    return False, text, {"steps": steps, **vars(contents)}
