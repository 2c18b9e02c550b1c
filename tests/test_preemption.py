"""SIGTERM saves the run at the next step on all processes, and ends it with 75."""

import os
import signal

import pytest

import meshlayout as ml
from tests.resuming_runs import STEPS, Server, result_of, rows_of


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_is_asked_to_end_saves_and_is_continued(processes, tmp_path):
    whole, told = tmp_path / "whole", tmp_path / "told"
    with Server() as server:
        first = server.start(whole, processes, seconds=0, every=1000)
        assert [one.wait() for one in first] == [0] * processes
        # Slow enough for the signal to come through to the other process.
        group = server.start(told, processes, seconds=0.25, every=1000)
        group[-1].wait_for_step(4)
        group[-1].kill(signal.SIGTERM)
        codes = [one.wait() for one in group]
        logs = [one.log.read_text() for one in group]
        assert codes == [ml.checkpoint.EXIT_STATUS] * processes == [75] * processes, (
            logs
        )
        last = group[0].steps[-1]
        assert [one.steps[-1] for one in group] == [last] * processes
        assert 4 <= last < STEPS
        with ml.Checkpointer(told / "checkpoints") as ck:
            assert ck.all_steps() == [last]
        again = server.start(told, processes, seconds=0, every=1000)
        codes = [one.wait() for one in again]
        assert codes == [0] * processes, [one.log.read_text() for one in again]
        assert again[0].steps[0] == last + 1
    assert result_of(told) == result_of(whole)
    assert rows_of(told) == rows_of(whole)


@pytest.fixture
def heard():
    """The SIGTERMs that came to the handler of whoever called the library."""
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    yield came
    signal.signal(signal.SIGTERM, before)


def test_a_second_sigterm_does_what_it_did_before(heard):
    with ml.checkpoint.Preemption() as preemption:
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.is_due()
        assert heard == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        assert preemption.is_due()
    assert heard == [signal.SIGTERM]


def test_a_sigterm_that_the_loop_never_looked_at_is_passed_on_at_the_end(heard):
    with ml.checkpoint.Preemption() as preemption:
        assert not preemption.is_due()
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == []
    assert heard == [signal.SIGTERM]
