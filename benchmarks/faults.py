"""How long other processes take to end when one fails, and whether they name it.

`python benchmarks/faults.py` runs every fault at every place, with two processes and
with four, watched by meshlayout, and with two under JAX alone, with its own defaults,
and writes `benchmarks/results/faults.md`. JAX alone takes minutes for most of them, so
several jobs run at a time (`--jobs`); they mostly wait.
"""

import argparse
import itertools
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax


sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.faults import FAULTS, PLACES, Ended, run_job


_RESULTS = Path(__file__).parent / "results" / "faults.md"

_INTRODUCTION = """\
# Faults

Seconds from a fault in one process until all others have ended, and how they ended.
jax {version}, CPU devices, real processes on one machine; the time-outs are the
defaults, but for a process that is alive and stuck: `step_timeout_s=5` (off by default;
JAX has nothing of the kind). JAX alone runs the same program after
`jax.distributed.initialize` with JAX's defaults; the save and the batches are
meshlayout's in both. Runs of JAX alone were stopped after {limit:g} seconds. Process 0
holds JAX's coordination service. A fault in the middle of a save happens in the thread
that writes it, one in a batch in the source. Each figure is one run, with
others beside it on two busy cores. `python benchmarks/faults.py` makes them.

"""

_HEADERS = (
    *("processes", "fault", "during", "in process"),
    *("meshlayout", "names it", "JAX alone", "names it"),
)


def main() -> None:
    """Runs the faults and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--bare-limit", type=float, default=110)
    options = parser.parse_args()
    cases = [
        (count, fault, place, victim)
        for count, fault, place in itertools.product((2, 4), FAULTS, PLACES)
        for victim in (0, count - 1)
    ]

    def row(case: tuple[int, str, str, int]) -> str:
        cells = [f"{value}" for value in case]
        watched = ["--step-timeout=5"] if case[1] == "stuck" else []
        cells += _cells(run_job(*case, *watched), case[-1])
        if case[0] == 2:
            ends = run_job(*case, "--bare", timeout_s=options.bare_limit)
            cells += _cells(ends, case[-1])
        line = f"| {' | '.join([*cells, '', ''][: len(_HEADERS)])} |"
        print(line, flush=True)
        return line

    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(row, cases))
    text = _INTRODUCTION.format(version=jax.__version__, limit=options.bare_limit)
    table = [f"| {' | '.join(_HEADERS)} |", "|---" * len(_HEADERS) + "|", *rows]
    _RESULTS.write_text("\n".join([text, *table, ""]))


def _cells(ends: list[Ended], victim: int) -> tuple[str, str]:
    """Returns when the last of the others ended and how, and whether it is named."""
    others = [end for index, end in enumerate(ends) if index != victim]
    last = max(others, key=lambda end: end.after_s)
    statuses = sorted({end.status for end in others}, key=str)
    words = {None: "hang", -6: "SIGABRT"}
    how = ", ".join(words.get(status, f"status {status}") for status in statuses)
    after = (
        f"over {last.after_s:.0f} s" if None in statuses else f"{last.after_s:.1f} s"
    )
    name = re.compile(
        rf"process {victim} \(|/task:{victim}\b|[Pp]rocess {victim} failed"
    )
    are_named = [bool(name.search(end.output)) for end in others]
    is_named = "yes" if all(are_named) else "some" if any(are_named) else "no"
    return f"{after}, {how}", is_named


if __name__ == "__main__":
    main()
