"""The steps in a directory: listed, and restored on all processes.

All processes must restore the same step, or none: so process 0 chooses it, and an error
on one process is raised on all of them. If the step is damaged, earlier ones are tried
on request. Another run may save and delete steps at any moment: a step that disappears
while it is being read is not damaged, and another one is chosen.
"""

import functools
import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax

from meshlayout import _checks, _render
from meshlayout.checkpoint import attempt, files, manifest
from meshlayout.checkpoint.manifest import Manifest
from meshlayout.checkpoint.policy import best_of
from meshlayout.checkpoint.saved_step import SavedStep, check_files
from meshlayout.checkpoint.store import AnyPath, StoreError
from meshlayout.checkpoint.target import LeafRestore
from meshlayout.checkpoint.waits import progress
from meshlayout.cluster.channel import Channel
from meshlayout.errors import (
    CheckpointError,
    CheckpointWarning,
    DamagedCheckpointError,
    stack_level,
)


logger = logging.getLogger("meshlayout.checkpoint")

T = TypeVar("T")

Read: TypeAlias = Callable[[SavedStep, Manifest], tuple[T, Sequence[LeafRestore]]]
"""Restores from a step, given its manifest; also returns which arrays it read."""

# How often to choose again if another run deletes the chosen step. With `keep=1` and
# frequent saves several in a row may disappear.
_ATTEMPTS = 20


class _GoneError(CheckpointError):
    """A step was deleted or replaced while being read."""


