"""The programs of a strategy, found by function, arguments, and the objects it reaches.

A function is found again if it is defined anew with the same code. What was not called
for the longest time is dropped, and what is for objects that are gone.
"""

import functools
import warnings
from typing import TYPE_CHECKING, Any

from meshlayout.distribute.arguments import Arguments
from meshlayout.distribute.capture import Roots
from meshlayout.distribute.replica_program import ReplicaProgram
from meshlayout.errors import RecompileWarning, stack_level


if TYPE_CHECKING:
    from meshlayout.distribute.strategy import Strategy

_MOST_PROGRAMS = 64


class ProgramCache:
    """The programs of a strategy."""

    def __init__(self, strategy: "Strategy") -> None:
        self._strategy = strategy
        # Of programs, the last called first: function and signature; roots; the program
        # itself, until an object of it is gone; how many roots that key had by then.
        self._programs: list[tuple[Any, Roots, list[ReplicaProgram], int]] = []

    def find(self, fn: Any, arguments: Arguments) -> ReplicaProgram:
        """Returns the program for a call, compiling it if there is none yet."""
        code = fn
        while isinstance(code, functools.partial):
            code = code.func
        key = getattr(code, "__code__", type(code)), arguments.signature
        differences, numbers = [], [0]
        for index, (other, roots, held, number) in enumerate(self._programs):
            if other == key:
                difference = roots.difference(fn, arguments.objects)
                program = next(iter(held), None)
                if not difference and program and program.modes.are_current():
                    self._programs.insert(0, self._programs.pop(index))
                    return program
                differences.append(difference)
                numbers.append(number)
        held: list[ReplicaProgram] = []
        program = ReplicaProgram(self._strategy, fn, arguments, held.clear)
        held.append(program)
        number = max(numbers) + all(differences)
        self._programs.insert(0, (key, program.roots, held, number))
        del self._programs[_MOST_PROGRAMS:]
        if number == 3 and all(differences):
            warnings.warn(
                f"{arguments.name} was compiled a third time for arguments of the same "
                f"shapes and types: {differences[0][0]} stands for another object than "
                "before. Pass arrays and numbers that change as arguments, or keep "
                "them in an nnx.Variable; each model has its own program.",
                RecompileWarning,
                stacklevel=stack_level(),
            )
        return program
