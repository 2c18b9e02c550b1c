"""Where an instruction comes from: scopes, classes and source lines in its metadata.

JAX writes named scopes and its own transformations into one name, and newer XLA keeps
whole stacks. NNX modules open no scopes, but their `__call__`s are on the stack.
"""

import re
import sysconfig
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from meshlayout.hlo.program import OP_NAME, Instruction, Program


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
    return _common([_scopes(name) for name in _split(op_name, ";")])


def _common(paths: Sequence[Sequence[str]]) -> list[str]:
    """Returns how all of some paths begin."""
    common: list[str] = []
    for names in zip(*paths, strict=False):
        if len({*names}) > 1:
            break
        common.append(names[0])
    return common


def _scopes(op_name: str) -> list[str]:
    *outer, last = _split(_CONTROL.sub("while", op_name), "/")
    names = [name for part in outer for name in _unwrapped(part)]
    if last.startswith("(") and last.endswith(")"):
        return [*names, *scopes(";".join(_split(last[1:-1], ":")))]
    return names


def _unwrapped(part: str) -> list[str]:
    if match := _TRANSFORMED.fullmatch(part):
        if match[1] in ("jit", "pjit"):
            return []
        return [x for inner in _split(match[2], "/") for x in _unwrapped(inner)]
    return [] if _PLUMBING.fullmatch(part) else [part]


_CONTROL = re.compile(r"\bwhile/(body|cond)\b|\bcond/branch_\d+_fun\b")
_TRANSFORMED = re.compile(r"([a-z_]+)\((.*)\)")
_PLUMBING = re.compile(
    "|while|closed_call|core_call|eval_jaxpr|shard_map|pjit|checkpoint|remat|"
    r"rematted_computation|custom_\w+|.*->.*"
)


def _split(text: str, separator: str) -> list[str]:
    """Splits a text where no parenthesis is open."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == separator and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


# A program in a compilation cache may be from another copy of this library.
_OURS = (str(PurePath(__file__).parents[1]), "/meshlayout/step/")
_LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"), *_OURS)
_CALL = re.compile(r"(\w+)\.__call__")


def origin_of(
    program: Program, computation: str, instruction: Instruction
) -> tuple[str, str]:
    """Returns the submodule and the source line that an instruction serves.

    Of what was combined from several, XLA notes only one: then it is what all of the
    operands' have in common.
    """
    producers = [instruction]
    if len(instruction.operands) > 1:
        known = program.computations[computation]
        producers = [_producer(known, name) for name in instruction.operands]
    places = [
        _place(program, producer) for producer in producers if producer is not None
    ]
    sources = Counter(source for _, source in places if source)
    module = "/".join(_common([names for names, _ in places]))
    more = f" and {len(sources) - 1} more" * (len(sources) > 1)
    return module, "".join(source for source, _ in sources.most_common(1)) + more


def _producer(known: Mapping[str, Instruction], name: str) -> Instruction | None:
    """Returns what made a value, past instructions of which nothing is noted."""
    for _ in range(8):
        instruction = known.get(name)
        if instruction is None or _NOTED.search(instruction.rest):
            return instruction
        name = instruction.operands[0] if instruction.operands else ""
    return None


def _place(program: Program, instruction: Instruction) -> tuple[list[str], str]:
    frames = program.frames(instruction)
    users = [x for x in frames if not any(part in x.file for part in _LIBRARIES)]
    calls = [_CALL.fullmatch(frame.function) for frame in reversed(users)]
    classes = [call[1] for call in calls if call]
    names = scopes(instruction.attribute(OP_NAME)) or classes
    for frame in users or frames:
        return names, f"{'/'.join(PurePath(frame.file).parts[-2:])}:{frame.line}"
    return names, ""


_NOTED = re.compile("op_name=|stack_frame_id=|source_file=")
