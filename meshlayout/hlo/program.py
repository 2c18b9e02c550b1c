"""The text of a compiled program as instructions, loops and source lines.

XLA has no stable API for optimized programs, but prints them for every platform in one
grammar. A loop's body is printed once. XLA notes how often it runs on CPUs and GPUs. In
TPU programs the loop's condition compares a counter with a constant; where the counter
starts and what is added to it are constants, too. Any other loop is of unknown length.
"""

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias


@dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction; `rest` is its text after the opening parenthesis."""

    computation: str
    type: str
    opcode: str
    operands: tuple["Instruction", ...]
    rest: str

    def attribute(self, pattern: str) -> str:
        """Returns the first group of a regular expression in the rest, or `""`."""
        match = re.search(pattern, self.rest)
        return match[1] if match else ""

    def callee(self, role: str) -> str:
        """Returns the name of the computation that it calls as a role, such as body."""
        return self.attribute(rf"\b{role}=%([^\s,]+)")


# The element of nested tuples that a value is, outermost first.
Path: TypeAlias = tuple[str, ...]

OP_NAME = r'op_name="((?:[^"\\]|\\.)*)"'

_HEAD = re.compile(r"(?:ENTRY )?%?([^\s(=]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?(\S+) = (.*?) ([a-z][\w-]*)\((.*)$")
_ATTRIBUTES = re.compile(r"\), [\w-]+=")
_NAME = re.compile(r"%([^\s,(){}]+)")
_CALLED = re.compile(r"(\w+)=(\{%[^}]*\}|%[^\s,)}]+)")
# Names of files, locations and stack frames are tables, each after a heading.
_HEADING = re.compile(r"[A-Z]\w+$")
_ROW = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})$')


class Program:
    """A compiled program, read from its text."""

    def __init__(self, text: str) -> None:
        # By name of computation: its instructions, its result, and what calls it.
        self.computations: dict[str, list[Instruction]] = {}
        self.roots: dict[str, Instruction] = {}
        self.callers: dict[str, list[Instruction]] = {}
        self.entry = ""  # the computation that is the whole program
        self._tables: dict[tuple[str, int], str] = {}
        # The header is one line, which holds the types of all arguments.
        header, _, text = text.partition("\n")
        counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
        self.num_devices = math.prod(map(int, counts))
        self._parse(text)
        for instruction in self:
            for name in self.called(instruction):
                self.callers.setdefault(name, []).append(instruction)
        # A program is read once and thrown away, and the cache with it.
        self.runs = cache(self._runs)

    def _parse(self, text: str) -> None:
        computation = heading = ""
        known: dict[str, Instruction] = {}
        outside = Instruction("", "", "", (), "")
        for line in text.splitlines():
            if match := _INSTRUCTION.match(line):
                root, name, kind, opcode, rest = match.groups()
                names = _NAME.findall(_ATTRIBUTES.split(rest, 1)[0])
                operands = tuple(known.get(other, outside) for other in names)
                known[name] = Instruction(computation, kind, opcode, operands, rest)
                self.computations[computation].append(known[name])
                if root:
                    self.roots[computation] = known[name]
            elif match := _HEAD.match(line):
                computation, known = match[1], {}
                self.computations[computation] = []
                self.entry = computation if line.startswith("ENTRY") else self.entry
            elif match := _ROW.match(line):
                self._tables[heading, int(match[1])] = match[2] or match[3] or ""
            elif _HEADING.match(line):
                heading = line

    def __iter__(self) -> Iterator[Instruction]:
        for instructions in self.computations.values():
            yield from instructions

    def called(self, instruction: Instruction) -> list[str]:
        """Returns the computations that it calls, but not those that it adds with."""
        return [
            name
            for role, names in _CALLED.findall(instruction.rest)
            if role != "to_apply" or instruction.opcode == "call"
            for name in _NAME.findall(names)
            if name in self.computations
        ]

    def _runs(self, computation: str) -> tuple[int, bool, bool]:
        """Returns how often it runs, whether that is known, and if it is in a loop."""
        calls = self.callers.get(computation, ())
        times, is_known, in_loop = 0 if calls else 1, True, False
        for call in calls:
            outer_times, is_outer_known, is_outer_in_loop = self.runs(call.computation)
            is_known = is_known and is_outer_known and call.opcode != "conditional"
            in_loop = in_loop or is_outer_in_loop or call.opcode == "while"
            turns = 1
            if call.opcode == "while":
                count = self._trip_count(call)
                is_known = is_known and count is not None
                is_condition = computation == call.callee("condition")
                turns = 1 if count is None else count + is_condition
            times += outer_times * turns
        return times, is_known, in_loop

    def _trip_count(self, loop: Instruction) -> int | None:
        """Returns how often a loop's body runs; None if the text does not say."""
        noted = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"')
        if noted:
            return int(noted)
        # while (counter < stop) counter = counter + step
        test, _ = maker(self.roots[loop.callee("condition")])
        if "direction=LT" not in test.rest:
            return None
        counter, stop = map(_value, test.operands)
        if not isinstance(counter, tuple):
            return None
        start = _value(loop.operands[0], counter)
        update, _ = maker(self.roots[loop.callee("body")], counter)
        match update.opcode, [*map(_value, update.operands)], start, stop:
            case "add", [before, int(step)], int(), int() if before == counter:
                return max(0, -((start - stop) // step)) if step > 0 else None
        return None

    def carries(self, loop: Instruction, path: Path) -> bool:
        """Returns whether a loop passes an element of its carry on unchanged."""
        return _value(self.roots[loop.callee("body")], path) == path

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


def maker(
    value: Instruction, path: Path = (), moves: Collection[str] = ("copy", "bitcast")
) -> tuple[Instruction, Path]:
    """Returns the instruction that made an element of a value, and which result it is.

    The value is followed through tuples and opcodes that only move it.
    """
    while True:
        opcode, operands = value.opcode, value.operands
        if opcode == "get-tuple-element":
            value, path = operands[0], (value.attribute(r"\bindex=(\d+)"), *path)
        elif path and (opcode == "tuple" or (opcode in moves and operands[1:])):
            # Several all-gathers may be one, with a tuple of results.
            value, path = operands[int(path[0])], path[1:]
        elif opcode in moves:
            value = operands[0]
        else:
            return value, path


def _value(value: Instruction, path: Path = ()) -> int | Path | None:
    """Returns the integer that a value is, or its path in the argument, or None."""
    value, path = maker(value, path)
    if value.opcode == "parameter":
        return path
    text = value.attribute(r"^(-?\d+)\)") if value.opcode == "constant" else ""
    return int(text) if text else None


_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")


def arrays_of(type_text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Returns dtypes and shapes in the text of a type; dynamic sizes at their most."""
    return [
        (dtype, tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim))
        for dtype, dims in _ARRAY.findall(type_text)
    ]


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Returns the bytes of an array, such as 2 of `("s4", (3,))`."""
    bits = 8 if dtype == "pred" else int(*re.findall(r"\d+", dtype)[:1] or [0])
    return math.ceil(math.prod(shape) * bits / 8)
