"""The programs of a strategy, found by function, arguments, and the objects it reaches.

A function is found again if it is defined anew with the same code. What was not called
for the longest time is dropped, and what is for objects that are gone.
"""

import warnings
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from meshlayout.distribute.arguments import Arguments
from meshlayout.distribute.capture import function_key
from meshlayout.distribute.forgotten import check_forgotten
from meshlayout.distribute.replica_program import ReplicaProgram
from meshlayout.errors import RecompileWarning, stack_level


if TYPE_CHECKING:
    from meshlayout.distribute.strategy import Strategy

_MOST_FUNCTIONS = 64
# Of one function and signature: so many modes and globals are remembered.
_MOST_VERSIONS = 8


class _Versions:
    """The programs of one function and signature, for other objects and modes each."""

    def __init__(self) -> None:
        self.programs: list[ReplicaProgram] = []
        # The roots of the one compiled last, and its function.
        self.last: Any = None
        self.num_compiled = 0

    def drop(self, program: list[ReplicaProgram]) -> None:
        if program and program[0] in self.programs:
            self.programs.remove(program[0])


class ProgramCache:
    """The programs of a strategy.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: "Strategy") -> None:
        self._strategy = strategy
        self._versions: OrderedDict[Any, _Versions] = OrderedDict()

    def find(self, fn: Any, arguments: Arguments) -> ReplicaProgram:
        """Returns the program for a call, compiling it if there is none yet."""
        key = function_key(fn), arguments.signature
        versions = self._versions.get(key)
        if versions is not None:
            self._versions.move_to_end(key)
            for index, program in enumerate(versions.programs):
                other = program.roots.difference(fn, arguments.objects)
                if other is None and program.modes.are_current():
                    if index:
                        versions.programs.insert(0, versions.programs.pop(index))
                    return program
        check_forgotten(getattr(fn, "__name__", "fn"), key[0], arguments)
        versions = versions or _Versions()
        held: list[ReplicaProgram] = []
        program = ReplicaProgram(
            self._strategy, fn, arguments, lambda: versions.drop(held)
        )
        held.append(program)
        self._versions[key] = versions
        while len(self._versions) > _MOST_FUNCTIONS:
            self._versions.popitem(last=False)
        versions.programs.insert(0, program)
        del versions.programs[_MOST_VERSIONS:]
        _warn(fn, arguments, versions, program)
        return program


def _warn(
    fn: Any, arguments: Arguments, versions: _Versions, program: ReplicaProgram
) -> None:
    """Warns once of a function that is compiled for other objects at each call."""
    function = getattr(fn, "__func__", fn)
    last, versions.last = versions.last, (program.roots, weakref.ref(function))
    name, value = "", None
    if last is not None:
        name, value = last[0].difference(fn, arguments.objects) or ("", None)
        # A function that was defined anew has objects of its own, and what is another
        # object among the arguments is so for all to see.
        is_new = last[1]() is not function and not isinstance(value, _DATA)
        if not name or is_new or any(value is x for _, x in arguments.objects):
            return
    versions.num_compiled += 1
    if versions.num_compiled == 3:
        warnings.warn(
            f"{getattr(fn, '__name__', 'fn')} was compiled three times for arguments "
            f"of the same shapes and types: {name} stands for another object than "
            "before. Pass what changes as an argument, or keep it in an nnx.Variable.",
            RecompileWarning,
            stacklevel=stack_level(),
        )


_DATA = (jax.Array, np.ndarray)
