"""`python -m meshlayout.launch`: what it prints, how it ends, what it leaves behind.

The scripts are plain Python: the launcher knows nothing of JAX but its variables.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

import meshlayout as ml
from meshlayout.cluster.launcher import device_variables, main, option_parser
from tests.launches import ROOT, Launcher


# How long after a failure the job may go on, and what a busy machine adds.
LIMIT_S = 2.0 + 3.0

SLOW = pytest.mark.slow

PREAMBLE = """
import os, signal, sys, time
index = int(os.environ["JAX_PROCESS_ID"])
"""


@pytest.fixture(scope="module")
def launcher():
    with Launcher() as started:
        yield started


@pytest.fixture
def script(tmp_path):
    """Writes a script, whose processes know their `index`."""

    def write(body, name="script.py"):
        path = tmp_path / name
        path.write_text(PREAMBLE + body)
        return path

    return write


def lines_of(text, index):
    prefix = f"[{index}] "
    lines = text.splitlines()
    return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(pids, timeout_s=LIMIT_S):
    deadline = time.monotonic() + timeout_s
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, [pid for pid in pids if is_running(pid)]
        time.sleep(0.02)


def test_each_process_knows_the_others_and_its_arguments(launcher, script, tmp_path):
    path = script(
        "import json, socket\n"
        "names = 'JAX_COORDINATOR_ADDRESS', 'JAX_COORDINATOR_BIND_ADDRESS', "
        "'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID', 'JAX_NUM_CPU_DEVICES', 'NPROC'\n"
        "said = {name: os.environ.get(name) for name in names}\n"
        "said |= {'arguments': sys.argv[1:], 'input': sys.stdin.read()}\n"
        "print(json.dumps(said))\n"
    )
    options = ["-n", 3, "--devices-per-process", 2]
    run = launcher.run(tmp_path, *options, path, "-n", "5", "--", "a b", NPROC="")
    assert (run.wait(), run.err) == (0, "")
    said = [json.loads(lines_of(run.out, index)[0]) for index in range(3)]
    address = said[0]["JAX_COORDINATOR_ADDRESS"]
    host, port = address.split(":")
    assert host == "127.0.0.1"
    assert 1024 <= int(port) < 65536
    assert said == [
        {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_COORDINATOR_BIND_ADDRESS": address,
            "JAX_NUM_PROCESSES": "3",
            "JAX_PROCESS_ID": str(index),
            "JAX_NUM_CPU_DEVICES": "2",
            "NPROC": "4",
            "arguments": ["-n", "5", "--", "a b"],
            "input": "",
        }
        for index in range(3)
    ]


def test_only_process_0_of_the_same_job_can_use_its_port(launcher, script, tmp_path):
    # Two jobs at once; in each, process 0 listens as the start of a program does, and
    # everybody else who asks for any free port gets another one.
    path = script(
        "import socket\n"
        "host, port = os.environ['JAX_COORDINATOR_ADDRESS'].split(':')\n"
        "free = [socket.create_server((host, 0)) for _ in range(50)]\n"
        "assert int(port) not in [one.getsockname()[1] for one in free]\n"
        "if index == 0:\n"
        "    for option in 'SO_REUSEADDR', 'SO_REUSEPORT':\n"
        "        listener = socket.socket()\n"
        "        listener.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)\n"
        "        listener.bind((host, int(port)))\n"
        "        listener.listen()\n"
        "        socket.create_connection((host, int(port))).close()\n"
        "        listener.close()\n"
        "print(port)\n"
        "time.sleep(0.5)\n"
    )
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    runs = [launcher.start(folder, "-n", 2, path) for folder in folders]
    assert [run.wait() for run in runs] == [0, 0], [run.err for run in runs]
    ports = [{line.split()[1] for line in run.out.splitlines()} for run in runs]
    assert [len(one) for one in ports] == [1, 1]
    assert ports[0] != ports[1]


def test_lines_are_whole_and_stdout_and_stderr_stay_apart(launcher, script, tmp_path):
    path = script(
        "for number in range(300):\n"
        "    for target in 1, 2:\n"
        "        line = f'{index} {target} {number} ' + 'x' * (number % 70) + '.'\n"
        "        os.write(target, line[:7].encode())\n"
        "        os.write(target, line[7:].encode() + b'\\n')\n"
        "os.write(1, b'y' * 300_000 + b'\\nno end \\xff')\n"
    )
    run = launcher.start(tmp_path, "-n", 4, path)
    assert run.wait() == 0
    texts = {
        target: (tmp_path / name).read_bytes().decode(errors="surrogateescape")
        for target, name in ((1, "out.txt"), (2, "err.txt"))
    }
    for target, index in itertools.product((1, 2), range(4)):
        whole = [f"{index} {target} {n} " + "x" * (n % 70) + "." for n in range(300)]
        last = ["y" * 300_000, "no end \udcff"] if target == 1 else []
        assert lines_of(texts[target], index) == whole + last
    assert len(texts[1].splitlines()) == 4 * 302
    assert len(texts[2].splitlines()) == 4 * 300


@pytest.mark.slow
def test_a_progress_bar_is_shown_once_a_second_and_in_the_end(
    launcher, script, tmp_path
):
    path = script(
        "for percent in range(101):\n"
        "    sys.stderr.write(f'\\r{percent}%')\n"
        "    time.sleep(0.015)\n"
        "print(file=sys.stderr)\n"
        "os.write(1, b'windows\\r\\n')\n"
    )
    run = launcher.run(tmp_path, "-n", 1, path)
    shown = lines_of(run.err, 0)
    assert shown[-1] == "100%"
    assert 2 <= len(shown) <= 2 + 10
    assert all(text.endswith("%") for text in shown)
    assert run.out == "[0] windows\n"


def test_the_messages_of_the_transport_are_left_out(launcher, script, tmp_path):
    message = "[Gloo] Rank {} is connected to 3 peer ranks. Expected number of connected peer ranks is : "
    path = script(
        f"message = {message!r}\n"
        "print('1')\n"
        "print(message.format(0) + '3')\n"
        "print('2')\n"
        "print(message.format(0) + message.format(1) + '3\\n3')\n"
        "print(message.format(0)[:13] + message.format(1) + '3')\n"
        "print(message.format(0)[13:] + '3')\n"
        "first, second = message.format(0).split('Expected')\n"
        "print(first + message.format(1) + '3')\n"
        "print('Expected' + second + '3')\n"
        "print('3 peers')\n"
    )
    run = launcher.run(tmp_path, "-n", 1, path)
    assert (run.wait(), run.out) == (0, "[0] 1\n[0] 2\n[0] 3 peers\n")


@pytest.mark.parametrize(
    ("failure", "status", "sentence"),
    [
        ("raise ValueError('boom')", 1, "ended with exit status 1"),
        pytest.param("sys.exit(7)", 7, "ended with exit status 7", marks=SLOW),
        pytest.param("sys.exit('no data')", 1, "ended with exit status 1", marks=SLOW),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
        pytest.param("os.abort()", 134, "was killed by SIGABRT", marks=SLOW),
        ("os.kill(os.getpid(), signal.SIGSTOP)", 147, "was stopped by SIGSTOP"),
        pytest.param(
            "os.kill(os.getpid(), 40)", 168, "was killed by signal 40", marks=SLOW
        ),
    ],
)
def test_the_first_failure_ends_all_and_gives_its_status(
    failure, status, sentence, launcher, script, tmp_path
):
    path = script(
        "print(os.getpid())\n"
        "if index != 1:\n"
        "    time.sleep(600)\n"
        "time.sleep(0.2)\n"
        "print('ready')\n"
        f"{failure}\n"
    )
    launch = launcher.start(tmp_path, "-n", 3, path)
    launch.wait_for("ready")
    start = time.monotonic()
    assert launch.wait() == status
    assert time.monotonic() - start < LIMIT_S
    pids = [int(lines_of(launch.out, index)[0]) for index in range(3)]
    assert not any(map(is_running, pids))
    told = f"launch: process 1 (pid {pids[1]}) {sentence}"
    assert f"{told}; ending 2 processes in 1.3 s." in launch.err.splitlines()
    *_, end = launch.err.split(f"{told}, before any other.\n")
    if "ValueError" in failure:
        assert end.startswith("[1] Traceback (most recent call last):\n")
        assert end.endswith("[1] ValueError: boom\n")
    elif "no data" in failure:
        assert end == "[1] no data\n"
    elif status in (7, 137, 147, 168):
        assert end == ""


@pytest.mark.slow
def test_the_traceback_is_that_of_the_cause_and_comes_last(launcher, script, tmp_path):
    # The process with the exception lives a little longer than those that heard of it,
    # and still more come to their own errors.
    path = script(
        "import traceback\n"
        "if index == 2:\n"
        "    try:\n"
        "        try:\n"
        "            1 / 0\n"
        "        except ZeroDivisionError as error:\n"
        "            raise ValueError('the cause') from error\n"
        "    except ValueError:\n"
        "        traceback.print_exc()\n"
        "        time.sleep(30)\n"
        "time.sleep(0.5)\n"
        "print('process 2 failed', file=sys.stderr)\n"
        "raise RuntimeError('lost process 2')\n"
    )
    launch = launcher.run(tmp_path, "-n", 3, path)
    assert launch.wait() == 1
    shown = launch.err.split("launch: process 2 ")[1]
    assert "ended with exit status 1, before any other." in shown
    assert "ZeroDivisionError" in shown
    assert "lost process 2" not in shown
    assert shown.endswith("[2] ValueError: the cause\n")


@pytest.mark.slow
def test_what_others_say_of_a_killed_process_is_repeated(launcher, script, tmp_path):
    path = script(
        "if index == 0:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(0.5)\n"
        "print('lost process 0, last seen in save', file=sys.stderr)\n"
        "time.sleep(30)\n"
    )
    launch = launcher.run(tmp_path, "-n", 2, path)
    assert launch.wait() == 137
    *_, last = launch.err.splitlines()
    assert last == "launch: [1] lost process 0, last seen in save"


SAVES_ON_SIGTERM = """
def save(number, frame):
    time.sleep(2.5 * index)  # longer than a failure may take
    open(f"saved{index}", "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("ready")
"""


def test_sigterm_lets_all_processes_save_and_ends_with_75(launcher, script, tmp_path):
    path = script(SAVES_ON_SIGTERM + "time.sleep(600)\n")
    launch = launcher.start(tmp_path, "-n", 2, "--max-restarts", 5, path)
    launch.wait_for("ready", 2)
    launch.kill(signal.SIGTERM)
    assert launch.wait() == 75
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()
    assert launch.out.count("ready") == 2
    assert "passed SIGTERM on to 2 processes" in launch.err


@pytest.mark.slow
def test_status_75_of_one_process_starts_the_job_again(launcher, script, tmp_path):
    path = script(
        SAVES_ON_SIGTERM
        + "if os.path.exists('saved1'):\n    sys.exit()\n"
        + "if index == 0:\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        + "time.sleep(0.3)\n"
        + "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    launch = launcher.run(tmp_path, "-n", 2, "--max-restarts", 1, path)
    assert launch.wait() == 0, launch.err
    assert launch.out.count("ready") == 4
    assert "launch: starting again (1 of 1)." in launch.err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_processes_that_know_nothing_of_it(
    number, launcher, script, tmp_path
):
    path = script("print('ready')\ntime.sleep(600)\n")
    launch = launcher.start(tmp_path, "-n", 2, "--max-restarts", 3, path)
    launch.wait_for("ready", 2)
    launch.kill(number)
    assert launch.wait() == 128 + number
    assert "starting again" not in launch.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_once_and_kills_the_second_time(
    number, launcher, script, tmp_path
):
    path = script(
        f"signal.signal({number:d}, lambda *_: print('no'))\n"
        "print('ready')\n"
        "while True:\n    time.sleep(0.1)\n"
    )
    launch = launcher.start(tmp_path, "-n", 2, path)
    launch.wait_for("ready", 2)
    launch.kill(number)
    launch.wait_for("no", 2)
    time.sleep(0.2)
    launch.kill(number)
    assert launch.wait() == 128 + number
    first, second = launch.err.splitlines()
    assert first == (
        f"launch: passed {number.name} on to 2 processes; a second one kills all."
    )
    assert second == f"launch: got {number.name} again: killing all."
    assert launch.out.count("no") == 2


@pytest.mark.slow
def test_other_signals_are_passed_on_and_end_nothing(launcher, script, tmp_path):
    path = script(
        "got = []\n"
        "for name in 'SIGUSR1', 'SIGUSR2':\n"
        "    signal.signal(getattr(signal, name), lambda n, _: got.append(n))\n"
        "print('ready')\n"
        "while len(got) < 2:\n    time.sleep(0.01)\n"
        "print('got', *map(int, got))\n"
    )
    launch = launcher.start(tmp_path, "-n", 2, path)
    launch.wait_for("ready", 2)
    launch.kill(signal.SIGUSR1)
    time.sleep(0.2)
    launch.kill(signal.SIGUSR2)
    assert launch.wait() == 0
    text = f"got {signal.SIGUSR1:d} {signal.SIGUSR2:d}"
    assert sorted(launch.out.splitlines()[-2:]) == [f"[0] {text}", f"[1] {text}"]


@pytest.mark.slow
def test_ctrl_z_stops_all_and_fg_continues(launcher, script, tmp_path):
    path = script(
        "print('ready')\n"
        "for tick in range(20):\n    time.sleep(0.05)\n    print('tick')\n"
    )
    launch = launcher.start(tmp_path, "-n", 2, path)
    launch.wait_for("ready", 2)
    launch.kill(signal.SIGTSTP)
    time.sleep(0.3)
    ticks = launch.out.count("tick")
    time.sleep(1.0)  # longer than a process alone may be stopped
    assert launch.out.count("tick") == ticks < 40
    launch.kill(signal.SIGCONT)
    assert (launch.wait(), launch.err) == (0, "")
    assert launch.out.count("tick") == 40


@pytest.mark.slow
def test_a_short_stop_is_no_failure(launcher, script, tmp_path):
    path = script("print(os.getpid())\ntime.sleep(1.5)\n")
    launch = launcher.start(tmp_path, "-n", 1, path)
    launch.wait_for("\n")
    pid = int(lines_of(launch.out, 0)[0])
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.05)
    os.kill(pid, signal.SIGCONT)
    assert (launch.wait(), launch.err) == (0, "")


HAS_CHILD = """
import subprocess
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid)
"""


def pids_in(launch):
    return [int(word) for word in launch.out.split() if not word.startswith("[")]


def test_nothing_is_left_when_the_launcher_is_killed(launcher, script, tmp_path):
    path = script(HAS_CHILD + "time.sleep(600)\n")
    launch = launcher.start(tmp_path, "-n", 2, path)
    launch.wait_for("\n", 2)
    pids = pids_in(launch)
    assert len(pids) == 4
    assert all(map(is_running, pids))
    launch.kill(signal.SIGKILL)
    assert launch.wait() == 137
    wait_until_gone(pids)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["sys.exit(0)", "sys.exit(3)"])
def test_what_a_process_started_ends_with_the_job(end, launcher, script, tmp_path):
    # It holds the pipes open, which must not hold up the launcher.
    path = script(HAS_CHILD + end + "\n")
    launch = launcher.run(tmp_path, "-n", 2, path)
    assert launch.wait() == int(end[-2])
    wait_until_gone(pids_in(launch))


@pytest.mark.parametrize(
    ("allowed", "status"),
    [pytest.param(0, 5, marks=SLOW), (1, 5), (2, 0), pytest.param(9, 0, marks=SLOW)],
)
def test_a_failed_job_is_started_again_so_often(
    allowed, status, launcher, script, tmp_path
):
    # The first two runs fail, in one of two processes.
    path = script(
        "port = os.environ['JAX_COORDINATOR_ADDRESS'].split(':')[1]\n"
        "print('port', port)\n"
        "if index == 1:\n"
        "    ports = open('ports', 'a+'); ports.seek(0)\n"
        "    runs = ports.read().split()\n"
        "    ports.write(port + '\\n'); ports.close()\n"
        "    assert port not in runs[-1:]\n"
        "    if len(runs) < 2:\n        sys.exit(5)\n"
        "    sys.exit()\n"
        "time.sleep(0.2)\n"
    )
    launch = launcher.run(tmp_path, "-n", 2, "--max-restarts", allowed, path)
    runs = min(allowed + 1, 3)
    assert launch.wait() == status, launch.err
    assert len((tmp_path / "ports").read_text().split()) == runs
    again = [line for line in launch.err.splitlines() if "starting again" in line]
    assert again == [
        f"launch: starting again ({number} of {allowed})." for number in range(1, runs)
    ]


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_the_job(script, tmp_path):
    path = script("while True:\n    print('line'); time.sleep(0.01)\n")
    command = [sys.executable, "-m", "meshlayout.launch", "-n", "2", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as launch:
        assert launch.stdout.readline().endswith(b"] line\n")
        launch.stdout.close()
        assert launch.wait(60) == 128 + signal.SIGPIPE
        assert launch.stderr.read() == b""


@pytest.mark.slow
def test_a_reader_that_pauses_holds_up_no_signal(script, tmp_path):
    path = script(
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(75))\n"
        "open(f'ready{index}', 'w').close()\n"
        "while True:\n    print('x' * 10_000)\n"
    )
    command = [sys.executable, "-m", "meshlayout.launch", "-n", "1", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=environment, cwd=tmp_path
    ) as launch:
        while not (tmp_path / "ready0").exists():
            time.sleep(0.02)
        time.sleep(0.5)  # until all pipes are full
        launch.terminate()
        time.sleep(0.5)
        assert launch.poll() is None  # it still has something to show
        launch.stdout.read()
        assert launch.wait(60) == 75


@pytest.mark.parametrize("form", [["-m", "pack.mod"], ["--", "-m", "pack.mod"]])
def test_it_runs_a_module(form, launcher, tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "mod.py").write_text("import sys\nprint(sys.argv[1:])\n")
    run = launcher.run(tmp_path, "-n1", *form, "--epochs", 3, "-m", "x")
    assert (run.wait(), run.out) == (0, "[0] ['--epochs', '3', '-m', 'x']\n"), run.err


N = "argument -n/--num-processes: "
K = "argument --devices-per-process: "
R = "argument --max-restarts: "


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("-n 0 s.py", N + "must be a positive integer, got '0'."),
        ("-n -1 s.py", N + "must be a positive integer, got '-1'."),
        ("-n nan s.py", N + "must be a positive integer, got 'nan'."),
        ("-n 1.5 s.py", N + "must be a positive integer, got '1.5'."),
        ("-n s.py", N + "must be a positive integer, got 's.py'."),
        ("-n 257 s.py", N + "must be at most 256, got 257."),
        ("-n", N + "expected one argument"),
        (
            "s.py",
            "the following arguments are required: -n/--num-processes",
        ),
        (
            "-n 2 --devices-per-process None s.py",
            K + "must be a positive integer, got 'None'.",
        ),
        (
            "-n 2 --devices-per-process=0 s.py",
            K + "must be a positive integer, got '0'.",
        ),
        (
            "-n 2 --max-restarts -1 s.py",
            R + "must be a non-negative integer, got '-1'.",
        ),
        (
            "-n 2 --max-restarts x s.py",
            R + "must be a non-negative integer, got 'x'.",
        ),
        (
            "-n 2 --max-restart 3 s.py",
            "--max-restart is not an option of the launcher. Did you mean "
            "'--max-restarts'?",
        ),
        (
            "-n 2 --device-per-process=3 s.py",
            "--device-per-process is not an option of the launcher. Did you mean "
            "'--devices-per-process'?",
        ),
        (
            "-n 2 --epochs 3 s.py",
            "--epochs is not an option of the launcher. The script's own options come "
            "after the script.",
        ),
        (
            "-n 2",
            "the script to run is missing: write it after the options, as in `python "
            "-m meshlayout.launch -n 4 train.py`.",
        ),
        ("-n 2 -m", "-m must be followed by a module's name."),
        ("-n 2 -m s.py-", "-m must be followed by a module's name, got 's.py-'."),
        ("-n 2 t.py", "script 't.py' was not found in {cwd}. Did you mean 's.py'?"),
        ("-n 2 -- none", "script 'none' was not found in {cwd}."),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(
    arguments, sentence, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").touch()
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        f"python -m meshlayout.launch: error: {sentence.format(cwd=tmp_path)}\n"
        "`python -m meshlayout.launch --help` shows the options and examples.\n"
    )


@pytest.mark.parametrize(
    ("variable", "fact"),
    [
        ("JAX_NUM_PROCESSES", "this is one of several processes already"),
        ("SLURM_STEP_NUM_TASKS", "srun has started several tasks already"),
    ],
)
def test_several_launchers_of_one_job_are_refused(
    variable, fact, capsys, monkeypatch, script
):
    monkeypatch.setenv(variable, "4")
    with pytest.raises(SystemExit):
        main(["-n", "2", str(script(""))])
    assert capsys.readouterr().err.splitlines()[0] == (
        f"python -m meshlayout.launch: error: {variable}='4': {fact}, and each would "
        "launch its own. Start the script itself: ml.initialize() reads the same "
        "variables."
    )


@pytest.mark.slow
@pytest.mark.parametrize("ignored", ["SIGCHLD", "SIGHUP", "SIGINT"])
def test_what_the_launcher_inherits_as_ignored_holds_up_nothing(
    ignored, script, tmp_path
):
    path = script(
        "os.kill(os.getppid(), signal.SIGHUP)\ntime.sleep(1)\nsys.exit(index)\n"
    )
    command = [sys.executable, "-m", "meshlayout.launch", "-n", "2", str(path)]
    starter = (
        "import os, signal, sys\n"
        f"signal.signal(signal.{ignored}, signal.SIG_IGN)\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    run = subprocess.run(
        [sys.executable, "-S", "-c", starter, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )
    # With `nohup`, a hang-up is nobody's business.
    assert run.returncode == (1 if ignored == "SIGHUP" else 128 + signal.SIGHUP)


def test_help_has_examples_and_the_meaning_of_75():
    text = option_parser().format_help()
    assert "python -m meshlayout.launch -n 4 --devices-per-process 2 train.py" in text
    assert 'status 75, which means "start me again"' in " ".join(text.split())


@pytest.mark.parametrize(
    ("processes", "each", "environment", "shares"),
    [
        (2, None, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ["0,1", "2,3"]),
        (2, 1, {"CUDA_VISIBLE_DEVICES": "4, GPU-ab,6"}, ["4", "GPU-ab"]),
        (1, None, {"CUDA_VISIBLE_DEVICES": "3"}, ["3"]),
        (
            2,
            1,
            {"CUDA_VISIBLE_DEVICES": "0,1", "JAX_PLATFORMS": "cuda,cpu"},
            ["0", "1"],
        ),
        (2, 2, {"CUDA_VISIBLE_DEVICES": "0,1", "JAX_PLATFORMS": "cpu"}, [None] * 2),
        (2, 2, {"CUDA_VISIBLE_DEVICES": ""}, [None] * 2),
        (2, None, {"CUDA_VISIBLE_DEVICES": "-1"}, [None] * 2),
    ],
)
def test_gpus_are_shared_out(processes, each, environment, shares):
    variables = device_variables(processes, each, environment)
    assert [one.get("CUDA_VISIBLE_DEVICES") for one in variables] == shares
    cpus = None if each is None or shares[0] else str(each)
    assert [one.get("JAX_NUM_CPU_DEVICES") for one in variables] == [cpus] * processes


@pytest.mark.parametrize(
    ("processes", "each", "fact"),
    [
        (5, None, "5 processes, but this machine shows 4 GPUs."),
        (2, 3, "2 processes with 3 GPUs each need 6, but this machine shows 4 GPUs."),
        (3, None, "4 GPUs cannot be shared equally by 3 processes."),
    ],
)
def test_too_few_gpus_are_an_error(processes, each, fact):
    with pytest.raises(ValueError, match="GPUs") as error:
        device_variables(processes, each, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    assert str(error.value).startswith(fact)


@pytest.mark.parametrize(
    ("where", "use"),
    [
        ("create_mesh", lambda: ml.create_mesh({"rows": 3})),
        ("Mesh", lambda: ml.Mesh(jax.make_mesh((8,), ("batch",)))),
        ("virtual_devices", lambda: ml.virtual_devices(8)),
    ],
)
def test_a_launched_program_that_does_not_join_the_others_is_told(
    where, use, monkeypatch
):
    monkeypatch.setenv("MESHLAYOUT_LAUNCHER", str(os.getppid()))
    monkeypatch.setenv("JAX_NUM_PROCESSES", "4")
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    with pytest.raises(ml.errors.ClusterError) as error:
        use()
    assert str(error.value) == (
        f"{where}: this is process 1 of 4 that meshlayout.launch started, and it does "
        "not know the others: each would train alone. Add ml.initialize() at the top "
        "of the program, before anything that uses JAX's devices."
    )
    # A program that a launched process starts is a program of its own.
    monkeypatch.setenv("MESHLAYOUT_LAUNCHER", str(os.getpid()))
    assert ml.create_mesh().size == 8


def test_the_launcher_decides_on_the_number_of_virtual_devices(monkeypatch, caplog):
    caplog.set_level("INFO", logger="meshlayout")
    monkeypatch.setenv("MESHLAYOUT_LAUNCHER", str(os.getppid()))
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    assert len(ml.virtual_devices(3)) == 8
    assert caplog.messages == [
        "virtual_devices(3) makes 8 devices, as --devices-per-process says."
    ]
    monkeypatch.delenv("MESHLAYOUT_LAUNCHER")
    with pytest.raises(ml.errors.MeshError, match="comes too late"):
        ml.virtual_devices(3)
