"""The steps in a directory, and their retention."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from meshlayout.checkpoint import attempt, files, manifest
from meshlayout.checkpoint.manifest import Manifest
from meshlayout.checkpoint.store import AnyPath, StoreError
from meshlayout.errors import CheckpointError, DamagedCheckpointError


class Steps:
    """Lists the steps of a directory, and reads their manifests.

    Args:
        directory: The directory of all steps.
    """

    def __init__(self, directory: AnyPath) -> None:
        self.directory = directory
        self._read: dict[int, tuple[Any, Manifest]] = {}

    def folder(self, step: int) -> Any:
        """Returns the directory of a step."""
        return self.directory / str(step)

    def all(self) -> list[int]:
        """Returns the steps with an intact manifest, in order."""
        return [step for step in self.with_manifest() if self._is_whole(step)]

    def with_manifest(self) -> list[int]:
        """Returns the steps with a manifest, even a damaged one, in order."""
        return [step for step in self._folders() if self._file(step).exists()]

    def unfinished(self, after: int) -> list[int]:
        """Returns later steps without a manifest that are not being saved."""
        later = [step for step in self._folders() if step > after]
        return [step for step in later if attempt.is_unfinished(self.folder(step))]

    def _folders(self) -> list[int]:
        names = files.names_in(self.directory)
        return sorted(int(name) for name in names if files.is_step(name))

    def manifest(self, step: int) -> Manifest:
        """Returns a step's manifest.

        Args:
            step: The step.

        Raises:
            DamagedCheckpointError: If it is damaged.
            CheckpointError: If there is none.
        """
        path = self._file(step)
        try:
            mark = files.mark_of(path)
            if step in self._read and self._read[step][0] == mark:
                return self._read[step][1]
            contents = Manifest.from_bytes(path.read_bytes(), str(path))
        except FileNotFoundError:
            raise CheckpointError(self.missing(step)) from None
        except OSError as error:
            msg = f"{path} cannot be read: {error}."
            raise DamagedCheckpointError(msg) from error
        if contents.step != step:
            msg = (
                f"{path} is the manifest of step {contents.step}: the directory was "
                "renamed or the file copied. Give the directory its own name."
            )
            raise DamagedCheckpointError(msg)
        self._read[step] = (mark, contents)
        return contents

    def is_still(self, step: int, found: Manifest | None) -> bool:
        """Returns whether a step was neither deleted nor replaced since it was read.

        Args:
            step: The step.
            found: Its manifest; None if that is damaged.
        """
        try:
            return self.manifest(step) is found
        except DamagedCheckpointError:
            return found is None
        except CheckpointError:
            return False

    def metrics(self, steps: Sequence[int]) -> dict[int, Mapping[str, float]]:
        """Returns the metrics of some steps.

        Args:
            steps: Steps; those that another process has deleted meanwhile are left
                out.
        """
        metrics = {}
        for step in steps:
            try:
                metrics[step] = self.manifest(step).metrics
            except CheckpointError:
                if self._file(step).exists():
                    raise
        return metrics

    def missing(self, step: int) -> str:
        """Returns the message that a step does not exist."""
        if not files.exists(self.directory):
            return (
                f"{self.directory} holds no checkpoint: there is no such directory any "
                "more, or not on this machine."
            )
        steps = self.all()
        if not steps:
            return f"{self.directory} holds no checkpoint: nothing was saved in it yet."
        return f"{self.directory} has no step {step}; it has {self.listed()}."

    def listed(self) -> str:
        """Returns the last steps as text."""
        steps = self.all()
        last = ", ".join(map(str, steps[-10:])) or "none"
        return last + ("" if len(steps) <= 10 else f" (and {len(steps) - 10} earlier)")

    def _file(self, step: int) -> Any:
        return self.folder(step) / manifest.NAME

    def _is_whole(self, step: int) -> bool:
        try:
            self.manifest(step)
        except DamagedCheckpointError:
            return False
        except StoreError:
            raise
        except CheckpointError:  # of another version, or deleted meanwhile
            return self._file(step).exists()
        return True


# Retention.


def steps_to_delete(
    steps: Sequence[int],
    *,
    keep: int | None,
    keep_every: int | None = None,
    best: tuple[str, str] | None = None,
    metrics: Mapping[int, Mapping[str, float]] | None = None,
    newest: int | None = None,
) -> list[int]:
    """Returns the steps to delete, oldest first.

    Args:
        steps: The existing steps.
        keep: How many of the last steps stay; None for all.
        keep_every: Steps that this divides stay as well.
        best: A metric's name and `"max"` or `"min"`: the best step stays as well.
        metrics: The metrics by step.
        newest: The step that was saved last, which stays; it does not have the highest
            number if a run went back to an earlier step.

    Example:
        >>> steps_to_delete([1, 2, 3, 4, 5, 6], keep=2, keep_every=3)
        [1, 2, 4]
    """
    if keep is None:
        return []
    ordered = sorted(set(steps))
    kept = set(ordered[-max(1, keep) :])
    kept |= {step for step in ordered if keep_every and step % keep_every == 0}
    kept |= {newest, best_of(ordered, best, metrics or {})}
    return [step for step in ordered if step not in kept]


def best_of(
    steps: Sequence[int],
    best: tuple[str, str] | None,
    metrics: Mapping[int, Mapping[str, float]],
) -> int | None:
    """Returns the step with the best metric, the later one of a tie, or None.

    Args:
        steps: The existing steps.
        best: As for `steps_to_delete`.
        metrics: As for `steps_to_delete`.

    Example:
        >>> measured = {1: {"loss": 0.5}, 2: {"loss": 0.3}, 3: {"loss": 0.4}, 4: {}}
        >>> best_of([1, 2, 3, 4], ("loss", "min"), measured)
        2
    """
    if best is None:
        return None
    name, mode = best
    sign = 1.0 if mode == "max" else -1.0
    values = {
        step: sign * metrics[step][name]
        for step in steps
        if not math.isnan(metrics.get(step, {}).get(name, math.nan))
    }
    return max(values, key=lambda step: (values[step], step), default=None)
