"""The sub-commands of `python -m meshlayout`; `launch` is one in `__main__`."""

import argparse
import importlib
import json
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshlayout.checkpoint import Checkpointer
from meshlayout.errors import MeshLayoutError, did_you_mean
from meshlayout.planning.checkup import doctor
from meshlayout.planning.search import plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a sub-command; returns its exit status, 1 where something is wrong."""
    epilog = "launch takes --json, then the options of python -m meshlayout.launch."
    parser = argparse.ArgumentParser(prog="meshlayout", epilog=epilog)
    parsers = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run: Callable[..., Any], text: str) -> Any:
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
    options = parser.parse_args(arguments)
    try:
        status, text, facts = options.run(options)
    except MeshLayoutError as error:
        sys.stderr.write(f"meshlayout {options.command}: {error}\n")
        return 1
    if options.json:  # which has neither infinity nor NaN
        text = json.dumps(facts, default=str)
        facts = json.loads(text, parse_constant=lambda _: None)
        text = json.dumps(facts, indent=2)
    sys.stdout.write(f"{text}\n")
    return status


def _plan(options: argparse.Namespace) -> tuple[int, object, Mapping[str, Any]]:
    name, _, function = options.problem.rpartition(":")
    if not name:
        msg = f"{options.problem!r} is not module:function or file.py:function."
        raise MeshLayoutError(msg)
    sys.path.insert(0, "")  # as `python -m` does; the console script does not
    try:
        is_file = name.endswith(".py")
        values = (
            runpy.run_path(name) if is_file else vars(importlib.import_module(name))
        )
    except (FileNotFoundError, ModuleNotFoundError) as error:
        raise MeshLayoutError(f"{name!r} cannot be imported: {error}.") from error
    if function not in values:
        hint = did_you_mean(function, values)
        raise MeshLayoutError(f"{name} has no {function!r}.{hint}")
    names = ("topology", "budget_s", "workers")
    given = {name: vars(options)[name] for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    ranking = plan(**(dict(values[function]()) | given))
    return int(not ranking.fits and not ranking.changes), ranking, ranking.to_dict()


def _doctor(options: argparse.Namespace) -> tuple[int, object, Mapping[str, Any]]:
    checkup = doctor(needs=[x for x in options.needs.split(",") if x])
    return int(bool(checkup.wrong)), checkup, checkup.to_dict()


def _inspect(options: argparse.Namespace) -> tuple[int, object, Mapping[str, Any]]:
    step = "latest" if options.step is None else options.step
    with Checkpointer(options.checkpoint) as checkpointer:
        contents, steps = checkpointer.inspect(step), checkpointer.all_steps()
    text = f"steps: {', '.join(map(str, steps))}\n{contents!r}"
    return 0, text, {"steps": steps, **vars(contents)}
