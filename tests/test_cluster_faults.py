"""A process that fails ends all others, by name, in a few seconds."""

import sys

import pytest

from tests.faults import Ended, run_job


# No process may take longer to notice.
_LIMIT_S = 10


def check(ends: list[Ended], victim: int, *texts: str) -> None:
    """Checks that every other process named the victim in time, and prints when."""
    for index, end in enumerate(ends):
        if index == victim:
            continue
        sys.stdout.write(f"process {index} ended after {end.after_s:.1f} s\n")
        assert end.status == 1, end
        assert end.after_s < _LIMIT_S, end
        assert "was used up" not in end.output, end  # no misleading explanation
        for text in (f"meshlayout: process {victim} (", *texts):
            assert text in end.output, end


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_in_a_step_ends_the_others(victim):
    ends = run_job(2 + victim, "kill", "step", victim, "--heartbeat=2")
    assert ends[victim].status == -9
    check(
        ends, victim, "is lost", "It was last doing: ", "The newest checkpoint: step 4"
    )
