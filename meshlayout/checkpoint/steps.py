"""The steps that a directory holds."""

from collections.abc import Mapping, Sequence
from typing import Any

from meshlayout.checkpoint import attempts, files, manifest
from meshlayout.checkpoint.manifest import Manifest
from meshlayout.checkpoint.store import StoreError
from meshlayout.errors import CheckpointError, DamagedCheckpointError


class Steps:
    """Reads which steps there are, and their manifests.

    Args:
        directory: The directory of all steps.
    """

    def __init__(self, directory: Any) -> None:
        self.directory = directory
        self._read: dict[int, tuple[Any, Manifest]] = {}

    def folder(self, step: int) -> Any:
        """Returns the directory of a step."""
        return self.directory / str(step)

    def all(self) -> list[int]:
        """Returns the steps whose manifest is there and whole, in order."""
        return [step for step in self.with_manifest() if self._is_whole(step)]

    def with_manifest(self) -> list[int]:
        """Returns the steps that have a manifest, be it damaged, in order."""
        return [step for step in self._folders() if self._file(step).exists()]

    def unfinished(self) -> list[int]:
        """Returns the steps that have no manifest, and nobody who writes one."""
        folders = self._folders()
        return [step for step in folders if attempts.is_left_over(self.folder(step))]

    def _folders(self) -> list[int]:
        names = files.names_in(self.directory)
        return sorted(int(name) for name in names if attempts.is_step(name))

    def manifest(self, step: int) -> Manifest:
        """Returns a step's manifest.

        Args:
            step: The step.

        Raises:
            DamagedCheckpointError: If it is not what was written.
            CheckpointError: If there is none.
        """
        path = self._file(step)
        try:
            mark = files.mark_of(path)
            if step in self._read and self._read[step][0] == mark:
                return self._read[step][1]
            found = Manifest.from_bytes(path.read_bytes(), str(path))
        except FileNotFoundError:
            raise CheckpointError(self.missing(step)) from None
        except OSError as error:
            msg = f"{path} cannot be read: {error}."
            raise DamagedCheckpointError(msg) from error
        if found.step != step:
            msg = (
                f"{path} is the manifest of step {found.step}: the directory was "
                "renamed or the file copied. Give the directory its own name."
            )
            raise DamagedCheckpointError(msg)
        self._read[step] = (mark, found)
        return found

    def is_still(self, step: int, found: Manifest | None) -> bool:
        """Tells whether a step was neither deleted nor replaced meanwhile.

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
        """Returns what was measured at some steps.

        Args:
            steps: Steps; those that another process has deleted meanwhile are left
                out.
        """
        found = {}
        for step in steps:
            try:
                found[step] = self.manifest(step).metrics
            except CheckpointError:
                if self._file(step).exists():
                    raise
        return found

    def missing(self, step: int) -> str:
        """Returns the sentence that says that a step does not exist."""
        steps = self.all()
        if not steps:
            return f"{self.directory} holds no checkpoint: nothing was saved in it yet."
        some = ", ".join(map(str, steps[-10:]))
        more = "" if len(steps) <= 10 else f" (and {len(steps) - 10} earlier ones)"
        return f"{self.directory} has no step {step}; it has {some}{more}."

    def _file(self, step: int) -> Any:
        return self.folder(step) / manifest.NAME

    def _is_whole(self, step: int) -> bool:
        try:
            self.manifest(step)
        except DamagedCheckpointError:
            return False
        except StoreError:
            raise
        except CheckpointError:  # of another version, or gone meanwhile
            return self._file(step).exists()
        return True
