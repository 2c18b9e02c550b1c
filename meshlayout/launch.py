"""`python -m meshlayout.launch -n 4 train.py`: several JAX processes on this machine.

It sets JAX's variables for each process, prefixes its output with its number, ends all
when one fails, and restarts them if asked to. It loads neither JAX nor NumPy.
"""

import argparse
import contextlib
import ctypes
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any


REPORT_VARIABLE = "MESHLAYOUT_LAUNCHER_REPORT"  # where a process writes who failed

_RESTART_STATUS = 75  # EX_TEMPFAIL: "saved, start me again"
_GRACE_S = 1.5  # for the others to name whom they lost; then SIGTERM, and twice that
_SAVE_S = 60.0  # for the others to save, once one has ended with status 75
_STOP_S = 300.0  # for all to save and end, once they have been told to
_KEPT_LINES = 30
_LONGEST_LINE = 2**20
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PROGRAM = "python -m meshlayout.launch"
_PR_SET_PDEATHSIG = 1  # of Linux

_EPILOG = f"""\
The script calls ml.initialize() before it uses JAX's devices, and can read nothing from
stdin. Examples:
  {_PROGRAM} -n 4 --devices-per-process 2 train.py --epochs 3
  {_PROGRAM} -n 8 train.py                              (one process per GPU)
  {_PROGRAM} -n 2 --max-restarts 3 -m package.train     (a module)

If a process ends with an error or is killed, all are ended. The exit status is that of
the process that failed first (128 + N after signal N), or 1 where that is 0. SIGINT,
SIGTERM and SIGHUP are passed on to all processes; a second one kills those that are
left, and so do five minutes. Status 75 means "saved, start me again": the others may
finish their save. On a TPU machine one process drives all chips: start the script
without the launcher."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a job, restarts it if allowed, and returns its exit status."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog=_PROGRAM, epilog=_EPILOG, allow_abbrev=False, formatter_class=layout
    )
    add = parser.add_argument
    add("-n", "--num-processes", type=_count, required=True)
    text = "GPUs where there are GPUs, elsewhere virtual CPU devices"
    add("--devices-per-process", type=_count, help=text)
    add("--max-restarts", type=int, default=0, help="after a failure")
    add("--json", action="store_true", help="print the exit status as JSON, last")
    add("-m", dest="is_module", action="store_true", help="a module")
    add("script")
    add("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    for name in ("JAX_NUM_PROCESSES", "SLURM_STEP_NUM_TASKS"):
        if os.environ.get(name, "1") not in ("", "1"):
            parser.error(
                f"{name}={os.environ[name]}: this is one of several processes already. "
                "Start the script itself: ml.initialize() reads the same variables."
            )
    if not options.is_module and not Path(options.script).exists():
        parser.error(f"script {options.script!r} was not found in {Path.cwd()}.")
    counts = options.num_processes, options.devices_per_process
    try:
        devices = device_variables(*counts, os.environ)
    except ValueError as error:
        parser.error(str(error))
    script = ["-m", options.script] if options.is_module else [options.script]
    command = [sys.executable, "-u", *script, *options.arguments]
    restart = 0
    while True:
        with tempfile.TemporaryDirectory(prefix="meshlayout-") as folder:
            job = _Job(command, devices, Path(folder) / "failed")
            status = job.run()
        if status == 0 or job.request is not None or restart >= options.max_restarts:
            sys.stdout.write(f'{{"exit_status": {status}}}\n' * options.json)
            return status
        restart += 1
        _say(f"starting again ({restart} of {options.max_restarts}).")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        msg = f"must be an integer of at least 1, got {text!r}."
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def device_variables(
    count: int, per_process: int | None, environment: Mapping[str, str]
) -> list[dict[str, str]]:
    """Returns each process's variables for its share of the devices, or ValueError."""
    platforms = {*environment.get("JAX_PLATFORMS", "").split(",")} - {""}
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(i) for i, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    if visible is not None:
        gpus = [x.strip() for x in visible.split(",") if x.strip() not in ("", "-1")]
    if not gpus or (platforms and not platforms & {"cuda", "gpu"}):
        cpus = {"JAX_NUM_CPU_DEVICES": str(per_process)} if per_process else {}
        if per_process and per_process > 1 and not environment.get("NPROC"):
            cpus["NPROC"] = str(2 * per_process)  # else waiting devices deadlock
        return [cpus] * count
    share = per_process or max(1, len(gpus) // count)
    if share * count > len(gpus):
        msg = f"{count} processes of {share} GPUs, but there are {len(gpus)}."
        raise ValueError(msg)
    shares = [gpus[i * share : (i + 1) * share] for i in range(count)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus)} for gpus in shares]


