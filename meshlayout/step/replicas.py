"""Over which mesh axes a batch's rows are sharded."""

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshlayout import _jax


@dataclass(frozen=True)
class Replicas:
    """The mesh axes over which a batch's rows are sharded.

    Attributes:
        mesh: The mesh.
        axes: Their names; none where the batch is not sharded.
    """

    mesh: Mesh | None
    axes: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many shards the batch has."""
        return (
            1 if self.mesh is None else math.prod(self.mesh.shape[a] for a in self.axes)
        )

    @property
    def is_explicit(self) -> bool:
        """Whether the mesh has Explicit axes."""
        types = () if self.mesh is None else self.mesh.axis_types
        return jax.sharding.AxisType.Explicit in types

    def constrain(self, x: jax.Array, dim: int) -> jax.Array:
        """Shards a dim over the replicas, and leaves the others to the compiler."""
        if self.mesh is None or not self.axes:
            return x
        others = None if self.is_explicit else PartitionSpec.UNCONSTRAINED
        entries: list[Any] = [others] * x.ndim
        entries[dim] = self.axes
        return _jax.constrain(x, NamedSharding(self.mesh, PartitionSpec(*entries)))
