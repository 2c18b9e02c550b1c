"""The text of a compiled program as computations, loops and source lines.

XLA has no stable API for optimized programs, but prints them for every platform in one
grammar, so the text is what is read here. A loop's body is printed once. XLA notes how
often it runs on CPUs and GPUs. TPU programs only have the loop's condition, which
compares a counter with a constant; where the counter starts and what is added to it are
constants, too. Any other loop is of unknown length.
"""

import math
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple


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


class Call(NamedTuple):
    """Where a computation is called, and as what (`"body"`, `"calls"`, ...)."""

    computation: str
    instruction: Instruction
    role: str


class Runs(NamedTuple):
    """How often a computation runs in one run of the program, as in `Collective`."""

    times: int
    is_known: bool
    in_loop: bool


class Frame(NamedTuple):
    """One line of the stack that made an instruction."""

    file: str
    line: int
    function: str


OP_NAME = r'op_name="((?:[^"\\]|\\.)*)"'

_HEAD = re.compile(r"(?:ENTRY )?%?([^\s(=]+) .*\{\s*$")
_INSTRUCTION = re.compile(
    r"\s+(?P<root>ROOT )?%?(?P<name>\S+) = (?P<type>.*?) (?P<opcode>[a-z][\w-]*)\("
    r"(?P<rest>.*)$"
)
_NAME = re.compile(r"%([^\s,(){}]+)")
_CALLED = re.compile(r"(\w+)=(\{%[^}]*\}|%[^\s,)}]+)")
_SECTION = re.compile(r"(FileNames|FunctionNames|FileLocations|StackFrames)\s*$")
_ENTRY = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})$')
_COUNTS = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")


