"""Slices and processes: which devices belong together, and which axes cross between.

Inside a slice the network is fast: that of a TPU pod slice, or NVLink inside a host.
Between slices it is the data center's, which is why a mesh shows which axes cross it.
"""

import functools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from meshlayout._render import ranges_text


UNITS = {"slice_index": "slices", "process_index": "processes"}
"""What devices are grouped by: an attribute of theirs, and its groups' name."""

# Of more processes, only the first and the last one are listed.
_MOST_LISTED = 8


def group_index(device: Any, attribute: str) -> int:
    """Returns the group of a device; 0 if it does not say, as on one host."""
    return getattr(device, attribute, None) or 0


def device_ids(devices: Iterable[Any], attribute: str) -> dict[int, list[int]]:
    """Returns the ids of the devices of each group, by its index."""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for device in devices:
        groups[group_index(device, attribute)].append(int(device.id))
    return {index: sorted(groups[index]) for index in sorted(groups)}


@functools.lru_cache(maxsize=1024)
def axes_across(mesh: jax.sharding.Mesh, attribute: str) -> tuple[tuple[str, ...], int]:
    """Returns the axes along which the group changes, and the number of groups.

    Cached, as messages show meshes, and a mesh may have thousands of devices.
    """
    indices = [group_index(device, attribute) for device in mesh.devices.flat]
    grid = np.array(indices).reshape(mesh.devices.shape)
    names = tuple(
        name
        for axis, name in enumerate(mesh.axis_names)
        if (grid != grid.take([0], axis)).any()
    )
    return names, len(set(indices))


def process_notes(mesh: jax.sharding.Mesh) -> list[str]:
    """Returns a line on which devices each process has; none for one process."""
    groups = device_ids(mesh.devices.flat, "process_index")
    if len(groups) == 1:
        return []
    listed = [f"process {index} {ranges_text(ids)}" for index, ids in groups.items()]
    if len(listed) > _MOST_LISTED:
        listed = [listed[0], "...", listed[-1]]
    return [f"Devices by process: {'; '.join(listed)}."]
