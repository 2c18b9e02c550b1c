"""How long an input pipeline reads, places and is waited for, and what it noted."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PipelineReport:
    """The work of an input pipeline so far, on this process.

    Use this to find out whether training waits for data: if `waited_s` is near 0, the
    pipeline keeps up, however long its work takes. Otherwise, the larger one of
    `read_s` and `place_s` is where to look.

    Attributes:
        read_s: Seconds spent making batches on the host, in the user's source and here.
        place_s: Seconds spent copying them to the devices.
        waited_s: Seconds that the loop spent waiting for batches.
        rows: Examples that this process has read.
        batches: Batches that the loop received.
        notes: What was converted, chosen or dropped, in sentences.

    Example:
        >>> print(PipelineReport(0.5, 0.125, 0.25, 512, 4, ("A note.",)))
        512 rows in 4 batches: 0.500 s reading, 0.125 s placing; waited 0.250 s.
        A note.
    """

    read_s: float
    place_s: float
    waited_s: float
    rows: int
    batches: int
    notes: tuple[str, ...]

    def __str__(self) -> str:
        work = (
            f"{self.rows:,} rows in {self.batches:,} batches: {self.read_s:.3f} s "
            f"reading, {self.place_s:.3f} s placing; waited {self.waited_s:.3f} s."
        )
        return "\n".join((work, *self.notes))


class Clock:
    """Adds up the times of a pipeline, and keeps its notes; any thread may use it.

    Example:
        >>> clock = Clock()
        >>> with clock.reading():
        ...     clock.read_rows(32)
        >>> clock.report().rows
        32
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read_s = self._place_s = self._waited_s = 0.0
        self._rows = self._batches = 0
        self._notes: dict[str, None] = {}

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Adds the time of a `with` block to `read_s`."""
        start = time.perf_counter()
        yield
        with self._lock:
            self._read_s += time.perf_counter() - start

    def read_rows(self, count: int) -> None:
        """Adds examples that were read."""
        with self._lock:
            self._rows += count

    @contextlib.contextmanager
    def placing(self) -> Iterator[None]:
        """Adds the time of a `with` block to `place_s`."""
        start = time.perf_counter()
        yield
        with self._lock:
            self._place_s += time.perf_counter() - start

    def waited(self, seconds: float) -> None:
        """Adds the seconds that the loop waited for one batch."""
        with self._lock:
            self._waited_s += seconds
            self._batches += 1

    def note(self, text: str) -> None:
        """Adds a sentence to the report, once."""
        with self._lock:
            self._notes[text] = None

    def warn(self, text: str) -> None:
        """Adds a sentence to the report and logs it, once."""
        # Not with `warnings`: these come from a thread, whose stack is not the user's.
        if text not in self._notes:
            self.note(text)
            _log.warning("%s", text)

    def report(self) -> PipelineReport:
        """Returns the sums so far."""
        with self._lock:
            return PipelineReport(
                self._read_s,
                self._place_s,
                self._waited_s,
                self._rows,
                self._batches,
                tuple(self._notes),
            )