class _Job:
    """Processes that start together and end together.

    A process that ends because another has failed writes that one's number into the
    file `report`. `request` is the signal with which the user ended the job.
    """

    def __init__(
        self, command: list[str], devices: list[dict[str, str]], report: Path
    ) -> None:
        self.request: int | None = None
        self._report = report
        self._events: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._tails: list[deque[str]] = [deque(maxlen=_KEPT_LINES) for _ in devices]
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                signal.signal(number, lambda n, _: self._events.put(("signal", n)))
        with socket.socket() as port:
            port.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{port.getsockname()[1]}"
        common = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_COORDINATOR_BIND_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(len(devices)),
            "MESHLAYOUT_LAUNCHER": str(os.getpid()),
            REPORT_VARIABLE: str(report),
        }
        libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        self._processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C comes from here, once
                # Linux kills them when the thread that starts them ends: the main one.
                preexec_fn=libc
                and (lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)),
                env={**os.environ, **common, "JAX_PROCESS_ID": str(index), **variables},
            )
            for index, variables in enumerate(devices)
        ]

    def run(self) -> int:
        """Returns the exit status of the job, once no process is left."""
        readers: list[threading.Thread] = []
        for index, process in enumerate(self._processes):
            for streams in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                readers.append(_started(self._copy, index, *streams))
            _started(self._wait, index)
        ends, first = dict[int, int](), -1  # in order; the one that failed first
        steps, timeout = [signal.SIGTERM, signal.SIGKILL], None
        while len(ends) < len(self._processes):
            try:
                kind, number = self._events.get(timeout=timeout)
            except queue.Empty:  # the others did not end by themselves
                self._send(steps.pop(0))
                # A failed process that still cleans up ends with its own status.
                timeout = (2 if first in ends else 4) * _GRACE_S if steps else None
                continue
            if kind == "signal":
                self._send(signal.SIGKILL if self.request else number)
                self.request = number
                timeout = timeout or (_STOP_S if steps else None)
                continue
            code = ends[number] = self._processes[number].returncode
            left = len(self._processes) - len(ends)
            if code and left and first < 0:
                is_save = code == _RESTART_STATUS or self.request is not None
                timeout = _SAVE_S if is_save else _GRACE_S
                first = self._blamed(number)
                fate = _fate(ends[first]) if first in ends else "has failed"
                if first not in ends and _is_stopped(self._processes[first].pid):
                    self._processes[first].kill()
                if not is_save:
                    _say(f"process {first} {fate}; ending the other {left}.")
        for process in self._processes:  # what they started, and left behind
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for thread in readers:
            thread.join(1)
        return self._status(ends)

    def _status(self, ends: dict[int, int]) -> int:
        failed = [index for index, code in ends.items() if code]
        if not failed:
            return 0
        # Process 0 holds the store, and ends last in a job that ends well.
        is_lost = [*ends].index(0) < [*ends].index(failed[0])
        first = self._blamed(0 if is_lost else failed[0])
        code = ends[first]
        if code != _RESTART_STATUS and self.request is None:
            _say(f"process {first} {_fate(code)}, which ended the others. It said:")
            first = first if code else failed[0]  # the one that still needed it
            sys.stderr.writelines(f"[{first}] {line}" for line in self._tails[first])
            sys.stderr.flush()
        return 128 - code if code < 0 else code or 1

    def _blamed(self, first: int) -> int:
        """Returns the process that failed first, as the others report it."""
        with contextlib.suppress(OSError, ValueError):
            return int(self._report.read_text())
        return first

    def _wait(self, index: int) -> None:
        self._processes[index].wait()
        self._events.put(("end", index))

    def _copy(self, index: int, source: IO[bytes], target: IO[str]) -> None:
        """Prints whole lines, and a line that does not end in pieces."""
        while line := source.readline(_LONGEST_LINE):
            text = line.decode(errors="replace").removesuffix("\n") + "\n"
            if target is sys.stderr:
                self._tails[index].append(text)
            try:
                target.write(f"[{index}] {text}")
                target.flush()
            except OSError:  # as `head` ends what it has read enough of
                self._events.put(("signal", signal.SIGTERM))
                self._events.put(("signal", signal.SIGTERM))
                return

    def _send(self, number: int) -> None:
        # SIGKILL goes to children, too; SIGTERM would end loaders before a save.
        send = os.killpg if number == signal.SIGKILL else os.kill
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                if process.poll() is None:
                    send(process.pid, number)


def _started(target: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


def _is_stopped(pid: int) -> bool:
    """Returns whether SIGSTOP holds a process, which no other signal then ends."""
    with contextlib.suppress(OSError):  # there is no /proc
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:2] == " T"
    return False


def _fate(code: int) -> str:
    if code >= 0:
        return f"ended with exit status {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def _say(sentence: str) -> None:
    sys.stderr.write(f"launch: {sentence}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
