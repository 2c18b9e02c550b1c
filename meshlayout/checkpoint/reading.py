"""Which step is read, and what happens where one is damaged."""

import contextlib
import functools
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from meshlayout import _checks, _render
from meshlayout.checkpoint.damage import check_files
from meshlayout.checkpoint.manifest import Manifest
from meshlayout.checkpoint.processes import Channel
from meshlayout.checkpoint.progress import progress
from meshlayout.checkpoint.steps import Steps, best_of
from meshlayout.checkpoint.store import StoreError
from meshlayout.errors import (
    CheckpointError,
    CheckpointWarning,
    DamagedCheckpointError,
    stack_level,
)


logger = logging.getLogger("meshlayout.checkpoint")

_T = TypeVar("_T")

# How often a step is chosen anew where another process deletes the chosen one.
_ATTEMPTS = 20


class _GoneError(CheckpointError):
    """A step was deleted or replaced while it was read."""


class Reader:
    """Reads steps, the same on all processes.

    Args:
        steps: The steps that there are.
        best: The metric that the best step is told by.
        channel: The processes' conversation.
    """

    def __init__(
        self, steps: Steps, best: tuple[str, str] | None, channel: Channel
    ) -> None:
        self._steps, self._best, self._channel = steps, best, channel

    def restored(
        self,
        step: int | str,
        read: Callable[[Manifest], _T],
        *,
        verify: bool,
        fallback: bool,
    ) -> tuple[_T, int]:
        """Reads a step, or the newest intact one.

        Args:
            step: The step.
            read: Reads a step, given its manifest.
            verify: Whether to check the files before.
            fallback: Whether to go on to older steps where one is damaged.

        Raises:
            DamagedCheckpointError: If no intact step was found.
            CheckpointError: If there is no such step.
        """
        once = functools.partial(
            self._first_intact, step, read, verify=verify, fallback=fallback
        )
        for _ in range(_ATTEMPTS - 1):
            with contextlib.suppress(_GoneError):
                return once()
        return once()

    def _first_intact(
        self,
        step: int | str,
        read: Callable[[Manifest], _T],
        *,
        verify: bool,
        fallback: bool,
    ) -> tuple[_T, int]:
        tried: list[tuple[int, DamagedCheckpointError]] = []
        for candidate in self._candidates(step, fallback=fallback):
            try:
                made = self._try(candidate, read, verify=verify)
            except DamagedCheckpointError as error:
                if not fallback:
                    raise
                logger.warning("step %d is damaged: %s", candidate, error)
                tried.append((candidate, error))
                continue
            if tried:
                _warn_of(tried, candidate)
            return made, candidate
        number, error = tried[0]
        newest = f" up to {step}" if isinstance(step, int) else ""
        msg = (
            f"no intact step{newest} is left in {self._steps.directory}: all "
            f"{len(tried)} are damaged. Step {number}: {error}"
        )
        raise DamagedCheckpointError(msg) from error

    def _try(self, step: int, read: Callable[[Manifest], _T], *, verify: bool) -> _T:
        """Reads one step; raises on all processes if it is damaged for one."""
        begin_s = time.perf_counter()
        made: Any = None
        problem: CheckpointError | None = None
        found: Manifest | None = None
        try:
            found = self._steps.manifest(step)
            if verify and jax.process_index() == 0:
                check_files(self._steps.folder(step), found)
        except CheckpointError as error:
            problem = error
        self._agree(step, found, problem)
        assert found is not None
        size = _render.bytes_text(found.nbytes)
        try:
            with progress(f"restoring step {step}, {size}"):
                made = read(found)
        except (DamagedCheckpointError, StoreError) as error:
            problem = error
        self._agree(step, found, problem)
        if jax.process_index() == 0:
            seconds = time.perf_counter() - begin_s
            logger.info("restored step %d: %s in %.2f s", step, size, seconds)
        return made

    def _agree(
        self, step: int, found: Manifest | None, problem: CheckpointError | None
    ) -> None:
        """Raises on all processes the first problem of them all, if there is one."""
        text = ""
        if isinstance(problem, StoreError):
            text = f"unknown {problem}"
        elif problem is not None:
            is_still = self._steps.is_still(step, found)
            text = f"{'damaged' if is_still else 'gone'} {problem}"
        told = next(filter(None, self._channel.exchange(text)), None)
        if told is None:
            return
        kind, _, words = told.partition(" ")
        if kind == "gone":
            raise _GoneError(words) from problem
        if kind == "unknown":
            raise CheckpointError(words) from problem
        if problem is not None and told == text:
            raise problem
        raise DamagedCheckpointError(words) from problem

    def _candidates(self, step: int | str, *, fallback: bool) -> list[int]:
        """Returns the steps to try, the same on all processes."""
        said, problem = "", None
        try:
            if jax.process_index() == 0:
                first = self.chosen(step, damaged=True)
                if step == "latest":
                    _warn_of_unfinished(self._steps, first)
                rest = self._steps.with_manifest() if fallback else []
                older = [one for one in rest if one < first or step == "best"]
                others = sorted({*older} - {first}, reverse=True)
                said = " ".join(map(str, [first, *others]))
        except CheckpointError as error:
            problem = error
            said = f"error {error}"
        said = self._channel.from_first(said)
        if problem is not None:
            raise problem
        if said.startswith("error "):
            raise CheckpointError(said.removeprefix("error "))
        return [int(one) for one in said.split()]

    def chosen(self, step: int | str, *, damaged: bool = False) -> int:
        """Returns the number of a step.

        Args:
            step: What the user gave.
            damaged: Whether the latest may be one whose manifest is damaged.

        Raises:
            CheckpointError: If there is no such step.
        """
        if step == "latest":
            steps = self._steps.with_manifest() if damaged else self._steps.all()
            if not steps:
                raise CheckpointError(self._steps.missing(0))
            return steps[-1]
        if step == "best":
            best = self.best()
            if best is None:
                name = self._best[0] if self._best else ""
                msg = (
                    f"no step in {self._steps.directory} has the metric {name!r}, so "
                    "that none is the best. Give it to save(..., metrics={...})."
                )
                raise CheckpointError(msg)
            return best
        if isinstance(step, str):
            msg = f"step={step!r} is neither a number, 'latest' nor 'best'."
            raise CheckpointError(msg)
        hint = f"{self._steps.directory} has the steps {self._steps.listed()}."
        number = _checks.count(
            "step", step, at_least=0, error=CheckpointError, hint=hint
        )
        if number not in self._steps.with_manifest():
            raise CheckpointError(self._steps.missing(number))
        return number

    def best(self) -> int | None:
        """Returns the step with the best metric, or None if no step has it.

        Raises:
            CheckpointError: If there is no such metric.
        """
        if self._best is None:
            msg = (
                "there is no best step without a metric. Write "
                "Checkpointer(directory, best=('val_accuracy', 'max'))."
            )
            raise CheckpointError(msg)
        steps = self._steps.all()
        return best_of(steps, self._best, self._steps.metrics(steps))


def _warn_of(tried: Sequence[tuple[int, DamagedCheckpointError]], taken: int) -> None:
    facts = "; ".join(f"step {step}: {error}" for step, error in tried)
    msg = f"restored step {taken}, the newest that is intact. Damaged: {facts}"
    warnings.warn(msg, CheckpointWarning, stacklevel=stack_level())


def _warn_of_unfinished(steps: Steps, taken: int) -> None:
    """Warns if a newer step has files but no manifest, and nobody is at work on it."""
    for step in steps.unfinished():
        if step > taken:
            msg = (
                f"{steps.folder(step)} has no manifest: that step was not saved to its "
                f"end, or the file was deleted. Restoring step {taken}."
            )
            warnings.warn(msg, CheckpointWarning, stacklevel=stack_level())
