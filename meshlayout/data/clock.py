"""How long each stage of an input pipeline takes, and notes for its user.

Stages nest: reading a batch may map it. Each is charged only with its own time, so that
the slowest stage of the report is the one to work on.
"""

import logging
import threading
import time
from dataclasses import dataclass

from meshlayout._render.tables import html_table, text_table


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stage:
    """The work that one stage of a pipeline has done.

    Attributes:
        name: `read`, which makes a batch on the host; `place`, which copies it to the
            devices; and for `from_tfds` also `decode`, `map` and `stack`.
        rows: The examples that passed through it.
        seconds: The time it took.
    """

    name: str
    rows: int
    seconds: float

    @property
    def rows_per_s(self) -> float:
        """Examples per second; infinite if no time was measured."""
        return self.rows / self.seconds if self.seconds else float("inf")


@dataclass(frozen=True)
class PipelineReport:
    """The work of the stages of a pipeline so far, on this process.

    Use this to find out whether training waits for data, and for which stage: if
    `waited_s` is near 0, the pipeline keeps up, however long its stages take.

    Attributes:
        stages: The stages, in the order in which examples pass through them.
        waited_s: Seconds that the loop spent waiting for batches.
        batches: Batches that the loop received.
        notes: What was converted, chosen or dropped, in sentences.

    Example:
        >>> report = PipelineReport((Stage("read", 512, 0.5),), 0.25, 4, ("Note.",))
        >>> print(report)
        stage  rows  seconds  rows/s
        ─────  ────  ───────  ──────
        read    512    0.500   1,024
        The loop waited 0.250 s for 4 batches; the slowest stage is 'read'.
        Note.
    """

    stages: tuple[Stage, ...]
    waited_s: float
    batches: int
    notes: tuple[str, ...]

    @property
    def bottleneck(self) -> str | None:
        """The stage with the fewest examples per second; None before any was timed."""
        timed = [stage for stage in self.stages if stage.rows and stage.seconds]
        if not timed:
            return None
        return min(timed, key=lambda stage: stage.rows_per_s).name

    def __str__(self) -> str:
        headers, rows, align, notes = self._table()
        return text_table(headers, rows, align, notes=notes)

    def _repr_html_(self) -> str:
        headers, rows, align, notes = self._table()
        return html_table(headers, rows, align, notes=notes)

    def _table(self) -> tuple[list[str], list[list[str]], str, list[str]]:
        rows = [
            [
                stage.name,
                f"{stage.rows:,}",
                f"{stage.seconds:.3f}",
                f"{stage.rows_per_s:,.0f}" if stage.seconds else "",
            ]
            for stage in self.stages
        ]
        slowest = self.bottleneck
        waited = (
            f"The loop waited {self.waited_s:.3f} s for {self.batches:,} batches"
            f"{f'; the slowest stage is {slowest!r}' if slowest else ''}."
        )
        return (
            ["stage", "rows", "seconds", "rows/s"],
            rows,
            "lrrr",
            [waited, *self.notes],
        )


# In the order in which examples pass through them.
_STAGES = ("read", "decode", "map", "stack", "place")


class Clock:
    """Adds up seconds and rows by stage; any thread may use it.

    Attributes:
        running: Per thread, in `inner_s`: the seconds of stages inside the one that is
            running there, or None if none is.

    Example:
        >>> clock = Clock()
        >>> with clock.stage("read", rows=32):
        ...     pass
        >>> clock.report().stages[0].rows
        32
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.running = threading.local()
        self._seconds: dict[str, float] = {}
        self._rows: dict[str, int] = {}
        self._notes: dict[str, None] = {}
        self._waited = 0.0
        self._batches = 0

    def stage(self, name: str, rows: int = 0) -> "_StageTimer":
        """Measures the time of a `with` block, excluding that of stages inside it."""
        return _StageTimer(self, name, rows)

    def add(self, name: str, rows: int, seconds: float) -> None:
        """Adds a time that was measured elsewhere.

        Args:
            name: The stage's name.
            rows: The examples that passed through it.
            seconds: The time it took; an enclosing stage is charged that much less.
        """
        inner_s = getattr(self.running, "inner_s", None)
        if inner_s is not None:
            self.running.inner_s = inner_s + seconds
        with self._lock:
            self._rows[name] = self._rows.get(name, 0) + rows
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def waited(self, seconds: float) -> None:
        """Adds the seconds that the loop waited for one batch."""
        with self._lock:
            self._waited += seconds
            self._batches += 1

    def note(self, text: str) -> None:
        """Adds a sentence to the report, once."""
        with self._lock:
            self._notes[text] = None

    def warn(self, text: str) -> None:
        """Adds a sentence about lost or changed data to the report; logs it once."""
        # Not with `warnings`: these come from a thread, whose stack is not the user's.
        with self._lock:
            is_new = text not in self._notes
            self._notes[text] = None
        if is_new:
            _log.warning("%s", text)

    def report(self) -> PipelineReport:
        """Returns the sums so far."""
        with self._lock:
            stages = tuple(
                Stage(name, self._rows[name], self._seconds[name])
                for name in sorted(self._seconds, key=_STAGES.index)
            )
            notes = tuple(self._notes)
            return PipelineReport(stages, self._waited, self._batches, notes)


class _StageTimer:
    """A `with` block whose own time is added to a stage.

    Attributes:
        rows: The examples of the block; may be set inside it, once they are known.
    """

    # A class: a generator with `contextlib` costs several more calls per batch.
    __slots__ = ("_clock", "_name", "_outer_s", "_start", "rows")

    def __init__(self, clock: Clock, name: str, rows: int) -> None:
        self._clock, self._name, self.rows = clock, name, rows

    def __enter__(self) -> "_StageTimer":
        running = self._clock.running
        self._outer_s: float | None = getattr(running, "inner_s", None)
        running.inner_s = 0.0
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._start
        running = self._clock.running
        # Several workers' times, added with `add`, may exceed this thread's.
        own_s = max(0.0, seconds - running.inner_s)
        # `add` would charge the enclosing stage with this stage's own time only; it
        # has to be charged with the whole block.
        running.inner_s = None
        self._clock.add(self._name, self.rows, own_s)
        running.inner_s = None if self._outer_s is None else self._outer_s + seconds
