"""Where a collective comes from: leaves of a state, modules and source lines.

Values are followed back to the program's arguments through operations that only move or
convert them. A gradient is no argument; the results that depend on it identify it: one
leaf and its slots. JAX writes named scopes and its own transformations into one name.
"""

import itertools
import re
import sysconfig
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from meshlayout.hlo.program import OP_NAME, Instruction, Path, Program, maker


_MOVES = {"bitcast", "convert", "transpose", "reshape", "slice", "pad", "broadcast"}
_MOVES |= {"dynamic-slice", "optimization-barrier"}
_MOVES |= {
    f"{opcode}{suffix}"
    for opcode in ("copy", "all-gather", "collective-permute", "all-to-all")
    for suffix in ("", "-start", "-done")
}

_KEY = re.compile(r"\[\\*'?(.*?)\\*'?\]|\.(\w+)")

_ADDED = re.compile(r"\bp?jit\([^()]*\)|\bwhile/(body|cond)\b|\bcond/branch_\d+_fun\b")
_PLUMBING = re.compile(
    "|jvp|transpose|vmap|while|closed_call|core_call|eval_jaxpr|shard_map|checkpoint|"
    r"remat|rematted_computation|custom_\w+|.*->.*"
)

# A program in a compilation cache may come from another copy of this library.
_OURS = (str(PurePath(__file__).parents[1]), "/meshlayout/step/")
_LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"), *_OURS)
_NOTED = re.compile("op_name=|stack_frame_id=|source_file=")


def leaf_name(text: str) -> str:
    """Returns JAX's name of an argument, as `params['w'][0]`, as a path."""
    return _KEY.sub(lambda match: f"/{match[1] or match[2]}", text)


class Origins:
    """Finds the leaves and modules of values; see `read_communication`."""

    def __init__(
        self, program: Program, arguments: Mapping[str, str], results: Sequence[str]
    ) -> None:
        self._program, self._arguments, self._results = program, arguments, {*results}
        # The leaves among the results that depend on each value of the entry.
        self._dependents: dict[Instruction, set[str]] = {}
        root = program.roots.get(program.entry)
        for path, value in zip(results, root.operands if root else (), strict=False):
            self._dependents.setdefault(value, set()).add(self._owner(path))
        for instruction in reversed(program.computations.get(program.entry, [])):
            leaves = self._dependents.get(instruction, set())
            for operand in instruction.operands:
                self._dependents.setdefault(operand, set()).update(leaves)

    def leaves(self, instruction: Instruction, outer: Instruction) -> list[str]:
        """Returns the leaves that a collective moves, or that depend on its result."""
        names = [*map(self._argument, instruction.operands)]
        if not any(names):
            # Every leaf depends on an activation, one on each gradient.
            names = sorted(self._dependents.get(outer, ()))
            names = names if len(names) <= len(instruction.operands) else []
        # A number alone is the place of a leaf in a tuple.
        return [*dict.fromkeys(name for name in names if name.strip("0123456789/"))]

    def _argument(self, value: Instruction) -> str:
        """Returns the name of the argument that a value is, or `""`."""
        program = self._program
        path: Path = ()
        while True:
            value, path = maker(value, path, _MOVES)
            if value.opcode == "parameter":
                if value.computation == program.entry:
                    text = leaf_name(value.attribute(OP_NAME))
                    return self._arguments.get(text, text)
                place = int(value.attribute(r"^(\d+)\)"))
                calls = program.callers.get(value.computation, [])
                if len(calls) != 1:
                    return ""
                [value] = calls
                if value.opcode in ("fusion", "call", "async-start"):
                    value = value.operands[place]
                    continue
            if value.opcode == "while" and path and program.carries(value, path):
                value = value.operands[0]
            elif value.opcode in ("fusion", "call"):  # into it, from its result
                value = program.roots[program.called(value)[0]]
            else:
                return ""

    def module(self, value: Instruction) -> str:
        """Returns the path of the module whose weights made a value, or `""`."""
        while True:
            weights = [*map(self._argument, value.operands)]
            if any(weights) or len(value.operands) != 1:
                return self.parent(weights)
            [value] = value.operands

    def parent(self, paths: Sequence[str]) -> str:
        """Returns the path of the module that holds all of some leaves, or `""`."""
        owners = [self._owner(path).split("/") for path in paths]
        return "/".join(_common_start([keys[:-1] for keys in owners if keys[1:]]))

    def _owner(self, path: str) -> str:
        """Returns the parameter that a slot's path ends with, or the path."""
        keys = path.split("/")
        ends = ("/".join(keys[start:]) for start in range(1, len(keys)))
        return next((end for end in ends if end in self._results), path)

    def scopes_and_source(self, instruction: Instruction) -> tuple[list[str], str]:
        """Returns the named scopes and the user's source line of an instruction."""
        # XLA notes only one of several combined operations.
        makers = [instruction]
        if len(instruction.operands) > 1:
            makers = [x for x in map(_noted, instruction.operands) if x]
        sources = Counter(filter(None, map(self._source, makers)))
        more = f" and {len(sources) - 1} more" * (len(sources) > 1)
        source = "".join(source for source, _ in sources.most_common(1)) + more
        return _common_start([_scopes(x.attribute(OP_NAME)) for x in makers]), source

    def _source(self, instruction: Instruction) -> str:
        lines = [*self._program.lines(instruction)]
        users = [x for x in lines if not any(part in x[0] for part in _LIBRARIES)]
        for file, line in users or lines:
            return f"{'/'.join(PurePath(file).parts[-2:])}:{line}"
        return ""


def _noted(value: Instruction) -> Instruction | None:
    """Returns what made a value, skipping instructions without metadata."""
    while not _NOTED.search(value.rest):
        if not value.operands:
            return None
        value = value.operands[0]
    return value


def _scopes(op_name: str) -> list[str]:
    """Returns the scopes in JAX's name of an operation, or those common to several."""
    paths = [
        [part for part in re.split(r"[/()]", path) if not _PLUMBING.fullmatch(part)]
        for path in re.split("[;:]", _ADDED.sub("", op_name))
    ]
    return _common_start([names[:-1] for names in paths])


def _common_start(paths: Sequence[Sequence[str]]) -> list[str]:
    same = itertools.takewhile(lambda x: len({*x}) == 1, zip(*paths, strict=False))
    return [names[0] for names in same]
