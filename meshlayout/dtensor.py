"""DTensor's spellings of what `Mesh` and `Layout` say in JAX's words.

For code that comes from TensorFlow's DTensor; the library does not use them. DTensor
calls a mesh axis a dim, and has methods for some things that are attributes here.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from meshlayout import _jax


if TYPE_CHECKING:
    from meshlayout._specs import DimSpec


class _MeshMembers(Protocol):
    """The members of a mesh that DTensor's names stand for."""

    @property
    def axis_names(self) -> tuple[str, ...]: ...
    @property
    def platform(self) -> str: ...
    def axis_size(self, axis: str) -> int: ...
    @property
    def devices(self) -> np.ndarray: ...
    @property
    def local_devices(self) -> list[_jax.Device]: ...
    @property
    def local_device_coords(self) -> list[tuple[int, ...]]: ...


class _LayoutMembers(Protocol):
    """The members of a layout that DTensor's names stand for."""

    @property
    def specs(self) -> "tuple[DimSpec, ...]": ...
    def shard_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]: ...
    def global_shape(self, shard_shape: Sequence[int]) -> tuple[int, ...]: ...


class DTensorMesh:
    """DTensor's names for the members of a `Mesh`."""

    __slots__ = ()

    @property
    def dim_names(self: _MeshMembers) -> tuple[str, ...]:
        """DTensor's name for `axis_names`."""
        return self.axis_names

    def dim_size(self: _MeshMembers, name: str) -> int:
        """DTensor's name for `axis_size`."""
        return self.axis_size(name)

    def contains_dim(self: _MeshMembers, name: str) -> bool:
        """DTensor's name for `name in mesh`."""
        return name in self.axis_names

    def device_type(self: _MeshMembers) -> str:
        """DTensor's name for `platform`, in capitals as it writes them."""
        return self.platform.upper()

    def global_device_ids(self: _MeshMembers) -> list[int]:
        """Returns the ids of all devices, in mesh order."""
        return [int(device.id) for device in self.devices.flat]

    def min_global_device_id(self: _MeshMembers) -> int:
        """Returns the smallest device id of the mesh."""
        return min(int(device.id) for device in self.devices.flat)

    def num_local_devices(self: _MeshMembers) -> int:
        """Returns how many of the devices belong to this process."""
        return len(self.local_devices)

    def local_device_ids(self: _MeshMembers) -> list[int]:
        """Returns the ids of the devices of this process, in mesh order."""
        return [int(device.id) for device in self.local_devices]

    def local_device_locations(self: _MeshMembers) -> list[dict[str, int]]:
        """Returns the coordinates by axis of the devices of this process."""
        return [
            dict(zip(self.axis_names, coords, strict=True))
            for coords in self.local_device_coords
        ]


class DTensorLayout:
    """DTensor's names for the members of a `Layout`."""

    __slots__ = ()

    @property
    def sharding_specs(self: _LayoutMembers) -> "list[DimSpec]":
        """DTensor's name for `specs`."""
        return list(self.specs)

    def local_shape_from_global_shape(
        self: _LayoutMembers, global_shape: Sequence[int]
    ) -> tuple[int, ...]:
        """DTensor's name for `shard_shape`."""
        return self.shard_shape(global_shape)

    def global_shape_from_local_shape(
        self: _LayoutMembers, local_shape: Sequence[int]
    ) -> tuple[int, ...]:
        """DTensor's name for `global_shape`."""
        return self.global_shape(local_shape)
