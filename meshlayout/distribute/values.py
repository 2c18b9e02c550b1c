"""`PerReplica`: one value for each replica, held as one array on the mesh.

The replicas' values are the shards of one global array, which is what a batch is
already: nothing is copied when a batch becomes one value per replica, or when values
of rows become an array again. Values with fewer rows than others are padded to the
same shape, and a mask says which rows are real.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from meshlayout import _batches
from meshlayout._annotations import Leaf
from meshlayout.collectives import DistributedValues
from meshlayout.errors import StrategyError
from meshlayout.layout import Layout
from meshlayout.mesh import Mesh


# The mesh axis of replicas: one that shards batches.
REPLICA_AXIS = "batch"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["array", "mask"],
    meta_fields=["num_replicas", "is_scalar"],
)
@dataclass(eq=False, repr=False)
class PerReplica(DistributedValues):
    """A value of each replica, as `Strategy.run` takes and returns them.

    Use a strategy's `reduce`, `gather` or `local_results` to get plain arrays, and
    compute with values in `run`. As a pytree it is its `array` and `mask`, so it passes
    through jit; `jax.tree.map` would change the mask as well.

    Attributes:
        array: The replicas' values one after another along dim 0, sharded over the
            replicas: shape (replicas * n, ...) for values of shape (n, ...), and
            (replicas,) for scalars.
        mask: Of shape (replicas * n,), float32, laid out like the array: 1 for real
            rows, which come first on each replica, and 0 for padding. None if there is
            no padding.
        num_replicas: The number of replicas.
        is_scalar: Whether the replicas' values are scalars.

    Example:
        >>> import jax.numpy as jnp
        >>> PerReplica(jnp.array([1.0, 2.0]), num_replicas=2, is_scalar=True)
        PerReplica:{
          0: Array(1., dtype=float32),
          1: Array(2., dtype=float32)
        }
    """

    array: jax.Array
    mask: jax.Array | None = None
    num_replicas: int = field(kw_only=True)
    is_scalar: bool = field(default=False, kw_only=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one replica's value, padding included."""
        rows, *rest = self.array.shape
        return () if self.is_scalar else (rows // self.num_replicas, *rest)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self.array.dtype

    @property
    def values(self) -> tuple[jax.Array, ...]:
        """The values of this process's replicas, in order, without padding.

        Raises:
            StrategyError: If rows are padded and this is inside a compiled function,
                where the number of real rows is not known.
        """
        parts = _local_parts(self.array, self.num_replicas)
        if self.is_scalar:
            return tuple(part[0] for part in parts)
        if self.mask is None:
            return tuple(parts)
        if isinstance(self.array, Tracer):
            msg = (
                "the replicas may have different numbers of rows, which is not known "
                "inside a compiled function: call local_results outside of it, or "
                "reduce along axis=0."
            )
            raise StrategyError(msg)
        masks = _local_parts(self.mask, self.num_replicas)
        pairs = zip(parts, masks, strict=True)
        return tuple(part[: int(np.asarray(mask).sum())] for part, mask in pairs)

    def __setitem__(self, index: object, value: Leaf) -> None:
        # What Flax calls for `variable[...] = 0`, outside of `run`.
        if index is not ...:
            _refusing("__setitem__")(self)
        whole = jnp.broadcast_to(jnp.asarray(value, self.dtype), self.shape)
        rows = jnp.stack([whole] * self.num_replicas).reshape(self.array.shape)
        self.array = jax.device_put(rows, self.array.sharding)

    def __format__(self, spec: str) -> str:
        return _refusing("__format__")(self) if spec else str(self)

    def __getattr__(self, name: str) -> NoReturn:
        # Of arrays, as `x.sum()`. The loss of a step is often used so.
        msg = f"a PerReplica has no attribute {name!r}: it is not one array. {_WAY_OUT}"
        raise AttributeError(msg)

    def __repr__(self) -> str:
        array = self.array
        if not isinstance(array, jax.Array) or isinstance(array, Tracer):
            return f"PerReplica({array!r}, num_replicas={self.num_replicas})"
        first = 0  # the index of this process's first replica
        if not array.is_fully_addressable:
            start = min(s.index[0].start or 0 for s in array.addressable_shards)
            first = start * self.num_replicas // array.shape[0]
        lines = (f"  {first + i}: {value!r}" for i, value in enumerate(self.values))
        return "PerReplica:{\n" + ",\n".join(lines) + "\n}"


_WAY_OUT = (
    "Combine it first, with strategy.reduce('SUM', value, axis=None) or "
    "strategy.gather(value, axis=0), or compute in a function that strategy.run calls."
)


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: PerReplica, *_: object, **__: object) -> NoReturn:
        msg = (
            f"a value of {self.num_replicas} replicas was used as one array ({name}). "
            f"{_WAY_OUT}"
        )
        raise StrategyError(msg)

    refuse.__name__ = name
    return refuse