class Program:
    """A compiled program, read from its text.

    Attributes:
        computations: Instructions by name, by the name of their computation.
        roots: The name of each computation's result.
        callers: Where each computation is called.
        num_devices: How many devices it runs on.
        entry: The name of the computation that is the whole program.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.roots: dict[str, str] = {}
        self.callers: dict[str, list[Call]] = {}
        self._tables: dict[str, dict[int, str]] = {}
        # The header is one line, which holds the types of all arguments.
        header = re.search("^HloModule .*$", text, re.MULTILINE)
        counts = _COUNTS.findall(header[0]) if header else []
        self.num_devices = math.prod(map(int, counts))
        self.entry = ""
        self._parse(text)
        for name, instruction in self:
            for called, role in self.called(instruction).items():
                call = Call(name, instruction, role)
                self.callers.setdefault(called, []).append(call)
        # A program is read once and thrown away, and the cache with it.
        self.runs = cache(self._runs)

    def _parse(self, text: str) -> None:
        instructions: dict[str, Instruction] = {}
        table: dict[int, str] = {}
        name = ""
        for line in text.splitlines():
            if match := _INSTRUCTION.match(line):
                rest = match["rest"]
                operands = tuple(_NAME.findall(rest[: _closing(rest)]))
                instruction = Instruction(
                    match["name"], match["type"], match["opcode"], operands, rest
                )
                instructions[instruction.name] = instruction
                if match["root"]:
                    self.roots[name] = instruction.name
            elif line.startswith((" ", "HloModule", "}")):
                continue
            elif match := _HEAD.match(line):
                name = match[1]
                self.entry = name if line.startswith("ENTRY") else self.entry
                instructions = self.computations.setdefault(name, {})
            elif match := _SECTION.match(line):
                table = self._tables.setdefault(match[1], {})
            elif match := _ENTRY.match(line):
                table[int(match[1])] = match[2] if match[2] is not None else match[3]

    def __iter__(self) -> Iterator[tuple[str, Instruction]]:
        """Yields every instruction, with the name of its computation."""
        for name, instructions in self.computations.items():
            for instruction in instructions.values():
                yield name, instruction

    def called(self, instruction: Instruction) -> dict[str, str]:
        """Returns the role of each computation that an instruction calls.

        What adds up two numbers in a reduction is not among them.
        """
        return {
            name: role
            for role, names in _CALLED.findall(instruction.rest)
            if role != "to_apply" or instruction.opcode == "call"
            for name in _NAME.findall(names)
            if name in self.computations
        }

    def source(self, computation: str, name: str) -> Instruction | None:
        """Returns the instruction that made a value, before it was copied."""
        known = self.computations.get(computation, {})
        instruction = known.get(name)
        while instruction is not None and instruction.opcode in ("copy", "bitcast"):
            instruction = known.get(instruction.operands[0])
        return instruction

    def form(self, computation: str, name: str, depth: int = 1) -> Any:
        """Returns how a value is made, past copies.

        Returns:
            An integer for a constant, `("element", index)` for one of the computation's
            only argument, else the opcode and the forms of the operands; or None.
        """
        instruction = self.source(computation, name)
        if instruction is None:
            return None
        _, _, opcode, operands, _ = instruction
        if opcode == "constant":
            text = instruction.attribute(r"^(-?\d+)\)")
            return int(text) if text else None
        if opcode == "get-tuple-element":
            whole = self.source(computation, operands[0])
            is_argument = whole is not None and whole.opcode == "parameter"
            index = int(instruction.attribute(r"\bindex=(\d+)"))
            return ("element", index) if is_argument else None
        direction = instruction.attribute(r"direction=(\w+)")
        inner = operands if depth else ()
        forms = (self.form(computation, operand, depth - 1) for operand in inner)
        return f"{opcode} {direction}".rstrip(), *forms

    def keeps(self, loop: Instruction, index: int) -> bool:
        """Returns whether a loop carries an element unchanged."""
        return self._carried(loop, index) == ("element", index)

    def _carried(self, loop: Instruction, index: int) -> Any:
        """Returns the form of an element that a loop's body hands on."""
        body = _named(self.called(loop), "body")
        result = self.source(body, self.roots.get(body, ""))
        if result is None or result.opcode != "tuple":
            return None
        return self.form(body, result.operands[index])

    # How often.

    def _runs(self, computation: str) -> Runs:
        times, is_known, in_loop = 0, True, False
        calls = self.callers.get(computation, ())
        for call in calls:
            outer, turns = self.runs(call.computation), 1
            if call.instruction.opcode == "while":
                count = self._trip_count(call.computation, call.instruction)
                is_known = is_known and count is not None
                turns = 1 if count is None else count + (call.role == "condition")
                in_loop = True
            times += outer.times * turns
            is_branch = call.instruction.opcode == "conditional"
            is_known = is_known and outer.is_known and not is_branch
            in_loop = in_loop or outer.in_loop
        return Runs(times if calls else 1, is_known, in_loop)

    def _trip_count(self, computation: str, loop: Instruction) -> int | None:
        """Returns how often a loop's body runs; None if that is not read."""
        noted = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"')
        if noted:
            return int(noted)
        condition = _named(self.called(loop), "condition")
        begin = self.source(computation, loop.operands[0])
        match self.form(condition, self.roots.get(condition, "")):
            case ("compare LT", ("element", index), int(stop)) if begin is not None:
                update = self._carried(loop, index)
            case _:
                return None
        start = None
        if begin.opcode == "tuple":
            start = self.form(computation, begin.operands[index])
        match update, start:
            case ("add", ("element", counter), int(step)), int(first) if (
                counter == index and step > 0
            ):
                return max(0, -((first - stop) // step))
        return None

    # From where.

    def frames(self, instruction: Instruction) -> list[Frame]:
        """Returns the stack that made an instruction, the innermost line first."""
        file = instruction.attribute(r'\bsource_file="([^"]*)"')
        if file:
            line = instruction.attribute(r"\bsource_line=(\d+)")
            return [Frame(file, int(line or 0), "")]
        frames: list[Frame] = []
        index = int(instruction.attribute(r"\bstack_frame_id=(\d+)") or 0)
        while index and len(frames) < 1000:
            frame = self._row("StackFrames", index)
            place = self._row("FileLocations", frame.get("file_location_id", 0))
            frames.append(
                Frame(
                    self._text("FileNames", place.get("file_name_id", 0)),
                    place.get("line", 0),
                    self._text("FunctionNames", place.get("function_name_id", 0)),
                )
            )
            # Printed plus one: the first frame, which has no parent, says 1.
            index = frame.get("parent_frame_id", 1) - 1
        return frames

    def _text(self, table: str, index: int) -> str:
        return self._tables.get(table, {}).get(index, "")

    def _row(self, table: str, index: int) -> dict[str, int]:
        pairs = re.findall(r"(\w+)=(\d+)", self._text(table, index))
        return {key: int(value) for key, value in pairs}


def _named(called: dict[str, str], role: str) -> str:
    return next((name for name, other in called.items() if other == role), "")


def _closing(text: str) -> int:
    """Returns where the parenthesis that is open at the start of a text is closed."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth < 0:
            return match.start()
    return len(text)


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
