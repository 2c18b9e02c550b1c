"""`SavedStep`: a step that is intact on all processes, from which states are read."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from meshlayout.checkpoint import directory as steps
from meshlayout.checkpoint.load import load
from meshlayout.checkpoint.match import Request
from meshlayout.checkpoint.orbax import OrbaxTree, undisturbed
from meshlayout.errors import CheckpointError, DamagedCheckpointError


class GoneError(DamagedCheckpointError):
    """A step was deleted or replaced by another run while it was read."""


@dataclass(frozen=True)
class SavedStep:
    """A step, by its number and directory, and what it is.

    `confirm` is called before arrays are read, which no process begins alone; another
    save of the step would change the seal.
    """

    number: int
    path: Path
    facts: Mapping[str, Any]
    confirm: Callable[[], Any]
    seal: bytes

    @classmethod
    def open(
        cls, directory: Path, number: int, confirm: Callable[[], Any], *, verify: bool
    ) -> "SavedStep":
        """Opens a step, and compares its files with what was saved."""
        path = steps.step_paths(directory).get(number)
        if path is None:
            here = f"on process {jax.process_index()}"
            raise GoneError(f"{directory} has no step {number} {here}.")
        try:
            seal = steps.check(path, verify=verify)
            facts = steps.read_facts(path)
        except DamagedCheckpointError as error:
            if path.exists():
                raise
            raise GoneError(str(error)) from error
        if facts["step"] != number:
            msg = f"{path} is step {facts['step']}: the directory was renamed."
            raise DamagedCheckpointError(msg)
        return cls(number, path, facts, confirm, seal)

    def positions(self) -> list[Any]:
        """Returns the positions of the input iterators."""
        if self.facts["data"] is None:
            msg = (
                f"step {self.number} holds no state of an input iterator: it was "
                "saved without data=. Restore without data=, and move the iterator "
                "yourself."
            )
            raise CheckpointError(msg)
        return self.facts["data"]

    def source(self, tree: str = "state") -> OrbaxTree:
        """Returns one of its trees as a source to load from."""
        leaves = self.facts["items"][tree]
        name = f"step {self.number}" + ("" if tree == "state" else f", {tree},")
        return OrbaxTree(self.path, tree, leaves, name, self.confirm)

    def load(self, request: Request, tree: str = "state") -> Any:
        """Returns one of its trees, restored into `request.like`."""
        with undisturbed():
            return load(self.source(tree), request)

    def check_unchanged(self) -> None:
        """Raises GoneError if another run has deleted or replaced it meanwhile."""
        with contextlib.suppress(OSError):
            if steps.read_seal(self.path) == self.seal:
                return
        msg = f"{self.path} was deleted or replaced by another run while it was read."
        raise GoneError(msg)
