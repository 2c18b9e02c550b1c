"""Waiting during a save or restore: for its end, and for the other processes.

A terminal shows a moving line; a log says once what is being waited for.
"""

import contextlib
import itertools
import logging
import sys
import threading
import time
from collections.abc import Iterator

import jax

from meshlayout._render.consoles import console_on
from meshlayout.cluster.channel import Channel
from meshlayout.errors import CheckpointError


logger = logging.getLogger("meshlayout.checkpoint")

# Checkpointers are opened in the same order on all processes, so the numbers agree.
_numbers = itertools.count()

# Longer than a slow store takes for a large file, and short enough for a job that hangs
# to end by itself.
_TIMEOUT_S = 1200.0

# A process that does not take part is usually a mistake in the program: say so soon.
_WARN_AFTER_S = 10.0

# Shorter waits show no progress.
_AFTER_S = 3.0


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Shows a line if the block takes more than a few seconds, on process 0 only.

    In a terminal the line moves; elsewhere it is logged once.

    Args:
        what: A description, such as `restoring step 5, 1.2 GiB`.
    """
    if jax.process_index() != 0:
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_show, args=(what, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _show(what: str, done: threading.Event) -> None:
    begin_s = time.perf_counter()
    if done.wait(_AFTER_S):
        return
    console = console_on(sys.stderr)
    if not console.is_terminal or console.is_dumb_terminal:
        logger.info("%s ...", what)
        return
    with console.status(what) as status:
        while not done.wait(0.5):
            status.update(f"{what}, {time.perf_counter() - begin_s:.0f} s")


def open_channel(purpose: str, *, is_patient: bool = False) -> Channel:
    """Opens a channel between all processes.

    Args:
        purpose: The name of what they wait for, to complete "did not come to ...".
        is_patient: Whether long waits are normal, such as for another process's files.
    """
    return Channel(
        f"checkpoint/{next(_numbers)}",
        what=purpose,
        hint=(
            "All processes have to open, save and restore the same checkpoints in the "
            "same order; process 0 alone cannot."
        ),
        timeout_s=_TIMEOUT_S,
        warn_after_s=_TIMEOUT_S if is_patient else _WARN_AFTER_S,
        error=CheckpointError,
    )
