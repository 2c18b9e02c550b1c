"""The collectives of a compiled program, as frozen records.

They are written plain; as a pair of `-start` and `-done`, which a GPU may still run
synchronously; wrapped in `async-start`; and on TPUs as asynchronous fusions, which
repeat one collective in each piece of computation that it overlaps with, or as a fusion
`all-reduce-scatter`, which is a reduce-scatter written as an all-reduce.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshlayout.hlo.origins import Origins
from meshlayout.hlo.program import OP_NAME, Instruction, Program, arrays_of, nbytes
from meshlayout.mesh import Mesh


KINDS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    *("collective_permute", "ragged_all_to_all", "collective_broadcast"),
)

_OPCODES = {
    kind.replace("_", "-") + suffix: (kind, bool(suffix))
    for kind in KINDS
    for suffix in ("", "-start")
}


@dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    The bytes on the wire are those that a device sends in rings, which send the least
    for large arrays: where n devices take part and the result has b bytes, an
    all-reduce 2 (n - 1) / n b, an all-gather or all-to-all (n - 1) / n b, a
    reduce-scatter (n - 1) b, a permutation or broadcast b (Patarasuk and Yuan,
    "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).

    Attributes:
        kind: Its kind, such as `"all_reduce"`.
        axes: The mesh axes it goes along; None if the mesh is not known.
        whole_axes: Whether each group consists of all devices along these axes.
        num_devices: The number of devices in each group; 2 for a permutation.
        arrays: Its results on each device, such as `("f32[512, 10]",)`.
        nbytes: Bytes of the results on each device, in one run.
        wire_bytes: Bytes that each device sends in all runs together.
        times: How often it runs in one run of the program. A loop of unknown length
            counts as one iteration, and a branch as taken.
        times_known: Whether there is no such loop and no branch around it.
        in_loop: Whether it is inside a loop.
        is_async: Whether computation runs at the same time.
        op_name: JAX's name of the operation in the user's code.
        module: The submodule it serves, known by scopes or weights; or empty.
        source: The innermost line of the user's code, such as `"models/mlp.py:31"`, or
            empty; if several were combined, the commonest and a count of others.
        leaves: The program's arguments that it moves, such as `"layers/0/kernel"`; in a
            step, also those whose gradients or updates it moves.
    """

    kind: str
    axes: tuple[str, ...] | None
    whole_axes: bool
    num_devices: int
    arrays: tuple[str, ...]
    nbytes: int
    wire_bytes: int
    times: int
    times_known: bool
    in_loop: bool
    is_async: bool
    op_name: str
    module: str
    source: str
    leaves: tuple[str, ...]


def read_collectives(
    program: Program, mesh: Mesh | None, origins: Origins
) -> Iterator[Collective]:
    """Yields the collectives of a program on a mesh, in the order of its text."""
    pieces: dict[tuple[str, ...], Collective] = {}
    started: set[tuple[str, ...]] = set()
    for instruction in program:
        if instruction.opcode not in _OPCODES:
            continue
        collective = _collective(program, instruction, mesh, origins)
        if not _PIECE.match(instruction.computation):
            yield collective
            continue
        key = collective.kind, *map(instruction.attribute, (_CHANNEL, _CHAIN))
        others = program.computations[instruction.computation]
        if any(_STARTS in other.rest for other in others):
            started.add(key)
            yield collective
        # With no start in the text, what runs least is all of it.
        if key not in pieces or collective.times < pieces[key].times:
            pieces[key] = collective
    yield from (piece for key, piece in pieces.items() if key not in started)


# Names of the pieces of an asynchronous collective on TPUs: its chain, its first piece.
_PIECE = re.compile("async_collective|fused_computation")
_CHANNEL, _CHAIN = r"\bchannel_id=(\d+)", r'\bchain_id="(\d+)"'
_STARTS = 'custom_call_target="AsyncCollectiveStart"'
# GPU programs split everything into start and end, even if nothing runs between.
_IS_SYNCHRONOUS = '"is_sync":true'


