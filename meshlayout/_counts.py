"""How many steps and meetings of all processes this one has begun.

`cluster.watch` tells by it whom a process waits for: one that has begun more steps than
another one had when its program ended waits for that one.
"""

import contextlib
import threading
from collections.abc import Iterator


class Counts:
    """What this process has begun.

    Steps are calls that all processes take part in, by the main thread; others, what
    else all take part in; meetings, exchanges of some, each of whom knows the others.
    """

    __slots__ = ("meetings", "others", "steps")

    def __init__(self) -> None:
        self.steps = self.others = self.meetings = 0


counts = Counts()
_counting = threading.Lock()


@contextlib.contextmanager
def taking_part() -> Iterator[None]:
    """Counts what is inside as something that all processes must take part in."""
    with _counting:
        counts.others += 1
    try:
        yield
    except SystemExit:  # it ends the program instead
        with _counting:
            counts.others -= 1
        raise
