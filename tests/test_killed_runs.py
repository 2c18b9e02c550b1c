"""Runs that are killed at any moment, and started again, lose nothing of their bits."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.resuming_runs import STEPS, Server, result_of, rows_of


pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

KILLS_PER_RUN = 5
RUNS = [1, 1, 1, 1, 2, 2]  # processes of each run


def live(server, directory, processes, rng):
    """Kills a run again and again, lets it end, and returns at which steps."""
    killed = []
    while True:
        group = server.start(directory, processes)
        victim = rng.choice(group)
        if len(killed) < KILLS_PER_RUN:
            # Spread over the run, and over the steps and saves there.
            victim.wait_for_step(3 * len(killed) + rng.randint(0, 3))
            time.sleep(rng.uniform(0, 0.15))
        else:
            for one in group:
                one.wait()
        is_over = victim.code is not None
        if not is_over:
            for one in [victim, *group]:
                one.kill()
        codes = [one.wait() for one in group]
        if is_over:
            assert codes == [0] * processes, [one.log.read_text() for one in group]
            return killed
        killed.append(victim.steps[-1] if victim.steps else 0)


def test_killed_runs_end_with_the_bits_of_one_that_was_not(tmp_path, counts):
    with Server() as server:
        whole = {}
        for processes in (1, 2):
            directory = tmp_path / f"whole-{processes}"
            group = server.start(directory, processes, seconds=0, every=1000)
            codes = [one.wait() for one in group]
            assert codes == [0] * processes, [one.log.read_text() for one in group]
            whole[processes] = result_of(directory), rows_of(directory)
            assert sorted(whole[processes][1]) == [*range(1, STEPS + 1)]

        def one_run(at):
            directory = tmp_path / str(at)
            rng = random.Random(at)
            return directory, live(server, directory, RUNS[at], rng)

        with ThreadPoolExecutor(2) as pool:
            runs = [*pool.map(one_run, range(len(RUNS)))]
    same = [
        (result_of(directory), rows_of(directory)) == whole[processes]
        for processes, (directory, _) in zip(RUNS, runs, strict=True)
    ]
    kills = [step for _, killed in runs for step in killed]
    counts(
        f"{len(kills)} kills in {len(RUNS)} runs, after the steps {sorted(kills)}: "
        f"{sum(same)} runs with the same bits"
    )
    assert len(kills) >= 30
    assert same == [True] * len(RUNS)
