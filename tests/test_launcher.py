"""`python -m meshlayout.launch`: what it prints, how it ends, what it leaves behind.

The scripts are plain Python: the launcher knows nothing of JAX but its variables.
"""

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
from meshlayout.launch import device_variables, main
from tests.processes import ROOT


PREAMBLE = """
import os, signal, subprocess, sys, time
index = int(os.environ["JAX_PROCESS_ID"])
"""

# A shell's background job has it ignored, and so would all processes here.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long after a failure the job may go on, and what a busy machine adds.
LIMIT_S = 3.0 + 4.0


class Launch:
    """A run of the launcher on a script, which may be given as its text."""

    def __init__(
        self, folder, *arguments, script="", start="-m meshlayout.launch", **environment
    ):
        if script:
            (folder / "script.py").write_text(PREAMBLE + script)
        self._files = folder / "out.txt", folder / "err.txt"
        # Under nohup, the launcher does not pass it on.
        handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with self._files[0].open("wb") as out, self._files[1].open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *start.split(" ", 1), *map(str, arguments)],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
                stdout=out,
                stderr=err,
            )
        signal.signal(signal.SIGHUP, handler)

    out = property(lambda self: self._files[0].read_text(errors="replace"))
    err = property(lambda self: self._files[1].read_text(errors="replace"))

    def wait(self):
        return self.process.wait(200)

    def wait_for(self, text, times=1):
        """Waits until the launcher has printed a text to stdout so often."""
        while self.out.count(text) < times:
            assert self.process.poll() is None, (self.out, self.err)
            time.sleep(0.02)

    def lines(self, index):
        start = f"[{index}] "
        return [x[len(start) :] for x in self.out.splitlines() if x.startswith(start)]


@pytest.fixture
def launch(tmp_path, request):
    def start(*arguments, **options):
        run = Launch(tmp_path, *arguments, **options)
        request.addfinalizer(run.process.wait)
        request.addfinalizer(run.process.kill)
        return run

    return start


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # gone before, or meanwhile
        return False
    return state != "Z"


def wait_until_gone(pids):
    deadline_s = time.monotonic() + LIMIT_S
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_each_process_knows_the_others_and_its_arguments(launch):
    text = (
        "import json\n"
        "said = {k: v for k, v in os.environ.items() if k[:4] in ('JAX_', 'NPRO')}\n"
        "said |= {'arguments': sys.argv[1:], 'input': sys.stdin.read()}\n"
        "print(json.dumps(said))\n"
    )
    options = ["-n", 3, "--devices-per-process", 2, "script.py", "-n", "5", "a b"]
    run = launch(*options, script=text, JAX_PLATFORMS="cpu", NPROC="")
    assert (run.wait(), run.err) == (0, "")
    said = [json.loads(run.lines(index)[0]) for index in range(3)]
    address = said[0]["JAX_COORDINATOR_ADDRESS"]
    assert address.startswith("127.0.0.1:")
    expected = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": "3",
        "JAX_NUM_CPU_DEVICES": "2",
        "NPROC": "4",
        "arguments": ["-n", "5", "a b"],
        "input": "",
    }
    for index, one in enumerate(said):
        assert one | expected | {"JAX_PROCESS_ID": str(index)} == one


def test_lines_are_whole_and_stdout_and_stderr_stay_apart(launch):
    text = (
        "for number in range(200):\n"
        "    for target in 1, 2:\n"
        "        line = f'{index} {target} {number} ' + 'x' * (number % 70) + '.'\n"
        "        os.write(target, line[:7].encode())\n"
        "        os.write(target, line[7:].encode() + b'\\n')\n"
        "os.write(1, b'y' * 3_000_000 + b'\\nno end')\n"
    )
    run = launch("-n", 4, "script.py", script=text)
    assert run.wait() == 0
    for index in range(4):
        whole = [f"{index} 1 {n} " + "x" * (n % 70) + "." for n in range(200)]
        lines = run.lines(index)
        assert lines[:200] == whole
        assert "".join(lines[200:]) == "y" * 3_000_000 + "no end"
    assert len(run.err.splitlines()) == 4 * 200
    assert all(line.split()[2] == "2" for line in run.err.splitlines())


