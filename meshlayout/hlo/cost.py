"""What a compiled program computes and reads: FLOPs and bytes, loops counted in full.

XLA's own `cost_analysis` counts a loop's body once, says nothing of FLOPs on GPUs, and
adds up whatever else a platform's compiler made of the program. So the matrix
multiplications and convolutions are counted here, from the shapes in the text, in the
forms in which compilers leave them: `dot`, `convolution` (on TPUs for every matrix
multiplication), and the custom calls of cuBLAS and cuDNN.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshlayout import _render
from meshlayout.hlo.program import Instruction, Program, arrays_of, nbytes, text_of


@dataclass(frozen=True)
class Cost:
    """What each device computes and reads in one run of a program.

    Attributes:
        flops: Of matrix multiplications and convolutions, 2 per multiply-add. Neither
            padding nor elementwise operations are counted.
        bytes_accessed: Bytes that instructions read and write, each fusion as one; of
            an array that is sliced or updated in place, the slice.
        times_known: Whether it is known how often each instruction runs. Otherwise a
            loop counts as one iteration, and a branch as taken.
        uncounted: Custom calls in the program, such as those of hand-written kernels,
            whose FLOPs are not known.
    """

    flops: int
    bytes_accessed: int
    times_known: bool
    uncounted: tuple[str, ...]

    @property
    def intensity(self) -> float:
        """FLOPs per byte; below what a device does per byte, memory is the limit."""
        return self.flops / self.bytes_accessed if self.bytes_accessed else 0.0

    def __str__(self) -> str:
        return _render.text_table(_HEADERS, self._rows(), "lr", self._notes())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _render.html_table(_HEADERS, self._rows(), "lr", notes=self._notes())

    def _rows(self) -> list[list[str]]:
        return [
            ["FLOPs", f"{self.flops:,}"],
            ["bytes accessed", f"{self.bytes_accessed:,}"],
            ["FLOPs per byte", f"{self.intensity:.1f}"],
        ]

    def _notes(self) -> list[str]:
        calls = f"not counted: the FLOPs of {', '.join(self.uncounted)}"
        loops = "loops of unknown length count as one iteration, branches as taken"
        return [calls] * bool(self.uncounted) + [loops] * (not self.times_known)


_HEADERS = ["", "per device"]


def read_cost(program: Any) -> Cost:
    """Reads the FLOPs and bytes of a compiled program, for CPUs, GPUs or TPUs.

    Args:
        program: As for `read_communication`.

    Raises:
        CommunicationError: If it is not a compiled program.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def chain(w, x):
        ...     return jax.lax.scan(lambda x, _: (x @ w, None), x, length=10)[0]
        >>> arguments = jnp.ones((64, 64)), jnp.ones((32, 64))
        >>> read_cost(jax.jit(chain).lower(*arguments).compile()).flops
        2621440
    """
    parsed = Program(text_of("read_cost", program))
    fused = {
        name
        for _, instruction in parsed
        if instruction.opcode == "fusion"
        for name, _ in parsed.called(instruction)
    }
    flops = accessed = 0
    is_known = True
    uncounted: dict[str, None] = {}
    for name, instruction in parsed:
        runs = parsed.runs(name)
        is_known = is_known and runs.is_known
        count = _flops(parsed, name, instruction)
        if count is None:
            uncounted[instruction.attribute(_TARGET)] = None
        flops += runs.times * (count or 0)
        if name not in fused:
            accessed += runs.times * _accessed(parsed, name, instruction)
    return Cost(flops, accessed, is_known, tuple(uncounted))


# FLOPs.

_TARGET = r'custom_call_target="([^"]*)"'
# Compilers name their own helpers in capitals; those only move data.
_KERNEL = re.compile(r"[^A-Z]")
_GEMM = re.compile(r"__cublas\$")
# The places of the input, kernel and output among a call's operands, its result last.
_CUDNN = {
    "__cudnn$convForward": (0, 1, -1),
    "__cudnn$convBiasActivationForward": (0, 1, -1),
    "__cudnn$convBackwardInput": (-1, 1, 0),
    "__cudnn$convBackwardFilter": (0, -1, 1),
}


def _flops(program: Program, computation: str, instruction: Instruction) -> int | None:
    """Returns the FLOPs of one run of an instruction; None if unknown."""
    opcode = instruction.opcode
    if opcode not in ("dot", "ragged-dot", "convolution", "custom-call"):
        return 0
    shapes = [
        shape
        for type_text in _operand_types(program, computation, instruction)
        for _, shape in arrays_of(type_text)[:1]
    ]
    shapes += [shape for _, shape in arrays_of(instruction.type)[:1]]
    if opcode == "convolution":
        return _convolution_flops(instruction, *shapes)
    target = instruction.attribute(_TARGET)
    if target in _CUDNN:
        chosen = [shapes[place] for place in _CUDNN[target]]
        return _convolution_flops(instruction, *chosen)
    dims = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}")
    if opcode == "custom-call":
        if not _GEMM.match(target):
            return None if _KERNEL.match(target) else 0
        dims = instruction.attribute(r'"lhs_contracting_dimensions":\[([\d,"]*)\]')
    contracted = [shapes[0][int(dim)] for dim in re.findall(r"\d+", dims)]
    return 2 * math.prod(shapes[-1]) * math.prod(contracted)


def _convolution_flops(
    instruction: Instruction,
    inputs: tuple[int, ...],
    kernel: tuple[int, ...],
    outputs: tuple[int, ...],
) -> int:
    """Counts the products of a convolution, without those with padding or holes."""
    labels = re.split("_|->", instruction.attribute(r"dim_labels=([^\s,]+)"))
    into, of, out = (
        dict(zip(letters, sizes, strict=True))
        for letters, sizes in zip(labels, (inputs, kernel, outputs), strict=True)
    )
    window = instruction.attribute(r"window=\{([^}]*)\}")
    groups = int(instruction.attribute(r"batch_group_count=(\d+)") or 1)
    products = into["b"] // groups * of["i"] * of["o"]
    for place in range(len(into) - 2):
        dim = str(place)

        def number(name: str, default: str, place: int = place) -> str:
            match = re.search(rf"\b{name}=(\S+)", window)
            return match[1].split("x")[place] if match else default

        before = int(number("pad", "0_0").split("_")[0])
        holes, spread = int(number("lhs_dilate", "1")), int(number("rhs_dilate", "1"))
        starts = np.arange(out[dim]) * int(number("stride", "1")) - before
        products *= sum(
            int(
                np.count_nonzero(
                    (at >= 0) & (at < into[dim] * holes) & (at % holes == 0)
                )
            )
            for at in (starts + place * spread for place in range(of[dim]))
        )
    return 2 * products


# Bytes.

_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while"}
_FREE |= {"conditional", "call", "after-all", "partition-id", "replica-id", "iota"}
_SLICES = {"dynamic-slice", "slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}


def _accessed(program: Program, computation: str, instruction: Instruction) -> int:
    """Returns the bytes that one run of an instruction reads and writes."""
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith("-done"):
        return 0
    types = _operand_types(program, computation, instruction)
    if opcode in _SLICES:
        return 2 * _size(instruction.type)
    if opcode in _UPDATES:
        return 2 * _size(types[_UPDATES[opcode]])
    fused = [name for name, _ in program.called(instruction)]
    if opcode != "fusion" or not fused:
        return sum(map(_size, types)) + _size(instruction.type)
    inside = program.computations[fused[0]]
    read = sum(
        _read(inside, operand.name, _size(operand.type))
        for operand in inside.values()
        if operand.opcode == "parameter"
    )
    return read + _written(inside, program.root(fused[0]))


def _read(inside: dict[str, Instruction], name: str, size: int) -> int:
    """Returns the bytes that a fusion reads of one of its parameters."""
    read = 0
    for user in inside.values():
        if name not in user.operands:
            continue
        is_first = user.operands[0] == name
        if user.opcode == "bitcast":
            read += _read(inside, user.name, size)
        elif user.opcode in _SLICES and is_first:
            read += _size(user.type)
        elif user.opcode not in _UPDATES or not is_first:
            return size
    return min(read, size)


def _written(inside: dict[str, Instruction], name: str) -> int:
    """Returns the bytes that a fusion writes."""
    result = inside.get(name)
    if result is None:
        return 0
    if result.opcode == "tuple":
        return sum(_written(inside, operand) for operand in result.operands)
    if result.opcode == "bitcast" and result.operands[0] in inside:
        return _written(inside, result.operands[0])
    if result.opcode in _UPDATES:
        update = inside.get(result.operands[_UPDATES[result.opcode]])
        return _size(update.type) if update else 0
    return _size(result.type)


def _size(type_text: str) -> int:
    return sum(nbytes(*array) for array in arrays_of(type_text))


def _operand_types(
    program: Program, computation: str, instruction: Instruction
) -> Sequence[str]:
    known = program.computations[computation]
    return [known[name].type for name in instruction.operands if name in known]
