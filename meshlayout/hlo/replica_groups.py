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

    They are places in the mesh; the pairs of a permutation are groups, too. Groups of a
    program on all its devices at once may be written as `{}`.

    Example:
        >>> replica_groups("replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}", 8)
        [[0, 2, 4, 6], [1, 3, 5, 7]]
    """
    if match := _LISTS.search(text):
        return [_integers(group) for group in re.findall(r"\{([\d, ]+)\}", match[1])]
    if match := _ROWS.search(text):
        shape, sizes, order = map(_integers, match.groups(""))
        return _grid(sizes or shape, order).reshape(shape).tolist()
    if match := _AXES.search(text):
        axes, *grid, chosen = match.groups("")
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
        shape, source, order = map(_integers, grid)
        devices = _grid(source or shape or [*sizes.values()], order)
        return _rows_along(devices, sizes, chosen).tolist()
    return [list(range(num_devices))]


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number.strip()]


def _grid(sizes: Sequence[int], order: Sequence[int]) -> np.ndarray:
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    return devices.transpose(order) if order else devices


def _rows_along(devices: np.ndarray, sizes: dict[str, int], chosen: str) -> np.ndarray:
    """Returns the rows along some axes, such as `'b'`, or parts: `'a':(2)4`."""
    parts: list[int] = []  # every axis, split where a part of it is chosen
    places: list[int] = []
    picked = {name: (pre, size) for name, pre, size in _AXIS.findall(chosen)}
    for name, size in sizes.items():
        before, inside = (int(x or 0) for x in picked.get(name, ("", "")))
        split = [before, inside, size // (before * inside)] if inside else [1, size, 1]
        if name in picked:
            places.append(len(parts) + 1)
        parts += split
    rest = [place for place in range(len(parts)) if place not in places]
    width = math.prod(parts[place] for place in places)
    return devices.reshape(parts).transpose(*rest, *places).reshape(-1, width)


def mesh_axes(
    groups: Iterable[Sequence[int]], mesh: Mesh
) -> tuple[tuple[str, ...], bool]:
    """Returns the axes of a mesh along which the devices of each group differ.

    And whether each group is all the devices along them. Groups of devices that the
    mesh does not have go along no axes.

    Example:
        >>> from meshlayout import create_mesh
        >>> mesh = create_mesh({"batch": 2, "model": 4})
        >>> mesh_axes([[0, 4], [1, 5], [2, 6], [3, 7]], mesh)
        (('batch',), True)
        >>> mesh_axes([[0, 1], [2, 3], [4, 5], [6, 7]], mesh)
        (('model',), False)
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
