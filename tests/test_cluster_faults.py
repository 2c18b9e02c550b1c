"""A process that fails ends all others, which name it, within seconds."""

import ctypes
import signal
import sys
import threading
import types

import jax
import pytest

import meshlayout as ml
from meshlayout.cluster import watch
from tests.bad_values import BAD, refusal
from tests.faults import FAULTS, PLACES, Ended, run_job
from tests.processes import run_processes


# What the victim was doing when it failed, by the place of the fault.
_DOING = {
    "step": "next(batch), step call 5",
    "save": "saving step 6",
    "batch": "next(batch), step call ",
    "barrier": "train_step, step call 6",
}

# Short enough for tests, and long enough for a machine that runs others, too.
_SHORT = "--heartbeat=4"


def check(ends: list[Ended], victim: int, *texts: str, limit_s: float = 10) -> None:
    """Checks that every other process named the victim in time, and prints when."""
    for index, end in enumerate(ends):
        if index == victim:
            continue
        sys.stdout.write(f"process {index} ended {end.after_s:.1f} s after the fault\n")
        assert end.status == 1, end
        assert end.after_s < limit_s, end
        for text in (f"meshlayout: process {victim} (", *texts):
            assert text in end.output, end
        # Collectives that fail must not be explained by what follows from it.
        assert "was used up" not in end.output, end


# Process 0, without which JAX's own service is gone, too.
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_in_a_step_ends_the_others(victim):
    ends = run_job(2, "kill", "step", victim, _SHORT)
    assert ends[victim].status == -signal.SIGKILL
    if victim == 0 and jax.__version_info__ < (0, 8):
        # JAX leaves by _exit there, before anything else can print.
        assert "the leader task was preempted/died" in ends[1].output
        return
    doing = f"It was last doing: {_DOING['step']}"
    check(ends, victim, "is lost", doing, "The newest checkpoint: step 4 in ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_processes", "place", "victim"),
    [(2, place, victim) for place in PLACES for victim in (0, 1)]
    + [(4, "step", 3), (4, "save", 0), (4, "batch", 2), (4, "barrier", 0)],
)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_at_every_place_ends_the_others(
    fault, place, victim, num_processes, tmp_path
):
    options = ["--step-timeout=6"] if fault == "stuck" else [_SHORT]
    ends = run_job(num_processes, fault, place, victim, *options, directory=tmp_path)
    words = {"kill": "is lost", "stop": "is lost", "crash": "failed: "}
    texts = [words.get(fault, "is stuck")]
    if fault != "crash":
        texts.append(_DOING[place])
    elif place != "save":  # a save says in its own words why it failed
        texts.append("ValueError: row 17 is not a number")
    check(ends, victim, *texts)
    statuses = {"kill": -signal.SIGKILL, "stop": None}
    assert ends[victim].status == statuses.get(fault, 1), ends[victim]
    # The last checkpoint is intact.
    with ml.Checkpointer(tmp_path) as checkpointer:
        step = checkpointer.latest_step()
        assert step == (6 if place == "batch" else 4)
        assert (
            checkpointer.restore_numpy()["w"].tolist() == [4 * num_processes * step] * 4
        )


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_stuck_before_a_new_program_is_named(victim):
    ends = run_job(2, "stuck", "program", victim, "--step-timeout=3")
    check(ends, victim, "is stuck", "It was last doing: train_step, step call 6")


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "victim"), [("kill", 1), ("stop", 0), ("stop", 1)])
def test_ten_seconds_suffice_by_default(fault, victim):
    check(run_job(2, fault, "step", victim), victim, "is lost")


@pytest.mark.slow
def test_a_program_that_catches_the_error_of_a_survivor_ends_all_the_same():
    ends = run_job(2, "kill", "step", 1, "--catch", _SHORT)
    assert "caught" in ends[0].output  # printed, though it was buffered
    check(ends, 1, "is lost")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_an_abort_in_native_code_is_named(victim):
    ends = run_job(2, "abort", "step", victim, _SHORT)
    assert ends[victim].status == -signal.SIGABRT
    text = "is aborted by C code (SIGABRT)"
    check(ends, victim, text)
    assert text in ends[victim].output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "victim", "status", "text"),
    [
        ("barrier", 1, 1, "rocess 1 has ended its program"),
        ("step", 1, 3, "has ended its program after 5 calls of steps, and process 0 ("),
        ("raw", 0, 3, "has ended its program with exit status 3, and process 1 ("),
        ("raw", 1, 3, "has ended its program with exit status 3, and process 0 ("),
    ],
)
def test_a_process_that_leaves_while_others_go_on_is_named(place, victim, status, text):
    ends = run_job(2, "leave", place, victim, _SHORT)
    assert ends[1 - victim].status == status, ends
    assert text in ends[1 - victim].output, ends


