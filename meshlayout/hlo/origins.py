"""Where an instruction comes from: scopes and source lines in its metadata.

JAX writes named scopes and its own transformations into one name, and newer XLA keeps
whole stacks.
"""

import itertools
import re
import sysconfig
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath

from meshlayout.hlo.program import OP_NAME, Instruction, Program


_ADDED = re.compile(r"\bp?jit\([^()]*\)|\bwhile/(body|cond)\b|\bcond/branch_\d+_fun\b")
_PLUMBING = re.compile(
    "|jvp|transpose|vmap|while|closed_call|core_call|eval_jaxpr|shard_map|checkpoint|"
    r"remat|rematted_computation|custom_\w+|.*->.*"
)

# A program in a compilation cache may be from another copy of this library.
_OURS = (str(PurePath(__file__).parents[1]), "/meshlayout/step/")
_LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"), *_OURS)
_NOTED = re.compile("op_name=|stack_frame_id=|source_file=")


def origin_of(
    program: Program, computation: str, instruction: Instruction
) -> tuple[list[str], str]:
    """Returns the named scopes and the user's source line of an instruction.

    Of what was combined from several, XLA notes only one: then it is what all of the
    operands' have in common.
    """
    names = instruction.operands if len(instruction.operands) > 1 else ()
    makers = [_maker(program, computation, name) for name in names] or [instruction]
    noted = [maker for maker in makers if maker]
    sources = Counter(filter(None, (_source(program, maker) for maker in noted)))
    more = f" and {len(sources) - 1} more" * (len(sources) > 1)
    source = "".join(source for source, _ in sources.most_common(1)) + more
    return common_start([scopes(maker.attribute(OP_NAME)) for maker in noted]), source


def _maker(program: Program, computation: str, name: str) -> Instruction | None:
    """Returns what made a value, past instructions of which nothing is noted."""
    known = program.computations[computation]
    while instruction := known.get(name):
        if _NOTED.search(instruction.rest):
            return instruction
        name = next(iter(instruction.operands), "")
    return None


def _source(program: Program, instruction: Instruction) -> str:
    lines = [*program.lines(instruction)]
    users = [x for x in lines if not any(part in x[0] for part in _LIBRARIES)]
    for file, line in users or lines:
        return f"{'/'.join(PurePath(file).parts[-2:])}:{line}"
    return ""


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