def _collective(
    program: Program, instruction: Instruction, mesh: Mesh | None, origins: Origins
) -> Collective:
    kind, is_async = _OPCODES[instruction.opcode]
    arrays = arrays_of(instruction.type)
    if is_async and kind != "all_reduce":
        # A start's type holds its operands first, and perhaps context numbers last.
        while len(arrays) > 2 and arrays[-1] == ("u32", ()):
            arrays.pop()
        arrays = arrays[len(arrays) // 2 :]
    groups = _replica_groups(instruction.rest, program.num_devices)
    width = max(map(len, groups))
    size = sum(nbytes(*array) for array in arrays)
    computation = instruction.computation
    is_scatter = computation.startswith("all-reduce-scatter")  # a fusion, on TPUs
    outer = instruction  # what has its result
    for call in program.callers.get(computation, ())[:1]:
        if is_scatter or call.opcode == "async-start" or _PIECE.match(computation):
            outer = call
            is_async = is_async or not is_scatter
    if is_scatter:
        kind, size, arrays = "reduce_scatter", size // width, arrays_of(outer.type)
    axes, is_whole = _mesh_axes(groups, mesh) if mesh else (None, False)
    times, times_known, in_loop = program.runs(computation)
    moved = origins.leaves(instruction, outer)
    scopes, source = origins.scopes_and_source(instruction)
    if not source:
        scopes, source = origins.scopes_and_source(outer)
    return Collective(
        kind=kind,
        axes=axes,
        whole_axes=is_whole or kind == "collective_permute",
        num_devices=width,
        arrays=tuple(f"{x}[{', '.join(map(str, dims))}]" for x, dims in arrays),
        nbytes=size,
        wire_bytes=times * _wire_bytes(kind, size, groups),
        times=times,
        times_known=times_known,
        in_loop=in_loop,
        is_async=is_async and _IS_SYNCHRONOUS not in outer.rest,
        op_name=instruction.attribute(OP_NAME) or outer.attribute(OP_NAME),
        # An NNX model has no scopes: the weights tell its layers apart.
        module="/".join(scopes) or origins.parent(moved) or origins.module(outer),
        source=source,
        leaves=tuple(moved),
    )


def _wire_bytes(kind: str, size: int, groups: list[list[int]]) -> int:
    """Returns what a device sends in one run, by the formulas of `Collective`."""
    if all(len({*group}) == 1 for group in groups):
        return 0
    n = max(map(len, groups))
    shares = {"all_reduce": 2 * (n - 1) / n, "reduce_scatter": n - 1}
    shares |= {"collective_permute": 1, "collective_broadcast": 1}
    return math.ceil(size * shares.get(kind, (n - 1) / n))


# A compiled program numbers the devices in the order of the mesh, and writes groups of
# them as lists (`{{0,1},{2,3}}`), as rows of a grid that may be transposed
# (`[2,4]<=[4,2]T(1,0)`), or as axes of a mesh of its own
# (`mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'b'}`).
_LISTS = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_GRID = r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?"
_ROWS = re.compile(r"replica_groups=" + _GRID)
_AXES = re.compile(
    r"replica_groups=@?\w*mesh\w*\[([^\]]*)\](?:, device_ids=\(" + _GRID + r"\))?"
    r"\s*\{([^}]*)\}"
)
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def _replica_groups(text: str, num_devices: int) -> list[list[int]]:
    """Returns an instruction's groups of places in the mesh, or pairs, one row each."""
    if match := _LISTS.search(text):
        return [_integers(group) for group in re.findall(r"\{([\d, ]+)\}", match[1])]
    if match := _ROWS.search(text):
        shape, sizes, order = map(_integers, match.groups(""))
        return _grid(sizes or shape, order).reshape(shape).tolist()
    match = _AXES.search(text)
    if not match:
        return [list(range(num_devices))]
    axes, *grid, chosen = match.groups("")
    shape, source, order = map(_integers, grid)
    # Of an axis that is chosen in part, 'a':(2)4, 2 is outside of the part, 4 its size.
    picked = {name: (pre, size) for name, pre, size in _AXIS.findall(chosen)}
    parts, columns = list[int](), list[int]()
    for name, size in re.findall(r"'([^']+)'=(\d+)", axes):
        before, inside = picked.get(name, ("", "1"))
        split = int(before or 1), int(inside or size)
        if name in picked:
            columns.append(len(parts) + 1)
        parts += [*split, int(size) // math.prod(split)]
    rows = [place for place in range(len(parts)) if place not in columns]
    devices = _grid(source or shape or parts, order).reshape(parts)
    width = math.prod(parts[place] for place in columns)
    return devices.transpose(*rows, *columns).reshape(-1, width).tolist()


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number.strip()]


def _grid(sizes: Sequence[int], order: Sequence[int]) -> np.ndarray:
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    return devices.transpose(order) if order else devices


def _mesh_axes(
    groups: Iterable[Sequence[int]], mesh: Mesh
) -> tuple[tuple[str, ...], bool]:
    """Returns the axes along which devices of a group differ, and whether it has all.

    Groups of devices outside the mesh have no axes.
    """
    along, widths = set[int](), set[int]()
    for group in groups:
        if max(group, default=0) >= mesh.size:
            return (), False
        places = np.stack(np.unravel_index(np.asarray(group), mesh.devices.shape))
        along |= {*np.flatnonzero((places != places[:, :1]).any(axis=1)).tolist()}
        widths.add(len(group))
    axes = tuple(mesh.axis_names[index] for index in sorted(along))
    return axes, widths == {mesh.axis_size(axes)}