@pytest.mark.slow
def test_a_crash_that_comes_to_shutdown_is_named():
    ends = run_job(2, "crash", "step", 1, "--shutdown", _SHORT)
    check(ends, 1, "before that, ValueError: row 17 is not a number")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("interrupt", "was interrupted (Ctrl-C), and process 0 ("),
        ("interrupts", "was interrupted (Ctrl-C) while it waited for the others"),
    ],
)
def test_a_process_that_alone_is_interrupted_is_named(fault, text):
    ends = run_job(2, fault, "step", 1, _SHORT)
    assert [end.status for end in ends] == [-signal.SIGINT] * 2, ends
    assert text in ends[0].output, ends[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "status"),
    [("none", 0), ("leave", 3), ("preempt", 75), ("interrupt", -signal.SIGINT)],
)
def test_an_end_of_all_processes_keeps_its_status_and_prints_nothing(fault, status):
    for end in run_job(2, fault, "step", None, _SHORT):
        assert end.status == status, end
        assert "meshlayout: " not in end.output


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("fault", "place", "options"),
    [
        ("late", "end", ["--heartbeat=3"]),
        ("pause", "step", []),
        ("nap", "step", []),
    ],
)
def test_a_process_that_takes_its_time_is_no_failure(fault, place, options, victim):
    for end in run_job(2, fault, place, victim, *options):
        assert end.status == 0, end
        assert "meshlayout: " not in end.output


def _look() -> list[object]:
    """What is installed in a process of a program, and after its end."""
    return [
        sorted(t.name for t in threading.enumerate() if "watch" in t.name),
        sys.excepthook is sys.__excepthook__,
        threading.excepthook is threading.__excepthook__,
        isinstance(sys.exit, types.BuiltinFunctionType),
        _abort_handler(),
    ]


def _abort_handler() -> int | None:
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    handler = libc.signal(signal.SIGABRT, None)
    libc.signal(signal.SIGABRT, handler)
    return handler


def _lives(ends: str) -> list[object]:
    """Looks before, during and after a program, in which a cell of a notebook fails."""
    before = _look()
    ml.initialize()
    during = _look()
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    failed = not shell.run_cell("1 / 0").success
    goes_on = shell.run_cell("1 + 1").success
    {"ours": ml.shutdown, "jax": jax.distributed.shutdown}[ends]()
    for _ in range(50):  # JAX's own end is noticed at the next beat
        if _look() == before:
            break
        threading.Event().wait(0.1)
    return [before, during, _look(), failed and goes_on]


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["ours", "jax"])
def test_nothing_is_left_after_the_end_and_notebooks_go_on(ends):
    for before, during, after, is_notebook_fine in run_processes(
        2, _lives, ends, devices_per_process=1, initialize=False
    ):
        assert before[0] == []
        assert during[0] == ["meshlayout-watch", "meshlayout-watch-guard"]
        assert during[1:] != before[1:]
        assert after == before
        assert is_notebook_fine


def test_nothing_is_installed_on_one_process():
    before = _look()
    ml.initialize(heartbeat_timeout_s=1, step_timeout_s=1)
    try:
        assert _look() == before
        assert watch.lost(0) is None
    finally:
        ml.shutdown()


@pytest.mark.parametrize("name", ["heartbeat_timeout_s", "step_timeout_s"])
@pytest.mark.parametrize("value", BAD)
def test_a_time_that_is_none_is_refused(name, value):
    message = refusal(ml.errors.ClusterError, ml.initialize, **{name: value})
    ml.shutdown()
    if value is None:
        assert message is None
    else:
        assert message is not None
        assert message.startswith(f"initialize: {name} must be a finite number above 0")


def test_the_line_that_the_main_thread_is_in_is_told_from_another_thread():
    lines = []

    def look():
        lines.extend(watch._user_line() for _ in range(20))

    thread = threading.Thread(target=look)
    thread.start()
    while thread.is_alive():  # calls, of which each has frames that end meanwhile
        sorted(range(20), key=lambda number: -number)
    thread.join()
    name = "test_the_line_that_the_main_thread_is_in_is_told_from_another_thread"
    told = [line for line in lines if line]
    assert told
    assert all(f" of {__file__}, in " in line for line in told), told
    assert any(name in line or "<lambda>" in line for line in told)
