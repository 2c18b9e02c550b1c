"""Batches of seeded sources are those of earlier versions, on any number of processes."""

import json

import pytest

from tests import batches_golden
from tests.processes import run_processes


EXPECTED = json.loads(batches_golden.GOLDEN.read_text())


@pytest.mark.parametrize("name", batches_golden.CASES)
def test_batches_on_one_process_are_those_of_earlier_versions(name):
    found = batches_golden.digest(batches_golden.CASES[name]())
    assert found == EXPECTED["1"][name]


@pytest.mark.multiprocess
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_batches_on_several_processes_are_those_of_earlier_versions(count):
    found = run_processes(
        count, batches_golden.digests, devices_per_process=4 // count, timeout_s=300
    )
    assert found == [EXPECTED[str(count)]] * count
