"""Which leaf of a state a collective moves: a weight, its gradient or its update.

Values are followed back to the program's arguments through what only moves or converts
them: copies, slices, other collectives, fusions of those, and what loops carry
unchanged. A gradient is no argument. It is known by the results that depend on it: a
leaf, and the slots of the optimizer that follow it, and no others.
"""

import re
from collections.abc import Mapping, Sequence

from meshlayout.hlo.origins import common_start
from meshlayout.hlo.program import OP_NAME, Instruction, Path, Program


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
        # The leaves among the results that depend on each value of the entry.
        self._dependents: dict[str, set[str]] = {}
        entry = program.computations.get(program.entry, {})
        root = entry.get(program.roots.get(program.entry, ""))
        for path, name in zip(results, root.operands if root else (), strict=False):
            self._dependents.setdefault(name, set()).add(self._owner(path))
        for name, instruction in reversed(entry.items()):
            leaves = self._dependents.get(name, set())
            for operand in instruction.operands:
                self._dependents.setdefault(operand, set()).update(leaves)

    def moved(
        self, computation: str, instruction: Instruction, site: str, outer: Instruction
    ) -> list[str]:
        """Returns the leaves that a collective moves.

        Of its operands, or else those that depend on its result, which is that of the
        outer instruction. Every leaf depends on an activation, one on each gradient.
        """
        operands = instruction.operands
        names = [self.argument(computation, operand) for operand in operands]
        if not any(names) and site == self._program.entry:
            names = sorted(self._dependents.get(outer.name, ()))
            names = names if len(names) <= len(operands) else []
        return [*dict.fromkeys(filter(None, names))]

    def argument(self, computation: str, name: str) -> str:
        """Returns the name of the argument that a value is, or `""`."""
        program = self._program
        path: Path = ()
        for _ in range(_MAX_STEPS):
            maker, path = program.maker(computation, name, path, _MOVES)
            if maker.opcode == "parameter":
                if computation == program.entry:
                    text = leaf_name(maker.attribute(OP_NAME))
                    return self._arguments.get(text, text)
                calls = program.callers.get(computation, [])
                if len(calls) != 1:
                    return ""
                place = int(maker.attribute(r"^(\d+)\)"))
                [(computation, maker)] = calls
                if maker.opcode in ("fusion", "call", "async-start"):
                    name = maker.operands[place]
                    continue
            if maker.opcode == "while" and path and program.carries(maker, path):
                name = maker.operands[0]
            elif maker.opcode in ("fusion", "call"):  # into it, from its result
                [computation] = program.called(maker)
                name = program.roots[computation]
            else:
                return ""
        return ""

    def parent(self, paths: Sequence[str]) -> str:
        """Returns the path of the module that holds all of some leaves, or `""`."""
        owners = [self._owner(path).split("/") for path in paths]
        return "/".join(common_start([keys[:-1] for keys in owners if keys[1:]]))

    def module(self, computation: str, instruction: Instruction) -> str:
        """Returns the path of the module whose weights made a value, or `""`."""
        known = self._program.computations[computation]
        for _ in range(_MAX_STEPS):
            makers = [known[name] for name in instruction.operands if name in known]
            weights = [self.argument(computation, each.name) for each in makers]
            if any(weights):
                return self.parent(weights)
            if len(makers) != 1:
                return ""
            [instruction] = makers
        return ""

    def _owner(self, path: str) -> str:
        """Returns the parameter that a slot's path ends with, or the path."""
        keys = path.split("/")
        ends = ("/".join(keys[start:]) for start in range(1, len(keys)))
        return next((end for end in ends if end in self._results), path)
