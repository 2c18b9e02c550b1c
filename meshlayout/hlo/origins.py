"""Where an instruction comes from: scopes, classes and source lines in its metadata.

JAX writes named scopes and its own transformations into one name, and newer XLA keeps
whole stacks. NNX modules open no scopes, but their `__call__`s are on the stack.
"""

import itertools
import re
import sysconfig
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple

from meshlayout.hlo.program import OP_NAME, Instruction, Program


_ADDED = re.compile(r"\bp?jit\([^()]*\)|\bwhile/(body|cond)\b|\bcond/branch_\d+_fun\b")
_PLUMBING = re.compile(
    "|jvp|transpose|vmap|while|closed_call|core_call|eval_jaxpr|shard_map|checkpoint|"
    r"remat|rematted_computation|custom_\w+|.*->.*"
)

# A program in a compilation cache may be from another copy of this library.
_OURS = (str(PurePath(__file__).parents[1]), "/meshlayout/step/")
_LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"), *_OURS)
_CALL = re.compile(r"(\w+)\.__call__")
_NOTED = re.compile("op_name=|stack_frame_id=|source_file=")


class Origin(NamedTuple):
    """Named scopes, classes whose `__call__` is on the stack, and the user's line."""

    scopes: list[str]
    classes: list[str]
    source: str


def origin_of(program: Program, computation: str, instruction: Instruction) -> Origin:
    """Returns the scopes, the classes and the source line of an instruction.

    Of what was combined from several, XLA notes only one: then it is what all of the
    operands' have in common.
    """
    origins = [_origin(program, instruction)]
    if len(instruction.operands) > 1:
        makers = (_maker(program, computation, name) for name in instruction.operands)
        origins = [_origin(program, maker) for maker in makers if maker]
    sources = Counter(origin.source for origin in origins if origin.source)
    more = f" and {len(sources) - 1} more" * (len(sources) > 1)
    return Origin(
        common_start([origin.scopes for origin in origins]),
        common_start([origin.classes for origin in origins]),
        "".join(source for source, _ in sources.most_common(1)) + more,
    )


def _maker(program: Program, computation: str, name: str) -> Instruction | None:
    """Returns what made a value, past instructions of which nothing is noted."""
    known = program.computations[computation]
    while instruction := known.get(name):
        if _NOTED.search(instruction.rest):
            return instruction
        name = instruction.operands[0] if instruction.operands else ""
    return None


def _origin(program: Program, instruction: Instruction) -> Origin:
    frames = program.frames(instruction)
    users = [x for x in frames if not any(part in x.file for part in _LIBRARIES)]
    calls = [_CALL.fullmatch(frame.function) for frame in reversed(users)]
    places = [
        f"{'/'.join(PurePath(frame.file).parts[-2:])}:{frame.line}"
        for frame in users or frames
    ]
    return Origin(
        scopes(instruction.attribute(OP_NAME)),
        [call[1] for call in calls if call],
        next(iter(places), ""),
    )


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
    return common_start([names[:-1] for names in paths])


def common_start(paths: Sequence[Sequence[str]]) -> list[str]:
    """Returns how all of some paths begin."""
    same = itertools.takewhile(lambda x: len({*x}) == 1, zip(*paths, strict=False))
    return [names[0] for names in same]
