"""Which leaf of a state a collective moves: a weight, its gradient or its update.

Values are followed back to the program's arguments through what only moves or converts
them: copies, slices, other collectives, fusions of those, and what loops carry
unchanged. A gradient is no argument. It is known by the results that depend on it: a
leaf, and the slots of the optimizer that follow it, and no others.
"""

import re
from collections.abc import Collection, Mapping, Sequence

from meshlayout.hlo.origins import common_start
from meshlayout.hlo.program import OP_NAME, Instruction, Program


_MOVES = {"bitcast", "convert", "transpose", "reshape", "slice", "pad", "broadcast"}
_MOVES |= {"dynamic-slice", "optimization-barrier"}
_MOVES |= {
    f"{opcode}{suffix}"
    for opcode in ("copy", "all-gather", "collective-permute", "all-to-all")
    for suffix in ("", "-start", "-done")
}
_MAX_STEPS = 200

_KEY = re.compile(r"\[\\*'?(.*?)\\*'?\]|\.(\w+)")


def leaf_name(text: str) -> str:
    """Returns JAX's name of an argument as a path.

    Example:
        >>> leaf_name("params['layers'][0].kernel"), leaf_name("state[3]")
        ('params/layers/0/kernel', 'state/3')
    """
    return _KEY.sub(lambda match: f"/{match[1] or match[2]}", text)


class Leaves:
    """Finds the leaves that values of a program are; see `read_communication`."""

    def __init__(
        self, program: Program, arguments: Mapping[str, str], results: Sequence[str]
    ) -> None:
        self._program, self._arguments, self._results = program, arguments, {*results}
        # The leaves among the results that each value of the entry has a part in. What
        # has several results is known by its elements, by name and index.
        self._owners: dict[str, set[str]] = {}
        self._elements: dict[tuple[str, str], str] = {}
        entry = program.computations.get(program.entry, {})
        root = entry.get(program.roots.get(program.entry, ""))
        for path, name in zip(results, root.operands if root else (), strict=False):
            self._owners.setdefault(name, set()).add(_owner(path, self._results))
        for name, instruction in reversed(entry.items()):
            for operand in instruction.operands:
                owners = self._owners.setdefault(operand, set())
                owners |= self._owners.get(name, set())
            index = instruction.attribute(r"\bindex=(\d+)")
            if index or instruction.opcode.endswith("-done"):
                self._elements[instruction.operands[0], index] = name

    def argument(self, computation: str, name: str) -> str:
        """Returns the name of the argument that a value is, or `""`."""
        program = self._program
        path: list[int] = []  # of the element that is followed through tuples
        for _ in range(_MAX_STEPS):
            instruction = program.computations[computation].get(name)
            if instruction is None:
                break
            if instruction.opcode == "parameter":
                if computation == program.entry:
                    text = leaf_name(instruction.attribute(OP_NAME))
                    return self._arguments.get(text, text)
                calls = program.callers.get(computation, [])
                if len(calls) != 1:
                    break
                place = int(instruction.attribute(r"^(\d+)\)"))
                [(computation, instruction, _)] = calls
                if instruction.opcode in ("fusion", "call", "async-start"):
                    name = instruction.operands[place]
                    continue
                if instruction.opcode != "while":
                    break
            _, _, opcode, operands, _ = instruction
            if opcode == "get-tuple-element":
                path.append(int(instruction.attribute(r"\bindex=(\d+)")))
                name = operands[0]
            elif opcode == "while" and path and program.keeps(instruction, path[-1]):
                name = operands[0]
            elif opcode in ("fusion", "call"):
                [computation] = program.called(instruction)
                name = program.roots[computation]
            elif path and (opcode == "tuple" or _is_combined(instruction)):
                name = operands[path.pop()]
            elif opcode in _MOVES:
                name = operands[0]
            else:
                break
        return ""

    def result(self, name: str, element: int | None = None) -> str:
        """Returns the only leaf among the results that depends on a value, or `""`.

        Of an instruction of the program's entry, or of one element of its result.
        """
        value = self._elements.get((name, ""), name)
        if element is not None:
            value = self._elements.get((value, str(element)), value)
        owners = self._owners.get(value, set())
        return next(iter(owners)) if len(owners) == 1 else ""

    def parent(self, paths: Sequence[str]) -> str:
        """Returns the path of the module that holds all of some leaves, or `""`."""
        owners = [_owner(path, self._results).split("/") for path in paths]
        return "/".join(common_start([keys[:-1] for keys in owners if keys[1:]]))

    def module(self, computation: str, instruction: Instruction) -> str:
        """Returns the path of the module whose weights made a value, or `""`."""
        known = self._program.computations[computation]
        for _ in range(_MAX_STEPS):
            made = [known[name] for name in instruction.operands if name in known]
            weights = [self.argument(computation, each.name) for each in made]
            if any(weights):
                return self.parent(weights)
            if len(made) != 1:
                return ""
            [instruction] = made
        return ""


def _is_combined(instruction: Instruction) -> bool:
    """Returns whether this is several all-gathers in one, each with its result."""
    return instruction.opcode.startswith("all-gather") and len(instruction.operands) > 1


def _owner(path: str, paths: Collection[str]) -> str:
    """Returns the longest path that another one ends with, as a slot's does, or it."""
    keys = path.split("/")
    ends = ("/".join(keys[start:]) for start in range(1, len(keys)))
    return next((end for end in ends if end in paths), path)
