"""Saves that are killed at any moment, or whose file calls fail, lose nothing.

The ordinary test takes a few moments and calls; the slow ones take all of them.
"""

import errno

import pytest

from tests.checkpoint_kills import reports_of


# What a report counts if all is well.
RIGHT = (
    *("kills", "in a save", "in a deletion", "steps read", "acknowledged"),
    *("faults", "told", "with the new copy", "calls of a save"),
)

# Two steps exist; one run saves a third, or the second again, which may be the only one.
SAVES = ({"keep": 2, "step": 3}, {"keep": 2, "step": 2}, {"keep": 1, "step": 2})
FAILING = {
    "one call fails": {"error": errno.EIO},
    "the disk is full": {"error": errno.ENOSPC, "forever": True},
    "nothing can be written": {"error": errno.EROFS, "forever": True},
}

PLANS = {
    "some": [
        {"kind": "random", "mode": "again", "kills": 2, "processes": 2},
        {"kind": "calls", "keep": 1, "step": 2, "error": 0, "stride": 6, "first": 86},
        {"kind": "calls", "keep": 2, "step": 3, "error": errno.EIO, "stride": 45},
    ],
    "moments": [
        {"kind": "random", "mode": mode, "kills": 30, "seed": seed}
        for seed, mode in enumerate(("sync", "async", "again", "retention"))
    ],
    "either of two processes": [
        {"kind": "random", "mode": mode, "kills": 15, "seed": seed, "processes": 2}
        for seed, mode in enumerate(("async", "again"))
    ],
    # The seal, the renames and the deletion are the last calls: there, every one.
    "calls": [
        {"kind": "calls", "error": 0, **calls, **save}
        for save in SAVES
        for calls in ({"stride": 4}, {"stride": 1, "first": 70})
    ],
    **{
        name: [
            {"kind": "calls", "stride": 7, "first": 1 + turn, **save, **more}
            for turn, save in enumerate(SAVES)
        ]
        for name, more in FAILING.items()
    },
}


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x != "some")) for x in PLANS]
)
def test_saves_that_are_cut_off_lose_nothing(tmp_path, name, counts):
    reports = reports_of(tmp_path, PLANS[name])
    for part, report in zip(PLANS[name], reports, strict=True):
        counts(str(report))
        wrong = {x for x, n in report.items() if n and x not in {*RIGHT, *part}}
        assert not wrong
        assert report["kills" if part["kind"] == "random" else "faults"] >= 2