@pytest.mark.parametrize(
    ("failure", "status", "fate"),
    [
        ("raise ValueError('boom')", 1, "ended with exit status 1"),
        ("sys.exit(7)", 7, "ended with exit status 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
    ],
)
def test_the_first_failure_ends_all_and_gives_its_status(launch, failure, status, fate):
    text = (
        "print(os.getpid(), subprocess.Popen(['sleep', '600']).pid)\n"
        "if index != 1:\n    time.sleep(600)\n"
        f"time.sleep(0.3)\nprint('ready')\n{failure}\n"
    )
    run = launch("-n", 3, "script.py", script=text)
    run.wait_for("ready")
    start_s = time.monotonic()
    assert run.wait() == status
    assert time.monotonic() - start_s < LIMIT_S
    wait_until_gone([int(word) for i in range(3) for word in run.lines(i)[0].split()])
    assert f"launch: process 1 {fate}; ending the other 2.\n" in run.err
    last = run.err.split(f"launch: process 1 {fate}, which ended the others. It said:")
    assert last[1].endswith("[1] ValueError: boom\n" if "boom" in failure else "\n")


def test_sigterm_lets_all_processes_save_and_ends_with_75(launch, tmp_path):
    text = (
        "def save(number, frame):\n"
        "    time.sleep(2.5 * index)\n"  # longer than a failure may take
        "    open(f'saved{index}', 'w').close()\n"
        "    sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('ready')\ntime.sleep(600)\n"
    )
    run = launch("-n", 2, "--max-restarts", 5, "script.py", script=text)
    run.wait_for("ready", 2)
    run.process.terminate()
    assert run.wait() == 75
    assert all((tmp_path / f"saved{index}").exists() for index in (0, 1))
    assert run.out.count("ready") == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_and_kills_the_second_time(launch, number):
    text = (
        "ignore = lambda *_: print('no')\n"
        f"if index:\n    signal.signal({number:d}, ignore)\n"
        "print('ready')\nwhile True:\n    time.sleep(0.1)\n"
    )
    run = launch("-n", 2, "--max-restarts", 3, "script.py", script=text)
    run.wait_for("ready", 2)
    run.process.send_signal(number)
    run.wait_for("no")
    run.process.send_signal(number)
    # That of process 0, unless the second signal came before it had ended.
    first = (1, 128 + number) if number == signal.SIGINT else (128 + number,)
    assert run.wait() in (*first, 128 + signal.SIGKILL)
    assert "starting again" not in run.err


def test_a_job_that_does_not_end_when_it_is_told_to_is_killed(launch):
    start = "-c from meshlayout import launch; launch._STOP_S = launch._GRACE_S = 0.5"
    start += "; exit(launch.main())"
    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready')\n"
    script = f"{text}while True:\n    time.sleep(0.1)\n"
    run = launch("-n", 2, "script.py", start=start, script=script)
    run.wait_for("ready", 2)
    run.process.terminate()
    assert run.wait() == 128 + signal.SIGKILL


def test_nothing_is_left_when_the_launcher_is_killed(launch):
    run = launch("-n", 2, "script.py", script="print(os.getpid())\ntime.sleep(600)\n")
    run.wait_for("\n", 2)
    run.process.kill()
    wait_until_gone([int(run.lines(index)[0]) for index in (0, 1)])


@pytest.mark.parametrize(("allowed", "status"), [(1, 5), (9, 0)])
def test_a_failed_job_is_started_again_so_often(launch, tmp_path, allowed, status):
    # The first two runs fail, in one of two processes.
    text = (
        "if index == 1:\n"
        "    runs = open('runs', 'a+'); runs.write('x'); runs.close()\n"
        "    sys.exit(5 if len(open('runs').read()) < 3 else 0)\n"
        "time.sleep(0.2)\n"
    )
    run = launch("-n", 2, "--max-restarts", allowed, "script.py", script=text)
    assert run.wait() == status, run.err
    count = min(allowed + 1, 3)
    assert len((tmp_path / "runs").read_text()) == count
    assert run.err.count("launch: starting again (") == count - 1


def test_a_reader_that_goes_away_ends_the_job(tmp_path):
    (tmp_path / "script.py").write_text("import time\nwhile True:\n    print('line')\n")
    command = f"{sys.executable} -m meshlayout.launch -n 2 script.py | head -n 1"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = {"cwd": tmp_path, "env": env, "timeout": 60, "capture_output": True}
    run = subprocess.run(["/bin/sh", "-c", command], check=True, **options)
    assert run.stdout.endswith(b"] line\n")


@pytest.mark.parametrize(
    ("arguments", "variable", "sentence"),
    [
        (
            "-n 0 s.py",
            None,
            "-n/--num-processes: must be an integer of at least 1, got",
        ),
        ("-n 2 t.py", None, "script 't.py' was not found in "),
        ("-n 2 s.py", "JAX_NUM_PROCESSES", "=4: this is one of several processes alre"),
        ("-n 2 s.py", "SLURM_STEP_NUM_TASKS", "=4: this is one of several processes a"),
    ],
)
def test_bad_calls_are_refused_in_a_sentence(
    arguments, variable, sentence, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").touch()
    if variable:
        monkeypatch.setenv(variable, "4")
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    assert stop.value.code == 2
    assert f"{variable or ''}{sentence}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("each", "visible", "platforms", "shares"),
    [
        (None, "0,1,2,3", "", ["0,1", "2,3"]),
        (1, "4, GPU-ab,6", "cuda,cpu", ["4", "GPU-ab"]),
        (2, "0,1", "cpu", [None] * 2),
        (None, "-1", "", [None] * 2),
    ],
)
def test_gpus_are_shared_out(each, visible, platforms, shares):
    environment = {"CUDA_VISIBLE_DEVICES": visible, "JAX_PLATFORMS": platforms}
    variables = device_variables(2, each, environment)
    assert [one.get("CUDA_VISIBLE_DEVICES") for one in variables] == shares
    cpus = None if each is None or shares[0] else str(each)
    assert [one.get("JAX_NUM_CPU_DEVICES") for one in variables] == [cpus] * 2


def test_too_few_gpus_are_an_error():
    with pytest.raises(ValueError, match=r"GPUs, but there are 4\."):
        device_variables(2, 3, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})


@pytest.mark.parametrize("where", ["create_mesh", "Mesh", "virtual_devices"])
def test_a_launched_program_that_does_not_join_the_others_is_told(where, monkeypatch):
    monkeypatch.setenv("MESHLAYOUT_LAUNCHER", str(os.getppid()))
    monkeypatch.setenv("JAX_NUM_PROCESSES", "4")
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    mesh = jax.make_mesh((8,), ("batch",))
    argument = {"create_mesh": {"rows": 3}, "Mesh": mesh, "virtual_devices": 8}[where]
    with pytest.raises(ml.errors.ClusterError) as error:
        getattr(ml, where)(argument)
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
    assert caplog.messages == ["virtual_devices(3): --devices-per-process=8 counts."]
    monkeypatch.delenv("MESHLAYOUT_LAUNCHER")
    with pytest.raises(ml.errors.MeshError, match="comes too late"):
        ml.virtual_devices(3)
