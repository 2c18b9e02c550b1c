"""The failure that ends a run: which process failed, and how the others end."""

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn, Self


# Where `meshlayout.launch` writes which process failed, if one does.
REPORT_VARIABLE = "MESHLAYOUT_LAUNCHER_REPORT"


class OtherProcessError(Exception):
    """The cause of an error that says what happened to another process."""


@dataclass(frozen=True)
class Failure:
    """A process that failed, which ends all others.

    Attributes:
        process: Its index.
        text: What happened to it and what it was doing, in lines.
        is_interrupt: Whether it was interrupted by Ctrl-C.
        status: The exit status of all processes.
    """

    process: int
    text: str
    is_interrupt: bool = False
    status: int = 1

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Returns the failure that another process wrote."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Returns a text for the other processes."""
        return json.dumps(asdict(self))

    def exit(self) -> NoReturn:
        """Ends this process at once, from any thread."""
        if self.is_interrupt:
            # As Python does after Ctrl-C; signal.signal works in the main thread only.
            ctypes.CDLL(None).signal(signal.SIGINT, None)
            os.kill(os.getpid(), signal.SIGINT)
        # Workers of a data loader would stay, and hold its output open.
        for worker in multiprocessing.active_children():
            worker.kill()
        os._exit(self.status)


def is_launched() -> bool:
    """Returns whether the launcher started this process, and reports who fails."""
    return bool(os.environ.get(REPORT_VARIABLE))


def reported_by_launcher() -> tuple[int, str] | None:
    """Returns the process that the launcher saw fail first, and what became of it.

    The launcher is told at once by the system, where others wait for its heartbeats.
    """
    path = os.environ.get(REPORT_VARIABLE)
    try:
        index, fate = json.loads(Path(path or "").read_text())
    except (OSError, ValueError):
        return None
    return index, fate


def print_now(text: str) -> None:
    """Prints to stderr, also while another thread holds Python's own streams.

    What the program printed before is flushed first, which `os._exit` does not do.
    """
    flusher = threading.Thread(target=_flush, daemon=True)
    flusher.start()
    flusher.join(1.0)
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    # A notebook shows what is written to its own stream.
    with contextlib.suppress(Exception):
        if sys.stderr.fileno() != 2:
            sys.stderr.write(text)
            sys.stderr.flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
