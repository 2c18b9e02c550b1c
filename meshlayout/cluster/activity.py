"""What this process is doing, for the message of a failure.

When a process of a run dies or hangs, the others name it and what it was last doing
(`watch`). Every step call is noted here, so noting takes tens of nanoseconds: no lock
and no clock, which alone would cost more. `watch` looks several times a second whether
`moves` has changed, and takes the time itself.
"""

import contextlib
import threading
import time
from collections.abc import Iterator


class Activity:
    """What this process is doing.

    Threads may overwrite each other's counts, which does no harm: `moves` only has to
    change, and steps are called from one thread.

    Attributes:
        name: What began last, such as `"train_step"`.
        moves: How often something began or ended.
        steps: Calls of steps that run on all processes, so that a process with fewer
            of them is behind.
        compiling: The step that is being compiled, or an empty string. A compilation
            takes minutes at times, and waits for no other process.
        checkpoint: The newest checkpoint that this run saved, or an empty string.
        changed: Set when `ongoing` changes; `watch` then tells the others.
        ongoing: What has begun and not ended, in order: a description, when it began
            (`time.monotonic()`), and whether it waits for other processes.
    """

    __slots__ = (
        *("changed", "checkpoint", "compiling"),
        *("moves", "name", "ongoing", "steps"),
    )

    def __init__(self) -> None:
        self.name = self.compiling = self.checkpoint = ""
        self.moves = self.steps = 0
        self.changed = threading.Event()
        self.ongoing: dict[object, tuple[str, float, bool]] = {}


now = Activity()


def begin(name: str, steps: int = 0) -> None:
    """Notes that something begins, whose end is not noted.

    Args:
        name: A description.
        steps: 1 if it is a call of a step that runs on all processes.
    """
    now.name = name
    now.moves += 1
    now.steps += steps


@contextlib.contextmanager
def during(name: str, *, waits: bool = False) -> Iterator[None]:
    """Notes what the block does, from its beginning to its end; in any thread.

    Args:
        name: A description, such as `"saving step 5"`.
        waits: Whether it waits for other processes.
    """
    key = object()
    now.ongoing[key] = (name, time.monotonic(), waits)
    now.moves += 1
    now.changed.set()
    try:
        yield
    finally:
        del now.ongoing[key]
        now.moves += 1
        now.changed.set()