# Without these, Python's and JAX's own errors name neither replicas nor a way out.
_BINARY = "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift"
_OTHERS = """lt le gt ge neg pos abs invert round getitem iter len bool contains
float int complex index array jax_array"""
_NAMES = [*_BINARY.split(), *(f"r{name}" for name in _BINARY.split()), *_OTHERS.split()]
for _name in _NAMES:
    setattr(PerReplica, f"__{_name}__", _refusing(f"__{_name}__"))


def _local_parts(array: jax.Array, num_replicas: int) -> list[jax.Array]:
    """Returns the rows of each of this process's replicas, as they are on devices."""
    if isinstance(array, Tracer):
        return list(jnp.split(array, num_replicas))
    rows = array.shape[0] // num_replicas
    shards = getattr(array, "addressable_shards", ())  # on the host, there are none
    devices = array.sharding.device_set if shards else ()
    if len(devices) == num_replicas and all(s.data.shape[0] == rows for s in shards):
        shards = sorted(shards, key=lambda shard: shard.index[0].start or 0)
        return [shard.data for shard in shards]
    return list(jnp.split(jnp.asarray(array), num_replicas))  # made by hand


def check_replicas(value: PerReplica, mesh: Mesh, where: str) -> None:
    """Raises StrategyError for a value of another strategy."""
    sharding = getattr(value.array, "sharding", None)
    if value.num_replicas == mesh.size and (
        isinstance(value.array, Tracer)
        or getattr(sharding, "mesh", None) is mesh.jax_mesh  # nearly always
        or sharding is None
        or len(sharding.device_set) != mesh.size  # made by hand, for JAX to spread
        or sharding.device_set == set(mesh.devices.flat)
    ):
        return
    msg = (
        f"{where}: the value is of {value.num_replicas} replicas, and this strategy "
        f"has {mesh.size}, or on other devices: it is another strategy's."
    )
    raise StrategyError(msg)


def replica_layout(mesh: Mesh, rank: int) -> Layout:
    """Returns the layout of a `PerReplica`'s array of a given rank."""
    return Layout([REPLICA_AXIS, *[None] * (rank - 1)], mesh)


def per_replica(values: Sequence[Any], mesh: Mesh) -> PerReplica:
    """Makes a `PerReplica` of the values of this process's replicas.

    Args:
        values: One array for each local device of the mesh, in mesh order. They may
            differ in their numbers of rows alone; shorter ones are padded.
        mesh: The strategy's mesh, with one axis.
    """
    arrays = [jnp.asarray(value) for value in values]
    if not arrays[0].ndim:
        scalars = _joined([x[None] for x in arrays], mesh)
        return PerReplica(scalars, num_replicas=mesh.size, is_scalar=True)
    counts, mask = [x.shape[0] for x in arrays], None
    if len(set(counts)) > 1:
        rows = max(counts)
        masks = [np.arange(rows) < count for count in counts]
        mask = _joined([jnp.asarray(x, "float32") for x in masks], mesh)
        arrays = [jnp.asarray(_batches.pad_rows(x, rows)) for x in arrays]
    return PerReplica(_joined(arrays, mesh), mask, num_replicas=mesh.size)


def _joined(parts: Sequence[jax.Array], mesh: Mesh) -> jax.Array:
    """Returns one array whose shards are these parts, one on each local device."""
    first, devices = parts[0], mesh.local_devices
    shape = (mesh.size * first.shape[0], *first.shape[1:])
    sharding = replica_layout(mesh, first.ndim).sharding
    placed = [jax.device_put(x, d) for x, d in zip(parts, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)
