"""A named grid of devices: `Mesh`, and how one is renamed and divided.

`Mesh` wraps a `jax.sharding.Mesh` and adds what JAX leaves to the user: names that are
checked, arithmetic on axes, errors that name the axis, a text that reads back exactly,
and a picture. `mesh_creation` makes one of what a user writes, which `_axes` parses.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AxisType

import meshlayout
from meshlayout import _jax, _render
from meshlayout._axes import (
    check_devices,
    check_names,
    parse_mesh,
)
from meshlayout._checks import shown
from meshlayout._device_groups import UNITS, axes_across, process_notes
from meshlayout.errors import MeshError, did_you_mean


if TYPE_CHECKING:
    from meshlayout.layout import Layout


class Value:
    """An immutable value: fields are set once, through `__dict__`.

    A frozen dataclass would do the same with a message that says less.
    """

    def __setattr__(self, name: str, value: object) -> None:
        msg = (
            f"a {type(self).__name__} is immutable; make another one instead of "
            f"setting {name!r}."
        )
        raise AttributeError(msg)

    def __delattr__(self, name: str) -> None:
        msg = f"a {type(self).__name__} is immutable; {name!r} cannot be deleted."
        raise AttributeError(msg)


@dataclass(init=False, repr=False, unsafe_hash=True)
class Mesh(Value):
    """A named grid of devices.

    An immutable value around a `jax.sharding.Mesh`. Two meshes are equal if they have
    the same devices in the same places, the same axis names and the same axis types. A
    JAX mesh is not equal to the `Mesh` around it. Use `create_mesh` to make one.

    Args:
        mesh: The `jax.sharding.Mesh` to wrap, or a `Mesh`.

    Attributes:
        jax_mesh: The `jax.sharding.Mesh`, for any JAX function that takes one.
        shape: The size of each axis by name, in order; read-only.

    Raises:
        MeshError: If `mesh` is neither, has no axes or no devices, an axis name is not
            a plain string, or the devices are repeated or of several platforms.

    Example:
        >>> from meshlayout import create_mesh
        >>> mesh = create_mesh({"batch": 2, "model": 4})
        >>> mesh
        Mesh(batch=2, model=4)
        >>> mesh.coords(5)
        (1, 1)
    """

    jax_mesh: jax.sharding.Mesh
    shape: Mapping[str, int] = field(compare=False)

    def __init__(self, mesh: "Mesh | jax.sharding.Mesh") -> None:
        if isinstance(mesh, Mesh):
            mesh = mesh.jax_mesh
        if not isinstance(mesh, jax.sharding.Mesh):
            msg = (
                "expected a Mesh or a jax.sharding.Mesh, got "
                f"{shown(mesh)}. Make one with create_mesh({{'batch': 8}})."
            )
            raise MeshError(msg)
        _jax.check_joined("Mesh")
        self.__dict__.update(jax_mesh=mesh, shape=_checked_shape(mesh))

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
    def strides(self) -> tuple[int, ...]:
        """The distance in the flattened mesh between neighbors along each axis.

        Example:
            >>> from meshlayout import create_mesh
            >>> create_mesh({"a": 2, "b": 2, "c": 2}).strides
            (4, 2, 1)
        """
        sizes = tuple(self.shape.values())
        return tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))

    @property
    def device_kind(self) -> str:
        """The kind of the devices, such as `"TPU v5 lite"` or `"cpu"`."""
        return self.devices.flat[0].device_kind

    @property
    def platform(self) -> str:
        """The platform of the devices: `"cpu"`, `"gpu"` or `"tpu"`."""
        return self.devices.flat[0].platform

    @property
    def is_multi_process(self) -> bool:
        """Whether the devices belong to more than one process."""
        return bool(self.process_axes)

    @property
    def process_axes(self) -> tuple[str, ...]:
        """The axes along which devices belong to different processes."""
        return axes_across(self.jax_mesh, "process_index")[0]

    @property
    def slice_axes(self) -> tuple[str, ...]:
        """The axes that cross the slow network between slices of devices.

        A slice is what JAX says is connected by a fast network: a slice of a TPU pod,
        or the GPUs of a host.
        """
        return axes_across(self.jax_mesh, "slice_index")[0]

    @property
    def local_devices(self) -> list[_jax.Device]:
        """The devices of this process, in mesh order."""
        return list(self.jax_mesh.local_devices)

    @property
    def local_device_coords(self) -> list[tuple[int, ...]]:
        """The coordinates of the devices of this process, in mesh order."""
        return [self.coords(device) for device in self.local_devices]

    # DTensor's names, for code that comes from TensorFlow; not used in the library.

    dim_names = axis_names

    def contains_dim(self, name: str) -> bool:
        """DTensor's name for `name in mesh`."""
        return name in self

    def device_type(self) -> str:
        """DTensor's name for `platform`, in capitals as it writes them."""
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
        return [
            dict(zip(self.shape, coords, strict=True))
            for coords in self.local_device_coords
        ]

    def axis_size(self, axis: str | Iterable[str]) -> int:
        """Returns the number of devices along one axis, or along several together.

        Raises:
            MeshError: If the mesh has no such axis.

        Example:
            >>> from meshlayout import create_mesh
            >>> mesh = create_mesh({"batch": 2, "model": 4})
            >>> mesh.axis_size("model"), mesh.axis_size(("batch", "model"))
            (4, 8)
        """
        return math.prod(self.shape[name] for name in self._check_axes(axis))

    dim_size = axis_size  # DTensor's name

    # Because of __getitem__, Python would otherwise try to iterate by mesh[0], mesh[1].
    __iter__ = None

    def __contains__(self, axis: object) -> bool:
        return axis in self.axis_names

    def coords(self, device: _jax.Device | int) -> tuple[int, ...]:
        """Returns the coordinates of a device, one per axis.

        Args:
            device: A device of the mesh, or its index in the flattened mesh.

        Raises:
            MeshError: If the mesh has no such device.
        """
        if isinstance(device, (int, np.integer)) and not isinstance(device, bool):
            if not 0 <= device < self.size:
                msg = (
                    f"device index {device} is out of range: {self!r} has devices "
                    f"0 to {self.size - 1}."
                )
                raise MeshError(msg)
            flat = int(device)
        else:
            # By identity: a device of another backend may have the same id.
            indices = [i for i, held in enumerate(self.devices.flat) if held is device]
            if not indices:
                text = repr(device) if hasattr(device, "platform") else shown(device)
                msg = (
                    f"{text} is not a device of {self!r}, whose devices are "
                    f"{self._devices_text()}."
                )
                raise MeshError(msg)
            (flat,) = indices
        return tuple(map(int, np.unravel_index(flat, tuple(self.shape.values()))))

    def unravel_index(self) -> list[dict[str, int]]:
        """Returns the coordinates of every device by axis, in mesh order.

        Example:
            >>> from meshlayout import create_mesh
            >>> create_mesh({"batch": 2, "model": 4}).unravel_index()[5]
            {'batch': 1, 'model': 1}
        """
        return [
            dict(zip(self.shape, self.coords(index), strict=True))
            for index in range(self.size)
        ]

    # Other meshes.

    def __getitem__(self, axes: str | tuple[str, ...]) -> "Mesh":
        """Returns the sub-mesh along some axes, at coordinate 0 of the others.

        Args:
            axes: One axis, or a tuple of axes, in the order of the result.

        Raises:
            MeshError: If an axis is unknown or repeated.

        Example:
            >>> from meshlayout import create_mesh
            >>> create_mesh({"batch": 2, "model": 4})["model"]
            Mesh(model=4)
        """
        names = self._check_axes(axes)
        if not names:
            msg = f"a sub-mesh of {self!r} needs at least one axis."
            raise MeshError(msg)
        return self._regrouped([(axis, (axis,)) for axis in names])

    def rename(self, names: Mapping[str, str]) -> "Mesh":
        """Returns the same mesh with other names for some axes.

        Args:
            names: New names by old name.

        Raises:
            MeshError: If an axis is unknown, or two would have the same name.

        Example:
            >>> from meshlayout import create_mesh
            >>> create_mesh({"batch": 2, "model": 4}).rename({"batch": "data"})
            Mesh(data=2, model=4)
        """
        if not isinstance(names, Mapping):
            msg = (
                f"rename takes new names by old name, as {{'batch': 'data'}}, got "
                f"{shown(names)}."
            )
            raise MeshError(msg)
        self._check_axes(tuple(names))
        return self._regrouped(
            [(names.get(axis, axis), (axis,)) for axis in self.shape]
        )

    def merge(self, axes: Iterable[str], name: str) -> "Mesh":
        """Returns a mesh in which several axes are merged into one.

        Use this to call `data` and `fsdp` together `batch`. The merged axis takes the
        position of the leftmost one, and runs through the devices in the order of
        `axes`, the first of them slowest.

        Args:
            axes: The axes to merge, slowest first.
            name: The name of the merged axis.

        Raises:
            MeshError: If an axis is unknown or repeated, or the axes differ in type.

        Example:
            >>> from meshlayout import create_mesh
            >>> create_mesh({"data": 2, "fsdp": 2, "model": 2}).merge(
            ...     ("data", "fsdp"), "batch"
            ... )
            Mesh(batch=4, model=2)
        """
        merged = self._check_axes(axes)
        if not merged:
            msg = f"merge takes the axes of {self!r} to merge, got none."
            raise MeshError(msg)
        types = {axis: self._axis_type(axis) for axis in merged}
        if len(set(types.values())) > 1:
            text = ", ".join(f"{axis}: {kind.name}" for axis, kind in types.items())
            msg = (
                f"the axes to merge in {self!r} have different axis types ({text}); a "
                "merged axis has only one."
            )
            raise MeshError(msg)
        leftmost = next(axis for axis in self.shape if axis in merged)
        return self._regrouped(
            [
                (name, merged) if axis == leftmost else (axis, (axis,))
                for axis in self.shape
                if axis == leftmost or axis not in merged
            ]
        )

    def layout(self, *specs: Any, memory_kind: str | None = None) -> "Layout":
        """Returns `Layout(specs, self)`: the short form, one argument per dim.

        Args:
            specs: One entry per dim, as for `Layout`.
            memory_kind: As for `Layout`.

        Raises:
            LayoutError: As for `Layout`.

        Example:
            >>> from meshlayout import create_mesh
            >>> create_mesh({"batch": 8}).layout("batch", None)
            Layout([batch, unsharded], Mesh(batch=8))
        """
        # Through the package: the module of layouts is above this one.
        return meshlayout.Layout(specs, self, memory_kind=memory_kind)

    # Text, pickle, equality.

    def to_string(self) -> str:
        """Returns the mesh as a readable line, which `from_string` reads back exactly.

        Example:
            >>> from meshlayout import create_mesh
            >>> create_mesh({"batch": 2, "model": 4}).to_string()
            'batch=2,model=4|auto,auto|cpu:0-7'
        """
        axes = ",".join(f"{name}={size}" for name, size in self.shape.items())
        types = ",".join(kind.name.lower() for kind in self.axis_types)
        return f"{axes}|{types}|{self._devices_text()}"

    @classmethod
    def from_string(cls, text: str) -> "Mesh":
        """Returns the mesh that `to_string` wrote, on the devices with the same ids.

        Raises:
            MeshError: If the text was not written by `to_string`, or a device does not
                exist here.
        """
        names, sizes, types, devices = parse_mesh(text)
        grid = np.array(devices, dtype=object).reshape(sizes)
        return cls(jax.sharding.Mesh(grid, names, axis_types=types))

    def __repr__(self) -> str:
        parts = [self._axes_text()]
        for attribute, unit in UNITS.items():
            names, count = axes_across(self.jax_mesh, attribute)
            if names:
                parts.append(f"{', '.join(names)} across {count} {unit}")
        return f"Mesh({'; '.join(parts)})"

    def _repr_html_(self) -> str:
        return _render.picture_html(*self._picture())

    def _picture(self) -> tuple[str, _render.Picture, list[str]]:
        """Returns a title, the devices, and lines on the processes."""
        crossed = [
            " and ".join(
                unit
                for attribute, unit in UNITS.items()
                if name in axes_across(self.jax_mesh, attribute)[0]
            )
            for name in self.axis_names
        ]
        picture = _render.mesh_picture(
            self.axis_names, [*self.shape.values()], self.global_device_ids(), crossed
        )
        devices = f"{self.platform.upper()} device{'s' * (self.size != 1)}"
        return f"{self!r}: {self.size} {devices}", picture, self._process_notes()

    def _process_notes(self) -> list[str]:
        """Returns a line on which devices each process has; none for one process."""
        return process_notes(self.jax_mesh)

    def __copy__(self) -> "Mesh":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Mesh":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Mesh.from_string, (self.to_string(),)

    # Inside.

    def _axes_text(self) -> str:
        """Returns axes and sizes alone, the same on any number of processes."""
        return ", ".join(f"{name}={size}" for name, size in self.shape.items())

    def _devices_text(self) -> str:
        ids = _render.ranges_text(self.global_device_ids())
        return f"{self.platform}:{ids}"

    def _check_axes(self, axes: str | Iterable[str]) -> tuple[str, ...]:
        if isinstance(axes, str) or not isinstance(axes, Iterable):
            axes = (axes,)
        names = tuple(axes)
        for name in names:
            if name not in self.axis_names:
                hint = did_you_mean(name, self.shape)
                msg = f"{self!r} has no axis {shown(name)}.{hint}"
                raise MeshError(msg)
        if len(set(names)) < len(names):
            repeated = next(name for i, name in enumerate(names) if name in names[:i])
            msg = f"axis {repeated!r} of {self!r} is given twice."
            raise MeshError(msg)
        return names

    def _axis_type(self, axis: str) -> AxisType:
        return self.axis_types[self.axis_names.index(axis)]

    def _regrouped(self, groups: Sequence[tuple[str, tuple[str, ...]]]) -> "Mesh":
        """Returns a mesh whose axes are groups of the axes of this one.

        Args:
            groups: The name of each new axis, and the axes that it consists of, slowest
                first. Axes of no group are dropped, at coordinate 0.
        """
        names = tuple(name for name, _ in groups)
        check_names(names)
        used = [axis for _, axes in groups for axis in axes]
        order = [*used, *(axis for axis in self.shape if axis not in used)]
        devices = self.devices.transpose([self.axis_names.index(a) for a in order])
        sizes = [self.axis_size(axes) for _, axes in groups]
        devices = devices.reshape([*sizes, -1])[..., 0]
        types = tuple(self._axis_type(axes[0]) for _, axes in groups)
        return Mesh(jax.sharding.Mesh(devices, names, axis_types=types))


@functools.lru_cache(maxsize=1024)
def _checked_shape(mesh: jax.sharding.Mesh) -> Mapping[str, int]:
    """Returns sizes by name, or raises MeshError for a JAX mesh that cannot be wrapped.

    Cached, as every layout that comes out of JAX wraps its mesh again.
    """
    if not mesh.axis_names:
        msg = "the mesh has no axes; make one with create_mesh({'batch': 8})."
        raise MeshError(msg)
    check_names(mesh.axis_names)
    if not mesh.size:
        msg = f"the mesh {mesh} has no devices; a mesh needs at least one."
        raise MeshError(msg)
    check_devices(list(mesh.devices.flat))
    return MappingProxyType(dict(mesh.shape))


def as_mesh(value: Any) -> Mesh:
    """Returns a user's mesh as a `Mesh`.

    Raises:
        MeshError: If it is neither a `Mesh` nor a `jax.sharding.Mesh`.
    """
    return value if isinstance(value, Mesh) else Mesh(value)
