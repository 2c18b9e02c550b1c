"""Parses and checks what a user writes for the axes and devices of a mesh.

All errors say what would be right: the sizes that fit, the devices that exist. They are
most people's first contact with a mesh, on a machine with other devices than expected.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType

from meshlayout._checks import shown
from meshlayout._render import ranges_text
from meshlayout.errors import MeshError, did_you_mean


AxisTypesLike: TypeAlias = (
    AxisType | str | Mapping[str, AxisType | str] | Sequence[AxisType | str]
)
"""What a user may write for axis types."""

AXIS_TYPES = {kind.name.lower(): kind for kind in AxisType}


def parse_axes(axes: Any) -> list[tuple[str, int]]:
    """Returns (name, size) pairs; one of the sizes may still be -1."""
    if isinstance(axes, str):
        axes = [_parse_axis_text(part, axes) for part in axes.split(",")]
    elif isinstance(axes, Mapping):
        axes = list(axes.items())
    try:
        pairs = [(name, size) for name, size in axes]
    except (TypeError, ValueError):
        msg = (
            f"{shown(axes)} does not give names and sizes of axes. Write {{'batch': "
            "2, 'model': 4}, [('batch', 2), ('model', 4)] or 'batch=2,model=4'."
        )
        raise MeshError(msg) from None
    check_names([name for name, _ in pairs])
    for name, size in pairs:
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
            msg = (
                f"axis {name!r} has size {shown(size)}; a size must be an integer, the "
                "number of devices."
            )
            raise MeshError(msg)
        if size < 1 and size != -1:
            msg = (
                f"axis {name!r} has size {size}; a size must be positive, or -1 for "
                "whatever is left."
            )
            raise MeshError(msg)
    open_axes = [name for name, size in pairs if size == -1]
    if len(open_axes) > 1:
        msg = (
            f"axes {', '.join(map(repr, open_axes))} all have size -1; only one axis "
            "can take whatever is left."
        )
        raise MeshError(msg)
    return [(name, int(size)) for name, size in pairs]


def _parse_axis_text(part: str, text: str) -> tuple[str, int]:
    name, equals, size = (piece.strip() for piece in part.partition("="))
    try:
        if not equals:
            raise ValueError
        return name, int(size)
    except ValueError:
        msg = (
            f"{part.strip()!r} in {text!r} is not of the form NAME=SIZE, as in "
            "'batch=2,model=4'."
        )
        raise MeshError(msg) from None


def check_names(names: Sequence[Any]) -> None:
    """Raises MeshError unless names are distinct strings that text can separate."""
    for name in names:
        if not isinstance(name, str):
            msg = f"axis name {shown(name)} is not a string, such as 'batch'."
            raise MeshError(msg)
        if not name or set(name) & set(",=|") or name != name.strip():
            msg = (
                f"axis name {name!r} is empty, begins or ends with a space, or "
                "contains one of , = | (which separate axes in text). Use a plain "
                "name, such as 'batch'."
            )
            raise MeshError(msg)
    repeated = [name for index, name in enumerate(names) if name in names[:index]]
    if repeated:
        msg = f"two axes are named {repeated[0]!r}; the names of axes must differ."
        raise MeshError(msg)


def fill_sizes(pairs: list[tuple[str, int]], count: int, *, given: bool) -> list[int]:
    """Returns the sizes with -1 filled in.

    Args:
        pairs: Names and sizes.
        count: The number of devices.
        given: Whether the user chose the devices, for messages.

    Raises:
        MeshError: If the product of the sizes is not `count`.
    """
    sizes = [size for _, size in pairs]
    fixed = math.prod(size for size in sizes if size != -1)
    text = sizes_text(pairs)
    have = f"there {'is' if count == 1 else 'are'} {count}"
    if given:
        have = f"{count} {'was' if count == 1 else 'were'} given"
    if -1 in sizes:
        if count % fixed:
            msg = (
                f"mesh {text} needs a multiple of {fixed} devices, but {have}. "
                f"{_fitting(pairs, count)}"
            )
            raise MeshError(msg)
        return [count // fixed if size == -1 else size for size in sizes]
    if fixed != count:
        subset = f", or give {fixed} of them: devices=jax.devices()[:{fixed}]"
        fitting = _fitting(pairs, count).rstrip(".")
        msg = (
            f"mesh {text} needs {fixed} devices, but {have}. {fitting}"
            f"{subset * (not given and fixed < count)}."
        )
        raise MeshError(msg)
    return sizes


def _fitting(pairs: list[tuple[str, int]], count: int) -> str:
    return f"A shape that fits: {sizes_text(fitting_sizes(pairs, count))}."


def fitting_sizes(
    pairs: Sequence[tuple[str, int]], count: int
) -> list[tuple[str, int]]:
    """Returns a shape of `count` devices that keeps as many of the sizes as fit.

    The first axis takes the rest: it is usually the batch.
    """
    left = count
    fitting: list[tuple[str, int]] = []
    for name, size in pairs[1:][::-1]:
        divisor = math.gcd(left, size) if size != -1 else 1
        left //= divisor
        fitting.append((name, divisor))
    return [(pairs[0][0], left), *fitting[::-1]]


def sizes_text(pairs: Iterable[tuple[str, int]]) -> str:
    """Returns names and sizes as messages show them: `"(batch=2, model=4)"`."""
    return f"({', '.join(f'{name}={size}' for name, size in pairs)})"


def parse_axis_types(
    types: AxisTypesLike | None, names: list[str]
) -> tuple[AxisType, ...]:
    """Returns one axis type per name, from what a user may write."""
    if types is None or isinstance(types, (AxisType, str)):
        kind = AxisType.Auto if types is None else _parse_axis_type(types)
        return (kind,) * len(names)
    if isinstance(types, Mapping):
        for name in types:
            if name not in names:
                msg = f"axis_types names the axis {name!r}, which the mesh lacks."
                raise MeshError(msg + did_you_mean(name, names))
        return tuple(_parse_axis_type(types.get(n, AxisType.Auto)) for n in names)
    if not isinstance(types, Sequence):
        msg = (
            f"axis_types is {shown(types)}; give an axis type, a list with one per "
            "axis, or a dict by axis name."
        )
        raise MeshError(msg)
    if len(types) != len(names):
        msg = (
            f"axis_types has {len(types)} entries for {len(names)} axes "
            f"({', '.join(names)}); give one per axis, or one for all."
        )
        raise MeshError(msg)
    return tuple(_parse_axis_type(kind) for kind in types)


def _parse_axis_type(kind: object) -> AxisType:
    if isinstance(kind, AxisType):
        return kind
    if not isinstance(kind, str) or kind.lower() not in AXIS_TYPES:
        msg = (
            f"{kind!r} is not an axis type: one of {', '.join(map(repr, AXIS_TYPES))}."
            f"{did_you_mean(kind, AXIS_TYPES)}"
        )
        raise MeshError(msg)
    return AXIS_TYPES[kind.lower()]


def parse_devices(devices: Any) -> list[Any]:
    """Returns devices from objects and texts such as `"CPU:3"`, in their order."""
    if isinstance(devices, str):
        msg = (
            f"devices must be a list, got the string {devices!r}. Write [{devices!r}]."
        )
        raise MeshError(msg)
    chosen: list[Any] = []
    for device in np.asarray(devices, dtype=object).flat:
        if not isinstance(device, str):
            chosen.append(device)
            continue
        platform, _, number = device.strip().lower().partition(":")
        if not platform or not number.isdecimal():
            msg = f"device {device!r} is not of the form PLATFORM:ID, as in 'CPU:3'."
            raise MeshError(msg)
        chosen += devices_by_id(platform, [int(number)])
    if not chosen:
        msg = "devices is empty; a mesh needs at least one device."
        raise MeshError(msg)
    for device in chosen:
        # Not by class: tests and topologies have devices of other classes.
        if not hasattr(device, "platform"):
            msg = f"{shown(device)} is not a device; use those of jax.devices()."
            raise MeshError(msg)
    check_devices(chosen)
    return chosen


def check_devices(devices: Sequence[Any]) -> None:
    """Raises MeshError if the devices cannot form one mesh."""
    if len(set(devices)) < len(devices):
        repeated = next(
            device for index, device in enumerate(devices) if device in devices[:index]
        )
        msg = (
            f"device {repeated.platform}:{repeated.id} is given twice; a mesh has each "
            "device once."
        )
        raise MeshError(msg)
    platforms = sorted({device.platform for device in devices})
    if len(platforms) > 1:
        msg = (
            f"the devices are of several platforms ({', '.join(platforms)}); those of "
            "a mesh must be of one."
        )
        raise MeshError(msg)


def devices_by_id(platform: str, ids: Sequence[int]) -> list[Any]:
    """Returns the devices of a platform with these ids."""
    try:
        known = {device.id: device for device in jax.devices(platform or "none")}
    except RuntimeError:
        here = sorted({device.platform for device in jax.devices()})
        msg = f"there are no {platform!r} devices here, only {', '.join(here)} devices."
        raise MeshError(msg) from None
    missing = [number for number in ids if number not in known]
    if missing:
        msg = (
            f"device {platform}:{missing[0]} does not exist here, only {platform}:"
            f"{ranges_text(sorted(known))}."
        )
        raise MeshError(msg)
    return [known[number] for number in ids]


def parse_mesh(
    text: str,
) -> tuple[tuple[str, ...], list[int], tuple[AxisType, ...], list[Any]]:
    """Returns names, sizes, axis types and devices from the text of a mesh."""
    try:
        axes, types, devices = text.rsplit("|", 2)
        platform, ids = devices.split(":")
        pairs = [pair.rsplit("=", 1) for pair in axes.split(",")]
        names = tuple(name for name, _ in pairs)
        sizes = [int(size) for _, size in pairs]
        kinds = tuple(AXIS_TYPES[kind] for kind in types.split(","))
        if len(kinds) != len(names):
            raise ValueError
        runs = _parse_ranges(ids)
    except (ValueError, KeyError, AttributeError, TypeError):
        msg = f"{shown(text)} is not a mesh; such text comes from mesh.to_string()."
        raise MeshError(msg) from None
    # Counted before the ranges are expanded: a typo may name billions.
    count = sum(run.stop - run.start for run in runs)
    if min(sizes) < 1 or math.prod(sizes) != count:
        msg = f"{shown(text)} is not a mesh: its sizes do not make {count} devices."
        raise MeshError(msg)
    check_names(names)
    chosen = devices_by_id(platform, [number for run in runs for number in run])
    check_devices(chosen)
    return names, sizes, kinds, chosen


def _parse_ranges(text: str) -> list[range]:
    """Returns the ranges of numbers that `ranges_text` wrote."""
    runs: list[range] = []
    for run in text.split(","):
        first, dash, last = run.partition("-")
        runs.append(range(int(first), int(last if dash else first) + 1))
        if not runs[-1]:
            raise ValueError
    return runs
