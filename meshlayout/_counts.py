"""Counts of the steps and meetings of all processes that this one has begun.

`cluster.watch` reads them to find which process another waits for: one that has begun
more steps than an ended process waits for that one.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """What this process has begun."""

    steps: int = 0  # calls that all processes take part in, by the main thread
    others: int = 0  # what else all take part in
    meetings: int = 0  # exchanges of some, each of whom knows the others


counts = Counts()
_counting = threading.Lock()


@contextlib.contextmanager
def taking_part() -> Iterator[None]:
    """Counts its body as a meeting of all processes."""
    with _counting:
        counts.others += 1
    try:
        yield
    except SystemExit:  # it ends the program instead
        with _counting:
            counts.others -= 1
        raise
