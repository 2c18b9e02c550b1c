"""A named grid of devices: `Mesh`, `create_mesh`, and `virtual_devices` to try it.

Where devices are connected by networks of different speed, their order decides how fast
a program runs, and nothing else shows it. JAX's helpers know the networks of TPUs; what
is added here is by which axes the slow network is crossed. `jax.make_mesh` refuses
several slices, such as the GPUs of two hosts, so that a program which runs on one of
them would not run on two: here, the first axes cross unless `dcn` says otherwise.
"""

import itertools
import logging
import math
import operator
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType

import meshlayout
from meshlayout import _jax, _render
from meshlayout._checks import WithReflexes, count, shown, user_call
from meshlayout.errors import MeshError, did_you_mean, warn


if TYPE_CHECKING:
    from meshlayout.layout import Layout

AxisTypesLike: TypeAlias = AxisType | str | Sequence[AxisType | str]
"""What a user may write for axis types."""

_log = logging.getLogger(__name__)

# What devices are grouped by: an attribute of theirs, and its groups' name. Inside a
# slice the network is fast: that of a TPU pod slice, or NVLink inside a host.
_UNITS = {"slice_index": "slices", "process_index": "processes"}

# Arguments of other libraries' functions that make meshes.
_NOT_AXES = {"mesh_dims", "mesh_shape", "axis_names", "axis_shapes", "shape", "names"}
_NOT_AXES |= {"mesh_dim_names", "device_type", "num_devices", "mesh", "axes"}


