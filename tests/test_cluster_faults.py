"""A process that fails ends all others, which name it, within seconds."""

import itertools
import re
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

QUICK = [
    (2, "exception", "step", 1),
    (2, "kill", "save", 0),
    (2, "exit 3", "create", 1),
]

# Every fault at three places, and every place with each of the victims.
SLOW = [
    (2, fault, PLACES[(3 * number + 5 * turn) % 7], (number + turn) % 2)
    for (number, fault), turn in itertools.product(enumerate(FAULTS), range(3))
] + [
    *((4, "kill", "step", 3), (4, "exit 0", "batch", 2), (4, "stop", "save", 0)),
    *((4, "SystemExit 3", "create", 0), (4, "exception", "barrier", 1)),
    *((2, "SystemExit 3", "trace", 0), (2, "exception", "trace", 1)),
]


def jobs(*cases, **options):
    """Parametrizes a test with jobs, the slow ones marked."""
    return pytest.mark.parametrize(
        "job",
        [
            pytest.param(
                (case, tuple(options.items())),
                marks=() if case in QUICK and not options else pytest.mark.slow,
                id="-".join(map(str, (*case, *options.values()))),
            )
            for case in cases
        ],
    )


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """The jobs of all tests that were selected: they mostly wait, four at a time."""
    selected = {}
    for item in request.session.items:
        module = getattr(item, "module", None)  # doctests have none
        if module is request.module and "job" in getattr(item, "fixturenames", ()):
            selected[item.callspec.params["job"]] = tmp_path_factory.mktemp("saved")

    def run(job):
        (case, options), directory = job, str(selected[job])
        return run_job(*case, directory=directory, **dict(options))

    with ThreadPoolExecutor(4) as pool:
        futures = {job: pool.submit(run, job) for job in selected}
        yield {job: (future, selected[job]) for job, future in futures.items()}


@pytest.fixture
def ends(job, runs):
    return runs[job][0].result()


def said_by(end):
    return [x for x in end.output.splitlines() if x.startswith("meshlayout: ")]


def check(ends, victim, fault):
    """Checks that all others name the victim in time, and nobody else."""
    for index, end in enumerate(ends):
        if index == victim:
            continue
        assert end.status == (130 if fault == "Ctrl-C" else 1), end
        # For the sentence of process 0's death, an abort in C waits for six seconds.
        assert end.after_s < (13 if fault == "abort" else 10), end
        if victim == 0 and not said_by(end) and jax.__version_info__ < (0, 8):
            # JAX leaves by _exit there, before anything else can print: of a process 0
            # that is gone, or (4 processes) that is stopped.
            why = "the leader task was preempted/died|CoordinationService/Heartbeat"
            assert re.search(why, end.output)
            continue
        (said,) = said_by(end)
        assert said.startswith(f"meshlayout: process {victim} "), end
        assert SAID.get(fault, " is lost: it ") in said, end


@jobs(*QUICK, *SLOW)
def test_every_fault_at_every_place_ends_the_others(job, ends, runs):
    (count, fault, place, victim), _ = job
    check(ends, victim, fault)
    # The last checkpoint is intact.
    with ml.Checkpointer(runs[job][1]) as checkpointer:
        step = checkpointer.latest_step()
        assert step in ((None,) if place in ("start", "create", "trace") else (3, 5))
        if step is not None:
            w = checkpointer.restore_numpy()["w"]
            assert w.tolist() == [4 * count * step] * 4


STATUSES = {
    (2, "kill", "step", 1): 137,
    (2, "exit 3", "barrier", 0): 3,
    (2, "exit 0", "step", 1): 1,
    (2, "os._exit 0", "save", 1): 1,
    (2, "os._exit 5", "start", 0): 5,
    (2, "exception", "create", 1): 1,
    (2, "stop", "batch", 1): 137,
    (2, "segfault", "host", 1): 139,
}


@jobs(*STATUSES, is_launched=True)
def test_the_launcher_ends_with_the_status_of_the_first(job, ends):
    (end,) = ends
    assert end.status == STATUSES[job[0]], end
    assert end.after_s < 10, end
    assert f"launch: process {job[0][3]} " in end.output


def check_healthy(ends, status=0):
    for end in ends:
        assert end.status == status, end
        assert not said_by(end), end


@jobs((2, "early", "end", 0), (2, "early", "end", 1), ends=None)
def test_a_process_that_ends_well_is_not_lost(ends):
    check_healthy(ends)


@jobs((2, "early", "end", 0), (2, "early", "end", 1), ends="ml")
def test_a_process_that_shuts_down_is_not_lost(ends):
    check_healthy(ends)


@jobs((2, "none", "end", 0), (2, "early", "end", 1), ends="jax")
def test_jaxs_own_shutdown_may_be_the_last_line(ends):
    check_healthy(ends)


@jobs((2, "needed", "end", 0), (2, "needed", "end", 1))
def test_a_process_that_has_ended_well_is_named_once_it_is_needed(job, ends):
    victim = job[0][3]
    assert [ends[victim].status, ends[1 - victim].status] == [0, 1]
    assert ends[1 - victim].after_s < 5
    text = f"has ended its program, and process {1 - victim} waits for it in barrier"
    assert text in ends[1 - victim].output


@jobs((2, "preempt", "host", None))
def test_an_end_of_all_processes_keeps_its_status_and_says_nothing(ends):
    check_healthy(ends, 75)


@jobs(
    *((2, "lock 15", "step", 1), (2, "sleep 12", "end", 1)),
    *((2, "sleep 20", "trace", 0), (2, "sleep 20", "barrier", 1)),
)
def test_a_process_that_takes_its_time_is_no_failure(ends):
    check_healthy(ends)


@jobs((2, "sleep 100", "start", 1), (2, "sleep 100", "step", 1), step_timeout_s=5)
def test_a_run_that_is_stuck_ends_and_says_who_is_behind(job, ends):
    opening = "meshlayout: no step or meeting has begun for 5 s (step_timeout_s): "
    for end in ends:
        assert end.status == 1, end
        assert end.after_s < 15
        (said,) = said_by(end)
        if "step" in job[0]:
            assert said.startswith(f"{opening}process 1 (")
            assert " is behind, in number " in said
        else:
            words = "no process is behind another, all are in number "
            assert said.startswith(opening + words)


@jobs((2, "meet", "step", 1), (2, "meet", "host", 1), (2, "gather", "host", 1))
def test_a_process_alone_in_a_meeting_is_named_long_before_its_time_out(job, ends):
    # The other one is in a step, or waits in a save.
    where = {"step": " in step 5.", "host": " in the same save or restore"}[job[0][2]]
    for end in ends:
        assert end.status == 1, end
        assert end.after_s < 25
        (said,) = said_by(end)
        assert re.search(r"process \d .*, and process \d ", said)
        meeting = "extra" if job[0][1] == "meet" else "ml.to_numpy, which all"
        assert f" in barrier '{meeting}" in said
        assert where in said


@jobs((2, "connection", "step", 1))
def test_an_error_that_looks_like_a_lost_connection_is_ones_own(ends):
    assert ends[0].after_s < 5
    assert "failed: ConnectionError: Connection refused by my dat" in ends[0].output


@jobs((2, "exception", "step", 1), ends="finally")
def test_an_exception_on_its_way_through_shutdown_is_named(ends):
    check(ends, 1, "exception")


def lives(ends):
    """Looks before, during and after a program, in which a cell of a notebook fails."""

    def look():
        names = sorted(t.name for t in threading.enumerate())
        names = [name for name in names if name.startswith("meshlayout")]
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
