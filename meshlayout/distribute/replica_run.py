"""`run`: looks up the program for a call, by the function and its arguments.

A function is found again if it is defined anew with the same code, and its programs if
what it uses from outside still stands for the same objects. What is no longer called is
dropped, since a program holds its function and the models that this uses.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from meshlayout._annotations import PyTree
from meshlayout.distribute.arguments import Arguments
from meshlayout.distribute.bindings import Bindings, find, identity
from meshlayout.distribute.replica_program import ReplicaProgram
from meshlayout.distribute.variables import Variables, exclusive
from meshlayout.hlo import Communication


if TYPE_CHECKING:
    from meshlayout.distribute.strategy import Strategy


# Programs of functions that are not called again are dropped, oldest first.
_MOST_PROGRAMS = 64
# Of one function: so many settings of modes and globals are remembered.
_MOST_VERSIONS = 8


class ReplicaRuns:
    """The programs of a strategy, by function and signature.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: "Strategy") -> None:
        self._strategy = strategy
        self._bindings: OrderedDict[Any, list[Bindings]] = OrderedDict()
        self._programs: OrderedDict[Any, list[ReplicaProgram]] = OrderedDict()

    def call(
        self, fn: Callable[..., PyTree], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> PyTree:
        """Calls a function on each replica; see `Strategy.run`."""
        arguments = Arguments.of(fn, args, kwargs, self._strategy.mesh)
        # Threads that train one model come one after another, or updates would be lost.
        with exclusive():
            return self._program(fn, arguments)(arguments)

    def communication(
        self, fn: Callable[..., PyTree], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Communication:
        """Returns what the program sends; see `Strategy.communication`."""
        program, arguments = self.program(fn, args, kwargs)
        return program.communication(arguments)

    def program(
        self, fn: Callable[..., PyTree], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "tuple[ReplicaProgram, Arguments]":
        """Returns the program that a call runs, and what it runs on."""
        arguments = Arguments.of(fn, args, kwargs, self._strategy.mesh)
        return self._program(fn, arguments), arguments

    def _program(
        self, fn: Callable[..., PyTree], arguments: Arguments
    ) -> "ReplicaProgram":
        """Returns the program for a call, compiling it if there is none yet."""
        nodes = tuple(node for _, node in arguments.objects)
        known = _entries(self._bindings, (identity(fn), *map(id, nodes)))
        found = _current(known)
        if found is None:
            found = find(fn, nodes)
            _add(known, found)
        objects = (*found.objects, *arguments.objects)
        programs = _entries(self._programs, (id(found), arguments.signature))
        program = _current(programs)
        if program is None:
            program = ReplicaProgram(
                self._strategy, fn, found, Variables(objects), arguments
            )
            _add(programs, program)
        return program


T = TypeVar("T", "Bindings", "ReplicaProgram")


def _entries(cache: OrderedDict[Any, list[T]], key: Any) -> list[T]:
    """Returns what is known under a key; the ids in keys belong to what is in there."""
    entries = cache.setdefault(key, [])
    if len(cache) > _MOST_PROGRAMS:
        cache.popitem(last=False)
    return entries


def _current(entries: list[T]) -> T | None:
    """Returns the entry that agrees with what Python's names stand for now, or None."""
    for index, entry in enumerate(entries):
        if entry.is_current():
            if index:
                entries.insert(0, entries.pop(index))
            return entry
    return None


def _add(entries: list[T], entry: T) -> None:
    # A number that changes at every call must not keep all programs alive.
    entries.insert(0, entry)
    del entries[_MOST_VERSIONS:]
