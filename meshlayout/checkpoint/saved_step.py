"""`SavedStep`: a step that is intact on all processes, from which states are read."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax

from meshlayout.checkpoint import directory as steps
from meshlayout.checkpoint.load import Source, load
from meshlayout.checkpoint.match import Request
from meshlayout.checkpoint.orbax import saved_tree, undisturbed
from meshlayout.checkpoint.positions import check_continues
from meshlayout.errors import CheckpointError, DamagedCheckpointError


T = TypeVar("T")


class GoneError(DamagedCheckpointError):
    """A step was deleted or replaced by another run while it was read."""


@dataclass(frozen=True)
class SavedStep:
    """A step: its number and directory, which copy of it is there, and what it is.

    `confirm` is called before arrays are read, which no process begins alone.
    """

    number: int
    path: Path
    mark: Any
    confirm: Callable[[], Any]
    facts: Mapping[str, Any]

    @classmethod
    def open(
        cls, directory: Path, number: int, confirm: Callable[[], Any], *, verify: bool
    ) -> "SavedStep":
        """Opens a step, and compares its files with what was saved."""
        path, mark = steps.step_paths(directory).get(number), None
        if path is not None:
            with contextlib.suppress(OSError):
                mark = steps.mark(path)
        if path is None or mark is None:
            process = jax.process_index()
            raise GoneError(f"{directory} has no step {number} on process {process}.")
        with cls(number, path, mark, confirm, {}).unchanged():
            steps.check(path, verify=verify)
            facts = steps.read_facts(path)
        if facts["step"] != number:
            msg = f"{path} is step {facts['step']}: the directory was renamed."
            raise DamagedCheckpointError(msg)
        return cls(number, path, mark, confirm, facts)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Raises GoneError if another run deletes or replaces the step meanwhile."""
        try:
            yield
        finally:  # and then this is why anything else went wrong
            now = None
            with contextlib.suppress(OSError):
                now = steps.mark(self.path)
            if now != self.mark:
                msg = f"{self.path} was deleted or replaced while it was read."
                raise GoneError(msg)

    def read(self, read: Callable[["SavedStep"], T]) -> T:
        """Returns what a function reads."""
        with self.unchanged():
            return read(self)

    def positions(self, data: object) -> list[Any]:
        """Returns the positions of the input iterators, of which `data` is one."""
        check_continues(data)
        if self.facts["data"] is None:
            msg = (
                f"step {self.number} holds no state of an input iterator: it was "
                "saved without data=. Restore without data=, and move the iterator "
                "yourself."
            )
            raise CheckpointError(msg)
        return self.facts["data"]

    def source(self, tree: str = "state") -> Source:
        """Returns one of its trees as a source to load from."""
        leaves = self.facts["items"][tree]
        name = f"step {self.number}" + ("" if tree == "state" else f", {tree},")
        return saved_tree(self.path, tree, leaves, name, self.confirm)

    def load(self, request: Request, tree: str = "state") -> Any:
        """Returns one of its trees, restored into `request.like`."""
        with undisturbed():
            return load(self.source(tree), request)