class Steps:
    """The steps of a directory, with a restore of the same one on all processes.

    Args:
        directory: The directory of all steps.
        best_metric: The metric that selects the best step, and `"max"` or `"min"`.
        channel: Exchanges messages between the processes.
    """

    def __init__(
        self, directory: AnyPath, best_metric: tuple[str, str] | None, channel: Channel
    ) -> None:
        self.directory = directory
        self._best_metric, self._channel = best_metric, channel
        # Parsing is slow for many leaves, and `all` reads every manifest: kept while
        # the file is the same, by inode, size and time.
        self._manifests: dict[int, tuple[Any, Manifest]] = {}

    def folder(self, step: int) -> Any:
        """Returns the directory of a step."""
        return self.directory / str(step)

    def all(self) -> list[int]:
        """Returns the steps with an intact manifest, in ascending order."""
        return [step for step in self.with_manifest() if self._is_whole(step)]

    def with_manifest(self) -> list[int]:
        """Returns the steps with a manifest, even a damaged one, in ascending order."""
        return [step for step in self._folders() if self._file(step).exists()]

    def manifest(self, step: int) -> Manifest:
        """Returns a step's manifest.

        Raises:
            DamagedCheckpointError: If it is damaged.
            CheckpointError: If it does not exist.
        """
        path = self._file(step)
        try:
            status = path.stat()
            mark = status.st_ino, status.st_size, status.st_mtime_ns
            if step in self._manifests and self._manifests[step][0] == mark:
                return self._manifests[step][1]
            contents = Manifest.from_bytes(path.read_bytes(), str(path))
        except FileNotFoundError:
            raise CheckpointError(self._missing(step)) from None
        except OSError as error:
            msg = f"{path} cannot be read: {error}."
            raise DamagedCheckpointError(msg) from error
        if contents.step != step:
            msg = (
                f"{path} is the manifest of step {contents.step}: the directory was "
                "renamed or the file copied. Give the directory its own name."
            )
            raise DamagedCheckpointError(msg)
        self._manifests[step] = (mark, contents)
        return contents

    def metrics(self, steps: Sequence[int]) -> dict[int, Mapping[str, float]]:
        """Returns the metrics of the steps that still exist."""
        metrics = {}
        for step in steps:
            try:
                metrics[step] = self.manifest(step).metrics
            except CheckpointError:
                # Another run may have deleted it since it was listed.
                if self._file(step).exists():
                    raise
        return metrics

    def _folders(self) -> list[int]:
        names = files.names_in(self.directory)
        return sorted(int(name) for name in names if files.is_step(name))

    def _file(self, step: int) -> Any:
        return self.folder(step) / manifest.NAME

    def _is_whole(self, step: int) -> bool:
        try:
            self.manifest(step)
        except DamagedCheckpointError:
            return False
        except StoreError:
            raise
        except CheckpointError:
            # One of another version is listed: a restore says what can read it. One
            # that was deleted meanwhile is not.
            return self._file(step).exists()
        return True

    def _missing(self, step: int) -> str:
        """Returns the message that a step does not exist."""
        if not files.is_remote(self.directory) and not self.directory.is_dir():
            return (
                f"{self.directory} has no checkpoints: the directory does not exist, "
                "at least not on this machine."
            )
        if not self.all():
            return f"{self.directory} has no checkpoints: nothing was saved there yet."
        return f"{self.directory} has no step {step}; it has {self._listed()}."

    def _listed(self) -> str:
        steps = self.all()
        last = ", ".join(map(str, steps[-10:])) or "none"
        return last + ("" if len(steps) <= 10 else f" (and {len(steps) - 10} earlier)")

    # The choice.

    def best(self) -> int | None:
        """Returns the step with the best metric, or None if no step has it.

        Raises:
            CheckpointError: If no metric was named.
        """
        if self._best_metric is None:
            msg = (
                "there is no best step without a metric. Write "
                "Checkpointer(directory, best=('val_accuracy', 'max'))."
            )
            raise CheckpointError(msg)
        steps = self.all()
        return best_of(steps, self._best_metric, self.metrics(steps))

    def chosen(self, step: int | str, *, allow_damaged: bool = False) -> int:
        """Returns the number of a step.

        Args:
            step: The user's argument: a number, `"latest"` or `"best"`.
            allow_damaged: Whether the latest may be one whose manifest is damaged.

        Raises:
            CheckpointError: If the step does not exist.
        """
        if step == "latest":
            listed = self.with_manifest if allow_damaged else self.all
            # During the listing, another run may save a step and delete the listed
            # ones: list again if none is left.
            steps = listed() or listed()
            if not steps:
                raise CheckpointError(self._missing(0))
            return steps[-1]
        if step == "best":
            best = self.best()
            if best is None:
                name = self._best_metric[0] if self._best_metric else ""
                msg = (
                    f"no step in {self.directory} has the metric {name!r}, so none is "
                    "the best. Give it to save(..., metrics={...})."
                )
                raise CheckpointError(msg)
            return best
        if isinstance(step, str):
            msg = f"step must be a number, 'latest' or 'best', got {step!r}."
            raise CheckpointError(msg)
        hint = f"{self.directory} has the steps {self._listed()}."
        number = _checks.count(
            "step", step, at_least=0, error=CheckpointError, hint=hint
        )
        if number not in self.with_manifest():
            raise CheckpointError(self._missing(number))
        return number

    def _candidates(self, step: int | str, *, fallback: bool) -> list[int]:
        """Returns the steps to try, the best choice first; on process 0."""
        # A damaged newest step is tried, so that the user hears of the damage: quietly
        # taking the one before would lose training.
        first = self.chosen(step, allow_damaged=True)
        if step == "latest":
            self._warn_of_unfinished(first)
        rest = self.with_manifest() if fallback else []
        older = {other for other in rest if other < first or step == "best"}
        return [first, *sorted(older - {first}, reverse=True)]

    def _warn_of_unfinished(self, restored: int) -> None:
        """Warns if a newer step has files but no manifest, and is not being saved."""
        for step in self._folders():
            if step > restored and attempt.is_unfinished(self.folder(step)):
                msg = (
                    f"{self.folder(step)} has no manifest: the save of that step was "
                    "not completed, or the file was deleted. Restoring step "
                    f"{restored}."
                )
                warnings.warn(msg, CheckpointWarning, stacklevel=stack_level())

    # Restoring.

    def restored(
        self, step: int | str, read: Read[T], *, verify: bool, fallback: bool
    ) -> tuple[T, int]:
        """Restores a step, or the newest intact one; also returns its number.

        Args:
            step: The step.
            read: Restores from it.
            verify: Whether to verify files and arrays.
            fallback: Whether to try older steps if one is damaged.

        Raises:
            DamagedCheckpointError: If no intact step was found.
            CheckpointError: If the step does not exist.
        """
        _checks.flag("verify", verify, where="restore", error=CheckpointError)
        _checks.flag("fallback", fallback, where="restore", error=CheckpointError)
        gone: _GoneError | None = None
        for _ in range(_ATTEMPTS):
            try:
                return self._first_intact(step, read, verify=verify, fallback=fallback)
            except _GoneError as error:
                gone = error
        raise CheckpointError(str(gone)) from gone

    def _first_intact(
        self, step: int | str, read: Read[T], *, verify: bool, fallback: bool
    ) -> tuple[T, int]:
        """Tries the candidates in turn; the same ones on every process."""
        damaged: dict[int, DamagedCheckpointError] = {}
        candidates = functools.partial(self._candidates, step, fallback=fallback)
        for candidate in self._channel.on_first(candidates):
            try:
                restored = self._try(candidate, read, verify=verify)
            except DamagedCheckpointError as error:
                if not fallback:
                    raise self._with_latest(error, step, candidate) from error
                logger.warning("step %d is damaged: %s", candidate, error)
                damaged[candidate] = error
                continue
            if damaged:
                facts = "; ".join(f"step {n}: {error}" for n, error in damaged.items())
                msg = (
                    f"restored step {candidate}, the newest that is intact. Damaged: "
                    f"{facts}"
                )
                warnings.warn(msg, CheckpointWarning, stacklevel=stack_level())
            return restored, candidate
        number, error = next(iter(damaged.items()))
        newest = f" up to {step}" if isinstance(step, int) else ""
        msg = (
            f"no intact step{newest} is left in {self.directory}: all {len(damaged)} "
            f"are damaged. Step {number}: {error}"
        )
        raise DamagedCheckpointError(msg) from error

    def _with_latest(
        self, error: DamagedCheckpointError, step: int | str, candidate: int
    ) -> DamagedCheckpointError:
        """Returns the error of the newest step, extended by `latest_step()`.

        Otherwise a user who compares the two would wonder why they differ.
        """
        latest = max(self.all(), default=None) if step == "latest" else None
        if latest is None or latest == candidate:
            return error
        msg = (
            f"{error} latest_step() is {latest}, the newest step with an intact "
            "manifest."
        )
        return DamagedCheckpointError(msg)

    def _try(self, step: int, read: Read[T], *, verify: bool) -> T:
        """Restores one step; raises on all processes if it is damaged on any.

        There are two exchanges, which every process reaches: one after the manifest is
        read, and one with the sums of arrays that several processes read in parts. A
        third one follows, on all of them, if these sums are wrong.
        """
        begin_s = time.perf_counter()
        contents, problem = None, None
        restored: Any = None
        sums: Any = None
        try:
            contents = self.manifest(step)
            if verify and jax.process_index() == 0:
                check_files(self.folder(step), contents)
        except CheckpointError as error:
            problem = error
        self._agree(step, contents, problem)
        assert contents is not None
        size = _render.bytes_text(contents.nbytes)
        with (
            SavedStep(self.folder(step), contents, verify=verify) as source,
            progress(f"restoring step {step}, {size}"),
        ):
            try:
                restored, restores = read(source, contents)
                sums = source.partial_sums(restores)
            except (DamagedCheckpointError, StoreError) as error:
                problem = error
        partial_sums = self._agree(step, contents, problem, sums)
        try:
            source.check_sums(partial_sums)
        except DamagedCheckpointError as error:
            # All processes compare the same sums: either all of them get here, or none.
            self._agree(step, contents, error)
        if jax.process_index() == 0:
            seconds = time.perf_counter() - begin_s
            logger.info("restored step %d: %s in %.2f s", step, size, seconds)
        return restored

    def _agree(
        self,
        step: int,
        contents: Manifest | None,
        problem: CheckpointError | None,
        sums: Any = None,
    ) -> list[Any]:
        """Returns all processes' sums, or raises the first problem on all of them.

        Args:
            step: The step that was tried.
            contents: Its manifest; None if that is damaged.
            problem: This process's error, if any.
            sums: The message to the others if there is no error.
        """
        answer = {"kind": "fine", "sums": sums}
        if problem is not None:
            kind = self._kind_of(problem, step, contents)
            answer = {"kind": kind, "words": str(problem)}
        messages = list(self._channel.exchange(answer).values())
        first = next((other for other in messages if other["kind"] != "fine"), None)
        if first is None:
            return [other["sums"] for other in messages]
        if first["kind"] == "gone":
            raise _GoneError(first["words"]) from problem
        if first["kind"] == "unknown":
            raise CheckpointError(first["words"]) from problem
        if problem is not None and first == answer:
            raise problem  # the original, with its traceback and cause
        raise DamagedCheckpointError(first["words"]) from problem

    def _kind_of(
        self, problem: CheckpointError, step: int, contents: Manifest | None
    ) -> str:
        """Returns `"damaged"`, `"gone"` (deleted or replaced meanwhile) or `"unknown"`.

        Files that disappear during a read look like damage. Whether the manifest is
        still the same shows the difference.
        """
        if isinstance(problem, StoreError):
            return "unknown"
        try:
            is_unchanged = self.manifest(step) is contents
        except DamagedCheckpointError:
            is_unchanged = contents is None
        except CheckpointError:  # of another version, or deleted
            return "unknown" if self._file(step).exists() else "gone"
        return "damaged" if is_unchanged else "gone"
