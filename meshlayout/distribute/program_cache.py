"""The programs of a strategy, found by function, arguments, and the objects it reaches.

A function is found again if it is defined anew with the same code. What was not called
for the longest time is dropped, and what is for objects that are gone.
"""

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any

from meshlayout.distribute.arguments import Arguments
from meshlayout.distribute.capture import Roots, function_key
from meshlayout.distribute.replica_program import ReplicaProgram
from meshlayout.errors import RecompileWarning, stack_level


if TYPE_CHECKING:
    from meshlayout.distribute.strategy import Strategy

_MOST_PROGRAMS = 64


@dataclasses.dataclass(eq=False)
class _Version:
    """A program, of a function and signature, for some roots and modes."""

    key: Any
    program: ReplicaProgram | None = None
    roots: Roots | None = None
    number: int = 1  # of roots of this key, in order

    def gone(self) -> None:
        self.program = None


class ProgramCache:
    """The programs of a strategy.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: "Strategy") -> None:
        self._strategy = strategy
        self._versions: list[_Version] = []  # what was called last is first

    def find(self, fn: Any, arguments: Arguments) -> ReplicaProgram:
        """Returns the program for a call, compiling it if there is none yet."""
        key = function_key(fn), arguments.signature
        others: list[tuple[_Version, Any]] = []
        for index, version in enumerate(self._versions):
            if version.key == key and version.roots is not None:
                difference = version.roots.difference(fn, arguments.objects)
                program = version.program
                if not difference and program and program.modes.are_current():
                    if index:
                        self._versions.insert(0, self._versions.pop(index))
                    return program
                others.append((version, difference))
        name = getattr(fn, "__name__", "fn")
        version = _Version(key)
        program = ReplicaProgram(self._strategy, fn, arguments, version.gone)
        version.program, version.roots = program, program.roots
        self._versions.insert(0, version)
        del self._versions[_MOST_PROGRAMS:]
        if others and all(difference for _, difference in others):
            version.number += max(other.number for other, _ in others)
            if version.number == 3:
                warnings.warn(
                    f"{name} was compiled a third time for arguments of the same "
                    f"shapes and types: {others[0][1][0]} stands for another object "
                    "than before. Pass arrays and numbers that change as arguments, or "
                    "keep them in an nnx.Variable; each model has its own program.",
                    RecompileWarning,
                    stacklevel=stack_level(),
                )
        return program
