"""A process that fails ends all others, which name it, within seconds."""

import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

import meshlayout as ml
from tests.faults import FAULTS, PLACES, run_job
from tests.processes import run_processes


pytestmark = pytest.mark.multiprocess

# What the others say of the victim, by the fault.
SAID = {
    "exception": "failed: ValueError: row 17 is not a number (",
    "exit 3": "has ended its program, and process ",
    "SystemExit 3": "has ended its program, and process ",
    "exit 0": "has ended its program, and process ",
    "Ctrl-C": "was interrupted (Ctrl-C).",
}

# Every fault at three places, and every place with each of the victims.
CASES = [
    (2, fault, PLACES[(3 * number + 5 * turn) % 7], (number + turn) % 2)
    for (number, fault), turn in itertools.product(enumerate(FAULTS), range(3))
] + [
    *((4, "kill", "step", 3), (4, "exit 0", "batch", 2), (4, "stop", "save", 0)),
    *((4, "SystemExit 3", "create", 0), (4, "exception", "barrier", 1)),
]


def check(ends, victim, fault):
    """Checks that all others name the victim in time, and nobody else."""
    for index, end in enumerate(ends):
        if index == victim:
            continue
        assert end.status == (130 if fault == "Ctrl-C" else 1), end
        # For the sentence of process 0's death, an abort in C waits for six seconds.
        assert end.after_s < (13 if fault == "abort" else 10), end
        said = [x for x in end.output.splitlines() if x.startswith("meshlayout: ")]
        if victim == 0 and not said and jax.__version_info__ < (0, 8):
            # JAX leaves by _exit there, before anything else can print.
            assert "the leader task was preempted/died" in end.output
            continue
        assert len(said) == 1, end
        assert said[0].startswith(f"meshlayout: process {victim} ("), end
        assert SAID.get(fault, " is lost: it ") in said[0], end


def test_a_process_that_fails_is_named_by_the_others(tmp_path):
    cases = [("exception", "step", 1), ("kill", "save", 0), ("exit 3", "barrier", 1)]
    with ThreadPoolExecutor(3) as pool:
        for case, ends in pool.map(lambda case: (case, run_job(2, *case)), cases):
            check(ends, case[2], case[0])


@pytest.fixture(scope="module")
def ends_of(tmp_path_factory):
    """The ends of all cases, which mostly wait, and so run four at a time."""
    folder = tmp_path_factory.mktemp("saved")

    def run(number):
        return run_job(*CASES[number], directory=str(folder / str(number)))

    with ThreadPoolExecutor(4) as pool:
        return dict(enumerate(pool.map(run, range(len(CASES))))), folder


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: str(CASES[n]))
def test_every_fault_at_every_place_ends_the_others(number, ends_of):
    (ends, folder), (count, fault, place, victim) = ends_of, CASES[number]
    check(ends[number], victim, fault)
    # The last checkpoint is intact.
    with ml.Checkpointer(folder / str(number)) as checkpointer:
        step = checkpointer.latest_step()
        assert step in {"start": (None,), "create": (None,)}.get(place, (3, 5))
        if step is not None:
            w = checkpointer.restore_numpy()["w"]
            assert w.tolist() == [4 * count * step] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "place", "victim", "status"),
    [
        *(("kill", "step", 1, 137), ("exit 3", "barrier", 0, 3)),
        *(("exit 0", "step", 1, 1), ("os._exit 0", "save", 1, 1)),
        *(("os._exit 5", "start", 0, 5), ("exception", "create", 1, 1)),
        *(("stop", "batch", 1, 137), ("segfault", "host", 1, 139)),
    ],
)
def test_the_launcher_ends_with_the_status_of_the_first(fault, place, victim, status):
    (end,) = run_job(2, fault, place, victim, is_launched=True)
    assert end.status == status, end
    assert end.after_s < 12, end
    assert f"launch: process {victim} " in end.output


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("ends", [None, "ml", "jax"])
def test_a_process_that_ends_well_is_not_lost(victim, ends):
    for end in run_job(2, "early", "end", victim, ends=ends):
        assert end.status == 0, end
        assert "meshlayout: " not in end.output


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_has_ended_well_is_named_once_it_is_needed(victim):
    ends = run_job(2, "needed", "end", victim)
    assert ends[victim].status == 0
    assert ends[1 - victim].status == 1
    assert ends[1 - victim].after_s < 5
    text = f"has ended its program, and process {1 - victim} waits for it in barrier"
    assert text in ends[1 - victim].output


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "status"), [("none", 0), ("preempt", 75)])
def test_an_end_of_all_processes_keeps_its_status_and_says_nothing(fault, status):
    for end in run_job(2, fault, "host", None):
        assert end.status == status, end
        assert "meshlayout: " not in end.output


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "place"), [("lock 15", "step"), ("sleep 12", "end")])
def test_a_process_that_takes_its_time_is_no_failure(fault, place):
    for end in run_job(2, fault, place, 1):
        assert end.status == 0, end
        assert "meshlayout: " not in end.output


@pytest.mark.slow
@pytest.mark.parametrize("place", ["start", "step"])
def test_a_run_that_is_stuck_ends_and_says_who_is_behind(place):
    opening = "meshlayout: no step or meeting has begun for 5 s (step_timeout_s): "
    for end in run_job(2, "sleep 100", place, 1, step_timeout_s=5):
        assert end.status == 1, end
        assert end.after_s < 15
        (said,) = [x for x in end.output.splitlines() if x.startswith("meshlayout: ")]
        if place == "step":
            assert said.startswith(f"{opening}process 1 (")
            assert " is behind, in number " in said
        else:
            said_by_all = "no process is behind another, all are in number "
            assert said.startswith(opening + said_by_all)


@pytest.mark.slow
def test_an_error_that_looks_like_a_lost_connection_is_ones_own():
    ends = run_job(2, "connection", "step", 1)
    assert ends[0].after_s < 5
    assert "failed: ConnectionError: Connection refused by my dat" in ends[0].output


@pytest.mark.slow
def test_an_exception_on_its_way_through_shutdown_is_named():
    check(run_job(2, "exception", "step", 1, ends="finally"), 1, "exception")


def lives(ends):
    """Looks before, during and after a program, in which a cell of a notebook fails."""

    def look():
        names = sorted(t.name for t in threading.enumerate() if t.daemon)
        return [names, sys.excepthook is sys.__excepthook__]

    before = look()
    ml.initialize()
    during = look()
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    failed = not shell.run_cell("1 / 0").success
    goes_on = shell.run_cell("1 + 1").success
    {"ours": ml.shutdown, "jax": jax.distributed.shutdown}[ends]()
    return [before == look(), before != during, failed and goes_on]


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["ours", "jax"])
def test_nothing_is_left_after_the_end_and_notebooks_go_on(ends):
    found = run_processes(2, lives, ends, devices_per_process=1, initialize=False)
    assert found == [[True, True, True]] * 2
