"""How long other processes take to end when one fails, and whether they name it.

`python benchmarks/faults.py` runs every fault at every place, with two processes, bare
and under the launcher, some with four, and thirty jobs without a fault, and writes
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

from tests.faults import FAULTS, run_job


_RESULTS = Path(__file__).parent / "results" / "faults.md"
_PLACES = ("start", "create", "step", "save", "barrier", "end")

_INTRODUCTION = """\
# Faults

Seconds from a fault in one process until the last other process, or the launcher, has
ended; with what status; and whether all others, or the launcher, name the process.
jax {version}, CPU devices, real processes on one machine with two busy cores, one run
each; all time-outs are the defaults. Process 0 holds JAX's coordination service. At the
end of the program the others may have ended well before the fault: status 0, and nobody
is named. Ctrl-C goes to all processes of a launcher. A process that holds Python's lock
for 20 seconds has no fault: all end with status 0. `python benchmarks/faults.py` makes
the table.

{good}

"""

_HEADERS = (
    *("fault", "at", "process 0", "the last process"),
    *("process 0, launched", "the last process, launched"),
)


def main() -> None:
    """Runs the faults and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--only", nargs="*", help="faults; prints the rows alone")
    options = parser.parse_args()
    rows = [(2, *row) for row in itertools.product((*FAULTS, "lock 20"), _PLACES)]
    rows += [(4, fault, "step") for fault in FAULTS]
    only = options.only or [*FAULTS, "lock 20", "none"]
    rows = [row for row in rows if row[1] in only]
    with ThreadPoolExecutor(options.jobs) as pool:
        lines = list(pool.map(_row, rows))
        good = list(pool.map(_is_good, range(30 if "none" in only else 0)))
    table = [f"| {' | '.join(_HEADERS)} |", "|---" * len(_HEADERS) + "|", *lines]
    text = (
        f"Of {len(good)} jobs of two and four processes without a fault, half of them "
    )
    text += f"launched, {sum(good)} ended with status 0 and named nobody."
    print(text)
    if options.only is None:
        text = _INTRODUCTION.format(version=jax.__version__, good=text)
        _RESULTS.write_text("\n".join([text, *table, ""]))


def _row(row: tuple[int, str, str]) -> str:
    count, fault, place = row
    victims = (0, count - 1)
    cells = [fault, f"{place}, {count} processes" if count > 2 else place]
    for is_launched, victim in itertools.product((False, True), victims):
        ends = run_job(count, fault, place, victim, is_launched=is_launched)
        others = [e for i, e in enumerate(ends) if is_launched or i != victim]
        name = re.compile(rf"(meshlayout|launch): process {victim} ")
        statuses = {"hang" if end.status is None else end.status for end in others}
        cell = ", ".join(map(str, sorted(statuses, key=str)))
        if not fault.startswith("lock"):
            cell = f"{max(end.after_s for end in others):.1f} s, status {cell}"
        is_named = all(name.search(end.output) for end in others)
        cells.append(cell + ", named" * is_named)
    line = f"| {' | '.join(cells)} |"
    print(line, flush=True)
    return line


def _is_good(number: int) -> bool:
    count, is_launched = (2, 2, 4)[number % 3], number % 2 == 1
    ends = run_job(count, "none", "end", 1, is_launched=is_launched)
    said = re.compile(r"^(meshlayout|launch): ", re.MULTILINE)
    return all(end.status == 0 and not said.search(end.output) for end in ends)


if __name__ == "__main__":
    main()
