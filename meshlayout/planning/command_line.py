"""The sub-commands of `python -m meshlayout`; `launch` is one in `__main__`."""

import argparse
import importlib
import json
import math
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshlayout import _render
from meshlayout.checkpoint import Checkpointer
from meshlayout.errors import MeshLayoutError, did_you_mean
from meshlayout.planning.checkup import doctor
from meshlayout.planning.search import plan


_EPILOG = "launch takes the options of python -m meshlayout.launch."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a sub-command; returns its exit status, 1 where something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m meshlayout", epilog=_EPILOG)
    parsers = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run: Callable[..., int], text: str) -> Any:
        sub = parsers.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="print JSON")
        return sub.add_argument

    add = command("plan", _plan, "rank meshes and layouts for a slice or GPUs")
    help_text = "package.module:function or file.py:function; it returns a dict of the "
    add("problem", help=f"{help_text}arguments of ml.plan: build, loss_fn, batch ...")
    add("--topology", action="append", help="as v5e:4x4; several are compared")
    add("--budget-s", type=float, help="for how long compilations may be started")
    add("--workers", type=int, help="how many compilations go at once")
    add = command("doctor", _doctor, "say what is set wrong on this machine")
    add("--needs", default="", help="extras that must be installed: data,checkpoint")
    add = command("inspect", _inspect, "print what a checkpoint holds")
    add("checkpoint", help="a checkpointer's directory")
    add("--step", type=int, help="the step to list; the latest by default")
    parsers.add_parser("launch", help="start several processes on this machine")
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except MeshLayoutError as error:
        sys.stderr.write(f"meshlayout {options.command}: {error}\n")
        return 1


def _show(value: object, facts: Mapping[str, Any], *, as_json: bool) -> None:
    text = json.dumps(_plain(facts), indent=2) if as_json else str(value)
    sys.stdout.write(f"{text}\n")


def _plain(value: Any) -> Any:
    """Returns a value that JSON can hold: it has neither infinity nor NaN."""
    if isinstance(value, Mapping):
        return {str(key): _plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    plain = isinstance(value, (str, int, float, bool, type(None)))
    return value if plain else str(value)


def _plan(options: argparse.Namespace) -> int:
    name, _, function = options.problem.rpartition(":")
    if not name or not function:
        msg = f"{options.problem!r} is not of the form module:function."
        raise MeshLayoutError(msg)
    sys.path.insert(0, "")  # as `python -m` does
    if name.endswith(".py"):
        values = runpy.run_path(name)
    else:
        values = vars(importlib.import_module(name))
    if function not in values:
        hint = did_you_mean(function, values)
        raise MeshLayoutError(f"{name} has no {function!r}.{hint}")
    arguments = dict(values[function]())
    given = {"budget_s": options.budget_s, "workers": options.workers}
    arguments |= {name: value for name, value in given.items() if value is not None}
    if options.topology:
        arguments["topology"] = options.topology
    ranking = plan(**arguments)
    _show(ranking, ranking.to_dict(), as_json=options.json)
    return 0 if ranking.fits or ranking.changes else 1


def _doctor(options: argparse.Namespace) -> int:
    checkup = doctor(needs=[x for x in options.needs.split(",") if x])
    _show(checkup, checkup.to_dict(), as_json=options.json)
    return 0 if checkup.is_well else 1


def _inspect(options: argparse.Namespace) -> int:
    with Checkpointer(options.checkpoint) as checkpointer:
        steps = checkpointer.all_steps()
        if not steps and not Path(options.checkpoint).exists():
            msg = f"there is no directory {options.checkpoint!r}."
            raise MeshLayoutError(msg)
        if not steps:
            raise MeshLayoutError(f"{options.checkpoint!r} has no saved steps.")
        step = steps[-1] if options.step is None else options.step
        contents = checkpointer.inspect(step)
    facts = {
        "steps": steps,
        "step": contents.step,
        "saved_at": contents.saved_at.isoformat(),
        "nbytes": contents.nbytes,
        "num_processes": contents.num_processes,
        "metrics": contents.metrics,
        "metadata": contents.metadata,
        "arrays": contents.arrays,
    }
    listed = ", ".join(map(str, steps))
    size = _render.bytes_text(contents.nbytes)
    text = f"steps: {listed}; step {contents.step} has {size}\n{contents!r}"
    _show(text, facts, as_json=options.json)
    return 0
