"""Tells somebody who watches that a save or restore takes its time."""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator

import jax

from meshlayout._render.consoles import console_on


logger = logging.getLogger("meshlayout.checkpoint")

# Shorter waits need no words.
_AFTER_S = 3.0


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Shows a line while the work inside goes on for more than a few seconds.

    In a terminal the line moves; elsewhere it is logged once. On process 0 only.

    Args:
        what: What is going on, as `restoring step 5, 1.2 GiB`.
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
