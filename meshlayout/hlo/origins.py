"""Where a collective comes from: leaves of a state, modules and source lines.

Values are followed back to the program's arguments through what only moves or converts
them: copies, slices, other collectives, fusions of those, and what loops carry
unchanged. A gradient is no argument. It is known by the results that depend on it: a
leaf, and the slots of the optimizer that follow it, and no others. Scopes and lines are
in the metadata: JAX writes named scopes and its own transformations into one name, and
newer XLA keeps whole stacks.
"""

import itertools
import re
import sysconfig
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from meshlayout.hlo.program import OP_NAME, Instruction, Path, Program


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

# A program in a compilation cache may be from another copy of this library.
_OURS = (str(PurePath(__file__).parents[1]), "/meshlayout/step/")
_LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"), *_OURS)
_NOTED = re.compile("op_name=|stack_frame_id=|source_file=")


def leaf_name(text: str) -> str:
    """Returns JAX's name of an argument as a path.

    Example:
        >>> leaf_name("params['layers'][0].kernel"), leaf_name("state[3]")
        ('params/layers/0/kernel', 'state/3')
    """
    return _KEY.sub(lambda match: f"/{match[1] or match[2]}", text)


class Origins:
    """Finds the leaves and modules of values; see `read_communication`."""

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

    def leaves(
        self, computation: str, instruction: Instruction, site: str, outer: Instruction
    ) -> list[str]:
        """Returns the leaves that a collective moves.

        Of its operands, or else those that depend on its result, which is that of the
        outer instruction. Every leaf depends on an activation, one on each gradient.
        """
        operands = instruction.operands
        names = [self._argument(computation, operand) for operand in operands]
        if not any(names) and site == self._program.entry:
            names = sorted(self._dependents.get(outer.name, ()))
            names = names if len(names) <= len(operands) else []
        return [*dict.fromkeys(filter(None, names))]

    def _argument(self, computation: str, name: str) -> str:
        """Returns the name of the argument that a value is, or `""`."""
        program = self._program
        path: Path = ()
        while True:
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

    def module(self, computation: str, instruction: Instruction) -> str:
        """Returns the path of the module whose weights made a value, or `""`."""
        known = self._program.computations[computation]
        while True:
            makers = [known[name] for name in instruction.operands if name in known]
            weights = [self._argument(computation, maker.name) for maker in makers]
            if any(weights) or len(makers) != 1:
                return self.parent(weights)
            [instruction] = makers

    def parent(self, paths: Sequence[str]) -> str:
        """Returns the path of the module that holds all of some leaves, or `""`."""
        owners = [self._owner(path).split("/") for path in paths]
        return "/".join(_common_start([keys[:-1] for keys in owners if keys[1:]]))

    def _owner(self, path: str) -> str:
        """Returns the parameter that a slot's path ends with, or the path."""
        keys = path.split("/")
        ends = ("/".join(keys[start:]) for start in range(1, len(keys)))
        return next((end for end in ends if end in self._results), path)

    def scopes_and_source(
        self, computation: str, instruction: Instruction
    ) -> tuple[list[str], str]:
        """Returns the named scopes and the user's source line of an instruction.

        Of what was combined from several, XLA notes only one: then it is what all of
        the operands' have in common.
        """
        known = self._program.computations[computation]
        makers = [instruction]
        if len(instruction.operands) > 1:
            makers = [_noted(known, name) for name in instruction.operands]
        sources = Counter(filter(None, (self._source(x) for x in makers if x)))
        more = f" and {len(sources) - 1} more" * (len(sources) > 1)
        source = "".join(source for source, _ in sources.most_common(1)) + more
        names = [scopes(maker.attribute(OP_NAME)) for maker in makers if maker]
        return _common_start(names), source

    def _source(self, instruction: Instruction) -> str:
        lines = [*self._program.lines(instruction)]
        users = [x for x in lines if not any(part in x[0] for part in _LIBRARIES)]
        for file, line in users or lines:
            return f"{'/'.join(PurePath(file).parts[-2:])}:{line}"
        return ""


def _noted(known: Mapping[str, Instruction], name: str) -> Instruction | None:
    """Returns what made a value, past instructions of which nothing is noted."""
    while instruction := known.get(name):
        if _NOTED.search(instruction.rest):
            return instruction
        name = next(iter(instruction.operands), "")
    return None


def scopes(op_name: str) -> list[str]:
    """Returns the named scopes in JAX's name of an operation, the outermost first.

    What JAX adds for its transformations and loops is left out. Of an operation that
    several were merged into, the scopes are those that all of them have.

    Example:
        >>> scopes("jit(step)/transpose(jvp(Net))/block_0/while/body/mlp/dot_general")
        ['Net', 'block_0', 'mlp']
        >>> scopes("jit(step)/(jvp(Net)/a/add:jvp(Net)/b/add)")
        ['Net']
    """
    paths = [
        [part for part in re.split(r"[/()]", path) if not _PLUMBING.fullmatch(part)]
        for path in re.split("[;:]", _ADDED.sub("", op_name))
    ]
    return _common_start([names[:-1] for names in paths])


def _common_start(paths: Sequence[Sequence[str]]) -> list[str]:
    same = itertools.takewhile(lambda x: len({*x}) == 1, zip(*paths, strict=False))
    return [names[0] for names in same]
