"""How long other processes take to end when one fails, and whether they name it.

`python benchmarks/faults.py` runs every fault at every place, with two processes, once
bare and once under the launcher, and some with four, and writes
`benchmarks/results/faults.md`. Several jobs run at a time (`--jobs`); they mostly wait.
"""

import argparse
import itertools
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax


sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.faults import FAULTS, PLACES, run_job


_RESULTS = Path(__file__).parent / "results" / "faults.md"

_INTRODUCTION = """\
# Faults

Seconds from a fault in one process until the last other process, or the launcher, has
ended; the status of that; and whether all others, or the launcher, name the process.
jax {version}, CPU devices, real processes on one machine with two busy cores, one run
each; all time-outs are the defaults. Process 0 holds JAX's coordination service. At the
end of the program the others may have ended well before the fault: status 0, and nobody
is named. A process that holds Python's lock for 20 seconds is none that fails.
`python benchmarks/faults.py` makes the table.

"""

_HEADERS = (
    *("processes", "fault", "at", "in process"),
    *("others end after", "status", "named", "launcher ends after", "status", "named"),
)


def main() -> None:
    """Runs the faults and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=4)
    options = parser.parse_args()
    cases = [
        *((2, *case) for case in itertools.product(FAULTS, PLACES, (0, 1))),
        *((4, fault, "step", 3) for fault in FAULTS),
        *((2, "lock 20", place, 1) for place in ("step", "save")),
        *((2, "none", "end", 1), (4, "none", "end", 1)),
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(_row, cases))
    text = _INTRODUCTION.format(version=jax.__version__)
    table = [f"| {' | '.join(_HEADERS)} |", "|---" * len(_HEADERS) + "|", *rows]
    _RESULTS.write_text("\n".join([text, *table, ""]))


def _row(case: tuple[int, str, str, int]) -> str:
    cells = [f"{value}" for value in case]
    for is_launched in (False, True):
        ends = run_job(*case, is_launched=is_launched)
        others = [e for i, e in enumerate(ends) if is_launched or i != case[3]]
        last = max(end.after_s for end in others)
        name = re.compile(rf"(meshlayout|launch): process {case[3]} ")
        named = all(name.search(end.output) for end in others)
        statuses = {"hang" if e.status is None else str(e.status) for e in others}
        is_healthy = case[1].startswith(("none", "lock"))
        after = "" if is_healthy else f"{last:.1f} s"
        cells += [after, ", ".join(sorted(statuses)), "yes" if named else ""]
    line = f"| {' | '.join(cells)} |"
    print(line, flush=True)
    return line


if __name__ == "__main__":
    main()
