"""`create_mesh`: from names, sizes and devices to a mesh.

Where devices are connected by networks of different speed, their order decides how fast
a program runs, and nothing else shows it. JAX's helpers know the networks of TPUs; what
is added here is by which axes the slow network is crossed. `jax.make_mesh` refuses
several slices, such as the GPUs of two hosts, so that a program which runs on one of
them would not run on two: here, the first axes cross unless `dcn` says otherwise.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from meshlayout import _jax
from meshlayout._axes import (
    AxisTypesLike,
    fill_sizes,
    fitting_sizes,
    parse_axes,
    parse_axis_types,
    parse_devices,
    sizes_text,
)
from meshlayout._checks import shown
from meshlayout._device_groups import UNITS, device_ids
from meshlayout.errors import MeshError, did_you_mean
from meshlayout.mesh import Mesh


def create_mesh(
    axes: Mapping[str, int] | Iterable[tuple[str, int]] | str | None = None,
    /,
    *,
    devices: Sequence[_jax.Device | str] | np.ndarray[Any, Any] | None = None,
    dcn: str | Iterable[str] | None = None,
    axis_types: AxisTypesLike | None = None,
    **axis_sizes: int,
) -> Mesh:
    """Creates a mesh from names and sizes of axes.

    Use this at the start of a program; on several processes, after `ml.initialize`.
    Without `devices`, all devices of all processes are used and JAX chooses their
    order. It keeps those of a process together, the last axis running fastest; on TPU,
    it follows the network of the chips. Of several slices, the first axes run from one
    to the next, so write the axis with the least communication first. Given devices
    keep their order.

    Names are free, but without a layout batches are sharded over the axes called
    `batch`, `data`, `replica`, `fsdp`, `dp`, `ddp` or `data_parallel` alone.

    With `dcn`, the named axes cross the slow network (the data center's), and every
    other axis stays inside one slice, or inside one process where all devices are in
    one slice. The same program runs on a laptop: with one process, there is no such
    network, and `dcn` has no effect.

    Args:
        axes: Sizes by name, a list of (name, size), or text such as
            `"batch=2,model=4"`. One size may be -1, for whatever is left. If omitted,
            the mesh has one axis `batch` over all devices.
        devices: The devices, as objects or as text such as `"CPU:3"`.
        dcn: The axis or axes that cross the slow network. Their sizes must together
            make the number of slices or processes, or a multiple of it: a `batch` of
            16 over 2 slices of 8 crosses once. JAX then also orders given devices.
        axis_types: `"auto"` (the default), `"explicit"`, `"manual"` or a
            `jax.sharding.AxisType`, for all axes, one by one, or by name. Axes that
            a mapping does not name are Auto.
        **axis_sizes: The axes as keywords, instead of `axes`.

    Raises:
        MeshError: If names or sizes are malformed, their product is not the number of
            devices, the axes of `dcn` cannot be divided among slices or processes, or
            the devices are unknown, repeated or of different kinds.
        ClusterError: If `meshlayout.launch` started this process among others, and it
            has not called `initialize`.

    Example:
        >>> create_mesh({"batch": 2, "model": -1})
        Mesh(batch=2, model=4)
        >>> create_mesh("batch=2,model=2", devices=["CPU:0", "CPU:1", "CPU:2", "CPU:3"])
        Mesh(batch=2, model=2)
        >>> create_mesh({"replica": 2, "fsdp": 4}, dcn="replica")  # here, one process
        Mesh(replica=2, fsdp=4)
    """
    for name, size in axis_sizes.items():
        # `device=[...]` would otherwise be an axis called `device`.
        hint = did_you_mean(name, ("devices", "axis_types", "dcn"))
        if hint and not isinstance(size, (int, np.integer)):
            text = shown(size)
            msg = (
                f"create_mesh has no argument {name!r}, and {text} is not an axis size."
                f"{hint}"
            )
            raise MeshError(msg)
    if axes is not None and axis_sizes:
        msg = (
            "give the axes once: as the first argument or as keywords "
            f"({', '.join(axis_sizes)}), not both."
        )
        raise MeshError(msg)
    pairs = parse_axes(axis_sizes if axes is None else axes)
    _jax.check_joined("create_mesh")
    chosen = jax.devices() if devices is None else parse_devices(devices)
    if not pairs:
        if axes is not None:
            msg = "a mesh needs at least one axis: create_mesh({'batch': 8})."
            raise MeshError(msg)
        pairs = [("batch", len(chosen))]
    names = [name for name, _ in pairs]
    types = parse_axis_types(axis_types, names)
    slow_axes = _parse_dcn(dcn, names)
    sizes = fill_sizes(pairs, len(chosen), given=devices is not None)
    if devices is None or slow_axes is not None:
        grid = _device_grid(dict(zip(names, sizes, strict=True)), chosen, slow_axes)
    else:
        grid = np.array(chosen, dtype=object).reshape(sizes)
    return Mesh(jax.sharding.Mesh(grid, tuple(names), axis_types=types))


def _parse_dcn(dcn: Any, names: Sequence[str]) -> tuple[str, ...] | None:
    """Returns the names of the axes that a user wants to cross the slow network."""
    if dcn is None:
        return None
    is_one = isinstance(dcn, (str, Mapping)) or not isinstance(dcn, Iterable)
    axes: tuple[Any, ...] = (dcn,) if is_one else tuple(dcn)
    for axis in axes:
        if not isinstance(axis, str) or isinstance(dcn, Mapping):
            msg = f"dcn must be the name of an axis or several, got {shown(dcn)}."
            raise MeshError(msg)
        if axis not in names:
            msg = f"dcn names the axis {axis!r}, which the mesh lacks."
            raise MeshError(msg + did_you_mean(axis, names))
    if len(set(axes)) < len(axes):
        repeated = next(axis for i, axis in enumerate(axes) if axis in axes[:i])
        msg = f"dcn names the axis {repeated!r} twice."
        raise MeshError(msg)
    return axes


def _device_grid(
    sizes: Mapping[str, int], devices: Sequence[Any], slow_axes: Sequence[str] | None
) -> np.ndarray[Any, Any]:
    """Returns the devices in the order that JAX chooses for their networks.

    Args:
        sizes: The size of each axis.
        devices: The devices.
        slow_axes: The axes that cross the slow network; None for the first ones, where
            there is a slow network.

    Raises:
        MeshError: If the sizes cannot be divided so, or JAX finds no order.
    """
    attribute = "slice_index"
    groups = device_ids(devices, attribute)
    if len(groups) == 1 and slow_axes is not None:
        attribute = "process_index"
        groups = device_ids(devices, attribute)
    count, unit = len(groups), UNITS[attribute]
    if len({len(ids) for ids in groups.values()}) > 1:
        listed = ", ".join(f"{len(ids)} in {index}" for index, ids in groups.items())
        msg = (
            f"the {count} {unit} have different numbers of devices ({listed}), so that "
            "no axis can cross from one to the next. Give devices= with the same "
            "number of each."
        )
        raise MeshError(msg)
    shares, left = dict.fromkeys(sizes, 1), count
    for axis in sizes if slow_axes is None else slow_axes:
        shares[axis] = math.gcd(sizes[axis], left)
        left //= shares[axis]
    if slow_axes is not None and count > 1:
        _check_shares(sizes, shares, slow_axes, f"{count} {unit}", count)
    inside = [
        size // share
        for size, share in zip(sizes.values(), shares.values(), strict=True)
    ]
    by_process = attribute == "process_index"
    try:
        return _jax.device_grid(
            devices,
            inside,
            list(shares.values()),
            by_process=by_process,
        )
    except (NotImplementedError, ValueError, AssertionError) as error:
        shape, text = sizes_text(sizes.items()), str(error).rstrip(".")
        msg = (
            f"JAX finds no order of the devices for {shape}: {text}. "
            "Choose other sizes, or an order of your own with devices=."
        )
        raise MeshError(msg) from error


def _check_shares(
    sizes: Mapping[str, int],
    shares: Mapping[str, int],
    slow_axes: Sequence[str],
    units: str,
    count: int,
) -> None:
    """Raises MeshError unless each axis in `dcn` crosses, and no other one needs to.

    Args:
        sizes: The size of each axis.
        shares: How many slices or processes each axis crosses.
        slow_axes: The axes that are to cross.
        units: What they cross, with its number.
        count: The number.
    """
    if not slow_axes:
        msg = (
            f"dcn names no axis, and the devices are of {units}: name the axes that "
            f"cross from one to the next, as dcn={next(iter(sizes))!r}."
        )
        raise MeshError(msg)
    slow = [(axis, sizes[axis]) for axis in slow_axes]
    if math.prod(shares.values()) < count:
        fast = [(axis, size) for axis, size in sizes.items() if axis not in slow_axes]
        fits = dict.fromkeys(sizes, 1)
        fits[slow_axes[0]] = count
        rest = fitting_sizes(fast or slow[:1], math.prod(sizes.values()) // count)
        for axis, size in rest:
            fits[axis] *= size
        msg = (
            f"the axes in dcn=, {sizes_text(slow)}, cannot be divided among the "
            f"{units} of the devices: their sizes must together make {count}, or a "
            f"multiple of it. A shape that fits: {sizes_text(fits.items())}. Or leave "
            "out dcn=, if the network between them is fast."
        )
        raise MeshError(msg)
    for axis, size in slow:
        if size > 1 and shares[axis] == 1:
            crossing = [(name, n) for name, n in shares.items() if n > 1]
            msg = (
                f"dcn names the axis {axis!r}, which crosses nothing: "
                f"{sizes_text(crossing)} already makes the {units} of the devices. "
                "Leave it out of dcn=."
            )
            raise MeshError(msg)
