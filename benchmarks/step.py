"""Whole training steps: ours next to hand-written JAX and the peers.

`python -m benchmarks.step --model mlp --devices 8` prints steps per second and ratios
to a hand-written `jax.jit` with NamedShardings, from host batches; with `--placed`, of
calls alone, with batches that are on the devices already; and the figures of both
compiled programs. Every way measures loss and accuracy. Each runs in a process of its
own, on devices that `ml.virtual_devices` makes, and they take turns, window by window;
the figures are medians over the windows, and ratios are medians of the ratios within a
round. scalax and Keras take part where they are installed (`pip install scalax keras`).
"""

import argparse
import contextlib
import importlib.util
import platform
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
from flax import __version__ as flax_version

import meshlayout as ml
from benchmarks.step_ways import WORKS, Contest


PACKAGES = {"scalax sjit": "scalax", "Keras 3 fit": "keras"}


@contextlib.contextmanager
def started(way: str, arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that runs one way, warmed up and waiting."""
    command = [sys.executable, "-m", "benchmarks.step_ways", way, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            # Keras and others print lines of their own.
            while (line := answer(process)) != "ready":
                print(line, file=sys.stderr)
            yield process
        finally:
            process.kill()


def answer(process: subprocess.Popen[str]) -> str:
    """Returns the next line a process prints."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{process.args} ended early")
    return line.strip()


def seconds(process: subprocess.Popen[str]) -> float:
    """Returns how long a process takes for a window of steps."""
    assert process.stdin is not None
    process.stdin.write("window\n")
    process.stdin.flush()
    return float(answer(process))


def programs(contest: Contest) -> dict[str, Any]:
    """Returns the compiled program of the hand-written step, and ours."""
    jitted, state, sums, rows = contest.jitted()
    batch = jax.device_put(contest.batches[0], rows)
    step = ml.make_train_step(
        contest.work.loss_fn, metrics={"accuracy": contest.accuracy()}
    )
    return {
        "hand-written jax.jit": jitted.lower(state, batch, sums).compile(),
        "make_train_step": step.lower(contest.state(), batch).compile(),
    }


def figures(compiled: Any) -> str:
    """Returns a row of a compiled program's figures per device."""
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    collectives = Counter(
        re.findall(
            r" (all-reduce|all-gather|reduce-scatter|all-to-all)(?:-start)?\(",
            compiled.as_text(),
        )
    )
    text = ", ".join(f"{count} {kind}" for kind, count in collectives.items()) or "none"
    megabytes = memory.temp_size_in_bytes / 1e6
    return f"{cost['flops'] / 1e6:.2f} | {text} | {megabytes:.2f}"


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=WORKS, default="mlp")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--placed", action="store_true", help="time calls alone")
    parser.add_argument(
        "--skip",
        nargs="*",
        default=[],
        help='ways to leave out, such as "Keras 3 fit", which on eight virtual devices '
        "and two cores can wait for itself until XLA ends the process",
    )
    options = parser.parse_args()
    arguments = ["--model", options.model, "--devices", str(options.devices)]
    arguments += ["--placed"] * options.placed
    work = WORKS[options.model]
    contest = Contest(work, options.devices, placed=options.placed)
    ways = [
        way
        for way in contest.ways()
        if importlib.util.find_spec(PACKAGES.get(way, "jax"))
        and way not in options.skip
    ]
    with contextlib.ExitStack() as stack:
        processes = {way: stack.enter_context(started(way, arguments)) for way in ways}
        rounds = [
            {way: seconds(process) for way, process in processes.items()}
            for _ in range(options.rounds)
        ]
    print(
        f"{options.model}, {options.devices} devices, "
        f"{'placed batches, ' if options.placed else ''}{work.steps} steps a window, "
        f"{options.rounds} rounds; jax {jax.__version__}, flax {flax_version}, "
        f"Python {platform.python_version()}"
    )
    print("\n| way | steps/s | ratio |\n|---|---|---|")
    first = ways[0]
    for way in ways:
        rate = statistics.median(work.steps / times[way] for times in rounds)
        ratio = statistics.median(times[first] / times[way] for times in rounds)
        print(f"| {way} | {rate:.1f} | {ratio:.2f} |")
    ml.virtual_devices(options.devices)
    print("\n| program | MFLOP | collectives | temporary MB |\n|---|---|---|---|")
    for name, compiled in programs(contest).items():
        print(f"| {name} | {figures(compiled)} |")


if __name__ == "__main__":
    main()
