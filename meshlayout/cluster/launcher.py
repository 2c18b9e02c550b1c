"""The launcher: `python -m meshlayout.launch -n 4 script.py` runs a job on one machine.

It only starts processes, gives them an environment from which `ml.initialize()` knows
the others, and starts them again if it is asked to. How they are watched and ended is
in `supervisor`. Clusters have their own schedulers, which do the same on many machines:
the script is the same there.
"""

import argparse
import difflib
import math
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import NoReturn

from meshlayout.cluster.failure import REPORT_VARIABLE
from meshlayout.cluster.supervisor import FORWARDED, Events, Job, JobEnd
from meshlayout.errors import did_you_mean


# More would only exhaust the machine, and the pipes of the launcher.
_MOST_PROCESSES = 256

_OPTIONS_WITH_VALUE = (
    *("-n", "--num-processes", "--devices-per-process", "--max-restarts"),
)

_PROGRAM = "python -m meshlayout.launch"

_EPILOG = f"""\
The script calls ml.initialize() before it uses JAX's devices; that is all it needs to
know of the other processes. What it prints is shown with the number of its process; it
can read nothing from stdin.

examples:
  {_PROGRAM} -n 4 --devices-per-process 2 train.py --epochs 3
      8 virtual CPU devices in 4 processes, to try a cluster on a laptop
  {_PROGRAM} -n 8 train.py
      one process for each GPU of a machine with 8
  {_PROGRAM} -n 2 --max-restarts 3 -m package.train
      a module; after a failure it goes on from its checkpoint

when a process fails:
  If one exits with an error, is killed or is stopped, the others are told, and all are
  ended within two seconds. Its traceback is shown once more at the end. The exit status
  is that of the process that failed first, or 128 + N if signal N killed it.

signals:
  SIGTERM, SIGINT (Ctrl-C), SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 are passed on to all
  processes; of those that end a process, a second one kills all. After SIGTERM,
  Trainer.fit with a Checkpoint, and Checkpointer.save, exit with status 75, which
  means "start me again": the launcher then exits with 75, too. If a process got the
  signal and not the launcher, the launcher starts the job again, as after a failure, up
  to --max-restarts times. Other programs ignore SIGTERM once their processes are one
  JAX program, as JAX handles it: a second one, or Ctrl-C, ends them.

On a TPU machine one process drives all chips: start the script without the launcher.
"""


class OptionParser(argparse.ArgumentParser):
    """A parser whose errors are sentences, with the option that was probably meant."""

    def error(self, message: str) -> NoReturn:
        """Prints what is wrong to stderr, and exits with status 2."""
        unknown = re.fullmatch(r"unrecognized arguments: (\S+).*", message)
        if unknown:
            name = unknown[1].partition("=")[0]
            near = did_you_mean(name, self._option_string_actions)
            message = f"{name} is not an option of the launcher.{near}"
            if not near:
                message += " The script's own options come after the script."
        sys.stderr.write(f"{self.prog}: error: {message}\n")
        sys.stderr.write(f"`{self.prog} --help` shows the options and examples.\n")
        sys.exit(2)


def option_parser() -> OptionParser:
    """Returns the parser of the launcher's own options, without the command."""
    parser = OptionParser(
        prog=_PROGRAM,
        usage=f"{_PROGRAM} -n N [options] (SCRIPT | -m MODULE) [arguments]",
        description="Runs a script in several processes on this machine that form one "
        "JAX program.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n",
        "--num-processes",
        type=_count(at_least=1, at_most=_MOST_PROCESSES),
        metavar="N",
        required=True,
        help="how many processes",
    )
    parser.add_argument(
        "--devices-per-process",
        type=_count(at_least=1, at_most=2**16),
        metavar="K",
        help="devices of each process: GPUs on a machine with NVIDIA GPUs, elsewhere "
        "virtual CPU devices, even if the script calls ml.virtual_devices with another "
        "number (default: an equal share of the GPUs; what the script says)",
    )
    parser.add_argument(
        "--max-restarts",
        type=_count(at_least=0),
        metavar="N",
        default=0,
        help="how often to start the whole job again after a failure or status 75 "
        "(default: %(default)s)",
    )
    return parser


