"""`PerReplica`: one value for each replica, held as one array on the mesh.

The replicas' values are the shards of one global array, as in a batch. Values with
fewer rows than others are padded to the same shape, and a mask marks real rows. Where
replicas agree, `run` returns a plain, replicated array, which stands for an equal value
on each replica.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from meshlayout import _batches, _checks
from meshlayout._annotations import Leaf, PyTree
from meshlayout.arrays import to_numpy
from meshlayout.collectives import DistributedValues, ReduceOp
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
    """One value per replica, as `Strategy.run` takes and returns it.

    Compute with the values in `run`; a strategy's `reduce`, `gather` and
    `local_results` turn them into plain arrays. As a pytree of `array` and `mask`, it
    passes through jit, but `jax.tree.map` changes the mask, too.

    Attributes:
        array: The replicas' values, concatenated along dim 0 and sharded over the
            replicas: shape (replicas * n, ...) for values of shape (n, ...), and
            (replicas,) for scalars.
        mask: Shape (replicas * n,), float32, laid out like the array: 1 for real rows,
            which come first on each replica, 0 for padding; None without padding.
        num_replicas: The number of replicas.
        is_scalar: Whether the replicas' values are scalars.
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
    def values(self) -> tuple[jax.Array, ...]:
        """The values of this process's replicas, in order, without padding."""
        parts = self._local_parts(self.array)
        if self.is_scalar:
            return tuple(part[0] for part in parts)
        if self.mask is None:
            return tuple(parts)
        counts = [int(np.sum(mask)) for mask in self._local_parts(self.mask)]
        return tuple(part[:n] for part, n in zip(parts, counts, strict=True))

    def _local_parts(self, array: jax.Array) -> list[jax.Array]:
        """Returns the rows of each of this process's replicas, on their devices."""
        shards, rows = sorted_shards(array), array.shape[0] // self.num_replicas
        if shards and all(shard.data.shape[0] == rows for shard in shards):
            return [shard.data for shard in shards]
        return list(jnp.split(jnp.asarray(array), self.num_replicas))

    def __setitem__(self, index: object, value: Leaf) -> None:
        # Flax calls this for `variable[...] = 0` outside of `run`.
        values = self.array.reshape(self.num_replicas, *self.shape)
        rows = values.at[:, index].set(value).reshape(self.array.shape)
        self.array = jax.device_put(rows, self.array.sharding)

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        msg = f"a value of {self.num_replicas} replicas was used as one array. Combine "
        msg += "it first, with strategy.reduce('SUM', value, axis=None) or strategy."
        msg += "gather(value, axis=0), or compute in strategy.run. A train step"
        raise StrategyError(f"{msg} takes ml.distribute_dataset(source, mesh, ...).")

    # Python's own errors do not say what to do; NumPy would make an array of objects,
    # and any value would be true.
    __jax_array__ = __array__ = __float__ = __bool__ = __getitem__ = _refuse
    __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __truediv__ = _refuse

    def __format__(self, spec: str) -> str:
        return self._refuse() if spec else repr(self)

    def __repr__(self) -> str:
        if not isinstance(self.array, jax.Array) or isinstance(self.array, Tracer):
            return f"PerReplica({self.array!r}, num_replicas={self.num_replicas})"
        lines = (f"  {index}: {value!r}" for index, value in enumerate(self.values))
        return "PerReplica:{\n" + ",\n".join(lines) + "\n}"


def sorted_shards(array: jax.Array) -> list[Any]:
    """Returns the shards of this process in the order of their rows."""
    # Arrays of NumPy and traced ones have none.
    is_placed = isinstance(array, jax.Array) and not isinstance(array, Tracer)
    shards = array.addressable_shards if is_placed else ()
    return sorted(shards, key=lambda shard: [x.start or 0 for x in shard.index])


def check_replicas(value: PerReplica, mesh: Mesh, where: str) -> None:
    """Raises StrategyError for a value of another number of replicas."""
    if value.num_replicas != mesh.size:
        msg = f"{where}: the value has {value.num_replicas} replicas, but this "
        raise StrategyError(f"{msg}strategy {mesh.size}: it is another strategy's.")


def replica_layout(mesh: Mesh, rank: int) -> Layout:
    """Returns the layout of a `PerReplica`'s array of a given rank."""
    return Layout([REPLICA_AXIS, *[None] * (rank - 1)], mesh)


def per_replica(values: Sequence[Any], mesh: Mesh) -> PerReplica:
    """Makes a `PerReplica` of one array per local device; pads those of fewer rows."""
    arrays, mask = list(map(jnp.atleast_1d, values)), None
    counts = list(map(len, arrays))
    rows = max(counts)
    if min(counts) < rows:
        masks = [jnp.float32(np.arange(rows) < count) for count in counts]
        mask = _joined(masks, mesh)
        arrays = [jnp.asarray(_batches.pad_rows(x, rows)) for x in arrays]
    is_scalar, array = not jnp.ndim(values[0]), _joined(arrays, mesh)
    return PerReplica(array, mask, num_replicas=mesh.size, is_scalar=is_scalar)


