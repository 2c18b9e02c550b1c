"""What every built-in metric is: a frozen value whose accumulators are sums."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar, cast, dataclass_transform

import jax
import jax.numpy as jnp

from meshlayout.errors import MetricError
from meshlayout.metrics.total import Total


_Class = TypeVar("_Class", bound=type)

# Where an accumulator is not given. None would be taken for one by `jax.tree.map`.
EMPTY = cast(Any, object())


def setting(*, default: Any = dataclasses.MISSING) -> Any:
    """Returns a field for a metric's configuration, which is not an array."""
    return dataclasses.field(default=default, metadata={"static": True})


def accumulator(*, default: Any) -> Any:
    """Returns a field for a metric's state, which `_start` fills where it is EMPTY."""
    return dataclasses.field(default=default, repr=False, kw_only=True)


@dataclass_transform(frozen_default=True, field_specifiers=(setting, accumulator))
def metric_class(cls: _Class) -> _Class:
    """Makes a class a frozen dataclass and a pytree."""
    made = dataclass(frozen=True, eq=False)(cls)
    return cast(_Class, jax.tree_util.register_dataclass(made))


@dataclass(frozen=True, eq=False)
class Metric:
    """Base of the built-in metrics: an immutable value, and a pytree.

    What has been added so far is in the arrays; the configuration is in static
    fields. `update`, `merge` and `reset` return new metrics, and `merge` is
    associative, so that steps, shards and processes can be merged in any grouping.
    They run eagerly and inside jit, scan, vmap and shard_map, on inputs that lie on
    the mesh in any way.

    `weights` are per element: None, where all count, or an array of the shape of the
    elements or of their first dims. An element of weight 0 counts for nothing, NaN
    or not. Negative weights make no sense and are not looked for. Inputs of any
    dtype are summed in float32.
    """

    inputs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        fields = dataclasses.fields(self)
        if any(getattr(self, field.name) is EMPTY for field in fields):
            self._check()
            for name, empty in self._start().items():
                if getattr(self, name) is EMPTY:
                    object.__setattr__(self, name, empty)

    def _check(self) -> None:
        """Raises MetricError if the configuration is wrong."""

    def _start(self) -> dict[str, Any]:
        """Returns the empty accumulators by name."""
        raise NotImplementedError

    def compute(self) -> jax.Array:
        """Returns the value; NaN where nothing was counted."""
        raise NotImplementedError

    def merge(self, other: Self) -> Self:
        """Returns the metric of what this one and another have counted.

        Args:
            other: A metric of the same class and configuration.

        Raises:
            MetricError: If it is not.
        """
        if jax.tree.structure(self) != jax.tree.structure(other):
            msg = (
                f"{self!r} does not merge with {other!r}: both have to be of one class "
                "and configuration."
            )
            raise MetricError(msg)
        return self._merged(other)

    def _merged(self, other: Any) -> Self:
        return jax.tree.map(Total.merge, self, other, is_leaf=_is_total)

    def reset(self) -> Self:
        """Returns the empty metric of the same configuration."""
        settings = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.metadata.get("static")
        }
        return type(self)(**settings)

    def all_reduce(self, axis_name: str | tuple[str, ...]) -> Self:
        """Merges what the shards of a mesh axis have counted, inside shard_map.

        The shards are merged in the order of the axis. Where a metric is a sum,
        `jax.lax.psum` of it gives the same up to float32 rounding.

        Args:
            axis_name: The mesh axis, or several.

        Returns:
            The metric of all shards, the same on each.

        Example:
            >>> from jax.sharding import PartitionSpec as P
            >>> import meshlayout as ml
            >>> from meshlayout.metrics import Mean
            >>> mesh = ml.create_mesh({"batch": 8}).jax_mesh
            >>> def mean(x):
            ...     return Mean().update(x).all_reduce("batch").compute()
            >>> shards = jax.shard_map(
            ...     mean, mesh=mesh, in_specs=P("batch"), out_specs=P()
            ... )
            >>> float(jax.jit(shards)(jnp.arange(16.0)))
            7.5
        """
        size = jax.lax.psum(1, axis_name)
        index = jax.lax.axis_index(axis_name)

        # A sum with zeros is exact, and known to be the same on every shard.
        def gather(x: Any) -> jax.Array:
            x = jnp.asarray(x)
            mine = jnp.arange(size).reshape(-1, *[1] * x.ndim) == index
            slots = jnp.where(mine, x[None], jnp.zeros_like(x)[None])
            return jax.lax.psum(slots, axis_name)

        shards = jax.tree.map(gather, self)
        merged = jax.tree.map(lambda x: x[0], shards)
        for at in range(1, size):
            merged = merged.merge(jax.tree.map(lambda x, at=at: x[at], shards))
        return merged


def _is_total(node: Any) -> bool:
    return isinstance(node, Total)
