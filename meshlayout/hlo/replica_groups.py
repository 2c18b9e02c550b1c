"""Which devices a collective joins, and which mesh axes those are.

A compiled program numbers the devices in the order of the mesh, and writes groups of
them as lists (`{{0,1},{2,3}}`), as rows of a grid that may be transposed
(`[2,4]<=[4,2]T(1,0)`), or as axes of a mesh of its own
(`mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'b'}`).
"""

import math
import re
from collections.abc import Iterable, Sequence

import numpy as np

from meshlayout.mesh import Mesh


_LISTS = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_GRID = r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?"
_ROWS = re.compile(r"replica_groups=" + _GRID)
_AXES = re.compile(
    r"replica_groups=@?\w*mesh\w*\[([^\]]*)\](?:, device_ids=\(" + _GRID + r"\))?"
    r"\s*\{([^}]*)\}"
)
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def replica_groups(text: str, num_devices: int) -> list[list[int]]:
    """Returns the groups of devices in an instruction's text, one row each.

    They are places in the mesh; the pairs of a permutation are groups, too.
    """
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
    parts: list[int] = []
    columns: list[int] = []
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


def mesh_axes(
    groups: Iterable[Sequence[int]], mesh: Mesh
) -> tuple[tuple[str, ...], bool]:
    """Returns the axes of a mesh along which the devices of each group differ.

    And whether each group is all the devices along them. Groups of devices that the
    mesh does not have go along no axes.
    """
    along: set[int] = set()
    widths: set[int] = set()
    for group in groups:
        if max(group, default=0) >= mesh.size:
            return (), False
        places = np.stack(np.unravel_index(np.asarray(group), mesh.devices.shape))
        along |= {*np.flatnonzero((places != places[:, :1]).any(axis=1)).tolist()}
        widths.add(len(group))
    axes = tuple(mesh.axis_names[index] for index in sorted(along))
    return axes, widths == {mesh.axis_size(axes)}