@dataclass(frozen=True, init=False, repr=False)
class Mesh(WithReflexes):
    """A named grid of devices.

    An immutable value around a `jax.sharding.Mesh`; `create_mesh` makes one. Meshes of
    the same devices in the same places, axis names and axis types are equal.

    Args:
        mesh: The `jax.sharding.Mesh` to wrap, or a `Mesh`.

    Attributes:
        jax_mesh: The `jax.sharding.Mesh`, for any JAX function that takes one.
        shape: The size of each axis by name, in order; read-only.

    Raises:
        MeshError: If it is neither, has no devices, or an axis name is not plain.

    Examples:
        >>> mesh = create_mesh({"batch": 2, "model": 4})
        >>> mesh
        Mesh(batch=2, model=4)
        >>> mesh.coords(5)
        (1, 1)
    """

    jax_mesh: jax.sharding.Mesh
    shape: Mapping[str, int] = field(compare=False)

    def __init__(self, mesh: "Mesh | jax.sharding.Mesh") -> None:
        mesh = getattr(mesh, "jax_mesh", mesh)
        if not isinstance(mesh, jax.sharding.Mesh) or not mesh.size:
            raise MeshError(
                "expected a Mesh or a jax.sharding.Mesh with devices, got "
                f"{shown(mesh)}. Make one with create_mesh({{'batch': 8}})."
            )
        for name in mesh.axis_names:
            pattern = r"\s*[^\s,=|][^,=|]*"
            if not isinstance(name, str) or not re.fullmatch(pattern, name):
                msg = f"axis name {shown(name)} must be a string without any of , = |."
                raise MeshError(f"{msg} Use a name such as 'batch'.")
        _jax.check_joined("Mesh")
        self.__dict__.update(jax_mesh=mesh, shape=MappingProxyType(dict(mesh.shape)))

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of the axes, major first."""
        return tuple(self.shape)

    @property
    def axis_types(self) -> tuple[AxisType, ...]:
        """One `jax.sharding.AxisType` per axis."""
        return self.jax_mesh.axis_types

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.shape.values())

    @property
    def devices(self) -> np.ndarray[Any, Any]:
        """The devices, in an array with one dim per axis."""
        return self.jax_mesh.devices

    @property
    def platform(self) -> str:
        """The platform of the devices: `"cpu"`, `"gpu"` or `"tpu"`."""
        return self.devices.flat[0].platform

    @property
    def local_devices(self) -> list[_jax.Device]:
        """The devices of this process, in mesh order."""
        return list(self.jax_mesh.local_devices)

    def __enter__(self) -> NoReturn:
        raise MeshError("write `with jax.set_mesh(mesh.jax_mesh):`, not `with mesh:`.")

    __exit__ = __enter__  # which `with` looks up first

    def __getitem__(self, axis: object) -> NoReturn:
        fix = f"write mesh.shape[{axis!r}] for the size of an axis"
        raise MeshError(f"{fix}. There is no submesh: layouts name axes.")

    def __contains__(self, axis: object) -> bool:
        return axis in self.axis_names

    def axis_size(self, axis: str | Sequence[str]) -> int:
        """Returns the number of devices along one axis, or along several together.

        Examples:
            >>> mesh = create_mesh({"batch": 2, "model": 4})
            >>> mesh.axis_size("model"), mesh.axis_size(("batch", "model"))
            (4, 8)
        """
        names: Any = axis if isinstance(axis, (tuple, list)) else [axis]
        for name in names:
            if name not in self.axis_names:
                hint = did_you_mean(name, self.shape)
                raise MeshError(f"{self!r} has no axis {shown(name)}.{hint}")
        return math.prod(self.shape[name] for name in names)

    def coords(self, device: _jax.Device | int) -> tuple[int, ...]:
        """Returns the coordinates of a device, or of the one with this index."""
        devices = [*self.devices.flat]
        index = devices.index(device) if device in devices else device
        if not isinstance(index, (int, np.integer)) or not 0 <= index < self.size:
            msg = f"{shown(device)} is not a device of {self!r}, nor the index of one."
            raise MeshError(f"{msg} Its devices are {self._devices_text()}.")
        return tuple(map(int, np.unravel_index(index, self.devices.shape)))

    def layout(self, *specs: Any, memory_kind: str | None = None) -> "Layout":
        """Returns `Layout(specs, self)`: the short form, one argument per dim."""
        if len(specs) == 1 and isinstance(specs[0], jax.sharding.PartitionSpec):
            specs = tuple(specs[0])
        # Through the package: the module of layouts is above this one.
        return meshlayout.Layout(specs, self, memory_kind=memory_kind)

    # DTensor's names, for code that comes from TensorFlow; not used in the library.

    dim_names = axis_names
    dim_size = axis_size
    contains_dim = __contains__

    def device_type(self) -> str:
        """Returns `platform`, in capitals as DTensor writes it."""
        return self.platform.upper()

    def global_device_ids(self) -> list[int]:
        """Returns the ids of all devices, in mesh order."""
        return [int(device.id) for device in self.devices.flat]

    def min_global_device_id(self) -> int:
        """Returns the smallest device id of the mesh."""
        return min(self.global_device_ids())

    def num_local_devices(self) -> int:
        """Returns how many of the devices belong to this process."""
        return len(self.local_devices)

    def local_device_ids(self) -> list[int]:
        """Returns the ids of the devices of this process, in mesh order."""
        return [int(device.id) for device in self.local_devices]

    def local_device_locations(self) -> list[dict[str, int]]:
        """Returns the coordinates of this process's devices, by axis."""
        pairs = zip(self.unravel_index(), self.devices.flat, strict=True)
        return [place for place, device in pairs if device in self.local_devices]

    @property
    def strides(self) -> tuple[int, ...]:
        """The distance in the flattened mesh between neighbors along each axis."""
        return tuple(stride // 8 for stride in np.empty(self.devices.shape).strides)

    def unravel_index(self) -> list[dict[str, int]]:
        """Returns the coordinates of every device by axis, in mesh order."""
        places = np.ndindex(*self.shape.values())
        return [dict(zip(self.shape, place, strict=True)) for place in places]

    def to_string(self) -> str:
        """Returns text such as `"batch=8|auto|cpu:0-7"`, which `from_string` reads."""
        axes = ",".join(f"{name}={size}" for name, size in self.shape.items())
        types = ",".join(kind.name.lower() for kind in self.axis_types)
        return f"{axes}|{types}|{self._devices_text()}"

    @classmethod
    def from_string(cls, text: str) -> "Mesh":
        """Returns the mesh that `to_string` wrote, on the devices with the same ids."""
        try:
            axes, types, places = text.split("|")
            platform, runs = places.split(":")
            ends = [[int(end) for end in run.split("-")] for run in runs.split(",")]
        except (ValueError, AttributeError):
            msg = f"{shown(text)} is not a mesh; such text comes from mesh.to_string()."
            raise MeshError(msg) from None
        ids = [number for run in ends for number in range(run[0], run[-1] + 1)]
        devices = _devices_by_id(platform, ids)
        return create_mesh(axes, devices=devices, axis_types=types.split(","))

    def __repr__(self) -> str:
        parts = [sizes_text(self.shape)]
        for attribute, unit in _UNITS.items():
            names, count = _axes_across(self, attribute)
            if names:
                parts.append(f"{', '.join(names)} across {count} {unit}")
        return f"Mesh({'; '.join(parts)})"

    def _repr_html_(self) -> str:
        sizes, ids = [*self.shape.values()], self.global_device_ids()
        picture = _render.mesh_picture(self.axis_names, sizes, ids)
        devices = f"{self.platform.upper()} device{'s' * (self.size != 1)}"
        return _render.picture_html(f"{self!r}: {self.size} {devices}", picture)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> "Mesh":
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[Any, ...]:
        return Mesh.from_string, (self.to_string(),)

    def _devices_text(self) -> str:
        return f"{self.platform}:{_render.ranges_text(self.global_device_ids())}"


def as_mesh(value: Any) -> Mesh:
    """Returns a user's mesh as a `Mesh`, or raises MeshError."""
    return value if isinstance(value, Mesh) else Mesh(value)


def auto_mesh(value: Any) -> Mesh:
    """Returns a user's mesh as a `Mesh`; a JAX mesh, on Auto axes.

    `jax.make_mesh` makes Explicit ones, on which a model has to name its layouts.
    """
    if isinstance(value, jax.sharding.Mesh):
        value = jax.sharding.Mesh(value.devices, value.axis_names)
    return as_mesh(value)


def current_mesh() -> Mesh | None:
    """Returns the mesh of `jax.set_mesh`, or None."""
    mesh = _jax.concrete_mesh()
    return None if mesh is None else Mesh(mesh)


@user_call
def create_mesh(
    axes: Mapping[str, int] | Iterable[tuple[str, int]] | str | None = None,
    /,
    *,
    devices: Sequence[_jax.Device | str] | np.ndarray[Any, Any] | None = None,
    dcn: str | Sequence[str] | None = None,
    axis_types: AxisTypesLike | None = None,
    **axis_sizes: int,
) -> Mesh:
    """Creates a mesh from names and sizes of axes.

    Use this at the start of a program; on several processes, after `ml.initialize`.
    Without `devices`, all devices of all processes are used and JAX chooses their
    order: those of a process together, the last axis running fastest, and on TPU along
    the network of the chips. With several slices, the first axes run from slice to
    slice, so put the axis that communicates least first.

    Names are free, but without a layout batches are sharded over the axes called
    `batch`, `data`, `replica`, `fsdp`, `dp`, `ddp` or `data_parallel` alone.

    With `dcn`, only the named axes cross the slow network (the data center's). Others
    stay in a slice; if there is only one, in a process. On one process it does nothing.

    Args:
        axes: Sizes by name, a list of (name, size), or text such as
            `"batch=2,model=4"`. One size may be -1, for whatever is left. If omitted,
            the mesh has one axis `batch` over all devices.
        devices: The devices, as objects or as text such as `"CPU:3"`, in order.
        dcn: The axis or axes that cross the slow network. The product of their sizes
            must be a multiple of the number of slices or processes: a `batch` of 16
            over 2 slices of 8 crosses once. JAX then orders `devices`, too.
        axis_types: `"auto"` (the default), `"explicit"`, `"manual"` or a
            `jax.sharding.AxisType`, for all axes or one by one.
        **axis_sizes: The axes as keywords, instead of `axes`.

    Raises:
        MeshError: If names or sizes are malformed or do not make the devices, the axes
            of `dcn` cannot be divided among slices, or a device is unknown.

    Examples:
        >>> create_mesh({"batch": 2, "model": -1})
        Mesh(batch=2, model=4)
        >>> create_mesh({"replica": 2, "fsdp": 4}, dcn="replica")  # here, one process
        Mesh(replica=2, fsdp=4)
    """
    if axis_sizes and (axes is not None or _NOT_AXES.intersection(axis_sizes)):
        got = f"{shown(axes)} and " * (axes is not None) + ", ".join(axis_sizes)
        msg = f"create_mesh got {got}=. Give each axis once, with its size: "
        msg += "create_mesh({'batch': 2, 'model': 4}). Options are devices, dcn and"
        raise MeshError(f"{msg} axis_types.")
    _jax.check_joined("create_mesh")
    members = jax.devices() if devices is None else parse_devices(devices)
    axes = _parse_axes(axis_sizes or {"batch": -1} if axes is None else axes)
    sizes = _fill_sizes(axes, len(members))
    if devices is None or dcn is not None:
        grid = _device_grid(sizes, members, [dcn] if isinstance(dcn, str) else dcn)
    else:
        grid = np.array(members, dtype=object).reshape([*sizes.values()])
    types = _parse_axis_types(axis_types, len(sizes))
    return Mesh(jax.sharding.Mesh(grid, tuple(sizes), axis_types=types))


def _parse_axes(axes: Any) -> dict[str, int]:
    """Returns sizes by name; one of the sizes may still be -1."""
    try:
        if isinstance(axes, str):
            pairs = [part.rsplit("=", 1) for part in axes.split(",")]
            pairs = [(name.strip(), int(size)) for name, size in pairs]
        else:
            pairs = list(axes.items() if isinstance(axes, Mapping) else axes)
        sizes = {name: operator.index(size) for name, size in pairs}
    except (TypeError, ValueError):
        sizes, pairs = {}, []
    counts = [*sizes.values()]
    is_bad = min(counts, default=0) < -1 or 0 in counts or counts.count(-1) > 1
    if is_bad or not sizes or len(sizes) < len(pairs):
        raise MeshError(
            f"{shown(axes)} does not give each axis name once with a size: a positive "
            "integer, or for one axis -1, for whatever is left. Write {'batch': 2, "
            "'model': 4}, [('batch', 2), ('model', -1)] or 'batch=2,model=4'."
        )
    return sizes


def _fill_sizes(axes: Mapping[str, int], count: int) -> dict[str, int]:
    """Returns sizes that make a number of devices, with -1 filled in."""
    fixed = math.prod(size for size in axes.values() if size != -1)
    is_open = -1 in axes.values()
    if not count % fixed and (is_open or fixed == count):
        return {x: count // fixed if n == -1 else n for x, n in axes.items()}
    # A shape that fits: the first axis, which is mostly the batch, takes what is left.
    fitting, num_left = dict(axes), count
    for name in [*axes][:0:-1]:
        fitting[name] = math.gcd(num_left, max(axes[name], 1))
        num_left //= fitting[name]
    fitting[next(iter(axes))] = num_left
    need = f"a multiple of {fixed}" if is_open else str(fixed)
    subset = f", or give {fixed} of them: devices=jax.devices()[:{fixed}]"
    are = f"there {'is' if count == 1 else 'are'} {count}"
    msg = f"mesh ({sizes_text(axes)}) needs {need} devices, but {are}. A shape that"
    subset *= not is_open and fixed < count
    raise MeshError(f"{msg} fits: ({sizes_text(fitting)}){subset}.")


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Returns names and sizes as messages show them: `"batch=2, model=4"`."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _parse_axis_types(types: AxisTypesLike | None, count: int) -> tuple[AxisType, ...]:
    names: Any = types if isinstance(types, (list, tuple)) else [types] * count
    by_name: Any = {kind.name.lower(): kind for kind in AxisType}
    by_name |= {kind: kind for kind in AxisType} | {None: AxisType.Auto}
    kinds = [by_name.get(x.lower() if isinstance(x, str) else x) for x in names]
    if len(kinds) != count or None in kinds:
        msg = f"axis_types={types!r} must be 'auto', 'explicit' or 'manual'."
        raise MeshError(f"{msg} Or give a list, with one of them for each axis.")
    return tuple(kinds)


def parse_devices(devices: Any) -> list[Any]:
    """Returns devices from objects and texts such as `"CPU:3"`, in their order."""
    parsed: list[Any] = []
    for device in np.asarray(devices, dtype=object).flat:
        # TensorFlow writes "/device:CPU:3".
        name = device.strip().rpartition("/")[2] if isinstance(device, str) else ""
        if re.fullmatch(r"\w+:[0-9]+", name := name.removeprefix("device:")):
            platform, number = name.lower().split(":")
            parsed += _devices_by_id(platform, [int(number)])
        elif hasattr(device, "platform"):  # also described ones, of other classes
            parsed.append(device)
        else:
            hint = "Give a list, such as jax.devices()[:4], or texts such as 'CPU:3'."
            raise MeshError(f"{shown(device)} is not a device. {hint}")
    return parsed


def _devices_by_id(platform: str, ids: Sequence[int]) -> list[Any]:
    try:
        by_id = {device.id: device for device in jax.devices(platform or "none")}
        return [by_id[number] for number in ids]
    except (RuntimeError, KeyError):
        msg = f"a device of {platform}:{_render.ranges_text(ids)} does not exist here, "
        raise MeshError(f"{msg}only {create_mesh()._devices_text()}.") from None


# Slices and processes.


def _axes_across(mesh: Mesh, attribute: str) -> tuple[tuple[str, ...], int]:
    """Returns the axes along which the group changes, and the number of groups."""
    grid = np.reshape(_groups(mesh.devices.flat, attribute), mesh.devices.shape)
    changes = [(grid != grid.take([0], dim)).any() for dim in range(grid.ndim)]
    return tuple(itertools.compress(mesh.axis_names, changes)), len(np.unique(grid))


def _device_grid(
    sizes: Mapping[str, int], devices: Sequence[Any], slow_axes: Sequence[str] | None
) -> np.ndarray[Any, Any]:
    """Returns the devices in the order that JAX chooses for their networks.

    `slow_axes` cross the slow network; None for the first ones, where there is one.
    """
    slow = sizes if slow_axes is None else slow_axes
    for axis in slow:
        if axis not in [*sizes]:
            hint = did_you_mean(axis, sizes)
            msg = f"dcn names the axis {shown(axis)}, which the mesh lacks.{hint}"
            raise MeshError(msg)
    attribute = "slice_index"
    if slow_axes is not None and len({*_groups(devices, attribute)}) == 1:
        attribute = "process_index"
    count = num_left = len({*_groups(devices, attribute)})
    crossing = dict.fromkeys(sizes, 1)
    for axis in slow:
        crossing[axis] = math.gcd(sizes[axis], num_left)
        num_left //= crossing[axis]
    if slow_axes is not None and num_left > 1:
        raise MeshError(
            f"the axes in dcn=, ({sizes_text({x: sizes[x] for x in slow})}), cannot be "
            f"divided among the {count} {_UNITS[attribute]} of the devices: their "
            f"sizes must together make {count}, or a multiple of it. Or leave out "
            "dcn=, if the network between them is fast."
        )
    fast_sizes = [size // crossing[axis] for axis, size in sizes.items()]
    by_process, slow_sizes = attribute == "process_index", [*crossing.values()]
    try:
        return _jax.device_grid(devices, fast_sizes, slow_sizes, by_process=by_process)
    except (NotImplementedError, ValueError, AssertionError) as error:
        msg = f"JAX finds no order of the devices for ({sizes_text(sizes)}): {error}"
        hint = "Choose other sizes, or an order of your own with devices=."
        raise MeshError(f"{msg.rstrip('.')}. {hint}") from error


def _groups(devices: Iterable[Any], attribute: str) -> list[int]:
    return [getattr(device, attribute, None) or 0 for device in devices]  # CPUs: None


@user_call
def virtual_devices(n: int) -> list[_jax.Device]:
    """Gives a machine without accelerators `n` CPU devices, to try meshes.

    Call it before anything accesses JAX's devices, but after `ml.initialize`. On a
    machine with TPUs or GPUs it changes nothing and warns. The option
    `--devices-per-process` of `python -m meshlayout.launch` overrides `n`.

    Args:
        n: The number of CPU devices of this process.

    Returns:
        The devices of JAX's default backend, including those of other processes.

    Raises:
        MeshError: If `n` is not a positive integer, or JAX runs with other CPU devices.

    Examples:
        >>> len(virtual_devices(8))
        8
    """
    n = count("n", n, where="virtual_devices", error=MeshError)
    _jax.check_joined("virtual_devices")
    launched = _jax.launcher_devices()
    if launched not in (None, n):
        _log.info("virtual_devices(%d): --devices-per-process=%d counts.", n, launched)
        n = launched
    _start(n)
    devices = jax.local_devices()
    platform = devices[0].platform
    existing = f"{len(devices)} {platform.upper()} device{'s' * (len(devices) != 1)}"
    if platform != "cpu":
        fact = f"virtual_devices({n}) has no effect here: JAX runs on {existing}."
        fix = "To try virtual CPU devices, set JAX_PLATFORMS=cpu before Python starts."
        warn(f"{fact} {fix}")
    elif len(devices) != n:
        fact = f"virtual_devices({n}) comes too late: JAX already runs with {existing}."
        fix = "Restart the kernel or process and call it before any other use of JAX"
        mesh = "make a mesh of the devices that exist: create_mesh()"
        raise MeshError(f"{fact} {fix}, or {mesh}.")
    return jax.devices()


def _start(n: int) -> None:
    """Starts JAX's backends, if they have not started, with `n` CPU devices."""
    try:
        jax.config.update("jax_num_cpu_devices", n)
    except RuntimeError:  # "... should be updated before backends are initialized"
        return
    # XLA's CPU client runs collectives, and pieces of matrix products, in NPROC
    # threads. With fewer threads than waiting devices, queued steps deadlock. On one
    # device, more threads than cores make small products twice as slow.
    if n == 1 or os.environ.get("NPROC"):
        return
    os.environ["NPROC"] = str(2 * n)
    # Asking for the backend starts it; XLA reads NPROC once, then.
    if jax.default_backend() != "cpu":
        del os.environ["NPROC"]
