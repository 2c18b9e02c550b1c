"""Runs that are killed, or told to end, and started again lose nothing of their bits.

Runs of several processes are in test_launcher_jobs.
"""

import itertools
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import meshlayout as ml
from tests.resuming_runs import STEPS, result_of, rows_of, start


def ended(directory, seed):
    """Ends a run again and again; returns the statuses and steps of its processes."""
    rng, lives = random.Random(seed), []
    directory.mkdir()
    for _ in range(6):
        one = start(directory, seconds=0.05, every=2)
        enough = rng.randint(1, 4)
        one.wait_until(lambda said, enough=enough: len(said) >= enough)
        time.sleep(rng.uniform(0, 0.15))
        one.kill(rng.choice([signal.SIGKILL, signal.SIGTERM]))
        lives.append((one.wait(), one.said))
        if one.code == 0:
            break
    one = start(directory)
    lives.append((one.wait(), one.said))
    assert one.code == 0, one.log.read_text()
    return lives


@pytest.mark.slow
@pytest.mark.multiprocess
def test_runs_that_are_ended_have_the_bits_of_one_that_was_not(tmp_path, counts):
    places = [tmp_path / str(seed) for seed in range(6)]
    with ThreadPoolExecutor(2) as pool:
        runs = [*pool.map(ended, places, range(len(places)))]
    (tmp_path / "whole").mkdir()
    assert start(tmp_path / "whole").wait() == 0
    whole = result_of(tmp_path / "whole"), rows_of(tmp_path / "whole")
    assert sorted(whole[1]) == [*range(1, STEPS + 1)]
    for place, lives in zip(places, runs, strict=True):
        assert (result_of(place), rows_of(place)) == whole
        for (code, steps), (_, later) in itertools.pairwise(lives):
            assert code in (-signal.SIGKILL, 75, 0)
            if code == 75:  # it has saved its last step
                assert later[:1] in ([], [steps[-1] + 1])
    codes = [code for lives in runs for code, _ in lives[:-1]]
    counts(f"{codes.count(-9)} kills, {codes.count(75)} ends by SIGTERM, the same bits")
    assert min(codes.count(-9), codes.count(75)) >= 5


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
