"""The mesh axis that code exchanges shards along: that of the step that traces it."""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from meshlayout import _checks
from meshlayout._batches import BATCH_AXES
from meshlayout.errors import LayoutError, LayoutWarning, MeshError, warn
from meshlayout.mesh import Mesh, as_mesh


T = TypeVar("T")

# Who asks for which axes, and to pass how many microbatches, if it is of interest.
asked_axes: ContextVar[dict[str, tuple[str, int]]] = ContextVar("asked_axes")


@dataclass(frozen=True)
class MeshAxis:
    """A mesh axis of at least two devices, along which shards are exchanged."""

    name: str
    size: int
    mesh: jax.sharding.Mesh | AbstractMesh

    def shard_map(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any, *others: str
    ) -> Callable[..., Any]:
        """Returns a function that runs on each device's shards along this axis.

        Specs name this axis and `others` alone: the rest stay with the compiler, so
        that rows may be sharded over `batch` and heads over `model` as elsewhere.
        """
        # `check_vma` would refuse scans whose carry starts as a constant.
        options: Any = {"axis_names": {self.name, *others}, "check_vma": False}
        specs: Any = {"in_specs": in_specs, "out_specs": out_specs}
        mapped = jax.shard_map(function, mesh=self.mesh, **specs, **options)
        return jax.jit(mapped)  # outside of jit, JAX wants all axes in the specs

    def lay(self, x: jax.Array, entries: Mapping[int, Any]) -> jax.Array:
        """Constrains dims of an array to mesh axes; nothing is said of the others."""
        free = PartitionSpec.UNCONSTRAINED
        spec = PartitionSpec(*(entries.get(dim, free) for dim in range(x.ndim)))
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def shift(self, shards: T, steps: int) -> T:
        """Returns the shards of the devices so many places before this one, in a ring.

        Each leaf sends one collective-permute; 0 steps, or a whole round, send nothing.
        """
        if steps % self.size == 0:
            return shards
        pairs = [(i, (i + steps) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.name, pairs), shards)


def find_axis(
    name: str, mesh: Mesh | jax.sharding.Mesh | None, where: str, passes: int = 1
) -> MeshAxis:
    """Returns an axis of a mesh; its size is 1 if there is nobody to exchange with.

    Without a mesh, it is that of the step that traces this, or of `jax.set_mesh`. If
    that lacks the axis, a model with code on shards runs as on one device, and warns if
    another axis may be meant. Raises MeshError inside of `shard_map` over the axis.
    """
    if not isinstance(name, str):
        raise MeshError(f"{where}: axis must be one name, got {_checks.shown(name)}.")
    asked_axes.get({})[name] = where, passes
    ambient = jax.sharding.get_abstract_mesh()
    others = [x for x, n in ambient.shape.items() if n > 1 and x not in BATCH_AXES]
    if mesh is not None:
        as_mesh(mesh).axis_size(name)
    elif others and name not in ambient.shape and not asked_axes.get(None):
        fact = f"{where}: the mesh {dict(ambient.shape)} has no axis {name!r} to send"
        warn(f"{fact} along. If that is intended, add it with size 1.", LayoutWarning)
    found = ambient if mesh is None else as_mesh(mesh).jax_mesh
    found = ambient if found.shape == ambient.shape else found  # with Manual axes, too
    if name in ambient.manual_axes:
        fact = f"{where}: inside shard_map over {name!r}, every device has only its own"
        raise MeshError(f"{fact} shard. Call it outside, on whole arrays.")
    return MeshAxis(name, found.shape.get(name, 1), found)


def on_auto_axes(
    function: Callable[..., Any], axis: MeshAxis, specs: Any, *operands: Any
) -> Any:
    """Returns `function(axis, *operands)`, computed on Auto axes of the mesh.

    On Explicit ones, layouts would be parts of types. There, the results have `specs`.
    """
    types, auto = axis.mesh.axis_types, {AxisType.Explicit: AxisType.Auto}
    if axis.size == 1 or AxisType.Explicit not in types:
        return function(axis, *operands)
    mesh = axis.mesh.update(axis_types=tuple(auto.get(x, x) for x in types))
    run = jax.sharding.auto_axes(
        functools.partial(function, replace(axis, mesh=mesh)),
        axes=tuple(axis.mesh.explicit_axes),
        out_sharding=jax.tree.map(functools.partial(NamedSharding, axis.mesh), specs),
    )
    return jax.jit(run)(*operands)


def require(where: str, passes: object, fact: str, fix: str = "") -> None:
    """Raises a LayoutError that states a fact, and the fix, unless a check passes."""
    if not passes:
        raise LayoutError(f"{where}: {fact}.{fix and ' '}{fix}")


def nearest(value: int, numbers: int | Sequence[int]) -> str:
    """Returns a sentence with the numbers next to a value, or multiples of a number."""
    if isinstance(numbers, int):
        numbers = range(numbers, value + numbers + 1, numbers)
    below, above = ([n for n in numbers if s * n < s * value] for s in (1, -1))
    return f"Nearest that would: {' and '.join(map(str, below[-1:] + above[:1]))}."