def _count(at_least: int, at_most: float = math.inf) -> Callable[[str], int]:
    """Returns a converter for argparse; its errors are the end of a sentence."""

    def convert(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < at_least:
            kind = "positive" if at_least else "non-negative"
            msg = f"must be a {kind} integer, got {text!r}."
            raise argparse.ArgumentTypeError(msg)
        if int(text) > at_most:
            msg = f"must be at most {at_most}, got {text}."
            raise argparse.ArgumentTypeError(msg)
        return int(text)

    return convert


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits the command line into the launcher's options and the command.

    The command begins with `-m`, after `--`, or with the first argument that is not an
    option. What follows belongs to the script, also if it looks like an option.

    Example:
        >>> split_arguments(["-n", "4", "train.py", "-n", "5"])
        (['-n', '4'], ['train.py', '-n', '5'])
        >>> split_arguments(["-n2", "-m", "package.train", "--epochs", "3"])
        (['-n2'], ['-m', 'package.train', '--epochs', '3'])
    """
    position = 0
    while position < len(arguments) and arguments[position].startswith("-"):
        option = arguments[position]
        if option == "--":
            return list(arguments[:position]), list(arguments[position + 1 :])
        if option == "-m":
            break
        # The others have no value, hold it (-n4, --max-restarts=3), or are wrong.
        position += 2 if option in _OPTIONS_WITH_VALUE else 1
    return list(arguments[:position]), list(arguments[position:])


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    parser = option_parser()
    own, command = split_arguments(arguments)
    options = parser.parse_args(own)
    problem = _problem_of(command) or _problem_of_place(os.environ)
    if problem:
        parser.error(problem)
    try:
        devices = device_variables(
            options.num_processes, options.devices_per_process, os.environ
        )
    except ValueError as error:
        parser.error(str(error))
    with _signals() as events, ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="meshlayout-launch-"))
        restarts = 0
        while True:
            # Those of earlier runs stay reserved, so that each run has a new one.
            port = stack.enter_context(_reserved_port())
            report = Path(folder) / "failure.json"
            command_line = [sys.executable, *command]
            end = _run_once(command_line, devices, port, events, report)
            is_final = end.was_requested or restarts == options.max_restarts
            if end.status == 0 or is_final:
                return end.status
            restarts += 1
            _say(f"starting again ({restarts} of {options.max_restarts}).")


def _problem_of(command: Sequence[str]) -> str:
    """Describes the mistake in the command; empty if it is valid."""
    usage = f"as in `{_PROGRAM} -n 4 train.py`"
    if not command:
        return f"the script to run is missing: write it after the options, {usage}."
    if command[0] == "-m":
        is_name = len(command) > 1 and re.fullmatch(r"[^\W\d]\w*(\.\w+)*", command[1])
        got = f", got {command[1]!r}" if len(command) > 1 else ""
        return "" if is_name else f"-m must be followed by a module's name{got}."
    script = Path(command[0])
    if script.exists():
        return ""
    parent = script.parent
    names = [path.name for path in parent.iterdir()] if parent.is_dir() else []
    near = difflib.get_close_matches(script.name, names, n=1)
    hint = f" Did you mean {str(parent / near[0])!r}?" if near else ""
    return f"script {command[0]!r} was not found in {Path.cwd()}.{hint}"


def _problem_of_place(environment: Mapping[str, str]) -> str:
    """Returns why a launcher is wrong here; empty if it is not.

    Where several machines or tasks each ran a launcher, each would train alone.
    """
    hint = "Start the script itself: ml.initialize() reads the same variables."
    for name, what in (
        ("JAX_NUM_PROCESSES", "this is one of several processes already"),
        ("SLURM_STEP_NUM_TASKS", "srun has started several tasks already"),
    ):
        text = environment.get(name, "")
        if text not in ("", "1"):
            return f"{name}={text!r}: {what}, and each would launch its own. {hint}"
    return ""


def device_variables(
    num_processes: int, per_process: int | None, environment: Mapping[str, str]
) -> list[dict[str, str]]:
    """Returns the variables that give each process its devices.

    Args:
        num_processes: How many processes share the machine.
        per_process: `--devices-per-process`; None if it was not given.
        environment: The launcher's own environment.

    Raises:
        ValueError: If there are too few GPUs, or they cannot be shared equally.

    Example:
        >>> device_variables(2, None, {"CUDA_VISIBLE_DEVICES": "0,1,4,5"})
        [{'CUDA_VISIBLE_DEVICES': '0,1'}, {'CUDA_VISIBLE_DEVICES': '4,5'}]
        >>> device_variables(1, 4, {"JAX_PLATFORMS": "cpu"})
        [{'JAX_NUM_CPU_DEVICES': '4', 'NPROC': '8'}]
    """
    gpus = _visible_gpus(environment)
    if not gpus:
        variables = {}
        if per_process is not None:
            variables["JAX_NUM_CPU_DEVICES"] = str(per_process)
            # As in `virtual_devices`: with fewer threads, waiting devices deadlock.
            if per_process > 1 and not environment.get("NPROC"):
                variables["NPROC"] = str(2 * per_process)
        return [variables] * num_processes
    share = len(gpus) // num_processes if per_process is None else per_process
    if share * num_processes > len(gpus) or not share:
        wanted = f"{num_processes} processes" + (
            f" with {share} GPUs each need {share * num_processes}" if share else ""
        )
        msg = (
            f"{wanted}, but this machine shows {len(gpus)} GPUs. Give smaller numbers, "
            "or set JAX_PLATFORMS=cpu for virtual CPU devices."
        )
        raise ValueError(msg)
    if per_process is None and len(gpus) % num_processes:
        msg = (
            f"{len(gpus)} GPUs cannot be shared equally by {num_processes} processes. "
            f"Add --devices-per-process {share} to leave some unused."
        )
        raise ValueError(msg)
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(gpus[share * index : share * (index + 1)])}
        for index in range(num_processes)
    ]


def _visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Returns the NVIDIA GPUs of this machine, as CUDA_VISIBLE_DEVICES lists them."""
    platforms = environment.get("JAX_PLATFORMS", "").split(",")
    if any(platforms) and not {"cuda", "gpu"} & set(platforms):
        return []
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # CUDA itself stops reading at the first invalid entry.
        names = [name.strip() for name in visible.split(",")]
        return [name for name in names if name and name != "-1"]
    count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return [str(index) for index in range(count)]


def _run_once(
    command: list[str],
    devices: Sequence[Mapping[str, str]],
    port: int,
    events: Events,
    report: Path,
) -> JobEnd:
    """Runs the job once."""
    address = f"127.0.0.1:{port}"
    report.unlink(missing_ok=True)
    environments = [
        {
            **os.environ,
            # What is printed is seen at once, and not lost if a process is killed.
            "PYTHONUNBUFFERED": "1",
            # A crash outside Python shows where Python was.
            "PYTHONFAULTHANDLER": os.environ.get("PYTHONFAULTHANDLER", "1"),
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_COORDINATOR_BIND_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(len(devices)),
            "JAX_PROCESS_ID": str(index),
            "MESHLAYOUT_LAUNCHER": str(os.getpid()),
            REPORT_VARIABLE: str(report),
            **variables,
        }
        for index, variables in enumerate(devices)
    ]
    try:
        return Job(command, environments, events, report).run()
    except OSError as error:
        _say(f"the processes could not be started: {error}.")
        return JobEnd(1, None, was_requested=True)


@contextmanager
def _reserved_port() -> Iterator[int]:
    """Reserves a port on 127.0.0.1 that process 0 can listen on, and nobody else.

    Choosing a free port and releasing it again is a race that two launchers lose now
    and then. This socket keeps the port while the job runs: whoever asks the system for
    any free port does not get it. It does not listen, so it gets no connections, and
    its options let the sockets of process 0, which set one or both of them, too, listen
    on the port. tests/test_launcher_jobs.py notices if JAX's service no longer does.
    """
    with socket.socket() as holder:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            holder.setsockopt(socket.SOL_SOCKET, option, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextmanager
def _signals() -> Iterator[Events]:
    """Puts signals into a queue inside the block; those that are ignored stay so."""
    events: Events = SimpleQueue()
    numbers = [getattr(signal, name) for name in (*FORWARDED, "SIGTSTP")]
    # `nohup` ignores SIGHUP, and shells SIGINT for what runs in the background.
    numbers = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]
    # Where it is ignored, as some daemons do, nobody is told how a process ended.
    before = [(signal.SIGCHLD, signal.signal(signal.SIGCHLD, signal.SIG_DFL))]
    before += [
        (number, signal.signal(number, lambda number, _: events.put(number)))
        for number in numbers
    ]
    try:
        yield events
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _say(sentence: str) -> None:
    sys.stderr.write(f"launch: {sentence}\n")
    sys.stderr.flush()
