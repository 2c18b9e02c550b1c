"""`SavedStep`: a step that is intact, agreed by all processes before any reads arrays."""

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshlayout.checkpoint import directory as steps
from meshlayout.checkpoint.load import load
from meshlayout.checkpoint.match import Request
from meshlayout.checkpoint.orbax import OrbaxTree
from meshlayout.cluster.channel import Channel
from meshlayout.errors import CheckpointError, DamagedCheckpointError


logger = logging.getLogger("meshlayout.checkpoint")


class GoneError(CheckpointError):
    """A step was deleted or replaced by another run while it was read."""


@dataclass(frozen=True)
class SavedStep:
    """A step that is intact.

    Attributes:
        number: The step.
        path: Its directory.
        facts: What it is, as its save wrote it.
        confirm: Called before arrays are read, as no process may begin alone.
        seal: The content of its seal, which another save of the step would change.
    """

    number: int
    path: Path
    facts: Mapping[str, Any]
    confirm: Callable[[], None]
    seal: bytes

    @classmethod
    def open(
        cls, directory: Path, number: int, confirm: Callable[[], None], *, verify: bool
    ) -> "SavedStep":
        """Opens a step, and compares its files with what was saved."""
        path = steps.step_paths(directory).get(number)
        if path is None:
            raise GoneError(f"{directory} has no step {number} any more.")
        try:
            seal = steps.check(path, verify=verify)
            facts = steps.read_facts(path)
        except CheckpointError as error:
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

    def source(self, tree: str) -> OrbaxTree:
        """Returns one of its trees as a source."""
        name = f"step {self.number}" + ("" if tree == "state" else f", {tree},")
        return OrbaxTree(self.path, tree, self.facts["items"][tree], name, self.confirm)

    def load(self, request: Request, tree: str = "state") -> Any:
        """Returns one of its trees, restored into `request.like`."""
        restored = load(self.source(tree), request)
        if restored.diff:
            logger.info("step %d differs: %s", self.number, restored.diff)
        return restored.state

    def check_unchanged(self) -> None:
        """Raises if another run has deleted or replaced it meanwhile."""
        with contextlib.suppress(OSError):
            if steps.read_seal(self.path) == self.seal:
                return
        msg = f"{self.path} was deleted or replaced by another run while it was read."
        raise GoneError(msg)


class Agreement:
    """A block that all processes leave in the same way: with the first error of any."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._told = channel, None

    def confirm(self) -> None:
        """Has all processes come here before any goes on, or raises on all of them."""
        self._exchange(None)

    def __enter__(self) -> None:
        self._told = None

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        # What all have raised already is not told again; nor is Ctrl-C.
        if error is None or (isinstance(error, Exception) and error is not self._told):
            self._exchange(error)

    def _exchange(self, error: Exception | None) -> None:
        answer = None
        if error is not None:
            is_ours = isinstance(error, CheckpointError)
            text = str(error) if is_ours else f"{type(error).__name__}: {error}"
            answer = type(error).__name__, text
        answers = self._channel.exchange(answer).values()
        first = next((other for other in answers if other is not None), None)
        if first is None or first == answer:
            return  # and the block's own error goes on
        kinds = {kind.__name__: kind for kind in (DamagedCheckpointError, GoneError)}
        self._told = kinds.get(first[0], CheckpointError)(first[1])
        raise self._told from error
