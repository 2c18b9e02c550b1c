"""Saves that are killed at any moment, or whose file calls fail, lose nothing.

The ordinary tests take a few moments and calls; the slow ones take all of them.
"""

import errno
import shutil

import pytest

from tests.checkpoint_kills import command, finish


WRONG = ("bad", "lost", "leftovers", "silent", "next save bad", "next run bad")

# Two steps exist; one run saves a third, or the second again, which may be the only one.
SAVES = ({"keep": 2, "step": 3}, {"keep": 2, "step": 2}, {"keep": 1, "step": 2})

SHORT = [
    {"kind": "random", "mode": "again", "kills": 4},
    {"kind": "calls", "keep": 1, "step": 2, "error": 0, "stride": 3, "first": 72},
    {"kind": "calls", "keep": 2, "step": 3, "error": errno.EIO, "stride": 19},
]

KILLS = [
    {"kind": "random", "mode": mode, "kills": 30, "seed": seed}
    for seed, mode in enumerate(("sync", "async", "again", "retention"))
]

# The seal, the renames and the deletion are the last calls: there, every one.
CALLS = [
    {"kind": "calls", "error": 0, **calls, **save}
    for save in SAVES
    for calls in ({"stride": 4}, {"stride": 1, "first": 70})
]

ERRORS = {
    name: [
        {
            "kind": "calls",
            "error": error,
            "stride": 7,
            "first": 1 + turn,
            **save,
            **more,
        }
        for turn, save in enumerate(SAVES)
    ]
    for name, error, more in (
        ("one call fails", errno.EIO, {}),
        ("the disk is full", errno.ENOSPC, {"forever": True}),
        ("nothing can be written", errno.EROFS, {"forever": True}),
    )
}


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(SHORT, id="some"),
        pytest.param(KILLS, id="moments", marks=pytest.mark.slow),
        pytest.param(CALLS, id="calls", marks=pytest.mark.slow),
        *(
            pytest.param(x, id=name, marks=pytest.mark.slow)
            for name, x in ERRORS.items()
        ),
    ],
)
def test_saves_that_are_cut_off_lose_nothing(tmp_path, plan, counts):
    if not (shutil.which("cc") or shutil.which("gcc")):
        plan = [part for part in plan if part["kind"] == "random"]
        if not plan:
            pytest.skip("no C compiler for the faults in file calls")
    for report in finish(command(tmp_path, plan)):
        counts(str(report))
        assert report.get("problems") is None
        assert {name: report[name] for name in WRONG if name in report} == {}
        seen = report["kills" if report["kind"] == "random" else "faults"]
        assert seen > 3
