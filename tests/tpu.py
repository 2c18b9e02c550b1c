"""Programs of the real TPU compiler, for a slice of a pod that nobody has here.

libtpu compiles without a TPU, for devices that hold no arrays: what goes in is abstract.
"""

import math
import operator
import re
from dataclasses import dataclass

import jax
from jax.experimental import topologies  # noqa: TID251

import meshlayout as ml


def create_slice_mesh(**axes: int) -> ml.Mesh:
    """Returns a mesh over the eight chips of a described v5e:2x4 slice."""
    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
    return ml.create_mesh(axes, devices=chips.devices)


def abstract(shape: tuple[int, ...], dtype: str, layout: ml.Layout) -> object:
    """Returns an array's description, as `lower` takes it."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding)


@dataclass(frozen=True)
class Collective:
    """What a collective of a TPU program results in, or a reduce-scatter adds up."""

    kind: str  # as "all_reduce"
    shapes: tuple[tuple[int, ...], ...]
    nbytes: int
    in_loop: bool  # all of it


_HEAD = re.compile(r"^(?:ENTRY )?%?([^\s(=]+) \(.*\{\s*$")
_OPERATION = re.compile(
    r" = (?P<type>.*?) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|"
    r"collective-permute)(?P<start>-start)?\(.*?channel_id=(?P<channel>\d+)"
)
_PIECE = re.compile("async_collective|fused_computation")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|condition|calls|to_apply)=%?([^\s,)}]+)")


def read_collectives(text: str) -> list[Collective]:
    """Returns the collectives of a compiled TPU program.

    An asynchronous one is spread over several fusions, all with its channel; a fusion
    named `all-reduce-scatter` is a reduce-scatter, written as an all-reduce.
    """
    found: dict[str, Collective] = {}
    computations = _computations(text)
    looped = _looped(computations)
    for name, lines in computations.items():
        for match in filter(None, map(_OPERATION.search, lines)):
            one = _collective(match, name, in_loop=name in looped)
            is_piece = _PIECE.match(name) is not None
            key = match["channel"] if is_piece else f"{match['channel']} {len(found)}"
            before = found.get(key)
            if before is None or before.in_loop:
                found[key] = one
    return list(found.values())


def _collective(match: re.Match[str], computation: str, *, in_loop: bool) -> Collective:
    is_scatter = computation.startswith("all-reduce-scatter")
    kind = "reduce_scatter" if is_scatter else match["kind"].replace("-", "_")
    arrays = _ARRAY.findall(match["type"])
    if match["start"] and kind != "all_reduce":  # operand, result, and what tracks it
        arrays = arrays[1:2]
    shapes = [tuple(int(n) for n in dims.split(",") if n) for *_, dims in arrays]
    widths = [int(bits or 8) // 8 for _, bits, _ in arrays]
    nbytes = sum(map(operator.mul, map(math.prod, shapes), widths))
    return Collective(kind, tuple(shapes), nbytes, in_loop)


def _computations(text: str) -> dict[str, list[str]]:
    """Returns the lines of every computation, by name."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            lines = found.setdefault(head[1], [])
        lines.append(line)
    return found


def _looped(computations: dict[str, list[str]]) -> set[str]:
    """Returns the names of the computations that run in loops."""
    todo = [
        name
        for lines in computations.values()
        for line in lines
        if " while(" in line
        for name in _CALLED.findall(line)
    ]
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if name in computations and name not in found:
            found.add(name)
            todo += _CALLED.findall("\n".join(computations[name]))
    return found
