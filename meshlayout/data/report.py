"""The time that an input pipeline reads, places and is waited for, and its notes."""

import logging
from dataclasses import dataclass


_log = logging.getLogger(__name__)

WEIGHTED = "Losses and metrics are weighted by 'weight'; loss_fn need not use it."


@dataclass
class PipelineReport:
    """The time that an input pipeline has spent so far, on this process.

    If `waited_s` is near 0, the pipeline keeps up with training. Otherwise, look at the
    larger of `read_s` and `place_s`.

    Attributes:
        read_s: Seconds spent making batches on the host, including the user's source.
        place_s: Seconds spent copying them to the devices.
        waited_s: Seconds that the loop spent waiting for batches.
        rows: Examples that this process has read.
        batches: Batches that the loop received.
        notes: Sentences on what was converted, chosen or dropped.

    Examples:
        >>> print(PipelineReport(0.5, 0.125, 0.25, 512, 4, ("A note.",)))
        512 rows in 4 batches: 0.500 s reading, 0.125 s placing; waited 0.250 s.
        A note.
    """

    read_s: float = 0.0
    place_s: float = 0.0
    waited_s: float = 0.0
    rows: int = 0
    batches: int = 0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        work = (
            f"{self.rows:,} rows in {self.batches:,} batches: {self.read_s:.3f} s "
            f"reading, {self.place_s:.3f} s placing; waited {self.waited_s:.3f} s."
        )
        return "\n".join((work, *self.notes))

    def note(self, text: str, level: int = logging.INFO) -> None:
        """Adds a sentence to the report and logs it, once."""
        # Not with `warnings`: these come from a thread, whose stack is not the user's.
        if text not in self.notes:
            self.notes += (text,)
            _log.log(level, "%s", text)

    def warn(self, text: str) -> None:
        """Adds a sentence to the report and logs it as a warning, once."""
        self.note(text, logging.WARNING)
