"""Variables in host memory: how they are stored, and how a replica gets at them."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


# The memory of a host that its devices can read and write.
HOST_MEMORY = "pinned_host"


@dataclass(frozen=True)
class HostVariable:
    """A variable in host memory, an input of a step.

    Attributes:
        shape: Its whole shape.
        dim: The dim that is sharded over the replicas, which is not dim 0 of a variable
            but may be of its slices; None if each has a copy.
        axis: The mesh axis of the replicas.
        num_replicas: How many there are.
    """

    shape: tuple[int, ...]
    dim: int | None
    axis: str
    num_replicas: int

    @classmethod
    def of(cls, value: Any) -> "HostVariable | None":
        """Returns how an array is stored; None if it is not in host memory."""
        sharding = getattr(value, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return None
        if sharding.memory_kind != HOST_MEMORY:
            return None
        axes = list(sharding.spec)
        dim = next((dim for dim, axis in enumerate(axes) if axis is not None), None)
        (axis,) = sharding.mesh.axis_names
        return cls(tuple(value.shape), dim, axis, sharding.mesh.size)

    @property
    def spec(self) -> PartitionSpec:
        """How it is divided among the replicas."""
        if self.dim is None:
            return PartitionSpec()
        return PartitionSpec(*[None] * self.dim, self.axis)

    @property
    def slices(self) -> "HostVariable":
        """One slice of it along dim 0."""
        dim = None if self.dim is None else self.dim - 1
        return dataclasses.replace(self, shape=self.shape[1:], dim=dim)

    def gather(self, x: jax.Array) -> jax.Array:
        """Returns the whole of which each replica has a shard."""
        if self.dim is None:
            return x
        return jax.lax.all_gather(x, self.axis, axis=self.dim, tiled=True)

    def shard(self, x: jax.Array) -> jax.Array:
        """Returns this replica's shard of what all replicas have whole."""
        if self.dim is None:
            return x
        size = x.shape[self.dim] // self.num_replicas
        start = jax.lax.axis_index(self.axis) * size
        return jax.lax.dynamic_slice_in_dim(x, start, size, axis=self.dim)

    def sum(self, x: jax.Array) -> jax.Array:
        """Returns this replica's shard of the sum over all replicas."""
        if self.dim is None:
            return jax.lax.psum(x, self.axis)
        return jax.lax.psum_scatter(
            x, self.axis, scatter_dimension=self.dim, tiled=True
        )


def find_hosted(values: Sequence[Any]) -> dict[int, HostVariable]:
    """Returns the variables in host memory, by index among the leaves of all."""
    leaves = enumerate(jax.tree.leaves(list(values)))
    pairs = ((index, HostVariable.of(leaf)) for index, leaf in leaves)
    return {index: variable for index, variable in pairs if variable is not None}


def hosted_specs(specs: list[Any], hosted: dict[int, HostVariable]) -> list[Any]:
    """Returns the specs of all variables, those in host memory as they are stored."""
    leaves, treedef = jax.tree.flatten(specs)
    return treedef.unflatten(
        [hosted[i].spec if i in hosted else spec for i, spec in enumerate(leaves)]
    )


def without_host(values: Sequence[Any]) -> list[Any]:
    """Returns values to trace for: of those in host memory, shapes and dtypes."""
    return jax.tree.map(
        lambda leaf: (
            leaf
            if HostVariable.of(leaf) is None
            else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        ),
        list(values),
    )
