"""When a save is due, by steps or by the clock."""

import time
from collections.abc import Callable, Sequence

import jax

from meshlayout.checkpoint.processes import Channel
from meshlayout.errors import CheckpointError


class Schedule:
    """Tells whether a save is due.

    Args:
        every: How many steps lie between two saves; None for all steps.
        every_s: How many seconds lie between two saves.
        channel: The processes' conversation: process 0 has the clock.

    Raises:
        CheckpointError: If both are given, or the seconds are none.
    """

    def __init__(
        self, every: int | None, every_s: float | None, channel: Channel
    ) -> None:
        if every is not None and every_s is not None:
            msg = (
                f"every={every} and every_s={every_s} are both given. Leave one out: "
                "saves are due by steps or by the clock."
            )
            raise CheckpointError(msg)
        if every_s is not None and not (
            isinstance(every_s, (int, float)) and every_s >= 0
        ):
            msg = f"every_s={every_s!r} is no number of seconds."
            raise CheckpointError(msg)
        self._every, self._every_s, self._channel = every, every_s, channel
        self._last_step: int | None = None
        self._last_s = time.monotonic()

    def is_due(
        self, step: int, steps: Callable[[], Sequence[int]], *, force: bool
    ) -> bool:
        """Tells whether a step is to be saved.

        Args:
            step: The step.
            steps: Returns the steps that exist, where it is not known yet how far the
                last save was.
            force: Whether it is, in any case.
        """
        if force:
            return True
        if self._every_s is not None:
            passed = time.monotonic() - self._last_s >= self._every_s
            is_due = self._channel.from_first("due" if passed else "") == "due"
            if is_due and jax.process_index() != 0:
                self._last_s = time.monotonic()
            return is_due
        if self._every is None:
            return True
        if self._last_step is None:
            before = [one for one in steps() if one < step]
            self._last_step = max(before, default=0)
        # A call may be several steps after the one before.
        return step // self._every > min(self._last_step, step) // self._every

    def saved(self, step: int) -> None:
        """Notes that a step is being saved."""
        self._last_step, self._last_s = step, time.monotonic()

    def restored(self, step: int) -> None:
        """Notes that training goes on from a step."""
        self._last_step = step
