"""Selects the step to restore, and falls back if it is damaged.

All processes must restore the same step, or none: so process 0 chooses, and an error
on one process is raised on all of them.
"""

import contextlib
import functools
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from meshlayout import _checks, _render
from meshlayout.checkpoint.manifest import Manifest
from meshlayout.checkpoint.saved_step import SavedStep, check_files
from meshlayout.checkpoint.steps import Steps, best_of
from meshlayout.checkpoint.store import StoreError
from meshlayout.checkpoint.target import LeafRestore
from meshlayout.checkpoint.waits import progress
from meshlayout.cluster.process_sync import Channel
from meshlayout.errors import (
    CheckpointError,
    CheckpointWarning,
    DamagedCheckpointError,
    stack_level,
)


logger = logging.getLogger("meshlayout.checkpoint")

T = TypeVar("T")

# How often to choose again if another process deletes the chosen step.
_ATTEMPTS = 20


class _GoneError(CheckpointError):
    """A step was deleted or replaced while being read."""


class StepSelection:
    """Restores a step, the same on all processes.

    Args:
        steps: The existing steps.
        best: The metric that selects the best step, and `"max"` or `"min"`.
        channel: Exchanges messages between the processes.
    """

    def __init__(
        self, steps: Steps, best: tuple[str, str] | None, channel: Channel
    ) -> None:
        self._steps, self._best, self._channel = steps, best, channel

    def restored(
        self,
        step: int | str,
        read: Callable[[SavedStep, Manifest], tuple[T, Sequence[LeafRestore]]],
        *,
        verify: bool,
        fallback: bool,
    ) -> tuple[T, int]:
        """Restores a step, or the newest intact one.

        Args:
            step: The step.
            read: Restores from a step, given its manifest; also returns what it read.
            verify: Whether to verify files and arrays.
            fallback: Whether to try older steps if one is damaged.

        Raises:
            DamagedCheckpointError: If no intact step was found.
            CheckpointError: If there is no such step.
        """
        _checks.flag("verify", verify, where="restore", error=CheckpointError)
        _checks.flag("fallback", fallback, where="restore", error=CheckpointError)
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
        read: Callable[[SavedStep, Manifest], tuple[T, Sequence[LeafRestore]]],
        *,
        verify: bool,
        fallback: bool,
    ) -> tuple[T, int]:
        damaged: list[tuple[int, DamagedCheckpointError]] = []
        for candidate in self._candidates(step, fallback=fallback):
            try:
                restored = self._try(candidate, read, verify=verify)
            except DamagedCheckpointError as error:
                if not fallback:
                    raise self._with_latest(error, step, candidate) from error
                logger.warning("step %d is damaged: %s", candidate, error)
                damaged.append((candidate, error))
                continue
            if damaged:
                _warn_of_damage(damaged, candidate)
            return restored, candidate
        number, error = damaged[0]
        newest = f" up to {step}" if isinstance(step, int) else ""
        msg = (
            f"no intact step{newest} is left in {self._steps.directory}: all "
            f"{len(damaged)} are damaged. Step {number}: {error}"
        )
        raise DamagedCheckpointError(msg) from error

    def _with_latest(
        self, error: DamagedCheckpointError, step: int | str, candidate: int
    ) -> DamagedCheckpointError:
        """Returns the error of the newest step, extended with `latest_step()`."""
        latest = max(self._steps.all(), default=None) if step == "latest" else None
        if latest is None or latest == candidate:
            return error
        msg = (
            f"{error} latest_step() is {latest}, the newest step with an intact "
            "manifest."
        )
        return DamagedCheckpointError(msg)

    def _try(
        self,
        step: int,
        read: Callable[[SavedStep, Manifest], tuple[T, Sequence[LeafRestore]]],
        *,
        verify: bool,
    ) -> T:
        """Restores one step; raises on all processes if it is damaged on one."""
        begin_s = time.perf_counter()
        problem: CheckpointError | None = None
        manifest: Manifest | None = None
        try:
            manifest = self._steps.manifest(step)
            if verify and jax.process_index() == 0:
                check_files(self._steps.folder(step), manifest)
        except CheckpointError as error:
            problem = error
        self._agree(step, manifest, problem)
        assert manifest is not None
        size = _render.bytes_text(manifest.nbytes)
        restored: Any = None
        sums = ""
        with (
            SavedStep(self._steps.folder(step), manifest, verify=verify) as source,
            progress(f"restoring step {step}, {size}"),
        ):
            try:
                restored, restores = read(source, manifest)
                sums = source.partial_sums(restores)
            except (DamagedCheckpointError, StoreError) as error:
                problem = error
        partial_sums = self._agree(step, manifest, problem, sums)
        try:
            source.check_sums(partial_sums)
        except DamagedCheckpointError as error:
            # All processes compare the same sums, so all of them come here, or none.
            self._agree(step, manifest, error)
        if jax.process_index() == 0:
            seconds = time.perf_counter() - begin_s
            logger.info("restored step %d: %s in %.2f s", step, size, seconds)
        return restored

    def _agree(
        self,
        step: int,
        manifest: Manifest | None,
        problem: CheckpointError | None,
        message: str = "",
    ) -> list[str]:
        """Returns all processes' messages, or raises the first problem on all of them.

        Args:
            step: The step that was tried.
            manifest: Its manifest; None if that is damaged.
            problem: This process's error, if any.
            message: The message to the others if there is none.
        """
        text = f"fine {message}"
        if isinstance(problem, StoreError):
            text = f"unknown {problem}"
        elif problem is not None:
            is_still = self._steps.is_still(step, manifest)
            text = f"{'damaged' if is_still else 'gone'} {problem}"
        texts = self._exchanged(text)
        first = next((said for said in texts if not said.startswith("fine ")), None)
        if first is None:
            return [said.removeprefix("fine ") for said in texts]
        kind, _, words = first.partition(" ")
        if kind == "gone":
            raise _GoneError(words) from problem
        if kind == "unknown":
            raise CheckpointError(words) from problem
        if problem is not None and first == text:
            raise problem
        raise DamagedCheckpointError(words) from problem

    def _exchanged(self, text: str) -> list[str]:
        """Returns the message of each process, process 0 first."""
        if jax.process_count() == 1:
            return [text]
        return list(self._channel.exchange(text).values())

    def _candidates(self, step: int | str, *, fallback: bool) -> list[int]:
        """Returns the steps to try, the same on all processes."""
        text, problem = "", None
        try:
            if jax.process_index() == 0:
                first = self.chosen(step, allow_damaged=True)
                if step == "latest":
                    _warn_of_unfinished(self._steps, first)
                rest = self._steps.with_manifest() if fallback else []
                older = {other for other in rest if other < first or step == "best"}
                others = sorted(older - {first}, reverse=True)
                text = " ".join(map(str, [first, *others]))
        except CheckpointError as error:
            problem = error
            text = f"error {error}"
        text = self._exchanged(text)[0]
        if problem is not None:
            raise problem
        if text.startswith("error "):
            raise CheckpointError(text.removeprefix("error "))
        return [int(number) for number in text.split()]

    def chosen(self, step: int | str, *, allow_damaged: bool = False) -> int:
        """Returns the number of a step.

        Args:
            step: What the user gave.
            allow_damaged: Whether the latest may be one whose manifest is damaged.

        Raises:
            CheckpointError: If there is no such step.
        """
        if step == "latest":
            listed = self._steps.with_manifest if allow_damaged else self._steps.all
            # During the listing, another process may save a step and delete the ones
            # listed: list again if none is left.
            steps = listed() or listed()
            if not steps:
                raise CheckpointError(self._steps.missing(0))
            return steps[-1]
        if step == "best":
            best = self.best()
            if best is None:
                name = self._best[0] if self._best else ""
                msg = (
                    f"no step in {self._steps.directory} has the metric {name!r}, so "
                    "none is the best. Give it to save(..., metrics={...})."
                )
                raise CheckpointError(msg)
            return best
        if isinstance(step, str):
            msg = f"step must be a number, 'latest' or 'best', got {step!r}."
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


def _warn_of_damage(
    damaged: Sequence[tuple[int, DamagedCheckpointError]], restored: int
) -> None:
    facts = "; ".join(f"step {step}: {error}" for step, error in damaged)
    msg = f"restored step {restored}, the newest that is intact. Damaged: {facts}"
    warnings.warn(msg, CheckpointWarning, stacklevel=stack_level())


def _warn_of_unfinished(steps: Steps, restored: int) -> None:
    """Warns if a newer step has files but no manifest, and is not being saved."""
    for step in steps.unfinished(after=restored):
        msg = (
            f"{steps.folder(step)} has no manifest: that step was not saved to its "
            f"end, or the file was deleted. Restoring step {restored}."
        )
        warnings.warn(msg, CheckpointWarning, stacklevel=stack_level())
