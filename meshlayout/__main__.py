"""`python -m meshlayout`: plan, doctor, launch and inspect as one command."""

import argparse
import json
import runpy
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import meshlayout as ml
from meshlayout.errors import MeshLayoutError, did_you_mean
from meshlayout.launch import main as launch


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a sub-command; returns its exit status, 1 where something is wrong."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["launch"]:  # it loads neither JAX nor NumPy
        return launch(arguments[1:])
    parser = argparse.ArgumentParser(prog="meshlayout")
    parsers = parser.add_subparsers(dest="run", required=True)
    parsers.add_parser("launch", help="start several processes on this machine")

    def command(name: str, text: str) -> Any:
        sub = parsers.add_parser(name, help=text, description=text)
        sub.add_argument("--json", action="store_true", help="print JSON")
        return sub.add_argument

    add = command("plan", "rank meshes and layouts for a TPU slice or GPUs")
    add("problem", help="file.py:function or module:function; returns plan's arguments")
    add("--topology", action="append", help="such as v5e:4x4; several are compared")
    add("--budget-s", type=float, help="no longer start compilations after this time")
    add("--workers", type=int, help="number of compilations at a time")
    add = command("doctor", "report what is misconfigured on this machine")
    add("--needs", default="", help="extras that must be installed: data,checkpoint")
    add = command("inspect", "print what a checkpoint holds")
    add("checkpoint", help="a checkpointer's directory")
    add("--step", type=int, help="the latest by default")
    options = vars(parser.parse_args(arguments)).items()
    options = {name: value for name, value in options if value is not None}
    name, is_json = options.pop("run"), options.pop("json")
    try:
        import_module("meshlayout.planning")
    except (ImportError, RuntimeError) as error:  # as JAX with another jaxlib
        sys.exit(f"meshlayout cannot start: {error}")
    try:
        if name == "doctor":
            report = ml.doctor(needs=[x for x in options["needs"].split(",") if x])
            failed, facts = report.wrong, report.to_dict()
        elif name == "plan":
            report = ml.plan(**_problem(**options))
            failed, facts = not (report.fits or report.changes), report.to_dict()
        else:
            with ml.Checkpointer(options["checkpoint"]) as checkpointer:
                report = checkpointer.inspect(options.get("step", "latest"))
                failed, steps = False, checkpointer.all_steps()
            facts = {"steps": steps, **vars(report)}
            report = f"steps: {', '.join(map(str, steps))}\n{report!r}"
    except MeshLayoutError as error:
        sys.exit(f"meshlayout {name}: {error}")
    if is_json:  # which has neither infinity nor NaN
        text = json.dumps(facts, default=str)
        report = json.dumps(json.loads(text, parse_constant=lambda _: None), indent=2)
    sys.stdout.write(f"{report}\n")
    return int(bool(failed))


def _problem(problem: str, **options: Any) -> dict[str, Any]:
    """Returns the arguments of `plan`: a user's dict, and options."""
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
    given = values[function]()
    given = {**given, **options} if isinstance(given, dict) else {}
    needed = "build", "loss_fn", "batch", "optimizer", "topology"
    if missing := [x for x in needed if x not in given]:
        msg = f"{problem!r} must return a dict that also has {', '.join(missing)}"
        raise MeshLayoutError(f"{msg}; or give --topology.")
    return given


if __name__ == "__main__":
    sys.exit(main())
