"""Runs that are killed, or told to end, and started again lose nothing of their bits."""

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import meshlayout as ml
from tests.resuming_runs import STEPS, end_of, result_of, rows_of, start


KILLS_PER_RUN = 5
RUNS = [1, 1, 1, 1, 2, 2]  # processes of each run


def printed(group):
    return [one.log.read_text() for one in group]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What comes of a run of one process, and of two, that nobody ends."""
    found = {}
    for processes in (1, 2):
        directory = tmp_path_factory.mktemp("whole")
        group = start(directory, processes, seconds=0, every=1000)
        assert end_of(group) == [0] * processes, printed(group)
        found[processes] = result_of(directory), rows_of(directory)
        assert sorted(found[processes][1]) == [*range(1, STEPS + 1)]
    return found


def live(directory, processes, rng):
    """Kills a run again and again, lets it end, and returns at which steps."""
    killed = []
    while True:
        group = start(directory, processes)
        victim = rng.choice(group)
        if len(killed) < KILLS_PER_RUN:
            # Spread over the run, and over the steps and saves there.
            step = 3 * len(killed) + rng.randint(0, 3)
            victim.wait_until(lambda said, step=step: max(said, default=0) >= step)
            time.sleep(rng.uniform(0, 0.15))
        else:
            end_of(group)
        is_over = victim.code is not None
        if not is_over:
            for one in [victim, *group]:
                one.kill()
        codes = end_of(group)
        if is_over:
            assert codes == [0] * processes, printed(group)
            return killed
        killed.append(max(victim.said, default=0))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_killed_runs_end_with_the_bits_of_one_that_was_not(whole, tmp_path, counts):
    def one_run(at):
        killed = live(tmp_path / str(at), RUNS[at], random.Random(at))
        return (result_of(tmp_path / str(at)), rows_of(tmp_path / str(at))), killed

    with ThreadPoolExecutor(2) as pool:
        runs = [*pool.map(one_run, range(len(RUNS)))]
    same = [
        found == whole[processes]
        for processes, (found, _) in zip(RUNS, runs, strict=True)
    ]
    kills = [step for _, killed in runs for step in killed]
    counts(
        f"{len(kills)} kills in {len(RUNS)} runs, after the steps {sorted(kills)}: "
        f"{sum(same)} runs with the same bits"
    )
    assert len(kills) >= 30
    assert same == [True] * len(RUNS)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_is_asked_to_end_saves_and_is_continued(whole, processes, tmp_path):
    # Slow enough for the signal to come through to the other process.
    group = start(tmp_path, processes, seconds=0.25, every=1000)
    group[-1].wait_until(lambda said: 4 in said)
    group[-1].kill(signal.SIGTERM)
    assert end_of(group) == [75] * processes, printed(group)
    last = group[0].said[-1]
    assert [one.said[-1] for one in group] == [last] * processes
    assert 4 <= last < STEPS
    with ml.Checkpointer(tmp_path / "checkpoints") as ck:
        assert ck.all_steps() == [last]
    again = start(tmp_path, processes, seconds=0, every=1000)
    assert end_of(again) == [0] * processes, printed(again)
    assert again[0].said[0] == last + 1
    assert (result_of(tmp_path), rows_of(tmp_path)) == whole[processes]


@pytest.fixture
def heard():
    """The SIGTERMs that came to the handler of whoever called the library."""
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    yield came
    signal.signal(signal.SIGTERM, before)


def test_a_second_sigterm_and_one_that_nobody_looked_at_do_what_they_did_before(heard):
    with ml.checkpoint.Preemption() as preemption:
        assert not preemption.is_due()
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.is_due()
        assert heard == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        assert preemption.is_due()
    assert heard == [signal.SIGTERM]
    with ml.checkpoint.Preemption():
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    assert heard == [signal.SIGTERM] * 2
