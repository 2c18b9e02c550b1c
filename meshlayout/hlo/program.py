"""The text of a compiled program as computations, loops and source lines.

XLA has no stable API for optimized programs, but prints them for every platform in one
grammar, so the text is what is read here. A loop's body is printed once. XLA notes how
often it runs on CPUs and GPUs. TPU programs only have the loop's condition, which
compares a counter with a constant; where the counter starts and what is added to it are
constants, too. Any other loop is of unknown length.
"""

import math
import re
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import NamedTuple, TypeAlias


class Instruction(NamedTuple):
    """One instruction; its text after the opening parenthesis is the rest."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    rest: str

    def attribute(self, pattern: str) -> str:
        """Returns the first group of a regular expression in the rest, or `""`."""
        match = re.search(pattern, self.rest)
        return match[1] if match else ""


class Runs(NamedTuple):
    """How often a computation runs in one run of the program, as in `Collective`."""

    times: int
    is_known: bool
    in_loop: bool


# The element of nested tuples that a value is, outermost first.
Path: TypeAlias = tuple[str, ...]

OP_NAME = r'op_name="((?:[^"\\]|\\.)*)"'
INDEX = r"\bindex=(\d+)"

_HEAD = re.compile(r"(?:ENTRY )?%?([^\s(=]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?(\S+) = (.*?) ([a-z][\w-]*)\((.*)$")
_ATTRIBUTES = re.compile(r"\), [\w-]+=")
_NAME = re.compile(r"%([^\s,(){}]+)")
_CALLED = re.compile(r"(\w+)=(\{%[^}]*\}|%[^\s,)}]+)")
# Names of files and functions, locations and stack frames are tables after a heading.
_HEADING = re.compile(r"[A-Z]\w+$")
_ROW = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})$')


class Program:
    """A compiled program, read from its text.

    Attributes:
        computations: Instructions by name, by the name of their computation.
        roots: The name of each computation's result.
        callers: The instructions that call each computation, with their computations.
        num_devices: How many devices it runs on.
        entry: The name of the computation that is the whole program.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.roots: dict[str, str] = {}
        self.callers: dict[str, list[tuple[str, Instruction]]] = {}
        self.entry = ""
        self._tables: dict[tuple[str, int], str] = {}
        # The header is one line, which holds the types of all arguments.
        header, _, text = text.partition("\n")
        counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
        self.num_devices = math.prod(map(int, counts))
        self._parse(text)
        for name, instruction in self:
            for called in self.called(instruction):
                self.callers.setdefault(called, []).append((name, instruction))
        # A program is read once and thrown away, and the cache with it.
        self.runs = cache(self._runs)

    def _parse(self, text: str) -> None:
        computation = heading = ""
        for line in text.splitlines():
            if match := _INSTRUCTION.match(line):
                root, name, kind, opcode, rest = match.groups()
                operands = tuple(_NAME.findall(_ATTRIBUTES.split(rest, 1)[0]))
                instruction = Instruction(name, kind, opcode, operands, rest)
                self.computations[computation][name] = instruction
                if root:
                    self.roots[computation] = name
            elif match := _HEAD.match(line):
                computation = match[1]
                self.computations[computation] = {}
                self.entry = computation if line.startswith("ENTRY") else self.entry
            elif match := _ROW.match(line):
                self._tables[heading, int(match[1])] = match[2] or match[3] or ""
            elif _HEADING.match(line):
                heading = line

    def __iter__(self) -> Iterator[tuple[str, Instruction]]:
        """Yields every instruction, with the name of its computation."""
        for name, instructions in self.computations.items():
            for instruction in instructions.values():
                yield name, instruction

    def called(self, instruction: Instruction) -> list[str]:
        """Returns the names of the computations that an instruction calls.

        What adds up two numbers in a reduction is not among them.
        """
        return [
            name
            for role, names in _CALLED.findall(instruction.rest)
            if role != "to_apply" or instruction.opcode == "call"
            for name in _NAME.findall(names)
            if name in self.computations
        ]

    def maker(
        self,
        computation: str,
        name: str,
        path: Path = (),
        moves: Collection[str] = ("copy", "bitcast"),
    ) -> tuple[Instruction, Path]:
        """Returns the instruction of a computation that made a value.

        The value is the element `path` of `name`. It is followed through tuples, and
        through opcodes that only move it. Also returns which element of the result it
        is; an instruction without opcode is outside of the computation.
        """
        instructions = self.computations[computation]
        while instruction := instructions.get(name):
            _, _, opcode, operands, _ = instruction
            if opcode == "get-tuple-element":
                name, path = operands[0], (instruction.attribute(INDEX), *path)
            elif path and (opcode == "tuple" or (opcode in moves and operands[1:])):
                # Several all-gathers may be one, with a tuple of results.
                name, path = operands[int(path[0])], path[1:]
            elif opcode in moves:
                name = operands[0]
            else:
                return instruction, path
        return Instruction(name, "", "", (), ""), path

    def _argument(self, computation: str, name: str, path: Path = ()) -> Path | None:
        """Returns the path in the computation's argument that a value is, or None."""
        maker, path = self.maker(computation, name, path)
        return path if maker.opcode == "parameter" else None

    def _integer(self, computation: str, name: str, path: Path = ()) -> int | None:
        maker, _ = self.maker(computation, name, path)
        text = maker.attribute(r"^(-?\d+)\)")
        return int(text) if maker.opcode == "constant" and text else None

    def carries(self, loop: Instruction, path: Path) -> bool:
        """Returns whether a loop hands on an element of what it carries unchanged."""
        body = _called_as("body", loop)
        return self._argument(body, self.roots[body], path) == path

    def _runs(self, computation: str) -> Runs:
        calls = self.callers.get(computation, ())
        times, is_known, in_loop = 0 if calls else 1, True, False
        for site, instruction in calls:
            outer, turns = self.runs(site), 1
            is_known = (
                is_known and outer.is_known and instruction.opcode != "conditional"
            )
            if instruction.opcode == "while":
                count = self._trip_count(site, instruction)
                is_known = is_known and count is not None
                is_condition = computation == _called_as("condition", instruction)
                turns = 1 if count is None else count + is_condition
            times += outer.times * turns
            in_loop = in_loop or outer.in_loop or instruction.opcode == "while"
        return Runs(times, is_known, in_loop)

    def _trip_count(self, computation: str, loop: Instruction) -> int | None:
        """Returns how often a loop's body runs; None if the text does not say."""
        noted = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"')
        if noted:
            return int(noted)
        # while (counter < stop) counter = counter + step
        condition, body = _called_as("condition", loop), _called_as("body", loop)
        test, _ = self.maker(condition, self.roots[condition])
        is_less = test.attribute(r"\bdirection=(LT)\b")
        counter = self._argument(condition, test.operands[0]) if is_less else None
        if not counter:
            return None
        update, _ = self.maker(body, self.roots[body], counter)
        is_sum = update.opcode == "add"
        if not is_sum or self._argument(body, update.operands[0]) != counter:
            return None
        start = self._integer(computation, loop.operands[0], counter)
        stop = self._integer(condition, test.operands[1])
        step = self._integer(body, update.operands[1])
        if start is None or stop is None or not step or step < 0:
            return None
        return max(0, -((start - stop) // step))

    def lines(self, instruction: Instruction) -> Iterator[tuple[str, str]]:
        """Yields the files and lines that made an instruction, the innermost first."""
        file = instruction.attribute(r'\bsource_file="([^"]*)"')
        if file:
            yield file, instruction.attribute(r"\bsource_line=(\d+)")
        frame = int(instruction.attribute(r"\bstack_frame_id=(\d+)") or 0)
        while ("StackFrames", frame) in self._tables:
            fields = self._row("StackFrames", frame)
            place = self._row("FileLocations", fields["file_location_id"])
            yield self._tables["FileNames", place["file_name_id"]], str(place["line"])
            # Printed plus one: the first frame, which has no parent, says 1.
            frame = fields.get("parent_frame_id", 1) - 1

    def _row(self, table: str, index: int) -> dict[str, int]:
        pairs = re.findall(r"(\w+)=(\d+)", self._tables[table, index])
        return {key: int(value) for key, value in pairs}


def _called_as(role: str, loop: Instruction) -> str:
    return loop.attribute(rf"\b{role}=%([^\s,]+)")


_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")


def arrays_of(type_text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the dtypes and shapes in the text of a type; dynamic sizes at their most.

    Example:
        >>> arrays_of("(f32[8,4]{1,0:T(8,128)}, pred[<=3])")
        [('f32', (8, 4)), ('pred', (3,))]
    """
    return [
        (dtype, tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim))
        for dtype, dims in _ARRAY.findall(type_text)
    ]


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Returns the bytes of an array.

    Example:
        >>> nbytes("bf16", (8, 4)), nbytes("s4", (3,)), nbytes("f8e4m3fn", (5,))
        (64, 2, 5)
    """
    bits = 8 if dtype == "pred" else int(*re.findall(r"\d+", dtype)[:1] or [0])
    return math.ceil(math.prod(shape) * bits / 8)