def _joined(parts: Sequence[jax.Array], mesh: Mesh) -> jax.Array:
    """Returns one array whose shards are these parts, one per local device."""
    shape = (mesh.size * parts[0].shape[0], *parts[0].shape[1:])
    sharding = replica_layout(mesh, len(shape)).sharding
    placed = list(map(jax.device_put, parts, mesh.local_devices))
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)


# From values of replicas to arrays that are whole on every device.

_UNEVEN = "the replicas' values have different shapes, as in a short last batch"


@functools.partial(jax.jit, static_argnames=("op", "axis"))
def reduce(value: PerReplica, *, op: ReduceOp, axis: int | None) -> jax.Array:
    """Combines the values of all replicas; see `Strategy.reduce`."""
    dim = None if axis is None else _dim(axis, value)
    x, mask = value.array.reshape(value.num_replicas, *value.shape), value.mask
    axes, is_real = 0 if dim is None else (0, dim + 1), None
    combine = getattr(jnp, op.value.lower())
    if mask is not None:
        if dim != 0:
            msg = f"reduce: {_UNEVEN}: give axis=0 to reduce over rows."
            raise StrategyError(msg)
        is_real = mask.reshape(*x.shape[:2], *[1] * (x.ndim - 2)) > 0
        # Padding may hold NaN; a copy of a real row changes no maximum.
        x = jnp.where(is_real, x, value.array[jnp.argmax(mask)])
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        return combine(x, axes, where=is_real)
    extreme = combine(x, axes)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        # An all-reduce between devices may drop a NaN, which jnp.max does not.
        extreme = jnp.where(jnp.isnan(x).any(axes), jnp.nan, extreme)
    return extreme


def gather(value: PerReplica, axis: int) -> jax.Array:
    """Concatenates the values of all replicas; see `Strategy.gather`."""
    dim = _dim(axis, value)
    if value.mask is None:
        parts = jnp.split(value.array, value.num_replicas) if dim else [value.array]
        return jnp.concatenate(parts, axis=dim)
    if dim or isinstance(value.array, Tracer):
        raise StrategyError(f"gather: {_UNEVEN}: use axis=0, outside of jit.")
    return jnp.take(value.array, np.flatnonzero(to_numpy(value.mask)), axis=0)


def _dim(axis: int, value: PerReplica) -> int:
    try:
        return range(len(value.shape))[axis]
    except (IndexError, TypeError):
        msg = f"each replica's value has shape {value.shape}, and no dim for {axis=}."
        hint = "Write reduce(..., axis=None), or local_results(value)."
        raise StrategyError(f"{msg} {hint}") from None


def on_each(
    function: Callable[..., jax.Array], value: PyTree, mesh: Mesh, **how: Any
) -> PyTree:
    """Calls a function with each value; the results are whole on every device."""
    where = function.__name__

    def call(leaf: Leaf) -> jax.Array:
        own = leaf if isinstance(leaf, PerReplica) else _copies(leaf, mesh, where)
        check_replicas(own, mesh, where)
        x = function(own, **how)
        if isinstance(x, Tracer):
            return x
        x = jax.device_put(x, mesh.layout(...).with_rank(x.ndim).sharding)
        # Virtual devices share threads: collectives in a queue can block each other.
        return jax.block_until_ready(x) if mesh.platform == "cpu" else x

    return jax.tree.map(call, value, is_leaf=is_per_replica)


def local_results(value: PyTree, mesh: Mesh) -> tuple[PyTree, ...]:
    """Returns the values of this process's replicas; see `Strategy.local_results`."""
    leaves, treedef = jax.tree.flatten(value, is_leaf=is_per_replica)

    def parts(leaf: Leaf) -> Sequence[Any]:
        if isinstance(leaf, PerReplica):
            check_replicas(leaf, mesh, "local_results")
            return leaf.values
        copies = {shard.device: shard.data for shard in sorted_shards(leaf)}
        return [copies.get(device, leaf) for device in mesh.local_devices]

    columns = list(map(parts, leaves))
    rows = [[x[i] for x in columns] for i in range(len(mesh.local_devices))]
    return tuple(map(treedef.unflatten, rows))


def _copies(leaf: Leaf, mesh: Mesh, where: str) -> PerReplica:
    """Returns a plain value as an equal value on each replica."""
    is_placed = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    if mesh.size > 1 and is_placed and not leaf.is_fully_replicated:
        msg = f"{where} got {_checks.shown(leaf)} that is sharded, but combines values "
        msg += "of replicas. Compute with a sharded array as with any array."
        raise StrategyError(msg)
    x = jnp.asarray(leaf)
    copies = jnp.concatenate([jnp.atleast_1d(x)] * mesh.size)
    return PerReplica(copies, num_replicas=mesh.size, is_scalar=not x.ndim)


def is_per_replica(leaf: object) -> bool:
    """Returns whether a leaf of a tree is a value of replicas."""
    return isinstance(leaf, PerReplica)
